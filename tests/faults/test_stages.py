"""Something raises in the middle of a step: no token is lost, repeated or wrong, no block is lost, and the
engine serves what comes next."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from cache.blocks import BlockPool
from ee_models.decoder import Decoder
from ee_models.fused_pass import FusedPasses
from hispec import LLM
from hispec.decoding.round import Round
from hispec.decoding.stages import Stages
from hispec.drafters.autoregressive import ExitHead
from hispec.drafters.model import ModelHead
from hispec.drafters.ngram import NgramDrafter
from hispec.runner.launchers import StaticLauncher
from hispec.sampling.logits import Logits
from hispec.sampling.sampler import Sampler
from hispec.sampling_params import SamplingParams
from hispec.scheduling.scheduler import Scheduler
from tests.faults.plans import PLANS, make
from tests.helpers.faults import Fault, run_on
from tests.helpers.support import make_engine, random_prompts, run
from tests.helpers.sweeps import sweep

PROMPTS = random_prompts((1, 7, 33, 12), seed=3)
LATER = [PROMPTS[2] + [5, 6], PROMPTS[0]]  # which would show a block of wrong content in the prefix cache
PARAMS = SamplingParams(temperature=0.0, max_tokens=10)
LISTED = SamplingParams(temperature=0.0, max_tokens=10, logprobs=2, repetition_penalty=1.1)


class Boom(Exception):
    """What no part of the engine knows."""


# Where a step of any plan may raise; and what drafters do, whose failures are no more than a warning.
EVERYWHERE = {
    "prefill": (Stages, "prefill"),
    "forward": (FusedPasses, "run"),
    "decode": (Round, "decode"),
    "check": (Round, "check"),
    "verify": (Round, "verify"),
    "choice": (Logits, "likeliest"),
    "sampler's rows": (Sampler, "load"),
    "sampler's counts": (Sampler, "advance"),
    "places": (Stages, "select"),
    "KV of a tree": (Stages, "move"),
    "blocks": (BlockPool, "extend"),
    "commit": (Scheduler, "commit"),
    "rounds together": (FusedPasses, "run_linked"),
}
DRAFTERS = {
    "exit": (ExitHead, "logits"),
    "exit's last token": (ExitHead, "fill"),
    "model": (ModelHead, "logits"),
    "model's prompts": (ModelHead, "prefill"),
    "lookup": (NgramDrafter, "propose"),
    "lookup's texts": (NgramDrafter, "follow"),
    "lookup's ends": (NgramDrafter, "finish"),
}
# What each plan comes to, so that a fault that is never reached is no test.
REACHED = {
    "plain": {"decode", "rounds together"},
    "exit": {"verify", "exit", "exit's last token", "rounds together"},
    "three tiers": {"check", "verify", "exit", "rounds together"},
    "ngram": {"verify", "lookup", "lookup's texts", "lookup's ends", "rounds together"},
    "ngram checks": {"check", "lookup", "rounds together"},
    "hybrid": {"verify", "exit", "exit's last token", "lookup", "rounds together"},
    "model": {"verify", "model", "model's prompts"},
    "exit gated": {"check", "exit", "rounds together"},
    "tree": {"verify", "exit", "KV of a tree"},
    "tree checks": {"check", "KV of a tree"},
}


def run_ms(name: str) -> float:
    """engine.max_run_ms by which rounds come to where the fault is."""
    return 10_000.0 if name == "rounds together" else 0.0


@pytest.fixture(scope="module")
def wanted(tiny_decoder: Decoder) -> list[list[list[int]]]:
    engine = make_engine(tiny_decoder)
    return [run(engine, prompts, PARAMS) for prompts in (PROMPTS, LATER)]


@sweep(
    "plan, late",
    itertools.product(PLANS, [False, True]),
    lambda case: case[0] == "three tiers" or (case[1] and list(PLANS).index(case[0]) % 2 == 0),
)
def test_whatever_raises_nothing_is_lost(
    tiny_decoder: Decoder, wanted: list[list[list[int]]], plan: str, late: bool
) -> None:
    reached = set()
    for at, (name, (owner, method)) in enumerate((EVERYWHERE | DRAFTERS).items()):
        with pytest.MonkeyPatch.context() as patch:
            engine = make(tiny_decoder, plan, max_run_ms=run_ms(name))
            fault = Fault(patch, owner, method, Boom, lambda number, *_, at=at: number == 1 + at % 3, late)
            raised = None if name in DRAFTERS else Boom
            found = run_on(engine, PROMPTS, PARAMS, raised)
        if fault.num_raised == 0:
            continue
        reached.add(name)
        assert found == (wanted[0], [None] * 4), name
        assert (engine.stats()["drafter_failures"] > 0) >= (name in DRAFTERS), name
        assert run(engine, LATER, PARAMS) == wanted[1], name
    assert reached >= REACHED[plan] | {"prefill", "forward", "places", "blocks", "commit", "sampler's rows"}


@pytest.mark.slow
@pytest.mark.parametrize("is_static", [False, True], ids=["packed", "static"])
@pytest.mark.parametrize("name", [*EVERYWHERE, *DRAFTERS])
@pytest.mark.parametrize("plan", PLANS)
def test_at_every_call(
    tiny_decoder: Decoder, wanted: list[list[list[int]]], plan: str, name: str, is_static: bool
) -> None:
    """The same, at each call of a run: once, and again and again, more and more rarely. (At every seventh,
    where a step has as many, no step would ever end.)"""
    owner, method = (EVERYWHERE | DRAFTERS)[name]
    raised = None if name in DRAFTERS else Boom
    at, was_reached = 1, True
    while was_reached:
        for gaps in ({0}, {n * (n + 1) // 2 for n in range(200)}):
            with pytest.MonkeyPatch.context() as patch:
                engine = make(tiny_decoder, plan, is_static=is_static, max_run_ms=run_ms(name))

                def when(number: int, *_: object, at: int = at, gaps: set[int] = gaps) -> bool:
                    return number - at in gaps

                fault = Fault(patch, owner, method, Boom, when, late=at % 2 == 0)
                assert run_on(engine, PROMPTS, PARAMS, raised) == (wanted[0], [None] * 4), at
            assert run(engine, LATER, PARAMS) == wanted[1], at
        was_reached, at = fault.num_raised > 0, at + 1


@pytest.mark.parametrize("plan", ["plain", "three tiers", "hybrid"])
@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_launch_ahead_of_the_host_that_raises_loses_nothing(
    tiny_decoder: Decoder, wanted: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch, plan: str, at: int
) -> None:
    engine = make(tiny_decoder, plan, is_static=True)
    fault = Fault(
        monkeypatch, StaticLauncher, "launch_next", Boom, lambda number, *_: number == at, late=at == 2
    )
    assert run_on(engine, PROMPTS, PARAMS, Boom) == (wanted[0], [None] * 4)
    assert fault.num_raised == 1


def test_a_stage_that_always_raises_says_so_each_time_and_the_llm_can_be_used_after_it(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = ["one", "two"]
    with LLM(str(tiny_path), max_model_len=64, num_kv_blocks=32, max_run_ms=0.0) as llm:
        wanted = llm.generate(prompts, PARAMS, use_tqdm=False)
        with monkeypatch.context() as patch:
            Fault(patch, Round, "decode", lambda: Boom("the device is gone"), lambda *_: True)
            for _ in range(2):
                with pytest.raises(Boom, match="the device is gone"):
                    llm.generate(prompts, PARAMS, use_tqdm=False)
                assert not llm.has_unfinished() and not llm.engine.has_unfinished()
                llm.engine.check()
            stream = llm.stream("one", PARAMS)
            with pytest.raises(Boom):
                next(stream)
            assert not llm.engine.has_unfinished()
        again = llm.generate(prompts, PARAMS, use_tqdm=False)
    for before, after in zip(wanted, again, strict=True):
        assert before.outputs[0].token_ids == after.outputs[0].token_ids


# ---- memory that runs out ----

SHORT_OF = {
    "prefill": (Stages, "prefill"),
    "draft": (ExitHead, "logits"),
    "check": (Round, "check"),
    "verify": (Round, "verify"),
    "forward": (FusedPasses, "run"),
    "sampler": (Logits, "likeliest"),
    "rounds together": (FusedPasses, "run_linked"),
}
ERRORS = {
    "torch": lambda: torch.OutOfMemoryError("CUDA out of memory"),
    "Python": lambda: MemoryError("no memory"),
    "a CPU": lambda: RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("stage", SHORT_OF)
def test_memory_that_runs_out_shrinks_the_batch(
    tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch, stage: str, error: str
) -> None:
    """More than one row at once, or more than 16 positions of prefill, do not fit."""
    prompts = random_prompts((1, 7, 60, 12, 9), seed=4)
    wanted = run(make_engine(tiny_decoder), prompts, PARAMS)
    engine = make(tiny_decoder, "three tiers", max_num_seqs=4, max_run_ms=run_ms(stage))
    scheduler = engine._scheduler

    def is_too_large(*_: object) -> bool:
        return scheduler.max_prefill_tokens > 16 if stage == "prefill" else len(scheduler.running) > 1

    fault = Fault(monkeypatch, *SHORT_OF[stage], ERRORS[error], is_too_large)
    assert run_on(engine, prompts, PARAMS) == (wanted, [None] * 5)
    assert fault.num_raised > 0


@pytest.mark.parametrize("is_static", [False, True], ids=["packed", "static"])
@pytest.mark.parametrize("stage", ["prefill", "check", "verify"])
@pytest.mark.parametrize("at", [0, 2, 4])
def test_only_a_request_that_does_not_fit_alone_fails(
    tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch, stage: str, at: int, is_static: bool
) -> None:
    prompts = random_prompts((4, 7, 60, 12, 9, 5, 8), seed=4)
    wanted = run(make_engine(tiny_decoder), prompts, PARAMS)
    sizes_of: dict[str, Any] = {"max_num_seqs": 4, "num_kv_blocks": 100, "max_run_ms": 0.0}
    engine = make(tiny_decoder, "three tiers", is_static=is_static, **sizes_of)
    scheduler, sizes = engine._scheduler, []

    def holds_it(*_: object) -> bool:
        sizes.append(len(scheduler.running))
        return any(request.number == at for request in scheduler.running)

    Fault(monkeypatch, *SHORT_OF[stage], ERRORS["torch"], holds_it)
    tokens, errors = run_on(engine, prompts, PARAMS)
    assert [error is not None for error in errors] == [number == at for number in range(7)]
    assert "out of memory, even alone: CUDA out of memory; lower engine.num_kv_blocks" in str(errors[at])
    assert tokens == [[] if number == at else wanted[number] for number in range(7)]
    assert at == 4 or max(sizes[sizes.index(1) :]) == 4, "the others go on one by one"


def test_rows_come_back_where_memory_was_short_for_a_moment(
    tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hispec.engine.step_loop._LEAST_PATIENCE", 3)
    prompts = random_prompts((4, 7, 9, 5) * 8, seed=4)
    engine = make(tiny_decoder, "three tiers", max_num_seqs=4, max_run_ms=0.0)
    scheduler, seen = engine._scheduler, []

    def is_short(*_: object) -> bool:
        seen.append(len(scheduler.running))
        return len(seen) in (2, 3)

    fault = Fault(monkeypatch, *SHORT_OF["verify"], ERRORS["torch"], is_short)
    tokens, errors = run_on(engine, prompts, PARAMS)
    assert errors == [None] * 32 and fault.num_raised >= 2
    lowest = min(seen[: len(seen) // 2])
    assert lowest < 4 and max(seen[seen.index(lowest) :]) == 4
    assert tokens == run(make_engine(tiny_decoder), prompts, PARAMS)


def test_memory_that_runs_out_for_logprobs_shrinks_the_batch(
    tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hispec.decoding.batch import RoundResult

    wanted = run(make_engine(tiny_decoder), PROMPTS, LISTED)
    engine = make(tiny_decoder, "three tiers")
    Fault(
        monkeypatch,
        RoundResult,
        "logprobs",
        ERRORS["torch"],
        lambda *_: len(engine._scheduler.running) > 1,
    )
    assert run_on(engine, PROMPTS, LISTED) == (wanted, [None] * 4)
