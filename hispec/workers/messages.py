"""What processes of an LLM tell each other; all of it goes through pipes that nobody else has."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import EngineConfig, SchedulingConfig, SpeculativeConfig
from ..engine.admission import Admission
from ..errors import WorkerError
from ..outputs import Delta
from ..sampling_params import SamplingParams
from ..scheduling.lengths import LengthPredictor
from .shares import Share


@dataclass(frozen=True)
class Setup:
    """What all workers are made of: as the arguments of LLM.

    opened    an `Opened` of the model, pickled, for a process that forks; None = the process opens it
    sharers   workers that share the memory for KV
    forks     the process loads the model and forks workers; else it is one
    is_far    it may be on another machine than the LLM, whose monotonic clock it does not have
    """

    model: str | Path
    config: EngineConfig
    speculative: SpeculativeConfig | None
    scheduling: SchedulingConfig | None
    length_predictor: LengthPredictor | None
    revision: str | None
    skip_tokenizer_init: bool
    sharers: int
    forks: bool
    is_far: bool = False
    opened: bytes | None = None


@dataclass(frozen=True)
class Start:
    """One worker: its share, and where it differs from Setup. sharers: workers that the memory for KV, as it
    is free now, is to be shared with, this one among them."""

    share: Share
    config: EngineConfig
    speculative: SpeculativeConfig | None
    sharers: int


@dataclass(frozen=True)
class Hello:
    """A worker that has started: what it takes, and how large it is."""

    admission: Admission
    row_invariant: bool


@dataclass(frozen=True)
class Alive:
    """A sign of life of a worker, which it gives however long a step is."""


@dataclass(frozen=True)
class NewRequest:
    """A request for a worker.

    has_text    whether its output becomes text, and stop strings end it
    continues   whether that text goes on the prompt's, as of IncrementalText
    is_stream   each of its Deltas is wanted as it comes; else one, with all of them
    arrival_s, arrived_at   when it came: on the monotonic clock of the LLM's machine, and by its time of day
    """

    number: int
    token_ids: list[int]
    params: SamplingParams
    has_text: bool
    continues: bool
    is_stream: bool
    arrival_s: float
    arrived_at: float


@dataclass(frozen=True)
class Gained:
    """(number, Delta) of what requests have gained. counted: once one of them has ended, all that the worker
    has counted, as `totals.counts_of`; in one message, so that both or neither survive its death."""

    deltas: list[tuple[int, Delta]]
    counted: dict[str, Any] | None


def portable(error: BaseException) -> Exception:
    """The error as another process can have it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = WorkerError(f"{type(error).__name__}: {error}")
    return error if isinstance(error, Exception) else WorkerError(f"{type(error).__name__}: {error}")
