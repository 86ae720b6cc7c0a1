"""Products in int8 and int4, for vectors of both widths and every way to multiply: against whole numbers in
float64, bit for bit whatever is beside, and the same bits on every CPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from types import ModuleType
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cache import whole_numbers
from ee_models.kernels import numba_int4, numba_int8, numba_narrow, numba_tiles, numba_vectors
from ee_models.kernels.threads import KernelThreads
from ee_models.narrow_linear import NarrowLinear
from tests.helpers.guarded import runs_within_bounds
from tests.helpers.support import threads
from tests.helpers.vector_width import load_with_vectors_of

Bits = Literal[8, 4]
INT8, INT8_TILES = "ee_models.kernels.numba_int8", "ee_models.kernels.numba_int8_tiles"
MODULES = [
    "ee_models.kernels.numba_gemm",
    "ee_models.kernels.numba_tiles",
    "ee_models.kernels.numba_bfloat16_tiles",
    "ee_models.kernels.numba_rounding",
    INT8,
    INT8_TILES,
    "ee_models.kernels.numba_int4",
    "ee_models.kernels.numba_narrow",
    "ee_models.narrow_linear",
]
CALLED = {"vnni": ["vpdpbusd", "pmadd"], "pairs": ["pmadd"], "plain": []}
# Of one group and of several, of one to four blocks, of which inputs fill the last or not.
SHAPES = [(3 * 32, 48), (33, 5), (1, 1), (31, 64), (40, 1538), (32, 31), (31, 576), (65, 450), (1, 100)]


def ways() -> list[tuple[int, str]]:
    """(width of vectors, how int8 is multiplied) that numba compiles for."""
    needed = {
        (8, "pairs"): "avx2",
        (16, "pairs"): "avx512bw",
        (8, "vnni"): "avxvnni",
        (16, "vnni"): "avx512vnni",
    }
    can_run = (way for way, feature in needed.items() if numba_vectors.compiles_for(feature))
    return [(8, "plain"), (16, "plain"), *can_run]


def quick(way: tuple[int, str]) -> bool:
    """All but those of CPUs with AVX-512 that lack words and bytes, as Xeon Phi did, or VNNI, as Skylake did,
    and of half a vector with VNNI where this one has it for a whole one: vectors of either width, and each
    kind of product, are among the others."""
    is_half = way == (8, "vnni") and (16, "vnni") in ways()
    return not is_half and way not in ((16, "plain"), (16, "pairs"))


@pytest.fixture(
    params=[pytest.param(way, id=str(way), marks=() if quick(way) else pytest.mark.slow) for way in ways()],
    scope="module",
)
def modules(request: pytest.FixtureRequest) -> Iterator[list[ModuleType]]:
    """numba_int8, numba_narrow and narrow_linear."""
    width, dot = request.param
    with pytest.MonkeyPatch.context() as patch:
        constants: dict[str, dict[str, Any]] = {
            INT8: {"DOT": dot, "NUMBER_BYTES": 2 if dot == "pairs" else 1},
            **({} if dot == "vnni" else {INT8_TILES: {"HAS_TILES": False}}),  # as CPUs without VNNI
        }
        loaded = load_with_vectors_of(width, MODULES, patch, constants)
        int8, both, linear = loaded[MODULES.index(INT8)], *loaded[-2:]
        code = both.multiply.compiled.inspect_llvm()
        assert [name for name in ("vpdpbusd", "pmadd") if name in code] == CALLED[dot]
        yield [int8, both, linear]


@pytest.fixture(params=[8, 4], ids="int{}".format)
def bits(request: pytest.FixtureRequest) -> Bits:
    return request.param  # type: ignore[no-any-return]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def int4_weight(num_outputs: int, num_inputs: int) -> Tensor:
    """One that int4 holds as it is, each group of an output on a scale of its own."""
    weight, generator = torch.empty(num_outputs, num_inputs), torch.Generator().manual_seed(2)
    for first in range(0, num_inputs, numba_int4.GROUP):
        group = weight[:, first : first + numba_int4.GROUP]
        q = torch.randint(0, 16, group.shape, generator=generator).float()
        q[:, -1], q[:, 0] = 15, 0
        scale, minimum = torch.rand(2, num_outputs, 1, generator=generator).half().float()
        group.copy_((scale + 0.5).half() * q - (6 * minimum).half())
    return weight


def products(bits: Bits, weight: Tensor, bias: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Of a weight in whole numbers and x as it is, in float64; and how far off half a unit of x in each input
    may be, with what float32 rounds away."""
    held, unit, x = weight.double(), x.abs().amax(1, keepdim=True).double().expand_as(x) / 32767, x.double()
    if bits == 8:
        held, x = (mixed(each) for each in (weight, x.float()))
        mantissa, exponent = torch.frexp(group_peaks(held, weight.shape[1]).double() / 127)
        scale = torch.ldexp((mantissa * 2048).round() / 2048, exponent)  # the 11 bits of a float16
        unit = group_peaks(x, weight.shape[1]).double() / 127
        held, x = (held / scale).round() * scale / numba_int8.BLOCK, x.double()
    exact = x @ held.T + bias.double()
    size = x.abs() @ held.abs().T
    return exact, 0.501 * unit @ held.abs().T + 1e-5 * (size + bias.abs())


def mixed(rows: Tensor) -> Tensor:
    blocks = F.pad(rows, (0, -rows.shape[1] % numba_int8.BLOCK)).view(len(rows), -1, numba_int8.BLOCK)
    return whole_numbers.mixed(blocks).flatten(1)


def group_peaks(numbers: Tensor, num_inputs: int) -> Tensor:
    """The largest size of each group of a mixed row, for each of its numbers."""
    groups = numbers.abs().split(numba_int8.group_size(num_inputs), 1)
    return torch.cat([group.amax(1, keepdim=True).expand_as(group) for group in groups], 1)


def test_products_are_those_of_whole_numbers_and_a_rows_bits_its_own(
    modules: list[ModuleType], bits: Bits
) -> None:
    int8, _, narrow_linear = modules
    assert int8.COLUMNS in (16, 32)
    for num_threads in (1, 3):
        for num_outputs, num_inputs in SHAPES:
            make_weight = randn if bits == 8 else int4_weight
            weight, bias, x = (
                make_weight(num_outputs, num_inputs),
                randn(num_outputs, seed=1),
                randn(40, num_inputs),
            )
            x *= torch.logspace(-3, 3, 40)[:, None]  # a scale of its own for each token
            with threads(num_threads):
                layer = narrow_linear.NarrowLinear(weight, bias, bits, KernelThreads())
            out, (expected, tolerance) = layer(x), products(bits, weight, bias, x)
            assert bool(((out - expected).abs() <= tolerance).all())
            for rows in range(0, 41, 1 if num_inputs < 100 else 7):
                assert torch.equal(layer(x[:rows]), out[:rows])
                assert torch.equal(layer(x[40 - rows :]), out[40 - rows :])


def test_bits_are_the_same_on_every_cpu(modules: list[ModuleType], bits: Bits) -> None:
    assert modules[2].NarrowLinear is not NarrowLinear
    for num_outputs, num_inputs in SHAPES:
        weight, bias, x = randn(num_outputs, num_inputs), randn(num_outputs, seed=1), randn(39, num_inputs)
        layers = [
            kind(weight, bias, bits, KernelThreads()) for kind in (NarrowLinear, modules[2].NarrowLinear)
        ]
        assert torch.equal(layers[0](x), layers[1](x))


@pytest.mark.skipif(numba_narrow.tiles_from() == 0, reason="needs a CPU with AMX, and Linux")
@pytest.mark.parametrize("num_tokens", [1, 2, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100])
def test_matrix_tiles_give_the_bits_of_vectors(num_tokens: int) -> None:
    for num_outputs, num_inputs in SHAPES:
        panels = numba_narrow.pack(8, randn(num_outputs, num_inputs), randn(num_outputs, seed=1))
        x, size = randn(num_tokens, num_inputs), numba_narrow.bytes_per_token(8, num_inputs)
        x *= torch.logspace(-3, 3, num_tokens)[:, None]  # a scale of its own for each token
        terms = torch.empty(num_tokens, size, dtype=torch.uint8)
        numba_narrow.split_tokens(8, x.data_ptr(), num_inputs, terms.data_ptr(), 0, num_tokens)
        outputs = []
        for tiles_from, shares in ((0, 1), (1, 1), (num_tokens, 3), (num_tokens + 1, 1)):
            outputs.append(torch.full((num_tokens, num_outputs), torch.nan))
            for share in range(shares):
                numba_narrow.multiply(
                    *(8, 512, tiles_from, terms.data_ptr(), num_tokens, num_inputs, panels.data_ptr()),
                    *(outputs[-1].data_ptr(), num_outputs, share, shares),
                )
        assert all(torch.equal(out, outputs[0]) for out in outputs)


def test_without_the_systems_leave_there_are_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = randn(33, 70), randn(20, 70)
    expected = NarrowLinear(weight, None, 8, KernelThreads())(x)
    monkeypatch.setattr(numba_tiles, "can_multiply", lambda: False)
    assert numba_narrow.tiles_from() == 0
    assert torch.equal(NarrowLinear(weight, None, 8, KernelThreads())(x), expected)


def test_the_largest_numbers_do_not_overflow(modules: list[ModuleType]) -> None:
    num_inputs, signs = 1 << 17, torch.tensor([[1.0], [-1.0]])
    layer = modules[2].NarrowLinear(signs.expand(2, num_inputs), None, 8, KernelThreads())
    found, of_scale = layer(3.0 * signs.expand(2, num_inputs)), {"rtol": 2**-11, "atol": 0.0}
    torch.testing.assert_close(found, 3.0 * num_inputs * signs @ signs.T, **of_scale)
    is_first = (torch.arange(num_inputs) % numba_int8.BLOCK == 0).float()  # which mixing makes all ones
    layer = modules[2].NarrowLinear(signs * is_first, None, 8, KernelThreads())
    expected = 3.0 * num_inputs / numba_int8.BLOCK * signs @ signs.T
    torch.testing.assert_close(layer(3.0 * signs * is_first), expected, **of_scale)
    largest = torch.finfo(torch.float32).max
    layer = modules[2].NarrowLinear(torch.full((1, 2), largest), None, 8, KernelThreads())
    found = layer(torch.tensor([[0.25, 0.25]]))
    torch.testing.assert_close(found, torch.tensor([[0.5 * largest]]), **of_scale)
    weight = torch.full((2, 2 * numba_int4.GROUP), 15 * 4096.0)  # and so nothing but the largest q
    weight[:, :: numba_int4.GROUP] = 0.0
    layer = modules[2].NarrowLinear(weight, None, 4, KernelThreads())
    torch.testing.assert_close(layer(3.0 * signs.expand(2, len(weight[0]))), 3.0 * signs * weight.sum(1))


def test_zeros_give_the_bias_and_weights_of_zero_nothing(modules: list[ModuleType], bits: Bits) -> None:
    weight, bias = randn(33, 7), randn(33, seed=1)
    weight[3] = 0.0
    layer = modules[2].NarrowLinear(weight, bias, bits, KernelThreads())
    x = torch.stack([torch.zeros(7), torch.ones(7)])
    assert torch.equal(layer(x)[0], bias)
    assert layer(x)[1, 3] == bias[3]


def test_nothing_is_written_beside_the_outputs(modules: list[ModuleType], bits: Bits) -> None:
    layer = modules[2].NarrowLinear(randn(33, 7), None, bits, KernelThreads())
    for num_tokens in (5, 19):
        assert runs_within_bounds(layer, randn(num_tokens, 7), num_tensors=2)


def test_what_is_not_finite_stays_so_in_its_row_alone(modules: list[ModuleType], bits: Bits) -> None:
    layer = modules[2].NarrowLinear(randn(33, 9), None, bits, KernelThreads())
    for value, num_tokens in product((torch.nan, torch.inf, -torch.inf), (4, 18)):
        x = randn(num_tokens, 9)
        expected, others = layer(x), [token for token in range(num_tokens) if token != 1]
        x[1, 7] = value
        found = layer(x)
        assert bool(found[1].isnan().all()) and torch.equal(found[others], expected[others])


def test_weights_that_have_no_place_are_refused(bits: Bits) -> None:
    said = "finite number" if bits == 8 else "number of at most 65504 in size"
    for value in (torch.nan, torch.inf, -torch.inf, *([65520.0] if bits == 4 else [])):
        weight = randn(33, 9)
        weight[2, 3] = value
        with pytest.raises(ValueError, match=rf"not a {said}, and int{bits}.*set quantization to null"):
            NarrowLinear(weight, None, bits, KernelThreads())


def test_the_smallest_weights_stay_what_they_are(modules: list[ModuleType], bits: Bits) -> None:
    weight = torch.tensor([[3e-45, -3e-45], [1e-40, 5e-41], [1e-36, 5e-37], [1.0, -0.5]])
    out = modules[2].NarrowLinear(weight, None, bits, KernelThreads())(torch.ones(1, 2))
    torch.testing.assert_close(out, weight.sum(1)[None], atol=1e-38 if bits == 8 else 1e-7, rtol=0.01)
    if bits == 8:
        torch.testing.assert_close(out[0, 2:], weight[2:].sum(1), atol=0.0, rtol=0.01)


def test_weights_are_packed_in_pieces(
    modules: list[ModuleType], bits: Bits, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, bias = randn(200, 10), randn(200, seed=1)
    whole = modules[1].pack(bits, weight, bias)
    monkeypatch.setattr(modules[1], "_PACKED_AT_ONCE", 2)
    assert torch.equal(modules[1].pack(bits, weight, bias), whole)


def test_code_is_for_what_numba_compiles_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba_vectors.config, "CPU_FEATURES", "+sse2,-avx512vnni")
    assert numba_vectors.compiles_for("sse2")
    assert not any(map(numba_vectors.compiles_for, ("avx512vnni", "avx2", "sse")))
    monkeypatch.setattr(numba_vectors.config, "CPU_FEATURES", None)
    monkeypatch.setattr(numba_vectors.config, "ENABLE_AVX", 0)
    assert not numba_vectors.compiles_for("avx2")


def test_bfloat16_comes_out_as_it_went_in(modules: list[ModuleType], bits: Bits) -> None:
    weight, x = randn(33, 7).bfloat16(), randn(5, 7).bfloat16()
    out = modules[2].NarrowLinear(weight, None, bits, KernelThreads())(x)
    assert out.dtype == torch.bfloat16
    wide = modules[2].NarrowLinear(weight.float(), None, bits, KernelThreads())(x.float())
    assert torch.equal(out, wide.bfloat16())


def test_inputs_of_another_width_or_dtype_are_refused(modules: list[ModuleType], bits: Bits) -> None:
    layer = modules[2].NarrowLinear(randn(33, 7), None, bits, KernelThreads())
    for x in (randn(5, 8), randn(5, 7).double()):
        with pytest.raises(AssertionError):
            layer(x)


# ---- what is held of a weight ----


def held(weight: Tensor, bits: Bits = 4) -> Tensor:
    return NarrowLinear(weight, None, bits, KernelThreads())(torch.eye(weight.shape[1])).T


def test_inputs_are_mixed_by_a_hadamard_matrix() -> None:
    found = mixed(torch.eye(128)).double()
    assert torch.equal(found.abs(), torch.eye(2).double().kron(torch.ones(64, 64)))
    assert torch.equal(found @ found, 64 * torch.eye(128).double())


def test_as_many_inputs_share_a_scale_as_all_can_be_shared_out_into() -> None:
    sizes = {1: 64, 64: 64, 65: 128, 250: 256, 320: 64, 576: 192, 896: 128, 1536: 256, 18944: 256}
    assert {num_inputs: numba_int8.group_size(num_inputs) for num_inputs in sizes} == sizes


def test_a_large_input_widens_the_steps_of_its_group_less_than_by_its_size() -> None:
    """As a model's are: some ten times as large as the rest, and the same ones for all tokens."""
    weight, x = randn(40, 192), randn(50, 192, seed=1)
    x[:, 3] *= 30
    exact = x @ weight.T
    scale = x.abs().amax(1, keepdim=True) / 127
    unmixed = ((x / scale).round() * scale) @ held(weight, 8).T
    found = NarrowLinear(weight, None, 8, KernelThreads())(x)
    errors = [float((each - exact).square().mean().sqrt()) for each in (found, unmixed)]
    assert errors[0] < 0.6 * errors[1]


def test_a_groups_numbers_widen_no_other_groups_steps() -> None:
    weight, x = randn(40, 576), randn(5, 576)  # three groups
    x[:, :192], weight[:, :192] = 1e4, 0.0
    x[:, 192:384], weight[:, 192:384] = 0.0, 1e4
    expected = weight[:, 384:] @ x[:, 384:].T
    found = NarrowLinear(weight, None, 8, KernelThreads())(x)
    torch.testing.assert_close(found, expected.T, rtol=0.0, atol=0.5)


@pytest.mark.parametrize("steps", range(8, 16))
def test_int4_finds_the_scale_of_what_a_file_holds_in_4_bits(steps: int) -> None:
    """As in GGUF files: groups of 32 with a scale in float16, of which some use fewer than 16 numbers."""
    q = torch.randint(0, steps + 1, (64, 4, 32), generator=torch.Generator().manual_seed(steps))
    q[:, :, 0], q[:, :, 1] = 0, steps
    scale = randn(64, 4, 1).abs().half().float() + 0.125
    weight = ((q - 8) * scale.half().float()).flatten(1)
    error = (held(weight) - weight).view(64, 4, 32).abs() / scale
    assert float(error.max()) < 0.01  # of a step: what a minimum is rounded by


def test_int4_is_never_further_off_than_the_whole_range_in_15_steps() -> None:
    weight = randn(64, 96)
    groups = weight.view(64, 3, 32)
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    scale = (high - low) / 15
    plain = ((groups - low) / scale).round() * scale + low
    errors = [(each.reshape(64, 3, 32) - groups).square().sum(2) for each in (held(weight), plain)]
    assert bool((errors[0] <= 1.05 * errors[1]).all())  # of which float16 may cost a little


def test_a_weight_takes_5_bits_in_int4_and_little_more_than_8_in_int8() -> None:
    assert numba_narrow.pack(4, randn(64, 512), None).nbytes == 64 * (512 * 5 // 8 + 4)
    assert numba_narrow.pack(8, randn(64, 512), None).nbytes == 64 * (512 + 2 * 2 + 8)
