"""Sums of Triton's interpreter in an order that is ours: halves are added until one term is left.

The interpreter's `tl.dot` is numpy's matmul, whose BLAS may sum a row in another order by its place in the
tile; which BLAS kernels do so depends on the processor. Here each sum is a tree of additions of whole arrays,
so an element's bits follow from its own terms alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


def add_up(terms: np.ndarray) -> np.ndarray:
    """The sum over the first axis, whose length is a power of two as all of Triton's are."""
    while len(terms) > 1:
        half = len(terms) // 2
        assert 2 * half == len(terms)
        terms = terms[:half] + terms[half:]
    return terms[0]


def use_fixed_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes nothing on a GPU, where the kernels themselves run."""
    from triton.runtime import interpreter

    def dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        assert a.data.ndim == 2 and a.data.dtype == b.data.dtype == d.data.dtype == np.float32
        products = a.data.T[:, :, None] * b.data[:, None, :]
        return interpreter.TensorHandle(add_up(products) + d.data, d.dtype.scalar)

    def add(self: Any, values: Any) -> Any:
        data = values.handle.data
        if data.dtype.kind != "f":
            return whole_numbers(self, values)
        found = add_up(data.ravel() if self.axis is None else np.moveaxis(data, self.axis, 0))
        if self.keep_dims:
            found = found.reshape([1] * data.ndim) if self.axis is None else np.expand_dims(found, self.axis)
        return self.to_tensor(found, values.dtype)

    whole_numbers = interpreter.ReduceOps.sum
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    monkeypatch.setattr(interpreter.ReduceOps, "sum", add)
