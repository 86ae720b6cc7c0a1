"""The tensors of `cache`: where PagedKV and HiddenBuffer write and read, and how a view addresses them."""

from __future__ import annotations

import gc
import statistics
import time
import weakref

import pytest
import torch

from cache.hidden import HiddenBuffer
from cache.paged_kv import PagedKV
from cache.view import BatchView, slots_of

CPU = torch.device("cpu")


def make_kv(dtype: torch.dtype = torch.float32) -> PagedKV:
    return PagedKV(
        num_layers=3, num_blocks=4, block_size=2, num_kv_heads=2, head_dim=4, dtype=dtype, device=CPU
    )


def random_tokens(num: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, 2, 4, generator=generator), torch.randn(num, 2, 4, generator=generator)


@pytest.mark.parametrize("slots", [[5, 0, 7], [5, -1, 7], [-1, 2, -1], [-1, -1, -1]])
def test_kv_is_written_at_its_slots_and_nowhere_else(slots: list[int]) -> None:
    kv = make_kv()
    kv.data.copy_(torch.randn(kv.data.shape, generator=torch.Generator().manual_seed(1)))
    expected = kv.data.clone()
    keys, values = random_tokens(3)
    for i, slot in enumerate(slots):
        if slot >= 0:
            expected[1, 0, slot], expected[1, 1, slot] = keys[i], values[i]
    kv.write(1, torch.tensor(slots), keys, values)
    assert torch.equal(kv.data, expected)


def test_kv_converts_to_its_own_dtype() -> None:
    kv = make_kv(torch.bfloat16)
    keys, values = random_tokens(1)
    kv.write(0, torch.tensor([3]), keys, values)
    assert torch.equal(kv.keys(0)[3], keys[0].bfloat16())
    assert torch.equal(kv.values(0)[3], values[0].bfloat16())


def test_keys_and_values_of_a_layer_are_views() -> None:
    kv = make_kv()
    kv.keys(2)[6] = 1.0
    kv.values(2)[1] = 2.0
    assert (kv.data[2, 0, 6] == 1.0).all()
    assert (kv.data[2, 1, 1] == 2.0).all()
    assert kv.data.sum() == 8 * 1.0 + 8 * 2.0


def test_unwritten_kv_is_zero_since_tiles_read_it_with_weight_zero() -> None:
    assert not make_kv().data.any()


def test_released_kv_memory_is_held_by_nothing() -> None:
    kv = make_kv()
    memory = weakref.ref(kv.data)
    kv.release()
    gc.collect()
    assert memory() is None
    assert kv.num_bytes == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_layers", "num_blocks", "block_size", "num_kv_heads", "head_dim"),
    [(3, 4, 2, 2, 4), (1, 1, 16, 3, 64), (5, 7, 1, 1, 10)],
)
def test_bytes_per_block_is_the_memory_that_a_block_takes(
    num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    kv = PagedKV(num_layers, num_blocks, block_size, num_kv_heads, head_dim, dtype, CPU)
    per_block = PagedKV.bytes_per_block(num_layers, block_size, num_kv_heads, head_dim, dtype)
    nowhere = per_block // block_size  # one place more in each layer
    assert per_block * num_blocks + nowhere == kv.num_bytes == kv.data.untyped_storage().nbytes()


def test_hidden_states_are_addressed_by_exit_row_and_position() -> None:
    rows, window, size = 3, 5, 2
    buffer = HiddenBuffer(2, rows, window, size, torch.float32, CPU)
    buffer.data.fill_(-1.0)
    row, position = torch.tensor([2, 0, 1]), torch.tensor([4, 0, 3])
    hidden = torch.arange(6.0).view(3, size)
    buffer.write(1, row * window + position, hidden)
    expected = torch.full((2, rows, window, size), -1.0)
    expected[1, row, position] = hidden
    assert torch.equal(buffer.data, expected)
    assert torch.equal(buffer.read(1, row * window + position), hidden)
    assert torch.equal(buffer.read(0, row * window + position), torch.full((3, size), -1.0))


def test_a_round_reads_what_it_wrote_and_not_what_another_round_left() -> None:
    buffer = HiddenBuffer(1, 2, 3, 1, torch.float32, CPU)
    buffer.write(0, torch.arange(6), torch.full((6, 1), 1.0))  # an earlier round filled its whole window
    written = torch.tensor([0, 1, 3])  # this one: two positions of row 0, one of row 1
    buffer.write(0, written, torch.full((3, 1), 2.0))
    assert buffer.read(0, written).eq(2.0).all()
    assert buffer.read(0, torch.tensor([2, 4, 5])).eq(1.0).all()  # untouched: overwriting is by position


def test_what_was_read_does_not_change_when_its_place_is_written_again() -> None:
    buffer = HiddenBuffer(1, 1, 2, 1, torch.float32, CPU)
    buffer.write(0, torch.tensor([0, 1]), torch.tensor([[1.0], [2.0]]))
    read = buffer.read(0, torch.tensor([0, 1]))
    read += 10.0  # layers run in place over what they resume from
    assert buffer.read(0, torch.tensor([0, 1])).flatten().tolist() == [1.0, 2.0]
    buffer.write(0, torch.tensor([0]), torch.tensor([[5.0]]))
    assert read.flatten().tolist() == [11.0, 12.0]


def test_the_hidden_buffer_counts_its_bytes() -> None:
    assert HiddenBuffer(2, 3, 5, 7, torch.bfloat16, CPU).num_bytes == 2 * (3 * 5 + 1) * 7 * 2  # and nowhere


@pytest.mark.parametrize("q_lens", [[1], [3], [1, 1, 1], [2, 0, 3], [0, 4], [4, 0, 0], [0, 0]])
def test_row_ids_name_the_row_of_each_token(q_lens: list[int]) -> None:
    num_tokens = sum(q_lens)
    view = BatchView(
        positions=torch.zeros(num_tokens, dtype=torch.int64),
        slots=torch.zeros(num_tokens, dtype=torch.int64),
        block_tables=torch.zeros(len(q_lens), 1, dtype=torch.int64),
        cu_q_lens=torch.tensor([sum(q_lens[:i]) for i in range(len(q_lens) + 1)]),
        max_q_len=max(q_lens),
        max_context_len=1,
    )
    assert view.row_ids().tolist() == [row for row, q_len in enumerate(q_lens) for _ in range(q_len)]
    assert (view.num_tokens, view.num_rows) == (num_tokens, len(q_lens))


@pytest.mark.parametrize("block_size", range(1, 65))
def test_a_slot_is_its_blocks_first_slot_and_the_offset_in_it(block_size: int) -> None:
    generator = torch.Generator().manual_seed(block_size)
    max_blocks = -(-100 // block_size)
    tables = torch.randperm(3 * max_blocks, generator=generator).view(3, max_blocks)
    positions = torch.stack([torch.randperm(100, generator=generator) for _ in range(3)])
    slots = slots_of(tables, positions, block_size)
    for row in range(3):
        for position, slot in zip(positions[row].tolist(), slots[row].tolist(), strict=True):
            block, offset = divmod(slot, block_size)
            assert (block, offset) == (int(tables[row, position // block_size]), position % block_size)
    assert slots.unique().numel() == slots.numel(), "two positions share a slot"


MOVES = [
    ([5, 2, 7], [0, 1, 3]),
    ([4, 5, 6], [5, 6, 4]),  # a cycle: each is read before it is written
    ([1, 2, 3], [0, 1, 2]),  # each moves to where the last one was
    ([6], [6]),
    ([3, 5, 7], [-1, 3, -1]),  # one that goes nowhere comes from where another goes to
    ([0, 4, 0], [-1, 0, 7]),  # and the first of all slots likewise
    ([-1, 2, 8], [-1, 4, -1]),  # and from no slot at all
    ([3, 5], [-1, -1]),
    ([-1, -1], [-1, -1]),
    ([], []),
]


def moved(data: torch.Tensor, sources: list[int], targets: list[int]) -> torch.Tensor:
    """A copy of data [..., n, size] with n-places moved, pair by pair."""
    out = data.clone()
    for source, target in zip(sources, targets, strict=True):
        if target >= 0:
            out[..., target, :] = data[..., source, :]
    return out


@pytest.mark.parametrize(("sources", "targets"), MOVES)
@pytest.mark.parametrize(("first_layer", "last_layer"), [(0, 3), (1, 2), (1, 3), (2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kv_is_moved_at_its_layers_and_nowhere_else(
    first_layer: int, last_layer: int, sources: list[int], targets: list[int], dtype: torch.dtype
) -> None:
    kv = make_kv(dtype)
    kv.data.copy_(torch.randn(kv.data.shape, generator=torch.Generator().manual_seed(1)))
    expected = kv.data.clone()
    span = slice(first_layer, last_layer)
    expected[span] = moved(kv.data[span].flatten(3), sources, targets).view_as(kv.data[span])
    kv.move(
        first_layer,
        last_layer,
        torch.tensor(sources, dtype=torch.int64),
        torch.tensor(targets, dtype=torch.int64),
    )
    assert torch.equal(kv.data, expected)


@pytest.mark.parametrize(("sources", "targets"), MOVES)
def test_hidden_states_are_moved_at_their_exit_and_nowhere_else(
    sources: list[int], targets: list[int]
) -> None:
    buffer = HiddenBuffer(2, 3, 3, 2, torch.float32, CPU)
    buffer.data.copy_(torch.randn(buffer.data.shape, generator=torch.Generator().manual_seed(1)))
    expected = buffer.data.clone()
    expected[1] = moved(buffer.data[1].flatten(0, 1), sources, targets).view(3, 3, 2)
    buffer.move(1, torch.tensor(sources, dtype=torch.int64), torch.tensor(targets, dtype=torch.int64))
    assert torch.equal(buffer.data, expected)


@pytest.mark.slow
def test_a_move_of_a_small_models_kv_takes_little() -> None:
    """SmolLM2-135M's shape, four places: far below a layer's time."""
    kv = PagedKV(30, 400, 16, 3, 64, torch.float32, CPU)
    sources, targets = torch.tensor([700, 1205, 3310, 77]), torch.tensor([701, 702, 703, -1])
    times_s = []
    for _ in range(100):
        start = time.perf_counter()
        kv.move(0, 30, sources, targets)
        times_s.append(time.perf_counter() - start)
    taken_ms = statistics.median(times_s[10:]) * 1e3
    print(f"{taken_ms:.3f} ms")
    assert taken_ms < 0.5
