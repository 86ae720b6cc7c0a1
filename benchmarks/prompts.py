"""Writes the prompts of the README's table as a job's input: some of each of seven tasks.

    python benchmarks/prompts.py FOLDER prompts.jsonl [--skip 20] [--per-task 15] [--task maths ...]

FOLDER holds gsm8k_test*.jsonl (`question`), humaneval*.jsonl (`prompt`) and spec_bench*.jsonl (`category`,
`turns`), as these data sets are published. The first 20 of each task settled what `hispec profile` searches,
so they are skipped.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run from a checkout: nothing needs to be installed

from benchmarks.arguments import at_least_one, at_least_zero
from benchmarks.command import check_results, exit_code
from benchmarks.json_rows import rows_of, text_in
from hispec.errors import ConfigError, shown
from hispec.utils.files import write_atomically

_GSM8K, _HUMANEVAL, _SPEC_BENCH = "gsm8k_test", "humaneval", "spec_bench"
_TASKS = {"summarization": "summarisation", "qa": "qa", "rag": "rag", "translation": "translation"}
_MATHS = "math_reasoning"  # of GSM8K too, which is taken from its own file
_CODE = "Complete this Python function. Answer with the code alone.\n\n"


def tasks_of(folder: Path) -> dict[str, list[str]]:
    """All prompts by task, in the order of their files. Raises ConfigError."""
    tasks = {
        "maths": [text_in(*at, "question") for at in _rows(folder, _GSM8K, "question")],
        "code": [_CODE + text_in(*at, "prompt") for at in _rows(folder, _HUMANEVAL, "prompt")],
        **{name: [] for name in ("summarisation", "chat", "qa", "rag", "translation")},
    }
    for where, row in _rows(folder, _SPEC_BENCH, "category", "turns"):
        if (category := text_in(where, row, "category")) != _MATHS:
            tasks[_TASKS.get(category, "chat")].append(_first_turn(where, row["turns"]))
    return tasks


def _first_turn(where: str, turns: Any) -> str:
    if not (isinstance(turns, list) and turns and isinstance(turns[0], str)):
        raise ConfigError(f"{where}: 'turns' must be a list of texts, got {shown(turns)}; mend the row")
    return turns[0]


def _rows(folder: Path, name: str, *fields: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in _files(folder, name):
        yield from rows_of(path, fields)


def _files(folder: Path, name: str) -> list[Path]:
    """Those of a data set, or the one that there should be."""
    return sorted(folder.glob(f"{name}*.jsonl")) or [folder / f"{name}.jsonl"]


def run(options: argparse.Namespace) -> None:
    """Raises ConfigError, with nothing written."""
    read = [path for name in (_GSM8K, _HUMANEVAL, _SPEC_BENCH) for path in _files(options.folder, name)]
    check_results(options, ("output",), read)
    tasks = tasks_of(options.folder)
    if unknown := set(options.task or ()) - tasks.keys():
        raise ConfigError(f"--task: {', '.join(sorted(unknown))}: there are {', '.join(tasks)}")
    lines = []
    for task, prompts in tasks.items():
        if task not in (options.task or tasks):
            continue
        taken = prompts[options.skip : options.skip + options.per_task]
        if len(taken) < options.per_task:
            raise ConfigError(
                f"{task}: {len(prompts)} prompts, which is not enough to skip {options.skip} and take"
                f" {options.per_task}"
            )
        for prompt in taken:
            row = {"messages": [{"role": "user", "content": prompt}], "metadata": {"task": task}}
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    write_atomically(options.output, "".join(lines).encode())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument(
        "--skip", type=at_least_zero, default=20, help="leave out so many of each task (default: 20)"
    )
    parser.add_argument(
        "--per-task", type=at_least_one, default=15, help="take so many of each task (default: 15)"
    )
    parser.add_argument("--task", action="append", help="this task alone, or each of these (default: all)")
    options = parser.parse_args(arguments)
    return exit_code("prompts", lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
