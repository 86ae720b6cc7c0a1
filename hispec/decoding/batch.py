"""What a round runs over (its rows on the device, and how its stages are run), the tokens of one pass, and
what a round committed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cache.view import BatchView
from ee_models.kernels import runs_numba, runs_triton

from ..outputs import TokenLogprobs
from ..sampling.inputs import SamplingInput
from ..sampling.sampler import Sampler


def directly(name: Hashable, run: Callable[..., Any], *inputs: Tensor) -> Any:
    """Runs a stage eagerly."""
    return run(*inputs)


@dataclass(frozen=True)
class Execution:
    """How the stages of a round are run.

    is_static   a pass takes the whole rectangle [rows, q_len] of its tokens, live or not, so that shapes
                depend on the plan and the number of rows alone: what a captured graph needs
    may_sync    the host may read values in the middle of a round, and leave out what they make needless
    call        runs a stage: run(*inputs), perhaps from a captured graph known by `name`
    """

    is_static: bool = False
    may_sync: bool = True
    call: Callable[..., Any] = directly


PACKED = Execution()  # eagerly, over the live tokens alone
STATIC = Execution(is_static=True, may_sync=False)


class Watch:
    """What exits that the plan does not use would have chosen in a round [DEL's shadow tokens], and what was
    drafted.

    layers   of the exits
    tokens   [layers, rows, window + 1]: exit i would have put tokens[i, row, j] after column j
    drafts   [rows, window + 1]: the draft that was put into column j, -1 = none
    """

    def __init__(self, layers: Sequence[int], num_rows: int, window: int, device: torch.device) -> None:
        self.layers = tuple(layers)
        self.tokens = torch.full(
            (len(self.layers), num_rows, window + 1), -1, dtype=torch.int64, device=device
        )
        self.drafts = torch.full((num_rows, window + 1), -1, dtype=torch.int64, device=device)

    def record_drafts(self, tokens: Tensor, columns: Tensor, counts: Tensor) -> None:
        """Notes a cycle's drafts: the first counts [rows] of tokens[row, columns [rows, n]]."""
        columns = columns.clamp(max=self.drafts.shape[1] - 1)
        is_draft = torch.arange(columns.shape[1], device=columns.device) < counts.unsqueeze(-1)
        self.drafts.scatter_(1, columns, torch.where(is_draft, tokens.gather(1, columns), -1))

    def count_agreements(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """[rows, layers, 4]: of the first counts [rows] columns, whose context was committed: how many there
        are; after how many the exit would have chosen what was committed, tokens [rows, window + 1]; how many
        a draft followed; and with how many of these drafts the exit agreed.
        """
        valid = torch.arange(tokens.shape[1] - 1, device=tokens.device) < counts.unsqueeze(-1)
        chosen, drafts = self.tokens[:, :, :-1], self.drafts[:, 1:]
        has_draft = valid & (drafts >= 0)
        each = torch.stack(
            (
                valid.expand(chosen.shape),
                valid & (chosen == tokens[:, 1:]),
                has_draft.expand(chosen.shape),
                has_draft & (chosen == drafts),
            )
        )
        return each.sum(-1).permute(2, 1, 0)


@dataclass
class RoundBatch:
    """The rows of one round, on the device. Column j of the window lies in the KV slot of position starts + j
    of the row's sequence, and is that position except in the tree of a draft cycle, whose siblings share one.

    tokens           [rows, window + 1] int64: column 0 is x_n, the last committed token; the rest is filled
                     by the tiers
    starts           [rows] int64: n, the position of x_n; KV is valid below it at every layer
    limits           [rows] int64: columns that the row may process: 0 = no row here, 1 = plain decoding, at
                     most window
    most_drafts      [rows] int64: drafts that a cycle of the row's may have, if these are a chain
    most_checks      [rows] int64: draft cycles that the row may have before verify
    block_tables     [rows, max_blocks] int64, covering starts + limits positions
    max_context_len  int, at least as many for every row
    keeps_logits     whether the caller wants verify's logits after the round
    watch            where exits that the plan does not use note their choices; None = they are not read
    """

    tokens: Tensor
    starts: Tensor
    limits: Tensor
    most_drafts: Tensor
    most_checks: Tensor
    block_tables: Tensor
    block_size: int
    max_context_len: int
    sampler: Sampler
    execution: Execution = PACKED
    keeps_logits: bool = True
    watch: Watch | None = None

    def __post_init__(self) -> None:
        self.window = self.tokens.shape[1] - 1

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def is_fused(self) -> bool:
        """Whether small steps are kernels of Triton's: on a GPU, where shapes are static."""
        return self.execution.is_static and runs_triton(self.tokens.device)

    @property
    def is_numba(self) -> bool:
        """Whether small steps are calls of numba's: on a CPU, where passes take the live tokens alone."""
        return not self.execution.is_static and runs_numba(self.tokens.device)

    def run_stage(self, name: Hashable, run: Callable[..., Any], *inputs: Tensor) -> Any:
        """run(*inputs) as this batch's stages are run. Whatever else `run` reads must lie at the same address
        in every round."""
        return self.execution.call(name, run, *inputs)

    def sync_any_above(self, values: Tensor, bound: Tensor | int) -> bool:
        """Whether any of values [rows] is above its bound, which waits for the device; True where the host
        may not wait."""
        if not self.execution.may_sync:
            return True
        if self.is_numba:  # numpy takes half of the time that torch's operations take
            above = values.numpy() > (bound.numpy() if isinstance(bound, Tensor) else bound)
            return bool(above.any())
        return bool((values > bound).any())

    def sync_max(self, counts: Tensor, limit: int) -> int:
        """The largest of counts [rows], which waits for the device; where shapes are static, `limit`, which
        it never exceeds."""
        return limit if self.execution.is_static else int(counts.max())

    def stop(self, which: Tensor, columns: Tensor) -> None:
        """The rows where which [rows] bool holds process no more than the columns [rows] that they have. In
        place, since graphs of later stages read the limits at their address."""
        self.limits.copy_(torch.where(which, columns, self.limits))

    def put_tokens(self, columns: Tensor, values: Tensor, where: Tensor) -> None:
        """tokens[row, columns[row]] = values[row] in the rows where where [rows] holds; beyond the window
        nothing is read."""
        columns = columns.clamp(max=self.window).unsqueeze(-1)
        old = self.tokens.gather(1, columns)
        self.tokens.scatter_(1, columns, torch.where(where.unsqueeze(-1), values.unsqueeze(-1), old))


@dataclass(frozen=True)
class Together:
    """What rounds that run together must know besides their batch, of which column 0 is the last committed
    token before the first.

    num_rounds   at most
    stop_ids     of each row, tokens after which all end
    caps, rooms, ends   [rows] int64: columns that a round of the row's may process, tokens that it may still
                 get, and positions that it has KV blocks for
    """

    num_rounds: int
    stop_ids: Sequence[Collection[int]]
    caps: Tensor
    rooms: Tensor
    ends: Tensor


@dataclass(frozen=True)
class Span:
    """The tokens of one pass, row after row: the live ones, packed; or, where shapes are static, the whole
    rectangle [rows, q_len].

    rows, columns [tokens]: row, and column of the round's window; flat [tokens] = row * window + column;
    first, node [tokens]: column of the draft cycle's first node, and which of its nodes this is: column =
    first + node; cell [tokens]: index in the flattened rectangle, whose sizes are `shape`; paths [tokens,
    depth]: columns of the drafts on the way to each token; None for a chain, where they are those before it.
    live [tokens] bool: which tokens count, None = all. The others are computed like the first position of
    their row and kept nowhere: their slot is -1, and so is `flat`. token_ids [tokens]: the window's tokens
    when the span was made; None = they are read when they are needed.
    """

    rows: Tensor
    columns: Tensor
    flat: Tensor
    first: Tensor
    node: Tensor
    cell: Tensor
    shape: tuple[int, int]
    paths: Tensor | None
    live: Tensor | None
    view: BatchView
    token_ids: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.rows.shape[0]

    def index_of(self, nodes: Tensor) -> Tensor:
        """Which token [rows] is node nodes [rows] of a row's cycle, in a span over all nodes from 0 on; any,
        in a row without tokens."""
        return (self.view.cu_q_lens[:-1] + nodes).clamp(max=self.num_tokens - 1)

    def read_tokens(self, batch: RoundBatch) -> Tensor:
        """[tokens]: the window's tokens."""
        return batch.tokens[self.rows, self.columns] if self.token_ids is None else self.token_ids

    def spread(self, values: Tensor) -> Tensor:
        """values [tokens, ...] in their cells of the rectangle [rows, q_len, ...]; zeros elsewhere."""
        rows, q_len = self.shape
        if self.live is not None:
            values = values.masked_fill(~self.live.view(-1, *(1,) * (values.dim() - 1)), 0)
        if self.num_tokens == rows * q_len:
            return values.view(rows, q_len, *values.shape[1:])
        out = values.new_zeros(rows * q_len, *values.shape[1:])
        out[self.cell] = values
        return out.view(rows, q_len, *values.shape[1:])

    def put(self, target: Tensor, columns: Tensor, values: Tensor, shift: int = 0) -> None:
        """target[row, columns + shift] = values, [tokens, n] each, int64, for live tokens."""
        if self.live is not None and runs_triton(values.device):
            from . import row_steps_triton

            row_steps_triton.put(target, self.rows, columns, values, self.live, shift)
            return
        if self.live is None and runs_numba(values.device):
            from . import row_steps_numba

            row_steps_numba.put(target, self.rows, columns, values, shift)
            return
        rows, columns = self.rows.unsqueeze(-1), columns + shift if shift else columns
        if self.live is not None:
            values = torch.where(self.live.unsqueeze(-1), values, target[rows, columns])
        target[rows, columns] = values


def make_sampling_input(batch: RoundBatch, span: Span) -> SamplingInput:
    """Where the logits of the span's tokens stand: what the sampler must know to choose after each."""
    return SamplingInput(span.rows, span.columns, span.view.positions, batch.tokens, span.first, span.paths)


@dataclass(frozen=True)
class RoundResult:
    """What a round committed.

    tokens, counts             [rows, window + 1], [rows]: tokens[:, 1:] begin with the `counts` tokens to
                               commit
    drafted, kept, source      [rows, cycles]: drafts that could be judged, -1 = the row had no such cycle; of
                               them, those that the tier above kept; who made them, by drafter.Source
    tentative, accepted        [rows]: tokens put before verify; of them, those that it kept
    evidence                   [rows] float32: the sum of the full model's logits of the tokens to commit. If
                               it is nan or infinite, so is one of these, and the tokens mean nothing
    logits, span, nodes        of verify: logits [tokens, vocab] of the tokens of `span`, None if the batch
                               does not keep them; nodes [rows, depth + 1] on the accepted path
    num_rounds, by_round       rounds that ran together, of which tokens [rows, ...], counts and evidence are
                               those of all; and of each, unless they are plain decoding's, [rounds, rows, 3 +
                               3 cycles] int64: counts, tentative, accepted; by cycle drafted, kept, source
    """

    tokens: Tensor
    counts: Tensor
    drafted: Tensor
    kept: Tensor
    source: Tensor
    tentative: Tensor
    accepted: Tensor
    evidence: Tensor
    logits: Tensor | None
    span: Span | None
    nodes: Tensor
    num_rounds: int = 1
    by_round: Tensor | None = None

    def logprobs(self, row: int, token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
        """Of the tokens that `row` committed, by the full model's unprocessed logits; with the `num_top`
        likeliest at each."""
        assert self.logits is not None and self.span is not None
        first = int(self.span.view.cu_q_lens[row])
        out = []
        for node, token in zip(self.nodes[row].tolist(), token_ids, strict=False):
            values = self.logits[first + node].float().log_softmax(-1)
            top = values.topk(num_top) if num_top else None
            best = dict(zip(top.indices.tolist(), top.values.tolist(), strict=True)) if top else {}
            out.append(TokenLogprobs(token, float(values[token]), best))
        return out
