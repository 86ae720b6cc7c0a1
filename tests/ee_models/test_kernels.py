"""The numba kernels against the reference kernels, and against themselves: a token alone, and among
others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numba import njit
from torch import Tensor

from cache.paged_kv import PagedKV
from cache.view import BatchView
from ee_models.kernels import select_kernels
from ee_models.kernels.cpu import NumbaKernels
from ee_models.kernels.numba_math import exp32
from ee_models.kernels.numba_vectors import copy_numbers
from ee_models.kernels.reference import ReferenceKernels

CPU = torch.device("cpu")
EPS = 1e-5
NUMBA, REFERENCE = NumbaKernels(), ReferenceKernels()
KV_DTYPES = torch.float32, torch.bfloat16
copy = njit(lambda source, count, target, size: copy_numbers(source, count, target, size))
# Token counts and sizes around vector lengths and their remainders.
TOKENS_AND_SIZES = [(1, 1), (1, 48), (3, 7), (1, 576), (5, 130), (16, 576), (66, 577), (2, 4096)]
HEADS = [(4, 2, 8), (9, 3, 64), (6, 6, 10), (3, 1, 128), (2, 1, 2)]


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Rope:
    """Inputs of rope_and_store: `num_tokens` tokens at scattered positions and slots, over a KV that is not
    empty."""

    def __init__(
        self, num_tokens: int, heads: tuple[int, int, int], with_norms: bool, num_padding: int = 0
    ) -> None:
        num_heads, num_kv_heads, head_dim = heads
        generator = torch.Generator().manual_seed(num_tokens)
        self.qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, generator=generator)
        angles = torch.outer(torch.arange(200.0), 10000.0 ** -(torch.arange(head_dim // 2) / (head_dim // 2)))
        self.cos_sin = torch.stack((angles.cos(), angles.sin()), dim=1)
        q_norm, k_norm = 1 + 0.1 * torch.randn(2, head_dim, generator=generator)
        self.norms = (q_norm, k_norm) if with_norms else None
        num_blocks = num_tokens // 4 + 3
        self.initial = torch.randn(2, 2, num_blocks * 4, num_kv_heads, head_dim, generator=generator)
        self.kv_shape = (2, num_blocks, 4, num_kv_heads, head_dim)
        self.positions = torch.randint(0, 200, (num_tokens,), generator=generator)
        self.slots = torch.randperm(num_blocks * 4, generator=generator)[:num_tokens]
        self.slots[torch.randperm(num_tokens, generator=generator)[:num_padding]] = -1

    def run(
        self,
        kernels: NumbaKernels | ReferenceKernels,
        tokens: slice = slice(None),
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor]:
        """Of these tokens: queries, and the whole KV afterwards, which is kept in `dtype`."""
        kv = PagedKV(*self.kv_shape, dtype, CPU)
        kv.data.copy_(self.initial)
        positions, slots = self.positions[tokens], self.slots[tokens]
        view = BatchView(
            positions,
            slots,
            torch.zeros(1, 1, dtype=torch.int64),
            torch.tensor([0, len(positions)]),
            len(positions),
            200,
        )
        qkv = self.qkv[tokens].clone()
        return (
            kernels.rope_and_store(qkv, self.cos_sin, self.norms, EPS, kv, 1, view),
            kv.data,
        )


@pytest.mark.parametrize("with_delta", [False, True])
@pytest.mark.parametrize(("num_tokens", "size"), TOKENS_AND_SIZES)
def test_add_rms_norm_equals_the_reference(num_tokens: int, size: int, with_delta: bool) -> None:
    weight, delta = 1 + 0.1 * randn(size, seed=1), randn(num_tokens, size, seed=2) if with_delta else None
    hidden, expected_hidden = randn(num_tokens, size), randn(num_tokens, size)
    got, expected = (
        kernels.add_rms_norm(h, delta, weight, EPS)
        for kernels, h in ((NUMBA, hidden), (REFERENCE, expected_hidden))
    )
    close(got, expected)
    assert torch.equal(hidden, expected_hidden), "the residual stream is updated in place by one addition"
    assert torch.equal(hidden, randn(num_tokens, size) + (delta if delta is not None else 0.0))


def test_add_rms_norm_of_zeros_is_zero_and_not_nan() -> None:
    for kernels in (NUMBA, REFERENCE):
        assert not kernels.add_rms_norm(torch.zeros(2, 16), None, torch.ones(16), EPS).any()


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize(("num_tokens", "num_padding"), [(1, 0), (1, 1), (5, 0), (5, 2), (40, 3), (7, 7)])
@pytest.mark.parametrize("heads", HEADS)
def test_rope_and_store_equals_the_reference(
    heads: tuple[int, int, int], num_tokens: int, num_padding: int, with_norms: bool
) -> None:
    case = Rope(num_tokens, heads, with_norms, num_padding)
    (queries, data), (expected_queries, expected_data) = case.run(NUMBA), case.run(REFERENCE)
    close(queries, expected_queries)
    close(data, expected_data)
    untouched = torch.ones(data.shape[2], dtype=torch.bool)
    untouched[case.slots[case.slots >= 0]] = False
    assert torch.equal(data[1][:, untouched], case.initial[1][:, untouched]), (
        "a slot that no token has was written"
    )
    assert torch.equal(data[0], case.initial[0]), "another layer was written"
    assert torch.equal(
        data[1, 1][case.slots[case.slots >= 0]], expected_data[1, 1][case.slots[case.slots >= 0]]
    ), "values are copied, not computed"


@pytest.mark.parametrize("heads", HEADS)
def test_kv_in_bfloat16_is_that_in_float32_rounded(heads: tuple[int, int, int]) -> None:
    case = Rope(40, heads, with_norms=True, num_padding=3)
    (queries, data), (small_queries, small) = (case.run(NUMBA, dtype=dtype) for dtype in KV_DTYPES)
    assert torch.equal(small, data.bfloat16()) and torch.equal(small_queries, queries)
    assert not torch.equal(small.float(), data)


def test_a_token_without_a_slot_writes_nothing_not_even_beside_the_slots() -> None:
    case = Rope(7, HEADS[0], with_norms=False, num_padding=7)
    kv = PagedKV(*case.kv_shape, torch.float32, CPU)
    kv._storage.fill_(9.0)
    slots, counts = case.slots, torch.tensor([0, 7])
    view = BatchView(case.positions, slots, torch.zeros(1, 1, dtype=torch.int64), counts, 7, 200)
    NUMBA.rope_and_store(case.qkv.clone(), case.cos_sin, None, EPS, kv, 1, view)
    assert (kv._storage == 9.0).all()


def test_bfloat16_rounds_as_torch_does() -> None:
    halfway = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF], dtype=torch.int32)
    others = torch.tensor([0.0, -0.0, 1e-40, -1e-45, 65504.0, torch.inf, -torch.inf, 3.4e38])
    numbers = torch.cat((halfway.view(torch.float32), others, randn(100)))
    for count in (1, 5, 16, 17, len(numbers)):
        found = torch.zeros(len(numbers) + 1, dtype=torch.bfloat16)
        copy(numbers.data_ptr(), count, found.data_ptr(), 2)
        assert torch.equal(found[:count].view(torch.int16), numbers[:count].bfloat16().view(torch.int16))
        assert not found[count:].any(), "what lies after the last was written"
    nans = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    copy(nans.data_ptr(), 3, found.data_ptr(), 2)
    assert found[:3].isnan().all()


@pytest.mark.parametrize(("num_tokens", "size"), TOKENS_AND_SIZES)
def test_silu_mul_equals_the_reference(num_tokens: int, size: int) -> None:
    gate_up = 4 * randn(num_tokens, 2 * size)
    close(NUMBA.silu_mul(gate_up), REFERENCE.silu_mul(gate_up))


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_widened_logits_equal_the_references(rows: int) -> None:
    vocabulary = torch.randperm(3000, generator=torch.Generator().manual_seed(0))[:700]
    logits = torch.randn(rows, 700, generator=torch.Generator().manual_seed(1))
    found = NUMBA.widen(logits, vocabulary, 3000)
    assert torch.equal(found, REFERENCE.widen(logits, vocabulary, 3000))
    assert torch.equal(found[:, vocabulary], logits) and int((found > -torch.inf).sum()) == 700 * rows


def test_silu_mul_equals_the_reference_at_the_ends_of_the_range() -> None:
    gate = torch.tensor([[-1e30, -1000.0, -100.0, -88.0, -87.0, -20.0, -0.0, 0.0, 20.0, 87.0, 100.0, 1e30]])
    gate_up = torch.cat((gate, torch.ones_like(gate)), dim=1)
    got, expected = NUMBA.silu_mul(gate_up), REFERENCE.silu_mul(gate_up)
    torch.testing.assert_close(got[:, gate[0] > -86], expected[:, gate[0] > -86], atol=1e-7, rtol=1e-6)
    assert (
        got[:, gate[0] <= -86].abs().max() < 1e-7
    )  # exp is clamped: tiny instead of 0, but for absurd gates


@pytest.mark.parametrize("size", [48, 130, 576, 1537])
def test_a_token_gets_the_same_bits_alone_and_among_others(size: int) -> None:
    num_tokens, weight = 9, 1 + 0.1 * randn(size, seed=1)
    hidden, delta, gate_up = (
        randn(num_tokens, size),
        randn(num_tokens, size, seed=2),
        4 * randn(num_tokens, 2 * size, seed=3),
    )
    kernels: list[Callable[[slice], Tensor]] = [
        lambda tokens: NUMBA.add_rms_norm(hidden[tokens].clone(), delta[tokens], weight, EPS),
        lambda tokens: NUMBA.add_rms_norm(hidden[tokens].clone(), None, weight, EPS),
        lambda tokens: NUMBA.silu_mul(gate_up[tokens]),
    ]
    for run in kernels:
        alone = torch.cat([run(slice(i, i + 1)) for i in range(num_tokens)])
        assert torch.equal(run(slice(None)), alone)
        assert torch.equal(run(slice(3, 8)), alone[3:8])


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("heads", HEADS)
def test_rope_gives_the_same_bits_alone_and_among_others(
    heads: tuple[int, int, int], with_norms: bool
) -> None:
    case = Rope(9, heads, with_norms)
    queries, data = case.run(NUMBA)
    for i in range(9):
        queries_alone, data_alone = case.run(NUMBA, slice(i, i + 1))
        assert torch.equal(queries_alone[0], queries[i])
        assert torch.equal(data_alone[1][:, case.slots[i]], data[1][:, case.slots[i]])


@njit(cache=True, error_model="numpy")
def _exp_all(x: np.ndarray, out: np.ndarray) -> None:
    for i in range(x.shape[0]):
        out[i] = exp32(x[i])


def exp_all(x: np.ndarray) -> np.ndarray:
    out = np.empty_like(x)
    _exp_all(x, out)
    return out


def test_exp32_is_within_two_units_in_the_last_place() -> None:
    halfway = (np.arange(-125, 127) + 0.5) * np.log(2)  # where the reduction changes its power of two
    near_halfway = np.concatenate([halfway * (1 + offset) for offset in (-1e-6, -1e-7, 0.0, 1e-7, 1e-6)])
    x = np.concatenate([np.linspace(-87, 88, 2_000_001), np.linspace(-1, 1, 500_001), near_halfway]).astype(
        np.float32
    )
    x = x[(x >= -87) & (x <= 88)]
    exact = np.exp(x.astype(np.float64))
    error = np.abs(exp_all(x).astype(np.float64) - exact) / np.spacing(exact.astype(np.float32))
    assert error.max() <= 2.0


def test_exp32_is_clamped_and_exact_at_zero() -> None:
    x = np.array([0.0, -0.0, -87.0, -88.0, -1e30, -np.inf, 88.0, 89.0, 1e30, np.inf], np.float32)
    got = exp_all(x)
    assert got[0] == got[1] == 1.0
    assert (got[2:6] == got[2]).all()
    assert (got[6:] == got[6]).all()
    np.testing.assert_allclose(got[[2, 6]], np.exp(np.array([-87.0, 88.0])), rtol=3e-7)


def test_numba_is_for_float32_on_a_cpu_only() -> None:
    assert isinstance(select_kernels(CPU, torch.float32), NumbaKernels)
    assert isinstance(select_kernels(CPU, torch.bfloat16), ReferenceKernels)
    assert type(select_kernels(torch.device("cuda"), torch.float32)).__name__ == "TritonKernels"
