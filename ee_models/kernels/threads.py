"""Runs a compiled kernel on several threads, on those of torch where that can be.

Torch's OpenMP threads spin for a while after each of its operators. Threads of any other pool find their
cores taken, and were measured to make a call slower, not faster. GNU's OpenMP, which torch has on Linux, runs
any function on its threads; elsewhere a Python pool does, whose idle threads at least sleep.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from functools import cache
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


class KernelThreads:
    """As many threads as torch uses when this is made, or as `resize` says later.

    count      how many
    barrier    the address of a function at which a kernel's threads wait for each other; 0 = there is none,
               and only a kernel on one thread can do without
    team_size  the address of a function that tells a kernel how many threads run it: OpenMP gives fewer than
               are asked for where its settings say so; 0 = there is none
    """

    _all: ClassVar[WeakSet[KernelThreads]] = WeakSet()

    def __init__(self) -> None:
        self.count = torch.get_num_threads()
        self._parallel, self.barrier, self.team_size = _find_gomp()
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
            if threads.barrier:
                threads.count = count

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


def _find_gomp() -> tuple[Callable[[int, int, int, int], None] | None, int, int]:
    """GOMP_parallel(function, its argument, number of threads, flags) and the addresses of GOMP_barrier and
    omp_get_num_threads, of the OpenMP library that torch has loaded; None and 0 if it has no such."""
    torch_lib = Path(torch.__file__).parent / "lib"
    bundled = [*torch_lib.glob("libgomp*"), *torch_lib.parents[1].glob("torch.libs/libgomp*")]
    for path in (*map(str, bundled), None):  # None: whatever the process has
        try:
            library = ctypes.CDLL(path)
            parallel = library.GOMP_parallel
            others = library.GOMP_barrier, library.omp_get_num_threads
        except (OSError, AttributeError, TypeError):
            continue
        parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        parallel.restype = None
        barrier, team_size = (ctypes.cast(other, ctypes.c_void_p).value or 0 for other in others)
        return parallel, barrier, team_size
    return None, 0, 0


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


def _wait_intrinsic(_context: Any, barrier: Any) -> Any:
    """Calls the function at the address `barrier`, unless it is 0."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        function = ir.FunctionType(ir.VoidType(), []).as_pointer()
        with builder.if_then(builder.icmp_unsigned("!=", args[0], args[0].type(0))):
            builder.call(builder.inttoptr(args[0], function), [])
        return ir.Constant(ir.IntType(8).as_pointer(), None)  # numba's None

    return types.none(types.intp), generate


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
