"""Training examples, and which of them each step sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from ..errors import TrainingError

_GROUP_STEPS = 50  # steps whose examples are sorted by length together


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


def grouped_indices(
    lengths: Sequence[int], batch_size: int, step: int, seed: int, rank: int = 0, num_ranks: int = 1
) -> list[int]:
    """As `step_indices`, but a step's examples are of similar `lengths`, so that little is computed for
    padding, and passes have few different shapes.

    Of each epoch's permutation, 50 steps' worth of examples are sorted by length and cut into steps, whose
    order is drawn; an epoch leaves out what does not fill its last step.
    """
    check_batch_size(batch_size, len(lengths), num_ranks)
    num_steps = len(lengths) // batch_size
    epoch, place = divmod(step, num_steps)
    order = _permutation(len(lengths), seed, epoch).tolist()
    # Any seed of its own: the steps' order is independent of that of the examples.
    place = int(_permutation(num_steps, seed + 1, epoch)[place])
    first = place // _GROUP_STEPS * _GROUP_STEPS
    group = order[first * batch_size : min(first + _GROUP_STEPS, num_steps) * batch_size]
    group.sort(key=lengths.__getitem__)
    start = (place - first) * batch_size
    return group[start + rank : start + batch_size : num_ranks]


def check_batch_size(batch_size: int, num_examples: int, num_ranks: int = 1) -> None:
    """Raises TrainingError if no step has an example for each process, without one being taken twice."""
    if not num_ranks <= batch_size <= num_examples:
        raise TrainingError(
            f"loop.batch_size is {batch_size}; it must be at least the number of processes, {num_ranks}, and"
            f" at most that of the examples, {num_examples}"
        )


@lru_cache(maxsize=4)
def _permutation(num_examples: int, seed: int, epoch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(num_examples, generator=generator)


def split(examples: Sequence[Example], held_out: int) -> tuple[list[Example], list[Example]]:
    """(training, held out): `held_out` examples at equal distances are held out, and what is the same as one
    of them is not trained on."""
    if held_out <= 0:
        return list(examples), []
    picked = {round(i * len(examples) / held_out) for i in range(min(held_out, len(examples)))}
    held = [example for i, example in enumerate(examples) if i in picked]
    known = {(example.prompt_len, tuple(example.token_ids)) for example in held}
    training = [
        example for example in examples if (example.prompt_len, tuple(example.token_ids)) not in known
    ]
    return training, held


def check_examples(examples: Sequence[Example], held_out: Sequence[Example], vocab_size: int) -> None:
    if not examples:
        raise TrainingError("there are no examples to train on; give more data, or hold out less of it")
    for kind, group in (("training", examples), ("held-out", held_out)):
        for index, example in enumerate(group):
            if (size := len(example.token_ids)) <= max(1, example.prompt_len):
                raise TrainingError(
                    f"{kind} example {index} has {size} tokens, {example.prompt_len} of them prompt: none is"
                    " left to predict; leave it out"
                )
            if not 0 <= min(example.token_ids) <= max(example.token_ids) < vocab_size:
                raise TrainingError(
                    f"{kind} example {index} has tokens outside 0 to {vocab_size - 1}; it was made with"
                    " another model's tokenizer"
                )
