"""The compiled half of `fused_pass`: the way through a pass's steps.

Threads share a product by panels, or by tokens where each has many; attention by units; what is between by
tokens, each its own. They wait for each other wherever one reads what another has written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.np.numpy_support import carray, from_dtype

from .attention.numba_pages import CALL as ATTENTION
from .attention.numba_pages import NO_PATH, cut_by, cut_units
from .kernel_cache import cfunc, inlined, njit
from .kernels import numba_gemm, numba_narrow
from .kernels.cpu import add_rms_norm, rope_and_store, silu_mul
from .kernels.numba_narrow import HAS_TILES
from .kernels.numba_scan import scan_row
from .kernels.threads import address_of, call, call_with_two, count_team, now, pointer, take, wait
from .pass_steps import Kind
from .pass_structures import CALL, IN_ORDER, LINKED, PLACES, STEP

# So many tokens of its own are worth that a thread reads all of a weight: it reads less from the caches of
# other cores. So many at a time go through an MLP. Measured on two cores: in float32 and in int8, by matrix
# tiles, too; not in bfloat16 by tiles, which takes so little time that memory is the limit.
_OWN_TOKENS = 64


@njit
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


@njit
def _add_delta(c: Any, hidden: int, first: int, last: int) -> None:
    size, start = (last - first) * c.hidden_size, 4 * first * c.hidden_size
    numbers = carray(pointer(hidden + start), size, np.float32)
    delta = carray(pointer(c.delta + start), size, np.float32)
    for i in range(size):
        numbers[i] += delta[i]


@njit
def _norm(c: Any, hidden: int, weight: int, first: int, last: int, has_delta: bool) -> None:
    """Adds `delta`, if there is one, to the hidden states of tokens first to last - 1 -> their norms."""
    shape, start = (last - first, c.hidden_size), 4 * first * c.hidden_size
    states = carray(pointer(hidden + start), shape, np.float32)
    delta = carray(pointer(c.delta + start), (last - first if has_delta else 0, c.hidden_size), np.float32)
    normed = carray(pointer(c.normed + start), shape, np.float32)
    add_rms_norm(states, delta, carray(pointer(weight), c.hidden_size, np.float32), c.eps, normed)


@njit
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


@njit
def _activate(c: Any, size: int, first: int, last: int) -> None:
    gate_up = carray(pointer(c.gate_up + 8 * first * size), (last - first, 2 * size), np.float32)
    silu_mul(gate_up, carray(pointer(c.activated + 4 * first * size), (last - first, size), np.float32))


@njit
def _has_own_tokens(c: Any, bits: int, shares: int) -> bool:
    """Whether each thread multiplies tokens of its own by all panels, or panels of its own by all tokens."""
    is_by_tiles = bits == 16 and HAS_TILES
    return not is_by_tiles and c.num_tokens >= _OWN_TOKENS * shares


@inlined
def _multiply_own(
    c: Any, bits: int, x: int, inputs: int, terms: int, weight: Any, out: int, outputs: int, count: int
) -> None:
    """out [count, outputs] = bias + x [count, inputs] . weight (panels, size, bias), by this thread alone."""
    panels, size, bias = weight
    if bits != 0:
        numba_narrow.call_split(c.split_tokens, (bits, x, inputs, terms, 0, count))
        of_tokens = bits, c.ahead, c.tiles_from, terms, count, inputs
        numba_narrow.call_multiply(c.multiply_narrow, (*of_tokens, panels, out, outputs, 0, 1))
    else:
        numba_gemm.call_multiply(c.multiply, (x, count, inputs, panels, size, bias, out, outputs, 0, 1))


@njit
def _project(c: Any, bits: int, x: int, inputs: int, weight: Any, out: int, outputs: int, part: Any) -> None:
    """out [tokens, outputs] = bias + x [tokens, inputs] . weight (panels, size, bias), all together: begins
    with this thread's tokens of x, and returns once all of `out` is there."""
    (panels, size, bias), (first, last, share, shares) = weight, part
    terms, n = c.terms, c.num_tokens
    if _has_own_tokens(c, bits, shares):
        if bits != 0:
            terms += first * numba_narrow.count_bytes(bits, inputs)[3]
        x, out = x + 4 * first * inputs, out + 4 * first * outputs
        _multiply_own(c, bits, x, inputs, terms, weight, out, outputs, last - first)
    else:
        if bits != 0:
            numba_narrow.call_split(c.split_tokens, (bits, x, inputs, terms, first, last))
        wait(c.barrier, shares)
        if bits != 0:
            of_tokens = bits, c.ahead, c.tiles_from, terms, n, inputs
            numba_narrow.call_multiply(c.multiply_narrow, (*of_tokens, panels, out, outputs, share, shares))
        else:
            numba_gemm.call_multiply(
                c.multiply, (x, n, inputs, panels, size, bias, out, outputs, share, shares)
            )
    # The next product's terms lie elsewhere for each thread, and may lie where another's of this one do.
    wait(c.barrier, part[3])


@inlined
def _attend(c: Any, step: Any, attention: Any, part: Any) -> None:
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
    if part[2] == 0:  # all have left the layer before
        attention.next, attention.keys, attention.values = 0, keys, values
    wait(c.barrier, part[3])
    call(c.attend, c.attention)
    if step.bits != 0 or _has_own_tokens(c, step.bits, part[3]):  # it begins with whole tokens, of which
        wait(c.barrier, part[3])  # others have computed heads
    weight = step.output, step.output_size, step.output_bias
    _project(c, step.bits, c.attended, size_q, weight, c.delta, width, part)


@inlined
def _run_mlp(c: Any, step: Any, hidden: int, has_delta: bool, part: Any) -> None:
    """The MLP of a layer, to `delta`, over the norms of hidden states to which `delta` is added first."""
    (first, last, _, shares), width, size = part, c.hidden_size, step.num_inputs
    gate_up = step.gate_up, step.gate_up_size, step.gate_up_bias
    down = step.down, step.down_size, step.down_bias
    if _has_own_tokens(c, step.bits, shares):
        _run_own_mlp(c, step.bits, (hidden, has_delta, step.mlp_norm), gate_up, down, size, first, last)
        wait(c.barrier, shares)  # as _project does
    else:
        _norm(c, hidden, step.mlp_norm, first, last, has_delta)
        _project(c, step.bits, c.normed, width, gate_up, c.gate_up, 2 * size, part)
        _activate(c, size, first, last)
        _project(c, step.bits, c.activated, size, down, c.delta, width, part)


@njit
def _run_own_mlp(
    c: Any, bits: int, source: Any, gate_up: Any, down: Any, size: int, first: int, last: int
) -> None:
    """As _run_mlp, by one thread for tokens first to last - 1: block after block of them, so that what is
    between the products, all in the same place, stays in the caches of its core."""
    (hidden, has_delta, norm), width, terms = source, c.hidden_size, c.terms
    if bits != 0:
        of_width, of_size = numba_narrow.count_bytes(bits, width), numba_narrow.count_bytes(bits, size)
        terms += first * max(of_width[3], of_size[3])
    between, activated = c.gate_up + 8 * first * size, c.activated + 4 * first * size
    num_blocks = max(1, (last - first) // _OWN_TOKENS)  # none is smaller: each reads all weights once more
    for block in range(num_blocks):
        begin = first + block * (last - first) // num_blocks
        end = first + (block + 1) * (last - first) // num_blocks
        _norm(c, hidden, norm, begin, end, has_delta)
        normed, delta = c.normed + 4 * begin * width, c.delta + 4 * begin * width
        _multiply_own(c, bits, normed, width, terms, gate_up, between, 2 * size, end - begin)
        _activate(c, size, first, first + end - begin)
        _multiply_own(c, bits, activated, size, terms, down, delta, width, end - begin)


@inlined
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


@njit
def _prepare_attention(c: Any, attention: Any) -> None:
    cu_q_lens = carray(pointer(c.cu_q_lens), attention.num_rows + 1, np.int64)
    units = carray(pointer(attention.units), (c.num_tokens, 3), np.int64)
    most = cut_by(c.num_tokens, attention.num_kv_heads, attention.many_units, c.most_per_unit)
    attention.num_tokens, attention.num_units = c.num_tokens, cut_units(cu_q_lens, most, units)
    if c.is_chain != 0:
        starts = carray(pointer(attention.path_starts), c.num_tokens, np.int64)
        for token in range(c.num_tokens):
            starts[token] = NO_PATH
    attention.q, attention.out = c.q, c.attended


@inlined
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
                _attend(c, step, attention, part)
                has_delta = step.kind == Kind.LAYER
            if step.mlp_norm != 0:
                _run_mlp(c, step, hidden, has_delta, part)
                has_delta = True
    if has_delta:
        _add_delta(c, hidden, first, last)
    if c.target != 0:
        _copy_rows(c.hidden, 0, c.target, c.target_rows, width, first, last)


@cfunc(types.void(types.CPointer(from_dtype(CALL))))
def run_pass(data: Any) -> None:
    c = carray(data, 1)[0]
    share, shares, n = take(address_of(data)), count_team(c.team_size), c.num_tokens
    attention = carray(pointer(c.attention), 1, ATTENTION)[0]
    if share == 0:  # the others do not look at it before they have waited
        _prepare_attention(c, attention)
    part = share * n // shares, (share + 1) * n // shares, share, shares
    _run_steps(c, carray(pointer(c.steps), c.num_steps, STEP), attention, part)


@cfunc(types.void(types.CPointer(from_dtype(LINKED))))
def run_linked(data: Any) -> None:
    """Calls the link, then the pass that it has asked for, and so on, until it asks for none."""
    c = carray(data, 1)[0]
    share, shares = take(address_of(data)), count_team(c.team_size)
    places, calls = carray(pointer(c.places), 1, PLACES)[0], carray(pointer(c.calls), c.num_calls, CALL)
    counts = carray(pointer(c.counts), (c.num_calls, 3), np.int64)
    while True:
        began = np.int64(0)
        if share == 0:
            call_with_two(c.link, c.places, c.data)
            if places.which >= 0:
                of_next = calls[places.which]
                of_next.next, of_next.num_tokens = 0, places.num_tokens
            began = now(c.clock)
        wait(c.barrier, shares)
        which = places.which
        if which < 0:
            return
        call(c.run_pass, c.calls + which * calls.strides[0])
        wait(c.barrier, shares)
        if share == 0:
            counts[which, 0] += 1
            counts[which, 1] += places.num_tokens
            counts[which, 2] += now(c.clock) - began


@cfunc(types.void(types.CPointer(from_dtype(PLACES)), types.CPointer(from_dtype(IN_ORDER))))
def in_order(places: Any, data: Any) -> None:
    """A link: each pass once, by its number, over the same tokens."""
    p, asked = carray(places, 1)[0], carray(data, 1)[0]
    is_over = p.which + 1 == asked.num_passes
    p.which, p.num_tokens = -1 if is_over else p.which + 1, asked.num_tokens
