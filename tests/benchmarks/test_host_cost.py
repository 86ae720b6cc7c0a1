"""`benchmarks/host_cost.py`: the stub is a device that commits what its table says, and nothing but the host
is timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import host_cost
from benchmarks.gpu_parts.shapes import TINY_SHAPES
from benchmarks.gpu_parts.subjects import random_decoder


@pytest.mark.parametrize("name", host_cost.PLANS)
def test_the_host_commits_what_the_table_says(name: str) -> None:
    plan, rows, rounds = host_cost.PLANS[name], 5, 4
    decoder = random_decoder(TINY_SHAPES["Llama-3-8B"].config, torch.device("cpu"), torch.float32, 256)
    engine = host_cost.stubbed(decoder, plan, rows, rounds)
    ticks = iter(range(1000))
    assert host_cost.cost(engine, rows, rounds, clock=lambda: float(next(ticks))) == [1000.0] * rounds
    assert engine._loop.flight is not None, "the next round was launched before the last was read"
    stats = engine.stats()
    committed = 1 if plan is None else 3
    assert stats["committed"] == committed * stats["rounds"] and stats["rounds"] % rows == 0
    assert stats["drafted"] == (0 if plan is None else 4 * stats["rounds"])
    assert stats["accepted"] == (0 if plan is None else 2 * stats["rounds"])
    request = next(iter(engine._loop.requests.values()))
    assert set(request.output_token_ids) <= {6, 7, 8}
    engine.close()


def test_the_command_writes_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "host.json"
    assert host_cost.main(["--rows", "3", "--rounds", "4", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["rows"] == 3 and result["ms_per_round"].keys() == host_cost.PLANS.keys()
    assert all(0 < each["least"] <= each["median"] for each in result["ms_per_round"].values())
    assert capsys.readouterr().out.count("median") == len(host_cost.PLANS)
