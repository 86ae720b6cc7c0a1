"""Whatever a controller chooses, round by round, the output is plain decoding's, and no exit and no draft
model has a hole in its KV."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from cache.paged_kv import PagedKV
from cache.view import BatchView
from ee_models.checkpoint.exit_files import ExitsFile
from ee_models.checkpoint.loader import Checkpoint
from ee_models.decoder import Decoder
from hispec.config import EngineConfig, SchedulingConfig, SpeculativeConfig
from hispec.engine import Engine
from hispec.errors import ConfigError, build
from hispec.latency.model import LatencyModel, Linear
from hispec.runner.plan_spec import Models, PlanSpec
from hispec.sampling_params import SamplingParams
from tests.helpers.adapter_engines import PROMPTS, assert_always_accepted
from tests.helpers.adapters import loaded
from tests.helpers.recorded_graphs import RecordedGraphs
from tests.helpers.restless import flat_latency, make_restless
from tests.helpers.support import GREEDY, make_engine, run
from tests.helpers.sweeps import sweep

SMALL: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_model_len": 128,
    "block_size": 8,
    "num_kv_blocks": 64,
    "max_prefill_tokens": 32,
}
SHORT = {"max_size": 3, "min_size": 1, "match_confidence": None}
# By what is chosen from.
WAYS: dict[str, dict[str, Any]] = {
    "exits": {"draft": {"layer": 3}, "check": {"layer": 6}, "num_draft_tokens": 4, "num_checks": 3},
    "hybrids": {
        "draft": {"kind": "hybrid", "layer": 3, "exit": "exit", "ngram": SHORT, "num_exit_tokens": 2},
        "check": {"layer": 8},
        "num_draft_tokens": 5,
    },
    "sure": {
        "draft": {"layer": 5},
        "check": {"layer": 8, "confidence": 0.5},
        "num_draft_tokens": 3,
        "draft_confidence": 0.4,
    },
    "gated": {
        "draft": {"kind": "hybrid", "layer": 5, "exit": "exit", "ngram": SHORT, "num_exit_tokens": 2},
        "check": {"layer": 8, "continue_confidence": 0.5},
        "num_draft_tokens": 2,
        "num_checks": 4,
    },
    "ngram": {"draft": {"kind": "ngram", "ngram": SHORT}, "check": {"layer": 6}, "num_draft_tokens": 4},
    "model": {"draft": {"kind": "model", "path": "tiny"}, "check": {"layer": 6}, "num_draft_tokens": 3},
    "trained": {
        "draft": {"kind": "hybrid", "layer": 4, "ngram": SHORT},
        "check": {"kind": "adapter", "layer": 7},
        "num_draft_tokens": 3,
        "num_checks": 2,
    },
}
SAMPLED = [
    SamplingParams(temperature=0.8, top_p=0.9, seed=seed, max_tokens=24, presence_penalty=0.2)
    for seed in range(len(PROMPTS))
]
Make = Callable[..., Engine]


@pytest.fixture
def engine_of(tiny_decoder: Decoder, checkpoint: Checkpoint, files: dict[str, ExitsFile]) -> Make:
    """make(settings, exits=(name of a file, layers), policy=..., goodput={...}, latency=..., **config): with
    control: goodput."""

    def make(
        values: dict[str, Any],
        exits: tuple[str, Sequence[int]] = ("both", ()),
        policy: str = "fcfs",
        swap_bytes: int = 1 << 20,
        goodput: dict[str, Any] | None = None,
        latency: LatencyModel | None = None,
        decoder: Decoder = tiny_decoder,
        **config: Any,
    ) -> Engine:
        parts = {name: config.pop(name) for name in ("is_static", "graph_device") if name in config}
        speculative = build(SpeculativeConfig, {**values, "control": "goodput", "goodput": goodput or {}})
        is_trained = bool(speculative.trained_layers())
        layers = exits[1] or files[exits[0]].layers
        has_model = speculative.draft.kind == "model"
        return Engine(
            decoder,
            EngineConfig(**{**SMALL, **config}),
            speculative,
            exits=loaded(files[exits[0]], decoder, checkpoint, sorted(layers)) if is_trained else (),
            draft_model=decoder if has_model else None,
            latency=latency or flat_latency([3, 4, 5, 6, 7, 8, *layers], has_model=has_model),
            scheduling=SchedulingConfig(
                policy=policy, review_rounds=1, first_quantum=2.0, stability_window=2, swap_bytes=swap_bytes
            ),
            **parts,
        )

    return make


# ---- laws 1 and 2 ----


@sweep(
    "name, policy",
    itertools.product(WAYS, ["fcfs", "laps"]),
    lambda case: list(WAYS).index(case[0]) % 2 == (case[1] == "laps"),
)
def test_whatever_is_chosen_the_output_is_plain_decodings(
    engine_of: Make, tiny_decoder: Decoder, expected: list[list[int]], name: str, policy: str
) -> None:
    engine = engine_of(WAYS[name], policy=policy, num_kv_blocks=24, max_run_ms=0.0)  # more choices
    control = make_restless(engine, seed=1)
    assert run(engine, PROMPTS) == expected
    assert len({choice.plan for choice in control.choices}) > 8 and {
        choice.route for choice in control.choices
    } >= {None, 0, 1}
    assert engine.stats()["preemptions"] > 0
    plain = run(make_engine(tiny_decoder), PROMPTS, SAMPLED)
    assert run(engine, PROMPTS, SAMPLED) == plain


@pytest.mark.parametrize("name", WAYS)
def test_the_controller_itself_changes_no_token(
    engine_of: Make, expected: list[list[int]], name: str
) -> None:
    """As eager to try something else as the settings allow."""
    eager = {"interval": 1, "margin": 1.0, "probe_share": 0.5, "shadow_share": 1.0, "window": 4.0}
    engine = engine_of(WAYS[name], goodput=eager)
    for _ in range(2):
        assert run(engine, PROMPTS) == expected
    stats = engine.stats()["control"]
    assert (
        stats["decisions"] > 20
        and stats["probes"] > 3
        and stats["shadow_rounds"] > 0
        and len(stats["rounds_by_plan"]) > 3
    )


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "mlfq", "laps"])
def test_every_policy_preempts_without_a_trace_in_the_output(
    engine_of: Make, expected: list[list[int]], policy: str
) -> None:
    """Few blocks: requests lose their rows and their blocks, to host memory or for good."""
    for swap_bytes in (0, 1 << 20):
        engine = engine_of(
            WAYS["trained"], policy=policy, swap_bytes=swap_bytes, num_kv_blocks=16, max_num_seqs=3
        )
        make_restless(engine, seed=8)
        assert run(engine, PROMPTS) == expected
        assert engine.stats()["preemptions"] > 0


@sweep(
    "name, is_captured",
    itertools.product(["exits", "hybrids", "sure", "gated", "trained", "model"], [False, True]),
    lambda case: case in {("exits", False), ("gated", False), ("trained", True)},
)
def test_rounds_of_static_shape_follow_every_choice(
    engine_of: Make,
    torch_decoder: Decoder,
    no_numba: None,
    expected: list[list[int]],
    name: str,
    is_captured: bool,
) -> None:
    """Captured too, with a graph for each plan, and for each that is watched."""
    graph_device = RecordedGraphs() if is_captured else None
    engine = engine_of(
        WAYS[name], is_static=True, graph_device=graph_device, decoder=torch_decoder, max_graphs=32
    )
    control = make_restless(engine, seed=2)
    assert run(engine, PROMPTS) == expected
    assert any(seen.shadows for seen in control.seen)
    assert not any(seen.shadows and not seen.choice.watches for seen in control.seen), "what nobody asked for"
    assert not is_captured or engine.stats()["graph_replays"] > 0


def test_rejection_may_be_controlled_too(engine_of: Make) -> None:
    engine = engine_of({**WAYS["exits"], "acceptance": "rejection"})
    control = make_restless(engine)
    outputs = run(engine, PROMPTS, SAMPLED)
    assert [len(output) for output in outputs] == [24] * len(PROMPTS) and not any(
        seen.shadows for seen in control.seen
    )
    assert {choice.plan.check_layer for choice in control.choices} == {None, 3, 6}


# ---- no holes ----


@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize("is_along", [True, False])
def test_exits_that_were_not_in_use_have_no_holes(
    engine_of: Make, expected: list[list[int]], is_along: bool, is_static: bool
) -> None:
    """Exits that are always right, if they see all positions: written along in every round, or caught up with
    in one pass."""
    layers = (1, 3, 6)
    cost = {f"along/{layer}": Linear(constant_ms=1.0 if is_along else 1e6) for layer in layers} | {
        f"fill/{layer}": Linear(constant_ms=1e3) for layer in layers
    }
    goodput = {"drafters": ["adapter"], "layers": list(layers)}
    settings = {"draft": {"kind": "adapter", "layer": 3}, "num_draft_tokens": 3, "num_checks": 2}
    engine = engine_of(
        settings,
        ("right", layers),
        goodput=goodput,
        latency=flat_latency(layers, **cost),
        is_static=is_static,
    )
    assert engine._runtime.extra_kv == (set(layers) if is_along else set())
    make_restless(engine, seed=3, plain=0.4)
    longer = [prompt + output for prompt, output in zip(PROMPTS, run(engine, PROMPTS), strict=True)]
    assert [text[len(prompt) :] for text, prompt in zip(longer, PROMPTS, strict=True)] == expected
    run(engine, longer)  # on cached blocks, which must not lack anything
    assert engine.stats()["cached_tokens"] > 0
    assert_always_accepted(engine)
    assert (engine.stats()["caught_up_tokens"] == 0) == is_along


def test_which_exits_are_kept_up_is_decided_by_cost_without_settings_of_the_controller_too(
    tiny_decoder: Decoder,
) -> None:
    latency = flat_latency((3,), **{f"{name}/3": Linear(constant_ms=1.0) for name in ("along", "fill")})

    def always_writes(goodput: dict[str, Any] | None) -> bool:
        fields = {"draft": {"kind": "adapter", "layer": 3}, "control": "goodput", "goodput": goodput}
        return PlanSpec(
            Models(tiny_decoder), build(SpeculativeConfig, fields), latency=latency
        ).always_writes(3)

    assert [always_writes(goodput) for goodput in (None, {}, {"probe_share": 0.02})] == [False] * 3
    assert always_writes({"probe_share": 0.0})


@pytest.mark.parametrize("swap_bytes", [0, 1 << 22])
def test_preempted_requests_take_their_gaps_along(
    engine_of: Make, expected: list[list[int]], swap_bytes: int
) -> None:
    """Exits that fall behind and draft models, under preemption that drops, keeps or moves KV."""
    layers = (1, 3, 6)
    cost = {f"along/{layer}": Linear(constant_ms=1e6) for layer in layers} | {
        f"fill/{layer}": Linear() for layer in layers
    }
    settings = {"draft": {"kind": "adapter", "layer": 3}, "num_draft_tokens": 3, "num_checks": 2}
    goodput = {"drafters": ["adapter"], "layers": list(layers)}
    engine = engine_of(
        settings,
        ("right", layers),
        "laps",
        swap_bytes,
        goodput,
        flat_latency(layers, **cost),
        num_kv_blocks=18,
    )
    make_restless(engine, seed=4, plain=0.4)
    assert run(engine, PROMPTS) == expected
    assert_always_accepted(engine)
    assert engine.stats()["caught_up_tokens"] > 0 and engine.stats()["preemptions"] > 0


def test_a_draft_model_that_was_not_in_use_catches_up(engine_of: Make, expected: list[list[int]]) -> None:
    engine = engine_of(WAYS["model"], goodput={"drafters": ["model"]})
    control = make_restless(engine, seed=5, plain=0.5)
    for prompts in (PROMPTS, [prompt + output for prompt, output in zip(PROMPTS, expected, strict=True)]):
        run(engine, prompts)
    stats = engine.stats()
    assert stats["caught_up_tokens"] > 0 and stats["drafter_failures"] == 0
    two_tier = [seen for seen in control.seen if seen.choice.route == 0]
    assert sum(seen.drafted.sum() for seen in two_tier) == sum(seen.kept.sum() for seen in two_tier) > 0


# ---- what a controller is told ----


def test_shadows_are_what_the_exits_would_have_said_at_every_position(
    engine_of: Make, tiny_decoder: Decoder
) -> None:
    """Each committed position is read once, whatever the plan was: so their share is that of the whole
    text."""
    for plain in (1.0, 0.0):
        engine = engine_of(WAYS["exits"], goodput={"drafters": ["ngram"], "layers": [3, 6]})
        control = make_restless(engine, seed=6, plain=plain, watches=1.0)
        outputs = run(engine, PROMPTS)
        read = {3: 0, 6: 0}
        right = {3: 0, 6: 0}
        for seen in control.seen:
            for shadow in seen.shadows:
                read[shadow.layer] += int(shadow.places.sum())
                right[shadow.layer] += int(shadow.right.sum())
                assert np.all(shadow.agreed <= shadow.drafts) and np.all(shadow.right <= shadow.places)
        if plain == 1.0:
            assert read == dict.fromkeys(read, sum(map(len, outputs)))
            assert right == {layer: num_right(tiny_decoder, layer, outputs) for layer in read}
            assert 0 < right[3] < right[6] < read[6]
        else:
            routes = [
                control.routes[seen.choice.route].check_layer
                for seen in control.seen
                if seen.choice.route is not None and seen.choice.watches
            ]
            watched = [
                {shadow.layer for shadow in seen.shadows}
                for seen in control.seen
                if seen.choice.route is not None and seen.choice.watches
            ]
            assert watched == [{3, 6} - {check_layer} for check_layer in routes], (
                "an exit that checks is in use, and is not watched"
            )


def num_right(decoder: Decoder, layer: int, outputs: Sequence[Sequence[int]]) -> int:
    """Tokens of the outputs that the exit says too, by a pass over each whole text."""
    total = 0
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        text = torch.tensor([*prompt, *output[:-1]])
        config = decoder.config
        kv = PagedKV(
            config.num_layers,
            1,
            256,
            config.num_kv_heads,
            config.head_dim,
            torch.float32,
            torch.device("cpu"),
        )
        places = torch.arange(len(text))
        view = BatchView(
            places,
            places,
            torch.zeros(1, 1, dtype=torch.int64),
            torch.tensor([0, len(text)]),
            len(text),
            len(text),
        )
        hidden = decoder.run_layers(decoder.embed(text), 0, layer, kv, view)
        said = decoder.logits(hidden, layer).argmax(-1)[len(prompt) - 1 :]
        total += int((said == torch.tensor(output)).sum())
    return total


@pytest.mark.parametrize("max_run_ms", [0.0, 10_000.0])
def test_what_is_observed_adds_up(engine_of: Make, max_run_ms: float) -> None:
    """Cycles, drafts within their caps, and tokens, of live rows alone; of rounds that ran together, too."""
    engine = engine_of(WAYS["hybrids"], max_run_ms=max_run_ms)
    control = make_restless(engine, seed=7)
    outputs = run(engine, PROMPTS[:5])
    stats = engine.stats()
    assert sum(seen.tokens for seen in control.seen) == stats["committed"] >= sum(map(len, outputs))
    assert sum(seen.num_rows * seen.rounds for seen in control.seen) == stats["rounds"]
    assert (max(seen.rounds for seen in control.seen) > 1) == (max_run_ms > 0.0)
    cycles = [
        np.concatenate([getattr(seen, name) for seen in control.seen])
        for name in ("numbers", "caps", "drafted", "kept", "looked_up")
    ]
    numbers, caps, drafted, kept, looked_up = cycles
    assert (
        set(numbers.tolist()) <= set(range(5))
        and caps.min() >= 1
        and np.all(kept <= drafted)
        and np.all(drafted <= caps)
    )
    assert (
        drafted.sum() == stats["drafted"]
        and kept.sum() == stats["draft_kept"]
        and drafted[looked_up == 1].sum() == stats["looked_up"]
    )
    for seen in control.seen:
        limits = seen.choice.most_drafts
        assert all(
            cap <= limits.get(number, seen.choice.plan.num_draft_tokens)
            for number, cap in zip(seen.numbers.tolist(), seen.caps.tolist(), strict=True)
        )
        assert seen.seconds > 0 and np.all(seen.accepted <= seen.tentative)


@pytest.mark.parametrize("how", [{}, {"max_run_ms": 10_000.0}, {"is_static": True}], ids=str)
def test_a_request_has_no_more_cycles_than_its_own(engine_of: Make, how: dict[str, Any]) -> None:
    """However few places they took, and though others of the batch have more."""
    engine = engine_of(WAYS["exits"], **({"max_run_ms": 0.0} | how))
    control, num_less = make_restless(engine, seed=3, plain=0.0, watches=0.0), 0
    for _ in range(8):
        run(engine, PROMPTS[:5])
    for seen in control.seen:
        choice, cycles = seen.choice, Counter(seen.numbers.tolist())
        assert all(num <= choice.num_checks(number) * seen.rounds for number, num in cycles.items())
        num_less += sum(choice.num_checks(number) < choice.plan.num_checks for number in cycles)
    assert num_less > 2


# ---- what is refused ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"goodput": {"drafters": ["model"]}}, "'model' cannot be had here"),
        (
            {"goodput": {"layers": [5]}, "draft": {"kind": "adapter", "layer": 4}},
            "no trained exit at layer 5; there are some at",
        ),
        (
            {
                "draft": {"kind": "adapter", "layer": 4, "path": "a"},
                "check": {"kind": "adapter", "layer": 7, "path": "b"},
            },
            "exits of one folder",
        ),
        (
            {"draft": {"kind": "adapter", "layer": 4}, "check": {"kind": "exit", "layer": 6}},
            "takes trained exits alone.*the exit at layer 6 is no trained one; there are some at",
        ),
        ({"goodput": {"layers": [9]}}, "not an early exit of a model of 9 layers"),
    ],
)
def test_what_cannot_be_chosen_from_is_refused(engine_of: Make, change: dict[str, Any], message: str) -> None:
    goodput = change.pop("goodput", None)
    with pytest.raises(ConfigError, match=message):
        engine_of({**WAYS["exits"], "check": None, **change}, goodput=goodput)


def test_goodput_without_costs_is_refused(tiny_decoder: Decoder) -> None:
    with pytest.raises(ConfigError, match="needs `latency`"):
        Engine(
            tiny_decoder, EngineConfig(**SMALL), SpeculativeConfig(draft={"kind": "ngram"}, control="goodput")
        )
    engine = Engine(tiny_decoder, EngineConfig(**SMALL))
    with pytest.raises(ConfigError, match="no stage 'verify/0'"):
        engine.set_speculative(
            SpeculativeConfig(draft={"kind": "ngram"}, control="goodput"),
            latency=LatencyModel({"plain": Linear(1.0)}),
        )
    assert engine.plan.is_plain and run(engine, PROMPTS[:2], GREEDY), "the plan before is still in use"
