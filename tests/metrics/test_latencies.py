"""Times and counts of requests under a clock that tests move: known steps and commits give known metrics."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ee_models.decoder import Decoder
from hispec.config import Plan
from hispec.engine import Engine
from hispec.errors import RequestError
from hispec.metrics.histogram import Histogram, mean
from hispec.metrics.table import BY_NAME, METRICS
from hispec.sampling_params import SamplingParams
from hispec.stats import RoundCounts, RoundTally, RowRound
from hispec.workers.totals import sum_stats
from tests.helpers.scripted import ScriptedDecoder
from tests.helpers.support import make_engine, random_prompts, run

STEP_S = 0.5


def successor(layer: int, position: int, token: int) -> Tensor:
    """All exits agree: after each token comes the next number, so that every draft is kept."""
    return torch.nn.functional.one_hot(torch.tensor((token + 1) % 50), 50).float()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """[now]; it stands still but for the test."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def step_through(engine: Engine, clock: list[float], later: Callable[[int], None] | None = None) -> None:
    """Every step takes STEP_S. later: called with the number of each step after it."""
    step = 0
    while engine.has_unfinished():
        schedule = engine._scheduler.schedule

        def scheduled(window: int, now_s: float, schedule: Any = schedule) -> Any:
            found = schedule(window, now_s)
            clock[0] += STEP_S  # after admission, before the round is read
            return found

        engine._scheduler.schedule = scheduled  # type: ignore[method-assign]
        try:
            engine.step()
        finally:
            engine._scheduler.schedule = schedule  # type: ignore[method-assign]
        step += 1
        if later is not None:
            later(step)


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def values_of(stats: dict[str, Any], name: str) -> dict[float, int]:
    """Counts by upper bound of their bucket, empty buckets left out."""
    bounds = [*BY_NAME[name].bounds, float("inf")]
    return {bound: count for bound, count in zip(bounds, stats[name]["counts"], strict=True) if count}


def test_rounds_of_four_tokens_give_known_times(clock: list[float]) -> None:
    """Two tiers with K = 3 commit 4 tokens a step: 12 tokens in 3 steps. The request came 2 s early."""
    engine = make_engine(ScriptedDecoder(successor), Plan(3, None, 3, 1))
    engine.add_request([1, 2, 3], params(12), arrival_s=clock[0] - 2.0)
    step_through(engine, clock)
    stats = engine.stats()
    assert stats["accept_length_histogram"] == [0, 0, 0, 0, 3]
    assert mean(stats["queue_time_s"]) == 2.0 and mean(stats["prefill_time_s"]) == STEP_S
    assert mean(stats["ttft_s"]) == 2.5 and mean(stats["e2e_s"]) == 2.0 + 3 * STEP_S
    # 12 tokens, the first at 0.5 s and the last at 1.5 s
    assert mean(stats["tpot_s"]) == pytest.approx(1.0 / 11)
    # 3 tokens came with the first, at no time of their own; 8 in two rounds of 0.5 s, 0.125 s each
    assert values_of(stats, "inter_token_s") == {0.0: 3, 0.25: 8}
    assert stats["inter_token_s"]["sum"] == pytest.approx(1.0)
    assert values_of(stats, "token_gap_s") == {0.5: 2} and stats["token_gap_s"]["sum"] == 1.0


def test_of_one_token_a_step_all_three_definitions_agree(clock: list[float]) -> None:
    engine = make_engine(ScriptedDecoder(successor), max_run_ms=0.0)
    engine.add_request([1, 2, 3], params(5))
    step_through(engine, clock)
    stats = engine.stats()
    assert stats["inter_token_s"] == stats["token_gap_s"] and mean(stats["inter_token_s"]) == STEP_S
    assert mean(stats["tpot_s"]) == STEP_S and values_of(stats, "inter_token_s") == {0.5: 4}


def test_a_request_that_waits_for_a_row_is_queued_so_long(clock: list[float]) -> None:
    """One row; the second request comes after the first step of four and waits for three."""
    engine = make_engine(ScriptedDecoder(successor), max_num_seqs=1, max_run_ms=0.0)
    engine.add_request([1, 2, 3], params(4))
    metrics = []
    depths = []

    def later(step: int) -> None:
        if step == 1:
            engine.add_request([4, 5], params(1))
        depths.append((engine.stats()["waiting"], engine.stats()["running"]))

    engine._recorder.record_request = lambda request, one: metrics.append(one)  # type: ignore[method-assign]
    step_through(engine, clock, later)
    first, second = metrics
    assert (first.queue_time_s, first.ttft_s, first.tpot_s, first.e2e_s) == (0.0, 0.5, 0.5, 2.0)
    assert (second.queue_time_s, second.prefill_time_s, second.ttft_s) == (1.5, 0.5, 2.0)
    assert second.tpot_s is None and sum(engine.stats()["tpot_s"]["counts"]) == 1
    assert depths == [(1, 1), (1, 1), (1, 1), (1, 0), (0, 0)]
    assert engine.stats()["queue_time_s"]["sum"] == 1.5


def test_metrics_of_requests_sum_to_the_histograms(clock: list[float], tiny_decoder: Decoder) -> None:
    engine = make_engine(tiny_decoder, Plan(3, 6, 2, 2), max_num_seqs=2)
    metrics: list[Any] = []
    engine._recorder.record_request = lambda request, one: metrics.append(one)  # type: ignore[method-assign]
    for number, prompt in enumerate(random_prompts((3, 20, 9, 40), seed=3)):
        engine.add_request(prompt, params(5 + number))
    step_through(engine, clock)
    stats = engine.stats()
    for name in ("queue_time_s", "prefill_time_s", "ttft_s", "tpot_s", "e2e_s"):
        assert stats[name]["sum"] == pytest.approx(sum(getattr(one, name) for one in metrics)), name
        assert sum(stats[name]["counts"]) == 4
    spread = sum(one.last_token_s - one.first_token_s for one in metrics)
    assert (
        stats["inter_token_s"]["sum"] == pytest.approx(spread) == pytest.approx(stats["token_gap_s"]["sum"])
    )
    assert sum(stats["inter_token_s"]["counts"]) == stats["tokens"] - 4


def test_an_aborted_request_has_no_end_to_end_time(clock: list[float]) -> None:
    engine = make_engine(ScriptedDecoder(successor))
    name = engine.add_request([1, 2, 3], params(9))
    engine.step()
    clock[0] += 7.0
    engine.abort(name)
    stats = engine.stats()
    assert sum(stats["ttft_s"]["counts"]) == 1 and not sum(stats["e2e_s"]["counts"])
    assert not sum(stats["token_gap_s"]["counts"]), "its end is no token"
    assert stats["finished_by_reason"] == {"stop": 0, "length": 0, "abort": 1, "error": 0}
    engine.reset_stats()
    stats = engine.stats()
    assert not any(
        sum(stats[each.name]["counts"])
        for each in METRICS
        if isinstance(stats.get(each.name), dict) and not each.label
    )


def test_work_does_not_grow_with_the_tokens_of_a_round(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two additions to histograms in a row's round, and five at most for a request besides."""
    calls = [0]
    observe = Histogram.observe

    def counted(self: Histogram, value: float, times: int = 1) -> None:
        calls[0] += 1
        observe(self, value, times)

    monkeypatch.setattr(Histogram, "observe", counted)
    counts = {}
    for drafts in (1, 7):
        engine = make_engine(ScriptedDecoder(successor), Plan(3, None, drafts, 1))
        engine.add_request([1, 2, 3], params(10 * (drafts + 1)))
        calls[0] = 0
        step_through(engine, clock)
        assert engine.stats()["rounds"] == 10
        counts[drafts] = calls[0]
    assert counts[1] == counts[7] <= 2 * 10 + 5


@pytest.mark.parametrize(
    "plan", [Plan(), Plan(3, None, 4, 1), Plan(3, 6, 2, 2), Plan(1, 2, 1, 1), Plan(4, 8, 1, 3)], ids=str
)
def test_counters_of_tiers_add_up(tiny_decoder: Decoder, plan: Plan) -> None:
    engine = make_engine(tiny_decoder, plan)
    run(engine, random_prompts((3, 20, 9), seed=5), params(20))
    stats = engine.stats()
    verify = stats["verify_corrected"] + stats["verify_bonus"] + stats["verify_undrafted"]
    assert stats["committed"] == stats["accepted"] + verify
    check = stats["check_corrected"] + stats["check_bonus"] + stats["check_undrafted"]
    if plan.check_layer is None:
        assert stats["check_judged"] == check == 0 and stats["tentative"] == stats["drafted"]
        assert stats["rounds"] == verify
    else:
        assert stats["tentative"] == stats["check_kept"] + check and check > 0
        assert (stats["check_judged"], stats["check_kept"]) == (stats["drafted"], stats["draft_kept"])
        assert stats["verify_corrected"] > 0
    lengths = stats["accept_length_histogram"]
    assert sum(length * count for length, count in enumerate(lengths)) == stats["committed"]
    assert (stats["verify_undrafted"] == stats["rounds"]) == plan.is_plain


def test_what_a_tier_puts_in_place_is_counted_as_that() -> None:
    counts = RoundCounts()
    # A check keeps 1 of 2 drafts, then both of 2; verify keeps 3 of 5 tentative ones.
    counts.add(RowRound(4, 5, 3, (2, 2), (1, 2), (False, True), has_check=True))
    assert (counts.check_judged, counts.check_kept, counts.check_corrected, counts.check_bonus) == (
        4,
        3,
        1,
        1,
    )
    assert (counts.verify_corrected, counts.verify_bonus) == (1, 0)
    # All: the check's own token is the last.
    counts.add(RowRound(3, 3, 3, (2,), (2,), (False,), has_check=True))
    assert (counts.verify_corrected, counts.verify_bonus, counts.check_bonus) == (1, 0, 2)
    counts.add(RowRound(3, 2, 2, (2,), (2,), (False,)))  # two tiers
    counts.add(RowRound(1))  # plain
    assert (counts.verify_corrected, counts.verify_bonus, counts.verify_undrafted) == (1, 1, 1)
    assert (counts.cycles, counts.drafted, counts.draft_kept) == (4, 8, 7)
    assert (counts.looked_up, counts.looked_up_kept) == (2, 2), "of what the second cycle had looked up"


def test_a_tally_adds_up_to_what_it_has_counted() -> None:
    """Rounds that were alike, and a round of whose tokens its request took but one: it had ended."""
    plain, speculated = RowRound(1), RowRound(3, 4, 2, (2, 2), (1, 1), (True, False), has_check=True)
    tally, one_by_one = RoundTally(), RoundCounts()
    for each, num_taken in ((plain, 1), (speculated, 3), (plain, 1), (speculated, 1)):
        tally.count([each], num_taken)
        one_by_one.add(each)
    one_by_one.tokens = 1 + 3 + 1 + 1
    assert tally.add_to(RoundCounts()) == one_by_one
    assert (one_by_one.rounds, one_by_one.committed, one_by_one.looked_up) == (4, 8, 4)


def test_two_workers_sum_to_one(clock: list[float]) -> None:
    """The same requests, one after the other, in one engine and dealt out to two."""
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [2]]

    def serve(engine: Engine, numbers: list[int]) -> Engine:
        for number in numbers:
            engine.add_request(prompts[number], params(4 + 3 * number), arrival_s=clock[0] - number)
            step_through(engine, clock)
        with pytest.raises(RequestError):
            engine.add_request([], params(1))
        return engine

    plan = Plan(3, 6, 2, 2)
    engines = [make_engine(ScriptedDecoder(successor), plan) for _ in range(3)]
    one = serve(engines[0], [0, 1, 2, 3]).stats()
    both = sum_stats([serve(engines[1], [0, 1]).stats(), serve(engines[2], [2, 3]).stats()])
    assert both["errors"].pop("refused") == 2 * one["errors"].pop("refused") == 2
    for metric in METRICS:
        if metric.kind != "gauge" and metric.unit != "seconds" and metric.name in one:
            assert both[metric.name] == one[metric.name], metric.name
        elif metric.kind == "histogram":
            assert both[metric.name]["counts"] == one[metric.name]["counts"], metric.name
            assert both[metric.name]["sum"] == pytest.approx(one[metric.name]["sum"]), metric.name
    assert both["num_layers"] == one["num_layers"]
    assert both["kv_blocks"] == 2 * one["kv_blocks"]
    assert sum(one["ttft_s"]["counts"]) == 4, "else nothing was compared"


def test_the_prefix_cache_and_kv_blocks_add_up(tiny_decoder: Decoder) -> None:
    engine = make_engine(tiny_decoder)
    prompt = random_prompts((33,), seed=2)[0]
    run(engine, [prompt], params(2))
    assert engine.stats()["cached_tokens"] == 0
    run(engine, [prompt], params(2))
    stats = engine.stats()
    assert (stats["cache_queried_tokens"], stats["cached_tokens"]) == (2 * 32, 32)
    assert stats["kv_blocks_cached"] >= 4
    assert stats["kv_blocks_used"] + stats["kv_blocks_cached"] + stats["kv_blocks_free"] == stats["kv_blocks"]


def test_values_lie_in_the_right_bucket() -> None:
    histogram = Histogram("ttft_s")
    assert mean(histogram.as_dict()) is None
    histogram.observe(0.2, 3)  # in (0.1, 0.25]
    histogram.observe(0.1)  # a bound is in its own bucket
    histogram.observe(5000.0)
    found = histogram.as_dict()
    counts = dict(zip([*BY_NAME["ttft_s"].bounds, None], found["counts"], strict=True))
    assert {bound: count for bound, count in counts.items() if count} == {0.1: 1, 0.25: 3, None: 1}
    assert mean(found) == pytest.approx((0.6 + 0.1 + 5000.0) / 5)
