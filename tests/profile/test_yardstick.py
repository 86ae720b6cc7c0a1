"""A pass that is timed between the steps of a run tells how fast the machine was meanwhile."""

from __future__ import annotations

import pytest
import torch

from ee_models.decoder import Decoder
from hispec.latency.drift import STEADY
from hispec.latency.model import LatencyModel, Linear
from hispec.llm import LLM
from hispec.measure import yardstick as module
from hispec.measure.yardstick import Yardstick
from hispec.profile.timed_runs import generate_in_steps
from hispec.sampling_params import SamplingParams
from tests.helpers.tiny import tiny_checkpoint


@pytest.mark.parametrize(("num_rows", "prompts"), [(1, [[3]]), (3, [[1, 2, 3], list(range(2000))])])
def test_drift_is_what_passes_took_over_what_they_should(
    tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch, num_rows: int, prompts: list[list[int]]
) -> None:
    """The longer prompts' mean has room for a pass over 128 positions of one, in memory for 3 rows of it."""
    latency = LatencyModel(
        {
            "plain": Linear(constant_ms=4.0, row_ms=2.0),
            "verify/0": Linear(constant_ms=5.0, token_ms=3.0),
            "prefill": Linear(constant_ms=1.0, row_ms=2.0, context_ms=1.0),
        }
    )
    of_prompt = [128] if num_rows == 3 else []
    with Yardstick(tiny_decoder, prompts, 8, num_rows, widest=20) as found:
        assert found.drift(latency) == STEADY, "nothing was timed yet"
        found.measure()
        assert found.drift(latency).tokens == (num_rows,)
        found.measure()
        found.measure_all()
        assert [len(each.ms) for each in found._passes] == [2, 2, *[1] * (2 + len(of_prompt))], "in turns"
        assert min(found.drift(latency).factors) > 0
    taken = [[100.0, 9.0, 3.0], [8.0], [7.5], [7.0, 6.0, 80.0], *[[50.0]] * len(of_prompt)]
    for each, ms in zip(found._passes, taken, strict=True):
        monkeypatch.setattr(each, "ms", ms)
    drift = found.drift(latency)
    assert drift.tokens == (*(width * num_rows for width in (1, 2, 4, 16)), *of_prompt)
    wide = [ms / (5 + 3 * width * num_rows) for width, ms in ((2, 8.0), (4, 7.5), (16, 7.0))]
    if of_prompt:
        wide.append(50.0 / (1 + 2 + found._length - 1))
    assert drift.factors == pytest.approx([9.0 / (4 + 2 * num_rows), *wide])
    found.measure()  # its memory is given back: nothing more is timed
    assert len(found._passes[3].ms) == 3


@pytest.mark.parametrize(
    ("num_rows", "widest", "tokens"),
    [
        (1, 1, [1]),
        (1, 15, [1, 2, 4]),
        (1, 500, [1, 2, 4, 16, 64]),
        (8, 500, [8, 16, 32, 128]),
        (200, 500, [200]),
    ],
)
def test_passes_are_as_wide_as_rounds_may_be_and_short(
    tiny_decoder: Decoder, num_rows: int, widest: int, tokens: list[int]
) -> None:
    with Yardstick(tiny_decoder, [[1, 2]], 8, num_rows, widest) as found:
        assert [each.num_tokens for each in found._passes] == tokens


def test_a_gpu_is_not_asked(tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Rig", None)
    monkeypatch.setattr(tiny_decoder, "device", torch.device("meta"))
    with Yardstick(tiny_decoder, [[1, 2]], 8, 1) as found:
        found.measure()
    assert found.drift(LatencyModel({"plain": Linear(4.0)})) == STEADY


def test_what_is_done_between_steps_changes_neither_outputs_nor_their_times(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, calls = 0.0, []

    def between() -> None:
        nonlocal now
        now += 1000.0
        calls.append(now)

    params, prompts = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True), [[1, 2, 3], [4, 5]]
    with LLM(tiny_checkpoint(tmp_path_factory.mktemp("model")), max_num_seqs=2) as llm:
        expected, _ = generate_in_steps(llm, prompts, params, progress=False)
        monkeypatch.setattr("hispec.profile.timed_runs.time.perf_counter", lambda: now)
        outputs, steps = generate_in_steps(llm, prompts, params, progress=False, between=between)
    assert outputs == expected
    assert len(calls) == -(-len(steps) // 4) > 1 and max(step.seconds for step in steps) < 1000.0
