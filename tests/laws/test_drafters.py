"""Laws 1, 2, 5 and 7 for every drafter, with and without a check tier, trees included."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from ee_models.checkpoint.exit_files import ExitsFile
from ee_models.checkpoint.loader import Checkpoint
from ee_models.decoder import Decoder
from hispec.config import EngineConfig, SpeculativeConfig
from hispec.decoding.acceptance import CoupledJudge
from hispec.decoding.batch import RoundBatch, Span
from hispec.engine import Engine
from hispec.sampling_params import SamplingParams
from tests.helpers.adapters import loaded
from tests.helpers.drafters import ALL, KINDS, draft_decoder, drafter_engine
from tests.helpers.support import make_engine, random_prompts, run
from tests.helpers.sweeps import sweep
from tests.helpers.tiny import tiny_checkpoint

PROMPTS = random_prompts((1, 2, 7, 8, 9, 31, 33, 70))
SAMPLED = [
    SamplingParams(
        temperature=0.9,
        seed=7 + number,
        max_tokens=24,
        repetition_penalty=1.2 if number % 2 else 1.0,
        top_k=20 if number % 3 else 0,
    )
    for number in range(len(PROMPTS))
]
kinds = pytest.mark.parametrize("name", ALL)


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """Other sizes than the target's, and a few tokens fewer."""
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    return draft_decoder(
        tiny_checkpoint(
            tmp_path_factory.mktemp("draft") / "model", hidden=32, num_layers=2, vocab=250, seed=5, **special
        )
    )


@pytest.fixture(scope="module")
def plain_sampled(tiny_decoder: Decoder) -> list[list[int]]:
    return run(make_engine(tiny_decoder), PROMPTS, SAMPLED)


@kinds
def test_greedy_output_is_plain_decodings(
    tiny_decoder: Decoder, draft_model: Decoder, expected: list[list[int]], name: str
) -> None:
    engine = drafter_engine(tiny_decoder, ALL[name], draft_model)
    assert run(engine, PROMPTS) == expected
    stats = engine.stats()
    assert stats["drafted"] > 0 and stats["draft_kept"] <= stats["drafted"] and stats["drafter_failures"] == 0
    assert (stats["looked_up"] > 0) == ("ngram" in name or "hybrid" in name)
    assert (stats["draft_model_layer_passes"] > 0) == ("model" in name)


def test_a_draft_model_of_more_tokens(
    tiny_decoder: Decoder, tmp_path: Path, expected: list[list[int]]
) -> None:
    """It may say a token that the target does not have: such a draft is not even made."""
    larger = draft_decoder(tiny_checkpoint(tmp_path, hidden=32, num_layers=2, vocab=300, seed=5))
    assert run(drafter_engine(tiny_decoder, ALL["model"], larger), PROMPTS) == expected


@sweep("name", ALL, 2)
def test_sampled_output_is_plain_sampled_decodings(
    tiny_decoder: Decoder, draft_model: Decoder, plain_sampled: list[list[int]], name: str
) -> None:
    engine = drafter_engine(tiny_decoder, ALL[name], draft_model)
    assert run(engine, PROMPTS, SAMPLED) == plain_sampled
    assert run(engine, PROMPTS[5:6], SAMPLED[5:6]) == plain_sampled[5:6], "alone or in a batch"


@sweep("name", ALL, list(ALL)[1::2].__contains__)
def test_forced_preemption_and_prefix_reuse_change_nothing(
    tiny_decoder: Decoder, draft_model: Decoder, expected: list[list[int]], name: str
) -> None:
    engine = drafter_engine(tiny_decoder, ALL[name], draft_model, num_kv_blocks=15, max_prefill_tokens=5)
    assert run(engine, PROMPTS) == expected
    assert engine.stats()["preemptions"] > 0
    assert run(engine, PROMPTS[::-1]) == expected[::-1]
    assert engine.stats()["cached_tokens"] > 0


@sweep(
    "name, block_size",
    itertools.product(["ngram checks", "hybrid", "model checks", "tree checks", "model tree"], [1, 5, 64]),
    2,
)
def test_every_block_size_and_batch(
    tiny_decoder: Decoder, draft_model: Decoder, expected: list[list[int]], name: str, block_size: int
) -> None:
    engine = drafter_engine(
        tiny_decoder,
        ALL[name],
        draft_model,
        block_size=block_size,
        num_kv_blocks=4096 // block_size,
        max_num_seqs=3,
    )
    assert run(engine, PROMPTS) == expected


@sweep("name", ["ngram", "hybrid checks", "model", "tree checks"], 2)
def test_abort_at_every_step(
    tiny_decoder: Decoder, draft_model: Decoder, expected: list[list[int]], name: str
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24)
    for at in range(0, 30, 3):
        engine = drafter_engine(tiny_decoder, ALL[name], draft_model, max_num_seqs=4)
        ids = [engine.add_request(prompt, params) for prompt in PROMPTS[:6]]
        outputs: dict[str, list[int]] = {request_id: [] for request_id in ids}
        for step in itertools.count():
            if not engine.has_unfinished():
                break
            if step == at:
                engine.abort(ids[1:5:3])
            for delta in engine.step():
                outputs[delta.request_id] += delta.token_ids
            engine.check()
        assert [outputs[ids[i]] for i in (0, 2, 3, 5)] == [expected[i] for i in (0, 2, 3, 5)]
        assert engine.stats()["kv_blocks_used"] == 0


@sweep("name", ["ngram checks", "hybrid", "model checks", "tree", "tree checks"], 2)
def test_finish_at_every_length(
    tiny_decoder: Decoder, draft_model: Decoder, expected: list[list[int]], name: str
) -> None:
    """max_tokens, and a stop token at every offset of an accepted run."""
    engine = drafter_engine(tiny_decoder, ALL[name], draft_model)
    lengths = [SamplingParams(temperature=0.0, max_tokens=number) for number in range(1, 25)]
    assert run(engine, [PROMPTS[5]] * 24, lengths) == [expected[5][:number] for number in range(1, 25)]
    for token in dict.fromkeys(expected[5]):
        end = expected[5].index(token) + 1
        engine = drafter_engine(tiny_decoder, ALL[name], draft_model, eos=(token,))
        assert run(engine, [PROMPTS[5]]) == [expected[5][:end]]


FEW_BLOCKS = {"num_kv_blocks": 14}


@sweep(
    "name, sizes",
    itertools.product(
        [name for name in ALL if "model" in name],
        [
            {},
            FEW_BLOCKS,
            FEW_BLOCKS | {"swap_bytes": 0},
            {"max_prefill_tokens": 5, "max_num_seqs": 2},
            {"block_size": 3},
        ],
    ),
    2,
    ids=str,
)
def test_a_draft_model_that_is_the_target_is_always_right(
    tiny_decoder: Decoder, expected: list[list[int]], name: str, sizes: dict[str, Any]
) -> None:
    """Law 7: a hole in its KV, after full acceptance, prefix reuse, preemption or a moved path, would cost
    acceptance."""
    values = {key: value for key, value in ALL[name].items() if key not in ("check", "draft_confidence")} | {
        "num_checks": 1
    }
    engine = drafter_engine(tiny_decoder, values, tiny_decoder, **sizes)
    for _ in range(2):  # the second time from the prefix cache
        assert run(engine, PROMPTS) == expected
    stats = engine.stats()
    depth, branches = values["num_draft_tokens"], values.get("num_branches", 1)
    assert stats["drafted"] > 0
    if (
        sizes == FEW_BLOCKS
    ):  # KV of preempted requests went to host memory and back, so that hardly anything was in the cache
        assert stats["kv_moved_in"] > 0
    else:
        assert stats["cached_tokens"] > 0
    histogram = stats["accept_length_histogram"]
    # Only the last round of a request, cut short by max_tokens, commits fewer than K + 1.
    assert sum(histogram[: depth + 1]) <= 2 * len(PROMPTS), (
        f"{branches} branches: a draft of the target itself was rejected"
    )


def test_another_plan_of_the_same_draft_model_finds_its_kv(
    tiny_decoder: Decoder, expected: list[list[int]]
) -> None:
    """What the prefix cache holds was computed under the plan before."""
    engine = drafter_engine(tiny_decoder, ALL["model"], tiny_decoder)
    for num_drafts in (3, 2, 4):
        engine.set_speculative(
            SpeculativeConfig(**{**ALL["model"], "num_draft_tokens": num_drafts}), draft_model=tiny_decoder
        )
        engine.reset_stats()
        assert run(engine, PROMPTS) == expected
        stats = engine.stats()
        assert sum(stats["accept_length_histogram"][: num_drafts + 1]) <= len(PROMPTS), (
            "the draft model lost its KV"
        )
    assert stats["cached_tokens"] > 0
    for plan in (None, SpeculativeConfig(**ALL["model"])):  # plain decoding in between writes none
        engine.set_speculative(plan, draft_model=tiny_decoder if plan else None)
        engine.reset_stats()
        assert run(engine, PROMPTS) == expected
    assert sum(engine.stats()["accept_length_histogram"][:4]) <= len(PROMPTS)


@pytest.mark.parametrize("roll", [1, 2])
@pytest.mark.parametrize("check", [None, 6])
def test_trees_of_trained_exits_move_the_exits_kv(
    tiny_decoder: Decoder,
    checkpoint: Checkpoint,
    files: dict[str, ExitsFile],
    expected: list[list[int]],
    roll: int,
    check: int | None,
    monkeypatch: Any,
) -> None:
    """Exits that are always right, whose likeliest token is put on a later branch: all but what a limit cuts
    off is accepted."""
    choose = CoupledJudge.choose

    def rolled(self: CoupledJudge, logits: Tensor, batch: RoundBatch, span: Span, num: int = 1) -> Tensor:
        return choose(self, logits, batch, span, num).roll(roll if num > 1 else 0, dims=1)

    monkeypatch.setattr(CoupledJudge, "choose", rolled)
    num_checks = 2 if check else 1
    values: dict[str, Any] = {
        "draft": {"kind": "adapter", "layer": 3},
        "num_draft_tokens": 2,
        "num_checks": num_checks,
        "num_branches": 3,
    }
    if check:
        values["check"] = {"kind": "adapter", "layer": check}
    exits = loaded(files["right"], tiny_decoder, checkpoint, [3, check] if check else [3])
    config = EngineConfig(
        max_num_seqs=8, max_model_len=256, block_size=3, num_kv_blocks=200, max_prefill_tokens=5
    )
    engine = Engine(tiny_decoder, config, SpeculativeConfig(**values), exits=exits)
    assert run(engine, PROMPTS) == expected
    histogram = engine.stats()["accept_length_histogram"]
    # In the last columns of a request the limit cuts branches off, the right one among them.
    assert histogram[3 * num_checks] >= (24 - 7 * num_checks) // (3 * num_checks) * len(PROMPTS), (
        "an exit was wrong: its KV is another node's"
    )


class SecondBest:
    """The target, but for its likeliest token, which it puts last: so the right draft is always on the second
    branch."""

    def __init__(self, decoder: Decoder) -> None:
        self.config, self.dtype, self.device, self.max_positions = (
            decoder.config,
            decoder.dtype,
            decoder.device,
            decoder.max_positions,
        )
        self.kv_dtype = decoder.kv_dtype
        self.embed, self.run_layers, self._decoder = decoder.embed, decoder.run_layers, decoder
        self.fill_layers = decoder.fill_layers

    def logits(self, hidden: Tensor, exit_layer: int) -> Tensor:
        logits = self._decoder.logits(hidden, exit_layer)
        best = logits.topk(2, dim=-1)
        # Between the second and the third, so that it is the second token of the draft.
        below = best.values[:, 1:] - 1e-4
        return logits.scatter(1, best.indices[:, :1], below)


def test_a_draft_models_kv_follows_the_accepted_path(
    tiny_decoder: Decoder, expected: list[list[int]]
) -> None:
    values = {"draft": {"kind": "model", "path": "tiny"}, "num_draft_tokens": 1, "num_branches": 2}
    engine = drafter_engine(tiny_decoder, values, SecondBest(tiny_decoder))
    assert run(engine, PROMPTS) == expected
    stats = engine.stats()
    # Of the 24 tokens the last two come one by one: the limit cuts the second branch off.
    assert stats["accept_length_histogram"][2] == 11 * len(PROMPTS), (
        "a node's KV was left in its sibling's place"
    )


def test_the_datastore_serves_later_requests(tiny_decoder: Decoder, expected: list[list[int]]) -> None:
    """What was said before is proposed, and right, when it is to be said again; a new plan begins with
    nothing."""
    values = {
        "draft": {
            "kind": "ngram",
            "ngram": {"max_size": 3, "min_size": 3, "match_confidence": None, "datastore_tokens": 4096},
        },
        "num_draft_tokens": 8,
    }
    engine = drafter_engine(tiny_decoder, values)
    assert run(engine, PROMPTS) == expected
    first = engine.stats()
    engine.reset_stats()
    assert run(engine, PROMPTS) == expected
    second = engine.stats()
    assert (
        second["rounds"] < 0.5 * first["rounds"] and second["looked_up_kept"] > 0.9 * second["looked_up"] > 0
    )
    for between in ([None], []):
        for plan in (*between, SpeculativeConfig(**values)):
            engine.set_speculative(plan)
        engine.reset_stats()
        assert run(engine, PROMPTS) == expected
        assert engine.stats()["rounds"] == first["rounds"]


@pytest.mark.parametrize("name", KINDS)
def test_opting_out_is_plain_decoding_beside_the_others(
    tiny_decoder: Decoder, draft_model: Decoder, expected: list[list[int]], name: str
) -> None:
    engine = drafter_engine(tiny_decoder, KINDS[name], draft_model)
    params = [
        SamplingParams(temperature=0.0, max_tokens=24, speculative=bool(number % 2))
        for number in range(len(PROMPTS))
    ]
    assert run(engine, PROMPTS, params) == expected


@pytest.mark.parametrize("name", ["hybrid", "tree", "tree check", "model tree"])
def test_logprobs_are_plain_decodings(tiny_decoder: Decoder, draft_model: Decoder, name: str) -> None:
    """Of the accepted path, wherever in the tree it lay."""
    params = SamplingParams(temperature=0.0, max_tokens=20, logprobs=2)

    def logprobs(engine: Any) -> list[Any]:
        ids = [engine.add_request(prompt, params) for prompt in PROMPTS]
        found: dict[str, list[Any]] = {request_id: [] for request_id in ids}
        while engine.has_unfinished():
            for delta in engine.step():
                found[delta.request_id] += delta.logprobs
        return [found[request_id] for request_id in ids]

    assert logprobs(drafter_engine(tiny_decoder, ALL[name], draft_model)) == logprobs(
        make_engine(tiny_decoder)
    )
