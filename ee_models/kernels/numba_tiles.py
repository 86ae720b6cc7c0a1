"""Matrix products by a CPU's tiles (Intel's AMX), in bfloat16 (`numba_bfloat16`).

Inputs are multiplied two by two and added to a sum in float32, group after group, in an order that is the
CPU's own and the same for each token of a tile: a token's bits depend on nothing but itself. A tile takes 16
tokens in the time of one: as long as memory is what a pass waits for, further tokens are free.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..kernel_cache import njit
from .numba_bfloat16 import COLUMNS, GROUP, GROUP_BYTES, HEAD, LINE, bytes_of_token
from .numba_gemm import copy_tile
from .numba_vectors import INT, NONE, ROWS, WIDTH, compiles_for, for_count, prefetch

TILE = 16  # tokens of a tile, and outputs; of either it has GROUP inputs
# Whether numba compiles what follows; elsewhere nothing of it may run. Without vectors of this width, panels
# have other sizes.
HAS_TILES = WIDTH == TILE and compiles_for("amx-bf16")
# Of the CPU's eight tiles: sums of two times TILE tokens, for either half of the outputs; tokens; weights.
_SUMS, _TOKENS, _WEIGHTS = ((0, 1), (2, 3)), (4, 5), (6, 7)
_BYTE = ir.IntType(8)
_kernel = njit(error_model="numpy", nogil=True, cache=True)


@cache
def can_multiply() -> bool:
    """Whether this process may use tiles, for which it asks: Linux ends one that uses them without."""
    if not HAS_TILES or sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)


def _call(builder: Any, name: str, *args: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), args)


def _fill(builder: Any, tile: int, first: Any, stride: Any) -> None:
    """A tile with the rows at the address `first` and each `stride` bytes later."""
    _call(builder, "tileloadd64", _BYTE(tile), builder.inttoptr(first, _BYTE.as_pointer()), stride)


def _empty(builder: Any, tile: int, first: Any, stride: Any) -> None:
    """A tile into rows as of _fill."""
    _call(builder, "tilestored64", _BYTE(tile), builder.inttoptr(first, _BYTE.as_pointer()), stride)


def _add_products(builder: Any, sums: int, tokens: int, weights: int) -> None:
    _call(builder, "tdpbf16ps", *map(_BYTE, (sums, tokens, weights)))


def _begin_intrinsic(_context: Any, num_tokens: Any) -> Any:
    """Tells this thread's tiles their sizes: rows for each of 1 to TILE tokens, or of pairs of inputs."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        if HAS_TILES:
            sizes = cgutils.alloca_once(builder, ir.ArrayType(_BYTE, LINE))
            builder.store(ir.Constant(sizes.type.pointee, None), sizes)
            num_tokens = builder.trunc(args[0], _BYTE)
            # Byte 0 is the palette, 16 and so on are bytes of a row, in two bytes each, 48 and so on rows.
            known = {0: _BYTE(1)}
            for tile in range(8):
                known[16 + 2 * tile] = _BYTE(LINE)
                known[48 + tile] = _BYTE(GROUP // 2) if tile in _WEIGHTS else num_tokens
            for byte, value in known.items():
                builder.store(value, builder.gep(sizes, [INT(0), INT(byte)]))
            _call(builder, "ldtilecfg", builder.bitcast(sizes, _BYTE.as_pointer()))
        return NONE

    return types.none(types.intp), generate


def _end_intrinsic(_context: Any) -> Any:
    """From here on tiles are nothing that the system has to keep when another thread takes its turn."""

    def generate(_: Any, builder: Any, __: Any, ___: Any) -> Any:
        if HAS_TILES:
            _call(builder, "tilerelease")
        return NONE

    return types.none(), generate


def _multiply_tiles_intrinsic(
    _context: Any,
    count: Any,
    terms: Any,
    stride: Any,
    num_groups: Any,
    panel: Any,
    out: Any,
    to: Any,
    ahead: Any,
) -> Any:
    """out[t, :COLUMNS] = bias + terms[t] . panel for the tokens t of `count` tiles, one or two of them, whose
    terms and outputs begin at two addresses each, with `stride` and `to` bytes from a token to the next;
    ahead: memory that is asked for, its address and how many lines of it a group."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        if HAS_TILES:
            count, *inputs = args
            for_count(builder, count, 2, lambda count: _tiles(builder, count, *inputs))
        return NONE

    return types.none(types.intp, ROWS, *(types.intp,) * 3, ROWS, types.intp, ROWS), generate


def _tiles(
    builder: Any,
    count: int,
    terms: Any,
    stride: Any,
    num_groups: Any,
    panel: Any,
    out: Any,
    to: Any,
    ahead: Any,
) -> None:
    halves = [INT(4 * TILE * i) for i in range(2)]
    asked, num_lines = (builder.extract_value(ahead, i) for i in range(2))
    for sums in _SUMS[:count]:
        for tile, half in zip(sums, halves, strict=True):
            _fill(builder, tile, builder.add(panel, half), INT(0))  # every row: the biases
    groups = builder.add(panel, INT(HEAD))
    with cgutils.for_range(builder, num_groups) as loop:
        group = builder.add(groups, builder.mul(loop.index, INT(GROUP_BYTES)))
        wanted = builder.add(asked, builder.mul(builder.mul(loop.index, num_lines), INT(LINE)))
        with cgutils.for_range(builder, num_lines) as line:
            prefetch(builder, wanted, builder.mul(line.index, INT(LINE)))
        for weights, half in zip(_WEIGHTS, halves, strict=True):
            _fill(builder, weights, builder.add(group, half), INT(4 * COLUMNS))
        of_group = builder.mul(loop.index, INT(2 * GROUP))
        for i in range(count):
            _fill(builder, _TOKENS[i], builder.add(builder.extract_value(terms, i), of_group), stride)
            for tile, weights in zip(_SUMS[i], _WEIGHTS, strict=True):
                _add_products(builder, tile, _TOKENS[i], weights)
    for i in range(count):
        for tile, half in zip(_SUMS[i], halves, strict=True):
            _empty(builder, tile, builder.add(builder.extract_value(out, i), half), to)


def _multiply_block_intrinsic(
    _context: Any, begins: Any, num_groups: Any, a: Any, b: Any, half: Any, out: Any
) -> Any:
    """out[:TILE, :COLUMNS] += a[:TILE] . b, with nothing to begin with if `begins`, of num_groups groups of
    GROUP numbers of bfloat16: those of a, ROWS, in a line each; of b those for TILE outputs lie together,
    [num_groups, GROUP / 2, TILE, 2], at the address b and `half` bytes later. out: ROWS, float32."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        if HAS_TILES:
            _block(builder, *args)
        return NONE

    return types.none(types.intp, types.intp, ROWS, types.intp, types.intp, ROWS), generate


def _block(builder: Any, begins: Any, num_groups: Any, a: Any, b: Any, half: Any, out: Any) -> None:
    (first, stride), (to, bytes_per_out) = (
        [builder.extract_value(each, i) for i in range(2)] for each in (a, out)
    )
    halves, sums = (INT(0), half), _SUMS[0]
    outputs = to, builder.add(to, INT(4 * TILE))
    with builder.if_else(builder.icmp_signed("!=", begins, INT(0))) as (from_nothing, from_sums):
        with from_nothing:
            for tile in sums:
                _call(builder, "tilezero", _BYTE(tile))
        with from_sums:
            for tile, output in zip(sums, outputs, strict=True):
                _fill(builder, tile, output, bytes_per_out)
    with cgutils.for_range(builder, num_groups) as loop:
        of_a = builder.add(first, builder.mul(loop.index, INT(LINE)))
        of_b = builder.add(b, builder.mul(loop.index, INT(2 * GROUP * TILE)))
        _fill(builder, _TOKENS[0], of_a, stride)
        for tile, other, offset in zip(sums, _WEIGHTS, halves, strict=True):
            _fill(builder, other, builder.add(of_b, offset), INT(LINE))
            _add_products(builder, tile, _TOKENS[0], other)
    for tile, output in zip(sums, outputs, strict=True):
        _empty(builder, tile, output, bytes_per_out)


begin: Any = intrinsic(_begin_intrinsic)
end: Any = intrinsic(_end_intrinsic)
multiply_block: Any = intrinsic(_multiply_block_intrinsic)
_multiply_tiles: Any = intrinsic(_multiply_tiles_intrinsic)


@_kernel
def _multiply_panel(
    ahead: int,
    terms: int,
    num_tokens: int,
    groups: int,
    panel: int,
    out: int,
    bytes_per_out: int,
    columns: int,
) -> None:
    """All tiles have as many tokens: the last begins with some of the one before it, which come out as they
    did."""
    most, stride = min(TILE, num_tokens), bytes_of_token(groups)
    num_tiles = (num_tokens + most - 1) // most
    num_turns = (num_tiles + 1) // 2
    size = HEAD + groups * GROUP_BYTES
    spare = np.empty((2 * TILE, COLUMNS), np.float32)
    for turn in range(num_turns):
        # Several turns ask for a part of the next panel each, one alone for what it reads soon.
        asked = panel + HEAD + ahead, GROUP_BYTES // LINE
        if num_turns > 1:
            part = size // num_turns
            asked = panel + size + turn * part, part // groups // LINE + 1
        count = min(2, num_tiles - 2 * turn)
        first = min(2 * turn * most, num_tokens - most)
        second = min((2 * turn + 1) * most, num_tokens - most)
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
    begin(min(TILE, num_tokens))
    for number in range(share * num_panels // num_shares, (share + 1) * num_panels // num_shares):
        panel = panels + number * (HEAD + groups * GROUP_BYTES)
        columns, to = min(COLUMNS, num_outputs - number * COLUMNS), out + number * 4 * COLUMNS
        _multiply_panel(ahead, terms, num_tokens, groups, panel, to, bytes_per_out, columns)
    end()
