"""Kernels on several threads: each piece of work is done once, by torch's threads and by a pool's."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numba import cfunc, njit, types
from numba.core.errors import TypingError
from numba.np.numpy_support import carray

from ee_models.kernel_cache import Kernel
from ee_models.kernels import threads
from ee_models.kernels.threads import KernelThreads, address_of, count_team, pointer, take, wait

COUNT = 1000


@Kernel
def add_to(address: int, number: int) -> None:
    carray(pointer(address), 1, np.int64)[0] += number


call_add_to = add_to.caller


@cfunc(types.void(types.CPointer(types.int64)))
def count_pieces(data: Any) -> None:
    """data: [next, address of how often each piece was taken]."""
    call = carray(data, 2)
    times = carray(pointer(call[1]), COUNT, np.int64)
    while True:
        taken = take(address_of(data))
        if taken >= COUNT:
            return
        times[taken] += 1


@pytest.mark.parametrize("has_gomp", [True, False])
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_each_piece_is_taken_once(has_gomp: bool, num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    if not has_gomp:
        monkeypatch.setattr(threads, "_find_gomp", lambda: (None, 0))
    pool, times = KernelThreads(), np.zeros(COUNT, np.int64)
    assert pool.count == num_threads
    for calls in range(1, 21):
        call = np.array([0, times.ctypes.data], np.int64)
        pool.run(count_pieces, call.ctypes.data, num_threads)
        assert (times == calls).all()
        assert call[0] == COUNT + num_threads  # every thread came


@cfunc(types.void(types.CPointer(types.int64)))
def pass_numbers_on(data: Any) -> None:
    """data: [next, barrier, team_size, address of int64 numbers, how often]: each time every number becomes
    that of the next thread, plus one."""
    call = carray(data, 5)
    share, shares = take(address_of(data)), count_team(call[2])
    numbers = carray(pointer(call[3]), shares, np.int64)
    for _ in range(call[4]):
        number = numbers[(share + 1) % shares]
        wait(call[1], shares)
        numbers[share] = number + 1
        wait(call[1], shares)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_threads_wait_for_each_other(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    pool = KernelThreads()
    if not pool.can_wait:
        pytest.skip("threads cannot wait for each other here")
    barrier, numbers = pool.make_barrier(), np.arange(5) * 1000
    assert barrier.ctypes.data % 64 == 0
    for calls in range(1, 4):
        call = np.array([0, barrier.ctypes.data, pool.team_size, numbers.ctypes.data, 200], np.int64)
        pool.run(pass_numbers_on, call.ctypes.data, num_threads)
        came = int(call[0])  # OpenMP's settings may give fewer
        moved = (np.arange(came) + 200 * calls) % came
        assert numbers[:came].tolist() == (moved * 1000 + 200 * calls).tolist()
        assert numbers[came:].tolist() == (np.arange(came, 5) * 1000).tolist()


def test_without_a_way_to_give_way_threads_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_find_yield", lambda: 0)
    assert not KernelThreads().can_wait


def test_a_library_without_gnus_parallel_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(path: str | None) -> object:
        if path is not None:
            raise OSError(path)
        return object()

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert threads._find_gomp() == (None, 0)


FEWER = """
import sys, torch
from pathlib import Path
from ee_models.checkpoint.loader import open_checkpoint
from ee_models.decoder import Decoder
from ee_models import fused_pass, panel_linear
from tests.ee_models.test_fused_pass import run
panel_linear._PARALLEL_FROM = fused_pass._PARALLEL_FROM = 0
torch.set_num_threads(3)
decoder = Decoder.load(open_checkpoint(Path(sys.argv[1])), torch.float32, torch.device("cpu"))
assert decoder.make_linear.threads.count == 3
torch.save([*run(decoder, decoder._layers, True), *run(decoder, decoder._layers, False)], sys.argv[2])
"""


@pytest.mark.slow
def test_fewer_threads_than_were_asked_for_do_all_of_the_work(tiny_path: Path, tmp_path: Path) -> None:
    """OMP_THREAD_LIMIT, as a batch system may set it, keeps OpenMP from giving what torch thinks it has."""
    found = []
    for limit in ("1", "3"):
        path = tmp_path / limit
        environment = os.environ | {"OMP_THREAD_LIMIT": limit, "PYTHONPATH": str(Path(__file__).parents[2])}
        subprocess.run(
            [sys.executable, "-c", FEWER, str(tiny_path), str(path)], check=True, env=environment, timeout=300
        )
        found.append(torch.load(path, weights_only=True))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_a_kernel_is_called_by_address_with_as_many_numbers_as_it_takes() -> None:
    @njit
    def add_twice(kernel: int, address: int, number: int) -> None:
        call_add_to(kernel, (address, number))
        call_add_to(kernel, (address, 2 * number))

    @njit
    def add_nothing(kernel: int, address: int) -> None:
        call_add_to(kernel, (address,))

    total = np.zeros(1, np.int64)
    add_to(total.ctypes.data, 5)
    add_twice(add_to.address, total.ctypes.data, 7)
    assert total[0] == 26
    with pytest.raises(TypingError, match="the kernel takes 2 numbers, not 1"):
        add_nothing(add_to.address, total.ctypes.data)
