"""What the controller says of its choices, what it forgets, and what it refuses."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from hispec import ConfigError
from hispec.config import GoodputConfig
from hispec.control.choice import Choice, Control, Observation, Route
from hispec.latency.model import LatencyModel
from tests.control.test_controller import LAWS, TWO, made

from ..helpers.scripted_control import ROUTES, Law, Machine, cpu_like


def test_many_rounds_told_of_at_once_lead_to_the_same_plan() -> None:
    """As the simulator does: as many rounds as the choice holds for."""
    machine, control = Machine(ROUTES, cpu_like(), LAWS), made()
    single = made()
    machine.run(single, range(4), 800)
    rounds = 0
    while rounds < 800:
        choice = control.choose(range(4), 1200)
        num = control.rounds_left
        assert num >= 1
        seen = [machine.round(choice, range(4)) for _ in range(num)]
        arrays = {
            name: np.concatenate([getattr(each, name) for each in seen])
            for name in ("numbers", "caps", "drafted", "kept", "looked_up", "rows")
        }
        arrays |= {
            name: np.concatenate([getattr(each, name) for each in seen]) for name in ("tentative", "accepted")
        }
        tokens, seconds = sum(each.tokens for each in seen), sum(each.seconds for each in seen)
        control.observe(Observation(choice, 4, 1200.0, seconds, tokens, num, **arrays))
        rounds += num
    assert control.stats()["probe_rounds"] <= 0.02 * rounds + 3
    assert control.stats()["shadow_rounds"] <= 0.02 * rounds + 1
    assert best_route(control, machine) == pytest.approx(best_route(single, machine), rel=0.04)


def best_route(control: Control, machine: Machine) -> float:
    """What its present plan is worth."""
    choice = control.choose(range(4), 1200)
    while choice.is_probe:
        control.observe(machine.round(choice, range(4)))
        choice = control.choose(range(4), 1200)
    return machine.fixed(choice.route, choice.plan, range(4), 500)


def test_it_says_when_a_choice_ends_with_a_round_under_way() -> None:
    machine, control = (
        Machine(TWO, cpu_like(), [Law(0.6), Law(0.6, found=0.3)]),
        made(TWO, config=GoodputConfig(interval=8, shadow_share=0.05)),
    )
    assert control.is_due
    last: Choice | None = None
    for _ in range(500):
        was_due = control.is_due
        choice = control.choose(range(2), 600)
        assert last is None or was_due or choice == last
        last = choice
        control.observe(machine.round(choice, range(2)))


def test_requests_that_end_are_forgotten() -> None:
    machine, control = Machine(TWO, cpu_like(), [Law(0.6), Law(0.6, found=0.3)]), made(TWO)
    for first in range(0, 400, 2):
        for _ in range(3):
            control.observe(machine.round(control.choose((first, first + 1), 600), (first, first + 1)))
        control.forget(first)
        control.forget(first + 1)
    control.forget(12345)
    assert control.stats()["acceptance"]["requests"] <= 2


def test_nobody_running_changes_nothing() -> None:
    control = made()
    choice = control.choose((), 0)
    assert choice == control.choose((), 0)
    assert not choice.is_probe
    assert control.stats()["decisions"] == 0
    assert control.stats()["decision"] is None


def test_plain_decoding_alone_is_a_plan_too() -> None:
    control = made(())
    assert control.choose([1, 2], 100) == Choice()
    control.observe(Observation(Choice(), 2, 100.0, 0.1, 2))
    assert control.stats()["decision"]["reason"] == "only plan"
    assert control.choose([1], 100).route is None


def test_every_decision_is_recorded_with_its_reason() -> None:
    records: list[dict[str, Any]] = []
    machine, control = Machine(ROUTES, cpu_like(), LAWS), made(on_decision=records.append)
    machine.run(control, range(4), 500)
    assert len(records) == control.stats()["decisions"]
    assert json.loads(json.dumps(records, allow_nan=False)) == records
    fields = {
        "type",
        "round",
        "route",
        "plan",
        "num_drafts",
        "num_checks",
        "rows",
        "context_tokens",
        "predicted",
        "measured",
        "previous",
        "reason",
    }
    assert set(records[0]) == {*fields, "is_probe", "alternatives", "acceptance"}
    assert records[0]["reason"] == "start"
    assert records[0]["previous"] is None
    assert {record["reason"] for record in records} <= {"start", "best", "kept: within margin", "probe"}
    assert all(record["is_probe"] == (record["reason"] in ("start", "probe")) for record in records[1:])
    assert all(after["previous"] == before["plan"] for before, after in pairwise(records))
    last = records[-1]
    assert 1 <= len(last["alternatives"]) <= 5
    assert [promised for _, promised in last["alternatives"]] == sorted(
        (promised for _, promised in last["alternatives"]), reverse=True
    )
    kept = [record for record in records if not record["is_probe"] and record["measured"]]
    assert np.median([record["predicted"] / record["measured"] for record in kept[-20:]]) == pytest.approx(
        1.0, abs=0.1
    )
    stats = json.loads(json.dumps(control.stats(), allow_nan=False))
    assert sum(stats["rounds_by_plan"].values()) == stats["rounds"] == 500
    assert 0.0 < stats["overhead_s"] < 500 * 5e-3


@pytest.mark.parametrize(
    ("route", "message"),
    [
        (Route("exit", 4, None, 0), r"most_drafts=0 must be 1 to 64"),
        (Route("exit", 4, None, 100), r"most_drafts=100 must be 1 to 64"),
        (Route("exit", 4, None, 4, 2), r"most_checks=2 must be at least 1, and 1 without a check tier"),
        (Route("exit", 4, 15, 4, 0), r"most_checks=0"),
        (Route("exit", 0, None, 4), r"draft_layer=0 must be the exit's layer"),
        (Route("ngram", 4, None, 4), r"draft_layer=4 must be .* 0 for others"),
        (Route("exit", 15, 4, 4), r"check_layer=4 must lie above draft_layer=15"),
        (TWO[0], r"routes\[2\] = exit D=4: is there twice"),
    ],
)
def test_impossible_routes_are_refused(route: Route, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made((*TWO, route))


def test_a_latency_model_without_a_stage_is_refused() -> None:
    stages = {name: stage for name, stage in cpu_like().stages.items() if name != "check/4-15"}
    with pytest.raises(ConfigError, match=r"no stage 'check/4-15'"):
        made(latency=LatencyModel(stages))
