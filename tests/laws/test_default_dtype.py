"""A process may have any default dtype of torch's: outputs do not depend on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ee_models.kernels import numba_narrow
from hispec import LLM, SamplingParams
from tests.helpers.support import default_dtype
from tests.helpers.sweeps import sweep

PROMPTS = [[5, 6, 7], [9, 9, 9, 9, 9, 9], [3, 1, 4, 1, 5]]
PARAMS = [
    SamplingParams(max_tokens=24, temperature=3.3, top_p=0.93, min_p=0.013, seed=1, logprobs=2),
    SamplingParams(
        max_tokens=24, temperature=0.7, repetition_penalty=1.1, logit_bias={7: 1.7, 9: 0.3}, seed=2
    ),
    SamplingParams(max_tokens=24, temperature=0.0, frequency_penalty=0.3, presence_penalty=0.1),
]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "rejection": {"speculative": {"draft": {"layer": 2}, "check": {"layer": 5}, "acceptance": "rejection"}},
    "ngram": {"speculative": {"draft": {"kind": "ngram"}, "check": {"layer": 5}}},
    "tree": {"speculative": {"draft": {"layer": 2}, "num_branches": 2, "num_draft_tokens": 2}},
    "static": {"graphs": False, "speculative": {"draft": {"kind": "ngram"}}},
}


def outputs_of(path: Path, settings: dict[str, Any]) -> list[Any]:
    with LLM(str(path), max_model_len=64, num_kv_blocks=32, dtype="float32", **settings) as llm:
        done = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in done]


@sweep("name", SETTINGS, ("plain", "int8", "ngram", "rejection").__contains__)
def test_outputs_do_not_depend_on_it(tiny_path: Path, name: str) -> None:
    wanted = outputs_of(tiny_path, SETTINGS[name])
    for dtype in (torch.bfloat16, torch.float64):
        with default_dtype(dtype):
            assert outputs_of(tiny_path, SETTINGS[name]) == wanted, dtype


def test_what_is_measured_by_address_has_the_size_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of half the size would have half the room."""
    made = []

    def noted(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *size, **options: made.append(make(*size, **options)) or made[-1]

    for name in ("zeros", "empty"):
        monkeypatch.setattr(torch, name, noted(getattr(torch, name)))
    monkeypatch.setattr(numba_narrow, "split_tokens", lambda *_: None)
    monkeypatch.setattr(numba_narrow, "multiply", lambda *_: None)
    with default_dtype(torch.bfloat16):
        assert numba_narrow.look_ahead.__wrapped__() in numba_narrow._AHEAD
    assert {each.dtype for each in made} == {torch.uint8, torch.float32}
