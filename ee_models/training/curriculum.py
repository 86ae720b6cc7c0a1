"""LayerSkip's schedules as pure functions [arXiv 2404.16710, section 4.1]: the rate of layer dropout, which
exits are trained in a step, and the weight of each one's loss.

L layers, indexed l = 0 .. L-1, and T optimizer steps t = 0 .. T-1. "Exit l" is the hidden state that layer l
makes: elsewhere the exit after l + 1 layers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, get_args

Curriculum = Literal["rotational", "gradual", "all"]
DropoutSchedule = Literal["constant", "exponential"]
_CURRICULA, _SCHEDULES = get_args(Curriculum), get_args(DropoutSchedule)


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


@dataclass(frozen=True)
class LayerSkipSettings:
    """The recipe. The defaults are the paper's for continued training of Llama 3 8B, but for the batch size.

    dropout_max       p_max: the last layer's dropout rate, 0 to 1
    exit_loss_scale   e_scale, 0 to 1: weight of early exits beside the last layer; 0 leaves them out
    curriculum        which exits learn in a step (`layers_on`); rotation: its R
    dropout_schedule  "constant" for a trained model; "exponential", rising from 0, for one from scratch
    batch_size        examples per step, of all processes together
    lora_rank         None trains all weights; otherwise only LoRA matrices of this rank on the layers'
                      projections, scaled by lora_alpha / lora_rank
    Raises ValueError for a value outside its range.
    """

    dropout_max: float = 0.1
    exit_loss_scale: float = 0.1
    curriculum: Curriculum = "rotational"
    rotation: int = 8
    dropout_schedule: DropoutSchedule = "constant"
    batch_size: int = 8
    lora_rank: int | None = None
    lora_alpha: int = 16

    def __post_init__(self) -> None:
        limits: dict[str, tuple[bool, str]] = {
            "dropout_max": (0 <= self.dropout_max <= 1, "between 0 and 1"),
            "exit_loss_scale": (0 <= self.exit_loss_scale <= 1, "between 0 and 1"),
            "curriculum": (self.curriculum in _CURRICULA, f"one of {', '.join(_CURRICULA)}"),
            "rotation": (self.rotation >= 1, "at least 1"),
            "dropout_schedule": (self.dropout_schedule in _SCHEDULES, f"one of {', '.join(_SCHEDULES)}"),
            "batch_size": (self.batch_size >= 1, "at least 1"),
            "lora_rank": (
                self.lora_rank is None or self.lora_rank >= 1,
                "at least 1, or None to train all weights",
            ),
            "lora_alpha": (self.lora_alpha >= 1, "at least 1"),
        }
        for name, (holds, limit) in limits.items():
            if not holds:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {limit}")

    def dropout_rates(self, num_layers: int, step: int, num_steps: int) -> list[float]:
        """Each layer's dropout rate in this step."""
        scale = dropout_scale(self.dropout_schedule, step, num_steps)
        return dropout_rates(num_layers, self.dropout_max, scale)

    def exit_weights(self, num_layers: int, step: int, num_steps: int) -> dict[int, float]:
        """layer -> weight of its exit's loss in this step; the last layer is always among them."""
        on = layers_on(self.curriculum, num_layers, self.rotation, step, num_steps)
        return exit_weights(exit_loss_scales(num_layers, self.exit_loss_scale), on)
