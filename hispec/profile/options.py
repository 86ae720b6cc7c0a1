"""What `hispec profile` may be told, and where its results go: checked before an hour of measuring."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from ..config import Settings
from ..config.base import Tuple
from ..errors import ConfigError
from ..jobs.inputs import files_read, local_files
from ..jobs.schema import Job
from ..utils.files import check_folder, check_targets
from ..utils.plots import check_matplotlib

Drafters = Literal["exit", "tree", "ngram", "hybrid", "model"]
Numbers = Literal["float32", "bfloat16", "float16", "int8", "int4", "int8_kv"]


class ProfileOptions(Settings):
    """Which plans are predicted, and how they are measured.

    exits         folder of trained exits; None = those that the job names, else those that come with HiSpec
                  for the model, else the model's own head at a few layers
    drafters      kinds of drafters to look at: exit (trained exits, where there are any), tree (of an exit's
                  drafts), ngram, hybrid, model (the one that the job's speculative.draft.path names); None =
                  all that apply
    batch_size    prompts that run together; None = the job's engine.max_num_seqs
    max_tokens    new tokens per prompt; None = the job's sampling.max_tokens
    max_drafts    largest K (num_draft_tokens) of exits and of a draft model; prompt lookup and trees go by
                  max_window alone
    max_checks    largest R (num_checks)
    max_window    positions that a round may process per row, R * (B * K + 1), at most
    top           plans of each kind of drafter, of two tiers, and of three, that are run for real
    repeats       timed runs of each; their geometric mean counts
    """

    exits: Annotated[str, Field(min_length=1)] | None = None
    drafters: Annotated[Tuple[Drafters], Field(min_length=1)] | None = None
    batch_size: Annotated[int, Field(ge=1, le=4096)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_drafts: Annotated[int, Field(ge=1, le=32)] = 8
    max_checks: Annotated[int, Field(ge=1, le=16)] = 8
    max_window: Annotated[int, Field(ge=2, le=512)] = 32
    top: Annotated[int, Field(ge=1)] = 2
    repeats: Annotated[int, Field(ge=1)] = 3

    @model_validator(mode="after")
    def _drafts_fit(self) -> ProfileOptions:
        if self.max_drafts + 1 > self.max_window:
            raise ValueError(
                f"max_drafts={self.max_drafts} takes {self.max_drafts + 1} positions of a round, more than"
                f" max_window={self.max_window}; lower max_drafts to {self.max_window - 1}, or raise"
                " max_window"
            )
        return self


class NumbersOptions(Settings):
    """What is compared by `hispec profile --numbers`, and how.

    numbers       what weights are held in; the first is what the others are compared with
    batch_size    prompts that run together; None = the job's engine.max_num_seqs
    max_tokens    new tokens per prompt; None = the job's sampling.max_tokens
    repeats       timed runs of each
    max_kl        nats a token by which what is chosen may differ from the first, on average
    """

    numbers: Annotated[Tuple[Numbers], Field(min_length=2)]
    batch_size: Annotated[int, Field(ge=1, le=4096)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    repeats: Annotated[int, Field(ge=1)] = 3
    max_kl: Annotated[float, Field(ge=0.0)] = 0.005

    @model_validator(mode="after")
    def _each_once(self) -> NumbersOptions:
        if repeated := [each for each in self.numbers if self.numbers.count(each) > 1]:
            raise ValueError(f"numbers={list(self.numbers)} names {repeated[0]} more than once; name it once")
        return self


@dataclass(frozen=True)
class Targets:
    """Files that `hispec profile` writes; None = not asked for. An existing preset is replaced only with
    `overwrite`, others if they are of the same kind; never job_file, where the job comes from, and what it
    reads."""

    json: Path | None = None
    preset: Path | None = None
    plots: Path | None = None
    latency: Path | None = None
    overwrite: bool = False
    job_file: Path | None = None

    def check(self, job: Job) -> None:
        """Creates missing folders. Raises ConfigError for files that can't be written, or must not be
        replaced, as the job's own."""
        own = [] if self.job_file is None else [self.job_file]
        check_targets({"--json": self.json, "--write-preset": self.preset}, [*files_read(job), *own])
        # It may be the profile that the job reads, which is how that comes to be.
        check_targets({"--latency": self.latency}, [*local_files(job.input), *own])
        if self.preset is not None and self.preset.exists() and not self.overwrite:
            raise ConfigError(
                f"--write-preset: {self.preset} exists; replace it with --overwrite, or choose another path"
            )
        if self.plots is not None:
            check_folder("--plots", self.plots)
            check_matplotlib("--plots")
