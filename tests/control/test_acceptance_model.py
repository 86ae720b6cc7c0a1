"""What drafts are worth, estimated: without bias whatever the caps, of places and routes that were not tried
too, and forgotten in time."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from hispec.config import GoodputConfig, Plan
from hispec.control.acceptance_model import AcceptanceModel
from hispec.control.choice import Choice, Observation, Route, Shadow
from hispec.control.hazards import HazardTable, shift_log_odds, survival
from hispec.control.request_acceptance import RequestAcceptance

CONFIG = GoodputConfig(window=1e6, prior_weight=4.0)
EXIT, CHECKED, OTHER = Route("exit", 4, None, 8), Route("exit", 4, 15, 8, 4), Route("exit", 4, 20, 8, 4)
HAZARDS = np.array([0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5, 0.45])


def seen(
    route: int,
    kept: Sequence[int],
    caps: Sequence[int],
    numbers: Sequence[int] | None = None,
    **more: Sequence[int],
) -> Observation:
    """Cycles of a route, each of a row of its own; all that might be drafted is, unless it is said."""
    arrays = {name: np.array(values, np.int64) for name, values in more.items()}
    cycles = {
        "numbers": np.arange(len(kept)) if numbers is None else np.array(numbers),
        "caps": np.array(caps),
        "kept": np.array(kept),
    }
    drafted = arrays.pop("drafted", cycles["caps"])
    looked_up = arrays.pop("looked_up", np.zeros(len(kept), np.int64))
    return Observation(
        Choice(route, Plan(4, None, 8)),
        max(1, len(kept)),
        0.0,
        float("nan"),
        0,
        drafted=drafted,
        looked_up=looked_up,
        **cycles,
        **arrays,
    )


GATED = replace(CHECKED, is_gated=True)


def test_how_often_checks_go_on_is_counted_where_they_were_asked() -> None:
    """Rows whose places ran out, or whose R was reached, say nothing about the check that came last."""
    random, acceptance = np.random.default_rng(2), AcceptanceModel([CHECKED, GATED], CONFIG)
    before = acceptance.estimates().goes_on
    assert (before[0] == 1.0).all() and (before[1] == before[1, 0]).all() and before[1, 0] < 1.0
    chances = np.array([0.8, 0.5, 0.9])
    for index in range(400):
        most = random.integers(0, 4, 8)  # what a row has room for, which nobody asks beyond
        went_on = np.minimum(np.cumprod(random.random((8, 3)) < chances, axis=1).sum(axis=1), most)
        rows = {
            "tentative": np.full(8, 3),
            "accepted": np.full(8, 2),
            "went_on": went_on,
            "asked": np.minimum(went_on + 1, most),
        }
        one = seen(1, [1], [4], rows=list(range(8)), **{name: list(each) for name, each in rows.items()})
        acceptance.add(1, [one], index, 1, acceptance.estimates())
    estimates = acceptance.estimates()
    assert estimates.goes_on[1, :3] == pytest.approx(chances, abs=0.06)
    assert (estimates.goes_on[0] == 1.0).all()
    assert acceptance.stats(400.0)["routes"][str(GATED)]["goes_on"] == pytest.approx(chances, abs=0.06)


def kept_of(random: np.random.Generator, caps: np.ndarray) -> np.ndarray:
    right = random.random((len(caps), len(HAZARDS))) < HAZARDS
    return np.minimum(np.cumprod(right, axis=1).sum(axis=1), caps)


def by_chance(random: np.random.Generator, past: list[int]) -> np.ndarray:
    return random.integers(1, 9, 16)


def short(random: np.random.Generator, past: list[int]) -> np.ndarray:
    return np.where(random.random(16) < 0.9, 2, 8)


def by_the_past(random: np.random.Generator, past: list[int]) -> np.ndarray:
    """More where more was kept of late, as controllers do."""
    return np.clip(np.array((past or [4])[-16:]).mean() + random.integers(-1, 3, 16), 1, 8).astype(np.int64)


@pytest.mark.parametrize("caps_of", [by_chance, short, by_the_past])
def test_hazards_are_unbiased_however_caps_are_chosen(
    caps_of: Callable[[np.random.Generator, list[int]], np.ndarray],
) -> None:
    """And accepted / drafted is not: what stands behind the first wrong draft is never judged."""
    random, acceptance = np.random.default_rng(3), AcceptanceModel([EXIT], CONFIG)
    past: list[int] = []
    drafted = 0
    for now in range(1, 1500):
        caps = caps_of(random, past)
        kept = kept_of(random, caps)
        past += kept.tolist()
        drafted += int(caps.sum())
        acceptance.add(0, [seen(0, kept.tolist(), caps.tolist())], now, 1, acceptance.estimates())
    known = acceptance.kept.at_risk[0] > 400
    assert known[:3].all()
    assert np.abs(acceptance.estimates().kept[0] - HAZARDS)[known].max() < 0.04
    truth = survival(HAZARDS)[1:]
    assert np.abs(survival(acceptance.estimates().kept)[0, 1:] - truth)[known].max() < 0.03
    pooled = float(np.average(HAZARDS, weights=acceptance.kept.at_risk[0]))
    assert sum(past) / drafted < pooled - 0.05


def test_what_is_not_offered_counts_against_the_drafter_where_it_might_have_been() -> None:
    """Prompt lookup that finds something in half of all cycles, and then is right."""
    acceptance = AcceptanceModel([Route("ngram", 0, None, 4)], CONFIG)
    looked = [4, 0] * 500
    acceptance.add(
        0, [seen(0, looked, [4] * 1000, drafted=looked, looked_up=[1] * 1000)], 10, 10, acceptance.estimates()
    )
    estimates = acceptance.estimates()
    assert estimates.kept[0] == pytest.approx([0.5, 1.0, 1.0, 1.0], abs=0.02)
    assert survival(estimates.looked)[0, 1:] == pytest.approx([0.5] * 4, abs=0.02)


def test_a_hybrid_is_told_apart_by_who_drafted() -> None:
    acceptance = AcceptanceModel([Route("hybrid", 4, None, 8, num_exit_tokens=2)], CONFIG)
    looked_up = [1, 0, 0, 0] * 200
    drafted = [6, 2, 2, 2] * 200
    acceptance.add(
        0, [seen(0, [1] * 800, [8] * 800, drafted=drafted, looked_up=looked_up)], 1, 1, acceptance.estimates()
    )
    estimates = acceptance.estimates()
    assert estimates.found[0] == pytest.approx(0.25, abs=0.01)
    assert survival(estimates.looked)[0, [6, 7]] == pytest.approx([1.0, 0.0], abs=0.05)
    assert survival(estimates.computed)[0, 2] == 1.0


def test_a_drafter_that_always_drafts_is_known_to() -> None:
    acceptance = AcceptanceModel([EXIT, replace(EXIT, has_confidence=True)], CONFIG)
    assert np.array_equal(acceptance.estimates().computed[0], np.ones(8))
    assert acceptance.estimates().computed[1, 0] < 1.0


def test_counts_are_halved_by_the_window_and_by_what_contradicts_them() -> None:
    table = HazardTable(1, 2, window=100.0, weight=1.0)
    for now in range(1, 2001):
        table.add(0, np.array([1, 0, 1, 0]), np.array([1] * 4), now, 1)
    assert table.at_risk[0, 0] == pytest.approx(4 * 100 / np.log(2), rel=0.01)
    assert table.hazards(np.array([0.5]))[0, 0] == pytest.approx(0.5, abs=0.01)
    for now in range(2001, 2033):  # a third of the window: by decay alone it would be 0.4
        table.add(0, np.zeros(4, np.int64), np.array([1] * 4), now, 1)
    assert table.hazards(np.array([0.5]))[0, 0] < 0.3


def test_what_is_not_seen_for_long_is_remembered_but_gives_way() -> None:
    table = HazardTable(1, 1, window=10.0, weight=8.0)
    table.add(0, np.zeros(200, np.int64), np.ones(200, np.int64), 10, 10)
    remembered = table.hazards(np.array([0.9]))[0, 0]
    assert remembered < 0.1
    assert table.counts(110.0)[0] < 0.2 < 100 < table.counts(10.0)[0]
    table.add(0, np.ones(8, np.int64), np.ones(8, np.int64), 1000, 1)
    assert table.hazards(np.array([0.5]))[0, 0] > 0.5


@pytest.mark.parametrize("rounds", [1, 7, 64])
def test_many_rounds_at_once_are_what_they_are_one_by_one(rounds: int) -> None:
    random, config = np.random.default_rng(1), GoodputConfig(window=200.0, prior_weight=4.0)
    single, together = AcceptanceModel([EXIT], config), AcceptanceModel([EXIT], config)
    for now in range(rounds, 449, rounds):
        caps = random.integers(1, 9, (rounds, 16))
        kept = np.stack([kept_of(random, each) for each in caps])
        for at in range(rounds):
            single.add(
                0,
                [seen(0, kept[at].tolist(), caps[at].tolist())],
                now - rounds + at + 1,
                1,
                single.estimates(),
            )
        together.add(
            0,
            [seen(0, kept.reshape(-1).tolist(), caps.reshape(-1).tolist())],
            now,
            rounds,
            together.estimates(),
        )
    assert together.kept.at_risk[0] == pytest.approx(single.kept.at_risk[0], rel=0.15)
    assert together.estimates().kept[0] == pytest.approx(single.estimates().kept[0], abs=0.02)


def test_places_never_tried_take_after_the_last_ones() -> None:
    acceptance = AcceptanceModel([EXIT], GoodputConfig(window=1e6, prior_weight=16.0, prior_acceptance=0.1))
    acceptance.add(0, [seen(0, [3] * 900 + [0] * 100, [3] * 1000)], 1, 1, acceptance.estimates())
    hazards = acceptance.estimates().kept[0]
    assert hazards[:3] == pytest.approx([0.9, 1.0, 1.0], abs=0.02)
    assert 0.9 < hazards[4] <= hazards[3] < 1.0


def test_nothing_seen_is_the_prior() -> None:
    estimates = AcceptanceModel([EXIT, CHECKED], GoodputConfig(prior_acceptance=0.37)).estimates()
    assert estimates.kept == pytest.approx(np.full((2, 8), 0.37))
    assert estimates.accepted == pytest.approx(np.full(estimates.accepted.shape, 0.37))


def test_routes_that_were_never_run_are_predicted_from_exits_that_were_watched() -> None:
    acceptance = AcceptanceModel([EXIT, CHECKED, OTHER, Route("exit", 8, None, 8)], CONFIG)

    def shadow(layer: int, right: int, agreed: int) -> Shadow:
        return Shadow(layer, *(np.array([value]) for value in (200, right, 200, agreed)))

    for now in range(1, 30):  # exits 8, 15 and 20 are watched while 4 drafts
        acceptance.add_shadows(0, [shadow(8, 60, 0), shadow(15, 160, 120), shadow(20, 190, 80)], 10 * now, 1)
    estimates = acceptance.estimates()
    assert estimates.kept[3] == pytest.approx(np.full(8, 0.3), abs=0.05)  # right at 8
    assert estimates.kept[1] == pytest.approx(
        np.full(8, 0.6), abs=0.05
    )  # agreed with at 15, by drafts of this drafter
    assert estimates.kept[2] == pytest.approx(np.full(8, 0.4), abs=0.05)
    assert estimates.accepted[1, 0] == pytest.approx(0.8, abs=0.05)  # right at 15
    assert estimates.accepted[2, 0] == pytest.approx(0.95, abs=0.05)
    assert estimates.kept[0, 0] == pytest.approx(CONFIG.prior_acceptance)  # of the exit at 4 nothing was seen
    stats = acceptance.stats(300.0)
    assert stats["exits"]["15"]["right"] == pytest.approx(0.8)
    assert stats["exits"]["15"]["agreed"]["exit D=4"]["share"] == pytest.approx(0.6)
    assert stats["exits"]["8"]["counts"] > 1000


def test_routes_that_were_never_run_take_after_their_relatives() -> None:
    acceptance = AcceptanceModel([EXIT, CHECKED, OTHER, Route("adapter", 4, 15, 8, 4)], CONFIG)
    verified = {"rows": [0] * 100, "tentative": [9] * 100, "accepted": [9] * 80 + [0] * 20}
    acceptance.add(1, [seen(1, [8] * 90 + [0] * 10, [8] * 100, **verified)], 1, 1, acceptance.estimates())
    estimates, prior = acceptance.estimates(), CONFIG.prior_acceptance
    assert estimates.kept[2, 0] > 0.7  # the same drafter, checked elsewhere
    assert estimates.kept[0, 0] > 0.7
    assert estimates.accepted[3, 0] > 0.7  # the same check, of another drafter
    assert estimates.kept[3, 0] == pytest.approx(prior)
    assert estimates.accepted[2, 0] == pytest.approx(prior)


def test_verify_is_estimated_by_tentative_token() -> None:
    random, acceptance = np.random.default_rng(0), AcceptanceModel([CHECKED], CONFIG)
    tentative = random.integers(1, 10, 4000)
    right = random.random((4000, 9)) < 0.9 - 0.05 * np.arange(9)
    accepted = np.minimum(np.cumprod(right, axis=1).sum(axis=1), tentative)
    acceptance.add(
        0,
        [seen(0, [], [], rows=range(4000), tentative=tentative.tolist(), accepted=accepted.tolist())],
        1,
        1,
        acceptance.estimates(),
    )
    assert acceptance.estimates().accepted[0, :5] == pytest.approx(0.9 - 0.05 * np.arange(5), abs=0.04)


def test_optimism_grows_with_the_age_of_what_is_known_and_ends_where_it_is_seen_again() -> None:
    acceptance = AcceptanceModel([EXIT], GoodputConfig(window=50.0))
    acceptance.add(0, [seen(0, [1] * 40 + [0] * 160, [2] * 200)], 10, 10, acceptance.estimates())
    fresh, old = (acceptance.optimistic(now, 1.5).kept[0, 0] for now in (10.0, 2000.0))
    known = acceptance.estimates().kept[0, 0]
    assert known < fresh < known + 0.1 < old
    assert acceptance.estimates().kept[0, 0] == known  # however long ago
    acceptance.add_shadows(
        None, [Shadow(4, np.array([300]), np.array([270]), np.array([0]), np.array([0]))], 2000, 1
    )
    assert acceptance.optimistic(2000.0, 1.5).kept[0, 0] > 0.8  # what its exit would say now


def test_requests_are_known_by_what_they_do_better_or_worse_than_expected() -> None:
    requests = RequestAcceptance(2, 512.0, 8.0)
    requests.track([7, 9, 11])
    for now in range(1, 60):
        requests.decay(now)
        requests.add(
            0,
            np.array([7, 9, 9, 99]),
            np.array([4, 2, 2, 5]),
            np.array([4, 0, 0, 5]),
            np.array([2.0, 1.0, 1.0, 2.5]),
        )
    shift, tries = requests.shifts(0, [7, 9, 11, 99])
    assert shift[0] > 1.0
    assert shift[1] < -1.0
    assert shift[2:] == pytest.approx([0.0, 0.0])
    assert tries[2:] == pytest.approx([0.0, 0.0])
    assert requests.shifts(1, [7])[0][0] == 0.0  # another tier
    requests.decay(500)
    assert abs(requests.shifts(0, [7])[0][0]) < 0.1
    requests.forget(7)
    requests.forget(7)
    requests.track([12])  # in the place that is free
    assert len(requests) == 3
    assert requests.shifts(0, [12])[1][0] == 0.0
    assert shift_log_odds(np.array([0.5]), 1.0)[0] == pytest.approx(1 / (1 + np.exp(-1.0)))


def test_nothing_to_learn_changes_nothing_and_statistics_are_plain() -> None:
    acceptance = AcceptanceModel(
        [EXIT, CHECKED, Route("hybrid", 4, 15, 8, 2), Route("model", 0, None, 3)], CONFIG
    )
    before = acceptance.estimates()
    for route in range(4):
        acceptance.add(route, [seen(route, [], [])], 5, 1, before)
    assert np.array_equal(acceptance.estimates().kept, before.kept)
    assert acceptance.shares() == {}
    two = seen(
        1, [3, 0], [8, 8], rows=[0, 1], tentative=[5, 1], accepted=[3, 0], drafted=[4, 0], looked_up=[1, 1]
    )
    acceptance.add(1, [two], 6, 1, before)
    assert acceptance.shares() == {
        "exit D=4 C=15": pytest.approx({"draft_kept": 3 / 4, "tentative_accepted": 3 / 6})
    }, "kept over drafted: a row without a draft counts for nothing, a wrong draft's successors count"
    stats = json.loads(json.dumps(acceptance.stats(6.0), allow_nan=False))
    assert stats["routes"]["exit D=4 C=15"]["draft_counts"] > 0
    assert stats["routes"]["hybrid D=4 C=15"]["found"] == pytest.approx(0.3)
