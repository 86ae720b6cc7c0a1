"""The row-invariant linear layer for GPUs: what it computes, and a row's bits among any others; in Triton's
interpreter where there is no GPU."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

triton = pytest.importorskip("triton")

from ee_models.kernels import triton_linear  # noqa: E402
from ee_models.kernels.triton_linear import InvariantLinear  # noqa: E402
from tests.gpu.test_kernels_triton import poisoned  # noqa: E402, F401 - a fixture
from tests.helpers.sweeps import sweep  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# (out, in): smaller than a block, neither a multiple of one, a single part, several parts of which the last
# is not full.
SHAPES = [(1, 1), (7, 13), (96, 48), (130, 300), (70, 1100), (40, 1601)]
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def layer_of(
    shape: tuple[int, int], with_bias: bool, dtype: torch.dtype
) -> tuple[InvariantLinear, Tensor, Tensor | None]:
    weight, bias = (
        randn(*shape, dtype=dtype) / shape[1] ** 0.5,
        (randn(shape[0], dtype=dtype, seed=1) if with_bias else None),
    )
    return InvariantLinear(weight, bias), weight, bias


@sweep("shape, dtype, with_bias", itertools.product(SHAPES, TOLERANCE, [False, True]), 5)
def test_a_linear_equals_the_product_it_stands_for(
    shape: tuple[int, int], with_bias: bool, dtype: torch.dtype
) -> None:
    layer, weight, bias = layer_of(shape, with_bias, dtype)
    x = randn(66, shape[1], dtype=dtype, seed=2)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    for rows in (0, 1, 17, 66):
        got = layer(x[:rows])
        assert got.dtype == dtype and got.is_contiguous()
        torch.testing.assert_close(
            got.double(), expected[:rows], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )
    assert layer.num_bytes == weight.nbytes + (bias.nbytes if bias is not None else 0)
    assert layer.row_invariant


def differing(layer: InvariantLinear, x: Tensor) -> list[str]:
    """Passes in which a row of x [70, in] has other bits than among all of them."""
    together, found = layer(x), []
    for rows in (1, 2, 3, 8, 15, 16, 17, 40, 64, 65):
        if not torch.equal(layer(x[:rows]), together[:rows]):
            found.append(f"{rows} rows")
    for i in (1, 15, 16, 69):
        if not torch.equal(layer(x[i : i + 1])[0], together[i]):
            found.append(f"row {i} alone")
    order = torch.randperm(70, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    if not torch.equal(layer(x[order]), together[order]):
        found.append("another order")
    return found


@sweep(
    "shape, dtype",
    [
        ((7, 13), torch.float32),
        ((70, 1100), torch.float32),
        ((40, 1601), torch.bfloat16),
        ((70, 1100), torch.float16),
    ],
    2,
)
def test_a_row_has_the_same_bits_among_any_number_of_others(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    layer, _, _ = layer_of(shape, True, dtype)
    assert not differing(layer, randn(70, shape[1], dtype=dtype, seed=3))


class CutByRows(InvariantLinear):
    """Cuts the inputs by the number of rows, as libraries do: few rows get parts of their own."""

    def __call__(self, x: Tensor) -> Tensor:
        self._launch = replace(self._launch, part=512, num_parts=3) if x.shape[0] <= 16 else WHOLE
        return super().__call__(x)


WHOLE = triton_linear.Launch(block_out=32, block_in=64, part=1152, num_parts=1, num_stages=4)


def test_an_order_of_sums_that_varies_with_the_number_of_rows_is_seen() -> None:
    weight = randn(70, 1100) / 1100**0.5
    assert {"1 rows", "16 rows", "row 69 alone"} <= set(
        found := differing(CutByRows(weight, None), randn(70, 1100, seed=3))
    )
    assert not {"17 rows", "65 rows", "another order"} & set(found)


@pytest.mark.parametrize("shape", [(70, 1100), (40, 1601), (130, 2048)])
def test_a_part_with_programs_of_its_own_adds_up_as_one_that_comes_in_turn(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, _, _ = layer_of(shape, True, torch.float32)
    assert layer._launch.num_parts > 1
    x = randn(20, shape[1], seed=5)
    apart = layer(x)
    monkeypatch.setattr(triton_linear, "_MAX_ROWS_IN_PARTS", 0)
    assert torch.equal(layer(x), apart)


def test_rows_may_lie_apart() -> None:
    layer, _, _ = layer_of((70, 1100), False, torch.float32)
    wide = randn(10, 1300, seed=6)
    assert torch.equal(layer(wide[2:9, 100:1200]), layer(wide[2:9, 100:1200].contiguous()))


def test_the_weights_shape_alone_says_how_a_product_is_cut_up() -> None:
    """Parts cover all inputs, are whole blocks, and are cut where a weight has too few outputs to keep a GPU
    busy."""
    for dtype in TOLERANCE:
        for out_features in (1, 64, 576, 4096, 28672, 128256):
            for in_features in (1, 48, 576, 1536, 4096, 14336):
                launch = triton_linear.launch_of(out_features, in_features, dtype)
                assert launch.part % launch.block_in == 0
                assert (launch.num_parts - 1) * launch.part < in_features <= launch.num_parts * launch.part
                assert launch.num_parts == 1 or launch.part >= triton_linear._MIN_PART
                assert launch.num_parts <= triton_linear._MAX_PARTS
    assert triton_linear.launch_of(4096, 4096, torch.bfloat16).num_parts == 4
    assert triton_linear.launch_of(28672, 4096, torch.bfloat16).num_parts == 1
