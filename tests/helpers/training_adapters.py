"""Examples, exits and batches for the tests of training on a frozen trunk. Its fixtures are imported where
they are used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ee_models.checkpoint.exit_files import ExitInfo
from ee_models.checkpoint.loader import Checkpoint, open_checkpoint
from ee_models.decoder import Decoder
from ee_models.exits import head_name
from ee_models.training.adapters import AdapterModule, Exits, StatesBatch
from ee_models.training.examples import Example
from ee_models.training.hidden_states import StateStore
from tests.helpers.adapters import make_module
from tests.helpers.tiny import TINY_VOCAB, tiny_checkpoint

CPU = torch.device("cpu")
LAYERS = (2, 4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(tiny_checkpoint(tmp_path_factory.mktemp("training") / "model", num_layers=6))


@pytest.fixture(scope="module")
def decoder(checkpoint: Checkpoint) -> Decoder:
    return Decoder.load(checkpoint, torch.float32, CPU)


def make_examples(count: int, seed: int = 0) -> list[Example]:
    """Of 4 to 12 tokens, 1 to 3 of them prompt."""
    generator = torch.Generator().manual_seed(seed)
    lens = [4 + index * 5 % 9 for index in range(count)]
    return [
        Example(torch.randint(TINY_VOCAB, (n,), generator=generator).tolist(), 1 + index % 3)
        for index, n in enumerate(lens)
    ]


def make_modules(checkpoint: Checkpoint, infos: Sequence[ExitInfo], seed: int = 0) -> list[AdapterModule]:
    """Reduced vocabularies are prefixes of one list, as in training."""
    modules = []
    order = torch.randperm(TINY_VOCAB, generator=torch.Generator().manual_seed(seed))
    for info in infos:
        module = make_module(info, checkpoint.config, seed=seed)
        module.vocabulary = None if info.vocabulary_size is None else order[: info.vocabulary_size]
        modules.append(module)
    return modules


def make_exits(checkpoint: Checkpoint, modules: Sequence[AdapterModule]) -> Exits:
    model = checkpoint.config
    return Exits(modules, checkpoint.tensor(head_name(checkpoint)), model.rope.inv_freq(model.head_dim))


def batch_of(examples: Sequence[Example], states: Sequence[dict[str, Tensor]]) -> StatesBatch:
    """Packed by hand, without padding, all in one group."""
    positions = torch.cat([torch.arange(len(example.token_ids)) for example in examples])
    rows = torch.cat([torch.full((len(example.token_ids),), row) for row, example in enumerate(examples)])
    predicts = torch.cat(
        [
            torch.arange(len(e.token_ids)).ge(e.prompt_len - 1)
            & torch.arange(len(e.token_ids)).lt(len(e.token_ids) - 1)
            for e in examples
        ]
    )
    packed = {name: torch.cat([state[name] for state in states]) for name in states[0]}
    return StatesBatch(packed, positions, predicts, [(torch.arange(len(rows)), rows, positions)])


def places_of(batch: StatesBatch) -> list[Tensor]:
    """Where the tokens of each example stand in the batch, in order."""
    out = []
    for places, rows, positions in batch.groups:
        for row in range(int(rows.max()) + 1):
            assert torch.equal(positions[rows == row], torch.arange(int((rows == row).sum())))
            out.append(places[rows == row])
    return out


def make_store(
    folder: Path,
    decoder: Any,
    examples: Sequence[Example],
    layers: Sequence[int] = LAYERS,
    model: str = "model",
) -> StateStore:
    return StateStore(folder, decoder, layers, examples, model, progress=False)
