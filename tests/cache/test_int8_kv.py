"""Keys and values in int8: how near they are, and that a slot's are its own, wherever it lies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from cache import int8_kv
from cache.host_kv import HostKV
from cache.paged_kv import PagedKV
from cache.view import BatchView
from cache.whole_numbers import mixed
from ee_models.kernels import numba_int8_kv
from ee_models.kernels.cpu import NumbaKernels

CPU, INT8 = torch.device("cpu"), torch.int8
SIZES = [16, 48, 64, 80, 128, 256]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_kv(head_dim: int = 32, num_layers: int = 2) -> PagedKV:
    """Random numbers in every slot."""
    kv = PagedKV(num_layers, 6, 16, 3, head_dim, INT8, CPU)
    for layer in range(num_layers):
        numbers = randn(2, 96, 3, head_dim, seed=layer)
        kv.write(layer, torch.arange(96), numbers[0], numbers[1])
    return kv


def content(kv: PagedKV) -> Tensor:
    """[layers, 2, slots, heads, bytes]"""
    slots = torch.arange(kv.num_blocks * kv.block_size)
    return torch.stack(
        [torch.stack([kv.rows(layer, part, slots) for part in (0, 1)]) for layer in range(kv.num_layers)]
    )


@pytest.mark.parametrize("head_dim", SIZES)
@pytest.mark.parametrize("is_key", [True, False])
def test_numbers_are_at_most_half_a_step_off(head_dim: int, is_key: bool) -> None:
    numbers = randn(50, head_dim) * torch.logspace(-20, 20, 50)[:, None]
    found = int8_kv.decode(int8_kv.encode(numbers, is_key), is_key)
    if is_key:  # half a step of each number that is mixed into one
        assert float(((found - numbers).norm(dim=-1) / numbers.norm(dim=-1)).max()) < 0.02
    else:
        assert bool(((found - numbers).abs() <= 0.501 * numbers.abs().amax(1, keepdim=True) / 127).all())


def test_mixing_twice_gives_what_was_there() -> None:
    numbers = randn(20, 64)
    torch.testing.assert_close(mixed(mixed(numbers)) / 64, numbers)


def test_numbers_of_any_kind_have_a_row() -> None:
    for given, expected in ((0.0, 0.0), (1e-35, 0.0), (float("inf"), None), (float("nan"), None)):
        numbers = torch.full((1, 16), given)
        for is_key in (True, False):
            found = int8_kv.decode(int8_kv.encode(numbers, is_key), is_key)
            assert bool(found.isnan().all() if expected is None else (found == expected).all())


@pytest.mark.parametrize("head_dim", SIZES)
@pytest.mark.parametrize("is_key", [True, False])
def test_kernels_write_the_same_bits(head_dim: int, is_key: bool) -> None:
    numbers = randn(16, head_dim) * 10
    numbers[3], numbers[4, 5], numbers[5, 0], numbers[6] = 0.0, float("inf"), float("nan"), 1e-35
    expected, found = (torch.zeros(2, 1, 16 * (head_dim + 4), dtype=INT8) for _ in range(2))
    int8_kv.put(expected, torch.arange(16) + 16, is_key, int8_kv.encode(numbers.unsqueeze(1), is_key))
    spare = np.empty(head_dim, np.int8)
    for lane, row in enumerate(numbers.clone()):
        group = found[1].data_ptr()
        numba_int8_kv.store_head(row.data_ptr(), head_dim, spare.ctypes.data, group, lane, is_key)
    assert torch.equal(found, expected)


def test_a_scale_is_divided_by_once() -> None:
    """127 / peak, as kernels compute it, not 127 times the rounded inverse of the peak."""
    peaks = torch.rand(20_000, 1, generator=torch.Generator().manual_seed(0)) + 0.5
    numbers = torch.cat([peaks, *(peaks * ((n + 0.5) / 127) for n in range(15))], 1)
    expected, found = (torch.zeros(1250, 1, 16 * 20, dtype=INT8) for _ in range(2))
    int8_kv.put(expected, torch.arange(20_000), False, int8_kv.encode(numbers.unsqueeze(1), False))
    spare, first, step = np.empty(16, np.int8), found.data_ptr(), found.stride(0)
    for slot, row in enumerate(numbers):
        group = first + slot // 16 * step
        numba_int8_kv.store_head(row.data_ptr(), 16, spare.ctypes.data, group, slot % 16, False)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("num_padding", [0, 3])
@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 2, 16), (2, 2, 80)])
def test_kernels_write_every_head_to_its_place_and_nothing_else(
    heads: tuple[int, int, int], num_padding: int
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    shape = num_kv_heads, head_dim
    wide, found, expected = (PagedKV(2, 4, 16, *shape, dtype, CPU) for dtype in (torch.float32, INT8, INT8))
    for layer in range(2):
        numbers = randn(2, 64, *shape, seed=layer)
        for kv in (found, expected):
            kv.write(layer, torch.arange(64), numbers[0], numbers[1])
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(1))[:20]
    slots[:num_padding] = -1
    angles = torch.outer(torch.arange(64.0), torch.rand(head_dim // 2))
    cos_sin, qkv = (
        torch.stack((angles.cos(), angles.sin()), 1),
        randn(20, (num_heads + 2 * num_kv_heads) * head_dim),
    )
    view = BatchView(
        torch.arange(20), slots, torch.zeros(1, 1, dtype=torch.int64), torch.tensor([0, 20]), 20, 64
    )
    for kv in (wide, found):
        NumbaKernels().rope_and_store(qkv.clone(), cos_sin, None, 1e-5, kv, 1, view)
    written = slots[num_padding:]
    expected.write(1, written, *wide.read(1, written))
    assert torch.equal(found.data, expected.data)


def test_writing_a_slot_changes_no_other() -> None:
    kv = make_kv()
    before, numbers = content(kv), randn(4, 3, 32, seed=9)
    slots = torch.tensor([40, 3, -1, 15])
    kv.write(1, slots, numbers, -numbers)
    keys, values = kv.read(1, slots[[0, 1, 3]])
    torch.testing.assert_close(keys, numbers[[0, 1, 3]], atol=0.05, rtol=0)
    torch.testing.assert_close(values, -numbers[[0, 1, 3]], atol=0.05, rtol=0)
    others = [slot for slot in range(96) if slot not in slots.tolist()]
    assert torch.equal(content(kv)[:, :, others], before[:, :, others])
    assert torch.equal(content(kv)[0], before[0])


def test_nothing_is_written_of_no_tokens() -> None:
    kv = make_kv()
    before = content(kv)
    kv.write(1, torch.empty(0, dtype=torch.int64), torch.empty(0, 3, 32), torch.empty(0, 3, 32))
    kv.move(0, 2, *torch.empty(2, 0, dtype=torch.int64))
    assert torch.equal(content(kv), before)
    assert kv.read(0, torch.empty(0, dtype=torch.int64))[0].shape == (0, 3, 32)


def test_slots_move_to_others_and_among_each_other() -> None:
    kv = make_kv(num_layers=3)
    before = content(kv)
    sources, targets = torch.tensor([5, 20, 33, 7, -1]), torch.tensor([20, 5, 60, -1, -1])
    kv.move(1, 3, sources, targets)
    expected = before.clone()
    expected[1:, :, targets[:3]] = before[1:, :, sources[:3]]
    assert torch.equal(content(kv), expected)


@pytest.mark.parametrize("num_positions", [0, 1, 17, 48])
def test_what_comes_back_from_the_host_is_what_went(num_positions: int) -> None:
    kv, host = make_kv(), HostKV(1 << 20)
    before = content(kv)
    assert host.save(1, [kv], [4, 0, 2], num_positions)
    assert host.num_bytes == 2 * 2 * num_positions * 3 * 36
    assert not host.restore(1, [make_kv(48)], [4, 0, 2])
    other = make_kv()
    other.write(0, torch.arange(96), *randn(2, 96, 3, 32, seed=5))
    untouched = content(other)
    assert host.restore(1, [other], [5, 3, 1])
    slots, given = (
        torch.cat([torch.arange(16) + 16 * block for block in blocks])[:num_positions]
        for blocks in ([5, 3, 1], [4, 0, 2])
    )
    assert torch.equal(content(other)[:, :, slots], before[:, :, given])
    others = [slot for slot in range(96) if slot not in slots.tolist()]
    assert torch.equal(content(other)[:, :, others], untouched[:, :, others])


def test_half_of_bfloat16s_bytes_and_scales() -> None:
    sizes = 2, 16, 3, 64
    assert PagedKV.bytes_per_block(*sizes, INT8) == 2 * 2 * 16 * 3 * 68
    assert make_kv().num_bytes == 2 * 2 * 7 * 3 * 16 * 36  # a group more, for what is written nowhere


def test_blocks_and_heads_that_have_no_place_are_refused() -> None:
    with pytest.raises(ValueError, match="blocks of a multiple of 16 positions, not 8"):
        PagedKV(1, 4, 8, 2, 16, INT8, CPU)
    with pytest.raises(ValueError, match="heads of a multiple of 16 numbers, and the model's have 40; use"):
        PagedKV(1, 4, 16, 2, 40, INT8, CPU)
