"""The counts of two workers are those of one engine that served the same requests."""

from __future__ import annotations

import pytest

from hispec import LLM
from hispec.errors import RequestError
from hispec.metrics.prometheus import render_prometheus
from hispec.workers.totals import sum_stats
from tests.workers.support import linux
from tests.workers.test_outputs import GREEDY, PROMPTS, SPECULATIVE, generate

pytestmark = linux
# Not what is tentative: a check is left out where no row has drafts, which depends on the rest of the batch.
SAME = ("tokens", "committed", "drafted", "draft_kept", "rounds", "accept_length_histogram")
SAME += ("finished", "finished_by_reason", "errors", "num_layers")
SUMS = ("tentative", "accepted", "check_kept", "check_corrected", "verify_corrected", "row_layer_passes")
TIMES = ("queue_time_s", "prefill_time_s", "ttft_s", "tpot_s", "e2e_s", "inter_token_s", "token_gap_s")


def test_two_workers_count_what_one_engine_counts(one: LLM, two: LLM) -> None:
    found = []
    for llm in (one, two):
        llm.set_speculative(SPECULATIVE)
        llm.reset_stats()
        generate(llm, GREEDY)
        with pytest.raises(RequestError):
            llm.add([], GREEDY, "empty")
        found.append(llm.stats())
        llm.set_speculative(None)
    alone, both = found
    assert {name: both[name] for name in SAME} == {name: alone[name] for name in SAME}
    for name in SUMS:
        assert both[name] == sum(each[name] for each in both["workers"]) > 0, name
    for name in TIMES:  # how long it took differs, of how many does not
        assert sum(both[name]["counts"]) == sum(alone[name]["counts"]) > 0, name
        assert both[name]["sum"] == pytest.approx(sum(each[name]["sum"] for each in both["workers"]))
    assert both["finished"] == len(PROMPTS) == both["finished_by_reason"]["length"]
    assert both["errors"]["refused"] == 1
    assert both["ttft_s"]["sum"] == pytest.approx(both["queue_time_s"]["sum"] + both["prefill_time_s"]["sum"])
    text = render_prometheus(both).decode()
    assert f"hispec_tokens_total {float(both['tokens'])}" in text
    two.reset_stats()
    assert two.stats()["errors"]["refused"] == 0


def test_workers_need_not_have_the_same_controls(one: LLM) -> None:
    """As of one that has another plan yet, or has just started."""
    stats = one.stats()
    goodput = {"rounds": 3, "rounds_by_plan": {"plain": 2, "ngram K=4": 1}, "decision": {"plan": "plain"}}
    more = {"rounds": 4, "rounds_by_plan": {"plain": 4}, "probe_rounds": 1, "decision": None}
    late = {"rounds": None, "rounds_by_plan": {"plain": 1}}
    for first, second in [({}, goodput), (goodput, {}), (goodput, late)]:
        control = sum_stats([stats | {"control": first}, stats | {"control": second}])["control"]
        assert control["rounds"] == 3 and control["decision"] == {"plan": "plain"}
        assert control["rounds_by_plan"]["ngram K=4"] == 1
    without = {name: value for name, value in stats.items() if name != "control"}
    both = sum_stats([without, stats | {"control": goodput}, stats | {"control": more}])
    assert both["control"]["rounds_by_plan"] == {"plain": 6, "ngram K=4": 1}
    assert (both["control"]["rounds"], both["control"]["probe_rounds"]) == (7, 1)
    assert both["kv_blocks"] == 3 * stats["kv_blocks"]
