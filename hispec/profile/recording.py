"""What every exit says at every place of the target's own answers: one teacher-forced pass, and nothing else is ever asked of the model.

Under greedy decoding a draft's context is the true one for as long as all drafts before it were right, so what a round
commits can be read off these tokens, exactly (`walk`).
"""
from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from cache.paged_kv import PagedKV
from cache.view import BatchView, packed_slots_of
from ee_models.decoder import Decoder
from ee_models.exits import Exit

Ints = NDArray[np.int64]
NOTHING = -1  # stands after the last token of each answer
_PROMPT_TOKENS_PER_PASS = 512
_ANSWER_TOKENS_PER_PASS = 256  # of logits over the whole vocabulary
_BLOCK_SIZE = 16


@dataclass(frozen=True)
class Answer:
    """A prompt with the target's own greedy answer, and how many tokens that could have had."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    cap: int
    task: str


class Recording:
    """Tokens at the places of all answers, answer after answer; after each answer's last place comes one without a token.

    said    {layer: tokens [places]} of each candidate exit
    own     {layer: tokens [places]} of the model's own norm and head after each layer, the last one included
    """

    def __init__(self, answers: Sequence[Answer], said: dict[int, Ints], own: dict[int, Ints]) -> None:
        self.answers, self.said, self.own = list(answers), said, own
        self.lengths = np.array([len(answer.token_ids) for answer in answers], np.int64)
        self.caps = np.array([answer.cap for answer in answers], np.int64)
        self.starts = np.cumsum(self.lengths + 1) - self.lengths - 1
        self.truth = flat([answer.token_ids for answer in answers])

    def right(self, tokens: Ints) -> Ints:
        """[places]: how many of `tokens` from here on are the answer's."""
        return self._runs(tokens == self.truth)

    def same(self, one: Ints, other: Ints) -> Ints:
        """[places]: how many tokens from here on are the same in both."""
        return self._runs(one == other)

    def places(self, task: str | None = None) -> NDArray[np.bool_]:
        """[places]: where a token of an answer is, of those of `task` if given."""
        wanted = [task is None or answer.task == task for answer in self.answers]
        return (self.truth != NOTHING) & np.repeat(wanted, self.lengths + 1)

    def tasks(self) -> list[str]:
        """In the order in which they first appear."""
        return list(dict.fromkeys(answer.task for answer in self.answers))

    def _runs(self, equal: NDArray[np.bool_]) -> Ints:
        equal = equal & (self.truth != NOTHING)
        index = np.arange(len(equal))
        next_other = np.where(equal, len(equal), index)  # every answer is followed by a place that counts as other
        return np.minimum.accumulate(next_other[::-1])[::-1] - index

    def agreement(self, tokens: Ints, task: str | None = None) -> float:
        """Share of `tokens` that are the answer's."""
        places = self.places(task)
        return float((tokens == self.truth)[places].mean())

    def first_right(self, tokens: Ints, most: int) -> list[float | None]:
        """[j - 1] = probability that j drafts in a row from a random place are all right; None where no answer has j tokens."""
        right = self.right(tokens)
        left = np.repeat(self.starts + self.lengths, self.lengths + 1) - np.arange(len(right))
        return [float((right[left >= j] >= j).mean()) if bool((left >= j).any()) else None for j in range(1, most + 1)]


def flat(rows: Sequence[Sequence[int]]) -> Ints:
    """Rows of tokens as a Recording has them."""
    return np.concatenate([np.array([*row, NOTHING], np.int64) for row in rows])


@torch.inference_mode()
def record(decoder: Decoder, layers: Sequence[int], exits: Sequence[Exit], answers: Sequence[Answer], *, progress: bool = False) -> Recording:
    """Feeds every prompt with its answer through the model, and notes what each exit says.

    layers  of the candidate exits; those that are not among `exits` are read through the model's own head
    """
    reader = _Reader(decoder, exits, max(len(answer.prompt_token_ids) + len(answer.token_ids) for answer in answers))
    bar = tqdm(answers, desc="agreement", unit="answer", disable=not progress, file=sys.stderr, dynamic_ncols=True)
    rows = torch.cat([torch.nn.functional.pad(reader.read(answer), (0, 1), value=NOTHING) for answer in bar], dim=1).numpy()
    num_layers = decoder.config.num_layers
    own = {layer: rows[layer - 1] for layer in range(1, num_layers + 1)}
    trained = {exit_.layer: rows[num_layers + at] for at, exit_ in enumerate(reader.exits)}
    return Recording(answers, {layer: trained.get(layer, own[layer]) for layer in layers}, own)


class _Reader:
    """One row of scratch KV, used anew for every sequence. As in the engine, KV of exits follows that of the model's layers."""

    def __init__(self, decoder: Decoder, exits: Sequence[Exit], longest: int) -> None:
        self.exits = sorted(exits, key=lambda exit_: exit_.layer)
        self._decoder = decoder
        self._exit_at: dict[int, tuple[Exit, int]] = {}
        num_kv_layers = decoder.config.num_layers
        for exit_ in self.exits:
            self._exit_at[exit_.layer] = exit_, num_kv_layers
            num_kv_layers += exit_.num_kv_layers
        config, num_blocks = decoder.config, -(-longest // _BLOCK_SIZE)
        self._table = torch.arange(num_blocks, device=decoder.device).unsqueeze(0)
        self._kv = PagedKV(num_kv_layers, num_blocks, _BLOCK_SIZE, config.num_kv_heads, config.head_dim, decoder.dtype, decoder.device)

    def read(self, answer: Answer) -> Tensor:
        """[layers of the model + exits, tokens of the answer]: the token that each says, of the true context."""
        token_ids = [*answer.prompt_token_ids, *answer.token_ids[:-1]]
        first = len(answer.prompt_token_ids) - 1  # the place that says the answer's first token
        for start in range(0, first, _PROMPT_TOKENS_PER_PASS):
            self._pass(token_ids, start, min(start + _PROMPT_TOKENS_PER_PASS, first), says=False)
        stops = range(first, len(token_ids), _ANSWER_TOKENS_PER_PASS)
        return torch.cat([self._pass(token_ids, start, min(start + _ANSWER_TOKENS_PER_PASS, len(token_ids)), says=True) for start in stops], dim=1)

    def _pass(self, token_ids: list[int], start: int, stop: int, *, says: bool) -> Tensor:
        """Computes positions start..stop-1, one layer at a time; with `says` every exit's choices there, else an empty tensor."""
        decoder, device = self._decoder, self._decoder.device
        positions = torch.arange(start, stop, device=device)
        slots = packed_slots_of(self._table, torch.zeros_like(positions), positions, _BLOCK_SIZE)
        view = BatchView(positions, slots, self._table, torch.tensor([0, stop - start], device=device), stop - start, stop)
        hidden = decoder.embed(torch.tensor(token_ids[start:stop], device=device))
        own, trained = [], []
        for layer in range(1, decoder.config.num_layers + 1):
            hidden = decoder.run_layers(hidden, layer - 1, layer, self._kv, view)
            if says:
                own.append(decoder.logits(hidden, layer).argmax(-1))
            if layer in self._exit_at:
                exit_, kv_layer = self._exit_at[layer]
                if says:
                    trained.append(exit_.logits(hidden, self._kv, kv_layer, view).argmax(-1))
                else:
                    exit_.fill(hidden, self._kv, kv_layer, view)
        return torch.stack([*own, *trained]).cpu() if says else torch.empty(0)
