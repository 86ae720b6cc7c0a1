"""Law 2 with trained exits: sampled output is plain decoding's, `rejection` keeps the full model's law, and
the confidence exit changes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import hispec.decoding.acceptance
import hispec.sampling.sampler
from cache.hidden import HiddenBuffer
from cache.paged_kv import PagedKV
from ee_models.decoder import Decoder
from hispec.config import Plan
from hispec.decoding.acceptance import RejectionJudge
from hispec.decoding.batch import RoundBatch
from hispec.decoding.round import run_round
from hispec.decoding.stages import PassCounts, Stages
from hispec.sampling.inputs import RowSampling
from hispec.sampling.sampler import Sampler
from hispec.sampling_params import SamplingParams
from tests.helpers.adapter_engines import CASES, MIXES, PROMPTS, Make, assert_always_accepted
from tests.helpers.adapters import HistoryExit, adapter_engine, make_module
from tests.helpers.scripted import ScriptedDecoder, tiny_config
from tests.helpers.support import exit_drafter, make_engine, run
from tests.helpers.tiny import TINY_VOCAB
from tests.laws.test_rejection import FIRST, LAYERS, VOCAB, Paths, paths  # noqa: F401 - `paths` is a fixture

# ---- sampled ----


def reduced_vocabularies() -> list[int]:
    """Every token that one of the reduced exits can say."""
    modules = [make_module(info, tiny_config(9, TINY_VOCAB)) for info in MIXES["reduced"]]
    return sorted(
        {token for module in modules if module.vocabulary is not None for token in module.vocabulary.tolist()}
    )


REDUCED = reduced_vocabularies()
SAMPLED = [
    SamplingParams(temperature=1.0, seed=1, max_tokens=24),
    SamplingParams(temperature=0.7, top_k=20, seed=2, max_tokens=24),
    SamplingParams(temperature=1.3, top_p=0.8, min_p=0.02, seed=3, max_tokens=24, repetition_penalty=1.3),
    SamplingParams(temperature=0.0, max_tokens=24, presence_penalty=1.5, frequency_penalty=0.5),
    SamplingParams(
        temperature=0.9,
        seed=1,
        max_tokens=24,
        logit_bias={5: 4.0, 7: -50.0},
        min_tokens=10,
        stop_token_ids=list(range(0, 250, 3)),
    ),
    # For a while nothing is allowed that the reduced vocabularies hold.
    SamplingParams(
        temperature=1.0,
        top_p=0.9,
        min_p=0.01,
        top_k=7,
        seed=5,
        max_tokens=24,
        min_tokens=16,
        stop_token_ids=REDUCED,
    ),
    SamplingParams(temperature=0.0, max_tokens=24, min_tokens=16, stop_token_ids=REDUCED),
    SamplingParams(temperature=0.8, seed=8, max_tokens=24, speculative=False),
]


@pytest.fixture(scope="module")
def plain_sampled(tiny_decoder: Decoder) -> list[list[int]]:
    """Each request alone, decoded plainly."""
    return [
        run(make_engine(tiny_decoder), [prompt], params)[0]
        for prompt, params in zip(PROMPTS, SAMPLED, strict=True)
    ]


@pytest.mark.parametrize(
    ("name", "plan"), [case for case in CASES if case[0] in ("both", "reduced", "draft")], ids=str
)
def test_sampled_output_in_one_batch_equals_plain_alone(
    engine_of: Make, plain_sampled: list[list[int]], name: str, plan: Plan
) -> None:
    assert run(engine_of(name, plan), PROMPTS, SAMPLED) == plain_sampled


def test_sampled_output_survives_preemption(engine_of: Make, plain_sampled: list[list[int]]) -> None:
    engine = engine_of("reduced", Plan(4, 7, 2, 2), num_kv_blocks=14)
    assert run(engine, PROMPTS, SAMPLED) == plain_sampled
    assert engine.stats()["preemptions"] > 0


def test_rejection_with_reduced_vocabularies_stays_reproducible_and_greedy_rows_exact(
    engine_of: Make, tiny_decoder: Decoder
) -> None:
    outputs = run(engine_of("reduced", Plan(4, 7, 2, 2), rejection=True), PROMPTS, SAMPLED)
    assert outputs == run(
        engine_of("reduced", Plan(4, 7, 2, 2), rejection=True, num_kv_blocks=64), PROMPTS, SAMPLED
    )
    for index, params in enumerate(SAMPLED):
        if params.temperature == 0.0:
            assert outputs[index] == run(make_engine(tiny_decoder), [PROMPTS[index]], params)[0]


@pytest.fixture
def paths_past_nothing(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> Paths:  # noqa: F811 - a fixture
    """`paths`, and where an exit may say nothing at all, the token that `draw` then gives, without a
    branch."""
    branching = hispec.decoding.acceptance.draw

    def draw(logits: Tensor, key: Tensor) -> Tensor:
        drawn = DRAW(logits, key)
        possible = ~logits.isnan().all(-1)
        if bool(possible.any()):
            drawn[possible] = branching(logits[possible], key)
        return drawn

    monkeypatch.setattr(hispec.decoding.acceptance, "draw", draw)
    monkeypatch.setattr(hispec.sampling.sampler, "draw", draw)
    return paths


def one_round(
    decoder: ScriptedDecoder,
    exits: list[HistoryExit],
    plan: Plan,
    params: SamplingParams,
    stop_ids: frozenset[int],
) -> tuple[int, ...]:
    kv = PagedKV(
        LAYERS + sum(exit_.num_kv_layers for exit_ in exits), 4, 4, 1, 2, torch.float32, torch.device("cpu")
    )
    stages = Stages(
        decoder,
        LAYERS,
        kv,
        HiddenBuffer(2, 1, plan.window, 3, torch.float32, torch.device("cpu")),
        PassCounts(),
        exits,
    )
    judge = RejectionJudge(1, plan.window, VOCAB, torch.device("cpu"), plan.check_layer is not None)
    tokens = torch.zeros(1, plan.window + 1, dtype=torch.int64)
    tokens[0, 0] = FIRST
    sampler = Sampler([RowSampling(params, 0, [FIRST], [], stop_ids)], VOCAB, torch.device("cpu"))
    limits = torch.tensor([[plan.window], [plan.num_draft_tokens], [plan.num_checks]])
    batch = RoundBatch(tokens, torch.tensor([0]), *limits, torch.tensor([[2, 0, 1, 3]]), 4, 16, sampler)
    result = run_round(stages, plan, judge, exit_drafter(stages, plan, judge), batch)
    return tuple(result.tokens[0, 1 : 1 + int(result.counts[0])].tolist())


DRAW = hispec.sampling.sampler.draw
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
    """Enumerated as in test_laws_rejection. With min_tokens the smallest exit may say nothing at all for two
    tokens."""
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
        exits = [
            HistoryExit(layer, script, says=torch.tensor(SAYS[name]))
            for layer, name in zip(layers, says, strict=True)
        ]
        return one_round(ScriptedDecoder(script, LAYERS, VOCAB), exits, plan, params, stop_ids)

    law = paths_past_nothing.all(outcome)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-5)
    for sequence in itertools.product(range(VOCAB), repeat=plan.window):
        previous, steps = (FIRST, *sequence), []
        for position in range(plan.window):
            steps.append(full_law(position, previous[position])[sequence[position]])
        rest = [
            float(torch.tensor(steps[place:], dtype=torch.float64).prod()) for place in range(plan.window + 1)
        ]
        got = sum(
            weight * rest[len(committed)]
            for committed, weight in law.items()
            if sequence[: len(committed)] == committed
        )
        assert got == pytest.approx(rest[0], rel=1e-4, abs=1e-7), sequence


# ---- confidence ----


@pytest.mark.parametrize("confidence", [0.3, 0.999])
@pytest.mark.parametrize("max_num_seqs", [1, 8])
def test_confidence_changes_no_output(
    engine_of: Make,
    expected: list[list[int]],
    plain_sampled: list[list[int]],
    confidence: float,
    max_num_seqs: int,
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
def test_always_right_adapters_stay_so_where_drafting_stops_early(
    engine_of: Make, expected: list[list[int]], confidence: float
) -> None:
    for plan in (Plan(3, None, 5, 1), Plan(3, 6, 4, 2)):
        engine = engine_of("right", plan, confidence=confidence, max_num_seqs=1)
        assert run(engine, PROMPTS[2:6]) == expected[2:6]
        assert_always_accepted(engine)
        stats = engine.stats()
        assert stats["drafted"] < stats["rounds"] * plan.num_draft_tokens * plan.num_checks * 0.85, (
            "drafting never stopped early"
        )


def confident_below(limit: int, wrong: int = 0) -> Callable[[int, int, int], Tensor]:
    """Tokens below `limit` are followed by one of theirs, surely; others by one of theirs, unsurely."""

    def script(exit_layer: int, position: int, token: int) -> Tensor:
        low, size, scale = (0, limit, 20.0) if token < limit else (limit, 50 - limit, 0.5)
        return (
            torch.nn.functional.one_hot(torch.tensor(low + (token * 7 + position * 3 + 1) % size), 50).float()
            * scale
        )

    return script


@pytest.mark.parametrize(
    ("prompts", "drafted"),
    [
        ([[3]], [5]),  # sure: all K
        ([[30]], [0]),  # unsure: not even the first
        ([[30], [40]], [0, 0]),
        ([[3], [30]], [5, 0]),  # a row stops for itself
    ],
)
def test_a_row_drafts_no_further_than_the_exit_is_sure(prompts: list[list[int]], drafted: list[int]) -> None:
    script = confident_below(25)
    for exits in ([], [HistoryExit(2, script)]):
        engine = adapter_engine(ScriptedDecoder(script), Plan(2, None, 5, 1), exits, confidence=0.5)
        run(engine, prompts, [SamplingParams(temperature=0.0, max_tokens=(num + 1) * 4) for num in drafted])
        stats = engine.stats()
        assert stats["rounds"] == 4 * len(prompts) and stats["drafted"] == stats["draft_kept"] == 4 * sum(
            drafted
        )
        assert stats["layer_passes"] == 4 * ((max(drafted) + 1) * 2 + 7)
        num_rounds = 4 if any(drafted) else 3  # a last token alone is decoded plainly
        for exit_ in exits:
            assert exit_.num_read == 4 * sum(drafted) + num_rounds * drafted.count(0), (
                "a row that stopped was drafted for"
            )
