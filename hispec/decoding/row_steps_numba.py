"""What a packed round does with single numbers of each row, on a CPU: one compiled call where torch takes
four to twelve, each of which costs more than its arithmetic. The twins are in `row_steps` and `batch`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ee_models.kernel_cache import njit

_ANY = np.empty(0, np.int64)  # instead of None, so that there is one compiled form
_NEVER = np.empty(0, np.bool_)
_CHAIN = np.empty((0, 0), np.int64)


@njit
def _count_live(limits: Any, first: Any, most_drafts: Any, num_nodes: int, less: int, out: Any) -> None:
    for row in range(first.shape[0]):
        left = min(limits[row] - first[row], num_nodes)
        if most_drafts.shape[0] > 0:
            left = min(left, most_drafts[row] + 1)
        out[row] = max(left - less, 0)


def count_live(
    limits: Tensor, first: Tensor, most_drafts: Tensor | None, num_nodes: int, less: int
) -> Tensor:
    """As `row_steps.count_live`."""
    out = np.empty(first.shape[0], np.int64)
    most = _ANY if most_drafts is None else most_drafts.numpy()
    _count_live(limits.numpy(), first.numpy(), most, num_nodes, less, out)
    return torch.from_numpy(out)


@njit
def _take_drafts(
    tokens: Any,
    limits: Any,
    first: Any,
    most_drafts: Any,
    proposed: Any,
    sources: Any,
    source: int,
    drafted: Any,
    noted_sources: Any,
    cycle: int,
    num_nodes: int,
    last_token: int,
    out: Any,
) -> None:
    for row in range(first.shape[0]):
        for column in range(tokens.shape[1]):
            tokens[row, column] = min(max(tokens[row, column], 0), last_token)
        left = min(limits[row] - first[row], num_nodes)
        is_live = left > 0
        if most_drafts.shape[0] > 0:
            left = min(left, most_drafts[row] + 1)
        count = max(min(proposed[row], left - 1), 0)
        out[0, row] = count
        out[1, row] = count + 1 if is_live else 0
        drafted[row, cycle] = count if is_live else -1
        noted_sources[row, cycle] = sources[row] if sources.shape[0] > 0 else source


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
    out = np.empty((2, first.shape[0]), np.int64)
    # What drafters give may lie in any order, for which another kernel would be compiled.
    sources, source_of_all = _ANY, 0
    if isinstance(source, Tensor):
        sources = source.contiguous().numpy()
    else:
        source_of_all = int(source)
    _take_drafts(
        tokens.numpy(),
        limits.numpy(),
        first.numpy(),
        _ANY if most_drafts is None else most_drafts.numpy(),
        proposed.contiguous().numpy(),
        sources,
        source_of_all,
        drafted.numpy(),
        noted_sources.numpy(),
        cycle,
        num_nodes,
        vocab_size - 1,
        out,
    )
    counts, num_live = torch.from_numpy(out).unbind()
    return counts, num_live


@njit
def _end_check(
    tokens: Any,
    limits: Any,
    most_checks: Any,
    first: Any,
    accepted: Any,
    own: Any,
    goes_on: Any,
    kept: Any,
    cycle: int,
    out: Any,
) -> None:
    last = tokens.shape[1] - 1
    for row in range(first.shape[0]):
        kept[row, cycle] = accepted[row]
        end = first[row]
        if end < limits[row]:
            end += accepted[row] + 1
            tokens[row, min(end, last)] = own[row]
        out[row] = end
        if cycle + 1 >= most_checks[row] or (goes_on.shape[0] > 0 and not goes_on[row]):
            limits[row] = end


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
    out = np.empty(first.shape[0], np.int64)
    of_rows = (each.numpy() for each in (tokens, limits, most_checks, first, accepted, own))
    _end_check(*of_rows, _NEVER if goes_on is None else goes_on.numpy(), kept.numpy(), cycle, out)
    return torch.from_numpy(out)


@njit
def _end_verify(
    logits: Any,
    tokens: Any,
    accepted: Any,
    own: Any,
    num_live: Any,
    paths: Any,
    begins: Any,
    most: int,
    counts: Any,
    evidence: Any,
) -> None:
    last = logits.shape[0] - 1
    for row in range(accepted.shape[0]):
        if accepted[row] < num_live[row]:
            tokens[row, min(accepted[row] + 1, tokens.shape[1] - 1)] = own[row]
        count = min(accepted[row] + 1, num_live[row])
        total = np.float32(0.0)
        for step in range(min(count, most, tokens.shape[1] - 1)):
            node = paths[row, step] if paths.shape[0] > 0 else step
            total += logits[min(begins[row] + node, last), tokens[row, step + 1]]
        counts[row] = count
        evidence[row] = total


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
    """As `row_steps.end_verify`: logits [tokens, vocab] float32, of which row r's begin at begins [rows + 1];
    most tokens that a row may commit -> (counts, evidence)."""
    counts, evidence = np.empty(accepted.shape[0], np.int64), np.empty(accepted.shape[0], np.float32)
    of_rows = tokens.numpy(), accepted.numpy(), own.numpy(), num_live.numpy()
    nodes = _CHAIN if paths is None else paths.numpy()
    _end_verify(logits.numpy(), *of_rows, nodes, begins.numpy(), most, counts, evidence)
    return torch.from_numpy(counts), torch.from_numpy(evidence)


@njit
def _put(target: Any, rows: Any, columns: Any, values: Any, shift: int) -> None:
    for index in range(rows.shape[0]):
        for place in range(values.shape[1]):
            target[rows[index], columns[index, place] + shift] = values[index, place]


def put(target: Tensor, rows: Tensor, columns: Tensor, values: Tensor, shift: int) -> None:
    """As `Span.put`, whose tokens are all live."""
    assert columns.shape == values.shape and rows.shape[0] == values.shape[0]  # nothing else would notice
    _put(target.numpy(), rows.numpy(), columns.numpy(), values.numpy(), shift)
