"""A model whose stages are measured, once for all tests of a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from ee_models.checkpoint.exit_files import ExitInfo
from ee_models.checkpoint.loader import open_checkpoint
from ee_models.decoder import Decoder
from ee_models.exits import AdapterExit
from hispec.latency.profile_file import LatencyProfile
from hispec.measure import latency as measuring
from hispec.measure.latency import measure_latency
from tests.helpers.adapters import loaded, make_exits
from tests.helpers.latency import SIZES


@pytest.fixture(scope="session")
def exits(
    tiny_path: Path, tiny_decoder: Decoder, tmp_path_factory: pytest.TempPathFactory
) -> list[AdapterExit]:
    """At layers 2 and 5; the second keeps no KV."""
    checkpoint = open_checkpoint(tiny_path)
    return loaded(
        make_exits(
            tmp_path_factory.mktemp("exits"), checkpoint, [ExitInfo(layer=2), ExitInfo(layer=5, num_blocks=0)]
        ),
        tiny_decoder,
        checkpoint,
    )


@pytest.fixture(scope="session")
def measured(tiny_decoder: Decoder, exits: list[AdapterExit]) -> LatencyProfile:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "_SAMPLES", 3)
        return measure_latency(tiny_decoder, [2, 5, 7], exits, **SIZES, draft_model=tiny_decoder)
