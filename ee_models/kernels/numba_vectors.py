"""LLVM code that numba's kernels are built of where its own vectoriser does not find it: blocks of sums that
stay in the CPU's vectors, over matrices that are addresses.

All functions here emit code: `builder` is llvmlite's, values are LLVM's, offsets are in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import config, types
from numba.core import cgutils, codegen
from numba.extending import intrinsic


def compiles_for(feature: str) -> bool:
    """Whether numba compiles for CPUs that have `feature`, by LLVM's name: this one, unless its settings say
    otherwise. LLVM takes other code for most instructions that are missing, but not for all."""
    features = getattr(config, "CPU_FEATURES", None)
    if features is None:
        features = codegen.get_host_cpu_features()
    return f"+{feature}" in features.split(",")


# Whether a product is added in one rounding; on 64-bit ARM (neon) always.
_IS_FUSED = any(map(compiles_for, ("fma", "avx512f", "neon")))
# float32 in a vector. Sums are ordered by it, so it is the CPU's own, not that of the kernel at hand.
WIDTH = 16 if compiles_for("avx512f") else 8

INT, FLOAT, INT32 = ir.IntType(64), ir.FloatType(), ir.IntType(32)
VECTOR = ir.VectorType(FLOAT, WIDTH)
NONE = ir.Constant(ir.IntType(8).as_pointer(), None)  # numba's None
LINE = 64  # bytes of a cache's line
ROWS = types.UniTuple(types.intp, 2)  # of a matrix: the address of its first, and bytes from one to the next


def address(builder: Any, base: Any, offset: Any, to: Any) -> Any:
    """base + offset, as a pointer to values of type `to`."""
    return builder.inttoptr(builder.add(base, offset), to.as_pointer())


def load(builder: Any, base: Any, offset: Any, what: Any = VECTOR) -> Any:
    return builder.load(address(builder, base, offset, what), align=4)


def load_bfloat16(builder: Any, base: Any, offset: Any, what: Any = VECTOR) -> Any:
    """Numbers that lie there in bfloat16, the upper half of a float32, as float32."""
    bits, halves = _bits_of(what)
    found = builder.load(address(builder, base, offset, halves), align=2)
    return builder.bitcast(builder.shl(builder.zext(found, bits), _every(bits, 16)), what)


def store(builder: Any, value: Any, base: Any, offset: Any) -> None:
    builder.store(value, address(builder, base, offset, value.type), align=4)


def store_bfloat16(builder: Any, value: Any, base: Any, offset: Any) -> None:
    """Of float32, the nearest bfloat16, of two the even one; NaN stays NaN."""
    bits, halves = _bits_of(value.type)
    whole, upper = builder.bitcast(value, bits), _every(bits, 16)
    odd = builder.and_(builder.lshr(whole, upper), _every(bits, 1))
    rounded = builder.lshr(builder.add(builder.add(whole, _every(bits, 0x7FFF)), odd), upper)
    is_nan = builder.fcmp_unordered("uno", value, value)
    rounded = builder.select(is_nan, _every(bits, 0x7FC0), rounded)
    builder.store(builder.trunc(rounded, halves), address(builder, base, offset, halves), align=2)


def load_half(builder: Any, base: Any, offset: Any) -> Any:
    """A vector of float16 as float32, on CPUs without an instruction for it, too: its bits are those of a
    number that is 2 ** 112 times smaller."""
    whole = ir.VectorType(INT32, WIDTH)
    halves = load(builder, base, offset, ir.VectorType(ir.IntType(16), WIDTH))
    moved = builder.shl(builder.sext(halves, whole), _every(whole, 13))
    bits = builder.and_(moved, _every(whole, 0x8FFFE000 - (1 << 32)))
    return builder.fmul(builder.bitcast(bits, VECTOR), ir.Constant(VECTOR, [2.0**112] * WIDTH))


def _bits_of(what: Any) -> tuple[Any, Any]:
    """Whole numbers in the place of floats, of their size and of half of it."""
    size = getattr(what, "count", 0)
    whole, half = INT32, ir.IntType(16)
    return (ir.VectorType(whole, size), ir.VectorType(half, size)) if size else (whole, half)


def _every(kind: Any, number: int) -> Any:
    size = getattr(kind, "count", 0)
    return ir.Constant(kind, [number] * size if size else number)


def for_size(builder: Any, size: Any, emit: Callable[[int], None]) -> None:
    """Code for numbers of each size in bytes, of which that for `size` runs: 4 = float32, 2 = bfloat16."""
    with builder.if_else(builder.icmp_unsigned("==", size, size.type(2))) as (narrow, wide):
        with narrow:
            emit(2)
        with wide:
            emit(4)


def load_number(builder: Any, size: int, base: Any, offset: Any, what: Any = VECTOR) -> Any:
    return (load if size == 4 else load_bfloat16)(builder, base, offset, what)


def prefetch(builder: Any, base: Any, offset: Any) -> None:
    """Asks for the memory at base + offset, for the second cache; whatever lies there."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, INT32, INT32, INT32])
    function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
    read, second_cache, data = INT32(0), INT32(2), INT32(1)
    builder.call(function, [address(builder, base, offset, ir.IntType(8)), read, second_cache, data])


def rows_of(builder: Any, matrix: Any, count: int) -> list[Any]:
    """The addresses of the first `count` rows of a matrix, given as ROWS."""
    first, stride = (builder.extract_value(matrix, i) for i in range(2))
    return [builder.add(first, builder.mul(stride, INT(i))) for i in range(count)]


def for_count(builder: Any, count: Any, most: int, emit: Callable[[int], None]) -> None:
    """Code for each count of 1 to `most`, of which that for `count` runs; of any other none."""
    after = builder.append_basic_block("after")
    switch = builder.switch(count, after)
    for number in range(1, most + 1):
        block = builder.append_basic_block(f"count_{number}")
        switch.add_case(INT(number), block)
        with builder.goto_block(block):
            emit(number)
            builder.branch(after)
    builder.position_at_end(after)


def shuffle(builder: Any, x: Any, y: Any, order: Sequence[int]) -> Any:
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(INT32, len(order)), list(order)))


def spread(builder: Any, number: Any) -> Any:
    """A vector of one number."""
    vector = ir.VectorType(number.type, WIDTH)
    alone = builder.insert_element(ir.Constant(vector, ir.Undefined), number, INT32(0))
    return shuffle(builder, alone, alone, [0] * WIDTH)


def multiply_add(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z of floats or vectors, in one rounding where the CPU can. Said outright: where LLVM may choose
    (`contract`), it fuses another product of a sum in one place than in another."""
    if not _IS_FUSED:
        return builder.fadd(builder.fmul(x, y), z)
    name = "llvm.fma.f32" if x.type == FLOAT else f"llvm.fma.v{x.type.count}f32"
    kind = ir.FunctionType(x.type, [x.type] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [x, y, z])


def add_product(builder: Any, total: Any, x: Any, y: Any) -> None:
    """total += x * y, as `multiply_add`; total is a place in memory that LLVM turns into a register."""
    builder.store(multiply_add(builder, x, y, builder.load(total)), total)


def add_rows(
    builder: Any,
    factors: Sequence[Any],
    num_rows: Any,
    find_row: Callable[[Any], Any],
    begin: Sequence[Sequence[Any]],
    out: Sequence[Any],
    size: int = 4,
) -> None:
    """out[t] = begin[t] + factors[t][i] * row i, one after another of num_rows i, for as many t as there are:
    each begins as vectors side by side, factors and out are addresses, and find_row(i) is that of row i.
    size: bytes of a row's numbers, as for_size has them; all else is float32."""
    of_row, columns = ([INT(each * WIDTH * i) for i in range(len(begin[0]))] for each in (size, 4))
    totals = [[cgutils.alloca_once_value(builder, value) for value in values] for values in begin]
    with cgutils.for_range(builder, num_rows) as loop:
        row = find_row(loop.index)
        parts = [load_number(builder, size, row, column) for column in of_row]
        for its_factors, its_totals in zip(factors, totals, strict=True):
            factor = load(builder, its_factors, builder.mul(loop.index, INT(4)), FLOAT)
            alike = spread(builder, factor)
            for part, total in zip(parts, its_totals, strict=True):
                add_product(builder, total, alike, part)
    for out_row, its_totals in zip(out, totals, strict=True):
        for column, total in zip(columns, its_totals, strict=True):
            store(builder, builder.load(total), out_row, column)


def _sum_of_squares_intrinsic(_context: Any, x: Any, count: Any) -> Any:
    """x . x of `count` numbers at the address x, in one order wherever it is compiled into."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        x, count = args
        parts = cgutils.alloca_once_value(builder, ir.Constant(VECTOR, [0.0] * WIDTH))
        whole = builder.udiv(count, INT(WIDTH))
        with cgutils.for_range(builder, whole) as loop:
            part = load(builder, x, builder.mul(loop.index, INT(4 * WIDTH)))
            add_product(builder, parts, part, part)
        total = cgutils.alloca_once_value(builder, FLOAT(0.0))
        for i in range(WIDTH):
            part = builder.extract_element(builder.load(parts), INT32(i))
            builder.store(builder.fadd(builder.load(total), part), total)
        with cgutils.for_range(builder, count, start=builder.mul(whole, INT(WIDTH)), intp=INT) as loop:
            number = load(builder, x, builder.mul(loop.index, INT(4)), FLOAT)
            add_product(builder, total, number, number)
        return builder.load(total)

    return types.float32(types.intp, types.intp), generate


def _maximum(builder: Any, x: Any, count: Any, lowest: float, change: Callable[[Any, Any], Any]) -> Any:
    """The largest of `lowest` and change(builder, number or vector) of `count` numbers at the address x; NaN
    is passed over."""

    def larger(best: Any, found: Any) -> None:
        before = builder.load(best)
        is_larger = builder.fcmp_ordered(">", found, before)
        builder.store(builder.select(is_larger, found, before), best)

    peaks = [cgutils.alloca_once_value(builder, ir.Constant(VECTOR, [lowest] * WIDTH)) for _ in range(4)]
    whole = builder.udiv(count, INT(4 * WIDTH))
    with cgutils.for_range(builder, whole) as loop:
        start = builder.mul(loop.index, INT(16 * WIDTH))
        for i, peak in enumerate(peaks):
            larger(peak, change(builder, load(builder, x, builder.add(start, INT(4 * WIDTH * i)))))
    for peak in peaks[1:]:
        larger(peaks[0], builder.load(peak))
    best = cgutils.alloca_once_value(builder, FLOAT(lowest))
    for i in range(WIDTH):
        larger(best, builder.extract_element(builder.load(peaks[0]), INT32(i)))
    with cgutils.for_range(builder, count, start=builder.mul(whole, INT(4 * WIDTH)), intp=INT) as loop:
        larger(best, change(builder, load(builder, x, builder.mul(loop.index, INT(4)), FLOAT)))
    return builder.load(best)


def _highest_intrinsic(_context: Any, x: Any, count: Any) -> Any:
    """The largest of `count` numbers at the address x; -inf of none, and NaN is passed over."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        x, count = args
        return _maximum(builder, x, count, float("-inf"), lambda _, found: found)

    return types.float32(types.intp, types.intp), generate


def _largest_intrinsic(_context: Any, x: Any, count: Any) -> Any:
    """The largest size of `count` numbers at the address x; 0 of none, and NaN is passed over."""

    def size(builder: Any, found: Any) -> Any:
        name = "llvm.fabs.f32" if found.type == FLOAT else f"llvm.fabs.v{WIDTH}f32"
        kind = ir.FunctionType(found.type, [found.type])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [found])

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        x, count = args
        return _maximum(builder, x, count, 0.0, size)

    return types.float32(types.intp, types.intp), generate


def _copy_numbers_intrinsic(_context: Any, source: Any, count: Any, target: Any, size: Any) -> Any:
    """`count` float32 at the address `source` to numbers of `size` bytes, as for_size has them, at the
    address `target`."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        source, count, target, size = args
        whole = builder.udiv(count, INT(WIDTH))

        def copy(size: int) -> None:
            put = store if size == 4 else store_bfloat16
            with cgutils.for_range(builder, whole) as loop:
                numbers = load(builder, source, builder.mul(loop.index, INT(4 * WIDTH)))
                put(builder, numbers, target, builder.mul(loop.index, INT(size * WIDTH)))
            with cgutils.for_range(builder, count, start=builder.mul(whole, INT(WIDTH)), intp=INT) as loop:
                number = load(builder, source, builder.mul(loop.index, INT(4)), FLOAT)
                put(builder, number, target, builder.mul(loop.index, INT(size)))

        for_size(builder, size, copy)
        return NONE

    return types.none(*(types.intp,) * 4), generate


def _number_at_intrinsic(_context: Any, place: Any, size: Any) -> Any:
    """The number of `size` bytes, as for_size has them, at the address `place`, as float32."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        place, size = args
        found = cgutils.alloca_once(builder, FLOAT)

        def read(size: int) -> None:
            builder.store(load_number(builder, size, place, INT(0), FLOAT), found)

        for_size(builder, size, read)
        return builder.load(found)

    return types.float32(types.intp, types.intp), generate


copy_numbers: Any = intrinsic(_copy_numbers_intrinsic)
number_at: Any = intrinsic(_number_at_intrinsic)
largest: Any = intrinsic(_largest_intrinsic)
highest: Any = intrinsic(_highest_intrinsic)
sum_of_squares: Any = intrinsic(_sum_of_squares_intrinsic)
