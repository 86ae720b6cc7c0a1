"""Two pictures of a profile's result: how often exits are right, and which plans pay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..utils.plots import check_matplotlib, make_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACCEPTANCE, RATIO = "acceptance_by_layer.png", "ratio_by_exits.png"
_MOST_TASKS = 10  # as many as there are colours


def draw_plots(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draws both pictures into `folder`. Raises ConfigError without matplotlib, and OSError if one can't be
    written."""
    check_matplotlib("--plots")
    drawings = {ACCEPTANCE: _acceptance(result), RATIO: _ratio(result)}
    for name, figure in drawings.items():
        save_figure(figure, folder / name)
    return [folder / name for name in drawings]


def _acceptance(result: Mapping[str, Any]) -> Figure:
    """Share of the full model's tokens that an exit gives, by layer."""
    agreement = result["agreement"]
    figure = make_figure(7, 4.5)
    axes = figure.subplots()
    own, trained = agreement["own_head"], [each for each in agreement["exits"] if each["kind"] == "adapter"]
    layers, places = ([exit_["layer"] for exit_ in exits] for exits in (own, trained))
    tasks = list(agreement["tasks"])[:_MOST_TASKS] if len(agreement["tasks"]) > 1 else []
    for at, task in enumerate(tasks):
        of_own, of_trained = ([exit_["tasks"][task] for exit_ in exits] for exits in (own, trained))
        axes.plot(layers, of_own, color=f"C{at}", linewidth=0.7, alpha=0.8, label=task)
        axes.scatter(places, of_trained, color=f"C{at}", s=12, marker="_")
    shares, of_trained = ([exit_["agreement"] for exit_ in exits] for exits in (own, trained))
    axes.plot(layers, shares, color="black", linewidth=2, label="the model's own head")
    if trained:
        axes.scatter(places, of_trained, color="black", marker="D", s=40, zorder=3, label="trained exits")
    axes.set(
        xlabel="layer of the exit",
        ylabel="share of the full model's tokens",
        xlim=(0, result["num_layers"]),
        ylim=(0, 1.03),
    )
    axes.set_title(f"{result['model']}: {agreement['positions']} positions, greedy")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def _ratio(result: Mapping[str, Any]) -> Figure:
    """Best predicted speed over plain's, by draft exit (across) and check exit (up); the lowest row has no
    check tier, and in the first column the drafter is outside of the model. In each field: the ratio, and by
    which kind of drafter."""
    best: dict[tuple[int | None, int | None], Mapping[str, Any]] = {}
    for plan in result["predictions"]:
        best.setdefault((plan["draft_layer"], plan["check_layer"]), plan)  # the fastest first
    layers, checks = (sorted({place[at] for place in best}, key=lambda layer: layer or 0) for at in (0, 1))
    table = [
        [best[draft, check]["ratio_to_plain"] if (draft, check) in best else math.nan for draft in layers]
        for check in checks
    ]
    figure = make_figure(1.5 + 1.3 * len(layers), 1.5 + 0.8 * len(checks))
    axes = figure.subplots()
    spread = (
        max(abs(plan["ratio_to_plain"] - 1.0) for plan in best.values()) or 1.0
    )  # as fast as plain is the middle of the colours
    image = axes.imshow(
        table, origin="lower", aspect="auto", cmap="RdYlGn", vmin=1.0 - spread, vmax=1.0 + spread
    )
    for (draft, check), plan in best.items():
        shape = f"{plan['kind'].partition('_')[0]} K={plan['num_draft_tokens']}" + (
            f" R={plan['num_checks']}" if check is not None else ""
        )
        axes.text(
            layers.index(draft),
            checks.index(check),
            f"{plan['ratio_to_plain']:.2f}\n{shape}",
            ha="center",
            va="center",
            fontsize="xx-small",
        )
    axes.set_xticks(range(len(layers)), ["none" if layer is None else str(layer) for layer in layers])
    axes.set_yticks(range(len(checks)), ["none" if check is None else str(check) for check in checks])
    axes.set(xlabel="draft exit D", ylabel="check exit C")
    axes.set_title(
        f"{result['model']}: best predicted speed over plain, batch {result['options']['batch_size']}",
        fontsize="medium",
    )
    figure.colorbar(image, ax=axes)
    return figure
