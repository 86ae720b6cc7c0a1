"""Kernels are not compiled anew while numbers of rows vary: a new variant takes a GPU's compiler seconds, in
the middle of serving. Counted by what Triton compiles by, without compiling."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import interpreter, jit

from benchmarks.kernel_counts import GREEDY, SAMPLED, count, plans
from hispec.sampling_params import SamplingParams
from tests.helpers.sweeps import sweep

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="asks what the interpreter runs")
Variants = dict[tuple[str, str], set[str]]


@contextmanager
def noted() -> Iterator[Variants]:
    """What each kernel would be compiled for, by (its name and its constants)."""
    backend, run, binders = make_backend(GPUTarget("cuda", 90, 32)), interpreter.InterpretedFunction.run, {}
    variants: Variants = defaultdict(set)

    def noting(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if kernel.fn not in binders:
            asked = {name: value for name, value in kernel.kwargs.items() if name.startswith("do_not")}
            function = jit.JITFunction(kernel.fn, **asked)
            binders[kernel.fn] = jit.create_function_from_signature(
                function.signature, function.params, backend
            )
        _, specialization, options = binders[kernel.fn](*args, **kwargs)
        constants = str([each for each in specialization if each[0] == "constexpr"]) + str(options)
        variants[kernel.fn.__name__, constants].add(str(specialization))
        return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)

    with mock.patch.object(interpreter.InterpretedFunction, "run", noting):
        yield variants


@sweep(
    "plan, params",
    [("two-tier hybrid, K = 2", SAMPLED), ("three-tier exit, K = 2, R = 2", GREEDY)],
    lambda case: case[1] is GREEDY,
)
def test_numbers_of_rows_do_not_compile_anew(plan: str, params: SamplingParams) -> None:
    with noted() as variants:
        for rows in (1, 3):
            count(plans(3)[plan], 3, params, rows)
    assert len(variants) >= 12
    several = {name: each for (name, _), each in variants.items() if len(each) > 1}
    assert not several, several
