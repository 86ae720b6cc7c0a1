"""Matrix products on a CPU that multiplies bfloat16 by itself: of tokens rounded to it with weights in it.

Inputs are multiplied two by two, and added to a sum in float32, pair after pair from the first: a token's
bits depend on nothing but itself. How exactly a pair is added is the CPU's: an Intel Xeon's tiles do it
otherwise than the vectors of either maker, so that all products of a model are done in one of these two ways.

A panel holds COLUMNS outputs: their biases, float32; then, two inputs after two inputs, the weights [in / 2,
COLUMNS, 2], and zeros where inputs are missing from a group of GROUP. A token has its numbers in the same
order, and a line more, so that not all of a tile's tokens lie in the same places of a cache.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import carray
from torch import Tensor

from .numba_gemm import copy_tile
from .numba_vectors import (
    INT,
    INT32,
    NONE,
    ROWS,
    VECTOR,
    WIDTH,
    compiles_for,
    copy_numbers,
    for_count,
    load,
    prefetch,
    rows_of,
    spread,
    store,
)
from .threads import pointer

COLUMNS = 2 * WIDTH
GROUP = 32  # inputs that a tile has of a token
_LINE = 64  # bytes
# Bytes of a panel ahead of its groups, and of one of them.
HEAD, GROUP_BYTES = 4 * COLUMNS, 2 * GROUP * COLUMNS
# What multiplies: tiles of 16 tokens and GROUP inputs with GROUP inputs and 16 outputs; vectors of pairs; or
# nothing that numba compiles for, and then there are no such products.
if WIDTH == 16 and compiles_for("amx-bf16"):
    UNIT = "tiles"
elif WIDTH == 16 and compiles_for("avx512bf16"):
    UNIT = "pairs"
else:
    UNIT = "none"
TILE = 16  # tokens of a tile, and outputs
_VECTOR_TOKENS = 12  # whose sums, with what is added to them, fill the CPU's vectors
_BYTE, _WHOLE = ir.IntType(8), ir.VectorType(INT32, WIDTH)
# Of the CPU's eight tiles: sums of two times TILE tokens for either half of the outputs; tokens; weights.
_SUMS, _TOKENS, _WEIGHTS = ((0, 1), (2, 3)), (4, 5), (6, 7)
_kernel = njit(error_model="numpy", nogil=True, cache=True)


@cache
def can_multiply() -> bool:
    """Whether there are such products here: Linux asks who uses tiles to say so first."""
    return UNIT == "pairs" or (UNIT == "tiles" and _ask_for_tiles())


def _ask_for_tiles() -> bool:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)


def make_panels(weight: Tensor, bias: Tensor) -> Tensor:
    """A weight [out, in], rounded to bfloat16, and its bias [out], float32, as panels [out / COLUMNS rounded
    up, bytes] uint8."""
    num_outputs, num_inputs = weight.shape
    missing = -num_outputs % COLUMNS
    padded = F.pad(weight.bfloat16(), (0, -num_inputs % GROUP, 0, missing))
    pairs = padded.view(-1, COLUMNS, padded.shape[1] // 2, 2).transpose(1, 2).contiguous()
    head = F.pad(bias, (0, missing)).view(torch.uint8).view(len(pairs), -1)
    return torch.cat([head, pairs.view(len(pairs), -1).view(torch.uint8)], 1)


@_kernel
def bytes_of_token(groups: int) -> int:
    return groups * 2 * GROUP + _LINE


@_kernel
def split(x: int, num_inputs: int, to: int, groups: int) -> None:
    """A token [in] at the address x: at the address `to` in bfloat16, and zeros up to a whole group."""
    copy_numbers(x, num_inputs, to, 2)
    missing = groups * GROUP - num_inputs
    rest = carray(pointer(to + 2 * num_inputs), missing, np.int16)
    for i in range(missing):
        rest[i] = 0


def _call(builder: Any, name: str, *args: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), args)


def _load_tile(builder: Any, tile: int, first: Any, stride: Any) -> None:
    place = builder.inttoptr(first, _BYTE.as_pointer())
    _call(builder, "tileloadd64", _BYTE(tile), place, stride)


def _begin_tiles_intrinsic(_context: Any, num_tokens: Any) -> Any:
    """Tells this thread's tiles their sizes: of tokens, and of sums, 1 to TILE of them."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        if UNIT != "tiles":
            return NONE
        sizes = cgutils.alloca_once(builder, ir.ArrayType(_BYTE, _LINE))
        builder.store(ir.Constant(sizes.type.pointee, None), sizes)
        begin, num_tokens = builder.ptrtoint(sizes, INT), builder.trunc(args[0], _BYTE)
        palette, bytes_of_row, rows = (builder.add(begin, INT(at)) for at in (0, 16, 48))
        store(builder, _BYTE(1), palette, INT(0))
        for tile in range(8):
            store(builder, ir.IntType(16)(_LINE), bytes_of_row, INT(2 * tile))
            store(builder, _BYTE(GROUP // 2) if tile in _WEIGHTS else num_tokens, rows, INT(tile))
        _call(builder, "ldtilecfg", builder.bitcast(sizes, _BYTE.as_pointer()))
        return NONE

    return types.none(types.intp), generate


def _end_tiles_intrinsic(_context: Any) -> Any:
    """From here on tiles are nothing that the system has to keep when another thread takes its turn."""

    def generate(_: Any, builder: Any, __: Any, ___: Any) -> Any:
        if UNIT == "tiles":
            _call(builder, "tilerelease")
        return NONE

    return types.none(), generate


def _multiply_tiles_intrinsic(
    _context: Any, count: Any, terms: Any, stride: Any, num_groups: Any, panel: Any, out: Any, to: Any, ahead: Any
) -> Any:
    """out[t, :COLUMNS] = bias + terms[t] . panel for the tokens t of `count` tiles, one or two of them, whose
    terms and outputs begin at two addresses each, with `stride` and `to` bytes from a token to the next;
    ahead: memory that is asked for, its address and how many lines of it a group."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        if UNIT == "tiles":
            count, *inputs = args
            for_count(builder, count, 2, lambda count: _tiles(builder, count, *inputs))
        return NONE

    signature = types.intp, ROWS, *(types.intp,) * 3, ROWS, types.intp, ROWS
    return types.none(*signature), generate


def _tiles(
    builder: Any, count: int, terms: Any, stride: Any, num_groups: Any, panel: Any, out: Any, to: Any, ahead: Any
) -> None:
    halves = [INT(4 * TILE * i) for i in range(2)]
    asked, num_lines = (builder.extract_value(ahead, i) for i in range(2))
    for sums in _SUMS[:count]:
        for tile, half in zip(sums, halves, strict=True):
            _load_tile(builder, tile, builder.add(panel, half), INT(0))  # all rows are the biases
    groups = builder.add(panel, INT(HEAD))
    with cgutils.for_range(builder, num_groups) as loop:
        group = builder.add(groups, builder.mul(loop.index, INT(GROUP_BYTES)))
        wanted = builder.add(asked, builder.mul(builder.mul(loop.index, num_lines), INT(_LINE)))
        with cgutils.for_range(builder, num_lines) as line:
            prefetch(builder, wanted, builder.mul(line.index, INT(_LINE)))
        for weights, half in zip(_WEIGHTS, halves, strict=True):
            _load_tile(builder, weights, builder.add(group, half), INT(4 * COLUMNS))
        of_group = builder.mul(loop.index, INT(2 * GROUP))
        for i, (tokens, sums) in enumerate(zip(_TOKENS[:count], _SUMS, strict=False)):
            _load_tile(builder, tokens, builder.add(builder.extract_value(terms, i), of_group), stride)
            for tile, weights in zip(sums, _WEIGHTS, strict=True):
                _call(builder, "tdpbf16ps", *map(_BYTE, (tile, tokens, weights)))
    for i, sums in enumerate(_SUMS[:count]):
        for tile, half in zip(sums, halves, strict=True):
            place = builder.inttoptr(builder.add(builder.extract_value(out, i), half), _BYTE.as_pointer())
            _call(builder, "tilestored64", _BYTE(tile), place, to)


def _multiply_pairs_intrinsic(
    _context: Any, num_tokens: Any, terms: Any, num_groups: Any, panel: Any, out: Any, ahead: Any
) -> Any:
    """out[t, :COLUMNS] = bias + terms[t] . panel for 1 to _VECTOR_TOKENS tokens t. terms and out: ROWS;
    panel: an address; ahead: as for tiles."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        if UNIT == "pairs":
            num_tokens, *inputs = args
            for_count(builder, num_tokens, _VECTOR_TOKENS, lambda count: _pairs(builder, count, *inputs))
        return NONE

    return types.none(types.intp, ROWS, types.intp, types.intp, ROWS, ROWS), generate


def _pairs(builder: Any, count: int, terms: Any, num_groups: Any, panel: Any, out: Any, ahead: Any) -> None:
    columns = [INT(4 * WIDTH * i) for i in range(COLUMNS // WIDTH)]
    asked, num_lines = (builder.extract_value(ahead, i) for i in range(2))
    begin = [load(builder, panel, column) for column in columns]
    rows = rows_of(builder, terms, count)
    totals = [[cgutils.alloca_once_value(builder, value) for value in begin] for _ in rows]
    kind = ir.FunctionType(VECTOR, [VECTOR, _WHOLE, _WHOLE])
    groups = builder.add(panel, INT(HEAD))
    with cgutils.for_range(builder, num_groups) as loop:
        group = builder.add(groups, builder.mul(loop.index, INT(GROUP_BYTES)))
        wanted = builder.add(asked, builder.mul(builder.mul(loop.index, num_lines), INT(_LINE)))
        with cgutils.for_range(builder, num_lines) as line:
            prefetch(builder, wanted, builder.mul(line.index, INT(_LINE)))
        of_group = builder.mul(loop.index, INT(2 * GROUP))
        with cgutils.for_range(builder, INT(GROUP // 2)) as two:
            weights = builder.add(group, builder.mul(two.index, INT(4 * COLUMNS)))
            of_two = builder.add(of_group, builder.mul(two.index, INT(4)))
            parts = [load(builder, weights, column, _WHOLE) for column in columns]
            for row, its_totals in zip(rows, totals, strict=True):
                alike = spread(builder, load(builder, row, of_two, INT32))
                for part, total in zip(parts, its_totals, strict=True):
                    # llvmlite has no bfloat16, which LLVM's own name for this takes.
                    after = builder.asm(
                        kind,
                        "vdpbf16ps $3, $2, $0",
                        "=v,0,v,v",
                        [builder.load(total), part, alike],
                        side_effect=False,
                    )
                    builder.store(after, total)
    for row, its_totals in zip(rows_of(builder, out, count), totals, strict=True):
        for column, total in zip(columns, its_totals, strict=True):
            store(builder, builder.load(total), row, column)


_begin_tiles: Any = intrinsic(_begin_tiles_intrinsic)
_end_tiles: Any = intrinsic(_end_tiles_intrinsic)
_multiply_tiles: Any = intrinsic(_multiply_tiles_intrinsic)
_multiply_pairs: Any = intrinsic(_multiply_pairs_intrinsic)


@_kernel
def _ahead_of(turn: int, num_turns: int, panel: int, groups: int, ahead: int) -> Any:
    """Memory that is asked for in a turn with a panel: of several turns each asks for a part of the next
    panel; one alone for what comes `ahead` bytes later."""
    if num_turns == 1:
        return panel + HEAD + ahead, GROUP_BYTES // _LINE
    size = HEAD + groups * GROUP_BYTES
    part = size // num_turns
    return panel + size + turn * part, part // groups // _LINE + 1


@_kernel
def _multiply_by_tiles(
    ahead: int, terms: int, num_tokens: int, groups: int, panel: int, out: int, bytes_per_out: int, columns: int
) -> None:
    """A panel of at least one token. All tiles have as many tokens: the last begins with some of the one
    before it, which come out as they did."""
    most, stride = min(TILE, num_tokens), bytes_of_token(groups)
    num_tiles = (num_tokens + most - 1) // most
    num_turns = (num_tiles + 1) // 2
    spare = np.empty((2 * TILE, COLUMNS), np.float32)
    for turn in range(num_turns):
        count = min(2, num_tiles - 2 * turn)
        first = min(2 * turn * most, num_tokens - most)
        second = min((2 * turn + 1) * most, num_tokens - most)
        asked = _ahead_of(turn, num_turns, panel, groups, ahead)
        places = terms + first * stride, terms + second * stride
        to = out + first * bytes_per_out, out + second * bytes_per_out
        if columns == COLUMNS:
            _multiply_tiles(count, places, stride, groups, panel, to, bytes_per_out, asked)
        else:  # what is past the last output must not be written over the next token's first ones
            whole = spare.ctypes.data, spare[TILE:].ctypes.data
            _multiply_tiles(count, places, stride, groups, panel, whole, 4 * COLUMNS, asked)
            copy_tile(spare, most, columns, to[0], bytes_per_out)
            if count == 2:
                copy_tile(spare[TILE:], most, columns, to[1], bytes_per_out)


@_kernel
def _multiply_by_pairs(
    ahead: int, terms: int, num_tokens: int, groups: int, panel: int, out: int, bytes_per_out: int, columns: int
) -> None:
    stride = bytes_of_token(groups)
    num_turns = (num_tokens + _VECTOR_TOKENS - 1) // _VECTOR_TOKENS
    spare = np.empty((_VECTOR_TOKENS, COLUMNS), np.float32)
    for turn in range(num_turns):
        first, last = turn * num_tokens // num_turns, (turn + 1) * num_tokens // num_turns
        asked = _ahead_of(turn, num_turns, panel, groups, ahead)
        rows, to = (terms + first * stride, stride), out + first * bytes_per_out
        if columns == COLUMNS:
            _multiply_pairs(last - first, rows, groups, panel, (to, bytes_per_out), asked)
        else:
            _multiply_pairs(last - first, rows, groups, panel, (spare.ctypes.data, 4 * COLUMNS), asked)
            copy_tile(spare, last - first, columns, to, bytes_per_out)


@_kernel
def multiply(
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
    """As numba_narrow.multiply."""
    if num_tokens == 0:
        return
    groups, bytes_per_out = (num_inputs + GROUP - 1) // GROUP, 4 * num_outputs
    num_panels = (num_outputs + COLUMNS - 1) // COLUMNS
    if UNIT == "tiles":
        _begin_tiles(min(TILE, num_tokens))
    for number in range(share * num_panels // num_shares, (share + 1) * num_panels // num_shares):
        panel = panels + number * (HEAD + groups * GROUP_BYTES)
        columns, to = min(COLUMNS, num_outputs - number * COLUMNS), out + number * 4 * COLUMNS
        if UNIT == "tiles":
            _multiply_by_tiles(ahead, terms, num_tokens, groups, panel, to, bytes_per_out, columns)
        else:
            _multiply_by_pairs(ahead, terms, num_tokens, groups, panel, to, bytes_per_out, columns)
    if UNIT == "tiles":
        _end_tiles()
