"""What `hispec profile` may be told."""
from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from ..config import Settings

Drafters = Literal["exit", "tree", "ngram", "hybrid", "model"]


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class ProfileOptions(Settings):
    """How far to look, and how to measure.

    exits         folder of trained exits; None = those that the job names, else those that come with HiSpec for the model,
                  else the model's own head at a few layers
    drafters      kinds of drafters to look at: exit (trained exits, where there are any), tree (of an exit's drafts), ngram, hybrid,
                  model (the one that the job's speculative.draft.path names); None = all that apply
    batch_size    prompts that run together; None = the job's engine.max_num_seqs
    max_tokens    new tokens per prompt
    max_drafts    largest K (num_draft_tokens) of exits and of a draft model; prompt lookup and trees go by max_window alone
    max_checks    largest R (num_checks)
    max_window    positions that a round may process per row, R * (B * K + 1), at most
    top           plans of each kind of drafter, of two tiers, and of three, that are run for real
    repeats       timed runs of each; the median counts
    """

    exits: Annotated[str, Field(min_length=1)] | None = None
    drafters: Annotated[tuple[Drafters, ...], BeforeValidator(_as_tuple), Field(min_length=1)] | None = None
    batch_size: Annotated[int, Field(ge=1, le=4096)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] = 64
    max_drafts: Annotated[int, Field(ge=1, le=32)] = 8
    max_checks: Annotated[int, Field(ge=1, le=16)] = 8
    max_window: Annotated[int, Field(ge=2, le=512)] = 32
    top: Annotated[int, Field(ge=1)] = 2
    repeats: Annotated[int, Field(ge=1)] = 3

    @model_validator(mode="after")
    def _drafts_fit(self) -> ProfileOptions:
        if self.max_drafts + 1 > self.max_window:
            raise ValueError(
                f"max_drafts={self.max_drafts} takes {self.max_drafts + 1} positions of a round, more than max_window={self.max_window};"
                f" lower max_drafts to {self.max_window - 1}, or raise max_window"
            )
        return self
