"""Products in bfloat16, by a CPU's tiles or its vectors of pairs, where it has them: against float64, and bit
for bit whatever is beside; and what is taken where it has none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from ee_models.kernels import numba_narrow, numba_pairs, numba_tiles
from ee_models.kernels.threads import KernelThreads
from ee_models.linear_factory import LinearMaker
from ee_models.narrow_linear import NarrowLinear
from ee_models.panel_linear import PanelLinear
from tests.helpers.bfloat16 import needs_bfloat16
from tests.helpers.guarded import runs_within_bounds
from tests.helpers.support import threads

CPU = torch.device("cpu")
SHAPES = [(3 * 32, 48), (33, 5), (1, 1), (31, 64), (40, 1538), (32, 31), (65, 33), (1, 100)]
TOKENS = 70  # matrix tiles of two turns and more, and several of pairs


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make(shape: tuple[int, int]) -> NarrowLinear:
    return NarrowLinear(randn(*shape), randn(shape[0], seed=1), 16, KernelThreads())


@needs_bfloat16
def test_products_are_those_of_rounded_numbers_and_a_rows_bits_its_own() -> None:
    for num_threads in (1, 3):
        for shape in SHAPES:
            with threads(num_threads):
                layer = make(shape)
            x = randn(TOKENS, shape[1], seed=2) * torch.logspace(-3, 3, TOKENS)[:, None]
            weight, bias, rounded = randn(*shape).bfloat16(), randn(shape[0], seed=1), x.bfloat16()
            out = layer(x)
            size = rounded.double().abs() @ weight.double().abs().T + bias.abs()
            expected = rounded.double() @ weight.double().T + bias
            rounding = 2**-22 * shape[1] ** 0.5  # of as many sums, one after another
            assert bool(((out - expected).abs() <= rounding * size).all())
            for rows in range(0, TOKENS + 1, 1 if shape[1] < 100 else 7):
                assert torch.equal(layer(x[:rows]), out[:rows])
                assert torch.equal(layer(x[TOKENS - rows :]), out[TOKENS - rows :])


@needs_bfloat16
def test_nothing_is_written_beside_the_outputs() -> None:
    layer = make((33, 7))
    for num_tokens in (1, 5, 16, 17, 40):
        assert runs_within_bounds(layer, randn(num_tokens, 7), num_tensors=2)


@needs_bfloat16
def test_what_is_not_finite_stays_so_in_its_row_alone() -> None:
    layer, x = make((33, 9)), randn(4, 9)
    expected = layer(x)
    for value in (torch.nan, torch.inf, -torch.inf):
        broken = x.clone()
        broken[1, 7] = value
        found = layer(broken)
        assert not bool(found[1].isfinite().any()) and torch.equal(found[[0, 2, 3]], expected[[0, 2, 3]])


@needs_bfloat16
def test_a_weight_is_held_in_16_bits_and_packed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias = randn(200, 10), randn(200, seed=1)
    whole = numba_narrow.pack(16, weight, bias)
    monkeypatch.setattr(numba_narrow, "_PACKED_AT_ONCE", 2)
    assert torch.equal(numba_narrow.pack(16, weight, bias), whole)
    assert numba_narrow.pack(16, randn(64, 320), None).nbytes == 64 * (320 * 2 + 4)


@needs_bfloat16
def test_a_model_in_bfloat16_is_multiplied_in_it_and_others_as_before() -> None:
    weight, bias, x = randn(33, 40).bfloat16().float(), randn(33, seed=1), randn(5, 40)
    layer = LinearMaker(CPU, torch.float32, weights_dtype=torch.bfloat16)(weight, bias)
    assert isinstance(layer, NarrowLinear) and layer.bits == 16 and layer.row_invariant
    torch.testing.assert_close(layer(x), x.bfloat16().float() @ weight.T + bias)
    assert isinstance(LinearMaker(CPU, torch.float32)(weight, bias), PanelLinear)
    quantized = LinearMaker(CPU, torch.float32, "int8", weights_dtype=torch.bfloat16)(weight, bias)
    assert isinstance(quantized, NarrowLinear) and quantized.bits == 8


@pytest.fixture
def _asks_again() -> Iterator[None]:
    numba_tiles.can_multiply.cache_clear()
    yield
    numba_tiles.can_multiply.cache_clear()


@pytest.mark.usefixtures("_asks_again")
def test_without_such_products_weights_in_bfloat16_are_multiplied_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(numba_narrow, "HAS_TILES", False)
    monkeypatch.setattr(numba_pairs, "HAS_PAIRS", False)
    weight, x = randn(33, 40).bfloat16().float(), randn(5, 40)
    layer = LinearMaker(CPU, torch.float32, weights_dtype=torch.bfloat16)(weight, None)
    assert isinstance(layer, PanelLinear) and layer.panels.dtype == torch.bfloat16
    torch.testing.assert_close(layer(x), x @ weight.T)
    with pytest.raises(ValueError, match="no products in bfloat16 here"):
        NarrowLinear(weight, None, 16, KernelThreads())


@pytest.mark.parametrize(
    ("has_tiles", "system", "machine", "status", "allowed"),
    [
        (True, "linux", "x86_64", 0, True),
        (True, "linux", "x86_64", -1, False),
        (True, "win32", "x86_64", 0, False),
        (True, "linux", "aarch64", 0, False),
        (False, "linux", "x86_64", 0, False),
    ],
)
@pytest.mark.usefixtures("_asks_again")
def test_tiles_are_used_where_the_cpu_has_them_and_the_system_allows_it(
    has_tiles: bool, system: str, machine: str, status: int, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Library:
        def syscall(self, *arguments: int) -> int:
            assert arguments == (158, 0x1023, 18)
            return status

    monkeypatch.setattr(numba_tiles, "HAS_TILES", has_tiles)
    monkeypatch.setattr(numba_tiles.sys, "platform", system)
    monkeypatch.setattr(numba_tiles.platform, "machine", lambda: machine)
    monkeypatch.setattr(numba_tiles.ctypes, "CDLL", lambda name: Library())
    assert numba_tiles.can_multiply() is allowed
