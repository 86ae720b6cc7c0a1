"""Engines whose rounds run together, as one call, and their twins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from pydantic import BaseModel

from ee_models.decoder import Decoder
from hispec.engine import Engine
from hispec.sampling_params import SamplingParams
from tests.helpers.support import make_engine, random_prompts

PROMPTS = random_prompts((1, 7, 9, 33, 70, 2))
LONG = 10_000.0  # milliseconds: as many together as can be, on any machine
NUMBERS: dict[str, dict[str, Any]] = {
    "float32": {},
    "int8": {"quantization": "int8", "kv_dtype": torch.bfloat16},
    "sdpa": {"attention": "sdpa"},
}


def repetitive(length: int, seed: int) -> list[int]:
    """A prompt in which lookups find something."""
    period = random_prompts((5,), seed=seed)[0]
    return (period * length)[:length]


Model = TypeVar("Model", bound=BaseModel)


def but(settings: Model, **fields: Any) -> Model:
    return type(settings)(**dict(settings) | fields)


def one_by_one(decoder: Decoder, **options: Any) -> Engine:
    return make_engine(decoder, max_run_ms=0.0, **options)


def together(decoder: Decoder, **options: Any) -> Engine:
    return make_engine(decoder, max_run_ms=LONG, **options)


def lengths_of_steps(engine: Engine, params: SamplingParams) -> Iterator[int]:
    """Tokens that each step gives the only request."""
    engine.add_request(PROMPTS[1], params)
    while engine.has_unfinished():
        yield sum(len(delta.token_ids) for delta in engine.step())


@contextmanager
def spied(owner: type, name: str) -> Iterator[list[Any]]:
    """What the method has returned."""
    returned, original = [], getattr(owner, name)

    def spy(*inputs: Any) -> Any:
        returned.append(original(*inputs))
        return returned[-1]

    with patch.object(owner, name, spy):
        yield returned
