"""What a round is run over: its rows on the device, how its stages are run, and the places of one pass."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cache.view import BatchView

from ..sampling.sampler import Sampler


def directly(name: Hashable, run: Callable[..., Any], *inputs: Tensor) -> Any:
    """A stage run eagerly."""
    return run(*inputs)


@dataclass(frozen=True)
class Execution:
    """How the stages of a round are run.

    is_static   a pass takes the whole rectangle of its places, live or not, so that shapes depend on the plan
                and the number of rows alone: what a captured graph needs
    may_ask     the host may look at values in the middle of a round, and leave out what they make needless
    call        runs a stage: run(*inputs), perhaps from a captured graph known by `name`
    """

    is_static: bool = False
    may_ask: bool = True
    call: Callable[..., Any] = directly


PACKED = Execution()  # eagerly, over the live places alone
STATIC = Execution(is_static=True, may_ask=False)


class Watch:
    """What exits that are not in use would have said in a round [DEL's shadow tokens], and what was drafted.

    layers   of the exits
    tokens   [layers, rows, window + 1]: tokens[i, row, j] would have followed column j
    drafts   [rows, window + 1]: the draft that was put into column j, -1 = none
    """

    def __init__(self, layers: Sequence[int], num_rows: int, window: int, device: torch.device) -> None:
        self.layers = tuple(layers)
        self.tokens = torch.full(
            (len(self.layers), num_rows, window + 1), -1, dtype=torch.int64, device=device
        )
        self.drafts = torch.full((num_rows, window + 1), -1, dtype=torch.int64, device=device)

    def saw_drafts(self, tokens: Tensor, columns: Tensor, counts: Tensor) -> None:
        """A cycle's drafts: the first counts [rows] of tokens[row, columns [rows, n]]."""
        columns = columns.clamp(max=self.drafts.shape[1] - 1)
        is_draft = torch.arange(columns.shape[1], device=columns.device) < counts.unsqueeze(-1)
        self.drafts.scatter_(1, columns, torch.where(is_draft, tokens.gather(1, columns), -1))

    def counts(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """[rows, layers, 4]: of the columns whose context was committed, that is of the first counts [rows]:
        all of them; those after which the exit would have said what was committed, tokens [rows, window + 1];
        those that a draft followed; those after which it agreed with that.
        """
        valid = torch.arange(tokens.shape[1] - 1, device=tokens.device) < counts.unsqueeze(-1)
        said, drafts = self.tokens[:, :, :-1], self.drafts[:, 1:]
        has_draft = valid & (drafts >= 0)
        each = torch.stack(
            (
                valid.expand(said.shape),
                valid & (said == tokens[:, 1:]),
                has_draft.expand(said.shape),
                has_draft & (said == drafts),
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
    block_tables     [rows, max_blocks] int64, covering starts + limits positions
    max_context_len  int, at least starts + limits of every row
    keeps_logits     whether verify's logits are asked for after the round
    watch            where exits that the plan does not use leave what they would have said; None = they are
                     not asked
    """

    tokens: Tensor
    starts: Tensor
    limits: Tensor
    most_drafts: Tensor
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

    def stage(self, name: Hashable, run: Callable[..., Any], *inputs: Tensor) -> Any:
        """run(*inputs) as this batch's stages are run. Whatever else `run` reads must lie at the same place
        in every round."""
        return self.execution.call(name, run, *inputs)

    def any(self, flags: Tensor) -> bool:
        """Whether any of flags holds, as far as the host may ask; else True."""
        return not self.execution.may_ask or bool(flags.any())

    def most(self, counts: Tensor, limit: int) -> int:
        """The largest of counts [rows], where shapes may follow values; else `limit`, which it never
        exceeds."""
        return limit if self.execution.is_static else int(counts.max())


@dataclass(frozen=True)
class Span:
    """The places of one pass, row after row: the live ones, packed; or, where shapes are static, all places
    of the rectangle.

    rows, index [tokens]: row, and column in the round's window; flat [tokens] = row * window + index;
    first, node [tokens]: column of the draft cycle's first node, and which of its nodes this is: index =
    first + node; place [tokens]: flat place in the rectangle [rows, q_len] that the span was picked from,
    whose sizes are `shape`; paths [tokens, depth]: columns of the drafts on the way to each place; None for a
    chain, where they are those before it. live [tokens] bool: which places count, None = all. Others are
    computed like the first position of their row and kept nowhere: their slot is -1, and so is `flat`.
    """

    rows: Tensor
    index: Tensor
    flat: Tensor
    first: Tensor
    node: Tensor
    place: Tensor
    shape: tuple[int, int]
    paths: Tensor | None
    live: Tensor | None
    view: BatchView

    @property
    def num_tokens(self) -> int:
        return self.rows.shape[0]

    def spread(self, values: Tensor) -> Tensor:
        """values [tokens, ...] at their places of a rectangle [rows, q_len, ...]; zeros elsewhere."""
        rows, q_len = self.shape
        if self.live is not None:
            values = values.masked_fill(~self.live.view(-1, *(1,) * (values.dim() - 1)), 0)
        if self.num_tokens == rows * q_len:
            return values.view(rows, q_len, *values.shape[1:])
        out = values.new_zeros(rows * q_len, *values.shape[1:])
        out[self.place] = values
        return out.view(rows, q_len, *values.shape[1:])

    def put(self, target: Tensor, columns: Tensor, values: Tensor) -> None:
        """target[row, columns] = values, [tokens, n] each, at live places."""
        rows = self.rows.unsqueeze(-1)
        if self.live is not None:
            values = torch.where(self.live.unsqueeze(-1), values, target[rows, columns])
        target[rows, columns] = values
