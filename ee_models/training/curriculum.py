"""LayerSkip's schedules as pure functions [arXiv 2404.16710, section 4.1]: the rate of layer dropout, which
exits are trained in a step, and the weight of each one's loss.

L layers, indexed l = 0 .. L-1, and T optimizer steps t = 0 .. T-1. "Exit l" is the hidden state that layer l
makes: elsewhere the exit after l + 1 layers.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

Curriculum = Literal["rotational", "gradual", "all"]
DropoutSchedule = Literal["constant", "exponential"]


def dropout_scale(schedule: DropoutSchedule, step: int, num_steps: int) -> float:
    """S(t) of the layer dropout: 1 if constant, for a model that is trained already; if exponential, for one
    from scratch, 2^(t / (T-1)) - 1, which rises from 0 to 1. With T = 1 that is 0."""
    if schedule == "constant":
        return 1.0
    return 2 ** (step / max(1, num_steps - 1)) - 1


def dropout_rates(num_layers: int, dropout_max: float, scale: float) -> list[float]:
    """p(l, t) = S(t) * (2^(l / (L-1)) - 1) * p_max for each layer: the share of samples that skip it, from 0
    for the first layer to S(t) * p_max for the last. With L = 1 it is 0. `scale` is S(t).
    """
    return [scale * (2 ** (layer / max(1, num_layers - 1)) - 1) * dropout_max for layer in range(num_layers)]


def exit_loss_scales(num_layers: int, exit_loss_scale: float) -> list[float]:
    """e(l) of the early-exit loss: e_scale * (0 + 1 + .. + l) for l < L-1; e(L-1) = (L-1) + e_scale * (0 + 1
    + .. + L-2).

    So exit 0 has no weight. With L = 1 the one exit has weight 1, where the formula would leave no loss.
    """
    last = num_layers - 1
    if last == 0:
        return [1.0]
    scales = [exit_loss_scale * (layer * (layer + 1) // 2) for layer in range(last)]
    return [*scales, last + exit_loss_scale * (last * (last - 1) // 2)]


def layers_on(curriculum: Curriculum, num_layers: int, rotation: int, step: int, num_steps: int) -> list[int]:
    """C(t, l): the exits that learn in this step, ascending. The last layer is always among them.

    rotational   every R-th (`rotation`), shifted by one each step: l = t (mod R)
    gradual      the last at first, and one below it more every T / (2L) steps: all from the middle of the run
                 on
    all          all, always
    """
    last = num_layers - 1
    if curriculum == "rotational":
        return sorted({*range(step % rotation, num_layers, rotation), last})
    first = max(0, last - 2 * num_layers * step // num_steps) if curriculum == "gradual" else 0
    return list(range(first, num_layers))


def exit_weights(scales: list[float], on: Collection[int]) -> dict[int, float]:
    """C(t, l) e(l) / (sum over i of C(t, i) e(i)): the weight of the loss of each exit in `on`. They add
    up to 1; those that are 0 are left out, since their loss need not be computed."""
    total = sum(scales[layer] for layer in on)
    return {layer: scales[layer] / total for layer in sorted(on) if scales[layer] > 0}
