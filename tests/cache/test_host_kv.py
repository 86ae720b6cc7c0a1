"""KV in host memory: what comes back is what went, to the bit, within the bound; and when it is worth it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from cache.host_kv import HostKV
from cache.paged_kv import PagedKV
from hispec.engine.kv_offload import KVOffloader
from tests.helpers.scheduling_server import make_request

CPU = torch.device("cpu")
DEVICES = [CPU, *([torch.device("cuda")] if torch.cuda.is_available() else [])]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]
BLOCKS = [5, 0, 3, 7]
OTHERS = [6, 2, 1, 4]


def make_kv(
    num_layers: int = 3, dtype: torch.dtype = torch.float32, device: torch.device = CPU, seed: int = 0
) -> PagedKV:
    """Random bits in every place: numbers of all kinds, nan among them."""
    kv = PagedKV(num_layers, 8, 4, 2, 8, dtype, device)
    bits = torch.randint(
        0,
        256,
        (*kv.data.shape[:-1], kv.data.shape[-1] * dtype.itemsize),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(seed),
    )
    kv.data.copy_(bits.to(device).view(dtype))
    return kv


def bits(kv: PagedKV, blocks: Sequence[int], num_positions: int) -> torch.Tensor:
    """[layers, 2, positions, heads, bytes]"""
    slots = [block * kv.block_size + offset for block in blocks for offset in range(kv.block_size)][
        :num_positions
    ]
    return kv.data.cpu().contiguous().view(torch.uint8)[:, :, slots]


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_positions", [0, 1, 4, 11, 16])
def test_what_comes_back_is_what_went_to_the_bit(
    dtype: torch.dtype, num_positions: int, device: torch.device
) -> None:
    """The model's KV, exits in its further layers, and a draft model's of another size; into other blocks;
    nothing else is touched."""
    kvs = [make_kv(3, dtype, device), make_kv(1, dtype, device, seed=1)]
    before = [bits(kv, BLOCKS, num_positions) for kv in kvs]
    host = HostKV(1 << 20)
    assert host.save(7, kvs, BLOCKS, num_positions) and 7 in host
    assert host.num_bytes == 4 * 2 * num_positions * 2 * 8 * dtype.itemsize
    for kv in kvs:
        kv.data.copy_(make_kv(kv.num_layers, dtype, device, seed=2).data)
    spare = [bits(kv, list(range(8)), 32) for kv in kvs]
    assert host.restore(7, kvs, OTHERS)
    used = [block * 4 + offset for block in OTHERS for offset in range(4)][:num_positions]
    for kv, saved, all_before in zip(kvs, before, spare, strict=True):
        assert torch.equal(bits(kv, OTHERS, num_positions), saved)
        unused = [slot for slot in range(32) if slot not in used]
        assert torch.equal(bits(kv, list(range(8)), 32)[:, :, unused], all_before[:, :, unused])
    assert host.num_bytes == 0 and 7 not in host


def test_the_bound_is_kept_and_what_does_not_fit_is_not_half_saved() -> None:
    kvs = [make_kv(), make_kv(1)]
    one = 4 * 2 * 2 * 8 * 4  # bytes of a position
    host = HostKV(10 * one)
    assert host.save(0, kvs, BLOCKS, 6)
    assert not host.save(1, kvs, BLOCKS, 5) and 1 not in host and host.num_bytes == 6 * one
    assert host.save(1, kvs, BLOCKS, 4) and host.num_bytes == 10 * one
    host.drop(0)
    host.drop(0)
    assert host.num_bytes == 4 * one and 1 in host
    assert not HostKV(0).save(0, kvs, BLOCKS, 1)


def test_an_error_on_the_way_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    kvs = [make_kv(), make_kv(1)]
    host = HostKV(1 << 20)
    real, calls = torch.empty, []

    def failing(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(args)
        if len(calls) == 2:
            raise MemoryError("out of memory")
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", failing)
    with pytest.raises(MemoryError):
        host.save(0, kvs, BLOCKS, 6)
    monkeypatch.undo()
    assert 0 not in host and host.num_bytes == 0
    assert host.save(0, kvs, BLOCKS, 6)


def test_misuse_is_refused() -> None:
    kvs = [make_kv()]
    host = HostKV(1 << 20)
    with pytest.raises(ValueError, match="max_bytes=-1"):
        HostKV(-1)
    with pytest.raises(ValueError, match="17 positions do not lie in 4 blocks of 4"):
        host.save(0, kvs, BLOCKS, 17)
    assert 0 not in host and host.num_bytes == 0
    host.save(0, kvs, BLOCKS, 16)
    held = host.num_bytes
    host.save(
        0, kvs, BLOCKS, 16
    )  # in place of the first: an interrupt may have come between the copy and the word of it
    assert host.num_bytes == held > 0
    with pytest.raises(ValueError, match="16 positions do not lie in 3 blocks"):
        host.restore(0, kvs, BLOCKS[:3])
    with pytest.raises(KeyError):
        host.restore(1, kvs, BLOCKS)
    assert 0 in host


@pytest.mark.parametrize(
    "others", [[], [make_kv(), make_kv(1)], [make_kv(2)], [make_kv(dtype=torch.float16)]]
)
def test_into_other_tensors_nothing_is_restored(others: list[PagedKV]) -> None:
    host = HostKV(1 << 20)
    host.save(0, [make_kv()], BLOCKS, 9)
    before = [kv.data.clone() for kv in others]
    assert not host.restore(0, others, OTHERS) and 0 in host
    assert all(
        torch.equal(kv.data.view(torch.uint8), data.view(torch.uint8))
        for kv, data in zip(others, before, strict=True)
    )


def test_any_number_of_sequences_come_and_go() -> None:
    kvs = [make_kv()]
    host, saved = HostKV(2000), {}
    generator = random.Random(0)
    for number in range(200):
        num_positions = generator.randrange(1, 9)
        if host.save(number, kvs, BLOCKS, num_positions):
            saved[number] = num_positions
        assert host.num_bytes == sum(saved.values()) * 3 * 2 * 2 * 8 * 4 <= 2000
        if generator.random() < 0.5 and saved:
            gone = generator.choice(list(saved))
            del saved[gone]
            assert host.restore(gone, kvs, BLOCKS) if generator.random() < 0.5 else host.drop(gone) is None
    assert len(saved) < 10


# ---- the scheduler's keeper ----


def computed(number: int, num_computed: int, blocks: list[int]) -> Any:
    request = make_request(number, 12)
    request.num_computed, request.table.blocks = num_computed, blocks
    return request


def test_the_keeper_saves_what_is_cheaper_to_move_and_restores_it() -> None:
    kvs = [make_kv()]
    host = HostKV(1 << 20)
    keeper = KVOffloader(host, lambda: kvs, lambda num_positions: num_positions > 4)
    assert not keeper.save(computed(0, 4, BLOCKS[:1])) and host.num_bytes == 0
    request = computed(1, 6, BLOCKS[:2])
    before = bits(kvs[0], BLOCKS, 6)
    assert keeper.save(request)
    kvs[0].data.zero_()
    request.table.blocks = OTHERS[:2]
    assert keeper.restore(request) and torch.equal(bits(kvs[0], OTHERS, 6), before) and host.num_bytes == 0
    assert keeper.save(request)
    keeper.drop(request)
    keeper.drop(request)
    assert host.num_bytes == 0


def test_the_keeper_goes_on_without_memory_and_with_another_plans_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kvs = [make_kv()]
    host = HostKV(1 << 20)
    keeper = KVOffloader(host, lambda: kvs, lambda num_positions: True)
    request = computed(0, 6, BLOCKS[:2])

    def out_of_memory(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", out_of_memory)
        assert not keeper.save(request)
    assert keeper.save(request)
    with monkeypatch.context() as patch:
        patch.setattr(HostKV, "restore", out_of_memory)
        assert not keeper.restore(request) and host.num_bytes == 0
    assert keeper.save(request)
    kvs.append(make_kv(1))
    assert not keeper.restore(request) and host.num_bytes == 0


def test_other_errors_of_the_keeper_are_not_hidden() -> None:
    keeper = KVOffloader(HostKV(1 << 20), lambda: [make_kv()], lambda num_positions: True)
    with pytest.raises(ValueError, match="do not lie in"):
        keeper.save(computed(0, 6, BLOCKS[:1]))
    assert not keeper.restore(computed(0, 6, BLOCKS[:2])), (
        "an interrupt may have come between: then it is computed again"
    )
