"""GPU attention that reads pages in place: flash decoding in Triton.

A program takes a few (token, query head) pairs of one row and one KV head, so that keys and values are loaded
once for all heads of a group and for the tokens of a draft, and walks a part of the context, a *split*, in
tiles counted from position 0. A second kernel merges the splits.

Nothing here waits for the device, and grids come from host integers only: a pass can be captured in a CUDA
graph, once it has run before the capture, which compiles the kernels. A graph for contexts up to a bucket's
size has that bucket's splits; those past a row's end cost next to nothing.

In a tree the tokens of a program share the tiles below the first path, and take turns from there on, each
with tiles of its own slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from cache.paged_kv import PagedKV
from cache.view import BatchView

from .triton_kernels import attend_pages, combine_splits

_LOG2_E = 1.4426950408889634
_INVARIANT_SPLIT = 256
_MIN_TILES, _MAX_SPLITS = 4, 64
_PROGRAMS_PER_SM = 2  # for as many, splits are made
_COMBINED_PAIRS, _COMBINED_AT_ONCE = 4, 4
_INTERPRETED_SMS = 132  # an H100's or H200's, so that the interpreter runs what they run


@dataclass(frozen=True)
class _Launch:
    """block_m: rows of a matrix product, of which `pairs` hold (token, head) pairs; tile: positions per step;
    turn_tile: positions per step where tokens of a tree take turns."""

    block_m: int
    pairs: int
    tile: int
    turn_tile: int
    num_warps: int
    num_stages: int


@lru_cache(maxsize=256)
def _launch_config(
    max_pairs: int, padded_dim: int, item_size: int, has_paths: bool, invariant: bool
) -> _Launch:
    """The launch for rows of up to `max_pairs` pairs. What can be tuned is here and in the constants above;
    none of it has been measured yet.

    num_stages: block table, then keys and values, then the product are three stages, so 3 has one tile on its
    way and 5 has two. If invariant, whatever the arithmetic of a token depends on (not `pairs`, which deals
    tokens to programs) follows from padded_dim and item_size alone.
    """
    pairs = triton.next_power_of_2(max_pairs)
    if item_size == 4:  # exact products in fp32 take no tensor core, but many registers
        block_m, tile, stages = 16, 32, 3
    elif invariant:
        block_m, tile, stages = 32, 64 if padded_dim <= 64 else 32, 5
    elif has_paths or pairs <= 32:
        block_m, tile, stages = 16 if has_paths else max(16, pairs), 64, 5
    else:
        block_m, tile, stages = 64, 64, 3
    if padded_dim > 128:
        tile, stages = min(tile, 32), 3
    # Turns are taken one after the other, those of different programs at once.
    return _Launch(
        block_m,
        16 if has_paths else block_m,
        tile,
        tile if invariant else 16,
        8 if item_size == 4 or padded_dim > 128 else 4,
        stages,
    )


@lru_cache(maxsize=16)
def _num_sms(device: torch.device) -> int:
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else _INTERPRETED_SMS
    )


def _split_len(programs: int, context_len: int, tile: int, num_sms: int) -> int:
    """Positions per split, a multiple of `tile`, such that `programs` times the splits fill the GPU, but with
    no splits too short to be worth their start and their merge."""
    tiles = -(-context_len // tile)
    num_splits = max(1, min(_PROGRAMS_PER_SM * num_sms // programs, tiles // _MIN_TILES, _MAX_SPLITS))
    return -(-tiles // num_splits) * tile


@dataclass(frozen=True)
class _Pages:
    """A view with contiguous tensors. paths and path_starts are not read unless has_paths; scale: of scores,
    for powers of two."""

    positions: Tensor
    tables: Tensor
    cu_q_lens: Tensor
    paths: Tensor
    path_starts: Tensor
    has_paths: bool
    num_rows: int
    max_q_len: int
    context_len: int
    scale: float


class TritonAttention:
    """invariant: fixed block, tile and split sizes, so that a token's output has the same bits whatever else
    is in the pass, and in a tree those that its path has as a chain. split_len: positions per split in place
    of the backend's own choice, for tests.

    Runs on CUDA tensors in float32, bfloat16 and float16; on CPU tensors if TRITON_INTERPRET=1 was set before
    this module was imported.
    """

    name = "triton"

    def __init__(self, invariant: bool = False, split_len: int | None = None) -> None:
        self.row_invariant = invariant
        self._split_len = _INVARIANT_SPLIT if invariant and split_len is None else split_len

    def prepare(self, view: BatchView, kv: PagedKV) -> _Pages:
        positions, tables = view.positions.contiguous(), view.block_tables
        if tables.stride(1) != 1:
            tables = tables.contiguous()
        paths, path_starts, has_paths = tables, positions, False
        if view.paths is not None and view.path_starts is not None and view.paths.shape[1]:
            paths, path_starts, has_paths = view.paths.contiguous(), view.path_starts.contiguous(), True
        scale = kv.data.shape[-1] ** -0.5 * _LOG2_E
        sizes = (view.num_rows, view.max_q_len, view.max_context_len)
        cu_q_lens = view.cu_q_lens.contiguous()
        return _Pages(positions, tables, cu_q_lens, paths, path_starts, has_paths, *sizes, scale)

    def attend(self, q: Tensor, kv: PagedKV, layer: int, prepared: _Pages) -> Tensor:
        num_tokens, num_heads, head_dim = q.shape
        keys, values = kv.keys(layer), kv.values(layer)
        num_kv_heads = keys.shape[1]
        out = torch.empty((num_tokens, num_heads * head_dim), dtype=q.dtype, device=q.device)
        if num_tokens == 0 or prepared.max_q_len == 0:
            return out
        if q.stride(2) != 1:
            q = q.contiguous()
        group = num_heads // num_kv_heads
        padded_dim = max(16, triton.next_power_of_2(head_dim))
        launch = _launch_config(
            prepared.max_q_len * group, padded_dim, q.itemsize, prepared.has_paths, self.row_invariant
        )
        m_blocks = -(-prepared.max_q_len * group // launch.pairs)
        programs, num_sms = prepared.num_rows * m_blocks * num_kv_heads, _num_sms(q.device)
        split_len = self._split_len or _split_len(programs, prepared.context_len, launch.tile, num_sms)
        num_splits = -(-prepared.context_len // split_len)
        if self.row_invariant and programs >= _PROGRAMS_PER_SM * num_sms:
            num_splits = 1  # each program goes through all splits by itself, with the same sums
        num_pairs = num_tokens * num_heads
        num_parts = num_splits if num_splits > 1 else 0
        stats = torch.empty((2, num_parts, num_pairs), dtype=torch.float32, device=q.device)
        sums = torch.empty((num_parts, num_pairs, head_dim), dtype=torch.float32, device=q.device)
        sizes: dict[str, Any] = {"HEAD_DIM": head_dim, "PADDED_DIM": padded_dim}
        with torch.cuda.device_of(q):
            attend_pages[prepared.num_rows * m_blocks, num_kv_heads, num_splits](
                q,
                keys,
                values,
                prepared.tables,
                prepared.positions,
                prepared.cu_q_lens,
                prepared.paths,
                prepared.path_starts,
                out,
                stats,
                sums,
                q.stride(0),
                q.stride(1),
                keys.stride(0),
                keys.stride(1),
                prepared.tables.stride(0),
                prepared.paths.stride(0),
                prepared.paths.shape[1],
                m_blocks,
                split_len,
                num_splits,
                num_pairs,
                prepared.scale,
                GROUP=group,
                BLOCK_SIZE=kv.block_size,
                BLOCK_M=launch.block_m,
                PAIRS=launch.pairs,
                TILE=launch.tile,
                TURN_TILE=launch.turn_tile,
                HAS_PATHS=prepared.has_paths,
                FOLD=self.row_invariant,
                WIDEN=not q.is_cuda,
                num_warps=launch.num_warps,
                num_stages=launch.num_stages,
                **sizes,
            )
            if num_splits > 1:
                combine_splits[(-(-num_pairs // _COMBINED_PAIRS),)](
                    stats,
                    sums,
                    prepared.positions,
                    out,
                    split_len,
                    num_splits,
                    num_pairs,
                    NUM_HEADS=num_heads,
                    ROWS=_COMBINED_PAIRS,
                    AT_ONCE=_COMBINED_AT_ONCE,
                    num_warps=4,
                    **sizes,
                )
        return out
