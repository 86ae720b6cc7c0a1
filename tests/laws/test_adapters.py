"""Laws 1, 2 and 7 with trained exits: adapters never change the output, and their KV is never stale, missing
or a place off.

A gap in an adapter's KV would change no output, only what is accepted. So the sharpest tests are those with
adapters that are always right (all the rest of the trunk as their blocks): one place of KV that is not the
trunk's own makes acceptance fall below 100 %. The scripted ones look at the KV itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from cache.paged_kv import PagedKV
from cache.view import BatchView
from ee_models.checkpoint.exit_files import ExitsFile
from ee_models.checkpoint.loader import Checkpoint
from ee_models.decoder import Decoder
from ee_models.exits import AdapterExit
from ee_models.pass_steps import Kind, PassStep
from hispec.config import Plan
from hispec.decoding.stages import Stages
from hispec.engine import Engine
from hispec.sampling_params import SamplingParams
from tests.helpers.adapter_engines import CASES, MIXES, PROMPTS, RIGHT, Make, assert_always_accepted
from tests.helpers.adapters import HistoryExit, adapter_engine, loaded
from tests.helpers.scripted import ScriptedDecoder, one_hot_script, true_next
from tests.helpers.support import GREEDY, random_prompts, run
from tests.helpers.sweeps import sweep
from tests.laws.test_rejection import FIRST, LAYERS, VOCAB, Paths, paths  # noqa: F401 - `paths` is a fixture

# ---- law 1 ----


@pytest.mark.parametrize(("name", "plan"), CASES, ids=str)
def test_every_mix_of_exits_gives_plain_decoding(
    engine_of: Make, expected: list[list[int]], name: str, plan: Plan
) -> None:
    engine = engine_of(name, plan)
    assert run(engine, PROMPTS) == expected
    if any(info.num_blocks for info in MIXES[name]):
        assert engine.stats()["adapter_passes"] > 0, "no adapter was read"


def test_the_exits_prove_something(engine_of: Make) -> None:
    """They are sometimes right and sometimes wrong, and not as often as the shared exits at their layers."""
    for name, plan in (
        ("draft", Plan(3, None, 4, 1)),
        ("check", Plan(3, 6, 2, 2)),
        ("both", Plan(4, 7, 3, 2)),
        ("reduced", Plan(4, 7, 2, 2)),
    ):
        engine = engine_of(name, plan)
        run(engine, PROMPTS)
        stats = engine.stats()
        assert 0.03 < stats["accepted"] / stats["tentative"] < 0.9, (
            name,
            stats["accepted"],
            stats["tentative"],
        )
        assert 0 < stats["draft_kept"] < stats["drafted"], name


@pytest.mark.parametrize(
    "config",
    [
        {"block_size": 1, "num_kv_blocks": 2048},
        {"block_size": 5},
        {"max_num_seqs": 1},
        {"max_num_seqs": 3, "max_prefill_tokens": 1},
    ],
    ids=str,
)
def test_block_sizes_batch_mixes_and_prefill_chunks_change_nothing(
    engine_of: Make, expected: list[list[int]], config: dict[str, int]
) -> None:
    assert run(engine_of("both", Plan(4, 7, 2, 2), **config), PROMPTS) == expected


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_forced_preemption_changes_nothing(
    engine_of: Make, expected: list[list[int]], prefix_caching: bool
) -> None:
    engine = engine_of("both", Plan(4, 7, 2, 2), num_kv_blocks=14, enable_prefix_caching=prefix_caching)
    assert run(engine, PROMPTS) == expected
    assert engine.stats()["preemptions"] > 0, "nothing was preempted, so nothing was shown"


@pytest.mark.parametrize("abort_after", [0, 1, 2, 3, 5, 8])
def test_aborts_leave_the_others_alone_and_always_accepted(
    engine_of: Make, expected: list[list[int]], abort_after: int
) -> None:
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
        assert outputs[request_id] == (
            expected[index] if whole else expected[index][: len(outputs[request_id])]
        )
    assert_always_accepted(engine)


# ---- law 7: adapters that are always right are always accepted ----


@pytest.mark.parametrize(("plan", "layers"), RIGHT, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_always_right_adapters_are_accepted_in_every_round(
    engine_of: Make, plan: Plan, layers: tuple[int, ...], temperature: float
) -> None:
    engine = engine_of("right", plan, max_run_ms=0.0)
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=plan.window * 4)
    run(engine, PROMPTS, params)
    assert_always_accepted(engine)
    stats = engine.stats()
    assert stats["accept_length_histogram"] == [0] * plan.window + [stats["rounds"]], (
        "a round did not commit all that it could"
    )
    blocks = [9 - layer for layer in layers]
    passes = [plan.num_draft_tokens * plan.num_checks, plan.num_checks][: len(layers)]
    assert stats["adapter_passes"] == stats["steps"] * sum(
        count * size for count, size in zip(passes, blocks, strict=True)
    )


def test_always_right_adapters_are_accepted_by_rejection_sampling_too(engine_of: Make) -> None:
    engine = engine_of("right", Plan(3, 6, 2, 2), rejection=True)
    run(engine, PROMPTS, SamplingParams(temperature=1.0, seed=1, max_tokens=24))
    assert_always_accepted(engine)


@pytest.mark.parametrize("max_num_seqs", [1, 3])
@pytest.mark.parametrize("max_prefill_tokens", [1, 5, 1000])
def test_always_accepted_after_every_prefill_chunk(
    engine_of: Make, expected: list[list[int]], max_num_seqs: int, max_prefill_tokens: int
) -> None:
    engine = engine_of(
        "right", Plan(3, 6, 2, 2), max_num_seqs=max_num_seqs, max_prefill_tokens=max_prefill_tokens
    )
    assert run(engine, PROMPTS[3:]) == expected[3:]
    assert_always_accepted(engine)


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize(("plan", "layers"), RIGHT[:2], ids=str)
def test_always_accepted_after_preemption(
    engine_of: Make, expected: list[list[int]], plan: Plan, layers: tuple[int, ...], prefix_caching: bool
) -> None:
    """The preempted are computed again from their own output, or find it in the cache."""
    engine = engine_of("right", plan, num_kv_blocks=14, enable_prefix_caching=prefix_caching)
    assert run(engine, PROMPTS) == expected
    assert engine.stats()["preemptions"] > 0
    assert_always_accepted(engine)


@pytest.mark.parametrize(("plan", "layers"), RIGHT[:2], ids=str)
def test_always_accepted_on_reused_prefixes(
    engine_of: Make, expected: list[list[int]], plan: Plan, layers: tuple[int, ...]
) -> None:
    """Prefixes of prompts, and of what was generated, by rows that sped up and by rows that did not."""
    engine = engine_of("right", plan)
    mixed = [GREEDY.model_copy(update={"speculative": index % 2 == 0}) for index in range(len(PROMPTS))]
    assert run(engine, PROMPTS, mixed) == expected
    continued = [prompt + output for prompt, output in zip(PROMPTS, expected, strict=True)]
    before = engine.stats()["cached_tokens"]
    again = run(engine, [*PROMPTS, *continued])
    assert again[: len(PROMPTS)] == expected
    # All full blocks, the last token left out, of eight prompts and of their continuations.
    assert engine.stats()["cached_tokens"] - before >= sum(
        (len(prompt) + 23) // 8 * 8 for prompt in PROMPTS
    ), "generated blocks were not found again"
    assert_always_accepted(engine)


def test_always_accepted_beside_requests_that_opt_out_or_end(
    engine_of: Make, expected: list[list[int]]
) -> None:
    params = [
        SamplingParams(temperature=0.0, max_tokens=3 * index + 3, speculative=index % 3 != 1)
        for index in range(len(PROMPTS))
    ]
    engine = engine_of("right", Plan(3, 6, 2, 2), max_num_seqs=4)
    assert run(engine, PROMPTS, params) == [output[: 3 * index + 3] for index, output in enumerate(expected)]
    assert_always_accepted(engine)
    alone = engine_of("right", Plan(3, 6, 2, 2))
    run(alone, PROMPTS[:1], GREEDY.model_copy(update={"speculative": False}))
    stats = alone.stats()
    assert stats["drafted"] == 0 and stats["rounds"] == stats["committed"] == 24


def test_a_check_that_is_mostly_wrong_costs_no_output(
    engine_of: Make,
    tiny_decoder: Decoder,
    checkpoint: Checkpoint,
    files: dict[str, ExitsFile],
    expected: list[list[int]],
) -> None:
    """Drafts are rejected wrongly, and drafted again after another token: cycle after cycle within a
    round."""
    exits = [
        *loaded(files["right"], tiny_decoder, checkpoint, [3]),
        *loaded(files["random"], tiny_decoder, checkpoint, [6]),
    ]
    engine = adapter_engine(tiny_decoder, Plan(3, 6, 2, 3), exits)
    assert run(engine, PROMPTS) == expected
    stats = engine.stats()
    assert stats["draft_kept"] < stats["drafted"] / 2


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
    monkeypatch.setattr(Stages, "_make_program", lambda *_: None)  # which fills exits without asking them
    engine = engine_of("right", Plan(3, None, 2, 1))
    assert run(engine, PROMPTS) == expected
    with pytest.raises(AssertionError, match="what is always right"):
        assert_always_accepted(engine)


def leave_out(*kinds: Kind) -> Callable[[list[PassStep]], list[PassStep]]:
    return lambda steps: [step for step in steps if step.kind not in kinds]


def a_layer_off(steps: list[PassStep]) -> list[PassStep]:
    return [replace(step, kv_layer=step.kv_layer - 1) if step.layer else step for step in steps]


# Which steps of a pass in one call are wrong, what is made of them, and whether the output shows it.
WRONG_STEPS: dict[str, tuple[str, Callable[[list[PassStep]], list[PassStep]], bool]] = {
    "nothing is filled": ("fill_steps", lambda steps: [], False),
    "the last block is not filled": ("fill_steps", leave_out(Kind.FILL), False),
    "filled a layer of KV off": ("fill_steps", a_layer_off, False),
    "filled from what the last block alone makes": ("fill_steps", leave_out(Kind.LAYER), False),
    "what fills goes into the trunk": ("fill_steps", leave_out(Kind.BRANCH, Kind.BACK), True),
    "read without its blocks": ("logit_steps", leave_out(Kind.LAYER), False),
    "read a layer of KV off": ("logit_steps", a_layer_off, False),
    "what is read goes into the trunk": ("logit_steps", leave_out(Kind.BRANCH), True),
}


@pytest.mark.parametrize("fault", WRONG_STEPS)
def test_wrong_steps_lower_acceptance_or_change_the_output(
    engine_of: Make,
    tiny_decoder: Decoder,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    """The tests above can fail where a pass is one call, too."""
    assert tiny_decoder.passes is not None
    method, wrong, is_seen = WRONG_STEPS[fault]
    steps = getattr(AdapterExit, method)
    monkeypatch.setattr(AdapterExit, method, lambda self, kv_layer: wrong(steps(self, kv_layer)))
    engine = engine_of("right", Plan(3, None, 2, 1))
    assert (run(engine, PROMPTS) != expected) == is_seen
    with pytest.raises(AssertionError, match="what is always right"):
        assert_always_accepted(engine)


# ---- scripted: the KV itself ----


def scripted(
    plan: Plan, layers: tuple[int, ...], agreement: float, **config: Any
) -> tuple[Engine, list[HistoryExit]]:
    """Exits that agree with the full model at a share of places, told by position and token."""

    def next_token(exit_layer: int, position: int, token: int) -> int:
        right = (
            exit_layer == 9 or (position * 7919 + token * 104729 + exit_layer * 31) % 1000 < 1000 * agreement
        )
        return (true_next(position, token) + (0 if right else 17)) % 50

    script = one_hot_script(next_token)
    exits = [HistoryExit(layer, script, num_kv_layers=1 + layer % 2) for layer in layers]
    return adapter_engine(ScriptedDecoder(script), plan, exits, **config), exits


HISTORIES = [
    (Plan(2, None, 3, 1), (2,)),
    (Plan(2, 5, 2, 2), (2, 5)),
    (Plan(2, 5, 3, 3), (5,)),
    (Plan(3, 6, 1, 2), (3,)),
    (Plan(4, 7, 2, 1), (4, 7)),
]


@sweep(
    "plan, layers, agreement",
    [(*history, agreement) for agreement in (0.0, 0.5, 0.9, 1.0) for history in HISTORIES],
    2,
    ids=str,
)
def test_an_adapter_always_finds_its_whole_history(
    plan: Plan, layers: tuple[int, ...], agreement: float
) -> None:
    """In a pool that is too small, with prompts in chunks, prefixes shared, rows that opt out and rows that
    end at any column."""
    engine, exits = scripted(
        plan, layers, agreement, num_kv_blocks=12, block_size=4, max_num_seqs=3, max_prefill_tokens=5
    )
    stem = random_prompts([9], vocab=50)[0]
    prompts = [stem, [*stem, 1], stem[:5], [3], [*stem, 1, 2, 3, 4], [*stem[:8], 9]]
    params = [
        SamplingParams(temperature=0.0, max_tokens=3 + 4 * index, speculative=index != 2)
        for index in range(len(prompts))
    ]
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
    monkeypatch.setattr(
        HistoryExit,
        "fill",
        lambda self, hidden, kv, kv_layer, view: (
            filled(self, hidden, kv, kv_layer, view) if self.num_read < 3 else None
        ),
    )
    with pytest.raises(AssertionError, match="KV is missing"):
        run(engine, [[3]], GREEDY)
