"""What `hispec profile` may be told, and which plans that makes it look at."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import Field, model_validator

from ..config import Plan, Settings


class ProfileOptions(Settings):
    """How far to look, and how to measure.

    exits         folder of trained exits; None = those that the job names, else those that come with HiSpec for the model,
                  else the model's own head at a few layers
    batch_size    prompts that run together; None = the job's engine.max_num_seqs
    max_tokens    new tokens per prompt
    max_drafts    largest K (num_draft_tokens) of a plan
    max_checks    largest R (num_checks)
    max_window    positions that a round may process per row, R * (K + 1), at most
    top           plans of two tiers, and of three, that are run for real
    repeats       timed runs of each; the median counts
    """

    exits: Annotated[str, Field(min_length=1)] | None = None
    batch_size: Annotated[int, Field(ge=1, le=4096)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] = 64
    max_drafts: Annotated[int, Field(ge=1, le=32)] = 8
    max_checks: Annotated[int, Field(ge=1, le=16)] = 8
    max_window: Annotated[int, Field(ge=2, le=512)] = 32
    top: Annotated[int, Field(ge=1)] = 5
    repeats: Annotated[int, Field(ge=1)] = 3

    @model_validator(mode="after")
    def _drafts_fit(self) -> ProfileOptions:
        if self.max_drafts + 1 > self.max_window:
            raise ValueError(
                f"max_drafts={self.max_drafts} takes {self.max_drafts + 1} positions of a round, more than max_window={self.max_window};"
                f" lower max_drafts to {self.max_window - 1}, or raise max_window"
            )
        return self

    def plans(self, layers: Sequence[int]) -> Iterator[Plan]:
        """Every two-tier and three-tier plan over exits at `layers`."""
        for draft in sorted(layers):
            for num_drafts in range(1, self.max_drafts + 1):
                yield Plan(draft, None, num_drafts)
                for check in sorted(layer for layer in layers if layer > draft):
                    for num_checks in range(1, min(self.max_checks, self.max_window // (num_drafts + 1)) + 1):
                        yield Plan(draft, check, num_drafts, num_checks)
