"""How the law tests drive an engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from transformers import PreTrainedModel

from hispec.config import EngineConfig, Plan, SpeculativeConfig
from hispec.decoding.acceptance import Judge
from hispec.decoding.stages import DecoderLike, Stages
from hispec.drafters.autoregressive import ComputedDrafter, ExitHead
from hispec.engine import Engine
from hispec.runner.cuda_graphs import GraphDevice
from hispec.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PLANS = [
    Plan(),
    Plan(1, None, 1, 1),
    Plan(3, None, 4, 1),
    Plan(8, None, 2, 1),
    Plan(1, 2, 1, 1),
    Plan(3, 6, 2, 2),
    Plan(6, 8, 3, 1),
    Plan(4, 8, 1, 3),
    Plan(7, 8, 4, 4),
    Plan(9, 9, 2, 2),
]


def make_engine(
    decoder: DecoderLike,
    plan: Plan | None = None,
    *,
    rejection: bool = False,
    confidence: float | None = None,
    eos: Sequence[int] = (),
    is_static: bool = False,
    graph_device: GraphDevice | None = None,
    **config: Any,
) -> Engine:
    """An engine of small sizes; `config` overrides fields of EngineConfig."""
    fields: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_model_len": 256,
        "block_size": 8,
        "num_kv_blocks": 256,
        "max_prefill_tokens": 32,
        "max_run_ms": 10_000.0,  # so that the machine's speed decides nothing
        **config,
    }
    speculative = None
    if rejection or confidence is not None:
        speculative = SpeculativeConfig(
            draft={"layer": 1},
            acceptance="rejection" if rejection else "coupled",
            draft_confidence=confidence,
        )
    return Engine(
        decoder,
        EngineConfig(**fields),
        speculative,
        plan=plan,
        eos_token_ids=eos,
        is_static=is_static,
        graph_device=graph_device,
    )


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] = GREEDY,
) -> list[list[int]]:
    """Output token ids of all prompts, in order; integrity is checked after every step."""
    each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
    ids = [engine.add_request(prompt, one) for prompt, one in zip(prompts, each, strict=True)]
    outputs: dict[str, list[int]] = {request_id: [] for request_id in ids}
    finished: set[str] = set()
    while engine.has_unfinished():
        for delta in engine.step():
            assert delta.request_id not in finished, "a Delta after the last one"
            outputs[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                finished.add(delta.request_id)
                assert delta.error is None, delta.error
        engine.check()
    assert finished == set(ids)
    assert engine.stats()["kv_blocks_used"] == 0, "blocks leaked"
    return [outputs[request_id] for request_id in ids]


def run_through_interrupts(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams = GREEDY
) -> list[list[int]]:
    """As `run`; whenever a step is interrupted, the next follows."""
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    outputs: dict[str, list[int]] = {request_id: [] for request_id in ids}
    while engine.has_unfinished():
        with suppress(KeyboardInterrupt):
            for delta in engine.step():
                outputs[delta.request_id] += delta.token_ids
        engine.check()
    return [outputs[request_id] for request_id in ids]


def default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    """The process's, of tensors that say none."""
    return _meanwhile(torch.get_default_dtype, torch.set_default_dtype, dtype)


def threads(count: int) -> AbstractContextManager[None]:
    """Torch computes on so many threads, however many the machine has."""
    return _meanwhile(torch.get_num_threads, torch.set_num_threads, count)


@contextmanager
def _meanwhile(get: Callable[[], Any], put: Callable[[Any], None], value: Any) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def random_prompts(lengths: Sequence[int], vocab: int = 256, seed: int = 0) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(vocab) for _ in range(length)] for length in lengths]


def transformers_greedy(
    model: PreTrainedModel, prompt: Sequence[int], num_tokens: int, eos: int | None = None
) -> list[int]:
    """What transformers' own generate() gives for one prompt alone."""
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=eos,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


def exit_drafter(
    stages: Stages, plan: Plan, judge: Judge, confidence: float | None = None
) -> ComputedDrafter:
    """What an engine makes for a plan that drafts by an early exit; plain plans do not ask it."""
    return ComputedDrafter(ExitHead(stages, plan.draft_layer), judge, confidence)
