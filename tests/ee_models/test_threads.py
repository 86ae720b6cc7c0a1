"""Kernels on several threads: each piece of work is done once, by torch's threads and by a pool's."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from numba import carray, cfunc, types  # type: ignore[attr-defined]

from ee_models.kernels import threads
from ee_models.kernels.threads import KernelThreads, address_of, pointer, take

COUNT = 1000


@cfunc(types.void(types.CPointer(types.int64)))
def count_pieces(data):  # type: ignore[no-untyped-def]
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


def test_a_library_without_gnus_parallel_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(path: str | None) -> object:
        if path is not None:
            raise OSError(path)
        return object()

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert threads._find_gomp() == (None, 0)
