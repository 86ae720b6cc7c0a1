"""Prints the result of `hispec simulate`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, Any

from rich.table import Table

from ..utils.console import make_console
from ..utils.environment import hardware_text

_MOST_PLANS = 4  # named per system; the JSON has all


def print_simulation(result: Mapping[str, Any], file: IO[str] | None = None) -> None:
    """Prints a table per load, on stdout unless `file` is given."""
    console = make_console(file)
    for load in result["loads"]:
        console.print(_table(result["what"], load))
        for name, figures in load["policies"].items():
            if len(figures["plans"]) > 1:
                plans = list(figures["plans"].items())
                rest = sum(share for _, share in plans[_MOST_PLANS:])
                named = [f"{plan} {share:.0%}" for plan, share in plans[:_MOST_PLANS]] + (
                    [f"others {rest:.0%}"] if rest else []
                )
                console.print(f"{name}: {', '.join(named)} of rounds")
        console.print()
    first = next(iter(result["loads"][0]["policies"].values()))
    console.print(
        f"Latencies in seconds from arrival to end, of the {first['num_counted']} requests after the warm-up."
        " x best: mean latency over the best other's, oracles left out. slowdown: latency over the time"
        " alone on an idle engine by the same plan (plain decoding, where a controller chooses)."
    )
    console.print(f"{result['seconds']:.1f} s on {hardware_text(result['environment'])}")


def _table(what: str, load: Mapping[str, Any]) -> Table:
    policies = load["policies"]
    rate = f", {load['rate']:.4g} requests/s" if load["rate"] is not None and what != "rates" else ""
    table = Table(title=f"{what} {load['load']:g}{rate}", title_justify="left", show_edge=False)
    table.add_column("system")
    has_error = any(figures["mean_error_s"] is not None for figures in policies.values())
    latencies = ["mean", *(["± 95 %"] if has_error else []), "x best", "p50", "p90", "p99", "max", "first"]
    for column in (*latencies, "tokens/s", "busy", "rows", "preempted", "slowdown", "max"):
        table.add_column(column, justify="right")
    for name, each in policies.items():
        table.add_row(
            name,
            _seconds(each["mean_s"]),
            *([_seconds(each["mean_error_s"])] if has_error else []),
            f"{each['mean_over_best_other']:.3f}" if each["mean_over_best_other"] is not None else "",
            *(_seconds(each[f"{what}_s"]) for what in ("p50", "p90", "p99", "max", "first_token_mean")),
            f"{each['goodput_tokens_per_s']:.0f}",
            f"{each['utilisation']:.0%}",
            f"{each['mean_rows']:.1f}",
            str(each["preemptions"]),
            f"{each['slowdown_mean']:.2f}",
            f"{each['slowdown_max']:.1f}",
        )
    return table


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
