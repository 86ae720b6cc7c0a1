"""int8 weights in the product of a GPU: against a twin in torch, in Triton's interpreter where there is no
GPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from ee_models.kernels import triton_int8, triton_linear  # noqa: E402
from ee_models.kernels.triton_int8 import Int8Linear, quantize  # noqa: E402
from ee_models.quantized import quantized_linear  # noqa: E402
from tests.helpers.sweeps import sweep  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 8e-3}
# (out, in): smaller than a block, several parts of which the last is not full, outputs that fill no block.
SHAPES = [(1, 1), (7, 13), (130, 300), (40, 1601)]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def twin(layer: Int8Linear, x: Tensor, bias: Tensor | None) -> Tensor:
    found = (x.double() @ layer.weight.double().T) * layer.scales.double()
    return found if bias is None else found + bias.double()


@sweep("shape, dtype, with_bias", itertools.product(SHAPES, TOLERANCE, [False, True]), 3)
def test_the_product_equals_its_twin_for_few_rows_and_for_many(
    shape: tuple[int, int], with_bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = randn(*shape, dtype=dtype) / shape[1] ** 0.5
    bias = randn(shape[0], dtype=dtype, seed=1) if with_bias else None
    layer = Int8Linear(weight, bias)
    layer._step = 17  # outputs that are widened at once
    x = randn(70, shape[1], dtype=dtype, seed=2)
    expected = twin(layer, x, bias)
    for rows in (0, 1, 16, 64, 65, 70):
        got = layer(x[:rows])
        assert got.dtype == dtype and got.shape == (rows, shape[0])
        # Many rows are rounded once more, before they are scaled.
        tolerance = TOLERANCE[dtype] * (1 if rows <= triton_int8._MAX_ROWS else 2)
        torch.testing.assert_close(got.double(), expected[:rows], atol=tolerance, rtol=tolerance)
    assert layer.weight.dtype == torch.int8
    assert layer.num_bytes == weight.numel() + 4 * shape[0] + (0 if bias is None else bias.nbytes)


@pytest.mark.parametrize("shape", [(7, 13), (40, 1601)])
def test_exact_rows_keep_their_bits_among_any_others(shape: tuple[int, int]) -> None:
    weight, x = randn(*shape, dtype=torch.bfloat16), randn(80, shape[1], dtype=torch.bfloat16, seed=3)
    layer = quantized_linear(weight, None, 8, exact=True)
    together = layer(x)
    assert layer.row_invariant and not quantized_linear(weight, None, 8).row_invariant
    for rows in (1, 2, 16, 17, 64, 65):
        assert torch.equal(layer(x[:rows]), together[:rows])


def test_few_rows_never_widen_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole weights of another dtype would be what makes int8 slow."""
    layer = Int8Linear(randn(64, 128, dtype=torch.bfloat16), None)
    monkeypatch.setattr(triton_int8.F, "linear", None)
    assert layer(randn(triton_int8._MAX_ROWS, 128, dtype=torch.bfloat16)).shape[1] == 64
    with pytest.raises(TypeError):
        layer(randn(triton_int8._MAX_ROWS + 1, 128, dtype=torch.bfloat16))


def test_weights_are_rounded_to_the_nearest_of_their_output(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = randn(50, 96)
    weight[3] = 0.0
    weight[4] *= 1e-20
    whole, scales = quantize(weight)
    assert whole.abs().max() == 127 and whole[3].abs().max() == 0 and scales[3] == 1.0
    errors = (whole * scales[:, None] - weight).abs().amax(1)
    assert (errors <= 0.5001 * scales).all()
    monkeypatch.setattr(triton_int8, "_WIDENED_BYTES", 4 * 96 * 7)  # a few outputs at once
    for found, expected in zip(quantize(weight), (whole, scales), strict=True):
        assert torch.equal(found, expected)
    weight[7, 5] = float("inf")
    with pytest.raises(ValueError, match="not finite"):
        quantize(weight)


def test_parts_with_programs_of_their_own_are_scaled_as_those_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = Int8Linear(randn(40, 1601) / 40, randn(40, seed=1))
    assert layer._launch.num_parts > 1
    x = randn(20, 1601, seed=5)
    apart = layer(x)
    monkeypatch.setattr(triton_linear, "_MAX_ROWS_IN_PARTS", 0)
    assert torch.equal(layer(x), apart)
