"""The kernels in Triton, for CUDA: one launch each, nothing copied to the host, so that a CUDA graph can hold
them.

What comes of a token depends on that token alone. The bits are the reference's, but for the sums of squares,
which are added up in another order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cache.paged_kv import PagedKV
from cache.view import BatchView

from . import QkNorms
from .reference import ReferenceKernels
from .triton_math import cast, exp32, inverse_rms

_SILU_BLOCK = 1024
_ROPE_BLOCK = 512  # pairs of elements per program, from several heads


def _num_warps(num_elements: int) -> int:
    """Eight elements per thread: 16 bytes of bfloat16, the widest load."""
    return min(max(triton.next_power_of_2(num_elements) // 256, 1), 16)


@triton.jit
def _add_rms_norm(
    hidden: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    size: int,
    hidden_stride: int,
    delta_stride: int,
    eps: float,
    BLOCK: tl.constexpr,
) -> None:
    token, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    live = i < size
    dtype = hidden.dtype.element_ty
    h = tl.load(hidden + token * hidden_stride + i, mask=live, other=0.0).to(tl.float32)
    if delta is not None:
        rounded = cast(
            h + tl.load(delta + token * delta_stride + i, mask=live, other=0.0).to(tl.float32), dtype
        )
        tl.store(hidden + token * hidden_stride + i, rounded, mask=live)
        h = rounded.to(tl.float32)
    normed = cast(h * inverse_rms(tl.sum(h * h, axis=0), size, eps), dtype).to(tl.float32)
    scaled = normed * tl.load(weight + i, mask=live, other=0.0).to(tl.float32)
    tl.store(out + token * size + i, cast(scaled, dtype), mask=live)


@triton.jit(do_not_specialize=["positions", "slots"])
def _rope_and_store(
    qkv: tl.tensor,
    cos_sin: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    q: tl.tensor,
    eps: float,
    qkv_stride: int,
    slot_stride: int,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
) -> None:
    """Of one token, BLOCK_HEADS heads in the order that they have in qkv: queries, keys, values."""
    token = tl.program_id(0).to(tl.int64)
    head, i = (
        tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None],
        tl.arange(0, BLOCK_HALF)[None, :],
    )
    half: tl.constexpr = HEAD_DIM // 2
    dtype = qkv.dtype.element_ty
    in_half = i < half
    is_query, live = head < NUM_HEADS, (head < NUM_HEADS + 2 * NUM_KV_HEADS) & in_half
    source = qkv + token * qkv_stride + head * HEAD_DIM + i
    first_in, second_in = tl.load(source, mask=live, other=0.0), tl.load(source + half, mask=live, other=0.0)
    first, second = first_in.to(tl.float32), second_in.to(tl.float32)

    if q_norm is not None:
        scale = inverse_rms(tl.sum(first * first + second * second, axis=1, keep_dims=True), HEAD_DIM, eps)
        first, second = cast(first * scale, dtype).to(tl.float32), cast(second * scale, dtype).to(tl.float32)
        q_first, k_first = (
            tl.load(q_norm + i, mask=in_half, other=0.0),
            tl.load(k_norm + i, mask=in_half, other=0.0),
        )
        q_second, k_second = (
            tl.load(q_norm + half + i, mask=in_half, other=0.0),
            tl.load(k_norm + half + i, mask=in_half, other=0.0),
        )
        first = cast(first * tl.where(is_query, q_first, k_first).to(tl.float32), dtype).to(tl.float32)
        second = cast(second * tl.where(is_query, q_second, k_second).to(tl.float32), dtype).to(tl.float32)

    angles = cos_sin + tl.load(positions + token) * HEAD_DIM + i
    cos, sin = tl.load(angles, mask=in_half, other=0.0), tl.load(angles + half, mask=in_half, other=0.0)
    turned_first, turned_second = (
        cast(first * cos - second * sin, dtype),
        cast(second * cos + first * sin, dtype),
    )

    queries = q + (token * NUM_HEADS + head) * HEAD_DIM + i
    tl.store(queries, turned_first, mask=live & is_query)
    tl.store(queries + half, turned_second, mask=live & is_query)

    slot = tl.load(slots + token)
    stored = live & (slot >= 0)
    is_key, is_value = (
        (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS),
        head >= NUM_HEADS + NUM_KV_HEADS,
    )
    key = keys + slot * slot_stride + (head - NUM_HEADS) * HEAD_DIM + i
    tl.store(key, turned_first, mask=stored & is_key)
    tl.store(key + half, turned_second, mask=stored & is_key)
    value = values + slot * slot_stride + (head - NUM_HEADS - NUM_KV_HEADS) * HEAD_DIM + i
    tl.store(value, first_in, mask=stored & is_value)
    tl.store(value + half, second_in, mask=stored & is_value)


@triton.jit
def _silu_mul(gate_up: tl.tensor, out: tl.tensor, size: int, row_stride: int, BLOCK: tl.constexpr) -> None:
    token, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = i < size
    source = gate_up + token * row_stride + i
    dtype = gate_up.dtype.element_ty
    gate = tl.load(source, mask=live, other=0.0).to(tl.float32)
    up = tl.load(source + size, mask=live, other=0.0).to(tl.float32)
    silu = cast(tl.div_rn(gate, 1.0 + exp32(-gate)), dtype).to(tl.float32)
    tl.store(out + token * size + i, cast(silu * up, dtype), mask=live)


class TritonKernels(ReferenceKernels):
    """Rows may lie apart (a slice of a wider tensor), elements of a row must be neighbours. All tensors of a
    call but rope have one dtype. What has no kernel here is torch's."""

    def add_rms_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        num_tokens, size = hidden.shape
        assert hidden.stride(1) == 1 and weight.is_contiguous() and (delta is None or delta.stride(1) == 1)
        out = torch.empty((num_tokens, size), dtype=hidden.dtype, device=hidden.device)
        block = triton.next_power_of_2(size)
        delta_stride = delta.stride(0) if delta is not None else 0
        _add_rms_norm[(num_tokens,)](
            hidden,
            delta,
            weight,
            out,
            size,
            hidden.stride(0),
            delta_stride,
            eps,
            block,
            num_warps=_num_warps(block),
            enable_fp_fusion=False,
        )
        return out

    def rope_and_store(
        self, qkv: Tensor, rope: Tensor, norms: QkNorms, eps: float, kv: PagedKV, layer: int, view: BatchView
    ) -> Tensor:
        keys, values = kv.keys(layer), kv.values(layer)
        _, num_kv_heads, head_dim = keys.shape
        num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
        assert qkv.stride(1) == 1 and rope.is_contiguous()
        q = torch.empty((qkv.shape[0], num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
        block_half = triton.next_power_of_2(head_dim // 2)
        block_heads = max(_ROPE_BLOCK // block_half, 1)
        _rope_and_store[(qkv.shape[0], triton.cdiv(num_heads + 2 * num_kv_heads, block_heads))](
            qkv,
            rope,
            *(norms or (None, None)),
            view.positions,
            view.slots,
            keys,
            values,
            q,
            eps,
            qkv.stride(0),
            keys.stride(0),
            num_heads,
            num_kv_heads,
            head_dim,
            block_heads,
            block_half,
            num_warps=_num_warps(2 * _ROPE_BLOCK),
            enable_fp_fusion=False,
        )
        return q

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
        assert gate_up.stride(1) == 1
        out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
        grid = (num_tokens, triton.cdiv(size, _SILU_BLOCK))
        _silu_mul[grid](
            gate_up,
            out,
            size,
            gate_up.stride(0),
            _SILU_BLOCK,
            num_warps=_num_warps(_SILU_BLOCK),
            enable_fp_fusion=False,
        )
        return out
