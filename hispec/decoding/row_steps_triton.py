"""What a round of static shape does with single numbers of each row, on a GPU: one kernel where torch takes
four to twelve. The twins are in `row_steps` and `batch`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ee_models.kernels.triton_math import unspecialised_jit

_BLOCK = 128


@unspecialised_jit
def _count_live(
    limits: tl.tensor,
    first: tl.tensor,
    most_drafts: tl.tensor,
    out: tl.tensor,
    num_rows: int,
    num_nodes: int,
    less: int,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    left = tl.load(limits + row, mask=is_row, other=0) - tl.load(first + row, mask=is_row, other=0)
    if most_drafts is not None:
        left = tl.minimum(left, tl.load(most_drafts + row, mask=is_row, other=0) + 1)
    left = tl.minimum(left, num_nodes)
    tl.store(out + row, tl.maximum(left - less, 0), mask=is_row)


def count_live(
    limits: Tensor, first: Tensor, most_drafts: Tensor | None, num_nodes: int, less: int
) -> Tensor:
    """As `row_steps.count_live`."""
    out = torch.empty_like(first)
    (rows,) = first.shape
    _count_live[(triton.cdiv(rows, _BLOCK),)](
        limits, first, most_drafts, out, rows, num_nodes, less, _BLOCK, num_warps=1
    )
    return out


@unspecialised_jit
def _take_drafts(
    tokens: tl.tensor,
    limits: tl.tensor,
    first: tl.tensor,
    most_drafts: tl.tensor,
    proposed: tl.tensor,
    sources: tl.tensor,
    counts: tl.tensor,
    num_live: tl.tensor,
    drafted: tl.tensor,
    noted_sources: tl.tensor,
    width: int,
    num_nodes: int,
    last_token: int,
    cycle: int,
    num_cycles: int,
    source: int,
    BLOCK: tl.constexpr,
) -> None:
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    in_window = column < width
    token = tl.load(tokens + row * width + column, mask=in_window, other=0)
    tl.store(tokens + row * width + column, tl.minimum(tl.maximum(token, 0), last_token), mask=in_window)
    left = tl.minimum(tl.load(limits + row) - tl.load(first + row), num_nodes)
    is_live = left > 0
    if most_drafts is not None:
        left = tl.minimum(left, tl.load(most_drafts + row) + 1)
    count = tl.maximum(tl.minimum(tl.load(proposed + row), left - 1), 0)
    tl.store(counts + row, count)
    tl.store(num_live + row, tl.where(is_live, count + 1, 0))
    tl.store(drafted + row * num_cycles + cycle, tl.where(is_live, count, -1))
    if sources is not None:
        source = tl.load(sources + row)
    tl.store(noted_sources + row * num_cycles + cycle, source)


def take_drafts(
    tokens: Tensor,
    limits: Tensor,
    first: Tensor,
    most_drafts: Tensor | None,
    proposed: Tensor,
    source: Tensor | int,
    drafted: Tensor,
    noted_sources: Tensor,
    cycle: int,
    num_nodes: int,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """As `row_steps.take_drafts`, which says what of."""
    (rows,), width = first.shape, tokens.shape[1]
    counts, num_live = torch.empty((2, rows), dtype=torch.int64, device=first.device)
    assert tokens.is_contiguous()
    _take_drafts[(rows,)](
        tokens,
        limits,
        first,
        most_drafts,
        proposed.contiguous(),
        source.contiguous() if isinstance(source, Tensor) else None,
        counts,
        num_live,
        drafted,
        noted_sources,
        width,
        num_nodes,
        vocab_size - 1,
        cycle,
        drafted.shape[1],
        0 if isinstance(source, Tensor) else int(source),
        triton.next_power_of_2(width),
        num_warps=1,
    )
    return counts, num_live


@unspecialised_jit
def _end_check(
    tokens: tl.tensor,
    limits: tl.tensor,
    most_checks: tl.tensor,
    first: tl.tensor,
    accepted: tl.tensor,
    own: tl.tensor,
    goes_on: tl.tensor,
    kept: tl.tensor,
    num_put: tl.tensor,
    num_rows: int,
    width: int,
    cycle: int,
    num_cycles: int,
    BLOCK: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    is_row = row < num_rows
    begin, limit = tl.load(first + row, mask=is_row, other=0), tl.load(limits + row, mask=is_row, other=0)
    num_accepted = tl.load(accepted + row, mask=is_row, other=0)
    end = tl.where(begin < limit, begin + num_accepted + 1, begin)
    token = tl.load(own + row, mask=is_row, other=0)
    tl.store(tokens + row * width + tl.minimum(end, width - 1), token, mask=is_row & (begin < limit))
    tl.store(kept + row * num_cycles + cycle, num_accepted, mask=is_row)
    tl.store(num_put + row, end, mask=is_row)
    stops = tl.load(most_checks + row, mask=is_row, other=0) <= cycle + 1
    if goes_on is not None:
        stops = stops | (tl.load(goes_on + row, mask=is_row, other=1) == 0)
    tl.store(limits + row, end, mask=is_row & stops)


def end_check(
    tokens: Tensor,
    limits: Tensor,
    most_checks: Tensor,
    first: Tensor,
    accepted: Tensor,
    own: Tensor,
    goes_on: Tensor | None,
    kept: Tensor,
    cycle: int,
) -> Tensor:
    """As `row_steps.end_check`."""
    (rows,), num_put = first.shape, torch.empty_like(first)
    of_rows = tokens, limits, most_checks, first, accepted, own
    assert all(each.is_contiguous() for each in (*of_rows, kept))
    _end_check[(triton.cdiv(rows, _BLOCK),)](
        *of_rows,
        goes_on,
        kept,
        num_put,
        rows,
        tokens.shape[1],
        cycle,
        kept.shape[1],
        _BLOCK,
        num_warps=1,
    )
    return num_put


@unspecialised_jit
def _end_verify(
    logits: tl.tensor,
    tokens: tl.tensor,
    accepted: tl.tensor,
    own: tl.tensor,
    num_live: tl.tensor,
    paths: tl.tensor,
    begins: tl.tensor,
    counts: tl.tensor,
    evidence: tl.tensor,
    num_tokens: int,
    width: int,
    path_len: int,
    logit_stride: int,
    BLOCK: tl.constexpr,
) -> None:
    row, step = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    num_accepted, live, own_token = tl.load(accepted + row), tl.load(num_live + row), tl.load(own + row)
    if num_accepted < live:
        tl.store(tokens + row * width + tl.minimum(num_accepted + 1, width - 1), own_token)
    count = tl.minimum(num_accepted + 1, live)
    tl.store(counts + row, count)
    is_committed = step < count
    token = tl.load(tokens + row * width + 1 + step, mask=is_committed & (step != num_accepted), other=0)
    token = tl.where(step == num_accepted, own_token, token)
    node = step.to(tl.int64)
    if paths is not None:
        node = tl.load(paths + row * path_len + step, mask=is_committed & (step < path_len), other=0)
    place = tl.minimum(tl.load(begins + row) + node, num_tokens - 1)
    chosen = tl.load(logits + place * logit_stride + token, mask=is_committed, other=0.0)
    tl.store(evidence + row, tl.sum(chosen.to(tl.float32), axis=0))


def end_verify(
    logits: Tensor,
    tokens: Tensor,
    accepted: Tensor,
    own: Tensor,
    num_live: Tensor,
    paths: Tensor | None,
    begins: Tensor,
    most: int,
) -> tuple[Tensor, Tensor]:
    """As `row_steps.end_verify`: logits [tokens, vocab], of which row r's begin at begins [rows + 1]; most
    tokens that a row may commit -> (counts, evidence)."""
    (rows,), width = accepted.shape, tokens.shape[1]
    counts = torch.empty(rows, dtype=torch.int64, device=tokens.device)
    evidence = torch.empty(rows, dtype=torch.float32, device=tokens.device)
    assert logits.stride(1) == 1 and tokens.is_contiguous()
    assert all(each.is_contiguous() for each in (accepted, own, num_live, begins))
    _end_verify[(rows,)](
        logits,
        tokens,
        accepted,
        own,
        num_live,
        None if paths is None else paths.contiguous(),
        begins,
        counts,
        evidence,
        len(logits),
        width,
        0 if paths is None else paths.shape[1],
        logits.stride(0),
        triton.next_power_of_2(most),
        num_warps=1,
    )
    return counts, evidence


@unspecialised_jit
def _put(
    target: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    values: tl.tensor,
    live: tl.tensor,
    num_values: int,
    num: int,
    width: int,
    shift: int,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = index // num
    is_value = index < num_values
    is_put = is_value & (tl.load(live + token, mask=is_value, other=0) != 0)
    row, column = tl.load(rows + token, mask=is_put, other=0), tl.load(columns + index, mask=is_put, other=0)
    value = tl.load(values + index, mask=is_put, other=0)
    tl.store(target + row * width + column + shift, value, mask=is_put)


def put(target: Tensor, rows: Tensor, columns: Tensor, values: Tensor, live: Tensor, shift: int) -> None:
    """As `Span.put`."""
    assert target.is_contiguous() and columns.shape == values.shape
    _put[(triton.cdiv(values.numel(), _BLOCK),)](
        target,
        rows,
        columns.contiguous(),
        values.contiguous(),
        live,
        values.numel(),
        values.shape[1],
        target.shape[1],
        shift,
        _BLOCK,
        num_warps=1,
    )
