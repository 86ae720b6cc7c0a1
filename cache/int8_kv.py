"""Keys and values in int8: of each head its numbers, whole ones of -127 to 127, and their scale.

Keys are mixed before they are rounded, by a Hadamard matrix H of 1 and -1, some numbers of a head at a time:
q . k is (H q) . (H k) / their number. A few numbers of a model's keys are much larger than the rest, at the
same places of each, and would widen the steps of all. Values have no such, and stay as they are.

GROUP slots lie together, head by head, as products read them: of keys four numbers of each slot after four
[head_dim / 4, GROUP, 4], of values as many of four slots after four [head_dim / 16, GROUP / 4, 16, 4]; then
the scales [GROUP], float32. A row is what a group says of one slot and head: its numbers, then its scale.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .whole_numbers import SMALLEST, mixed

GROUP = 16  # slots, of which a block has whole groups
SCALE_BYTES = 4
MULTIPLE = 16  # of which a head has whole ones: so many numbers are mixed, or as many as MOST_MIXED
MOST_MIXED = 64
FOUR = 4


def check_block(block_size: int) -> None:
    """Raises ValueError for blocks that have no whole groups."""
    if block_size % GROUP:
        raise ValueError(f"KV in int8 needs blocks of a multiple of {GROUP} positions, not {block_size}")


def check_head(head_dim: int) -> None:
    """Raises ValueError for heads whose numbers cannot be mixed."""
    if head_dim % MULTIPLE:
        raise ValueError(
            f"kv_cache_dtype 'int8' needs heads of a multiple of {MULTIPLE} numbers, and the model's have"
            f" {head_dim}; use 'bfloat16' or 'auto'"
        )


def bytes_per_group(head_dim: int) -> int:
    """Of one head."""
    return GROUP * (head_dim + SCALE_BYTES)


def num_mixed(head_dim: int) -> int:
    """Numbers of a head that are mixed together."""
    return MULTIPLE if head_dim % MOST_MIXED else MOST_MIXED


def encode(numbers: Tensor, is_key: bool) -> Tensor:
    """Rows [..., head_dim + SCALE_BYTES] int8 of numbers [..., head_dim]; what is not finite makes the scale
    NaN."""
    numbers = numbers.float()
    if is_key:
        numbers = _by_blocks(numbers)
    peak = numbers.abs().amax(-1, keepdim=True)
    is_some = (peak > SMALLEST) & peak.isfinite()
    # Of a number by a tensor torch makes 127 times an inverse that is rounded already.
    inverse = torch.where(is_some, torch.full_like(peak, 127.0) / peak, 0)
    whole = torch.where(is_some, numbers, 0).mul(inverse).round().to(torch.int8)
    scale = torch.where(is_some, peak * torch.tensor(1 / 127, dtype=torch.float32), 0)
    scale = torch.where(peak.isfinite(), scale, float("nan"))
    return torch.cat((whole, scale.view(torch.int8)), -1)


def decode(rows: Tensor, is_key: bool) -> Tensor:
    """The numbers [..., head_dim], float32, that rows stand for."""
    head_dim = rows.shape[-1] - SCALE_BYTES
    numbers = rows[..., :head_dim].float() * rows[..., head_dim:].contiguous().view(torch.float32)
    return _by_blocks(numbers) / num_mixed(head_dim) if is_key else numbers


def take(groups: Tensor, slots: Tensor, is_key: bool) -> Tensor:
    """Rows [..., kv_heads, head_dim + SCALE_BYTES] at slots [...] of groups [groups, kv_heads, bytes]."""
    numbers, scales = _parts(groups, is_key)
    return torch.cat((numbers[_places(slots, is_key)].flatten(-2), scales[_of_scales(slots)]), -1)


def put(groups: Tensor, slots: Tensor, is_key: bool, rows: Tensor) -> None:
    """Writes rows [n, kv_heads, head_dim + SCALE_BYTES] at slots [n]; -1 is the last slot of all groups."""
    numbers, scales = _parts(groups, is_key)
    size = FOUR if is_key else MULTIPLE
    own = rows[..., :-SCALE_BYTES].unflatten(-1, (numbers.shape[2], size))
    numbers[_places(slots, is_key)] = own
    scales[_of_scales(slots)] = rows[..., -SCALE_BYTES:]


def move(groups: Tensor, sources: Tensor, targets: Tensor, is_key: bool) -> None:
    """Copies what groups [layers, groups, kv_heads, bytes] say of slots sources [n] to slots targets [n],
    all of it read before any is written."""
    numbers, scales = _parts(groups, is_key)
    to, at = ((slice(None), *_places(slots, is_key)) for slots in (targets, sources))
    numbers[to] = numbers[at]
    to, at = ((slice(None), *_of_scales(slots)) for slots in (targets, sources))
    scales[to] = scales[at]


def _parts(groups: Tensor, is_key: bool) -> tuple[Tensor, Tensor]:
    """Views of the numbers, and of the bytes of the scales."""
    at = groups.shape[-1] - GROUP * SCALE_BYTES
    sizes = (-1, GROUP, FOUR) if is_key else (-1, GROUP // FOUR, MULTIPLE, FOUR)
    return groups[..., :at].unflatten(-1, sizes), groups[..., at:].unflatten(-1, (GROUP, SCALE_BYTES))


def _places(slots: Tensor, is_key: bool) -> Any:
    """Of slots' numbers; where such indices have slices between them, their own sizes come first."""
    group, lane, every = slots // GROUP, slots % GROUP, slice(None)
    if is_key:
        return group, every, every, lane
    return group, every, every, lane // FOUR, every, lane % FOUR


def _of_scales(slots: Tensor) -> Any:
    return slots // GROUP, slice(None), slots % GROUP


def _by_blocks(numbers: Tensor) -> Tensor:
    head_dim = numbers.shape[-1]
    size = num_mixed(head_dim)
    return mixed(numbers.unflatten(-1, (head_dim // size, size))).flatten(-2)
