"""Keys and values in int8 (`cache.int8_kv`), as kernels write them: bit for bit what `encode` and `put` make
of the same numbers. All are addresses."""

from __future__ import annotations

import numpy as np
from numba.np.numpy_support import carray

from cache.int8_kv import GROUP, SCALE_BYTES

from ..kernel_cache import njit
from .numba_rounding import mix_numbers, narrow
from .threads import pointer

FOUR, DIMS = 4, 16  # numbers of a slot, and of four slots, that lie together
LINE = 64  # bytes of either for all slots of a group, or for four
_kernel = njit(error_model="numpy", nogil=True, cache=True)


@_kernel
def bytes_of_head(head_dim: int) -> int:
    """Of a group."""
    return GROUP * (head_dim + SCALE_BYTES)


@_kernel
def place_of(d: int, lane: int, is_key: bool) -> int:
    """Where number d of a slot lies in its group, in bytes."""
    if is_key:
        return d // FOUR * LINE + FOUR * lane + d % FOUR
    return (d // DIMS * (GROUP // FOUR) + lane // FOUR) * LINE + FOUR * (d % DIMS) + lane % FOUR


@_kernel
def store_head(x: int, head_dim: int, spare: int, group: int, lane: int, is_key: bool) -> None:
    """Writes a head's float32 at the address x, which are mixed there if they are keys, to a slot of its
    group; spare: room for as many bytes."""
    if is_key:
        mix_numbers(x, head_dim)
    scale = narrow(x, head_dim, spare)
    numbers = carray(pointer(spare), head_dim, np.int8)
    out = carray(pointer(group), GROUP * head_dim, np.int8)
    for d in range(head_dim):
        out[place_of(d, lane, is_key)] = numbers[d]
    carray(pointer(group + GROUP * head_dim), GROUP, np.float32)[lane] = scale


@_kernel
def copy_slot(
    source: int, lane: int, target: int, to_lane: int, num_heads: int, head_dim: int, is_key: bool
) -> None:
    """What a group says of a slot, of all heads, to a slot of another."""
    for head in range(num_heads):
        start = head * bytes_of_head(head_dim)
        given = carray(pointer(source + start), GROUP * head_dim, np.int8)
        taken = carray(pointer(target + start), GROUP * head_dim, np.int8)
        for d in range(head_dim):
            taken[place_of(d, to_lane, is_key)] = given[place_of(d, lane, is_key)]
        scales = carray(pointer(source + start + GROUP * head_dim), GROUP, np.float32)
        carray(pointer(target + start + GROUP * head_dim), GROUP, np.float32)[to_lane] = scales[lane]
