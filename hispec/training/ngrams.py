"""The recipe `ngrams`: counts what follows the last few tokens in the model's own answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ee_models.checkpoint.ngram_file import SHARES, Ngrams
from ee_models.training.examples import Example

_LEAST_SHARE = 0.1  # of what is worth knowing
_SAME_SHARE = 0.05  # a longer context that differs by less tells nothing new
_UNSEEN = 2  # added to how often a context was seen: of few, none is sure


class Guess(NamedTuple):
    token: int
    share: float


Guesses = dict[tuple[int, ...], Guess]


def count_ngrams(examples: Sequence[Example], max_size: int, least_count: int) -> Guesses:
    """By context, of 1 to max_size tokens: the token that followed it most often in answers, and in which
    share of places. Contexts seen less than least_count times are left out, and those that tell nothing
    beside the next shorter one."""
    found: Guesses = {}
    for size in range(1, max_size + 1):
        for context, guess in _count(examples, size, least_count):
            shorter = look_up(found, context[1:])
            is_known = shorter.token == guess.token and abs(shorter.share - guess.share) <= _SAME_SHARE
            if not is_known and max(guess.share, shorter.share) >= _LEAST_SHARE:
                found[context] = guess
    return found


def _count(
    examples: Sequence[Example], size: int, least_count: int
) -> Iterator[tuple[tuple[int, ...], Guess]]:
    """Contexts of `size` tokens that were seen often enough, with what followed most often; of equals, the
    token with the smallest number."""
    windows = [np.zeros((0, size + 1), np.int64)]
    for example in examples:
        text = np.asarray(example.token_ids[max(example.prompt_len - size, 0) :], np.int64)
        if len(text) > size:
            windows.append(np.lib.stride_tricks.sliding_window_view(text, size + 1))
    # Sorted, so that what has a context in common is together, in the order of what follows.
    ngrams, counts = np.unique(np.concatenate(windows), axis=0, return_counts=True)
    if not len(ngrams):
        return
    begins = np.flatnonzero(np.any(np.diff(ngrams[:, :size], axis=0), axis=1)) + 1
    for start, stop in pairwise([0, *begins.tolist(), len(ngrams)]):
        total = int(counts[start:stop].sum())
        if total >= least_count:
            best = start + int(counts[start:stop].argmax())
            share = int(counts[best]) / (total + _UNSEEN)
            yield tuple(ngrams[best, :size].tolist()), Guess(int(ngrams[best, size]), share)


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
