"""Laws 1 to 3, 5 and 6 for rounds of static shape, which may run ahead of the host: eagerly, and from
captured graphs."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ee_models.decoder import Decoder
from hispec.config import Plan, SpeculativeConfig
from hispec.engine import Engine
from hispec.engine.step_loop import StepLoop
from hispec.sampling_params import SamplingParams
from tests.helpers.drafters import ALL, draft_decoder, drafter_engine
from tests.helpers.recorded_graphs import RecordedGraphs, recordable
from tests.helpers.support import PLANS, make_engine, random_prompts, run
from tests.helpers.sweeps import sweep
from tests.helpers.tiny import tiny_checkpoint

CPU = torch.device("cpu")
PROMPTS = random_prompts((1, 2, 7, 8, 9, 31, 33, 70))
SAMPLED = [
    SamplingParams(
        temperature=(0.9, 0.0)[number == 2],
        seed=7 + number,
        max_tokens=24 - number,
        repetition_penalty=1.2 if number % 2 else 1.0,
        top_k=20 if number % 3 else 0,
        min_p=0.01 if number % 4 == 1 else 0.0,
        top_p=0.8 if number in (3, 6) else 1.0,
        min_tokens=3 if number == 4 else 0,
        stop_token_ids=[17] if number == 4 else [],
        logit_bias={5: 3.0} if number == 5 else {},
    )
    for number in range(len(PROMPTS))
]
kinds = pytest.mark.parametrize("name", ALL)


@pytest.fixture(scope="module")
def draft_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    return tiny_checkpoint(
        tmp_path_factory.mktemp("draft") / "model", hidden=32, num_layers=2, vocab=250, seed=5, **special
    )


@pytest.fixture(scope="module")
def draft_model(draft_path: Path) -> Decoder:
    return draft_decoder(draft_path)


@pytest.fixture(scope="module")
def plain_sampled(tiny_decoder: Decoder) -> list[list[int]]:
    return run(make_engine(tiny_decoder), PROMPTS, SAMPLED)


@pytest.fixture(scope="module")
def torch_draft_model(draft_path: Path) -> Decoder:
    return recordable(draft_decoder(draft_path))


# ---- eagerly ----


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_gives_plain_decodings_output(
    tiny_decoder: Decoder, expected: list[list[int]], plan: Plan
) -> None:
    engine = make_engine(tiny_decoder, plan, is_static=True)
    assert run(engine, PROMPTS) == expected


@kinds
def test_every_drafter_gives_plain_decodings_output(
    tiny_decoder: Decoder, draft_model: Decoder, expected: list[list[int]], name: str
) -> None:
    engine = drafter_engine(tiny_decoder, ALL[name], draft_model, is_static=True)
    assert run(engine, PROMPTS) == expected
    assert engine.stats()["drafted"] > 0 and engine.stats()["drafter_failures"] == 0


@sweep("name", ALL, list(ALL)[1::2].__contains__)
def test_sampled_output_is_plain_sampled_decodings(
    tiny_decoder: Decoder, draft_model: Decoder, plain_sampled: list[list[int]], name: str
) -> None:
    engine = drafter_engine(tiny_decoder, ALL[name], draft_model, is_static=True)
    assert run(engine, PROMPTS, SAMPLED) == plain_sampled
    assert run(engine, PROMPTS[5:6], SAMPLED[5:6]) == plain_sampled[5:6], "alone or in a batch"


@sweep("name", ["ngram", "hybrid checks", "hybrid sure", "model checks", "tree checks"], 2)
def test_preemption_prefix_reuse_and_few_rows_change_nothing(
    tiny_decoder: Decoder, draft_model: Decoder, expected: list[list[int]], name: str
) -> None:
    engine = drafter_engine(
        tiny_decoder, ALL[name], draft_model, is_static=True, num_kv_blocks=15, max_prefill_tokens=5
    )
    assert run(engine, PROMPTS) == expected
    assert engine.stats()["preemptions"] > 0
    assert run(engine, PROMPTS[::-1]) == expected[::-1]
    assert engine.stats()["cached_tokens"] > 0
    few = drafter_engine(tiny_decoder, ALL[name], draft_model, is_static=True, max_num_seqs=3)
    assert run(few, PROMPTS) == expected


@sweep("name, abort_after", itertools.product(["ngram", "hybrid checks", "tree checks"], range(1, 9)), 3)
def test_aborts_leave_the_others_alone(
    tiny_decoder: Decoder, draft_model: Decoder, expected: list[list[int]], name: str, abort_after: int
) -> None:
    """A round of the aborted request may be in the air; another takes its row, and its blocks."""
    engine = drafter_engine(tiny_decoder, ALL[name], draft_model, is_static=True, num_kv_blocks=60)
    params = SamplingParams(temperature=0.0, max_tokens=24)
    ids = [engine.add_request(prompt, params) for prompt in PROMPTS]
    outputs: dict[str, list[int]] = {request_id: [] for request_id in ids}
    late: list[str] = []
    steps = 0
    while engine.has_unfinished():
        for delta in engine.step():
            outputs[delta.request_id] += delta.token_ids
        engine.check()
        steps += 1
        if steps == abort_after:
            engine.abort(ids[1::3], notify=False)
            late = [engine.add_request(PROMPTS[index], params) for index in (1, 4)]
            outputs |= {request_id: [] for request_id in late}
    for index, request_id in enumerate(ids):
        if index % 3 != 1:
            assert outputs[request_id] == expected[index]
    assert [outputs[request_id] for request_id in late] == [expected[1], expected[4]]
    assert engine.stats()["kv_blocks_used"] == 0


@sweep("name", ["hybrid checks", "ngram", "tree"], 2)
def test_finish_at_every_length_and_stop_token(
    tiny_decoder: Decoder, draft_model: Decoder, expected: list[list[int]], name: str
) -> None:
    engine = drafter_engine(tiny_decoder, ALL[name], draft_model, is_static=True)
    for length in range(1, 12):
        got = run(engine, PROMPTS, SamplingParams(temperature=0.0, max_tokens=length))
        assert got == [tokens[:length] for tokens in expected]
        stop = expected[0][length]
        got = run(engine, PROMPTS, SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=[stop]))
        assert got == [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in expected]


def test_the_host_is_one_round_behind(tiny_decoder: Decoder, expected: list[list[int]]) -> None:
    """While nobody comes or goes, a round is launched before the one before it is read, and Deltas say the
    same as ever."""
    engine = make_engine(tiny_decoder, Plan(3, 6, 2, 2), is_static=True)
    engine.add_request(PROMPTS[6], SamplingParams(temperature=0.0, max_tokens=24))
    while not (deltas := engine.step()):
        pass
    assert engine._loop.flight is not None
    tokens = [token for delta in deltas for token in delta.token_ids]
    while engine.has_unfinished():
        tokens += [token for delta in engine.step() for token in delta.token_ids]
    assert tokens == expected[6]


def test_an_interrupted_step_loses_nothing(
    tiny_decoder: Decoder, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = drafter_engine(tiny_decoder, ALL["ngram"], is_static=True)
    params = SamplingParams(temperature=0.0, max_tokens=24)
    ids = [engine.add_request(prompt, params) for prompt in PROMPTS]
    outputs: dict[str, list[int]] = {request_id: [] for request_id in ids}
    read, step = StepLoop.read, 0

    def interrupted(self: StepLoop, flight: Any) -> None:
        if step % 3 == 1:
            raise KeyboardInterrupt
        read(self, flight)

    monkeypatch.setattr(StepLoop, "read", interrupted)
    while engine.has_unfinished():
        step += 1
        try:
            for delta in engine.step():
                outputs[delta.request_id] += delta.token_ids
        except KeyboardInterrupt:
            assert step % 3 == 1
        engine.check()
    assert [outputs[request_id] for request_id in ids] == expected


def test_logprobs_are_those_of_packed_rounds(tiny_decoder: Decoder) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2)
    found = []
    for is_static in (False, True):
        engine = make_engine(tiny_decoder, Plan(3, 6, 2, 2), is_static=is_static)
        request_id = engine.add_request(PROMPTS[4], params)
        found.append(
            [
                entry
                for delta in engine.drain()
                if delta.request_id == request_id
                for entry in delta.logprobs or []
            ]
        )
    assert found[0] == found[1] and len(found[0]) == 12


# ---- from captured graphs ----


def captured(
    decoder: Decoder, values: dict[str, Any], draft_model: Decoder | None = None, **config: Any
) -> tuple[Engine, RecordedGraphs]:
    graphs = RecordedGraphs()
    return drafter_engine(decoder, values, draft_model, is_static=True, graph_device=graphs, **config), graphs


MIXED = [SamplingParams(temperature=0.0, max_tokens=16), *SAMPLED[1:4]]


@pytest.fixture(scope="module")
def plain_mixed(tiny_decoder: Decoder) -> list[list[int]]:
    return run(make_engine(tiny_decoder), PROMPTS[3:7], MIXED)


Replaying = Callable[..., tuple[Engine, RecordedGraphs]]


@pytest.fixture
def replaying(torch_decoder: Decoder, torch_draft_model: Decoder, no_numba: None) -> Replaying:
    """`captured`, by the name of a plan."""
    return lambda name, **config: captured(torch_decoder, ALL[name], torch_draft_model, **config)


# One for each that a graph may be of: drafts of one's own text, a model that stops, trees. Rows that stop are
# replayed as a whole in the test after this.
REPLAYED = ("ngram by length", "model sure", "tree check")


@sweep("name", ALL, REPLAYED.__contains__)
def test_replay_equals_eager(replaying: Replaying, plain_mixed: list[list[int]], name: str) -> None:
    engine, graphs = replaying(name)
    for _ in range(2):  # the second time from the prefix cache, so that requests come and go otherwise
        assert run(engine, PROMPTS[3:7], MIXED) == plain_mixed
    captures, replays = graphs.num_captured, engine.stats()["graph_replays"]
    assert captures > 0 and engine.stats()["drafted"] > 0 and engine.stats()["drafter_failures"] == 0
    assert run(engine, PROMPTS[3:7], MIXED) == plain_mixed
    assert engine.stats()["graph_replays"] - replays >= 4
    # Rounds as they were before are not captured again. But a datastore has grown.
    assert graphs.num_captured == captures or name == "ngram by length"


STOPPING = [name for name in ALL if "sure" in name or "gated" in name]


@sweep("name", STOPPING, ("hybrid sure gated", "model sure").__contains__)
def test_replay_of_stages_equals_eager(replaying: Replaying, plain_mixed: list[list[int]], name: str) -> None:
    """Where the host decides in the middle of a round what is left out, which it otherwise is not."""
    (engine, graphs), (whole, _) = replaying(name, stage_graphs=True), replaying(name)
    for each in (engine, whole):
        for _ in range(2):
            assert run(each, PROMPTS[3:7], MIXED) == plain_mixed
    stats, of_whole = engine.stats(), whole.stats()
    assert graphs.num_captured > 0 and stats["graph_replays"] > stats["rounds"]
    for count in ("rounds", "drafted", "looked_up", "accepted", "committed"):
        assert stats[count] == of_whole[count], count
    passes = [
        sum(each[f"{model}layer_passes"] for model in ("", "draft_model_")) for each in (stats, of_whole)
    ]
    assert passes[0] < passes[1], "needless passes are left out"


@sweep(
    "name", ["ngram checks", "hybrid checks", "exit gated", "model"], ("ngram checks", "model").__contains__
)
def test_replay_of_rejection_equals_eager(
    torch_decoder: Decoder, torch_draft_model: Decoder, no_numba: None, name: str
) -> None:
    """Not plain decoding's tokens, and not those of packed rounds, which leave needless checks out; but the
    eager twin's."""
    values = {**ALL[name], "acceptance": "rejection"}
    twin = drafter_engine(torch_decoder, values, torch_draft_model, is_static=True)
    engine, _ = captured(torch_decoder, values, torch_draft_model)
    for _ in range(2):  # the second time from the prefix cache
        assert run(engine, PROMPTS[3:7], SAMPLED[3:7]) == run(twin, PROMPTS[3:7], SAMPLED[3:7])
    assert engine.stats()["graph_replays"] > 10


def test_preemption_and_aborts_under_replay(
    torch_decoder: Decoder, no_numba: None, expected: list[list[int]]
) -> None:
    engine, _ = captured(torch_decoder, ALL["hybrid checks"], num_kv_blocks=15, max_prefill_tokens=5)
    assert run(engine, PROMPTS[2:7]) == expected[2:7]
    params = SamplingParams(temperature=0.0, max_tokens=24)
    ids = [engine.add_request(prompt, params) for prompt in PROMPTS[2:7]]
    outputs: dict[str, list[int]] = {request_id: [] for request_id in ids}
    for step in range(1000):
        if step == 4:
            engine.abort([ids[1]], notify=False)
        for delta in engine.step():
            outputs[delta.request_id] += delta.token_ids
        if not engine.has_unfinished():
            break
    assert engine.stats()["preemptions"] > 0
    assert [outputs[request_id] for request_id in (ids[0], *ids[2:])] == [expected[2], *expected[4:7]]


@sweep(
    "by_stage, name",
    itertools.product([False, True], ["hybrid sure", "model sure", "exit gated", "hybrid sure gated"]),
    lambda case: case in {(True, "hybrid sure gated"), (False, "exit gated")},
)
def test_graphs_take_each_rounds_own_limits(
    torch_decoder: Decoder,
    torch_draft_model: Decoder,
    no_numba: None,
    expected: list[list[int]],
    name: str,
    by_stage: bool,
) -> None:
    """Rows that may go far and rows near their end, one after the other in the same rows of the same
    graphs."""
    engine, _ = captured(torch_decoder, ALL[name], torch_draft_model, stage_graphs=by_stage)
    twin = drafter_engine(torch_decoder, ALL[name], torch_draft_model, is_static=True, stage_graphs=by_stage)
    for lengths in ((2, 2, 3), (16, 3, 9), (9, 16, 2), (16, 16, 1)):
        params = [SamplingParams(temperature=0.0, max_tokens=length) for length in lengths]
        for each in (engine, twin):
            assert run(each, PROMPTS[3:6], params) == [
                tokens[:length] for tokens, length in zip(expected[3:6], lengths, strict=True)
            ]
    for count in ("rounds", "drafted", "looked_up", "accepted", "committed"):
        assert engine.stats()[count] == twin.stats()[count], count


def test_another_way_of_sampling_takes_other_graphs(
    torch_decoder: Decoder, no_numba: None, expected: list[list[int]], plain_sampled: list[list[int]]
) -> None:
    engine, _ = captured(torch_decoder, ALL["ngram checks"])
    for _ in range(2):
        assert run(engine, PROMPTS[3:6]) == expected[3:6]
        for number in (3, 4, 5):  # each with other settings, alone
            assert (
                run(engine, PROMPTS[number : number + 1], SAMPLED[number : number + 1])
                == plain_sampled[number : number + 1]
            )


def test_a_capture_that_fails_costs_speed_and_not_the_tokens(
    torch_decoder: Decoder,
    no_numba: None,
    plain_mixed: list[list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in ("tree check", "hybrid sure gated"):  # graphs of whole rounds, and of stages
        engine, graphs = captured(torch_decoder, ALL[name], stage_graphs="gated" in name)
        graphs.failure = lambda: RuntimeError("planted: operation not permitted when stream is capturing")
        with caplog.at_level(logging.WARNING):
            assert run(engine, PROMPTS[3:7], MIXED) == plain_mixed
        tried, stats = graphs.num_tried, engine.stats()
        assert tried > 0 and (stats["graphs"], stats["graph_captures"], stats["graph_replays"]) == (0, 0, 0)
        assert stats["drafted"] > 0 and stats["drafter_failures"] == 0, "it still speculates"
        failures = [record.getMessage() for record in caplog.records if "could not be captured" in record.msg]
        assert len(failures) == len(set(failures)) == tried, "each key is tried once, and said once"
        caplog.clear()
        graphs.failure = None
        assert run(engine, PROMPTS[3:7], MIXED) == plain_mixed


def test_counts_of_passes_are_the_same_by_replay(
    torch_decoder: Decoder, no_numba: None, expected: list[list[int]]
) -> None:
    found = []
    for graph_device in (None, RecordedGraphs()):
        engine = make_engine(torch_decoder, Plan(3, 6, 2, 2), is_static=True, graph_device=graph_device)
        assert run(engine, PROMPTS[3:5]) == expected[3:5]
        found.append(
            {
                name: engine.stats()[name]
                for name in (
                    "layer_passes",
                    "layer_positions",
                    "prefill_layer_passes",
                    "adapter_passes",
                    "steps",
                )
            }
        )
    assert found[0] == found[1]


def test_plans_switch_without_another_capture(
    torch_decoder: Decoder, no_numba: None, expected: list[list[int]]
) -> None:
    engine, graphs = captured(torch_decoder, ALL["tree checks"])
    plans = [ALL["tree checks"], ALL["ngram"], None, ALL["hybrid"]]
    configs = [SpeculativeConfig(**values) if values else None for values in plans]
    for config in configs:
        engine.set_speculative(config)
        assert run(engine, PROMPTS[3:5]) == expected[3:5]
    captures = graphs.num_captured
    for config in (*configs, *configs[::-1]):
        engine.set_speculative(config)
        assert run(engine, PROMPTS[3:5]) == expected[3:5]
    assert graphs.num_captured == captures


@pytest.mark.parametrize("between", [[None], []], ids=["after another", "at once"])
def test_a_plan_that_keeps_outputs_begins_anew(
    torch_decoder: Decoder, no_numba: None, expected: list[list[int]], between: list[None]
) -> None:
    ngram = {"max_size": 3, "min_size": 3, "match_confidence": None, "datastore_tokens": 4096}
    values = {"draft": {"kind": "ngram", "ngram": ngram}, "num_draft_tokens": 8}
    engine, graphs = captured(torch_decoder, values)
    rounds = []
    for plans in ((), (), (*between, SpeculativeConfig(**values))):
        for plan in plans:
            engine.set_speculative(plan)
        engine.reset_stats()
        assert run(engine, PROMPTS[3:5]) == expected[3:5]
        rounds.append(engine.stats()["rounds"])
    assert rounds[1] < rounds[0] == rounds[2] and graphs.num_captured > 0


def test_warming_up_captures_what_is_needed_later(
    torch_decoder: Decoder, no_numba: None, expected: list[list[int]]
) -> None:
    engine, graphs = captured(torch_decoder, ALL["tree checks"], warm_up=True, max_num_seqs=4)
    captures = graphs.num_captured
    assert captures >= 6, "three numbers of rows, the plan and plain decoding"
    assert engine.stats()["layer_passes"] == 0, "what warms up is not counted"
    assert run(engine, PROMPTS[2:7]) == expected[2:7]
    assert graphs.num_captured == captures


def test_warming_up_goes_through_all_stages_of_a_drafter_that_may_stop(
    torch_decoder: Decoder, no_numba: None, expected: list[list[int]]
) -> None:
    engine, graphs = captured(
        torch_decoder, ALL["hybrid sure"], warm_up=True, max_num_seqs=2, stage_graphs=True
    )
    captures = graphs.num_captured
    assert run(engine, PROMPTS[2:6]) == expected[2:6]
    assert graphs.num_captured == captures > 8


def test_few_graphs_and_no_memory_for_graphs_change_nothing(
    torch_decoder: Decoder, no_numba: None, expected: list[list[int]]
) -> None:
    engine, graphs = captured(torch_decoder, ALL["hybrid sure"], max_graphs=1)
    assert run(engine, PROMPTS[2:6]) == expected[2:6]
    assert engine.stats()["graphs"] < graphs.num_captured, "none made room"
    engine, graphs = captured(torch_decoder, ALL["hybrid"])
    graphs.failure = lambda: torch.OutOfMemoryError("no memory for a graph")
    assert run(engine, PROMPTS[2:6]) == expected[2:6]
    assert engine.stats()["graph_replays"] == graphs.num_captured == 0


def test_graphs_false_runs_the_same_eagerly(
    torch_decoder: Decoder, no_numba: None, expected: list[list[int]]
) -> None:
    for values, config in (({**ALL["hybrid"], "graphs": False}, {}), (ALL["hybrid"], {"graphs": False})):
        engine, graphs = captured(torch_decoder, values, **config)
        assert run(engine, PROMPTS[2:6]) == expected[2:6]
        assert graphs.num_captured == 0
