"""Keys and values in int8 (`cache.int8_kv`), as kernels write them: bit for bit what `encode` and `put` make
of the same numbers. All are addresses."""

from __future__ import annotations

import numpy as np
from numba.np.numpy_support import carray

from cache import int8_kv
from cache.int8_kv import FOUR, GROUP, MULTIPLE

from ..kernel_cache import inlined, njit
from .numba_rounding import mix_numbers, narrow
from .threads import pointer

LINE = 64  # bytes of four numbers of a group's slots, or of MULTIPLE numbers of four
bytes_of_head, num_mixed = inlined(int8_kv.bytes_per_group), inlined(int8_kv.num_mixed)


@njit
def _place_of_value(d: int, lane: int) -> int:
    """Where number d of a slot's value lies in its group, in bytes."""
    return (d // MULTIPLE * (GROUP // FOUR) + lane // FOUR) * LINE + FOUR * (d % MULTIPLE) + lane % FOUR


@njit
def store_head(x: int, head_dim: int, spare: int, group: int, lane: int, is_key: bool) -> None:
    """Writes a head's float32 at the address x, which are mixed there if they are keys, to a slot of its
    group; spare: room for as many bytes."""
    if is_key:
        mix_numbers(x, head_dim)
        scale = narrow(x, head_dim, spare)
        fours = carray(pointer(spare), head_dim // FOUR, np.int32)
        places = carray(pointer(group), GROUP * head_dim // FOUR, np.int32)
        for four in range(head_dim // FOUR):
            places[GROUP * four + lane] = fours[four]
    else:
        scale = narrow(x, head_dim, spare)
        numbers = carray(pointer(spare), head_dim, np.int8)
        out = carray(pointer(group), GROUP * head_dim, np.int8)
        for d in range(head_dim):
            out[_place_of_value(d, lane)] = numbers[d]
    carray(pointer(group + GROUP * head_dim), GROUP, np.float32)[lane] = scale


@njit
def copy_key(source: int, lane: int, target: int, to_lane: int, head_dim: int) -> None:
    """What a head's group says of a slot, to a slot of another."""
    given = carray(pointer(source), GROUP * head_dim // FOUR, np.int32)
    taken = carray(pointer(target), GROUP * head_dim // FOUR, np.int32)
    for four in range(head_dim // FOUR):
        taken[GROUP * four + to_lane] = given[GROUP * four + lane]
    _copy_scale(source, lane, target, to_lane, head_dim)


@njit
def copy_value(source: int, lane: int, target: int, to_lane: int, head_dim: int) -> None:
    """As copy_key."""
    given = carray(pointer(source), GROUP * head_dim, np.int8)
    taken = carray(pointer(target), GROUP * head_dim, np.int8)
    for d in range(head_dim):
        taken[_place_of_value(d, to_lane)] = given[_place_of_value(d, lane)]
    _copy_scale(source, lane, target, to_lane, head_dim)


@njit
def _copy_scale(source: int, lane: int, target: int, to_lane: int, head_dim: int) -> None:
    scales = carray(pointer(source + GROUP * head_dim), GROUP, np.float32)
    carray(pointer(target + GROUP * head_dim), GROUP, np.float32)[to_lane] = scales[lane]
