"""Products in int8, for vectors of both widths and every way to multiply bytes: against whole numbers in
float64, bit for bit whatever is beside, and the same bits on every CPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from llvmlite import binding
from torch import Tensor

from ee_models.int8_linear import Int8Linear
from ee_models.kernels import numba_vectors
from ee_models.kernels.threads import KernelThreads
from tests.helpers.support import threads
from tests.helpers.vector_width import load_with_vectors_of

INT8 = "ee_models.kernels.numba_int8"
MODULES = ["ee_models.kernels.numba_gemm", INT8, "ee_models.int8_linear"]
FEATURES = binding.get_host_cpu_features()
CALLED = {"vnni": ["vpdpbusd"], "pairs": ["pmadd"], "plain": []}
SHAPES = [(3 * 32, 48), (33, 5), (1, 1), (31, 64), (40, 1538)]


def ways() -> list[tuple[int, str]]:
    """(width of vectors, how bytes are multiplied) that this CPU can run."""
    needed = {
        (8, "pairs"): "avx2",
        (16, "pairs"): "avx512bw",
        (8, "vnni"): "avxvnni",
        (16, "vnni"): "avx512vnni",
    }
    return [(8, "plain"), (16, "plain"), *(way for way, feature in needed.items() if FEATURES.get(feature))]


@pytest.fixture(params=ways(), ids=str, scope="module")
def modules(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[ModuleType]]:
    width, dot = request.param
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("compiled")
        loaded = load_with_vectors_of(width, MODULES, cache, patch, {INT8: {"DOT": dot}})[1:]
        (code,) = loaded[0].multiply.inspect_llvm().values()
        assert [name for name in ("vpdpbusd", "pmadd") if name in code] == CALLED[dot]
        yield loaded


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def products(weight: Tensor, bias: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Of a weight in whole numbers and x as it is, in float64; and how far off half a unit of x's second term
    in each input may be, with what float32 rounds away."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    held = (weight / scale).round().double() * scale.double()
    unit = x.abs().amax(1, keepdim=True).double() / 127 / 254
    exact = x.double() @ held.T + bias.double()
    return exact, 0.501 * unit * held.abs().sum(1) + 1e-6 * (exact.abs() + bias.abs())


def test_products_are_those_of_whole_numbers_and_a_rows_bits_its_own(modules: list[ModuleType]) -> None:
    kernel, int8_linear = modules
    assert kernel.COLUMNS in (16, 32)
    for num_threads in (1, 3):
        for num_outputs, num_inputs in SHAPES:
            weight, bias, x = (
                randn(num_outputs, num_inputs),
                randn(num_outputs, seed=1),
                randn(40, num_inputs),
            )
            x *= torch.logspace(-3, 3, 40)[:, None]  # a scale of its own for each token
            with threads(num_threads):
                layer = int8_linear.Int8Linear(weight, bias, KernelThreads())
            out, (expected, tolerance) = layer(x), products(weight, bias, x)
            assert bool(((out - expected).abs() <= tolerance).all())
            for rows in range(0, 41, 1 if num_inputs < 100 else 7):
                assert torch.equal(layer(x[:rows]), out[:rows])
                assert torch.equal(layer(x[40 - rows :]), out[40 - rows :])


def test_bits_are_the_same_on_every_cpu(modules: list[ModuleType]) -> None:
    assert modules[1].Int8Linear is not Int8Linear
    for num_outputs, num_inputs in SHAPES:
        weight, bias, x = randn(num_outputs, num_inputs), randn(num_outputs, seed=1), randn(7, num_inputs)
        layers = [kind(weight, bias, KernelThreads()) for kind in (Int8Linear, modules[1].Int8Linear)]
        assert torch.equal(layers[0](x), layers[1](x))


def test_the_largest_numbers_do_not_overflow(modules: list[ModuleType]) -> None:
    num_inputs = modules[0].MAX_INPUTS
    signs = torch.tensor([[1.0], [-1.0]])
    layer = modules[1].Int8Linear(signs.expand(2, num_inputs), None, KernelThreads())
    torch.testing.assert_close(layer(3.0 * signs.expand(2, num_inputs)), 3.0 * num_inputs * signs @ signs.T)
    with pytest.raises(ValueError, match="set quantization to null"):
        modules[1].Int8Linear(torch.ones(1, num_inputs + 1), None, KernelThreads())


def test_zeros_give_the_bias_and_weights_of_zero_nothing(modules: list[ModuleType]) -> None:
    weight, bias = randn(33, 7), randn(33, seed=1)
    weight[3] = 0.0
    layer = modules[1].Int8Linear(weight, bias, KernelThreads())
    x = torch.stack([torch.zeros(7), torch.ones(7)])
    assert torch.equal(layer(x)[0], bias)
    assert layer(x)[1, 3] == bias[3]


def test_nothing_is_written_beside_the_outputs(modules: list[ModuleType]) -> None:
    """Outputs, terms and scales lie between bytes that are looked at again."""
    layer, x = modules[1].Int8Linear(randn(33, 7), None, KernelThreads()), randn(5, 7)
    expected = layer(x)
    guarded: list[Tensor] = []

    class Input(torch.Tensor):
        def float(self) -> Input:
            return self

        def contiguous(self) -> Input:
            return self

        def new_empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            around = torch.empty(shape[0] + 2, *shape[1:], dtype=dtype)
            around.view(torch.uint8).fill_(99)
            guarded.append(around)
            return around[1:-1]

    found = layer(x.as_subclass(Input))
    assert torch.equal(found, expected) and len(guarded) == 3
    for around in guarded:
        assert bool((around[[0, -1]].contiguous().view(torch.uint8) == 99).all())


def test_what_is_not_finite_stays_so_in_its_row_alone(modules: list[ModuleType]) -> None:
    layer, x = modules[1].Int8Linear(randn(33, 9), None, KernelThreads()), randn(4, 9)
    expected = layer(x)
    for value in (torch.nan, torch.inf, -torch.inf):
        broken = x.clone()
        broken[1, 7] = value
        found = layer(broken)
        assert bool(found[1].isnan().all()) and torch.equal(found[[0, 2, 3]], expected[[0, 2, 3]])
        weight = randn(33, 9)
        weight[2, 3] = value
        with pytest.raises(ValueError, match=r"not a finite number.*set quantization to null"):
            modules[1].Int8Linear(weight, None, KernelThreads())


def test_the_smallest_weights_stay_within_int8(modules: list[ModuleType]) -> None:
    weight = torch.tensor([[3e-45, -3e-45], [1e-40, 5e-41], [1.0, -0.5]])
    out = modules[1].Int8Linear(weight, None, KernelThreads())(torch.ones(1, 2))
    torch.testing.assert_close(out, weight.sum(1)[None], atol=1e-38, rtol=0.01)


def test_weights_are_packed_in_pieces(modules: list[ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias = randn(200, 10), randn(200, seed=1)
    whole = modules[0].pack(weight, bias)
    monkeypatch.setattr(modules[0], "_PACKED_AT_ONCE", 2)
    assert torch.equal(modules[0].pack(weight, bias), whole)


def test_code_is_for_what_numba_compiles_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba_vectors.config, "CPU_FEATURES", "+sse2,-avx512vnni")
    assert numba_vectors.compiles_for("sse2")
    assert not any(map(numba_vectors.compiles_for, ("avx512vnni", "avx2", "sse")))
    monkeypatch.setattr(numba_vectors.config, "CPU_FEATURES", None)
    monkeypatch.setattr(numba_vectors.config, "ENABLE_AVX", 0)
    assert not numba_vectors.compiles_for("avx2")


def test_bfloat16_comes_out_as_it_went_in(modules: list[ModuleType]) -> None:
    weight, x = randn(33, 7).bfloat16(), randn(5, 7).bfloat16()
    out = modules[1].Int8Linear(weight, None, KernelThreads())(x)
    assert out.dtype == torch.bfloat16
    wide = modules[1].Int8Linear(weight.float(), None, KernelThreads())(x.float())
    assert torch.equal(out, wide.bfloat16())


def test_inputs_of_another_width_or_dtype_are_refused(modules: list[ModuleType]) -> None:
    layer = modules[1].Int8Linear(randn(33, 7), None, KernelThreads())
    for x in (randn(5, 8), randn(5, 7).double()):
        with pytest.raises(AssertionError):
            layer(x)
