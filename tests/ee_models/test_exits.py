"""Exits: the engine's adapters over paged KV are what was trained, and `fill` leaves what `logits` would
have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cache.paged_kv import PagedKV
from cache.view import BatchView, packed_slots_of
from ee_models.checkpoint.exit_files import ExitInfo
from ee_models.checkpoint.loader import Checkpoint, open_checkpoint
from ee_models.decoder import Decoder
from ee_models.exits import AdapterExit, head_name
from ee_models.kernels.numba_gemm import COLUMNS
from ee_models.narrow_linear import NarrowLinear
from ee_models.panel_linear import PanelLinear
from ee_models.training.adapters import AdapterModule
from hispec.sampling.logits import Logits
from tests.helpers.adapters import loaded, make_exits, make_module
from tests.helpers.tiny import FAMILIES, tiny_checkpoint

CPU = torch.device("cpu")
LAYER, KV_LAYER, BLOCK_SIZE = 1, 2, 4
SHAPES = {
    "kangaroo": ExitInfo(layer=LAYER),
    "with_mlp": ExitInfo(layer=LAYER, intermediate_size=80),
    "two_blocks": ExitInfo(layer=LAYER, num_blocks=2, intermediate_size=40),
    "three_kangaroo_blocks": ExitInfo(layer=LAYER, num_blocks=3),
    "only_mlps": ExitInfo(layer=LAYER, num_blocks=2, attention=False, intermediate_size=40),
    "only_a_norm": ExitInfo(layer=LAYER, num_blocks=0),
    "reduced_vocabulary": ExitInfo(layer=LAYER, intermediate_size=40, vocabulary_size=50),
    "only_a_norm_reduced_vocabulary": ExitInfo(layer=LAYER, num_blocks=0, vocabulary_size=1),
}
# Tokens per row of each pass: ragged, rows that rest, prompts and single tokens.
PASSES = [[5, 1, 0, 9], [1, 0, 3, 1], [1, 1, 1, 1], [7, 1, 4, 2], [1, 2, 0, 12]]
LENGTHS = [sum(counts) for counts in zip(*PASSES, strict=True)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(tiny_checkpoint(tmp_path_factory.mktemp("exits") / "model", num_layers=2))


@pytest.fixture(scope="module")
def decoder(checkpoint: Checkpoint) -> Decoder:
    return Decoder.load(checkpoint, torch.float32, CPU)


def make_exit(folder: Path, checkpoint: Checkpoint, decoder: Decoder, info: ExitInfo) -> AdapterExit:
    return loaded(make_exits(folder, checkpoint, [info]), decoder, checkpoint)[0]


def random_states(checkpoint: Checkpoint) -> list[Tensor]:
    """Hidden states of each row, as large as a trunk's."""
    generator = torch.Generator().manual_seed(7)
    return [
        2.0 * torch.randn(length, checkpoint.config.hidden_size, generator=generator) for length in LENGTHS
    ]


def make_kv(decoder: Decoder, exit_: AdapterExit) -> PagedKV:
    config = decoder.config
    kv = PagedKV(
        KV_LAYER + exit_.num_kv_layers + 1,
        64,
        BLOCK_SIZE,
        config.num_kv_heads,
        config.head_dim,
        decoder.dtype,
        CPU,
    )
    kv.data.fill_(77.0)  # what nobody has written must not matter
    return kv


def views() -> list[tuple[list[tuple[int, int, int]], BatchView]]:
    """For each pass: (row, first, last + 1) of the rows that take part, and its view; blocks are
    scattered."""
    tables = torch.randperm(64, generator=torch.Generator().manual_seed(1))[: 4 * 10].view(4, 10)
    done, out = [0] * 4, []
    for counts in PASSES:
        parts = [(row, done[row], done[row] + count) for row, count in enumerate(counts) if count]
        rows = torch.tensor([row for row, first, last in parts for _ in range(first, last)])
        positions = torch.cat([torch.arange(first, last) for _, first, last in parts])
        cu_q_lens = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()])
        slots = packed_slots_of(tables, rows, positions, BLOCK_SIZE)
        for row, count in enumerate(counts):
            done[row] += count
        out.append((parts, BatchView(positions, slots, tables, cu_q_lens, max(counts), max(done))))
    return out


def over_pages(
    exit_: AdapterExit, states: Sequence[Tensor], kv: PagedKV, only_filled: Sequence[int] = ()
) -> list[Tensor]:
    """Logits of all rows [tokens, vocab], pass by pass; NaN for those of passes that are `only_filled`."""
    out: list[list[Tensor]] = [[] for _ in states]
    for number, (parts, view) in enumerate(views()):
        hidden = torch.cat([states[row][first:last] for row, first, last in parts])
        before = hidden.clone()
        if number in only_filled:
            exit_.fill(hidden, kv, KV_LAYER, view)
            logits = torch.full((hidden.shape[0], 260), torch.nan)
        else:
            logits = Logits(exit_.logits(hidden, kv, KV_LAYER, view), 260, exit_.vocabulary).wide()
        assert torch.equal(hidden, before), "the trunk's hidden states were changed"
        for (row, _, _), part in zip(
            parts, logits.split([last - first for _, first, last in parts]), strict=True
        ):
            out[row].append(part)
    return [torch.cat(parts) for parts in out]


def as_trained(module: AdapterModule, checkpoint: Checkpoint, states: Sequence[Tensor]) -> list[Tensor]:
    """Logits of all rows by the training module, over whole sequences."""
    lengths = torch.tensor([len(row) for row in states])
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
    rows = torch.repeat_interleave(torch.arange(len(states)), lengths)
    groups = [
        ((rows // 2 == pair).nonzero().flatten(), rows[rows // 2 == pair] % 2, positions[rows // 2 == pair])
        for pair in range(2)
    ]
    angles = torch.outer(positions.float(), checkpoint.config.rope.inv_freq(checkpoint.config.head_dim))
    with torch.no_grad():
        rotation = (angles.cos()[:, None], angles.sin()[:, None])
        normed = module(torch.cat(list(states)), rotation, groups, torch.arange(len(angles)))
        head = checkpoint.tensor(head_name(checkpoint))
        logits = F.linear(normed, head)
        if module.vocabulary is not None:
            outside = torch.ones(head.shape[0], dtype=torch.bool)
            outside[module.vocabulary] = False
            logits[:, outside] = -torch.inf
    return list(logits.split(lengths.tolist()))


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for row, (one, other) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(
            one, other, atol=2e-3, rtol=1e-3, msg=lambda text, row=row: f"row {row}: {text}"
        )


@pytest.mark.parametrize("shape", SHAPES)
def test_an_adapter_over_pages_says_what_the_training_module_says(
    tmp_path: Path, checkpoint: Checkpoint, decoder: Decoder, shape: str
) -> None:
    info = SHAPES[shape]
    exit_, states = make_exit(tmp_path, checkpoint, decoder, info), random_states(checkpoint)
    expected = as_trained(make_module(info, checkpoint.config), checkpoint, states)
    assert_same(over_pages(exit_, states, make_kv(decoder, exit_)), expected)
    # Passes whose logits nobody asked for leave the others as they are, to the bit.
    found = over_pages(exit_, states, make_kv(decoder, exit_), only_filled=(0, 2, 3))
    whole = over_pages(exit_, states, make_kv(decoder, exit_))
    for one, other in zip(found, whole, strict=True):
        asked = ~one.isnan().any(-1)
        assert torch.equal(one[asked], other[asked]) and 0 < int(asked.sum()) < len(one)


@pytest.mark.parametrize("shape", SHAPES)
def test_fill_writes_the_very_kv_that_logits_writes_and_no_other(
    tmp_path: Path, checkpoint: Checkpoint, decoder: Decoder, shape: str
) -> None:
    exit_, states = make_exit(tmp_path, checkpoint, decoder, SHAPES[shape]), random_states(checkpoint)
    by_logits, by_fill = make_kv(decoder, exit_), make_kv(decoder, exit_)
    untouched = by_fill.data.clone()
    over_pages(exit_, states, by_logits)
    over_pages(exit_, states, by_fill, only_filled=range(len(PASSES)))
    assert torch.equal(by_logits.data, by_fill.data)
    own = slice(KV_LAYER, KV_LAYER + exit_.num_kv_layers)
    changed = (by_fill.data != untouched).flatten(3).any(-1)
    assert not changed[:KV_LAYER].any() and not changed[own.stop :].any(), "KV of others was written"
    if SHAPES[shape].attention:
        assert bool((changed[own].sum(-1) == sum(LENGTHS)).all()), (
            "not exactly the slots of the passes were written"
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_every_family_say_what_was_trained(tmp_path: Path, family: str) -> None:
    """Rotary frequencies, grouped heads, heads of another size than hidden / heads, tied heads; with and
    without the trunk's start."""
    checkpoint = open_checkpoint(tiny_checkpoint(tmp_path / "model", family, num_layers=2))
    decoder, info = Decoder.load(checkpoint, torch.float32, CPU), ExitInfo(layer=LAYER, intermediate_size=96)
    states = random_states(checkpoint)
    for from_trunk in (False, True):
        exit_ = loaded(
            make_exits(tmp_path / "exits", checkpoint, [info], from_trunk=from_trunk), decoder, checkpoint
        )[0]
        module = make_module(info, checkpoint.config, checkpoint if from_trunk else None)
        assert_same(
            over_pages(exit_, states, make_kv(decoder, exit_)), as_trained(module, checkpoint, states)
        )


@pytest.mark.parametrize("attention", ["sdpa", "numba"])
def test_every_attention_backend_serves_adapters(
    tmp_path: Path, checkpoint: Checkpoint, attention: str
) -> None:
    decoder, info = Decoder.load(checkpoint, torch.float32, CPU, attention), SHAPES["two_blocks"]
    exit_, states = make_exit(tmp_path, checkpoint, decoder, info), random_states(checkpoint)
    assert_same(
        over_pages(exit_, states, make_kv(decoder, exit_)),
        as_trained(make_module(info, checkpoint.config), checkpoint, states),
    )


def test_adapters_take_the_decoders_dtype(tmp_path: Path, checkpoint: Checkpoint) -> None:
    decoder, info = Decoder.load(checkpoint, torch.bfloat16, CPU), SHAPES["reduced_vocabulary"]
    exit_ = make_exit(tmp_path, checkpoint, decoder, info)
    states = random_states(checkpoint)
    found = torch.cat(over_pages(exit_, [row.bfloat16() for row in states], make_kv(decoder, exit_)))
    expected = torch.cat(as_trained(make_module(info, checkpoint.config), checkpoint, states))
    inside = expected.isfinite()
    assert found.dtype == torch.bfloat16 and torch.equal(found.isfinite(), inside)
    error = (found.float()[inside] - expected[inside]).square().mean().sqrt() / expected[
        inside
    ].square().mean().sqrt()
    assert error < 0.05


def test_adapters_are_held_as_the_decoders_weights_are(tmp_path: Path, checkpoint: Checkpoint) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        decoder = Decoder.load(checkpoint, torch.float32, CPU, weights_dtype=dtype)
        exit_ = make_exit(tmp_path / str(dtype), checkpoint, decoder, SHAPES["reduced_vocabulary"])
        head = exit_.logit_steps(2)[-1].head
        if decoder.make_linear.is_bfloat16:
            assert isinstance(head, NarrowLinear) and head.bits == 16
        else:
            assert isinstance(head, PanelLinear) and head.panels.dtype == dtype


def test_outside_a_reduced_vocabulary_nothing_can_be_said(
    tmp_path: Path, checkpoint: Checkpoint, decoder: Decoder
) -> None:
    info = SHAPES["reduced_vocabulary"]
    exit_, module = make_exit(tmp_path, checkpoint, decoder, info), make_module(info, checkpoint.config)
    logits = torch.cat(over_pages(exit_, random_states(checkpoint), make_kv(decoder, exit_)))
    said = logits.isfinite().all(0)
    assert logits.shape[1] == 260 and module.vocabulary is not None
    assert sorted(said.nonzero().flatten().tolist()) == sorted(module.vocabulary.tolist())
    assert bool(logits[:, ~said].eq(-torch.inf).all())


def test_an_exit_says_what_memory_it_takes(tmp_path: Path, checkpoint: Checkpoint, decoder: Decoder) -> None:
    """Matrices, of which its own head is one if its vocabulary is reduced; what it shares with the model
    counts there. Of float32 with room for a bias, in whole panels."""
    sizes = {
        name: make_exit(tmp_path / name, checkpoint, decoder, info).num_bytes for name, info in SHAPES.items()
    }

    def held(num_outputs: int, num_inputs: int) -> int:
        return 4 * -(-num_outputs // COLUMNS) * COLUMNS * (num_inputs + 1)

    norm, attention, mlp = 4 * 48, held(48 + 24 + 24, 48) + held(48, 48), held(2 * 40, 48) + held(48, 40)
    assert sizes["only_a_norm"] == norm
    assert sizes["only_a_norm_reduced_vocabulary"] == norm + held(1, 48)
    assert sizes["kangaroo"] == norm + attention
    assert sizes["reduced_vocabulary"] == norm + attention + mlp + held(50, 48)
