"""Runs a compiled kernel on several threads, on those of torch where that can be.

Torch's OpenMP threads spin for a while after each of its operators. Threads of any other pool find their
cores taken, and were measured to make a call slower, not faster. GNU's OpenMP, which torch has on Linux, runs
any function on its threads; elsewhere a Python pool does, whose idle threads at least sleep.
"""

from __future__ import annotations

import ctypes
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from functools import cache
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

# A barrier in int64: how many have arrived, and how often all had, each in a cache line of its own; and the
# address of sched_yield.
_LINE = 8
_ARRIVED, _TURN, _YIELD = 0, _LINE, 2 * _LINE
_NUM_FIELDS = 3 * _LINE
_LOOKS = 1000  # before a thread gives its core away, each time: tens of microseconds
# LLVM's intrinsic for it, and its arguments.
_PAUSES = {"x86_64": ("llvm.x86.sse2.pause",), "aarch64": ("llvm.aarch64.hint", 1)}
_PAUSE = _PAUSES.get(platform.machine())
_CLOCK = getattr(time, "CLOCK_MONOTONIC", 0)


class KernelThreads:
    """As many threads as torch uses when this is made, or as `resize` says later.

    count      how many
    can_wait   whether a kernel's threads can wait for each other, at a `make_barrier`; only a kernel on one
               thread can do without
    team_size  the address of a function that tells a kernel how many threads run it: OpenMP gives fewer than
               are asked for where its settings say so; 0 = there is none
    """

    _all: ClassVar[WeakSet[KernelThreads]] = WeakSet()

    def __init__(self) -> None:
        self.count = torch.get_num_threads()
        self._parallel, self.team_size = _find_gomp()
        self._yield = _find_yield()
        self.can_wait = self._parallel is not None and self._yield != 0
        self._pool = None
        if self._parallel is None and self.count > 1:
            self._pool = ThreadPoolExecutor(self.count - 1, thread_name_prefix="kernel")
        KernelThreads._all.add(self)

    @staticmethod
    def resize(count: int) -> None:
        """Torch, and all KernelThreads on its threads, use so many from now on: for a process that was forked
        from one that used a single thread. A pool of Python's keeps its size."""
        torch.set_num_threads(count)
        for threads in KernelThreads._all:
            if threads._parallel is not None:
                threads.count = count

    def make_barrier(self) -> np.ndarray:
        """Memory for `wait`, at its address. Once all have left it, it is as new."""
        memory = np.zeros(_NUM_FIELDS + _LINE, np.int64)
        barrier = memory[-(memory.ctypes.data // 8) % _LINE :][:_NUM_FIELDS]
        barrier[_YIELD] = self._yield
        return barrier

    def run(self, kernel: Any, data: int, num_threads: int) -> None:
        """Calls kernel(data) on up to `num_threads` threads, this one among them, and waits for all. kernel:
        a numba cfunc of one address that raises nothing; data: that address."""
        if num_threads == 1:
            _function(kernel.address)(data)
        elif self._parallel is not None:
            self._parallel(kernel.address, data, num_threads, 0)
        else:
            assert self._pool is not None
            function = _function(kernel.address)
            others = [self._pool.submit(function, data) for _ in range(num_threads - 1)]
            try:
                function(data)
            finally:  # an interrupt must not free what others still write to
                wait_for(others)


@cache
def _function(address: int) -> Callable[[int], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)


def _find_gomp() -> tuple[Callable[[int, int, int, int], None] | None, int]:
    """GOMP_parallel(function, its argument, number of threads, flags) and the address of
    omp_get_num_threads, of the OpenMP library that torch has loaded; None and 0 if it has no such."""
    torch_lib = Path(torch.__file__).parent / "lib"
    bundled = [*torch_lib.glob("libgomp*"), *torch_lib.parents[1].glob("torch.libs/libgomp*")]
    for path in (*map(str, bundled), None):  # None: whatever the process has
        try:
            library = ctypes.CDLL(path)
            parallel, team_size = library.GOMP_parallel, library.omp_get_num_threads
        except (OSError, AttributeError, TypeError):
            continue
        parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        parallel.restype = None
        return parallel, ctypes.cast(team_size, ctypes.c_void_p).value or 0
    return None, 0


def _find_yield() -> int:
    """The address of the C library's sched_yield; 0 = it has none."""
    try:
        return ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0
    except (OSError, AttributeError, TypeError):
        return 0


def address_of_cfunc(function: Any) -> int:
    """Where a numba cfunc begins, for `call`."""
    address: int = function.address
    return address


@cache
def find_clock() -> int:
    """The address of the C library's clock_gettime, for `now`; 0 = it has none."""
    try:
        return ctypes.cast(ctypes.CDLL(None).clock_gettime, ctypes.c_void_p).value or 0
    except (OSError, AttributeError, TypeError):
        return 0


def _take_intrinsic(_context: Any, counter: Any) -> Any:
    """Adds 1 to the int64 at the address `counter` -> what it was: each number goes to one thread."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        int64 = ir.IntType(64)
        return builder.atomic_rmw("add", builder.inttoptr(args[0], int64.as_pointer()), int64(1), "monotonic")

    return types.int64(types.intp), generate


def _pointer_intrinsic(_context: Any, address: Any) -> Any:
    """An address as what numba.carray makes an array of."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.intp), generate


def _address_of_intrinsic(_context: Any, data: Any) -> Any:
    """The address that a kernel was given."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.ptrtoint(args[0], ir.IntType(64))

    return types.intp(data), generate


def _wait_intrinsic(_context: Any, barrier: Any, _count: Any) -> Any:
    """Returns once `count` threads have come to the barrier at that address.

    OpenMP's own spins for milliseconds. With another program on one core, both threads of a pass may be on
    the other: one then waits for the other and keeps it from running until its time is over. Passes wait
    hundreds of times, and took 15 times as long. Here a thread that has waited for microseconds lets others
    have its core. It does not sleep: those who are woken were often put on one core, and left there.
    """

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        int64 = ir.IntType(64)
        begin, count = args

        def field(number: int) -> Any:
            return builder.inttoptr(builder.add(begin, int64(8 * number)), int64.as_pointer())

        arrived, turn = field(_ARRIVED), field(_TURN)

        with builder.if_then(builder.icmp_signed(">", count, int64(1))):
            own_turn = builder.load_atomic(turn, "acquire", 8)
            before = builder.atomic_rmw("add", arrived, int64(1), "acq_rel")
            is_last = builder.icmp_signed("==", before, builder.sub(count, int64(1)))
            with builder.if_else(is_last) as (then, otherwise):
                with then:
                    builder.store_atomic(int64(0), arrived, "monotonic", 8)
                    builder.atomic_rmw("add", turn, int64(1), "release")
                with otherwise:
                    looks = cgutils.alloca_once_value(builder, int64(0))
                    look, go_on, give_way, end = (
                        builder.append_basic_block(name) for name in ("look", "go_on", "give_way", "end")
                    )
                    builder.branch(look)
                    builder.position_at_end(look)
                    _pause(builder)
                    is_over = builder.icmp_unsigned("!=", builder.load_atomic(turn, "acquire", 8), own_turn)
                    builder.cbranch(is_over, end, go_on)
                    builder.position_at_end(go_on)
                    looked = builder.add(builder.load(looks), int64(1))
                    builder.store(looked, looks)
                    is_long = builder.icmp_signed("==", builder.srem(looked, int64(_LOOKS)), int64(0))
                    builder.cbranch(is_long, give_way, look)
                    builder.position_at_end(give_way)
                    function = ir.FunctionType(ir.IntType(32), []).as_pointer()
                    builder.call(builder.inttoptr(builder.load(field(_YIELD)), function), [])
                    builder.branch(look)
                    builder.position_at_end(end)
        return ir.Constant(ir.IntType(8).as_pointer(), None)  # numba's None

    return types.none(types.intp, types.int64), generate


def _pause(builder: Any) -> None:
    """Tells the processor of a loop that waits."""
    if _PAUSE is None:
        return
    name, *values = _PAUSE
    function = ir.FunctionType(ir.VoidType(), [ir.IntType(32)] * len(values))
    builder.call(
        cgutils.get_or_insert_function(builder.module, function, name),
        [ir.IntType(32)(value) for value in values],
    )


def _generate_call(_: Any, builder: Any, __: Any, args: Any) -> Any:
    byte = ir.IntType(8).as_pointer()
    given = [builder.inttoptr(each, byte) for each in args[1:]]
    signature = ir.FunctionType(ir.VoidType(), [byte] * len(given)).as_pointer()
    builder.call(builder.inttoptr(args[0], signature), given)
    return ir.Constant(byte, None)  # numba's None


def _call_intrinsic(_context: Any, function: Any, data: Any) -> Any:
    """Calls the function at an address with another; it returns nothing. What is called so is compiled once,
    and not within each that calls it."""
    return types.none(types.intp, types.intp), _generate_call


def _call_with_two_intrinsic(_context: Any, function: Any, first: Any, second: Any) -> Any:
    """As `call`, with two."""
    return types.none(types.intp, types.intp, types.intp), _generate_call


def _now_intrinsic(_context: Any, clock: Any) -> Any:
    """Nanoseconds by the function at the address `clock`, of `find_clock`; 0 if that is 0."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        int32, int64 = ir.IntType(32), ir.IntType(64)
        function = ir.FunctionType(int32, [int32, int64.as_pointer()]).as_pointer()
        found = cgutils.alloca_once_value(builder, int64(0))
        time_spec = cgutils.alloca_once(builder, int64, size=2)  # seconds, nanoseconds
        with builder.if_then(builder.icmp_unsigned("!=", args[0], args[0].type(0))):
            builder.call(builder.inttoptr(args[0], function), [int32(_CLOCK), time_spec])
            seconds, rest = builder.load(time_spec), builder.load(builder.gep(time_spec, [int32(1)]))
            builder.store(builder.add(builder.mul(seconds, int64(10**9)), rest), found)
        return builder.load(found)

    return types.int64(types.intp), generate


def _count_team_intrinsic(_context: Any, team_size: Any) -> Any:
    """How many threads run this kernel, by the function at the address team_size; 1 if that is 0."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        function = ir.FunctionType(ir.IntType(32), []).as_pointer()
        found = cgutils.alloca_once_value(builder, ir.IntType(64)(1))
        with builder.if_then(builder.icmp_unsigned("!=", args[0], args[0].type(0))):
            count = builder.call(builder.inttoptr(args[0], function), [])
            builder.store(builder.sext(count, ir.IntType(64)), found)
        return builder.load(found)

    return types.int64(types.intp), generate


count_team: Any = intrinsic(_count_team_intrinsic)
wait: Any = intrinsic(_wait_intrinsic)
address_of: Any = intrinsic(_address_of_intrinsic)
take: Any = intrinsic(_take_intrinsic)
pointer: Any = intrinsic(_pointer_intrinsic)
call: Any = intrinsic(_call_intrinsic)
call_with_two: Any = intrinsic(_call_with_two_intrinsic)
now: Any = intrinsic(_now_intrinsic)
