"""Attention's products: against numpy, for vectors of both widths; and bit for bit, whatever is beside."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numba import njit

from tests.helpers.vector_width import load_with_vectors_of


@pytest.fixture(params=[8, 16])
def products(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    (module,) = load_with_vectors_of(
        request.param, ["ee_models.attention.numba_products"], tmp_path, monkeypatch
    )
    return module


def scores_of(products: ModuleType, queries: Any, keys: Any, slots: Any) -> Any:
    dots, num_queries, num_keys = products.dots, products.QUERIES, products.KEYS

    @njit
    def run(queries: Any, keys: Any, slots: Any, out: Any) -> None:
        of_keys = (keys.ctypes.data, keys.strides[0])
        for i in range(0, len(queries), num_queries):
            of_queries = (queries.ctypes.data + i * queries.strides[0], queries.strides[0])
            for j in range(0, len(slots), num_keys):
                address = out.ctypes.data + i * out.strides[0] + j * out.strides[1]
                dots(
                    of_queries,
                    of_keys,
                    slots.ctypes.data + j * slots.strides[0],
                    queries.shape[1],
                    (address, out.strides[0]),
                )

    out = np.zeros((len(queries), len(slots)), np.float32)
    run(queries, keys, slots, out)
    return out


def sums_of(products: ModuleType, weights: Any, values: Any, slots: Any, before: Any) -> Any:
    add_weighted, num_queries, columns = products.add_weighted, products.QUERIES, products.COLUMNS

    @njit
    def run(weights: Any, values: Any, slots: Any, out: Any) -> None:
        for i in range(0, len(weights), num_queries):
            of_weights = (weights.ctypes.data + i * weights.strides[0], weights.strides[0])
            for d in range(0, out.shape[1], columns):
                of_sums = (out.ctypes.data + i * out.strides[0] + d * out.strides[1], out.strides[0])
                of_values = (values.ctypes.data + d * values.strides[1], values.strides[0])
                add_weighted(of_weights, of_values, slots.ctypes.data, len(slots), of_sums)

    out = before.copy()
    run(weights, values, slots, out)
    return out


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize("num_dims", [16, 64, 128, 40])
def test_dots_are_numpys(products: ModuleType, num_dims: int) -> None:
    queries, keys = normal(2 * products.QUERIES, num_dims), normal(50, num_dims, seed=1)
    slots = np.random.default_rng(2).permutation(50)[: 2 * products.KEYS]
    whole = num_dims // products.KEYS * products.KEYS  # the rest is the caller's
    expected = queries[:, :whole].astype(np.float64) @ keys[slots][:, :whole].astype(np.float64).T
    np.testing.assert_allclose(scores_of(products, queries, keys, slots), expected, atol=3e-5)


def test_a_dots_bits_do_not_depend_on_what_is_beside(products: ModuleType) -> None:
    queries, keys = normal(products.QUERIES, 64), normal(50, 64, seed=1)
    slots = np.arange(products.KEYS)
    found = scores_of(products, queries, keys, slots)
    for shift in range(1, products.KEYS):
        assert (scores_of(products, queries, keys, np.roll(slots, shift)) == np.roll(found, shift, 1)).all()
    for shift in range(1, products.QUERIES):
        turned = np.ascontiguousarray(np.roll(queries, shift, 0))
        assert (scores_of(products, turned, keys, slots) == np.roll(found, shift, 0)).all()


@pytest.mark.parametrize("num_slots", [0, 1, 2, 17, 64])
def test_sums_are_numpys_and_weights_of_zero_add_nothing(products: ModuleType, num_slots: int) -> None:
    weights, values = normal(2 * products.QUERIES, 64), normal(100, 64, seed=1)
    slots, before = np.random.default_rng(2).permutation(100)[:64], normal(2 * products.QUERIES, 64, seed=3)
    few = sums_of(products, weights, values, slots[:num_slots], before)
    expected = before + weights[:, :num_slots].astype(np.float64) @ values[slots[:num_slots]]
    np.testing.assert_allclose(few, expected, atol=3e-5)
    weights[:, num_slots:] = 0
    assert (sums_of(products, weights, values, slots, before) == few).all()
