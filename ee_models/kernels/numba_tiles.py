"""A CPU's matrix tiles (Intel's AMX), of which `numba_bfloat16_tiles` and `numba_int8_tiles` make products:
whether there are such, how a thread begins and ends with them, and code that fills and multiplies them."""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .numba_vectors import INT, LINE, NONE, WIDTH, compiles_for, prefetch

TILE = 16  # rows of a tile: a token's inputs, LINE bytes of them, or weights of as many outputs
# Whether numba compiles for them; elsewhere nothing of it may run. Without vectors of this width, panels have
# other sizes. All CPUs with tiles have products in bfloat16 and in int8.
HAS_TILES = WIDTH == TILE and compiles_for("amx-bf16") and compiles_for("amx-int8")
# Of the CPU's eight tiles: sums of two times TILE tokens, for either half of the outputs; tokens; weights.
SUMS, TOKENS, WEIGHTS = ((0, 1), (2, 3)), (4, 5), (6, 7)
_BYTE = ir.IntType(8)


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


def fill(builder: Any, tile: int, first: Any, stride: Any) -> None:
    """A tile with the rows at the address `first` and each `stride` bytes later."""
    _call(builder, "tileloadd64", _BYTE(tile), builder.inttoptr(first, _BYTE.as_pointer()), stride)


def empty(builder: Any, tile: int, first: Any, stride: Any) -> None:
    """A tile into rows as of fill."""
    _call(builder, "tilestored64", _BYTE(tile), builder.inttoptr(first, _BYTE.as_pointer()), stride)


def zero(builder: Any, tile: int) -> None:
    _call(builder, "tilezero", _BYTE(tile))


def add_products(builder: Any, how: str, sums: int, tokens: int, weights: int) -> None:
    """Adds to a tile of sums the products of two others, by LLVM's name of an instruction."""
    _call(builder, how, *map(_BYTE, (sums, tokens, weights)))


def ask(builder: Any, ahead: Any, number: Any) -> None:
    """Asks for the lines that are of the `number`th lot: ahead has the address of the first and how many
    lines are a lot."""
    first, num_lines = (builder.extract_value(ahead, i) for i in range(2))
    wanted = builder.add(first, builder.mul(builder.mul(number, num_lines), INT(LINE)))
    with cgutils.for_range(builder, num_lines) as line:
        prefetch(builder, wanted, builder.mul(line.index, INT(LINE)))


def _begin_intrinsic(_context: Any, num_tokens: Any) -> Any:
    """Tells this thread's tiles their sizes: rows for each of 1 to TILE tokens, or of weights."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        if HAS_TILES:
            sizes = cgutils.alloca_once(builder, ir.ArrayType(_BYTE, LINE))
            builder.store(ir.Constant(sizes.type.pointee, None), sizes)
            num_tokens = builder.trunc(args[0], _BYTE)
            # Byte 0 is the palette, 16 and so on are bytes of a row, in two bytes each, 48 and so on rows.
            known = {0: _BYTE(1)}
            for tile in range(8):
                known[16 + 2 * tile] = _BYTE(LINE)
                known[48 + tile] = _BYTE(TILE) if tile in WEIGHTS else num_tokens
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


begin: Any = intrinsic(_begin_intrinsic)
end: Any = intrinsic(_end_intrinsic)
