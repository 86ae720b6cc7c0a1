"""The compiled half of `fused_pass`: what a pass is told, by address, and the way through its steps.

Threads share a product by panels, attention by units, and what is between by tokens, each its own; they wait
for each other wherever one reads what another has written.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numba import cfunc, njit, types
from numba.np.numpy_support import carray, from_dtype

from .attention.numba_pages import CALL, NO_PATH, attend_units, cut_units
from .kernels import numba_gemm, numba_int
from .kernels.cpu import add_rms_norm, rope_and_store, silu_mul
from .kernels.numba_scan import scan_row
from .kernels.threads import address_of, count_team, pointer, take, wait
from .pass_steps import Kind

LINEARS = ("qkv", "output", "gate_up", "down", "head")


def _addresses_and_sizes(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_int64) for name in names]


class Step(ctypes.Structure):
    """A step of a pass and its weights, by address; 0 = it has none such. `norm`: the one before attention,
    or before the head; `num_inputs`: of `down`; `num_outputs`, `vocabulary`: of `head`; `.._size`: bytes of
    a weight of a product in float32; `bits`: of weights in whole numbers, 8 or 4, 0 = they are float32's."""

    _fields_ = [
        *_addresses_and_sizes("kind", "bits", "kv_layer", "norm", "q_norm", "k_norm", "mlp_norm"),
        *_addresses_and_sizes("num_inputs", "num_outputs", "vocabulary"),
        *_addresses_and_sizes(*LINEARS, *(f"{name}_bias" for name in LINEARS)),
        *_addresses_and_sizes(*(f"{name}_size" for name in LINEARS)),
    ]


class Call(ctypes.Structure):
    """A pass, by the addresses and sizes of what it reads and writes.

    next_units             the next unit of each step's attention, int64
    source, source_rows    where hidden states come from: row source_rows[t] is that of token t; 0 = they are
                           in `hidden`
    target, target_rows    where those after the last layer are left; 0 = nowhere but in `hidden`
    terms, ahead           of what a product in whole numbers reads, 0 = there is none; bytes of weights that
                           it asks for before they are read
    best, sums             what is told of logits, as scan_row does, the token for its place; 0 = nothing
    cu_q_lens, tokens_per_unit   what attention's units are cut by
    is_chain               whether its tokens have no paths; then path_starts are written here
    num_rounds             passes, at most, one after the other: each over the tokens that the one before it
                           chose, of which positions, slots and source_rows then tell; of more than one, rows
                           have a token each, and the pass ends with the head
    chosen, evidence       [passes, tokens] int64, [tokens]: what each pass chose, and the sum of its logits
    stop_begins, stops     the tokens that end token t's row, int64: those from stop_begins[t] to
                           stop_begins[t + 1]
    num_done, is_over      passes that were made; whether the last of them is
    """

    _fields_ = [
        *_addresses_and_sizes("next", "team_size", "barrier", "steps", "num_steps", "attention"),
        *_addresses_and_sizes(
            "next_units", "hidden", "aside", "num_tokens", "hidden_size", "num_heads", "num_kv_heads"
        ),
        *_addresses_and_sizes("head_dim", "source", "source_rows", "target", "target_rows"),
        *_addresses_and_sizes("cos_sin", "num_positions", "positions", "slots"),
        *_addresses_and_sizes("keys", "values", "bytes_per_kv_layer", "kv_size"),
        *_addresses_and_sizes("normed", "qkv", "q", "attended", "delta", "gate_up", "activated"),
        *_addresses_and_sizes("terms", "ahead", "logits", "best", "sums"),
        *_addresses_and_sizes("cu_q_lens", "tokens_per_unit", "is_chain"),
        *_addresses_and_sizes("num_rounds", "chosen", "evidence", "stop_begins", "stops"),
        *_addresses_and_sizes("num_done", "is_over"),
        ("eps", ctypes.c_double),
    ]


_STEP, _CALL = np.dtype(Step), np.dtype(Call)
_kernel = njit(error_model="numpy", nogil=True, cache=True)


@_kernel
def _copy_rows(
    source: int, source_rows: int, target: int, target_rows: int, size: int, first: int, last: int
) -> None:
    """Row target_rows[t] of the matrix at `target` = row source_rows[t] of that at `source`, for tokens t of
    first to last - 1; without rows (0), row t."""
    from_rows = carray(pointer(source_rows), last, np.int64)
    to_rows = carray(pointer(target_rows), last, np.int64)
    for token in range(first, last):
        at = from_rows[token] if source_rows != 0 else token
        to = to_rows[token] if target_rows != 0 else token
        numbers = carray(pointer(source + 4 * at * size), size, np.float32)
        copied = carray(pointer(target + 4 * to * size), size, np.float32)
        for i in range(size):
            copied[i] = numbers[i]


@_kernel
def _add_delta(c: Any, hidden: int, first: int, last: int) -> None:
    size, start = (last - first) * c.hidden_size, 4 * first * c.hidden_size
    numbers = carray(pointer(hidden + start), size, np.float32)
    delta = carray(pointer(c.delta + start), size, np.float32)
    for i in range(size):
        numbers[i] += delta[i]


@_kernel
def _norm(c: Any, hidden: int, weight: int, first: int, last: int, has_delta: bool) -> None:
    """Adds `delta`, if there is one, to the hidden states of tokens first to last - 1 -> their norms."""
    shape, start = (last - first, c.hidden_size), 4 * first * c.hidden_size
    states = carray(pointer(hidden + start), shape, np.float32)
    delta = carray(pointer(c.delta + start), (last - first if has_delta else 0, c.hidden_size), np.float32)
    normed = carray(pointer(c.normed + start), shape, np.float32)
    add_rms_norm(states, delta, carray(pointer(weight), c.hidden_size, np.float32), c.eps, normed)


@_kernel
def _rope_and_store(c: Any, step: Any, keys: int, values: int, first: int, last: int) -> None:
    num_tokens = last - first
    size = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    norm_size = c.head_dim if step.q_norm != 0 else 0
    start_q = 4 * first * c.num_heads * c.head_dim
    rope_and_store(
        carray(pointer(c.qkv + 4 * first * size), (num_tokens, size), np.float32),
        carray(pointer(c.cos_sin), (c.num_positions, 2, c.head_dim // 2), np.float32),
        carray(pointer(step.q_norm), norm_size, np.float32),
        carray(pointer(step.k_norm), norm_size, np.float32),
        c.eps,
        carray(pointer(c.positions + 8 * first), num_tokens, np.int64),
        carray(pointer(c.slots + 8 * first), num_tokens, np.int64),
        keys,
        values,
        c.kv_size,
        carray(pointer(c.q + start_q), (num_tokens, c.num_heads, c.head_dim), np.float32),
    )


@_kernel
def _activate(c: Any, size: int, first: int, last: int) -> None:
    gate_up = carray(pointer(c.gate_up + 8 * first * size), (last - first, 2 * size), np.float32)
    silu_mul(gate_up, carray(pointer(c.activated + 4 * first * size), (last - first, size), np.float32))


@_kernel
def _project(c: Any, bits: int, x: int, inputs: int, weight: Any, out: int, outputs: int, part: Any) -> None:
    """out [tokens, outputs] = bias + x [tokens, inputs] . weight (panels, size, bias), all together: begins
    with this thread's tokens of x, and returns once all of `out` is there."""
    n, (panels, size, bias), (first, last, share, shares) = c.num_tokens, weight, part
    if bits != 0:
        numba_int.split_tokens(bits, x, inputs, c.terms, first, last)
    wait(c.barrier, part[3])
    if bits != 0:
        numba_int.multiply(bits, c.ahead, c.terms, n, inputs, panels, out, outputs, share, shares)
    else:
        numba_gemm.multiply(x, n, inputs, panels, size, bias, out, outputs, share, shares)
    wait(c.barrier, part[3])


@_kernel
def _attend(c: Any, step: Any, attention: Any, next_unit: int, part: Any) -> None:
    """The attention of a layer over its norms, to `delta`; or no more than its keys and values."""
    width, size_q = c.hidden_size, c.num_heads * c.head_dim
    size = size_q + 2 * c.num_kv_heads * c.head_dim
    start = step.kv_layer * c.bytes_per_kv_layer
    keys, values = c.keys + start, c.values + start
    weight = step.qkv, step.qkv_size, step.qkv_bias
    _project(c, step.bits, c.normed, width, weight, c.qkv, size, part)
    _rope_and_store(c, step, keys, values, part[0], part[1])
    if step.kind == Kind.FILL:
        return
    wait(c.barrier, part[3])
    attend_units(attention, next_unit, c.q, keys, values, c.attended)
    if step.bits != 0:  # it begins with whole tokens, of which others have computed heads
        wait(c.barrier, part[3])
    weight = step.output, step.output_size, step.output_bias
    _project(c, step.bits, c.attended, size_q, weight, c.delta, width, part)


@_kernel
def _run_mlp(c: Any, step: Any, part: Any) -> None:
    width, size = c.hidden_size, step.num_inputs
    weight = step.gate_up, step.gate_up_size, step.gate_up_bias
    _project(c, step.bits, c.normed, width, weight, c.gate_up, 2 * size, part)
    _activate(c, size, part[0], part[1])
    weight = step.down, step.down_size, step.down_bias
    _project(c, step.bits, c.activated, size, weight, c.delta, width, part)


@_kernel
def _read_logits(c: Any, step: Any, part: Any) -> None:
    size, (first, last, _, _) = step.num_outputs, part
    weight = step.head, step.head_size, step.head_bias
    _project(c, step.bits, c.normed, c.hidden_size, weight, c.logits, size, part)
    best, sums = carray(pointer(c.best), last, np.int64), carray(pointer(c.sums), last, np.float32)
    for token in range(first, last if c.best != 0 else first):
        place, total = scan_row(c.logits + 4 * token * size, size, c.sums != 0)
        best[token] = (
            carray(pointer(step.vocabulary), size, np.int64)[place] if step.vocabulary != 0 else place
        )
        if c.sums != 0:
            sums[token] = total


@_kernel
def _prepare_attention(c: Any, attention: Any) -> None:
    cu_q_lens = carray(pointer(c.cu_q_lens), attention.num_rows + 1, np.int64)
    units = carray(pointer(attention.units), (attention.num_units, 3), np.int64)
    attention.num_units = cut_units(cu_q_lens, c.tokens_per_unit, units)
    if c.is_chain != 0:
        starts = carray(pointer(attention.path_starts), c.num_tokens, np.int64)
        for token in range(c.num_tokens):
            starts[token] = NO_PATH


@_kernel
def _note_choices(c: Any, num_logits: int) -> None:
    """Notes what a pass chose, and whether it was the last: one of as many as were asked for, or of tokens
    that end a row or are chosen among what is no number."""
    n, number = c.num_tokens, c.num_done
    best, begins = carray(pointer(c.best), n, np.int64), carray(pointer(c.stop_begins), n + 1, np.int64)
    chosen = carray(pointer(c.chosen + 8 * number * n), n, np.int64)
    stops, evidence = (
        carray(pointer(c.stops), begins[n], np.int64),
        carray(pointer(c.evidence), n, np.float32),
    )
    c.num_done = number + 1
    is_over = c.num_done == c.num_rounds
    for token in range(n):
        chosen[token] = best[token]
        logits = carray(pointer(c.logits + 4 * token * num_logits), num_logits, np.float32)
        evidence[token] += logits[best[token]]
        is_over |= not np.isfinite(evidence[token])
        for i in range(begins[token], begins[token + 1]):
            is_over |= stops[i] == best[token]
    c.is_over = is_over


@_kernel
def _place_choices(c: Any, attention: Any) -> None:
    """Each row's next pass is over the token that it chose, a position further on."""
    n, block_size = c.num_tokens, attention.block_size
    cu_q_lens = carray(pointer(c.cu_q_lens), attention.num_rows + 1, np.int64)
    tables = carray(pointer(attention.tables), (attention.num_rows, attention.num_blocks), np.int64)
    best, tokens = carray(pointer(c.best), n, np.int64), carray(pointer(c.source_rows), n, np.int64)
    positions, slots = carray(pointer(c.positions), n, np.int64), carray(pointer(c.slots), n, np.int64)
    for row in range(attention.num_rows):
        for token in range(cu_q_lens[row], cu_q_lens[row + 1]):
            tokens[token] = best[token]
            positions[token] += 1
            block, offset = positions[token] // block_size, positions[token] % block_size
            slots[token] = tables[row, block] * block_size + offset
    next_units = carray(pointer(c.next_units), c.num_steps, np.int64)
    for i in range(c.num_steps):
        next_units[i] = 0


@_kernel
def _run_steps(c: Any, steps: Any, attention: Any, part: Any) -> None:
    """One pass."""
    (first, last, _, _), width = part, c.hidden_size
    hidden, has_delta = c.hidden, False
    if c.source != 0:
        _copy_rows(c.source, c.source_rows, hidden, 0, width, first, last)
    for i in range(c.num_steps):
        step = steps[i]
        if step.kind == Kind.BACK:
            hidden, has_delta = c.hidden, False
        elif step.kind == Kind.BRANCH:
            if has_delta:
                _add_delta(c, hidden, first, last)
            _copy_rows(hidden, 0, c.aside, 0, width, first, last)
            hidden, has_delta = c.aside, False
        elif step.kind == Kind.HEAD:
            _norm(c, hidden, step.norm, first, last, has_delta)
            has_delta = False
            _read_logits(c, step, part)
        else:
            if step.norm != 0:
                _norm(c, hidden, step.norm, first, last, has_delta)
                _attend(c, step, attention, c.next_units + 8 * i, part)
                has_delta = step.kind == Kind.LAYER
            if step.mlp_norm != 0:
                _norm(c, hidden, step.mlp_norm, first, last, has_delta)
                _run_mlp(c, step, part)
                has_delta = True
    if has_delta:
        _add_delta(c, hidden, first, last)
    if c.target != 0:
        _copy_rows(c.hidden, 0, c.target, c.target_rows, width, first, last)


@cfunc(types.void(types.CPointer(from_dtype(_CALL))), cache=True, error_model="numpy")
def run_pass(call: Any) -> None:
    c = carray(call, 1)[0]
    share, shares = take(address_of(call)), count_team(c.team_size)
    n = c.num_tokens
    part = share * n // shares, (share + 1) * n // shares, share, shares
    steps = carray(pointer(c.steps), c.num_steps, _STEP)
    attention = carray(pointer(c.attention), 1, CALL)[0]
    if share == 0:  # the others do not look at it before they have waited
        _prepare_attention(c, attention)
    while True:
        _run_steps(c, steps, attention, part)
        if c.num_rounds <= 1:
            return
        wait(c.barrier, shares)
        if share == 0:
            _note_choices(c, steps[c.num_steps - 1].num_outputs)
            if c.is_over == 0:
                _place_choices(c, attention)
        wait(c.barrier, shares)
        if c.is_over != 0:
            return
