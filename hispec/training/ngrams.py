"""The recipe `ngrams`: counts what follows the last few tokens in the model's own answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ee_models.checkpoint.ngram_file import SHARES, Ngrams
from ee_models.training.examples import Example

from ..drafters.lookup import SEPARATOR
from ..drafters.ngram_counts import count


class Guess(NamedTuple):
    token: int
    share: float


Guesses = dict[tuple[int, ...], Guess]


def count_ngrams(examples: Sequence[Example], max_size: int, least_count: int) -> Guesses:
    """By context, of 1 to max_size tokens: the token that followed it most often in answers, and in which
    share of places. Contexts seen less than least_count times are left out, and those that tell nothing
    beside the next shorter one."""
    text: list[int] = []
    is_answer: list[bool] = []
    for example in examples:
        start = max(example.prompt_len - max_size, 0)  # the last tokens of a prompt stand before its answer
        text += [*example.token_ids[start:], SEPARATOR]
        is_answer += [start + place >= example.prompt_len for place in range(len(example.token_ids) - start)]
        is_answer.append(False)
    counts = count(torch.tensor(text), torch.tensor(is_answer), max_size, least_count)
    columns = counts.sizes, counts.places, counts.tokens, counts.shares
    return {
        tuple(text[place - size : place]): Guess(token, share)
        for size, place, token, share in zip(*(column.tolist() for column in columns), strict=True)
    }


def look_up(guesses: Guesses, text: Sequence[int]) -> Guess:
    """Of the longest context that `text` ends with; a share of 0 where there is none."""
    for start in range(len(text)):
        if (guess := guesses.get(tuple(text[start:]))) is not None:
            return guess
    return Guess(-1, 0.0)


def by_size(guesses: Guesses) -> dict[int, Ngrams]:
    """As they are written."""
    sized: dict[int, list[tuple[tuple[int, ...], Guess]]] = {}
    for context, guess in guesses.items():
        sized.setdefault(len(context), []).append((context, guess))
    made = {}
    for size, those in sized.items():
        shares = np.array([round(guess.share * SHARES) for _, guess in those]).clip(1, SHARES - 1)
        made[size] = Ngrams(
            np.array([context for context, _ in those], np.int64),
            np.array([guess.token for _, guess in those], np.int64),
            shares.astype(np.uint8),
        )
    return made


def evaluate(guesses: Guesses, held_out: Sequence[Example], max_size: int) -> Mapping[str, Any]:
    """Of the tokens of held-out answers: for how many there is a guess of at least 20 %, and how many such
    guesses are right, as shares of all."""
    num_tokens = num_guessed = num_right = 0
    for example in held_out:
        for place in range(example.prompt_len, len(example.token_ids)):
            guess = look_up(guesses, example.token_ids[max(place - max_size, 0) : place])
            num_tokens += 1
            if guess.share >= 0.2:
                num_guessed += 1
                num_right += guess.token == example.token_ids[place]
    return {"guessed": num_guessed / max(num_tokens, 1), "right": num_right / max(num_tokens, 1)}
