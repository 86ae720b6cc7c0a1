"""Triton's interpreter with sums in an order that is ours, and without the larger part of its overhead.

Its `tl.dot` is numpy's matmul, whose BLAS may sum a row in another order by its place in the
tile; which BLAS kernels do so depends on the processor. Here halves are added until one term is left, by
additions of whole arrays: an element's bits follow from its own terms alone.

At every call of a kernel, and of each function within it, it goes through all members of triton.language to
put its own in their place. Here that is done once a launch, for members that are listed once.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
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


def adapt_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes nothing on a GPU, where the kernels themselves run."""
    from triton.runtime import interpreter

    _sum_in_our_order(interpreter, monkeypatch)
    _patch_the_language_once_a_launch(interpreter, monkeypatch)


def _sum_in_our_order(interpreter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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


def _patch_the_language_once_a_launch(interpreter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tl, is_patched = interpreter.tl, False

    class Scope(interpreter._LangPatchScope):
        def restore(self) -> None:
            nonlocal is_patched
            super().restore()
            is_patched = False

    @lru_cache
    def members(package: Any) -> list[tuple[str, Any]]:
        return [(name, member) for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]

    def patch_lang(function: Any) -> Any:
        """The scope of a launch; of a function within one, which finds everything in place, nothing."""
        nonlocal is_patched
        if is_patched:
            return None
        is_patched, scope = True, Scope()
        for package in (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base):
            for name, member in members(package):
                interpreter._patch_attr(package, name, member, interpreter.interpreter_builder, scope)
        interpreter._patch_lang_tensor(tl.tensor, scope)
        for package in (tl, tl.core):
            interpreter._patch_lang_core(package, scope)
        return scope

    monkeypatch.setattr(interpreter, "_patch_lang", patch_lang)
