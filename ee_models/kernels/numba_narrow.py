"""Matrix products on a CPU in narrow numbers: x [tokens, in] times a weight in panels, in int8, int4 or
bfloat16, which `bits` stands for: 8, 4 or 16."""

from __future__ import annotations

import time
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernel_cache import Kernel, njit
from . import (
    numba_bfloat16,
    numba_bfloat16_tiles,
    numba_int4,
    numba_int8,
    numba_int8_tiles,
    numba_pairs,
    numba_tiles,
)
from .numba_gemm import copy_tile
from .numba_int8 import BLOCK, COLUMNS
from .numba_tiles import TILE
from .numba_vectors import LINE

# Bytes ahead of which weights may be asked for. CPUs differ too much for one number. An AMD EPYC of Zen 4
# sees by itself that one tile of tokens reads on and on, and those who ask 1024 bytes ahead or more are in
# its way: four tokens took up to 1.4 times as long as one. On one of Zen 5 a pass over two tokens takes 1.1
# times as long with 16384 as with 4096. An Intel Xeon looks less far ahead by itself: with 512 bytes a pass
# over one token took 3.7 ms and one over four 5.8, with 16384 2.9 and 3.9.
_AHEAD = (512, 4096, 16384)
_LOOKS = 5  # at each of them
_LOOKED_AT = 1 << 26  # bytes of weights: more than most caches hold
# Tokens from which matrix tiles take less time in int8 than vectors do: of fewer, both wait for memory.
_TILES_FROM = 9
_PACKED_AT_ONCE = 64  # panels: what is made of them on the way is small beside a model
_MAKE_PANELS = {4: numba_int4.make_panels, 8: numba_int8.make_panels, 16: numba_bfloat16.make_panels}
HAS_TILES, _HAS_INT8_TILES = numba_tiles.HAS_TILES, numba_int8_tiles.HAS_TILES


def multiplies_bfloat16() -> bool:
    """Whether there are products in bfloat16 here: by matrix tiles or by vectors of pairs."""
    return numba_tiles.can_multiply() if HAS_TILES else numba_pairs.HAS_PAIRS


def tiles_from() -> int:
    """The number of tokens from which products in int8 here are by matrix tiles; 0 = never. What is computed
    does not depend on it."""
    return _TILES_FROM if _HAS_INT8_TILES and numba_tiles.can_multiply() else 0


@njit
def count_bytes(bits: int, num_inputs: int) -> Any:
    """Groups of inputs; bytes of a panel ahead of them, of one of them, and of a token's numbers."""
    if bits == 16:
        groups = (num_inputs + numba_bfloat16.GROUP - 1) // numba_bfloat16.GROUP
        bytes_per_token = numba_bfloat16.bytes_of_token(groups)
        return groups, numba_bfloat16.HEAD, numba_bfloat16.GROUP_BYTES, bytes_per_token
    if bits == 4:
        groups = (num_inputs + numba_int4.GROUP - 1) // numba_int4.GROUP
        bytes_per_token = groups * numba_int4.TOKEN_GROUP_BYTES + numba_int4.SCALE_BYTES
        return groups, numba_int4.HEAD, numba_int4.GROUP_BYTES, bytes_per_token
    group = numba_int8.group_size(num_inputs)
    groups = (num_inputs + group - 1) // group
    bytes_per_token = groups * (group * numba_int8.NUMBER_BYTES + 8)
    bytes_per_token += -bytes_per_token % LINE  # so that tiles read whole lines
    return groups, numba_int8.HEAD, (2 + group) * COLUMNS, bytes_per_token


def bytes_per_token(bits: int, num_inputs: int) -> int:
    """Of a token's numbers; a multiple of four."""
    return int(count_bytes.py_func(bits, num_inputs)[3])


def pack(bits: int, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A weight [out, in] and its bias [out], float32, as panels [out / COLUMNS rounded up, bytes] uint8.
    Raises ValueError for weights that `bits` have no place for."""
    limit = numba_int4.LARGEST if bits == 4 else torch.finfo(torch.float32).max
    num_outputs, num_inputs = weight.shape
    groups, head, group_bytes, _ = count_bytes.py_func(bits, num_inputs)
    bias = weight.new_zeros(num_outputs) if bias is None else bias
    panels = weight.new_zeros(-(-num_outputs // COLUMNS), head + groups * group_bytes, dtype=torch.uint8)
    for first in range(0, len(panels), _PACKED_AT_ONCE):
        columns = slice(first * COLUMNS, (first + _PACKED_AT_ONCE) * COLUMNS)
        if bits != 16 and not bool((weight[columns].abs() <= limit).all()):
            what = "finite number" if bits == 8 else f"number of at most {limit:g} in size"
            raise ValueError(
                f"a weight is not a {what}, and int{bits} has no place for others; set quantization to null"
            )
        panels[first : first + _PACKED_AT_ONCE] = _MAKE_PANELS[bits](weight[columns], bias[columns])
    return panels


@Kernel
def split_tokens(bits: int, x: int, num_inputs: int, terms: int, first: int, last: int) -> None:
    """Of tokens first to last - 1 of x [tokens, in]: terms [tokens, bytes], the numbers that a weight of
    `bits` is multiplied by, whole ones with their scales; all by address."""
    groups, _, _, bytes_per_token = count_bytes(bits, num_inputs)
    for token in range(first, last):
        own, to = x + 4 * token * num_inputs, terms + token * bytes_per_token
        if bits == 16:
            numba_bfloat16.split(own, num_inputs, to, groups)
        elif bits == 4:
            numba_int4.split(own, num_inputs, to, groups)
        else:
            numba_int8.split(own, num_inputs, to, groups)


@njit
def _multiply_by_tiles(
    bits: int,
    ahead: int,
    terms: int,
    num_tokens: int,
    num_inputs: int,
    panels: int,
    out: int,
    num_outputs: int,
    share: int,
    num_shares: int,
) -> None:
    """As multiply below. All tiles have as many tokens: the last begins with some of the one before it, which
    come out as they did."""
    if num_tokens == 0:
        return
    groups, head, group_bytes, stride = count_bytes(bits, num_inputs)
    num_panels = (num_outputs + COLUMNS - 1) // COLUMNS
    size, bytes_per_out = head + groups * group_bytes, 4 * num_outputs
    group = numba_int8.group_size(num_inputs)
    num_lots = groups if bits == 16 else groups * group // BLOCK
    most = min(TILE, num_tokens)
    num_tiles = (num_tokens + most - 1) // most
    num_turns = (num_tiles + 1) // 2
    spare = np.empty((2 * TILE, COLUMNS), np.float32)
    space = np.empty(groups * numba_int8_tiles.SPACE if bits == 8 else 0, np.uint8)
    numba_tiles.begin(most)
    for number in range(share * num_panels // num_shares, (share + 1) * num_panels // num_shares):
        panel, columns = panels + number * size, min(COLUMNS, num_outputs - number * COLUMNS)
        for turn in range(num_turns):
            # Several turns ask for a part of the next panel each, one alone for what it reads soon.
            asked = panel + head + ahead, size // num_lots // LINE + 1
            if num_turns > 1:
                part = size // num_turns
                asked = panel + size + turn * part, part // num_lots // LINE + 1
            count = min(2, num_tiles - 2 * turn)
            first = min(2 * turn * most, num_tokens - most)
            second = min((2 * turn + 1) * most, num_tokens - most)
            rows, start = (terms + first * stride, terms + second * stride), out + number * 4 * COLUMNS
            to, step = (start + first * bytes_per_out, start + second * bytes_per_out), bytes_per_out
            # What is past the last output must not be written over the next token's first ones.
            whole: Any = to
            if columns < COLUMNS:
                # As whole numbers with sign, as `to` has them: numba makes floats of both kinds together.
                whole = np.intp(spare.ctypes.data), np.intp(spare[TILE:].ctypes.data)
                step = 4 * COLUMNS
            if bits == 16:
                numba_bfloat16_tiles.multiply_tiles(count, rows, stride, groups, panel, whole, step, asked)
            else:
                numba_int8_tiles.multiply_tiles(
                    *(count, most, rows, stride, groups, group, panel, space.ctypes.data, whole, step, asked)
                )
            if columns < COLUMNS:
                copy_tile(spare, most, columns, to[0], bytes_per_out)
                if count == 2:
                    copy_tile(spare[TILE:], most, columns, to[1], bytes_per_out)
    numba_tiles.end()
    space[:0] = 0  # named once more: numba frees an array that nothing names, wherever its address is


@Kernel
def multiply(
    bits: int,
    ahead: int,
    tiles_from: int,
    terms: int,
    num_tokens: int,
    num_inputs: int,
    panels: int,
    out: int,
    num_outputs: int,
    share: int,
    num_shares: int,
) -> None:
    """out [tokens, out] = bias + x [tokens, in] . weight, of one share of the panels; x as split_tokens
    leaves it; all by address.

    Memory is asked for while what is there is multiplied: by several tiles of tokens, a part each, for the
    next panel; by one, `ahead` bytes before it is read (see `look_ahead`)."""
    if HAS_TILES and (bits == 16 or (bits == 8 and 0 < tiles_from <= num_tokens)):
        _multiply_by_tiles(
            bits, ahead, terms, num_tokens, num_inputs, panels, out, num_outputs, share, num_shares
        )
        return
    groups, head, group_bytes, bytes_per_token = count_bytes(bits, num_inputs)
    num_panels = (num_outputs + COLUMNS - 1) // COLUMNS
    bytes_per_panel, bytes_per_out = head + groups * group_bytes, 4 * num_outputs
    most = numba_int4.TOKENS if bits == 4 else numba_int8.TOKENS if bits == 8 else numba_pairs.TOKENS
    num_tiles, group = (num_tokens + most - 1) // most, numba_int8.group_size(num_inputs)
    spare = np.empty((most, COLUMNS), np.float32)
    for number in range(share * num_panels // num_shares, (share + 1) * num_panels // num_shares):
        panel = panels + number * bytes_per_panel
        columns = min(COLUMNS, num_outputs - number * COLUMNS)
        first = 0
        for tile in range(num_tiles):
            count = (num_tokens - first) // (num_tiles - tile)  # tiles as alike as can be
            rows = terms + first * bytes_per_token, bytes_per_token
            to = out + first * bytes_per_out + number * 4 * COLUMNS, bytes_per_out
            asked = panel + head + ahead, group_bytes
            if num_tiles > 1:
                asked = (
                    panel + bytes_per_panel + tile * bytes_per_panel // num_tiles,
                    group_bytes // num_tiles,
                )
            # What is past the last output must not be written over the next token's first ones.
            whole = to if columns == COLUMNS else (spare.ctypes.data, 4 * COLUMNS)
            if bits == 4:
                numba_int4.multiply_tile(count, rows, groups, panel, whole, asked)
            elif bits == 16:
                numba_pairs.multiply_tile(count, rows, groups, panel, whole, asked)
            else:
                numba_int8.multiply_tile(count, rows, groups, group, panel, whole, asked)
            if columns < COLUMNS:
                copy_tile(spare, count, columns, *to)
            first += count


call_split, call_multiply = split_tokens.caller, multiply.caller


@cache
def look_ahead() -> int:
    """The number of bytes that was fastest on this CPU, for one token to a whole tile of them together:
    measured once a process, in about 0.3 seconds. What is computed does not depend on it."""
    bits, num_inputs, most = 8, 512, numba_int8.TOKENS
    groups, head, group_bytes, _ = count_bytes.py_func(bits, num_inputs)
    size = head + groups * group_bytes
    # Written to, or its pages would all be the same one.
    panels = torch.empty(_LOOKED_AT // size, size, dtype=torch.uint8).fill_(0)
    terms = torch.empty(most, bytes_per_token(bits, num_inputs), dtype=torch.uint8)
    # By address: of this dtype whatever the process's default is.
    x = torch.zeros(most, num_inputs, dtype=torch.float32)
    out = torch.empty(most, len(panels) * COLUMNS, dtype=torch.float32)
    split_tokens(bits, x.data_ptr(), num_inputs, terms.data_ptr(), 0, most)
    fastest = dict.fromkeys(product(_AHEAD, range(1, most + 1)), float("inf"))
    for _ in range(_LOOKS):
        for ahead, num_tokens in fastest:
            start = time.perf_counter()
            multiply(
                *(bits, ahead, 0, terms.data_ptr(), num_tokens, num_inputs, panels.data_ptr()),
                *(out.data_ptr(), out.shape[1], 0, 1),
            )
            fastest[ahead, num_tokens] = min(fastest[ahead, num_tokens], time.perf_counter() - start)
    return min(_AHEAD, key=lambda ahead: sum(fastest[ahead, num] for num in range(1, most + 1)))
