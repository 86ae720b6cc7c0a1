"""The interface of tier one: a drafter is anything that proposes tokens to the tier above."""

from __future__ import annotations

import ctypes
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from cache.view import BatchView

from ..errors import HiSpecError
from ..utils.memory import is_out_of_memory
from .acceptance import Proposals, Source
from .batch import RoundBatch
from .draft_tree import DraftTree
from .row_steps import count_live

OUR_PACKAGES = ("hispec", "ee_models", "cache")


class DrafterError(HiSpecError, RuntimeError):
    """A drafter failed; nothing of its round was committed."""

    @property
    def lacks_memory(self) -> bool:
        """Whether the device ran out of memory, so that fewer requests at once might do. A MemoryError is
        Python's, and the drafter's own."""
        cause = self.__cause__
        return cause is not None and is_out_of_memory(cause) and not isinstance(cause, MemoryError)


@contextmanager
def guarded(drafter: object) -> Iterator[None]:
    """Turns whatever a drafter raises into a DrafterError: a heuristic must not take requests down. An
    invariant of ours that a drafter of ours finds broken is no heuristic's."""
    try:
        yield
    except Exception as error:
        if (
            isinstance(error, AssertionError)
            and _is_ours(type(drafter).__module__)
            and _is_raised_by_us(error)
        ):
            raise
        raise DrafterError(f"{type(drafter).__name__}: {type(error).__name__}: {error}") from error


def _is_raised_by_us(error: BaseException) -> bool:
    """Whether it was raised in a package of this project."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return _is_ours(str(frame.f_globals.get("__name__", "")))


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in OUR_PACKAGES


@dataclass(frozen=True)
class Draft:
    """What a drafter did in a cycle: its proposals, and by which Source: of all rows, or of each [rows]
    int64."""

    proposals: Proposals
    source: Tensor | Source

    def check(self, num_rows: int) -> None:
        """Raises ValueError unless counts and source are [rows] int64: what reads them checks nothing, and
        drafters come from outside."""
        found = {"counts": self.proposals.counts}
        if isinstance(self.source, Tensor):
            found["source"] = self.source
        for name, values in found.items():
            if values.shape != (num_rows,) or values.dtype is not torch.int64:
                raise ValueError(
                    f"{name} of its drafts are {list(values.shape)} {values.dtype}; they must be [{num_rows}]"
                    " torch.int64, a number for each row"
                )


@dataclass(frozen=True)
class CompiledLookup:
    """Prompt lookup as compiled functions, by address, which take those of a `rounds_numba.Lookups` and of
    `index`; held: what that points to, which must not be gone before."""

    propose: int
    extend: int
    index: ctypes.Structure
    held: object


@dataclass(frozen=True)
class CompiledDrafter:
    """What a drafter does in rounds that run together (`rounds_together`): it looks drafts up, or not; where
    it finds none, layers [0, D) draft, if it computes, num_computed of them (None: K), as long as they are
    sure to `confidence`."""

    lookup: CompiledLookup | None = None
    computes: bool = False
    num_computed: int | None = None
    confidence: float | None = None


class Drafter:
    """Tier one of a plan, made for one engine. Only `propose` must be written; the other methods tell the
    drafter what happens around it, and do nothing here.

    A drafter inside the trunk runs layers [0, D) over every token that the next tier resumes from, and leaves
    hidden states there; one outside leaves nothing, and the next tier begins at the embedding (D = 0).
    Between `follow` and the end of a round all tensors stay on the device, and shapes depend on the plan
    only.
    """

    @property
    def num_bytes(self) -> int:
        """Memory that it holds besides weights."""
        return 0

    def follow(self, rows: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Called with (number, prompt and committed output) of the request in each row, before each round
        that may draft: not before rounds of plain decoding that a controller has chosen, nor where no row has
        room for a draft."""

    def join(self, rows: Mapping[int, tuple[int, Sequence[int]]]) -> None:
        """Called after `advance` with (number, prompt and committed output) of the requests that take these
        rows, whose former ones have ended; what is known of the other rows stays."""

    def finish(self, number: int, output_token_ids: Sequence[int]) -> None:
        """Called when a request has ended by itself with this output. One that was aborted, or ended with an
        error, is gone once `follow` names it no more."""

    def prefill(self, token_ids: Tensor, view: BatchView) -> None:
        """Called with prompt tokens [tokens] that the trunk has just computed, at the same positions and
        slots. Not with those that were found in the prefix cache; and in passes of static shape with padding
        at slot -1, too."""

    def propose(self, batch: RoundBatch, first: Tensor, tree: DraftTree) -> Draft:
        """Writes up to `count_allowed` drafts of each row into batch.tokens, as nodes of `tree` whose node 0
        is the token in column first [rows], a copy. Drafts that `Judge.choose` did not choose are to have
        Source.LOOKED_UP."""
        raise NotImplementedError

    def advance(self, batch: RoundBatch, counts: Tensor) -> None:
        """Called when batch.tokens[:, 1 : counts + 1], counts [rows], are committed on the device and the
        next round begins before the host has read them, so without a `follow` in between."""

    def compiled(self) -> CompiledDrafter | None:
        """The same without Python, for rounds that are one call on a CPU: one `follow` before all of them,
        after which it extends its texts itself. None = it has no such form; its rounds run stage by stage."""
        return None

    def move(self, batch: RoundBatch, sources: Tensor, targets: Tensor) -> None:
        """Called when columns of the window were copied, as by `Stages.move`: what the drafter keeps of them
        goes along."""


def waits_for_follow(drafter: Drafter) -> bool:
    """Whether only `follow` would tell the drafter of requests that take rows: not before the host has read
    the last round."""
    kind = type(drafter)
    return kind.join is Drafter.join and kind.follow is not Drafter.follow


def count_allowed(batch: RoundBatch, first: Tensor, tree: DraftTree) -> Tensor:
    """[rows]: drafts of `tree` that a row may take after column first [rows]: never beyond its limit, and of
    a chain never more than it may have. A row whose limit is at or before that column gets none."""
    return count_live(batch, first, tree, less=1)
