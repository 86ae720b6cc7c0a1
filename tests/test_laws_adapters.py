"""Laws 1, 2 and 7 with trained exits: adapters never change the output, and their KV is never stale, missing or a place off.

A gap in an adapter's KV would change no output, only what is accepted. So the sharpest tests are those with adapters that
are always right (all the rest of the trunk as their blocks): one place of KV that is not the trunk's own makes acceptance
fall below 100 %. The scripted ones look at the KV itself.
"""
from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hispec.accept
import hispec.sampling
from cache.hidden import HiddenBuffer
from cache.paged_kv import PagedKV
from cache.view import BatchView
from ee_models.decoder import Decoder
from ee_models.exit_files import ExitInfo, ExitsFile
from ee_models.exits import AdapterExit
from ee_models.loader import Checkpoint, open_checkpoint
from hispec.config import Plan, SpeculativeConfig
from hispec.engine import Engine
from hispec.errors import ConfigError
from hispec.judges import RejectionJudge
from hispec.round import run_round
from hispec.sampling import RowSampling, Sampler
from hispec.sampling_params import SamplingParams
from hispec.stages import PassCounts, RoundBatch, Stages
from tests.adapters import TINY_MLP, HistoryExit, adapter_engine, loaded, make_exits, make_module, whole_trunk
from tests.scripted import ScriptedDecoder, one_hot_script, tiny_config, true_next
from tests.support import GREEDY, make_engine, random_prompts, run
from tests.test_laws_rejection import FIRST, LAYERS, VOCAB, Paths, paths  # noqa: F401 - `paths` is a fixture
from tests.tiny import TINY_VOCAB

PROMPTS = random_prompts((1, 2, 7, 8, 9, 31, 33, 70))

# Exits that start as copies of the trunk, so that they are sometimes right; by the layers that they are read at.
MIXES: dict[str, tuple[ExitInfo, ...]] = {
    "draft": (ExitInfo(layer=3, num_blocks=2, intermediate_size=TINY_MLP),),
    "kangaroo": (ExitInfo(layer=7),),
    "both": (ExitInfo(layer=4, num_blocks=2, intermediate_size=TINY_MLP), ExitInfo(layer=7, intermediate_size=TINY_MLP)),
    "check": (ExitInfo(layer=6, num_blocks=2, intermediate_size=TINY_MLP),),
    "norm_and_mlp": (ExitInfo(layer=4, num_blocks=0), ExitInfo(layer=7, attention=False, intermediate_size=TINY_MLP)),
    "reduced": (ExitInfo(layer=4, vocabulary_size=100), ExitInfo(layer=7, intermediate_size=TINY_MLP, vocabulary_size=180)),
}
CASES = [
    ("draft", Plan(3, None, 1, 1)),
    ("draft", Plan(3, None, 4, 1)),
    ("draft", Plan(3, 6, 2, 2)),
    ("draft", Plan(3, 8, 1, 3)),
    ("kangaroo", Plan(7, None, 3, 1)),
    ("check", Plan(3, 6, 2, 2)),
    ("check", Plan(5, 6, 4, 1)),
    ("both", Plan(4, 7, 1, 1)),
    ("both", Plan(4, 7, 3, 2)),
    ("norm_and_mlp", Plan(4, 7, 2, 3)),
    ("reduced", Plan(4, 7, 2, 2)),
    ("reduced", Plan(4, None, 2, 1)),
]
# Always right; the draft tier's, the check tier's, or both.
RIGHT = [(Plan(3, None, 3, 1), (3,)), (Plan(3, 6, 2, 2), (3, 6)), (Plan(1, 2, 1, 3), (1, 2)), (Plan(8, None, 1, 1), (8,))]


@pytest.fixture(scope="module")
def checkpoint(tiny_path: Path) -> Checkpoint:
    return open_checkpoint(tiny_path)


@pytest.fixture(scope="module")
def expected(tiny_decoder: Decoder) -> list[list[int]]:
    """Plain decoding's, which is transformers' (test_laws_exact)."""
    return run(make_engine(tiny_decoder), PROMPTS)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, checkpoint: Checkpoint) -> dict[str, ExitsFile]:
    folder = tmp_path_factory.mktemp("exits")
    made = {name: make_exits(folder / name, checkpoint, infos, from_trunk=True) for name, infos in MIXES.items()}
    made["random"] = make_exits(folder / "random", checkpoint, [whole_trunk(3), whole_trunk(6)])
    made["right"] = make_exits(folder / "right", checkpoint, [whole_trunk(layer) for layer in (1, 2, 3, 6, 8)], from_trunk=True)
    return made


Make = Callable[..., Engine]


@pytest.fixture
def engine_of(tiny_decoder: Decoder, checkpoint: Checkpoint, files: dict[str, ExitsFile]) -> Make:
    """make(name of the exits, plan, layers=those of the file that the plan reads, **config)."""

    def make(name: str, plan: Plan, **config: Any) -> Engine:
        layers = [layer for layer in files[name].layers if layer in (plan.draft_layer, plan.check_layer)]
        return adapter_engine(tiny_decoder, plan, loaded(files[name], tiny_decoder, checkpoint, layers), **config)

    return make


def assert_always_accepted(engine: Engine) -> None:
    stats = engine.stats()
    assert stats["drafted"] > 0 and stats["draft_accepted"] == stats["drafted"], "the check tier rejected what is always right"
    assert stats["tentative"] > 0 and stats["accepted"] == stats["tentative"], "verify rejected what is always right"


# ---- law 1 ----


@pytest.mark.parametrize(("name", "plan"), CASES, ids=str)
def test_every_mix_of_exits_gives_plain_decoding(engine_of: Make, expected: list[list[int]], name: str, plan: Plan) -> None:
    engine = engine_of(name, plan)
    assert run(engine, PROMPTS) == expected
    if any(info.num_blocks for info in MIXES[name]):
        assert engine.stats()["adapter_passes"] > 0, "no adapter was read"


def test_the_exits_prove_something(engine_of: Make) -> None:
    """They are sometimes right and sometimes wrong, and not as often as the shared exits at their layers."""
    for name, plan in (("draft", Plan(3, None, 4, 1)), ("check", Plan(3, 6, 2, 2)), ("both", Plan(4, 7, 3, 2)), ("reduced", Plan(4, 7, 2, 2))):
        engine = engine_of(name, plan)
        run(engine, PROMPTS)
        stats = engine.stats()
        assert 0.03 < stats["accepted"] / stats["tentative"] < 0.9, (name, stats["accepted"], stats["tentative"])
        assert 0 < stats["draft_accepted"] < stats["drafted"], name


@pytest.mark.parametrize(
    "config",
    [{"block_size": 1, "num_kv_blocks": 2048}, {"block_size": 5}, {"max_num_seqs": 1}, {"max_num_seqs": 3, "max_prefill_tokens": 1}],
    ids=str,
)
def test_block_sizes_batch_mixes_and_prefill_chunks_change_nothing(engine_of: Make, expected: list[list[int]], config: dict[str, int]) -> None:
    assert run(engine_of("both", Plan(4, 7, 2, 2), **config), PROMPTS) == expected


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_forced_preemption_changes_nothing(engine_of: Make, expected: list[list[int]], prefix_caching: bool) -> None:
    engine = engine_of("both", Plan(4, 7, 2, 2), num_kv_blocks=14, enable_prefix_caching=prefix_caching)
    assert run(engine, PROMPTS) == expected
    assert engine.stats()["preemptions"] > 0, "nothing was preempted, so nothing was shown"


@pytest.mark.parametrize("abort_after", [0, 1, 2, 3, 5, 8])
def test_aborts_leave_the_others_alone_and_always_accepted(engine_of: Make, expected: list[list[int]], abort_after: int) -> None:
    engine = engine_of("right", Plan(3, 6, 2, 2), max_num_seqs=5)
    ids = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    outputs: dict[str, list[int]] = {request_id: [] for request_id in ids}
    for step in itertools.count():
        if step == abort_after:
            engine.abort([ids[0], ids[4], ids[7]])
        if not engine.has_unfinished():
            break
        for delta in engine.step():
            outputs[delta.request_id] += delta.token_ids
        engine.check()
    assert engine.stats()["kv_blocks_used"] == 0
    for index, request_id in enumerate(ids):
        whole = index not in (0, 4, 7)
        assert outputs[request_id] == (expected[index] if whole else expected[index][: len(outputs[request_id])])
    assert_always_accepted(engine)


# ---- law 7: adapters that are always right are always accepted ----


@pytest.mark.parametrize(("plan", "layers"), RIGHT, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_always_right_adapters_are_accepted_in_every_round(engine_of: Make, plan: Plan, layers: tuple[int, ...], temperature: float) -> None:
    engine = engine_of("right", plan)
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=plan.window * 4)
    run(engine, PROMPTS, params)
    assert_always_accepted(engine)
    stats = engine.stats()
    assert stats["accept_length_histogram"] == [0] * plan.window + [stats["rounds"]], "a round did not commit all that it could"
    blocks = [9 - layer for layer in layers]
    passes = [plan.num_draft_tokens * plan.num_checks, plan.num_checks][: len(layers)]
    assert stats["adapter_passes"] == stats["steps"] * sum(count * size for count, size in zip(passes, blocks, strict=True))


def test_always_right_adapters_are_accepted_by_rejection_sampling_too(engine_of: Make) -> None:
    engine = engine_of("right", Plan(3, 6, 2, 2), rejection=True)
    run(engine, PROMPTS, SamplingParams(temperature=1.0, seed=1, max_tokens=24))
    assert_always_accepted(engine)


@pytest.mark.parametrize("max_num_seqs", [1, 3])
@pytest.mark.parametrize("max_prefill_tokens", [1, 5, 1000])
def test_always_accepted_after_every_prefill_chunk(engine_of: Make, expected: list[list[int]], max_num_seqs: int, max_prefill_tokens: int) -> None:
    engine = engine_of("right", Plan(3, 6, 2, 2), max_num_seqs=max_num_seqs, max_prefill_tokens=max_prefill_tokens)
    assert run(engine, PROMPTS[3:]) == expected[3:]
    assert_always_accepted(engine)


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize(("plan", "layers"), RIGHT[:2], ids=str)
def test_always_accepted_after_preemption(engine_of: Make, expected: list[list[int]], plan: Plan, layers: tuple[int, ...], prefix_caching: bool) -> None:
    """The preempted are computed again from their own output, or find it in the cache."""
    engine = engine_of("right", plan, num_kv_blocks=14, enable_prefix_caching=prefix_caching)
    assert run(engine, PROMPTS) == expected
    assert engine.stats()["preemptions"] > 0
    assert_always_accepted(engine)


@pytest.mark.parametrize(("plan", "layers"), RIGHT[:2], ids=str)
def test_always_accepted_on_reused_prefixes(engine_of: Make, expected: list[list[int]], plan: Plan, layers: tuple[int, ...]) -> None:
    """Prefixes of prompts, and of what was generated, by rows that sped up and by rows that did not."""
    engine = engine_of("right", plan)
    mixed = [GREEDY.model_copy(update={"speculative": index % 2 == 0}) for index in range(len(PROMPTS))]
    assert run(engine, PROMPTS, mixed) == expected
    continued = [prompt + output for prompt, output in zip(PROMPTS, expected, strict=True)]
    before = engine.stats()["cached_tokens"]
    again = run(engine, [*PROMPTS, *continued])
    assert again[: len(PROMPTS)] == expected
    # All full blocks, the last token left out, of eight prompts and of their continuations.
    assert engine.stats()["cached_tokens"] - before >= sum((len(prompt) + 23) // 8 * 8 for prompt in PROMPTS), "generated blocks were not found again"
    assert_always_accepted(engine)


def test_always_accepted_beside_requests_that_opt_out_or_end(engine_of: Make, expected: list[list[int]]) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=3 * index + 3, speculative=index % 3 != 1) for index in range(len(PROMPTS))]
    engine = engine_of("right", Plan(3, 6, 2, 2), max_num_seqs=4)
    assert run(engine, PROMPTS, params) == [output[: 3 * index + 3] for index, output in enumerate(expected)]
    assert_always_accepted(engine)
    alone = engine_of("right", Plan(3, 6, 2, 2))
    run(alone, PROMPTS[:1], GREEDY.model_copy(update={"speculative": False}))
    stats = alone.stats()
    assert stats["drafted"] == 0 and stats["rounds"] == stats["committed"] == 24


def test_a_check_that_is_mostly_wrong_costs_no_output(
    engine_of: Make, tiny_decoder: Decoder, checkpoint: Checkpoint, files: dict[str, ExitsFile], expected: list[list[int]]
) -> None:
    """Drafts are rejected wrongly, and drafted again after another token: cycle after cycle within a round."""
    exits = [*loaded(files["right"], tiny_decoder, checkpoint, [3]), *loaded(files["random"], tiny_decoder, checkpoint, [6])]
    engine = adapter_engine(tiny_decoder, Plan(3, 6, 2, 3), exits)
    assert run(engine, PROMPTS) == expected
    stats = engine.stats()
    assert stats["draft_accepted"] < stats["drafted"] / 2


# Whether, and with which hidden states, an adapter's fill is called.
FAULTS: dict[str, Callable[[Tensor, BatchView], Tensor | None]] = {
    "nothing is filled": lambda hidden, view: None,
    "prompts are not filled": lambda hidden, view: hidden if view.max_q_len == 1 else None,
    "the last draft is not filled": lambda hidden, view: hidden if view.max_q_len > 1 else None,
    "filled with the states of another place": lambda hidden, view: hidden.roll(1, 0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_missing_kv_lowers_acceptance_and_changes_no_output(
    engine_of: Make, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The tests above can fail."""
    fill, states = AdapterExit.fill, FAULTS[fault]

    def faulty(self: AdapterExit, hidden: Tensor, kv: PagedKV, kv_layer: int, view: BatchView) -> None:
        wrong = states(hidden, view)
        if wrong is not None:
            fill(self, wrong, kv, kv_layer, view)

    monkeypatch.setattr(AdapterExit, "fill", faulty)
    engine = engine_of("right", Plan(3, None, 2, 1))
    assert run(engine, PROMPTS) == expected
    with pytest.raises(AssertionError, match="what is always right"):
        assert_always_accepted(engine)


# ---- scripted: the KV itself ----


def scripted(plan: Plan, layers: tuple[int, ...], agreement: float, **config: Any) -> tuple[Engine, list[HistoryExit]]:
    """Exits that agree with the full model at a share of places, told by position and token."""

    def next_token(exit_layer: int, position: int, token: int) -> int:
        right = exit_layer == 9 or (position * 7919 + token * 104729 + exit_layer * 31) % 1000 < 1000 * agreement
        return (true_next(position, token) + (0 if right else 17)) % 50

    script = one_hot_script(next_token)
    exits = [HistoryExit(layer, script, num_kv_layers=1 + layer % 2) for layer in layers]
    return adapter_engine(ScriptedDecoder(script), plan, exits, **config), exits


@pytest.mark.parametrize("agreement", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize(
    ("plan", "layers"),
    [(Plan(2, None, 3, 1), (2,)), (Plan(2, 5, 2, 2), (2, 5)), (Plan(2, 5, 3, 3), (5,)), (Plan(3, 6, 1, 2), (3,)), (Plan(4, 7, 2, 1), (4, 7))],
    ids=str,
)
def test_an_adapter_always_finds_its_whole_history(plan: Plan, layers: tuple[int, ...], agreement: float) -> None:
    """In a pool that is too small, with prompts in chunks, prefixes shared, rows that opt out and rows that end at any column."""
    engine, exits = scripted(plan, layers, agreement, num_kv_blocks=12, block_size=4, max_num_seqs=3, max_prefill_tokens=5)
    stem = random_prompts([9], vocab=50)[0]
    prompts = [stem, [*stem, 1], stem[:5], [3], [*stem, 1, 2, 3, 4], [*stem[:8], 9]]
    params = [SamplingParams(temperature=0.0, max_tokens=3 + 4 * index, speculative=index != 2) for index in range(len(prompts))]
    for _ in range(2):
        for prompt, output in zip(prompts, run(engine, prompts, params), strict=True):
            sequence = list(prompt)
            for _ in output:
                sequence.append(true_next(len(sequence) - 1, sequence[-1]))
            assert output == sequence[len(prompt) :]
    assert engine.stats()["preemptions"] > 0 and engine.stats()["cached_tokens"] > 0
    assert all(exit_.num_read > 0 for exit_ in exits)


def test_the_history_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft's last token that is not filled is seen as soon as a round was fully accepted."""
    engine, _ = scripted(Plan(2, None, 3, 1), (2,), 1.0)
    filled = HistoryExit.fill
    monkeypatch.setattr(HistoryExit, "fill", lambda self, hidden, kv, kv_layer, view: filled(self, hidden, kv, kv_layer, view) if self.num_read < 3 else None)
    with pytest.raises(AssertionError, match="KV is missing"):
        run(engine, [[3]], GREEDY)


# ---- sampled ----


def reduced_vocabularies() -> list[int]:
    """Every token that one of the reduced exits can say."""
    modules = [make_module(info, tiny_config(9, TINY_VOCAB)) for info in MIXES["reduced"]]
    return sorted({token for module in modules if module.vocabulary is not None for token in module.vocabulary.tolist()})


REDUCED = reduced_vocabularies()
SAMPLED = [
    SamplingParams(temperature=1.0, seed=1, max_tokens=24),
    SamplingParams(temperature=0.7, top_k=20, seed=2, max_tokens=24),
    SamplingParams(temperature=1.3, top_p=0.8, min_p=0.02, seed=3, max_tokens=24, repetition_penalty=1.3),
    SamplingParams(temperature=0.0, max_tokens=24, presence_penalty=1.5, frequency_penalty=0.5),
    SamplingParams(temperature=0.9, seed=1, max_tokens=24, logit_bias={5: 4.0, 7: -50.0}, min_tokens=10, stop_token_ids=list(range(0, 250, 3))),
    # For a while nothing is allowed that the reduced vocabularies hold.
    SamplingParams(temperature=1.0, top_p=0.9, min_p=0.01, top_k=7, seed=5, max_tokens=24, min_tokens=16, stop_token_ids=REDUCED),
    SamplingParams(temperature=0.0, max_tokens=24, min_tokens=16, stop_token_ids=REDUCED),
    SamplingParams(temperature=0.8, seed=8, max_tokens=24, speculative=False),
]


@pytest.fixture(scope="module")
def plain_sampled(tiny_decoder: Decoder) -> list[list[int]]:
    """Each request alone, decoded plainly."""
    return [run(make_engine(tiny_decoder), [prompt], params)[0] for prompt, params in zip(PROMPTS, SAMPLED, strict=True)]


@pytest.mark.parametrize(("name", "plan"), [case for case in CASES if case[0] in ("both", "reduced", "draft")], ids=str)
def test_sampled_output_in_one_batch_equals_plain_alone(engine_of: Make, plain_sampled: list[list[int]], name: str, plan: Plan) -> None:
    assert run(engine_of(name, plan), PROMPTS, SAMPLED) == plain_sampled


def test_sampled_output_survives_preemption(engine_of: Make, plain_sampled: list[list[int]]) -> None:
    engine = engine_of("reduced", Plan(4, 7, 2, 2), num_kv_blocks=14)
    assert run(engine, PROMPTS, SAMPLED) == plain_sampled
    assert engine.stats()["preemptions"] > 0


def test_rejection_with_reduced_vocabularies_stays_reproducible_and_greedy_rows_exact(engine_of: Make, tiny_decoder: Decoder) -> None:
    outputs = run(engine_of("reduced", Plan(4, 7, 2, 2), rejection=True), PROMPTS, SAMPLED)
    assert outputs == run(engine_of("reduced", Plan(4, 7, 2, 2), rejection=True, num_kv_blocks=64), PROMPTS, SAMPLED)
    for index, params in enumerate(SAMPLED):
        if params.temperature == 0.0:
            assert outputs[index] == run(make_engine(tiny_decoder), [PROMPTS[index]], params)[0]


@pytest.fixture
def paths_past_nothing(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> Paths:  # noqa: F811 - a fixture
    """`paths`, and where an exit may say nothing at all, the token that `draw` then gives, without a branch."""
    branching = hispec.accept.draw

    def draw(logits: Tensor, key: Tensor) -> Tensor:
        drawn = DRAW(logits, key)
        possible = ~logits.isnan().all(-1)
        if bool(possible.any()):
            drawn[possible] = branching(logits[possible], key)
        return drawn

    monkeypatch.setattr(hispec.accept, "draw", draw)
    monkeypatch.setattr(hispec.sampling, "draw", draw)
    return paths


def one_round(decoder: ScriptedDecoder, exits: list[HistoryExit], plan: Plan, params: SamplingParams, stop_ids: frozenset[int]) -> tuple[int, ...]:
    kv = PagedKV(LAYERS + sum(exit_.num_kv_layers for exit_ in exits), 4, 4, 1, 2, torch.float32, torch.device("cpu"))
    stages = Stages(decoder, LAYERS, kv, HiddenBuffer(2, 1, plan.window, 3, torch.float32, torch.device("cpu")), PassCounts(), exits)
    judge = RejectionJudge(1, plan.window, VOCAB, torch.device("cpu"), plan.check_layer is not None)
    tokens = torch.zeros(1, plan.window + 1, dtype=torch.int64)
    tokens[0, 0] = FIRST
    sampler = Sampler([RowSampling(params, 0, [FIRST], [], stop_ids)], VOCAB, torch.device("cpu"))
    batch = RoundBatch(tokens, torch.tensor([0]), torch.tensor([plan.window]), torch.tensor([[2, 0, 1, 3]]), 4, 16, sampler)
    result = run_round(stages, plan, judge, batch)
    return tuple(result.tokens[0, 1 : 1 + int(result.counts[0])].tolist())


DRAW = hispec.sampling.draw
SAYS = {"two": [True, False, True], "one": [False, True, False], "all": [True, True, True]}


@pytest.mark.parametrize("min_tokens", [0, 2])
@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (Plan(1, None, 1, 1), ("two",)),
        (Plan(1, None, 2, 1), ("one",)),
        (Plan(1, 2, 1, 1), ("two", "all")),
        (Plan(1, 2, 1, 1), ("one", "two")),
        (Plan(1, 3, 2, 1), ("all", "two")),
        (Plan(1, 2, 1, 2), ("two", "one")),
    ],
    ids=str,
)
def test_rejection_with_reduced_vocabularies_keeps_the_full_models_law(
    paths_past_nothing: Paths, plan: Plan, says: tuple[str, ...], min_tokens: int
) -> None:
    """Enumerated as in test_laws_rejection. With min_tokens the smallest exit may say nothing at all for two tokens."""
    table = torch.randn(LAYERS + 1, 16, VOCAB, VOCAB, generator=torch.Generator().manual_seed(4)) * 1.5
    stop_ids = frozenset({0, 2}) if "one" not in says else frozenset({1})

    def script(exit_layer: int, position: int, token: int) -> Tensor:
        return table[exit_layer, position, token]

    def full_law(position: int, token: int) -> list[float]:
        logits = table[LAYERS, position, token].double()
        if position + 1 < 1 + min_tokens:  # the prompt is one token
            logits[list(stop_ids)] = -torch.inf
        return logits.softmax(-1).tolist()

    params = SamplingParams(temperature=1.0, min_tokens=min_tokens)
    layers = [layer for layer in (plan.draft_layer, plan.check_layer) if layer is not None]

    def outcome() -> tuple[int, ...]:
        exits = [HistoryExit(layer, script, says=torch.tensor(SAYS[name])) for layer, name in zip(layers, says, strict=True)]
        return one_round(ScriptedDecoder(script, LAYERS, VOCAB), exits, plan, params, stop_ids)

    law = paths_past_nothing.all(outcome)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-5)
    for sequence in itertools.product(range(VOCAB), repeat=plan.window):
        previous, steps = (FIRST, *sequence), []
        for position in range(plan.window):
            steps.append(full_law(position, previous[position])[sequence[position]])
        rest = [float(torch.tensor(steps[place:], dtype=torch.float64).prod()) for place in range(plan.window + 1)]
        got = sum(weight * rest[len(committed)] for committed, weight in law.items() if sequence[: len(committed)] == committed)
        assert got == pytest.approx(rest[0], rel=1e-4, abs=1e-7), sequence


# ---- confidence ----


@pytest.mark.parametrize("confidence", [0.3, 0.999])
@pytest.mark.parametrize("max_num_seqs", [1, 8])
def test_confidence_changes_no_output(
    engine_of: Make, expected: list[list[int]], plain_sampled: list[list[int]], confidence: float, max_num_seqs: int
) -> None:
    few = slice(None) if max_num_seqs > 1 else slice(1, 4)
    for name, plan in (("draft", Plan(3, None, 5, 1)), ("reduced", Plan(4, 7, 3, 2))):
        engine = engine_of(name, plan, confidence=confidence, max_num_seqs=max_num_seqs)
        assert run(engine, PROMPTS[few], SAMPLED[few]) == plain_sampled[few]
        assert run(engine, PROMPTS[few]) == expected[few]


def test_confidence_saves_passes(engine_of: Make) -> None:
    passes = {}
    for confidence in (None, 0.05, 0.999):
        engine = engine_of("draft", Plan(3, None, 5, 1), confidence=confidence, max_num_seqs=1)
        run(engine, PROMPTS[:2])
        stats = engine.stats()
        passes[confidence] = stats["layer_passes"] / stats["rounds"]
    assert passes[0.999] < passes[0.05] <= passes[None]


@pytest.mark.parametrize("confidence", [0.9, 0.99])
def test_always_right_adapters_stay_so_where_drafting_stops_early(engine_of: Make, expected: list[list[int]], confidence: float) -> None:
    for plan in (Plan(3, None, 5, 1), Plan(3, 6, 4, 2)):
        engine = engine_of("right", plan, confidence=confidence, max_num_seqs=1)
        assert run(engine, PROMPTS[2:6]) == expected[2:6]
        assert_always_accepted(engine)
        stats = engine.stats()
        assert stats["drafted"] < stats["rounds"] * plan.num_draft_tokens * plan.num_checks * 0.85, "drafting never stopped early"


def confident_below(limit: int, wrong: int = 0) -> Callable[[int, int, int], Tensor]:
    """Tokens below `limit` are followed by one of theirs, surely; others by one of theirs, unsurely."""

    def script(exit_layer: int, position: int, token: int) -> Tensor:
        low, size, scale = (0, limit, 20.0) if token < limit else (limit, 50 - limit, 0.5)
        return torch.nn.functional.one_hot(torch.tensor(low + (token * 7 + position * 3 + 1) % size), 50).float() * scale

    return script


@pytest.mark.parametrize(
    ("prompts", "drafted"),
    [
        ([[3]], 5),  # sure: all K
        ([[30]], 2),  # unsure: the first is never tested, the second is, and is kept
        ([[30], [40]], 2),
        ([[3], [30]], 5),  # drafting stops only when every row is unsure
    ],
)
def test_drafting_stops_when_every_live_row_is_unsure_and_never_before_the_second(prompts: list[list[int]], drafted: int) -> None:
    script = confident_below(25)
    for exits in ([], [HistoryExit(2, script)]):
        engine = adapter_engine(ScriptedDecoder(script), Plan(2, None, 5, 1), exits, confidence=0.5)
        run(engine, prompts, SamplingParams(temperature=0.0, max_tokens=(drafted + 1) * 4))
        stats = engine.stats()
        assert stats["drafted"] == drafted * stats["rounds"] == drafted * 4 * len(prompts)
        assert stats["layer_passes"] == 4 * ((drafted + 1) * 2 + 7)


# ---- changing plans ----


def right(tiny_decoder: Decoder, checkpoint: Checkpoint, files: dict[str, ExitsFile], *layers: int) -> list[AdapterExit]:
    return loaded(files["right"], tiny_decoder, checkpoint, layers)


def test_changing_plans_grows_the_kv_and_forgets(
    tiny_decoder: Decoder, checkpoint: Checkpoint, files: dict[str, ExitsFile], expected: list[list[int]]
) -> None:
    """Prompts that were seen in plain mode have no KV of the adapters: what is cached must be forgotten."""
    engine = make_engine(tiny_decoder)
    plain_bytes = engine.memory()["kv_bytes"]
    assert run(engine, PROMPTS) == expected
    exits, plan = right(tiny_decoder, checkpoint, files, 3, 6), Plan(3, 6, 2, 2)

    engine.set_speculative(None, exits=exits, plan=plan)
    assert engine.memory()["kv_bytes"] == plain_bytes * (9 + 6 + 3) // 9
    assert engine.memory()["exit_bytes"] == sum(exit_.num_bytes for exit_ in exits) > 0
    engine.reset_stats()
    assert run(engine, PROMPTS) == expected
    assert engine.stats()["cached_tokens"] == 0
    assert_always_accepted(engine)

    engine.set_speculative(None, exits=exits, plan=plan)  # the same: what is cached is of use
    engine.reset_stats()
    assert run(engine, PROMPTS) == expected
    assert engine.stats()["cached_tokens"] > 0
    assert_always_accepted(engine)

    engine.set_speculative(None)
    # What has grown stays, so that profiling can go from plan to plan; or shrinks. Either way memory() says what is there.
    assert engine.memory()["kv_bytes"] == engine._kv.data.nbytes and engine.memory()["exit_bytes"] == 0
    engine.reset_stats()
    assert run(engine, PROMPTS) == expected
    assert engine.stats()["cached_tokens"] == 0

    engine.set_speculative(None, exits=exits[1:], plan=Plan(3, 6, 2, 2))  # fewer layers, in which another exit's KV lay
    engine.reset_stats()
    assert run(engine, PROMPTS) == expected
    stats = engine.stats()
    assert stats["cached_tokens"] == 0 and stats["accepted"] == stats["tentative"]


def test_other_exits_of_the_same_size_do_not_inherit_kv(
    tiny_decoder: Decoder, checkpoint: Checkpoint, files: dict[str, ExitsFile], expected: list[list[int]]
) -> None:
    engine = adapter_engine(tiny_decoder, Plan(3, None, 3, 1), loaded(files["random"], tiny_decoder, checkpoint, [3]))
    kv_bytes = engine.memory()["kv_bytes"]
    assert run(engine, PROMPTS) == expected
    assert engine.stats()["accepted"] < engine.stats()["tentative"] / 2
    engine.set_speculative(None, exits=right(tiny_decoder, checkpoint, files, 3), plan=Plan(3, None, 3, 1))
    engine.reset_stats()
    assert run(engine, PROMPTS) == expected
    assert engine.memory()["kv_bytes"] == kv_bytes
    assert_always_accepted(engine)


def test_an_adapter_plan_needs_its_exits(tiny_decoder: Decoder, checkpoint: Checkpoint, files: dict[str, ExitsFile], expected: list[list[int]]) -> None:
    both = SpeculativeConfig(draft={"kind": "adapter", "layer": 3}, check={"kind": "adapter", "layer": 6})
    engine = adapter_engine(tiny_decoder, Plan(3, 6, 2, 2), right(tiny_decoder, checkpoint, files, 3, 6))
    run(engine, PROMPTS[:2])
    with pytest.raises(ConfigError, match=r"speculative\.check is an adapter, but none for layer 6 was given; pass it in `exits`"):
        engine.set_speculative(both, exits=right(tiny_decoder, checkpoint, files, 3))
    with pytest.raises(ConfigError, match=r"speculative\.draft is an adapter, but none for layer 3"):
        Engine(tiny_decoder, engine._config, both)
    # Refused, nothing changed: the exits that are loaded still serve.
    assert run(engine, PROMPTS) == expected
    assert_always_accepted(engine)


def test_exits_that_a_plan_does_not_read_leave_no_gap_for_the_next(
    tiny_decoder: Decoder, checkpoint: Checkpoint, files: dict[str, ExitsFile], expected: list[list[int]]
) -> None:
    """They are refused; and what was cached without the other exit's KV is forgotten."""
    exits = right(tiny_decoder, checkpoint, files, 3, 6)
    with pytest.raises(ConfigError, match=r"does not read trained exits at layers \[6\]"):
        adapter_engine(tiny_decoder, Plan(3, None, 2, 1), exits)
    engine = adapter_engine(tiny_decoder, Plan(3, None, 2, 1), exits[:1])
    assert run(engine, PROMPTS) == expected
    engine.set_speculative(None, exits=exits, plan=Plan(3, 6, 2, 2))
    run(engine, [prompt + output for prompt, output in zip(PROMPTS, expected, strict=True)])
    assert_always_accepted(engine)


def test_no_trained_exit_takes_the_full_models_place() -> None:
    """Plans of full depth are known to tests only, but the engine takes them."""
    full, wrong = (one_hot_script(lambda exit_layer, position, token, shift=shift: (true_next(position, token) + shift) % 50) for shift in (0, 1))
    plain = run(make_engine(ScriptedDecoder(full)), [[3]])
    try:
        engine = adapter_engine(ScriptedDecoder(full), Plan(9, None, 2, 1), [HistoryExit(9, wrong)])
    except ConfigError:
        return
    assert run(engine, [[3]]) == plain


def test_the_plan_cannot_change_under_live_requests(tiny_decoder: Decoder, checkpoint: Checkpoint, files: dict[str, ExitsFile]) -> None:
    engine = make_engine(tiny_decoder)
    request_id = engine.add_request(PROMPTS[0], GREEDY)
    with pytest.raises(ConfigError, match="1 requests are unfinished"):
        engine.set_speculative(None, exits=right(tiny_decoder, checkpoint, files, 3), plan=Plan(3, None, 2, 1))
    engine.abort([request_id], notify=False)
    engine.set_speculative(None, exits=right(tiny_decoder, checkpoint, files, 3), plan=Plan(3, None, 2, 1))
