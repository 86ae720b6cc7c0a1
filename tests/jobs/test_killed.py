"""A job in a process of its own that is killed with SIGKILL: every row is there once, all the same."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hispec.cli import main
from hispec.jobs.manifest import manifest_path

ROWS_PER_KILL = 24  # more than are written between two of them
ROOT = Path(__file__).parents[2]


def write_job(folder: Path, model: Path, order: str, workers: int, num_rows: int) -> Path:
    rows = [{"id": f"r{at}", "prompt": f"row {at} " * (1 + at % 5)} for at in range(num_rows)]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = {
        "model": str(model),
        "workers": workers,
        "engine": {"max_num_seqs": 4, "max_model_len": 160, "num_kv_blocks": 60},
        "speculative": {"draft": {"layer": 3}, "check": {"layer": 6}},
        "sampling": {"max_tokens": 60, "temperature": 0.7, "ignore_eos": True},
        "input": {"path": str(folder / "in.jsonl")},
        "output": {"path": str(folder / "out.jsonl"), "order": order},
    }
    path = folder / "job.yaml"
    path.write_text(json.dumps(job))  # JSON is YAML
    return path


def start(job: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "hispec", "run", str(job), "--no-progress"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def kill_and_finish(folder: Path, model: Path, kills: int, seed: int, order: str, workers: int) -> None:
    """Kills a run some time after it has begun to write, `kills` times; then one in this process ends."""
    num_rows = ROWS_PER_KILL * (kills + 2)
    job, output = write_job(folder, model, order, workers, num_rows), folder / "out.jsonl"
    random_delay = random.Random(seed)
    num_killed = 0
    for _ in range(20 * kills):
        process, before = start(job), output.stat().st_size if output.exists() else 0
        while process.poll() is None and not (output.exists() and output.stat().st_size > before):
            time.sleep(0.002)
        if process.poll() is None:
            time.sleep(random_delay.uniform(0.0, 0.05))
            process.send_signal(signal.SIGKILL)
        errors = process.communicate()[1].decode()
        assert process.returncode in (0, -signal.SIGKILL), errors
        num_killed += process.returncode != 0
        if process.returncode == 0 or num_killed == kills:
            break
    assert num_killed == kills
    assert main(["run", str(job), "--no-progress"]) == 0
    rows = [json.loads(line) for line in output.read_bytes().splitlines()]
    assert sorted(row["id"] for row in rows) == sorted(f"r{at}" for at in range(num_rows))
    assert all(row["error"] is None for row in rows)
    if order == "input":
        assert [row["index"] for row in rows] == list(range(num_rows))
    assert json.loads(manifest_path(output).read_text())["done"] == num_rows


@pytest.mark.slow
@pytest.mark.parametrize(("order", "workers", "kills"), [("input", 1, 25), ("finished", 2, 50)])
def test_a_killed_job_ends_with_every_row_once(
    tmp_path: Path, tiny_path: Path, order: str, workers: int, kills: int
) -> None:
    kill_and_finish(tmp_path, tiny_path, kills, 7, order, workers)


def test_a_job_that_is_killed_once_ends_with_every_row_once(tmp_path: Path, tiny_path: Path) -> None:
    kill_and_finish(tmp_path, tiny_path, 1, 3, "finished", 1)
