"""The tables of `hispec report`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from ..utils.console import make_console, make_table, number, percent
from ..utils.environment import hardware_text

_MOST_PLANS = 20  # rows of the table; the JSON has all
_HARDWARE = {"gpu", "cpu", "cores", "threads", "torch"}


def print_report(summary: Mapping[str, Any], file: IO[str] | None = None) -> None:
    """The tables of a summary, on stdout unless `file` is given."""
    console = make_console(file)
    console.print(f"{summary['model']}: policy {summary['policy']}, {summary['max_num_seqs']} rows at most")
    if summary["environment"].keys() >= _HARDWARE:
        console.print(hardware_text(summary["environment"]))
    if summary["is_cut"]:
        console.print("The last line was cut off: the engine did not close the trace.")
    if not summary["rounds"]:
        console.print("No round was recorded.")
    else:
        speed = summary["tokens_per_s"]
        console.print(
            f"{summary['rounds']} rounds in {summary['round_s']:.1f} s (of {summary['span_s']:.1f} s),"
            f" {summary['tokens']} tokens" + ("" if speed is None else f", {speed:.1f} tokens/s in rounds")
        )
        console.print(_plans(summary["plans"]))
        if (left := len(summary["plans"]) - _MOST_PLANS) > 0:
            console.print(f"and {left} more plans (--json FILE has all)")
    console.print(_control(summary["control"]))
    _print_requests(console, summary["requests"])


def _plans(plans: Mapping[str, Mapping[str, Any]]) -> Table:
    table = make_table("plan", "rounds", "seconds", "tokens/s", "mean rows", "draft kept", "tentative kept")
    for name, plan in list(plans.items())[:_MOST_PLANS]:
        shares = [percent(plan[key]) for key in ("rounds_share", "seconds_share")]
        kept = [percent(plan[key]) for key in ("draft_kept", "tentative_accepted")]
        table.add_row(name, *shares, number(plan["tokens_per_s"], 1), number(plan["rows"], 1), *kept)
    return table


def _control(control: Mapping[str, Any] | None) -> str:
    if control is None:
        return "No decisions: the plan was fixed."
    reasons = ", ".join(f"{reason} {count}" for reason, count in control["reasons"].items())
    text = (
        f"{control['decisions']} decisions ({reasons}): {control['switches']} switches,"
        f" {control['route_switches']} of them to other tiers; {control['probes']} probes,"
        f" {control['probes_at_start']} of them at the start"
    )
    if control["probe_rounds_share"] is not None:
        text += (
            f" ({percent(control['probe_rounds_share'])} of rounds, {percent(control['probe_seconds_share'])}"
            " of their seconds)"
        )
    ratios = control["predicted_to_measured"]
    if ratios["mean"] is not None:
        text += (
            f"\npredicted / measured tokens/s: mean {ratios['mean']:.2f}, from {ratios['p10']:.2f} (p10) to"
            f" {ratios['p90']:.2f} (p90)"
        )
    return text


def _print_requests(console: Console, requests: Mapping[str, Any]) -> None:
    others = f", {requests['others']} aborted or failed" if requests["others"] else ""
    console.print(
        f"{requests['finished']} requests finished{others}; {requests['preemptions']} preemptions, of"
        f" {requests['preempted']} requests"
    )
    if requests["e2e_s"] is None:
        return
    table = make_table("seconds", *requests["e2e_s"])
    names = {"e2e_s": "end to end", "queue_time_s": "in the queue", "ttft_s": "to the first token"}
    names["tpot_s"] = "per token after it"
    for key, name in names.items():
        if requests[key] is not None:
            table.add_row(name, *(f"{value:.3f}" for value in requests[key].values()))
    console.print(table)
