"""What `hispec profile` prints when it is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from ..utils.console import count, make_console, make_table, percent, print_if_busy
from ..utils.environment import hardware_text
from .results import choose, fastest_of_kinds

_PLAN_WIDTH = 56  # of a line of the table
_MOST_TASKS = 6  # columns; the JSON has all
_ROWS = (1, 2, 4, 8, 16, 32)  # drafts in a row of which the table tells how often all are right


def print_profile(result: Mapping[str, Any], file: IO[str] | None = None) -> None:
    """Prints the tables of a profile's result, on stdout unless `file` is given."""
    console = make_console(file)
    options, prompts, found = result["options"], result["prompts"], result["agreement"]
    console.print(
        f"{result['model']}: {count(prompts['num'], 'prompt')} of {prompts['tokens_mean']:.0f} tokens (mean),"
        f" {count(options['max_tokens'], 'new token')} at most, batch {options['batch_size']}, greedy"
    )
    console.print(hardware_text(result["environment"]))
    console.print(_exits_text(result["exits"]))
    console.print()
    console.print(_agreement(found, result["draft_model"]))
    console.print(
        f"{found['positions']} positions. Shares of the full model's tokens; p(j): the first j drafts are all"
        " right."
    )
    if found["ngrams"]:
        console.print()
        console.print(_ngrams(found))
        console.print(
            "found: share of places at which something is proposed; p(j): where j tokens are, they are all"
            " right."
        )
    console.print()
    console.print(_plans(result))
    _print_about_plans(console, result)
    if not result["row_invariant"]:
        console.print(
            "This platform does not give bit-identical rows whatever else is in a pass: near-ties may fall"
            " differently, and tokens/round with them."
        )
    print_if_busy(console, result["environment"])


def _print_about_plans(console: Console, result: Mapping[str, Any]) -> None:
    """Prints what the table of plans leaves out: differences to predictions, calibration, the fastest."""
    console.print(
        f"{result['num_predicted']} plans predicted, the best of each kind run in"
        f" {count(result['options']['repeats'], 'interleaved repeat')}."
    )
    measured = result["measured"]
    largest = {
        name: max((run["difference"][name] for run in measured), key=abs)
        for name in ("tokens_per_round", "tokens_per_full_pass")
    }
    console.print(
        f"Largest difference to the prediction: {largest['tokens_per_round']:+.2%} of tokens/round,"
        f" {largest['tokens_per_full_pass']:+.2%} of tokens/full pass."
    )
    if result["draft_model"] is not None:
        console.print("A draft model's own layers are left out of tokens/full pass.")
    calibration = result["calibration"]
    if calibration["plain_step_ms"] is not None:
        parts, added = f"{calibration['plain_parts_ms']:.2f} ms", f"{calibration['host_ms']:.2f} ms"
        console.print(
            f"A plain step takes {calibration['plain_step_ms']:.2f} ms, its pass alone {parts}; the host adds"
            f" {added} to a round that goes stage by stage, and to rounds that run together"
            f" {calibration['call_ms']:.2f} ms a call and {calibration['token_ms']:.2f} ms a token of a row."
        )
    best, reason = choose(measured)
    console.print(f"best: {best['plan_text']}, {ratio_text(best)}\n  {reason}")


def ratio_text(run: Mapping[str, Any]) -> str:
    """A plan's speed over plain decoding, with its interval where there is one."""
    interval = run["ratio_interval"]
    between = "" if interval is None else f" ({interval[0]:.2f} to {interval[1]:.2f})"
    return f"{run['ratio_to_plain']:.2f} x plain{between}"


def _exits_text(exits: Mapping[str, Any]) -> str:
    if exits["kind"] == "adapter":
        return f"trained exits, {exits['path'] or 'as they come with HiSpec'}"
    return f"the model's own head as exit at some layers: {exits['note']}"


def _agreement(agreement: Mapping[str, Any], draft_model: str | None) -> Table:
    tasks, exits = _tasks(agreement), agreement["exits"]
    num_right = _lengths(exits[0])
    own_title = ["own head"] if exits[0]["kind"] == "adapter" else []
    titles = ("exit after", "agreement", *own_title, *tasks, *(f"p({j})" for j in num_right))
    table = make_table(*titles, num_left=0)
    own = {exit_["layer"]: exit_["agreement"] for exit_ in agreement["own_head"]}
    rows = [(str(exit_["layer"]), own[exit_["layer"]], exit_) for exit_ in exits]
    if agreement["draft_model"] is not None:
        rows.append((str(draft_model), None, agreement["draft_model"]))
    for name, of_own_head, said in rows:
        first = [said["agreement"], of_own_head] if own_title else [said["agreement"]]
        table.add_row(name, *_shares(first, said, tasks, num_right))
    return table


def _ngrams(agreement: Mapping[str, Any]) -> Table:
    tasks, num_right = _tasks(agreement), _lengths(agreement["ngrams"][0])
    titles = ("n-grams of", "copies", "found", *tasks, *(f"p({j})" for j in num_right))
    table = make_table(*titles, num_left=0)
    for sizes in agreement["ngrams"]:
        store = f" + {sizes['datastore_tokens']} stored" if sizes["datastore_tokens"] else ""
        copies = sizes["match_confidence"]
        copies = "any" if copies is None else f"p≥{copies:g}"
        guess = sizes.get("guess_confidence")  # results from before there were guesses have none
        of = f" of {Path(path).name}" if (path := sizes.get("guess_path")) is not None else ""
        of += f" learnt from the latest {learnt}" if (learnt := sizes.get("learn_tokens")) else ""
        guesses = f" + guesses p≥{guess:g}{of}" if guess is not None else ""
        name = f"{sizes['max_size']} to {sizes['min_size']}{store}{guesses}"
        table.add_row(name, copies, *_shares([sizes["found"]], sizes, tasks, num_right))
    return table


def _lengths(found: Mapping[str, Any]) -> list[int]:
    """The j of columns p(j): how often the first j drafts are all right."""
    return [j for j in _ROWS if j <= len(found["first_right"])]


def _tasks(agreement: Mapping[str, Any]) -> list[str]:
    """Tasks that get a column; none if there is one task alone."""
    return list(agreement["tasks"])[:_MOST_TASKS] if len(agreement["tasks"]) > 1 else []


def _shares(
    first: Sequence[float | None], found: Mapping[str, Any], tasks: Sequence[str], num_right: Sequence[int]
) -> list[str]:
    """Cells: the `first` shares, those of each task, and those of p(j)."""
    right = (found["first_right"][j - 1] for j in num_right)
    values = [*first, *(found["tasks"][task] for task in tasks), *right]
    return list(map(percent, values))


def _plans(result: Mapping[str, Any]) -> Table:
    """Plain decoding, and the fastest plan of each kind: what was measured, and beside it what was
    predicted."""
    pairs_of = ("× plain", "predicted", "tokens\n/round", "predicted", "tokens\n/full pass", "predicted")
    table = make_table("best of each kind", "tokens\n/s", *pairs_of, "same\noutput")
    for run in fastest_of_kinds(result["measured"]).values():
        predicted = run["predicted"]
        pairs = [
            (f"{run[name]:.2f}", f"{predicted[name]:.2f}")
            for name in ("ratio_to_plain", "tokens_per_round", "tokens_per_full_pass")
        ]
        same = f"{run['exact_match'][0]}/{run['exact_match'][1]}"
        plan = "\n".join(wrap(run["plan"], _PLAN_WIDTH))
        table.add_row(plan, f"{run['tokens_per_s']:.1f}", *(value for pair in pairs for value in pair), same)
    return table
