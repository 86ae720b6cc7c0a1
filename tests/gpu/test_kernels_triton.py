"""The Triton kernels against the reference kernels: on a GPU if there is one, else in Triton's interpreter
(tests/conftest.py asks for it).

The interpreter shows what a kernel computes, not that a GPU's compiler takes it: the last test compiles all
of them, for GPUs that need not be here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from cache.paged_kv import PagedKV  # noqa: E402
from cache.view import BatchView  # noqa: E402
from ee_models.kernels import gpu, triton_linear  # noqa: E402
from ee_models.kernels.gpu import TritonKernels  # noqa: E402
from ee_models.kernels.reference import ReferenceKernels  # noqa: E402
from hispec.sampling import noise_triton  # noqa: E402

ROOT = Path(__file__).parents[2]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS = 1e-5
TRITON, REFERENCE = TritonKernels(), ReferenceKernels()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOKENS_AND_SIZES = [(1, 1), (1, 48), (3, 7), (5, 130), (2, 577), (2, 4096), (1, 16384)]
HEADS = [(9, 3, 64), (6, 6, 10), (3, 1, 128), (2, 1, 2), (5, 2, 96), (33, 1, 64)]


def close(got: Tensor, expected: Tensor) -> None:
    """float32: to the rounding of a sum. Narrow dtypes: equal, but for a value in a hundred that such a
    rounding tips over."""
    if got.dtype == torch.float32:
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)
    else:
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=2 * torch.finfo(got.dtype).eps)
        assert (got != expected).sum() <= 2 + 0.01 * got.numel()


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """New tensors hold what no result is, so that what a kernel leaves out is seen; and have as much behind
    them, which none may touch."""
    empty, behind = torch.empty, []

    def guarded(*size: Any, dtype: torch.dtype, **kwargs: Any) -> Tensor:
        shape = torch.Size(size[0] if isinstance(size[0], tuple) else size)
        whole = empty(shape.numel() + 256, dtype=dtype, **kwargs).fill_(
            torch.inf if dtype.is_floating_point else -7
        )
        behind.append(whole[shape.numel() :])
        return whole[: shape.numel()].view(shape)

    monkeypatch.setattr(torch, "empty", guarded)
    yield
    assert all((tail == (torch.inf if tail.is_floating_point() else -7)).all() for tail in behind), (
        "written behind the end"
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_delta", [False, True])
@pytest.mark.parametrize(("num_tokens", "size"), TOKENS_AND_SIZES)
def test_add_rms_norm_equals_the_reference(
    num_tokens: int, size: int, with_delta: bool, dtype: torch.dtype
) -> None:
    weight, delta = (
        1 + 0.1 * randn(size, dtype=dtype, seed=1),
        (randn(num_tokens, size, dtype=dtype, seed=2) if with_delta else None),
    )
    hidden, expected_hidden = randn(num_tokens, size, dtype=dtype), randn(num_tokens, size, dtype=dtype)
    got, expected = (
        kernels.add_rms_norm(h, delta, weight, EPS)
        for kernels, h in ((TRITON, hidden), (REFERENCE, expected_hidden))
    )
    close(got, expected)
    assert torch.equal(hidden, expected_hidden), (
        "the residual stream is updated in place by one addition, rounded to the dtype"
    )


def test_add_rms_norm_of_zeros_is_zero_and_not_nan() -> None:
    for dtype in DTYPES:
        zeros = torch.zeros(2, 16, dtype=dtype, device=DEVICE)
        assert not TRITON.add_rms_norm(zeros, zeros, torch.ones(16, dtype=dtype, device=DEVICE), EPS).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_has_the_same_bits_whether_the_sum_is_its_own_or_was_made_before(dtype: torch.dtype) -> None:
    """A span of layers that is run in two calls adds between them with torch: law 3."""
    for size in (576, 4096):
        hidden, delta, weight = (randn(3, size, dtype=dtype, seed=seed) for seed in range(3))
        before = hidden + delta
        assert torch.equal(
            TRITON.add_rms_norm(hidden, delta, weight[0], EPS),
            TRITON.add_rms_norm(before, None, weight[0], EPS),
        )


def test_a_pass_of_padding_alone_writes_nothing() -> None:
    case = Rope(3, (9, 3, 64), True, 3)
    (queries, data), (expected_queries, _) = case.run(TRITON), case.run(REFERENCE)
    close(queries, expected_queries)
    assert torch.equal(data, case.initial)


def test_rows_that_lie_apart_are_read_and_written_where_they_are() -> None:
    wide, delta, weight = (
        randn(6, 100, dtype=torch.float32),
        randn(6, 60, dtype=torch.float32, seed=1),
        randn(48, dtype=torch.float32, seed=2),
    )
    expected_wide = wide.clone()
    got, expected = (
        kernels.add_rms_norm(t[1:5, 20:68], delta[1:5, :48], weight, EPS)
        for kernels, t in ((TRITON, wide), (REFERENCE, expected_wide))
    )
    close(got, expected)
    assert torch.equal(wide, expected_wide)
    close(TRITON.silu_mul(wide[1:5, 20:68]), REFERENCE.silu_mul(wide[1:5, 20:68]))


class Rope:
    """Inputs of rope_and_store: `num_tokens` tokens at scattered positions and slots, over a KV that is not
    empty."""

    def __init__(
        self,
        num_tokens: int,
        heads: tuple[int, int, int],
        with_norms: bool,
        num_padding: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.num_heads, num_kv_heads, head_dim = heads
        generator = torch.Generator().manual_seed(num_tokens)
        self.qkv = torch.randn(
            num_tokens, (self.num_heads + 2 * num_kv_heads) * head_dim, generator=generator
        ).to(DEVICE, dtype)
        angles = torch.outer(torch.arange(200.0), 10000.0 ** -(torch.arange(head_dim // 2) / (head_dim // 2)))
        self.cos_sin = torch.stack((angles.cos(), angles.sin()), dim=1).to(DEVICE)
        q_norm, k_norm = (1 + 0.1 * torch.randn(2, head_dim, generator=generator)).to(DEVICE, dtype)
        self.norms = (q_norm, k_norm) if with_norms else None
        num_blocks = num_tokens // 4 + 3
        self.initial = torch.randn(2, 2, num_blocks * 4, num_kv_heads, head_dim, generator=generator).to(
            DEVICE, dtype
        )
        self.kv_shape = (2, num_blocks, 4, num_kv_heads, head_dim)
        self.positions = torch.randint(0, 200, (num_tokens,), generator=generator)
        self.slots = torch.randperm(num_blocks * 4, generator=generator)[:num_tokens]
        self.slots[torch.randperm(num_tokens, generator=generator)[:num_padding]] = -1

    def run(
        self, kernels: TritonKernels | ReferenceKernels, tokens: slice = slice(None)
    ) -> tuple[Tensor, Tensor]:
        """Of these tokens: queries, and the whole KV afterwards."""
        if isinstance(
            kernels, TritonKernels
        ):  # no slots but these, so that a write to slot -1 is one to another's
            data = self.initial.clone()
            kv: Any = SimpleNamespace(keys=lambda layer: data[layer, 0], values=lambda layer: data[layer, 1])
        else:
            kv = PagedKV(*self.kv_shape, self.qkv.dtype, DEVICE)
            data = kv.data.copy_(self.initial)
        positions, slots = self.positions[tokens].to(DEVICE), self.slots[tokens].to(DEVICE)
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
            data,
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize(("num_tokens", "num_padding"), [(1, 0), (5, 2)])
@pytest.mark.parametrize("heads", HEADS)
def test_rope_and_store_equals_the_reference(
    heads: tuple[int, int, int], num_tokens: int, num_padding: int, with_norms: bool, dtype: torch.dtype
) -> None:
    case = Rope(num_tokens, heads, with_norms, num_padding, dtype)
    (queries, data), (expected_queries, expected_data) = case.run(TRITON), case.run(REFERENCE)
    assert queries.shape == expected_queries.shape and queries.dtype == dtype
    same: Callable[[Tensor, Tensor], Any] = (
        close
        if with_norms
        else lambda got, expected: torch.testing.assert_close(got, expected, atol=0, rtol=0)
    )
    same(queries, expected_queries)
    same(data, expected_data)
    slots = case.slots[case.slots >= 0].to(DEVICE)
    untouched = torch.ones(data.shape[2], dtype=torch.bool, device=DEVICE)
    untouched[slots] = False
    assert torch.equal(data[1][:, untouched], case.initial[1][:, untouched]), (
        "a slot that no token has was written"
    )
    assert torch.equal(data[0], case.initial[0]), "another layer was written"
    assert torch.equal(data[1, 1][slots], expected_data[1, 1][slots]), "values are copied, not computed"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1), (3, 7), (2, 1537), (66, 48)])
def test_silu_mul_equals_the_reference(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    gate_up = 4 * randn(num_tokens, 2 * size, dtype=dtype)
    close(TRITON.silu_mul(gate_up), REFERENCE.silu_mul(gate_up))


def test_silu_mul_equals_the_reference_at_the_ends_of_the_range() -> None:
    ends = [
        -1e30,
        -1000.0,
        -104.0,
        -100.0,
        -89.0,
        -88.7,
        -88.0,
        -87.0,
        -20.0,
        -0.0,
        0.0,
        1e-30,
        20.0,
        87.0,
        88.7,
        100.0,
        1e30,
    ]
    gate = torch.tensor([[*ends, *torch.linspace(-89, 89, 1001).tolist()]], device=DEVICE)
    gate_up = torch.cat((gate, torch.ones_like(gate)), dim=1)
    got, expected = TRITON.silu_mul(gate_up), REFERENCE.silu_mul(gate_up)
    torch.testing.assert_close(
        got, expected, atol=1e-36, rtol=1e-6
    )  # beyond -88.7, where exp overflows, a tiny value may be 0


@pytest.mark.parametrize("size", [48, 577, 1537])
def test_a_token_gets_the_same_bits_alone_and_among_others(size: int) -> None:
    num_tokens, weight = 5, randn(size, dtype=torch.float32, seed=1)
    hidden, delta, gate_up = (
        randn(num_tokens, width, dtype=torch.float32, seed=width) for width in (size, size + 1, 2 * size)
    )
    kernels: list[Callable[[slice], Tensor]] = [
        lambda tokens: TRITON.add_rms_norm(
            hidden[tokens].clone(), delta[tokens, :size].contiguous(), weight, EPS
        ),
        lambda tokens: TRITON.silu_mul(gate_up[tokens].clone()),
    ]
    for run in kernels:
        alone = torch.cat([run(slice(i, i + 1)) for i in range(num_tokens)])
        assert torch.equal(run(slice(None)), alone)
        assert torch.equal(run(slice(1, 4)), alone[1:4])
    case = Rope(5, (9, 3, 64), True)
    queries, data = case.run(TRITON)
    for i in range(5):
        queries_alone, data_alone = case.run(TRITON, slice(i, i + 1))
        assert torch.equal(queries_alone[0], queries[i])
        assert torch.equal(data_alone[1][:, case.slots[i]], data[1][:, case.slots[i]])


def test_a_pass_without_tokens_gives_nothing() -> None:
    case = Rope(3, (4, 2, 8), True)
    queries, data = case.run(TRITON, slice(0, 0))
    assert queries.shape == (0, 4, 8) and torch.equal(data, case.initial)
    nothing = randn(0, 32, dtype=torch.float32)
    assert TRITON.add_rms_norm(nothing, None, randn(32, dtype=torch.float32), EPS).shape == (0, 32)
    assert TRITON.silu_mul(nothing).shape == (0, 16)


# Every kernel: what its arguments are (* is a pointer to the dtype under test; what is not here is None or a
# constant), constants, launch.
EXACT, ROPE = (
    {"enable_fp_fusion": False},
    (
        "qkv:* cos_sin:*fp32 positions:*i64 slots:*i64 keys:* values:* q:* eps:fp32 qkv_stride:i32"
        " slot_stride:i32"
    ),
)
NORM, CHOICE = (
    "hidden:* weight:* out:* size:i32 hidden_stride:i32 delta_stride:i32 eps:fp32",
    "logits:* scores:*fp32 tokens:*i32 vocab_size:i32 row_stride:i32",
)
PRODUCT, TILE = (
    "x:* weight:* num_rows:i32 out_features:i32 in_features:i32 x_stride:i32",
    {
        "PART": 1024,
        "NUM_PARTS": 4,
        "BLOCK_ROWS": 16,
    },
)
HEADS_TILE = {"NUM_HEADS": 9, "NUM_KV_HEADS": 3, "HEAD_DIM": 96, "BLOCK_HEADS": 8, "BLOCK_HALF": 64}
KERNELS: list[tuple[Any, str, dict[str, Any], dict[str, Any]]] = [
    (gpu._add_rms_norm, f"{NORM} delta:*", {"BLOCK": 4096}, {"num_warps": 16, **EXACT}),
    (gpu._add_rms_norm, NORM, {"BLOCK": 16384}, {"num_warps": 16, **EXACT}),
    (gpu._rope_and_store, f"{ROPE} q_norm:* k_norm:*", HEADS_TILE, EXACT),
    (gpu._rope_and_store, ROPE, HEADS_TILE, EXACT),
    (gpu._silu_mul, "gate_up:* out:* size:i32 row_stride:i32", {"BLOCK": 1024}, EXACT),
    (noise_triton._best_of_block, CHOICE, {"BLOCK": 1024}, EXACT),
    (
        noise_triton._best_of_block,
        f"{CHOICE} keys:*i64 temperatures:*fp32 floors:*fp32",
        {"BLOCK": 1024},
        EXACT,
    ),
    (noise_triton._best_of_block, f"{CHOICE} keys:*i64", {"BLOCK": 1024}, EXACT),
    (
        noise_triton._best_of_row,
        "scores:*fp32 tokens:*i32 out:*i64 num_blocks:i32 vocab_size:i32",
        {"BLOCKS": 128},
        {"num_warps": 1},
    ),
    (
        noise_triton._filter_floor,
        (
            "logits:* temperatures:*fp32 top_ks:*i64 top_ps:*fp32 min_ps:*fp32 floors:*fp32 vocab_size:i32"
            " row_stride:i32"
        ),
        {"BLOCK": 4096, "NUM_BLOCKS": 32},
        {"num_warps": 16, **EXACT},
    ),
    (
        triton_linear._product,
        f"{PRODUCT} bias:* out:*",
        {**TILE, "PARTS_APART": False, "BLOCK_OUT": 64, "BLOCK_IN": 128},
        {"num_stages": 4},
    ),
    (
        triton_linear._product,
        f"{PRODUCT} out:*fp32",
        {**TILE, "PARTS_APART": True, "BLOCK_OUT": 32, "BLOCK_IN": 64},
        {"num_stages": 4},
    ),
    (
        triton_linear._product,
        f"{PRODUCT} bias:* out:*".replace("weight:*", "weight:*i8 scales:*fp32"),
        {**TILE, "PARTS_APART": False, "BLOCK_OUT": 64, "BLOCK_IN": 128},
        {"num_stages": 4},
    ),
    (
        triton_linear._add_parts,
        "parts:*fp32 scales:*fp32 out:* num_rows:i32 out_features:i32",
        {"NUM_PARTS": 4, "BLOCK": 1024},
        {},
    ),
]


def compile_everything() -> None:
    """Runs in a process of its own, where Triton does not interpret. Like a launch, takes sizes that are 1
    for constants."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for kernel, arguments, constants, options in KERNELS:
        for dtype, capability, ones in (("fp32", 80, False), ("bf16", 90, False), ("fp16", 90, True)):
            given = dict(argument.split(":") for argument in arguments.split())
            types = {name: f"*{dtype}" if kind == "*" else kind for name, kind in given.items()}
            if ones:
                constants = {
                    **constants,
                    **{name: 1 for name, kind in types.items() if kind == "i32" and name != "num_rows"},
                }
            signature = {
                name: "constexpr" if name in constants else types.get(name, "constexpr")
                for name in kernel.arg_names
            }
            values = {name: constants.get(name) for name, kind in signature.items() if kind == "constexpr"}
            compiled = triton.compile(
                ASTSource(fn=kernel, signature=signature, constexprs=values),
                target=GPUTarget("cuda", capability, 32),
                options=options,
            )
            assert compiled.asm["cubin"], kernel
            assert ".f64" not in compiled.asm["ptx"], f"{kernel} computes in float64"


def test_every_kernel_compiles_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    code = "from tests.gpu.test_kernels_triton import compile_everything; compile_everything()"
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
