"""Products over panels, for vectors of both widths: against float64, and bit for bit whatever is beside."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

from ee_models.kernels.threads import KernelThreads
from tests.helpers.guarded import runs_within_bounds
from tests.helpers.support import default_dtype, threads
from tests.helpers.vector_width import load_with_vectors_of

MODULES = ["ee_models.kernels.numba_gemm", "ee_models.panel_linear"]


@pytest.fixture(params=[8, 16], scope="module")
def modules(request: pytest.FixtureRequest) -> Iterator[list[ModuleType]]:
    with pytest.MonkeyPatch.context() as patch:
        yield load_with_vectors_of(request.param, MODULES, patch)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_products_are_float64s_and_a_rows_bits_its_own(modules: list[ModuleType]) -> None:
    gemm, panel_linear = modules
    assert gemm.COLUMNS in (16, 32)
    for num_threads in (1, 2, 5):
        for num_outputs, num_inputs in ((3 * 32, 48), (33, 5), (1, 1), (31, 64)):
            weight, bias, x = randn(num_outputs, num_inputs), randn(num_outputs), randn(40, num_inputs)
            with threads(num_threads):
                layer = panel_linear.PanelLinear(weight, bias, KernelThreads())
            layer_out = layer(x)
            expected = x.double() @ weight.double().T + bias.double()
            torch.testing.assert_close(layer_out, expected.float(), atol=1e-4, rtol=0)
            for rows in range(41):
                assert torch.equal(layer(x[:rows]), layer_out[:rows])
                assert torch.equal(layer(x[40 - rows :]), layer_out[40 - rows :])


def test_a_weight_of_bfloat16s_numbers_lies_in_half_the_bytes_and_gives_the_same_bits(
    modules: list[ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    gemm, panel_linear = modules
    for num_outputs, num_inputs in ((3 * 32, 48), (33, 5), (1, 1)):
        weight, bias, x = randn(num_outputs, num_inputs).bfloat16().float(), randn(num_outputs), randn(40, 99)
        x = x[:, :num_inputs].contiguous()
        small = panel_linear.PanelLinear(weight, bias, KernelThreads())
        with monkeypatch.context() as patch:
            patch.setattr(gemm, "_fits_bfloat16", lambda _: False)
            whole = panel_linear.PanelLinear(weight, bias, KernelThreads())
        assert small.panels.dtype == torch.bfloat16 and whole.panels.dtype == torch.float32
        assert whole.num_bytes - small.num_bytes == small.panels.nbytes
        assert torch.equal(small(x), whole(x))


def test_a_weight_that_bfloat16_would_round_stays_as_it_is(modules: list[ModuleType]) -> None:
    weight = randn(40, 7).bfloat16().float()
    weight[39, 6] = 1 + 2**-8
    assert modules[1].PanelLinear(weight, None, KernelThreads()).panels.dtype == torch.float32


def test_nothing_is_written_beside_the_outputs(modules: list[ModuleType]) -> None:
    layer = modules[1].PanelLinear(randn(33, 7), None, KernelThreads())
    assert runs_within_bounds(layer, randn(5, 7), num_tensors=1)


def test_the_default_dtype_of_the_process_does_not_matter(modules: list[ModuleType]) -> None:
    panel_linear, (weight, x) = modules[1], (randn(33, 7), randn(5, 7))
    expected = panel_linear.PanelLinear(weight, None, KernelThreads())(x)
    with default_dtype(torch.bfloat16):
        assert torch.equal(panel_linear.PanelLinear(weight, None, KernelThreads())(x), expected)


def test_inputs_of_another_width_or_dtype_are_refused(modules: list[ModuleType]) -> None:
    layer = modules[1].PanelLinear(randn(33, 7), None, KernelThreads())
    for x in (randn(5, 8), randn(5, 7).double()):
        with pytest.raises(AssertionError):
            layer(x)
