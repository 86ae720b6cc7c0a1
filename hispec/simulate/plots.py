"""Plots of a simulation: mean and p99 latency and tokens/s by load."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..utils.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PLOTS = {"mean_s": "mean latency in s", "p99_s": "p99 latency in s", "goodput_tokens_per_s": "tokens/s"}
_COLOURS = 10


def draw_plots(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """mean_s.png, p99_s.png and goodput_tokens_per_s.png in `folder`. Raises ConfigError without matplotlib,
    and OSError if they cannot be written."""
    check_matplotlib()
    paths = []
    for name, label in _PLOTS.items():
        buffer = io.BytesIO()
        _by_load(result, name, label).savefig(buffer, format="png", dpi=150, bbox_inches="tight")
        paths.append(folder / f"{name}.png")
        write_atomically(paths[-1], buffer.getvalue())
    return paths


def check_matplotlib() -> None:
    """Raises ConfigError, with what to install, if plots cannot be drawn here."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            "--plots needs matplotlib, which is not installed: pip install 'hispec[plots]', or leave"
            " --plots out"
        ) from None


def _by_load(result: Mapping[str, Any], name: str, label: str) -> Figure:
    # Not pyplot, which would change the user's global state and may open a window.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5))
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
