"""Law 8: where the platform gives row invariance, a position's logits have the same bits whatever else is in
the pass."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cache.paged_kv import PagedKV
from cache.view import BatchView, slots_of
from ee_models.checkpoint.loader import open_checkpoint
from ee_models.decoder import Decoder
from tests.helpers.support import random_prompts, threads
from tests.helpers.sweeps import sweep
from tests.helpers.tiny import tiny_checkpoint

BLOCK_SIZES = (1, 4, 16)
SEQUENCES = random_prompts((33, 70, 1, 130, 64), seed=3)


KINDS = [
    ("llama", 2, None),
    ("wide", 1, None),
    ("wide", 2, None),
    ("qwen3", 1, None),
    ("wide", 2, "int8"),
    ("qwen3", 1, "int8"),
    ("wide", 2, "bfloat16"),
    ("qwen3", 1, "bfloat16"),
    ("wide", 2, "int8_kv"),
    ("wide", 1, "int4"),
    ("qwen3", 2, "int4"),
]


@pytest.fixture(scope="module", params=KINDS, ids=str)
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    """A family, the number of threads, and what products are in. `wide` has a down projection of 1,536
    inputs: some libraries sum single rows of those in another order."""
    family, num_threads, numbers = request.param
    path = tmp_path_factory.mktemp(family) / "model"
    if family == "wide":
        tiny_checkpoint(path, "llama", num_layers=2, hidden=64, intermediate_size=1536)
    else:
        tiny_checkpoint(path, family, num_layers=3)
    with threads(num_threads):
        checkpoint = open_checkpoint(path)
        options: dict[str, Any] = {}
        if numbers in ("int8", "int4"):
            options = {"quantization": numbers, "kv_dtype": torch.bfloat16}
        elif numbers == "int8_kv":
            options = {"quantization": "int8", "kv_dtype": torch.int8}
        elif numbers == "bfloat16":
            options = {"weights_dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}
        yield Decoder.load(checkpoint, torch.float32, torch.device("cpu"), **options)


class Runner:
    """Runs mixes of pieces of SEQUENCES through fresh KV, and keeps the logits of each (sequence,
    position)."""

    def __init__(self, decoder: Decoder, block_size: int, seed: int) -> None:
        self._decoder, self._generator = decoder, random.Random(seed)
        config = decoder.config
        if decoder.kv_dtype == torch.int8:  # whose blocks have whole groups
            block_size *= 16
        max_blocks = -(-max(map(len, SEQUENCES)) // block_size)
        blocks = list(range(len(SEQUENCES) * max_blocks))
        self._generator.shuffle(blocks)
        self._tables = torch.tensor(blocks).view(len(SEQUENCES), max_blocks)
        self._kv = PagedKV(
            config.num_layers,
            len(blocks),
            block_size,
            config.num_kv_heads,
            config.head_dim,
            decoder.kv_dtype,
            torch.device("cpu"),
        )

    def run(self, pieces: list[tuple[int, int, int]]) -> dict[tuple[int, int], Tensor]:
        """One pass over pieces (sequence, start, end); each sequence at most once."""
        order = [sequence for sequence, _, _ in pieces]
        q_lens = torch.tensor([0, *(end - start for _, start, end in pieces)])
        positions = torch.cat([torch.arange(start, end) for _, start, end in pieces])
        rows = torch.repeat_interleave(torch.arange(len(pieces)), q_lens[1:])
        tables = self._tables[order]
        slots = slots_of(tables[rows], positions.unsqueeze(1), self._kv.block_size).squeeze(1)
        view = BatchView(
            positions, slots, tables, q_lens.cumsum(0), int(q_lens.max()), max(end for _, _, end in pieces)
        )
        tokens = torch.tensor(
            [token for sequence, start, end in pieces for token in SEQUENCES[sequence][start:end]]
        )
        hidden = self._decoder.run_layers(
            self._decoder.embed(tokens), 0, self._decoder.config.num_layers, self._kv, view
        )
        logits = self._decoder.logits(hidden, self._decoder.config.num_layers)
        return {
            (order[row], position): logits[i]
            for i, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True))
        }

    def random_mix(self, largest: int) -> dict[tuple[int, int], Tensor]:
        done, found = [0] * len(SEQUENCES), {}
        while any(count < len(tokens) for count, tokens in zip(done, SEQUENCES, strict=True)):
            live = [i for i, count in enumerate(done) if count < len(SEQUENCES[i])]
            chosen = self._generator.sample(live, self._generator.randint(1, len(live)))
            pieces = [
                (i, done[i], min(len(SEQUENCES[i]), done[i] + self._generator.randint(1, largest)))
                for i in chosen
            ]
            found.update(self.run(pieces))
            for i, _, end in pieces:
                done[i] = end
        return found


@pytest.fixture(scope="module")
def alone(decoder: Decoder) -> dict[tuple[int, int], Tensor]:
    """The logits of every position, each computed in a pass of its own."""
    runner, found = Runner(decoder, 16, seed=0), {}
    for sequence, tokens in enumerate(SEQUENCES):
        for position in range(len(tokens)):
            found.update(runner.run([(sequence, position, position + 1)]))
    return found


def test_the_claim_is_made_where_it_is_tested(decoder: Decoder) -> None:
    """In float32 on a CPU, whichever it is."""
    assert decoder.row_invariant


@sweep(
    "largest, block_size",
    itertools.product([1, 2, 8, 40, 200], BLOCK_SIZES),
    lambda case: case in {(200, 4), (40, 4), (40, BLOCK_SIZES[0]), (40, BLOCK_SIZES[-1])},
)
def test_logits_are_bit_identical_whatever_else_is_in_the_pass(
    decoder: Decoder, alone: dict[tuple[int, int], Tensor], largest: int, block_size: int
) -> None:
    mixed = Runner(decoder, block_size, seed=largest).random_mix(largest)
    assert mixed.keys() == alone.keys()
    differing = [key for key in alone if not torch.equal(alone[key], mixed[key])]
    if decoder.row_invariant:
        assert not differing
    else:
        assert all(torch.allclose(alone[key], mixed[key], atol=1e-3) for key in differing)


def test_a_backend_that_is_not_invariant_says_so(tiny_path: object) -> None:
    decoder = Decoder.load(
        open_checkpoint(str(tiny_path)), torch.float32, torch.device("cpu"), attention="sdpa"
    )
    assert not decoder.row_invariant
