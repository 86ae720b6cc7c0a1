"""Measuring what stages cost: every stage is there, at sizes that memory and the model have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ee_models.checkpoint.loader import open_checkpoint
from ee_models.decoder import Decoder
from ee_models.exits import AdapterExit
from hispec.errors import ConfigError
from hispec.latency.model import Linear
from hispec.latency.profile_file import LatencyProfile
from hispec.measure import latency as measuring
from hispec.measure.latency import Grid, measure_latency
from hispec.measure.round_overhead import NoModel, overheads
from tests.helpers.latency import SIZES
from tests.helpers.recorded_graphs import RecordedGraphs, recordable

CPU = torch.device("cpu")


class _Asked(Exception):
    """All passes were made."""


@pytest.mark.parametrize("max_num_seqs", [1, 7, 25, 31, 54, 113])
def test_there_is_memory_for_all_passes_that_are_timed(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, max_num_seqs: int
) -> None:
    decoder = Decoder.load(open_checkpoint(tiny_path), torch.float32, CPU, max_positions=1024)

    def made(passes: Any, *_: Any, **__: Any) -> Any:  # `laid_out` has refused none of them
        raise _Asked(len(passes))

    monkeypatch.setattr(measuring, "quiet_times", made)
    for max_window in (6, 15):
        with pytest.raises(_Asked):
            measure_latency(decoder, [5], max_num_seqs=max_num_seqs, max_window=max_window)


def test_stages_of_static_rounds_are_captured(
    no_numba: None, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, played on a CPU: rows are buckets, and what a graph cannot hold is run eagerly."""
    monkeypatch.setattr(measuring, "_SAMPLES", 1)
    decoder, graphs = (
        recordable(Decoder.load(open_checkpoint(tiny_path), torch.float32, CPU)),
        RecordedGraphs(),
    )
    profile = measure_latency(decoder, [5], max_num_seqs=3, max_window=2, graph_device=graphs)
    assert profile.is_static and profile.row_buckets == (1, 2, 3) and profile.model().rows(3) == 3
    eager = sum(point.stage in ("prefill", "swap", "round") for point in profile.points)
    assert graphs.num_captured >= len(profile.points) - eager > 0


def test_every_stage_is_measured_at_its_own_sizes(measured: LatencyProfile) -> None:
    cold = [f"cold/{layer}" for layer in (2, 5, 7)]
    assert list(measured.stages) == [*measured.subject.stage_names, *cold]
    assert {point.stage for point in measured.points} >= {"first/2", "first/5", "first/7"}
    for name in cold:
        assert measured.stages[name].cost == Linear(constant_ms=measured.stages[name].constant_ms)
    assert {
        "draft_model",
        "along/2",
        "along/5",
        "check/0-7",
        "check/2-5",
        "verify/7",
        "shadow/7",
    } <= measured.stages.keys()
    assert (
        all(stage.num_points >= 2 for stage in measured.stages.values())
        and not measured.is_static
        and measured.row_buckets == ()
    )
    for point in measured.points:
        assert point.rows <= 2 and point.tokens <= (2 * 3 if point.stage not in ("prefill", "swap") else 256)
        if point.stage in ("plain", "draft/2", "first/2", "lookup", "round", "draft_model"):
            assert point.tokens == point.rows
    wide = {
        (point.rows, point.tokens // point.rows) for point in measured.points if point.stage == "verify/2"
    }
    assert {(1, 1), (1, 2), (1, 3), (2, 3)} <= wide
    assert {point.context_tokens // point.rows for point in measured.points if point.stage == "verify/2"} == {
        63,
        509,
    }


def test_longer_stages_cost_more(measured: LatencyProfile) -> None:
    model = measured.model()
    assert model["verify/0"](1, 3, 300) > model["verify/7"](1, 3, 300) and model["draft/7"](
        1, 1, 300
    ) > model["along/5"](1, 1, 300)
    assert model["prefill"](1, 256, 500) > model["prefill"](1, 1, 500)
    assert 0 < model["round"](1, 1, 300) < 100


def test_the_overhead_of_a_round_is_told_without_a_model(tiny_decoder: Decoder) -> None:
    found = overheads(tiny_decoder, [1, 3], False, None)
    assert set(found) == {1, 3} and 0 <= found[1] < 50 and 0 <= found[3] < 50
    model = NoModel(tiny_decoder)
    assert model.config.num_layers == 1 and model.logits(model.embed(torch.tensor([1, 2])), 1).shape == (
        2,
        tiny_decoder.config.vocab_size,
    )


@pytest.mark.parametrize("max_num_seqs", [1, 2, 7, 32, 256])
@pytest.mark.parametrize("max_window", [1, 5, 528])
@pytest.mark.parametrize("is_cuda", [True, False])
def test_the_grid_keeps_within_its_limits(max_num_seqs: int, max_window: int, is_cuda: bool) -> None:
    grid = Grid.of(max_num_seqs, max_window, 1024, is_cuda=is_cuda, is_static=is_cuda)
    wide, narrow = list(grid.wide()), list(grid.narrow())
    assert len(set(wide)) == len(wide) <= 50 and len(set(narrow)) == len(narrow) <= 20
    assert {1, max_num_seqs} <= {rows for rows, _ in narrow}
    assert max(q_len for _, q_len, _ in wide) == min(max_window, grid.most_tokens)
    for rows, q_len, context in wide:
        assert q_len == 1 or rows * q_len <= grid.most_tokens
        assert rows * context <= grid.most_kv and 2 <= context <= 1024 - q_len


@pytest.mark.parametrize("is_static", [True, False])
def test_a_cpu_is_asked_what_each_of_few_positions_costs(is_static: bool) -> None:
    """Its kernels compute in tiles, where a static round takes its rectangle, whatever is in it."""
    widths = Grid.of(4, 40, 1024, is_cuda=False, is_static=is_static).positions
    assert widths[:8] == ((1, 2, 4, 8, 16, 40) if is_static else (1, 2, 3, 4, 5, 6, 7, 8))[:8]
    assert widths[-1] == 40 and len(widths) < 20


@pytest.mark.parametrize(
    ("sizes", "layers", "message"),
    [
        ({"max_num_seqs": 0}, [2], "max_num_seqs=0 of a latency profile must be at least 1"),
        ({"max_window": 0}, [2], "max_window=0 of a latency profile must be at least 1"),
        ({}, [2, 9], r"layers=\[9\] .* are no early exits of a model of 9 layers; choose 1 to 8"),
        ({}, [5], r"trained exits at layers \[2\] are not among layers=\[5\]"),
    ],
)
def test_impossible_sizes_are_refused(
    tiny_decoder: Decoder, exits: list[AdapterExit], sizes: dict[str, int], layers: list[int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        measure_latency(tiny_decoder, layers, exits, **{**SIZES, **sizes})


def test_a_short_model_is_measured_within_its_length(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "_SAMPLES", 1)
    profile = measure_latency(
        Decoder.load(open_checkpoint(tiny_path), torch.float32, CPU, max_positions=32),
        [],
        max_num_seqs=1,
        max_window=32,
    )
    assert (
        max(point.context_tokens + point.tokens for point in profile.points if point.stage == "verify/0")
        <= 32
    )
    with pytest.raises(
        ConfigError,
        match="max_model_len=15 leaves no room to measure in; a latency profile needs 16 positions",
    ):
        measure_latency(
            Decoder.load(open_checkpoint(tiny_path), torch.float32, CPU, max_positions=15), [], **SIZES
        )


@pytest.mark.parametrize(("window", "positions"), [(2, 64), (5, 256), (7, 300)])
def test_nothing_is_measured_at_positions_that_a_model_does_not_have(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, window: int, positions: int
) -> None:
    rig, lengths = measuring.Rig, []

    def recorded(decoder: Decoder, exits: Any, context: list[int], *rest: Any, **more: Any) -> Any:
        lengths.append(len(context))
        return rig(decoder, exits, context, *rest, **more)

    monkeypatch.setattr(measuring, "Rig", recorded)
    monkeypatch.setattr(measuring, "_SAMPLES", 1)
    decoder = Decoder.load(open_checkpoint(tiny_path), torch.float32, CPU, max_positions=positions)
    measure_latency(decoder, [], max_num_seqs=1, max_window=window)
    assert lengths and max(lengths) <= positions
