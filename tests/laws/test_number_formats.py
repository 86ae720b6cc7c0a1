"""Law 1 on models held in fewer bits: their own plain decoding, token for token, whatever happens."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from ee_models.checkpoint.loader import open_checkpoint
from ee_models.decoder import Decoder
from ee_models.kernels import numba_narrow
from hispec.config import Plan
from hispec.sampling_params import SamplingParams
from tests.helpers.support import GREEDY, PLANS, make_engine, random_prompts, run
from tests.helpers.sweeps import sweep

PROMPTS = random_prompts((1, 7, 9, 33, 70))
# Greedy rows and sampled ones side by side.
PARAMS = [
    GREEDY,
    SamplingParams(temperature=1.0, seed=1, max_tokens=24),
    SamplingParams(temperature=0.7, top_p=0.9, seed=2, max_tokens=24),
    GREEDY,
    SamplingParams(temperature=1.3, top_k=20, seed=3, max_tokens=24),
]


FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"quantization": "int8"},
    "int8, KV in bfloat16": {"quantization": "int8", "kv_dtype": torch.bfloat16},
    "int4, KV in bfloat16": {"quantization": "int4", "kv_dtype": torch.bfloat16},
    "bfloat16": {"weights_dtype": torch.bfloat16, "kv_dtype": torch.bfloat16},
}


IN_FLOAT32 = "bfloat16, computed in float32"
if numba_narrow.multiplies_bfloat16():
    FORMATS[IN_FLOAT32] = FORMATS["bfloat16"]


@pytest.fixture(scope="module", params=FORMATS)
def decoder(request: pytest.FixtureRequest, tiny_path: Path) -> Decoder:
    options = FORMATS[request.param]
    with pytest.MonkeyPatch.context() as patch:
        if request.param == IN_FLOAT32:
            patch.setattr(numba_narrow, "multiplies_bfloat16", lambda: False)
        decoder = Decoder.load(open_checkpoint(tiny_path), torch.float32, torch.device("cpu"), **options)
        assert not (request.param == IN_FLOAT32 and decoder.make_linear.is_bfloat16)
    return decoder


@pytest.fixture(scope="module")
def alone(decoder: Decoder) -> list[list[int]]:
    return [run(make_engine(decoder), [each], own)[0] for each, own in zip(PROMPTS, PARAMS, strict=True)]


def test_it_is_a_model_of_its_own(decoder: Decoder, alone: list[list[int]], tiny_decoder: Decoder) -> None:
    assert decoder.row_invariant
    wide = [run(make_engine(tiny_decoder), [each], own)[0] for each, own in zip(PROMPTS, PARAMS, strict=True)]
    assert wide != alone, "or nothing was rounded"


@sweep(
    "plan, sizes",
    itertools.product(PLANS, [{}, {"max_num_seqs": 2, "block_size": 4, "max_prefill_tokens": 5}]),
    lambda case: case[0] in (PLANS[::3] if case[1] else PLANS[1::2]),
    ids=str,
)
def test_every_plan_gives_plain_decoding(
    decoder: Decoder, alone: list[list[int]], plan: Plan, sizes: dict[str, int]
) -> None:
    assert run(make_engine(decoder, plan, **sizes), PROMPTS, PARAMS) == alone


@pytest.mark.parametrize("plan", [Plan(3, None, 2, 1, 2), Plan(2, 5, 2, 2, 3)], ids=str)
def test_trees_give_plain_decoding(decoder: Decoder, alone: list[list[int]], plan: Plan) -> None:
    assert run(make_engine(decoder, plan), PROMPTS, PARAMS) == alone


@pytest.mark.parametrize("plan", [Plan(), Plan(3, 6, 2, 2)], ids=str)
def test_forced_preemption_changes_nothing(decoder: Decoder, alone: list[list[int]], plan: Plan) -> None:
    assert run(make_engine(decoder, plan, num_kv_blocks=14), PROMPTS, PARAMS) == alone
