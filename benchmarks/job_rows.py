"""What jobs cost besides the model: rows of any number through a stand-in for the engine.

    python benchmarks/job_rows.py [--rows 1000000] [--resume] [--json FILE]

The stand-in answers every request in the step after it came, with a text of 200 characters. Told are rows per
second, and the memory of the process at a tenth, at half and at the end of the rows, which must not grow with
them. --resume then takes the last 1,000 rows off the output and times the same job until its first new row.
Files lie in a temporary folder, about 700 bytes a row.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run from a checkout: nothing needs to be installed

from benchmarks.arguments import at_least_one
from benchmarks.command import run
from benchmarks.markdown import table
from hispec.jobs.runner import run_job
from hispec.jobs.schema import Job
from hispec.outputs import CompletionOutput, RequestMetrics, RequestOutput
from hispec.utils.environment import environment, hardware_text, watch_others

LEFT_OUT = 1000  # rows that --resume takes off the output
TEXT = "words of an answer. " * 10
METRICS = RequestMetrics(0.0, 1.0, 2.0, 30, 0, 50, 50, 0, 0, 0, 0, 0.5, 2.0)  # of every row


class StandIn:
    """Has of `hispec.LLM` what a job uses."""

    row_invariant = True
    num_workers = 1

    def __init__(self, *_: Any, **__: Any) -> None:
        self.waiting: list[str] = []
        self.first_s: float | None = None
        self.num_done, self.memory_at = 0, dict[int, int]()
        StandIn.last = self

    last: StandIn
    watched: Sequence[int] = ()

    def add(self, prompt: Any, sampling: Any, request_id: str, chat: bool = False) -> None:
        self.waiting.append(request_id)

    def step(self) -> list[RequestOutput]:
        if self.first_s is None:
            self.first_s = time.perf_counter()
        made = [
            RequestOutput(
                name, None, [1] * 30, [CompletionOutput(0, TEXT, [1] * 50, None, "stop", 2, METRICS)]
            )
            for name in self.waiting
        ]
        self.waiting.clear()
        self.num_done += len(made)
        for at in self.watched:
            if self.num_done >= at and at not in self.memory_at:
                self.memory_at[at] = resident_bytes()
        return made

    def stats(self) -> dict[str, Any]:
        names = ("drafted", "draft_kept", "looked_up", "looked_up_kept", "tentative", "accepted")
        names += (
            "committed",
            "rounds",
            "cycles",
            "tokens",
            "row_layer_passes",
            "row_draft_model_layer_passes",
        )
        return dict.fromkeys(names, 0) | {"accept_length_histogram": [], "num_layers": 1}

    def split_text(self, token_ids: Sequence[int], text: str, chat: bool) -> None:
        """Nobody asks for tiers."""

    def fingerprints(self, speculative: Any = None) -> dict[str, str]:
        return {"model": "a stand-in"}

    def reset_stats(self) -> None: ...

    def close(self) -> None: ...


def resident_bytes() -> int:
    """Memory of this process, without what it shares with files. Linux."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    module = types.ModuleType("hispec.llm")
    module.LLM = StandIn  # type: ignore[attr-defined]
    sys.modules["hispec.llm"] = module
    measured_on, others = environment(), watch_others()  # now, so that its load is that of others
    num_rows = options.rows
    StandIn.watched = sorted({max(1, num_rows // 10), max(1, num_rows // 2), num_rows})
    with tempfile.TemporaryDirectory(prefix="hispec-job-rows-") as folder:
        job = make_job(Path(folder), num_rows)
        started = time.perf_counter()
        run_job(job)
        seconds = time.perf_counter() - started
        result: dict[str, Any] = {
            "benchmark": "job_rows",
            "environment": measured_on | {"others": others()},
            "rows": num_rows,
            "seconds_before_the_first_row": (StandIn.last.first_s or 0.0) - started,
            "seconds": seconds,
            "memory_bytes": {str(at): size for at, size in StandIn.last.memory_at.items()},
        }
        result["rows_per_s"] = num_rows / result["seconds"]
        if options.resume:
            keep = job.output.path.stat().st_size * max(0, num_rows - LEFT_OUT) // num_rows
            with job.output.path.open("r+b") as file:
                file.truncate(keep)
            started = time.perf_counter()
            report = run_job(job)
            result["resumed_rows"] = report.resumed
            result["seconds_to_resume"] = (StandIn.last.first_s or 0.0) - started
    return result


def make_job(folder: Path, num_rows: int) -> Job:
    with (folder / "in.jsonl").open("w") as file:
        for number in range(num_rows):
            row = {"id": f"row-{number}", "prompt": f"What is {number} times {number}? {TEXT}"}
            file.write(json.dumps(row) + "\n")
    values = {
        "model": "a stand-in",
        "input": {"path": str(folder / "in.jsonl")},
        "output": {"path": str(folder / "out.jsonl")},
    }
    return Job.model_validate(values)


def print_result(result: dict[str, Any]) -> None:
    print(hardware_text(result["environment"]))
    lines = [
        ["rows", f"{result['rows']:,}"],
        ["rows/s", f"{result['rows_per_s']:.0f}"],
        ["seconds before the first row", f"{result['seconds_before_the_first_row']:.1f}"],
        *([f"MB after {int(at):,} rows", f"{size / 1e6:.0f}"] for at, size in result["memory_bytes"].items()),
    ]
    if "seconds_to_resume" in result:
        lines.append(
            [f"seconds to go on after {result['resumed_rows']:,} rows", f"{result['seconds_to_resume']:.1f}"]
        )
    print(*table(["", ""], lines), sep="\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=at_least_one, default=1_000_000)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return run("job_rows", parser.parse_args(arguments), measure, print_result)


if __name__ == "__main__":
    sys.exit(main())
