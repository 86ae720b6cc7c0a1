"""What a compiled pass is told, by address: its steps, the pass over them, passes that run one by one."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

_LINEARS = ("qkv", "output", "gate_up", "down", "head")


def _addresses_and_sizes(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_int64) for name in names]


class Step(ctypes.Structure):
    """A step of a pass and its weights, by address; 0 = it has none such. `norm`: the one before attention,
    or before the head; `num_inputs`: of `down`; `num_outputs`, `vocabulary`: of `head`; `.._size`: bytes of
    a weight of a product in float32; `bits`: of weights in narrow numbers (`numba_narrow`), 0 = float32."""

    _fields_ = [
        *_addresses_and_sizes("kind", "bits", "kv_layer", "norm", "q_norm", "k_norm", "mlp_norm"),
        *_addresses_and_sizes("num_inputs", "num_outputs", "vocabulary"),
        *_addresses_and_sizes(*_LINEARS, *(f"{name}_bias" for name in _LINEARS)),
        *_addresses_and_sizes(*(f"{name}_size" for name in _LINEARS)),
    ]


class Call(ctypes.Structure):
    """A pass, by the addresses and sizes of what it reads and writes.

    attention, attend      the attention of all its layers, and what computes it
    multiply, split_tokens, multiply_narrow   the kernels of products, in float32 and in narrow numbers
    source, source_rows    where hidden states come from: row source_rows[t] is that of token t; 0 = they are
                           in `hidden`
    target, target_rows    where those after the last layer are left; 0 = nowhere but in `hidden`
    terms, ahead           of what a product in narrow numbers reads, 0 = there is none; bytes of weights that
                           it asks for before they are read
    tiles_from             tokens from which matrix tiles multiply in int8, 0 = never
    best, sums             what is told of logits, as scan_row does, the token for its place; 0 = nothing
    cu_q_lens, most_per_unit   what attention's units are cut by
    is_chain               whether its tokens have no paths; then path_starts are written here
    """

    _fields_ = [
        *_addresses_and_sizes("next", "team_size", "barrier", "steps", "num_steps", "attention"),
        *_addresses_and_sizes("attend", "multiply", "split_tokens", "multiply_narrow"),
        *_addresses_and_sizes("hidden", "aside", "num_tokens", "hidden_size", "num_heads", "num_kv_heads"),
        *_addresses_and_sizes("head_dim", "source", "source_rows", "target", "target_rows"),
        *_addresses_and_sizes("cos_sin", "num_positions", "positions", "slots"),
        *_addresses_and_sizes("keys", "values", "bytes_per_kv_layer", "kv_size"),
        *_addresses_and_sizes("normed", "qkv", "q", "attended", "delta", "gate_up", "activated"),
        *_addresses_and_sizes("terms", "ahead", "tiles_from", "logits", "best", "sums"),
        *_addresses_and_sizes("cu_q_lens", "most_per_unit", "is_chain"),
        ("eps", ctypes.c_double),
    ]


class Places(ctypes.Structure):
    """What a link reads, and says, between two linked passes.

    which        the pass that has run, -1 before the first; to be set to the one that runs next, -1 = none
    num_tokens   of either
    token_ids, hidden_rows, positions, slots, cu_q_lens   arrays of TokenPlaces, by address: those of the pass
                 that has run, to be set to those of the next
    best, sums, logits   what the pass that has run tells, of those that it tells: [tokens] int64, [tokens],
                 [tokens, n]
    """

    _fields_ = [
        *_addresses_and_sizes("which", "num_tokens", "token_ids", "hidden_rows", "positions", "slots"),
        *_addresses_and_sizes("cu_q_lens", "best", "sums", "logits"),
    ]


class Linked(ctypes.Structure):
    """Passes that run one after the other, by address.

    calls                 a Call for each that there may be, of which any number is to be run in any order
    run_pass              what runs one: it is as large as all else that is compiled, so that it is there once
    places, link, data    Places, and what is called with these two: pass_steps.Link
    clock                 of `threads.now`
    counts                [calls, 3] int64: how often each ran, over how many tokens, and nanoseconds
    """

    _fields_ = [
        *_addresses_and_sizes("next", "team_size", "barrier", "calls", "num_calls", "places", "link", "data"),
        *_addresses_and_sizes("run_pass", "clock", "counts"),
    ]


class InOrder(ctypes.Structure):
    """What `in_order` is told: how many passes, over how many tokens."""

    _fields_ = _addresses_and_sizes("num_passes", "num_tokens")


STEP, CALL, PLACES, LINKED, IN_ORDER = map(np.dtype, (Step, Call, Places, Linked, InOrder))
