"""Matrix products by a CPU's vectors of pairs (AVX512-BF16), in bfloat16 (`numba_bfloat16`), on CPUs that
multiply twice as many of its numbers by them as of float32.

A pair of inputs is multiplied and added to a sum in float32, pair after pair, for every token alike: a
token's bits depend on nothing but itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic

from .numba_bfloat16 import COLUMNS, GROUP, HEAD
from .numba_vectors import (
    FLOAT,
    INT,
    INT32,
    NONE,
    ROWS,
    VECTOR,
    WIDTH,
    compiles_for,
    for_count,
    load,
    prefetch,
    rows_of,
    spread,
    store,
)

TOKENS = 8  # whose sums stay in the CPU's vectors; twelve, which fill them, are no faster
BLOCK = 12  # rows of a block


def _cpu_name() -> str:
    return getattr(config, "CPU_NAME", None) or llvm.get_host_cpu_name()


# Whether numba compiles what follows. An AMD EPYC (Zen 4) multiplies a vector of pairs in the time of one of
# float32; an Intel Xeon takes so much longer that products took half as long again as in float32.
HAS_PAIRS = WIDTH == 16 and compiles_for("avx512bf16") and _cpu_name().startswith("znver")


class _BFloat16(ir.Type):
    """A type of LLVM's that llvmlite has not."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


_COLUMNS = [INT(4 * WIDTH * i) for i in range(COLUMNS // WIDTH)]  # where vectors of outputs begin
_WORDS, _PAIRS = ir.VectorType(INT32, WIDTH), ir.VectorType(_BFloat16(), 2 * WIDTH)


def add_products(builder: Any, total: Any, weights: Any, x: Any) -> None:
    """total [WIDTH] float32, a place in memory that LLVM turns into a register, += the products of pairs of
    bfloat16, each of weights [WIDTH] by the one of x [WIDTH]."""
    kind = ir.FunctionType(VECTOR, [VECTOR, _PAIRS, _PAIRS])
    add = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
    pairs = (builder.bitcast(each, _PAIRS) for each in (weights, x))
    builder.store(builder.call(add, [builder.load(total), *pairs]), total)


def add_rows(
    builder: Any,
    factors: Sequence[Any],
    num_pairs: Any,
    find_parts: Callable[[Any], Sequence[Any]],
    totals: Sequence[Sequence[Any]],
) -> None:
    """totals[t], which are places in memory that LLVM turns into registers, += factors[t][i] * pairs i, one
    after another of num_pairs i, of which find_parts(i) are the vectors; factors are addresses."""
    with cgutils.for_range(builder, num_pairs) as loop:
        parts = find_parts(loop.index)
        for row, its_totals in zip(factors, totals, strict=True):
            alike = spread(builder, load(builder, row, builder.mul(loop.index, INT(4)), INT32))
            for part, total in zip(parts, its_totals, strict=True):
                add_products(builder, total, part, alike)


def _store_totals(builder: Any, totals: Sequence[Sequence[Any]], out: Sequence[Any]) -> None:
    for row, its_totals in zip(out, totals, strict=True):
        for column, total in zip(_COLUMNS, its_totals, strict=True):
            store(builder, builder.load(total), row, column)


def _multiply_tile_intrinsic(
    _context: Any, num_tokens: Any, terms: Any, num_groups: Any, panel: Any, out: Any, ahead: Any
) -> Any:
    """out[t, :COLUMNS] = bias + terms[t] . panel for 1 to TOKENS tokens t. terms and out: ROWS; panel: an
    address; ahead: ROWS of memory that is asked for, one a group of inputs."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        if HAS_PAIRS:
            count, *inputs = args
            for_count(builder, count, TOKENS, lambda count: _tile(builder, count, *inputs))
        return NONE

    return types.none(types.intp, ROWS, types.intp, types.intp, ROWS, ROWS), generate


def _tile(builder: Any, count: int, terms: Any, num_groups: Any, panel: Any, out: Any, ahead: Any) -> None:
    asked, step = (builder.extract_value(ahead, i) for i in range(2))
    step = builder.udiv(step, INT(GROUP // 2))
    begin = [load(builder, panel, column) for column in _COLUMNS]  # the biases
    totals = [[cgutils.alloca_once_value(builder, value) for value in begin] for _ in range(count)]

    def find_parts(index: Any) -> list[Any]:
        pair = builder.add(panel, builder.add(builder.mul(index, INT(4 * COLUMNS)), INT(HEAD)))
        wanted = builder.mul(index, step)
        for column in _COLUMNS:
            prefetch(builder, asked, builder.add(wanted, column))
        return [load(builder, pair, column, _WORDS) for column in _COLUMNS]

    num_pairs = builder.mul(num_groups, INT(GROUP // 2))
    add_rows(builder, rows_of(builder, terms, count), num_pairs, find_parts, totals)
    _store_totals(builder, totals, rows_of(builder, out, count))


def _multiply_block_intrinsic(
    _context: Any, num: Any, num_pairs: Any, a: Any, b: Any, half: Any, factors: Any, out: Any
) -> Any:
    """out[:num, :COLUMNS] = factors * out + a[:num] . b, for 1 to BLOCK rows and num_pairs pairs of numbers
    of bfloat16: those of a, ROWS, side by side; of b those for WIDTH outputs lie together, [num_pairs, WIDTH,
    2], at the address b and `half` bytes later. factors: the address of one for each row, 0 = they are zeros.
    out: ROWS, float32."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        if HAS_PAIRS:
            num, *inputs = args
            for_count(builder, num, BLOCK, lambda count: _block(builder, count, *inputs))
        return NONE

    return types.none(*(types.intp,) * 2, ROWS, *(types.intp,) * 3, ROWS), generate


def _block(
    builder: Any, count: int, num_pairs: Any, a: Any, b: Any, half: Any, factors: Any, out: Any
) -> None:
    out_rows, halves = rows_of(builder, out, count), (b, builder.add(b, half))
    zero = ir.Constant(VECTOR, [0.0] * WIDTH)
    totals = [[cgutils.alloca_once_value(builder, zero) for _ in _COLUMNS] for _ in out_rows]
    with builder.if_then(builder.icmp_signed("!=", factors, INT(0))):
        for i, (row, its_totals) in enumerate(zip(out_rows, totals, strict=True)):
            factor = spread(builder, load(builder, factors, INT(4 * i), FLOAT))
            for column, total in zip(_COLUMNS, its_totals, strict=True):
                builder.store(builder.fmul(load(builder, row, column), factor), total)

    def find_parts(index: Any) -> list[Any]:
        line = builder.mul(index, INT(4 * WIDTH))
        return [load(builder, each, line, _WORDS) for each in halves]

    add_rows(builder, rows_of(builder, a, count), num_pairs, find_parts, totals)
    _store_totals(builder, totals, out_rows)


multiply_block: Any = intrinsic(_multiply_block_intrinsic)
multiply_tile: Any = intrinsic(_multiply_tile_intrinsic)
