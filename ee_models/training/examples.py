"""Training examples, and which of them each step sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Example:
    """A prompt with its response: token_ids [prompt + response], of which the first `prompt_len` are the
    prompt.

    Position p predicts token p + 1, so the response is predicted at positions prompt_len - 1 to
    len(token_ids) - 2.
    """

    token_ids: list[int]
    prompt_len: int


def step_indices(
    num_examples: int, batch_size: int, step: int, seed: int, rank: int = 0, num_ranks: int = 1
) -> list[int]:
    """The examples of step `step` for process `rank`: each epoch is a permutation of its own, told by (seed,
    epoch).

    `batch_size` counts all processes; an epoch's last step may take up the first examples of the next epoch.
    """
    picked = []
    for place in range(step * batch_size + rank, (step + 1) * batch_size, num_ranks):
        epoch, index = divmod(place, num_examples)
        picked.append(int(_permutation(num_examples, seed, epoch)[index]))
    return picked


_last: tuple[tuple[int, int, int], torch.Tensor] | None = None


def _permutation(num_examples: int, seed: int, epoch: int) -> torch.Tensor:
    global _last
    key = (num_examples, seed, epoch)
    if _last is None or _last[0] != key:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        _last = key, torch.randperm(num_examples, generator=generator)
    return _last[1]


def split(examples: Sequence[Example], held_out: int) -> tuple[list[Example], list[Example]]:
    """(training, held out): every n-th example is held out, so that `held_out` of them are, spread over the
    whole."""
    if held_out <= 0:
        return list(examples), []
    picked = {round(i * len(examples) / held_out) for i in range(min(held_out, len(examples)))}
    return [x for i, x in enumerate(examples) if i not in picked], [
        x for i, x in enumerate(examples) if i in picked
    ]
