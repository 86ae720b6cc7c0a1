"""Which rows run together: by hand, and as the engine has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ee_models.decoder import Decoder
from hispec.config import EngineConfig
from hispec.engine import Engine
from hispec.latency.model import LatencyModel, Linear
from hispec.profile.batches import stretches
from hispec.profile.predict import Calibration, Predictor
from hispec.profile.recording import Answer, Recording
from hispec.profile.round_cost import PassTimes
from hispec.sampling_params import SamplingParams
from tests.helpers.support import random_prompts, run


def stretches_of(rounds: list[int], batch_size: int, prompts: list[int] | None = None) -> dict[Any, int]:
    return stretches(np.array(rounds), np.array(prompts or [0] * len(rounds)), batch_size, 10)


def test_rows_take_answers_in_order_as_they_become_free() -> None:
    # Rows: A 3 then C 1; B 1 then D 5. So both have 1, 1 and 1 with somebody's end after each, then D 4.
    assert stretches_of([3, 1, 1, 5], 2) == {(2, 1): 3, (1, 4): 1}
    assert stretches_of([2, 3], 8) == {(2, 2): 1, (1, 1): 1}
    assert stretches_of([2, 3], 1) == {(1, 2): 1, (1, 3): 1}


def test_rows_have_single_rounds_while_prompts_of_others_are_computed() -> None:
    # Ten positions a step: A's 4 and 6 of B's in the first, 10 in the second, the last 2 in the third, after
    # which both go on together; and B for a last round.
    assert stretches_of([5, 4], 2, [4, 18]) == {(1, 1): 3, (2, 3): 1}
    # Nobody is ready in the first step.
    assert stretches_of([2], 1, [11]) == {(1, 2): 1}
    # C comes in B's place, and A has a round beside its prompt.
    assert stretches_of([6, 1, 2], 2, [0, 0, 15]) == {(2, 1): 1, (1, 1): 1, (2, 2): 1, (1, 2): 1}


@pytest.mark.parametrize("max_run_ms", [0.0, 10_000.0])
@pytest.mark.parametrize("rows", [1, 3])
def test_plain_decodings_passes_are_those_of_the_engine(
    tiny_decoder: Decoder, rows: int, max_run_ms: float
) -> None:
    config = EngineConfig(
        max_num_seqs=rows,
        max_model_len=128,
        num_kv_blocks=64,
        max_prefill_tokens=16,
        max_run_ms=max_run_ms,
        enable_prefix_caching=False,
    )
    engine = Engine(tiny_decoder, config)
    prompts = random_prompts((5, 60, 31, 9, 44, 3), vocab=250)
    lengths = (12, 7, 20, 3, 9, 15)
    params = [SamplingParams(temperature=0.0, max_tokens=num, ignore_eos=True) for num in lengths]
    outputs, stats = run(engine, prompts, params), engine.stats()
    answers = [Answer(*each, 128, "all") for each in zip(prompts, outputs, strict=True)]
    predictor = Predictor(
        Recording(answers, {}, {}),
        PassTimes(LatencyModel({"plain": Linear(1.0)}), 30),
        Calibration(rows, None, 1.0, 0.0, 0.0, max_prefill_tokens=16),
        rows,
        num_layers=9,
    )
    passes = (stats["layer_passes"] - stats["prefill_layer_passes"]) / 9
    assert predictor.predict(None).tokens_per_full_pass == pytest.approx(sum(lengths) / passes)
