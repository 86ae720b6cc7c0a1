"""A job over a local Ray cluster that is killed, and then one of its actors: every row is there once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.workers.support import SMALL, actors, linux, wait_until

ROOT = Path(__file__).parents[2]


@linux
@pytest.mark.slow
def test_a_job_over_a_cluster_ends_with_every_row_once_although_an_actor_is_killed(
    tiny_path: Path, tmp_path: Path
) -> None:
    rows = [{"id": f"r{at}", "prompt": f"row {at} " * (1 + at % 5)} for at in range(400)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job: dict[str, Any] = {
        "model": str(tiny_path),
        "workers": 2,  # of one machine: --ray says otherwise
        "ray": {"num_cpus": 1, "workers": 2},
        "engine": SMALL,
        "speculative": {"draft": {"layer": 3}, "check": {"layer": 6}},
        "sampling": {"max_tokens": 60, "temperature": 0.7, "ignore_eos": True},
        "input": {"path": str(tmp_path / "in.jsonl")},
        "output": {"path": str(tmp_path / "out.jsonl"), "order": "finished"},
    }
    output = tmp_path / "out.jsonl"
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    command = [sys.executable, "-m", "hispec", "run", str(tmp_path / "job.yaml"), "--ray", "local"]

    def start() -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=os.environ
        )
        before = output.stat().st_size if output.exists() else 0
        wait_until(lambda: output.exists() and output.stat().st_size > before, 120.0)
        return process

    process = start()
    process.send_signal(signal.SIGKILL)  # the whole command first; its actors end with it
    process.communicate()
    wait_until(lambda: not actors(), 60.0)
    process = start()
    wait_until(lambda: len(actors()) == 2, 60.0)
    os.kill(actors()[0], signal.SIGKILL)
    assert process.wait(240) == 0, process.communicate()[1].decode()
    lines = [json.loads(line) for line in output.read_bytes().splitlines()]
    assert sorted(line["id"] for line in lines) == sorted(row["id"] for row in rows)
    assert all(line["error"] is None for line in lines)
