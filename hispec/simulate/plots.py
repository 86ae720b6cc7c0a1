"""Plots of a simulation: mean and p99 latency and tokens/s by load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..utils.plots import check_matplotlib, make_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PLOTS = {"mean_s": "mean latency in s", "p99_s": "p99 latency in s", "goodput_tokens_per_s": "tokens/s"}
_COLOURS = 10


def draw_plots(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """mean_s.png, p99_s.png and goodput_tokens_per_s.png in `folder`. Raises ConfigError without matplotlib,
    and OSError if they can't be written."""
    check_matplotlib("--plots")
    paths = []
    for name, label in _PLOTS.items():
        paths.append(folder / f"{name}.png")
        save_figure(_by_load(result, name, label), paths[-1])
    return paths


def _by_load(result: Mapping[str, Any], name: str, label: str) -> Figure:
    figure = make_figure(7, 4.5)
    axes = figure.subplots()
    loads = [load["load"] for load in result["loads"]]
    for at, system in enumerate(result["loads"][0]["policies"]):
        values = [load["policies"][system][name] for load in result["loads"]]
        axes.plot(
            loads,
            values,
            marker="o",
            markersize=3,
            color=f"C{at % _COLOURS}",
            linestyle="-" if at < _COLOURS else "--",
            label=system,
        )
    if name != "goodput_tokens_per_s":
        axes.set_yscale("log")
    axes.set(
        xlabel={"rates": "requests/s", "utilisations": "load"}.get(result["what"], result["what"]),
        ylabel=label,
    )
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small")
    return figure
