"""An LLM with several workers gives what one engine gives, through every method."""

from __future__ import annotations

import dataclasses
import enum
import json
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from hispec import LLM, SamplingParams
from hispec.cli import main
from hispec.engine.pretrained import Opened
from hispec.errors import ClosedError, ConfigError, RequestError
from hispec.jobs.rates import Rates
from hispec.loading.target_model import open_model
from hispec.outputs import RequestOutput
from hispec.trace.merge import merge
from hispec.trace.summary import summarize
from hispec.trace.writer import read_trace
from hispec.workers import pool as pool_module
from tests.workers.support import SMALL, pool

PROMPTS = [f"number {index} " * (1 + index % 3) for index in range(9)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=12, logprobs=1)
SPECULATIVE = {"draft": {"kind": "exit", "layer": 3}, "check": {"layer": 8}, "num_draft_tokens": 2}


def plain(output: RequestOutput) -> Any:
    """Without times, and without what depends on who ran beside."""
    return dataclasses.replace(
        output, outputs=[dataclasses.replace(each, metrics=None) for each in output.outputs]
    )


def generate(llm: LLM, params: Any = GREEDY, prompts: Any = PROMPTS) -> list[Any]:
    return [plain(output) for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SAMPLED.model_copy(update={"seed": 5, "n": 3}),
        GREEDY.model_copy(update={"stop": ["e", "\n"], "max_tokens": 40}),
    ],
    ids=["greedy", "seeded", "stops"],
)
def test_two_workers_give_what_one_engine_gives(one: LLM, two: LLM, params: SamplingParams) -> None:
    assert generate(two, params) == generate(one, params)


def test_tiers_come_from_workers_as_from_one_engine(tiny_path: Path) -> None:
    """But for what a check leaves to verify: a round in which no row has a draft does without it, and which
    rows are in a round differs."""
    params = GREEDY.model_copy(update={"tiers": True})
    found = []
    for number in (1, 2):
        with LLM(str(tiny_path), workers=number, speculative=SPECULATIVE, **SMALL) as llm:
            found.append(generate(llm, params, PROMPTS[:4]))
            deltas = list(llm.stream(PROMPTS[0], params))
            assert all(delta.tiers is not None for delta in deltas)
            (first,) = found[-1][0].outputs
            assert len([tier for delta in deltas for tier in delta.tiers or []]) == len(first.tiers) == 12
            assert all(each.outputs[0].tiers is None for each in generate(llm, GREEDY, PROMPTS[:2]))
    single, several = ([output.outputs[0] for output in each] for each in found)
    assert [each.token_ids for each in single] == [each.token_ids for each in several]
    for outputs in (single, several):
        assert all(len(output.tiers) == len(output.token_ids) for output in outputs)
        assert {tier for output in outputs for tier in output.tiers} == {"draft", "check", "verify"}
    drafts = [[[tier == "draft" for tier in each.tiers] for each in outputs] for outputs in (single, several)]
    assert drafts[0] == drafts[1]


@pytest.mark.slow
def test_seeds_that_nobody_gave_do_not_depend_on_who_serves(tiny_path: Path) -> None:
    wanted = None
    for number in (1, 3):
        with LLM(str(tiny_path), workers=number, seed=11, speculative=SPECULATIVE, **SMALL) as llm:
            assert llm.num_workers == number
            with pytest.raises(RequestError):  # takes no number
                llm.add("", SAMPLED, "empty")
            # Of a second call, too: requests count on.
            found = [generate(llm, SAMPLED, PROMPTS[:5]), generate(llm, SAMPLED, PROMPTS[5:])]
        wanted = wanted or found
        assert found == wanted


def test_a_process_does_not_open_what_the_llms_has_opened(
    tiny_path: Path, one: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would import for seconds what reads a config."""
    monkeypatch.setattr(pool_module, "open_model", lambda *_: open_model(tiny_path))
    with LLM(str(tiny_path.with_name("elsewhere")), workers=2, **SMALL) as llm:
        assert generate(llm) == generate(one)

    def unsendable() -> None:
        """Has no module to be found in."""

    assert pool_module._pickled(Opened(open_model(tiny_path), cast(Any, unsendable))) is None


def test_every_worker_takes_part_and_counts_are_their_sum(two: LLM, one: LLM) -> None:
    for llm in (one, two):
        llm.reset_stats()
        generate(llm)
    total, single, each = two.stats(), one.stats(), two.stats()["workers"]
    assert len(each) == 2 and all(part["finished"] > 0 for part in each)
    for name in ("finished", "tokens", "rounds", "row_layer_passes", "accept_length_histogram"):
        assert total[name] == single[name], name
    assert total["num_layers"] == single["num_layers"] and total["workers_replaced"] == 0
    assert Rates.of(total, None) == Rates.of(single, None)
    two.reset_stats()
    assert two.stats()["tokens"] == 0


def test_memory_counts_shared_weights_once(two: LLM, one: LLM) -> None:
    assert two.memory()["weights_bytes"] == one.memory()["weights_bytes"] > 0
    assert two.memory()["kv_bytes"] == 2 * one.memory()["kv_bytes"] > 0
    assert two.row_invariant == one.row_invariant


def test_streams_come_as_they_grow(two: LLM, one: LLM) -> None:
    params = GREEDY.model_copy(update={"max_tokens": 60, "ignore_eos": True})
    (wanted,) = generate(one, params, ["a stream"])
    deltas = list(two.stream("a stream", params))
    assert len(deltas) > 3 and "".join(delta.text for delta in deltas) == wanted.outputs[0].text
    assert deltas[-1].finish_reason == wanted.outputs[0].finish_reason
    for _ in two.stream("left early", GREEDY.model_copy(update={"max_tokens": 100})):
        break
    assert not two.has_unfinished() and generate(two, params, ["a stream"]) == [wanted]


def test_what_cannot_be_served_is_refused_in_the_same_words(two: LLM, one: LLM) -> None:
    def refusal(llm: LLM, *arguments: Any) -> str:
        with pytest.raises(RequestError) as caught:
            llm.add(*arguments)
        return str(caught.value)

    for arguments in [("x" * 300, GREEDY, "a"), ([5, 1000], GREEDY, "b"), (3, GREEDY, "c")]:
        assert refusal(two, *arguments) == refusal(one, *arguments)
    outputs = two.generate(["good", ""], GREEDY, use_tqdm=False)
    assert outputs[0].error is None and "empty" in (outputs[1].error or "")
    two.add("long", GREEDY.model_copy(update={"max_tokens": 100}), "a")
    assert "unfinished" in refusal(two, "again", GREEDY, "a")
    two.abort("a")


def test_an_aborted_request_ends_and_its_id_is_free(two: LLM, one: LLM) -> None:
    endless = GREEDY.model_copy(update={"max_tokens": 110, "ignore_eos": True})
    for name in "abcdefgh":  # more than there are rows: some wait in the pool
        two.add(name, endless, name)
    two.abort(list("abcdefgh"))
    assert not two.has_unfinished() and two.step() == []
    (wanted,) = generate(one, GREEDY, ["a"])
    two.add("a", GREEDY, "a")
    (output,) = two.step()
    assert output.request_id == "a" and plain(output).outputs == wanted.outputs


def test_aborted_requests_count_as_ended_whoever_had_them(two: LLM) -> None:
    two.reset_stats()
    endless = GREEDY.model_copy(update={"max_tokens": 110, "ignore_eos": True})
    names = [str(number) for number in range(40)]
    for name in names:
        two.add(name, endless, name)
    two.abort(names)
    stats = two.stats()
    assert (stats["finished"], stats["finished_by_reason"]["abort"]) == (40, 40)
    two.reset_stats()
    assert two.stats()["finished"] == 0


def test_a_request_may_be_of_classes_that_only_the_caller_knows(two: LLM, one: LLM) -> None:
    class Own(SamplingParams):
        extra: int = 3

    class Token(enum.IntEnum):
        A = 70

    params = Own(temperature=0.0, max_tokens=12, seed=4)
    prompts = [{"prompt_token_ids": [Token.A, 71, 72]}, "one", "two"]
    assert generate(two, params, prompts) == generate(one, GREEDY.model_copy(update={"seed": 4}), prompts)


def test_the_plan_changes_in_all_workers_or_in_none(two: LLM, one: LLM) -> None:
    wanted = generate(one)
    try:
        two.set_speculative(SPECULATIVE)
        two.reset_stats()
        assert generate(two) == wanted
        assert all(each["drafted"] > 0 for each in two.stats()["workers"])
        with pytest.raises(ConfigError, match=r"draft\.layer"):
            two.set_speculative({"draft": {"layer": 99}})
        two.reset_stats()
        assert generate(two) == wanted and two.stats()["drafted"] > 0
        two.add("a", GREEDY, "a")
        with pytest.raises(ConfigError, match="unfinished"):
            two.set_speculative(None)
        with pytest.raises(ConfigError, match="unfinished"):
            two.set_tracing(False)
        two.abort("a")
    finally:
        two.set_speculative(None)


def test_the_model_is_not_in_this_process(two: LLM) -> None:
    with pytest.raises(ConfigError, match="workers=2: the model is in other processes"):
        _ = two.decoder
    assert two.tokenizer is not None and pool(two).max_model_len == SMALL["max_model_len"]


def test_policies_choose_among_all_requests(tiny_path: Path, one: LLM) -> None:
    wanted = generate(one)
    with LLM(str(tiny_path), workers=2, scheduling={"policy": "sjf"}, **SMALL) as llm:
        assert generate(llm) == wanted
        assert [each["finished"] for each in llm.stats()["workers"]] in ([4, 5], [5, 4])


def test_each_worker_writes_a_trace_and_report_reads_them_as_one(tiny_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    old = tmp_path / "trace.7.jsonl"
    old.write_text('{"type": "trace",')
    other = tmp_path / "trace.8.jsonl"
    other.write_text("mine")
    with LLM(str(tiny_path), workers=2, trace=str(path), **SMALL) as llm:
        generate(llm)
        llm.set_tracing(False)
        generate(llm)
        tokens = llm.stats()["tokens"]
    assert not old.exists() and other.exists() and not path.exists()
    traces = [read_trace(tmp_path / f"trace.{number}.jsonl") for number in (0, 1)]
    merged = merge(traces)
    assert len({request.number for request in merged.requests}) == len(PROMPTS)
    assert [line.t for line in merged.rounds] == sorted(line.t for line in merged.rounds)
    summary = summarize(merged)
    assert summary["max_num_seqs"] == 4 and 2 * summary["tokens"] == tokens
    starts = [json.loads((tmp_path / f"trace.{n}.jsonl").open().readline())["started"] for n in (0, 1)]
    summed = tmp_path / "summary.json"
    assert main(["report", *(str(tmp_path / f"trace.{n}.jsonl") for n in (0, 1)), "--json", str(summed)]) == 0
    assert json.loads(summed.read_text())["tokens"] == summary["tokens"]
    later, own = traces[1].requests[0], merged.requests
    assert any(abs(each.arrival - later.arrival - starts[1] + starts[0]) < 1e-5 for each in own)


@pytest.mark.slow
def test_after_close_counts_can_be_read_and_nothing_runs(tiny_path: Path) -> None:
    llm = LLM(str(tiny_path), workers=2, **SMALL)
    generate(llm)
    llm.add("a", GREEDY, "a")
    llm.close()
    llm.close()
    assert llm.stats()["finished"] >= len(PROMPTS) and llm.memory()["weights_bytes"] > 0
    assert not llm.has_unfinished()
    for call in (
        llm.step,
        lambda: llm.generate("a"),
        lambda: llm.set_speculative(None),
        lambda: pool(llm).fingerprints(None),
    ):
        with pytest.raises(ClosedError):
            call()


def test_a_search_path_may_hold_what_is_no_text_and_a_predictor_must_be_one(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="length_predictor=5 is no LengthPredictor"):
        LLM(str(tiny_path), workers=2, length_predictor=cast("Any", 5), **SMALL)
    monkeypatch.setattr(sys, "path", [*sys.path, tiny_path])
    with LLM(str(tiny_path), workers=2, **SMALL) as llm:
        assert llm.num_workers == 2


@pytest.mark.slow
def test_one_worker_measures_for_all_where_a_plan_is_taken_later(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HISPEC_CACHE", str(tmp_path))
    plan = {"control": "goodput", "draft": {"kind": "ngram"}, "num_draft_tokens": 4}
    with LLM(str(tiny_path), workers=2, **SMALL) as llm:
        llm.set_speculative(plan)
        assert all("rounds_by_plan" in each["control"] for each in llm.stats()["workers"])
    assert capfd.readouterr().err.count("Measuring what each stage") == 1


@pytest.mark.slow
def test_each_worker_chooses_plans_for_itself_with_the_same_output(
    one: LLM, tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HISPEC_CACHE", str(tmp_path))
    plan = {"control": "goodput", "draft": {"kind": "ngram"}, "num_draft_tokens": 4}
    params = SAMPLED.model_copy(update={"max_tokens": 60, "ignore_eos": True, "seed": 3})
    with LLM(str(tiny_path), workers=2, speculative=plan, **SMALL) as llm:
        assert generate(llm, params) == generate(one, params)
        stats = llm.stats()
    decided = [sum(each["control"]["rounds_by_plan"].values()) for each in stats["workers"]]
    assert len(decided) == 2 and min(decided) > 0
    assert sum(stats["control"]["rounds_by_plan"].values()) == sum(decided)
    assert len(list((tmp_path / "latency").iterdir())) == 1  # the first one has measured for both
