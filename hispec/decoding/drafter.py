"""What a drafter is: anything that proposes tokens to the tier above."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from cache.view import BatchView

from ..errors import HiSpecError
from ..utils.memory import is_out_of_memory
from .acceptance import Proposals
from .batch import RoundBatch
from .draft_tree import DraftTree


class DrafterError(HiSpecError, RuntimeError):
    """A drafter failed; nothing of its round was committed."""

    @property
    def lacks_memory(self) -> bool:
        """Whether fewer requests at once might do."""
        cause = self.__cause__
        return (
            cause is not None and is_out_of_memory(cause) and not isinstance(cause, MemoryError)
        )  # which is Python's, and the drafter's own


@contextmanager
def guarded(drafter: object) -> Iterator[None]:
    """Whatever a drafter raises becomes a DrafterError: a heuristic must not take requests down."""
    try:
        yield
    except AssertionError:  # a broken invariant is ours, not the drafter's
        raise
    except Exception as error:
        raise DrafterError(f"{type(drafter).__name__}: {type(error).__name__}: {error}") from error


class Source(IntEnum):
    """Who drafted: something that was computed for it (an exit, a model), or what was looked up in a text."""

    COMPUTED = 0
    LOOKED_UP = 1


@dataclass(frozen=True)
class Draft:
    """What a drafter did in a cycle: its proposals, and of each row [rows] int64 by which Source."""

    proposals: Proposals
    source: Tensor


class Drafter(Protocol):
    """Tier one of a plan, made for one engine.

    A drafter inside of the trunk runs layers [0, D) at every place that the next tier resumes from, and
    leaves hidden states there; one outside leaves nothing, and the next tier begins at the embedding (D = 0).
    All tensors stay on the device, and shapes depend on the plan only.
    """

    @property
    def num_bytes(self) -> int:
        """Memory that it holds besides weights."""

    def follow(self, rows: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Before each round: (number, prompt and committed output) of the request in each row."""

    def finish(self, number: int, output_token_ids: Sequence[int]) -> None:
        """A request has ended with this output."""

    def prefill(self, token_ids: Tensor, view: BatchView) -> None:
        """Prompt tokens [tokens], at the places that the trunk has just computed."""

    def propose(self, batch: RoundBatch, first: Tensor, tree: DraftTree) -> Draft:
        """Writes up to `room` drafts of each row into batch.tokens, as nodes of `tree` whose node 0 is the
        token in column first [rows]."""

    def advance(self, batch: RoundBatch, counts: Tensor) -> None:
        """batch.tokens[:, 1 : counts + 1], counts [rows], are committed on the device, and the next round
        follows before the host has read them: `follow` is not called in between."""

    def move(self, batch: RoundBatch, sources: Tensor, targets: Tensor) -> None:
        """Places of the window were copied, as by `Stages.move`; what the drafter keeps of them goes
        along."""


class Stateless:
    """The parts of a drafter that most leave empty."""

    @property
    def num_bytes(self) -> int:
        return 0

    def follow(self, rows: Sequence[tuple[int, Sequence[int]]]) -> None:
        pass

    def finish(self, number: int, output_token_ids: Sequence[int]) -> None:
        pass

    def prefill(self, token_ids: Tensor, view: BatchView) -> None:
        pass

    def advance(self, batch: RoundBatch, counts: Tensor) -> None:
        pass

    def move(self, batch: RoundBatch, sources: Tensor, targets: Tensor) -> None:
        pass


def room(batch: RoundBatch, first: Tensor, tree: DraftTree) -> Tensor:
    """[rows]: drafts of `tree` that a row may take after column first [rows]: never beyond its limit, and of
    a chain never more than it may have. A row whose limit is at or before that column gets none."""
    left = (batch.limits - first - 1).clamp(0, tree.num_drafts)
    return torch.minimum(left, batch.most_drafts) if tree.is_chain else left


def by(source: Source, like: Tensor) -> Tensor:
    """Every row's drafts are of one source."""
    return torch.full_like(like, source)
