"""Writes the prompts of the README's table as a job's input: some of each of seven tasks.

    python benchmarks/prompts.py FOLDER prompts.jsonl [--skip 20] [--per-task 15] [--task maths ...]

FOLDER holds gsm8k_test*.jsonl (`question`), humaneval*.jsonl (`prompt`) and spec_bench*.jsonl (`category`,
`turns`), as these data sets are published. The first 20 of each task settled what `hispec profile` searches,
so they are skipped.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

_SPEC_BENCH = {"summarization": "summarisation", "qa": "qa", "rag": "rag", "translation": "translation"}
_SPEC_BENCH_MATHS = "math_reasoning"  # of GSM8K too, which is taken from its own file
_CODE = "Complete this Python function. Answer with the code alone.\n\n"


def tasks_of(folder: Path) -> dict[str, list[str]]:
    """All prompts by task, in the order of their files."""
    tasks = {
        "maths": [row["question"] for row in _rows(folder, "gsm8k_test")],
        "code": [_CODE + row["prompt"] for row in _rows(folder, "humaneval")],
        **{name: [] for name in ("summarisation", "chat", "qa", "rag", "translation")},
    }
    for row in _rows(folder, "spec_bench"):
        if row["category"] != _SPEC_BENCH_MATHS:
            tasks[_SPEC_BENCH.get(row["category"], "chat")].append(row["turns"][0])
    return tasks


def _rows(folder: Path, name: str) -> Iterator[dict]:
    for path in sorted(folder.glob(f"{name}*.jsonl")) or [folder / f"{name}.jsonl"]:
        yield from map(json.loads, path.read_text(encoding="utf-8").splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--skip", type=int, default=20, help="leave out so many of each task (default: 20)")
    parser.add_argument("--per-task", type=int, default=15, help="take so many of each task (default: 15)")
    parser.add_argument("--task", action="append", help="this task alone, or each of these (default: all)")
    options = parser.parse_args()
    tasks = tasks_of(options.folder)
    if unknown := set(options.task or ()) - tasks.keys():
        parser.error(f"--task: {', '.join(sorted(unknown))}: there are {', '.join(tasks)}")
    lines = []
    for task, prompts in tasks.items():
        if task not in (options.task or tasks):
            continue
        taken = prompts[options.skip : options.skip + options.per_task]
        if len(taken) < options.per_task:
            parser.error(
                f"{task}: {len(prompts)} prompts, which is not enough to skip {options.skip} and take"
                f" {options.per_task}"
            )
        for prompt in taken:
            row = {"messages": [{"role": "user", "content": prompt}], "metadata": {"task": task}}
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    options.output.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
