"""What `hispec profile` prints when it is done."""
from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from ..jobs.environment import hardware_text, is_busy
from ..jobs.report import NOT_A_TERMINAL_WIDTH

_MOST_TASKS = 6  # columns; the JSON has all
_ROWS = (1, 2, 4, 8, 16, 32)  # drafts in a row of which the table tells how often all are right


def print_profile(result: Mapping[str, Any], file: IO[str] | None = None) -> None:
    """The tables of a profile's result, on stdout unless `file` is given."""
    file = file or sys.stdout
    console = Console(file=file, markup=False, highlight=False, width=None if file.isatty() else NOT_A_TERMINAL_WIDTH)
    options, prompts, exits = result["options"], result["prompts"], result["exits"]
    console.print(
        f"{result['model']}: {prompts['num']} prompts of {prompts['tokens_mean']:.0f} tokens (mean), {options['max_tokens']} new tokens at most,"
        f" batch {options['batch_size']}, greedy"
    )
    console.print(hardware_text(result["environment"]))
    console.print(_exits_text(exits))
    console.print()
    console.print(_agreement(result["agreement"]))
    console.print(f"{result['agreement']['positions']} positions. Shares of the full model's tokens; p(j): the first j drafts are all right.")
    console.print()
    console.print(_plans(result))
    console.print(f"{len(result['predictions'])} plans predicted, the best of each kind run in {options['repeats']} interleaved repeats.")
    found = result["calibration"]
    if found["plain_step_ms"] is not None:
        parts, added = f"{found['plain_parts_ms']:.2f} ms", f"{found['host_ms']:.2f} ms"
        console.print(f"A plain step takes {found['plain_step_ms']:.2f} ms, its pass alone {parts}; {added} are added to every round.")
    console.print(f"fastest: {result['best']}")
    if not result["row_invariant"]:
        console.print("This platform does not give bit-identical rows whatever else is in a pass: near-ties may fall differently, and tokens/round with them.")
    if is_busy(result["environment"]):
        console.print(f"Other programs were running when this began (load {result['environment']['load']:.1f}): do not rely on these speeds.")


def _exits_text(exits: Mapping[str, Any]) -> str:
    if exits["kind"] == "adapter":
        return f"trained exits, {exits['path'] or 'as they come with HiSpec'}"
    return f"the model's own head as exit at some layers: {exits['note']}"


def _agreement(agreement: Mapping[str, Any]) -> Table:
    tasks = list(agreement["tasks"])[:_MOST_TASKS] if len(agreement["tasks"]) > 1 else []
    table = Table(box=None, padding=(0, 2, 0, 0))
    num_rows = [j for j in _ROWS if j <= len(agreement["exits"][0]["first_right"])]
    is_trained = agreement["exits"][0]["kind"] == "adapter"
    for title in ["exit after", "agreement", *(["own head"] if is_trained else []), *tasks, *(f"p({j})" for j in num_rows)]:
        table.add_column(title, justify="right")
    own = {exit_["layer"]: exit_["agreement"] for exit_ in agreement["own_head"]}
    for exit_ in agreement["exits"]:
        values = [exit_["agreement"], *([own[exit_["layer"]]] if is_trained else []), *(exit_["tasks"][task] for task in tasks)]
        values += [exit_["first_right"][j - 1] for j in num_rows]
        table.add_row(str(exit_["layer"]), *("" if value is None else f"{value:.1%}" for value in values))
    return table


def _plans(result: Mapping[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("plan")
    for title in ("tokens/s", "predicted", "× plain", "predicted", "tokens/round", "predicted", "same output"):
        table.add_column(title, justify="right")
    for run in result["measured"]:
        guess = run["predicted"]
        table.add_row(
            run["plan_text"],
            f"{run['tokens_per_s']:.1f}",
            f"{guess['tokens_per_s']:.1f}",
            f"{run['ratio_to_plain']:.2f}",
            f"{guess['ratio_to_plain']:.2f}",
            f"{run['tokens_per_round']:.3f}",
            f"{guess['tokens_per_round']:.3f}",
            f"{run['exact_match'][0]}/{run['exact_match'][1]}",
        )
    return table
