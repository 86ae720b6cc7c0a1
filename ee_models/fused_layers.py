"""Layers of a decoder on a CPU in one call: torch's threads walk through all operations of a pass together,
and nothing of Python stands between these.

The operations are those of `Decoder.run_weights`, by the same functions: products over panels, in float32 or
int8, numba's kernels and its attention. Threads share a product by panels, attention by units and what is
between by tokens, and wait for each other after each.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import cfunc, njit, types
from numba.np.numpy_support import carray, from_dtype
from torch import Tensor

from cache.paged_kv import PagedKV
from cache.view import BatchView

from .attention import AttentionBackend
from .attention.numba_pages import CALL, NumbaAttention, attend_units
from .int8_linear import Int8Linear
from .kernels import numba_gemm, numba_int8
from .kernels.cpu import add_rms_norm, rope_and_store, silu_mul
from .kernels.threads import KernelThreads, address_of, count_team, pointer, take, wait
from .linear import Linear
from .panel_linear import PanelLinear

if TYPE_CHECKING:
    from .decoder import LayerWeights

# Multiplications of a pass's products from which other threads are worth their waiting for each other.
_PARALLEL_FROM = 1 << 18
_KEPT_TOKENS = 64
_LINEARS = ("qkv", "output", "gate_up", "down")


def _addresses_and_sizes(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_int64) for name in names]


class _Layer(ctypes.Structure):
    """The weights of a layer, by address; 0 = it has none such. `intermediate`: inputs of `down`."""

    _fields_ = [
        *_addresses_and_sizes("attention_norm", "q_norm", "k_norm", "mlp_norm", "intermediate"),
        *_addresses_and_sizes(*_LINEARS, *(f"{name}_bias" for name in _LINEARS)),
    ]


class _Call(ctypes.Structure):
    """A pass over `num_layers` layers, by the addresses and sizes of what it reads and writes. `terms` and
    `scales`: of what a product in int8 reads; 0 = products are in float32."""

    _fields_ = [
        *_addresses_and_sizes("next", "team_size", "barrier", "layers", "num_layers", "attention", "units"),
        *_addresses_and_sizes("hidden", "num_tokens", "hidden_size", "num_heads", "num_kv_heads", "head_dim"),
        *_addresses_and_sizes("cos_sin", "num_positions", "positions", "slots", "num_slots"),
        *_addresses_and_sizes("keys", "values", "bytes_per_kv_layer"),
        *_addresses_and_sizes("normed", "qkv", "q", "attended", "delta", "gate_up", "activated"),
        *_addresses_and_sizes("terms", "scales"),
        ("eps", ctypes.c_double),
    ]


_LAYER, _CALL = np.dtype(_Layer), np.dtype(_Call)


@njit(error_model="numpy", nogil=True, cache=True)
def _norm(c: Any, weight: int, first: int, last: int, is_first: bool) -> None:
    """Adds `delta`, if there is one yet, to the hidden states of tokens first to last - 1 -> their norms."""
    shape, start = (last - first, c.hidden_size), 4 * first * c.hidden_size
    hidden = carray(pointer(c.hidden + start), shape, np.float32)
    delta = carray(pointer(c.delta + start), (0 if is_first else last - first, c.hidden_size), np.float32)
    normed = carray(pointer(c.normed + start), shape, np.float32)
    add_rms_norm(hidden, delta, carray(pointer(weight), c.hidden_size, np.float32), c.eps, normed)


@njit(error_model="numpy", nogil=True, cache=True)
def _rope_and_store(c: Any, layer: Any, keys: int, values: int, first: int, last: int) -> None:
    num_tokens, of_kv = last - first, (c.num_slots, c.num_kv_heads, c.head_dim)
    size = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    norm_size = c.head_dim if layer.q_norm != 0 else 0
    start_q = 4 * first * c.num_heads * c.head_dim
    rope_and_store(
        carray(pointer(c.qkv + 4 * first * size), (num_tokens, size), np.float32),
        carray(pointer(c.cos_sin), (c.num_positions, 2, c.head_dim // 2), np.float32),
        carray(pointer(layer.q_norm), norm_size, np.float32),
        carray(pointer(layer.k_norm), norm_size, np.float32),
        c.eps,
        carray(pointer(c.positions + 8 * first), num_tokens, np.int64),
        carray(pointer(c.slots + 8 * first), num_tokens, np.int64),
        carray(pointer(keys), of_kv, np.float32),
        carray(pointer(values), of_kv, np.float32),
        carray(pointer(c.q + start_q), (num_tokens, c.num_heads, c.head_dim), np.float32),
    )


@njit(error_model="numpy", nogil=True, cache=True)
def _activate(c: Any, size: int, first: int, last: int) -> None:
    gate_up = carray(pointer(c.gate_up + 8 * first * size), (last - first, 2 * size), np.float32)
    silu_mul(gate_up, carray(pointer(c.activated + 4 * first * size), (last - first, size), np.float32))


@njit(error_model="numpy", nogil=True, cache=True)
def _split(c: Any, x: int, num_inputs: int, first: int, last: int) -> None:
    """What a product in int8 reads of tokens first to last - 1 of x [tokens, in]."""
    if c.terms != 0:
        numba_int8.split_tokens(x, num_inputs, c.terms, c.scales, first, last)


@njit(error_model="numpy", nogil=True, cache=True)
def _multiply(
    c: Any, x: int, inputs: int, panels: int, bias: int, out: int, outputs: int, share: int, shares: int
) -> None:
    """out [tokens, outputs] = bias + x [tokens, inputs] . weight, of one share; in int8 of what x was split
    into."""
    n = c.num_tokens
    if c.terms != 0:
        numba_int8.multiply(c.terms, c.scales, n, inputs, panels, out, outputs, share, shares)
    else:
        numba_gemm.multiply(x, n, inputs, panels, bias, out, outputs, share, shares)


@cfunc(types.void(types.CPointer(from_dtype(_CALL))), cache=True, error_model="numpy")
def _run_layers(call: Any) -> None:
    c = carray(call, 1)[0]
    share, shares = take(address_of(call)), count_team(c.team_size)
    n, width = c.num_tokens, c.hidden_size
    first, last = share * n // shares, (share + 1) * n // shares
    layers = carray(pointer(c.layers), c.num_layers, _LAYER)
    attention = carray(pointer(c.attention), 1, CALL)[0]
    size_q, size_kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    is_first = True
    for i in range(c.num_layers):
        layer = layers[i]
        if layer.attention_norm != 0:
            keys, values = c.keys + i * c.bytes_per_kv_layer, c.values + i * c.bytes_per_kv_layer
            _norm(c, layer.attention_norm, first, last, is_first)
            _split(c, c.normed, width, first, last)
            wait(c.barrier)
            size = size_q + 2 * size_kv
            _multiply(c, c.normed, width, layer.qkv, layer.qkv_bias, c.qkv, size, share, shares)
            wait(c.barrier)
            _rope_and_store(c, layer, keys, values, first, last)
            wait(c.barrier)
            attend_units(attention, c.units + 8 * i, c.q, keys, values, c.attended)
            wait(c.barrier)
            if c.terms != 0:
                _split(c, c.attended, size_q, first, last)
                wait(c.barrier)
            _multiply(c, c.attended, size_q, layer.output, layer.output_bias, c.delta, width, share, shares)
            wait(c.barrier)
            is_first = False
        if layer.mlp_norm != 0:
            size = layer.intermediate
            _norm(c, layer.mlp_norm, first, last, is_first)
            _split(c, c.normed, width, first, last)
            wait(c.barrier)
            _multiply(
                c, c.normed, width, layer.gate_up, layer.gate_up_bias, c.gate_up, 2 * size, share, shares
            )
            wait(c.barrier)
            _activate(c, size, first, last)
            _split(c, c.activated, size, first, last)
            wait(c.barrier)
            _multiply(c, c.activated, size, layer.down, layer.down_bias, c.delta, width, share, shares)
            wait(c.barrier)
            is_first = False
    hidden = carray(pointer(c.hidden), (n, width), np.float32)
    delta = carray(pointer(c.delta), (n, width), np.float32)
    for token in range(first, last):
        for j in range(width):
            hidden[token, j] += delta[token, j]


@dataclass(frozen=True)
class _Span:
    """Layers that are run together: as an array of _Layer; what each Call over them begins as; what a pass
    needs memory for, in numbers a token, and in all; multiplications of its products, a token."""

    layers: Sequence[LayerWeights]
    table: Any
    call: _Call
    sizes: dict[str, int]
    num_numbers: int
    num_products: int


class FusedLayers:
    """Runs layers whose linears are all PanelLinears, or with `is_int8` all Int8Linears, with numba's
    attention."""

    def __init__(
        self,
        attention: AttentionBackend,
        threads: KernelThreads,
        cos_sin: Tensor,
        eps: float,
        num_heads: int,
        is_int8: bool,
    ) -> None:
        assert isinstance(attention, NumbaAttention)
        self._is_int8 = is_int8
        self.attention, self._threads = attention, threads
        self._cos_sin, self._eps, self._num_heads = cos_sin, eps, num_heads
        self._spans: dict[tuple[int, ...], _Span] = {}
        self._scratch: Tensor | None = None

    @staticmethod
    def can_run(attention: AttentionBackend, threads: KernelThreads) -> bool:
        """Whether attention is numba's, and a kernel's threads can wait for each other."""
        return isinstance(attention, NumbaAttention) and (threads.count == 1 or threads.barrier != 0)

    def run(
        self, layers: Sequence[LayerWeights], hidden: Tensor, kv: PagedKV, kv_layer: int, view: BatchView
    ) -> None:
        """As Decoder.run_weights, over at least one layer; adds to hidden [tokens, hidden] in place."""
        span, prepared = self._span(layers, hidden.shape[1], kv), self.attention.prepare(view, kv)
        prepared.call.num_heads = self._num_heads
        num_tokens = hidden.shape[0]
        units = np.zeros(len(layers), np.int64)  # the next one of each layer's attention
        assert hidden.is_contiguous() and hidden.dtype == torch.float32, (hidden.stride(), hidden.dtype)
        slots = view.slots.contiguous()
        call = _Call.from_buffer_copy(span.call)
        call.attention, call.units = ctypes.addressof(prepared.call), units.ctypes.data
        call.hidden, call.num_tokens = hidden.data_ptr(), num_tokens
        call.positions, call.slots = prepared.call.positions, slots.data_ptr()
        call.num_slots = kv.data.shape[2]
        call.keys, call.values = kv.keys(kv_layer).data_ptr(), kv.values(kv_layer).data_ptr()
        call.bytes_per_kv_layer = 4 * kv.data.stride(0)
        num_threads = self._threads.count if num_tokens * span.num_products > _PARALLEL_FROM else 1
        if num_threads > 1:
            call.team_size, call.barrier = self._threads.team_size, self._threads.barrier
        scratch = self._take_scratch(span, hidden)
        begin = scratch.data_ptr()
        for name, size in span.sizes.items():
            setattr(call, name, begin)
            begin += 64 * -(-size * num_tokens // 16)
        self._threads.run(_run_layers, ctypes.addressof(call), num_threads)
        if num_tokens <= _KEPT_TOKENS:
            self._scratch = scratch

    def _take_scratch(self, span: _Span, hidden: Tensor) -> Tensor:
        """Memory for a pass. That of short ones is kept between them, since new memory costs a pass of few
        tokens as much as all of its norms; while one runs it is not there, so that another thread's pass
        makes its own."""
        total = span.num_numbers * len(hidden) + 16 * len(span.sizes)
        scratch, self._scratch = self._scratch, None
        return hidden.new_empty(total) if scratch is None or scratch.numel() < total else scratch

    def _span(self, layers: Sequence[LayerWeights], hidden_size: int, kv: PagedKV) -> _Span:
        """What is the same in all passes over `layers`, made once; they are kept: ids stay their own."""
        key = tuple(map(id, layers))
        if key not in self._spans:
            self._spans[key] = self._make_span(layers, hidden_size, kv)
        return self._spans[key]

    def _make_span(self, layers: Sequence[LayerWeights], hidden_size: int, kv: PagedKV) -> _Span:
        table = (_Layer * len(layers))(*map(_layer, layers))
        num_kv_heads, head_dim = kv.data.shape[-2:]
        size_q, intermediate = self._num_heads * head_dim, max(layer.intermediate for layer in table)
        sizes = {
            "normed": hidden_size,
            "qkv": size_q + 2 * num_kv_heads * head_dim,
            "q": size_q,
            "attended": size_q,
            "delta": hidden_size,
            "gate_up": 2 * intermediate,
            "activated": intermediate,
        }
        if self._is_int8:  # in numbers of four bytes, too
            widest = numba_int8.pad_inputs(max(hidden_size, size_q, intermediate))
            sizes |= {"terms": numba_int8.TERMS * widest // 4, "scales": 1}
        call = _Call(
            layers=ctypes.addressof(table),
            num_layers=len(layers),
            hidden_size=hidden_size,
            num_heads=self._num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            cos_sin=self._cos_sin.data_ptr(),
            num_positions=len(self._cos_sin),
            eps=self._eps,
        )
        num_products = hidden_size * (size_q + 3 * intermediate) * len(layers)
        return _Span(layers, table, call, sizes, sum(sizes.values()), num_products)


def _layer(weights: LayerWeights) -> _Layer:
    layer = _Layer()
    linears: dict[str, Linear] = {}
    if weights.attention is not None:
        linears |= {"qkv": weights.attention.qkv, "output": weights.attention.output}
        layer.attention_norm = weights.attention.norm.data_ptr()
        if weights.attention.qk_norms is not None:
            layer.q_norm, layer.k_norm = (norm.data_ptr() for norm in weights.attention.qk_norms)
    if weights.mlp is not None:
        linears |= {"gate_up": weights.mlp.gate_up, "down": weights.mlp.down}
        layer.mlp_norm = weights.mlp.norm.data_ptr()
    for name, linear in linears.items():
        assert isinstance(linear, PanelLinear | Int8Linear)
        setattr(layer, name, linear.panels.data_ptr())
        if isinstance(linear, PanelLinear):  # panels of the other have their biases
            setattr(layer, f"{name}_bias", linear.bias.data_ptr())
        if name == "down":
            layer.intermediate = linear.num_inputs
    return layer
