"""Attention's products: against numpy, for vectors of both widths; and bit for bit, whatever is beside."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numba import njit

from tests.helpers.vector_width import load_with_vectors_of


@pytest.fixture(scope="module", params=[8, 16])
def products(request: pytest.FixtureRequest) -> Iterator[Products]:
    with pytest.MonkeyPatch.context() as patch:
        names = ["ee_models.attention.numba_products"]
        (module,) = load_with_vectors_of(request.param, names, patch)
        yield Products(module)


def rows(array: Any) -> tuple[int, int]:
    return array.ctypes.data, array.strides[0]


NOWHERE = 1 << 40  # an address that may be asked for all the same


def places_of(slots: Any, array: Any) -> Any:
    """Where rows of an array begin, in bytes."""
    return slots * array.strides[0]


class Products:
    """The intrinsics of a module over arrays; compiled once."""

    def __init__(self, module: ModuleType) -> None:
        self.width, self.columns, self.tile = module.WIDTH, module.COLUMNS, module.TILE
        self.most_queries = module.QUERIES
        transpose, score, add_weighted, weigh = (
            getattr(module, name) for name in ("transpose", "score", "add_weighted", "weigh")
        )
        self._transpose = njit(
            lambda keys, size, at, dims, out, asked: transpose(keys, size, at, dims, out, asked, at)
        )
        self._score = njit(lambda num, queries, keys, dims, out: score(num, queries, keys, dims, out))
        self._add = njit(
            lambda num, x, values, size, at, count, by, out, asked: add_weighted(
                num, x, values, size, at, count, by, out, asked, at, 1
            )
        )
        self._weigh = njit(lambda scores, count, at: weigh(scores, count, at, at + 4, at + 8))

    def transposed(self, keys: Any, slots: Any) -> Any:
        """[dims, width] of as many slots."""
        out, places = np.zeros((keys.shape[1], self.width), np.float32), places_of(slots, keys)
        start, at = keys.ctypes.data, places.ctypes.data
        self._transpose(start, keys.itemsize, at, keys.shape[1], rows(out), NOWHERE)
        return out

    def scores(self, queries: Any, keys: Any) -> Any:
        """[queries, columns] by transposed keys [dims, columns]."""
        out = np.zeros((len(queries), self.columns), np.float32)
        self._score(len(queries), rows(queries), rows(keys), len(keys), rows(out))
        return out

    def sums(self, weights: Any, values: Any, slots: Any, factors: Any, before: Any) -> Any:
        out, places = before.copy(), places_of(slots, values)
        start, at, by = values.ctypes.data, places.ctypes.data, factors.ctypes.data
        size, to = values.itemsize, rows(out)
        self._add(len(weights), rows(weights), start, size, at, len(slots), by, to, NOWHERE)
        return out

    def weights(self, scores: Any, count: int, peak: float, total: float) -> tuple[Any, Any]:
        """The weights of a tile's scores; and the new peak, total and factor."""
        weights, state = scores.copy(), np.array([peak, total, np.nan], np.float32)
        self._weigh(weights.ctypes.data, count, state.ctypes.data)
        return weights, state


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize("num_dims", [1, 16, 34, 64, 128])
def test_transposed_keys_are_keys(products: Products, num_dims: int) -> None:
    keys, slots = normal(50, num_dims), np.random.default_rng(2).permutation(50)[: products.width]
    assert (products.transposed(keys, slots) == keys[slots].T).all()


@pytest.mark.parametrize("num_dims", [1, 16, 34, 64])
def test_keys_and_values_in_bfloat16_are_the_numbers_that_they_stand_for(
    products: Products, num_dims: int
) -> None:
    upper = np.random.default_rng(0).integers(0, 1 << 16, (70, num_dims), np.uint16)
    upper[(upper & 0x7F80) == 0x7F80] = 0x3F80  # no NaN: they have no order and no equals
    whole, slots = (upper.astype(np.uint32) << 16).view(np.float32), np.random.default_rng(1).permutation(70)
    found = [products.transposed(keys, slots[: products.width]) for keys in (upper, whole)]
    assert (found[0] == found[1]).all() and (found[0] == whole[slots[: products.width]].T).all()
    halves = np.random.default_rng(0).integers(0x3C00, 0x4100, (70, products.columns), np.uint16)
    values = (halves.astype(np.uint32) << 16).view(np.float32)
    for num in (1, products.most_queries):
        weights, before, factors = normal(num, 64), normal(num, products.columns), np.ones(num, np.float32)
        sums = [products.sums(weights, each, slots[:64], factors, before) for each in (halves, values)]
        assert (sums[0] == sums[1]).all()


@pytest.mark.parametrize("num_dims", [1, 16, 34, 128])
def test_scores_are_numpys(products: Products, num_dims: int) -> None:
    keys = normal(num_dims, products.columns, seed=1)
    for num in range(1, products.most_queries + 1):
        queries = normal(num, num_dims, seed=num)
        expected = queries.astype(np.float64) @ keys
        np.testing.assert_allclose(products.scores(queries, keys), expected, atol=3e-5)


def test_a_scores_bits_do_not_depend_on_what_is_beside(products: Products) -> None:
    queries, keys = normal(products.most_queries, 64), normal(64, products.columns, seed=1)
    found = products.scores(queries, keys)
    for i, query in enumerate(queries):
        for shift in (0, 1, products.width, products.columns - 1):
            turned = np.ascontiguousarray(np.roll(keys, shift, 1))
            assert (products.scores(query[None], turned) == np.roll(found[i], shift)).all()


@pytest.mark.parametrize("num_slots", [0, 1, 2, 17, 64])
def test_sums_are_numpys_and_weights_of_zero_add_nothing(products: Products, num_slots: int) -> None:
    values, slots = normal(100, products.columns, seed=1), np.random.default_rng(2).permutation(100)[:64]
    for num in range(1, products.most_queries + 1):
        weights, before = normal(num, 64, seed=num), normal(num, products.columns, seed=num + 100)
        factors = np.random.default_rng(num).random(num, np.float32)
        few = products.sums(weights, values, slots[:num_slots], factors, before)
        shrunk = factors[:, None].astype(np.float64) * before
        expected = shrunk + weights[:, :num_slots].astype(np.float64) @ values[slots[:num_slots]]
        np.testing.assert_allclose(few, expected, atol=3e-5)
        weights[:, num_slots:] = 0
        assert (products.sums(weights, values, slots, factors, before) == few).all()
        alone = products.sums(weights[-1:], values, slots, factors[-1:], before[-1:])
        assert (alone == few[-1]).all()


@pytest.mark.parametrize("count", [-3, 0, 1, 15, 16, 17, 63, 64])
@pytest.mark.parametrize("peak", [-1e30, 0.5, 9.0])
def test_weights_are_a_softmaxs_and_only_of_what_is_seen(products: Products, count: int, peak: float) -> None:
    scores = 3 * normal(products.tile)
    seen = scores[: max(count, 0)].astype(np.float64)
    scores[max(count, 0) :] = np.nan
    weights, (new_peak, total, factor) = products.weights(scores, count, peak, 2.0)
    expected = max([np.float32(peak), *scores[: max(count, 0)]])
    assert new_peak == expected
    np.testing.assert_allclose(weights[: len(seen)], np.exp(seen - expected), rtol=1e-6)
    assert (weights[len(seen) :] == 0).all()
    # Of a peak that is not there yet exp32 is not 0, but its least number: what it shrinks is 0.
    np.testing.assert_allclose(factor, np.exp(np.float64(np.float32(peak)) - expected), rtol=1e-6, atol=1e-37)
    np.testing.assert_allclose(total, 2.0 * factor + np.exp(seen - expected).sum(), rtol=1e-6)
