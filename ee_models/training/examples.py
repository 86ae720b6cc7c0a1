"""Training examples, and which of them each step sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import TrainingError


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
    """Indices of the examples that process `rank` of `num_ranks` sees in step `step`. Each epoch is a
    permutation of its own, a function of (seed, epoch).

    `batch_size` counts all processes; an epoch's last step may take up the first examples of the next epoch.
    Raises TrainingError for more processes than examples in a batch.
    """
    if batch_size < num_ranks:
        raise TrainingError(
            f"batch_size is {batch_size}; it must be at least the number of processes, {num_ranks}"
        )
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
    """(training, held out): `held_out` examples at equal distances are held out."""
    if held_out <= 0:
        return list(examples), []
    picked = {round(i * len(examples) / held_out) for i in range(min(held_out, len(examples)))}
    training = [example for i, example in enumerate(examples) if i not in picked]
    return training, [example for i, example in enumerate(examples) if i in picked]
