"""The lines of a trace, typed and validated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from ..config import Settings
from ..config.base import Tuple
from ..outputs import FinishReason

PLAIN_NAME = "plain"

# Limits far beyond what an engine writes, but within what can be summed and printed.
Number = Annotated[float, Field(ge=0.0, le=1e15)]
Count = Annotated[int, Field(ge=0, le=2**53)]
OfARound = Annotated[int, Field(ge=0, le=2**16)]  # tokens of one row, for example
FromList = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
Alternative = Annotated[tuple[str, Number | None], FromList]
RowRound = Annotated[
    tuple[Annotated[int, Field(ge=-1)], OfARound, Tuple[OfARound], Tuple[OfARound]], FromList
]


class _Line(Settings):
    """Unknown fields are ignored: a later HiSpec may write more of them."""

    model_config = ConfigDict(extra="ignore")


class Header(_Line):
    """Whose trace it is. `routes`: their names, by number, until a line of type "routes" gives others, which
    the engine writes whenever its plan is set. `started`: when all times begin, on the machine's clock."""

    model: str
    policy: str
    max_num_seqs: Annotated[int, Field(ge=1)]
    routes: Tuple[str]
    environment: dict[str, Any]
    started: float | None = None


class RoutesChange(_Line):
    """The plan was changed: later route numbers index these names."""

    t: Number
    routes: Tuple[str]


class _PlanEvent(_Line):
    """An event at `t` with a plan. `name`: of the route (None = plain decoding), filled in by the reader."""

    t: Number
    route: Count | None
    name: str = PLAIN_NAME
    num_drafts: OfARound
    num_checks: OfARound
    rows: Count
    context_tokens: Number

    @property
    def plan(self) -> str:
        """Such as "hybrid D=4 C=15 K=8 R=2"; R is named where there is a check tier."""
        if self.route is None:
            return PLAIN_NAME
        return f"{self.name} K={self.num_drafts}" + (f" R={self.num_checks}" if self.has_check else "")

    @property
    def has_check(self) -> bool:
        return " C=" in self.name


class Decision(_PlanEvent):
    """A decision of the controller in round number `round`.

    predicted, measured   tokens/s expected of it; tokens/s since the decision before. None: not known
    previous              name of the plan until then
    alternatives          the best ones, and what was predicted of them
    acceptance            {route: {"draft_kept": share, "tentative_accepted": share}}, of the rounds that
                          the controller remembers; named and counted as in the summary
    worker                of a merged trace: whose controller's it is
    """

    round: Count
    worker: Count = 0
    predicted: Number | None
    measured: Number | None
    previous: str | None
    reason: str
    is_probe: bool
    alternatives: Tuple[Alternative] = ()
    acceptance: Mapping[str, dict[str, float | None]] = Field(default_factory=dict)


class Rounds(_PlanEvent):
    """Sums over consecutive rounds of one choice over as many rows, the last of which ended at `t`;
    context_tokens is their mean.

    seconds           None = not measured, because something else ran in the same time
    pass_s            of these, those in passes of draft, check and verify; empty = not measured, as on a GPU
    drafted, kept     drafts of all cycles; of them, those that the tier above kept
    tentative, accepted   tokens put before verify; of them, those that it kept
    """

    rounds: Annotated[int, Field(ge=1)]
    seconds: Number | None
    tokens: Count
    drafted: Count
    kept: Count
    tentative: Count
    accepted: Count
    pass_s: Tuple[Number] = ()
    is_probe: bool = False

    @model_validator(mode="after")
    def _shares(self) -> Rounds:
        for part, whole in (("kept", "drafted"), ("accepted", "tentative")):
            if getattr(self, part) > getattr(self, whole):
                raise ValueError(f"{part}={getattr(self, part)} is more than {whole}={getattr(self, whole)}")
        if self.seconds is not None and 0.0 < self.seconds < 1e-6:
            raise ValueError(f"seconds={self.seconds} is less than a microsecond, which times are rounded to")
        return self


class RequestRecord(_Line):
    """A request that ended.

    admitted, last_token   when it first got a row, when its last token came; earlier traces lack them
    rounds   (number of the route, -1 = plain decoding; tokens committed; drafts, and those kept, of each
             cycle)
    routes   the names of these numbers, filled in as the trace is read
    """

    number: Count
    arrival: Number
    first_token: Number | None
    finished: Number
    prompt_tokens: Count
    cached_tokens: Count
    output_tokens: Count
    max_tokens: Annotated[int, Field(ge=1, le=2**53)]
    finish_reason: FinishReason
    preemptions: Count
    admitted: Number | None = None
    last_token: Number | None = None
    rounds: Tuple[RowRound] = ()
    routes: Tuple[str] = ()

    @model_validator(mode="after")
    def _in_order(self) -> RequestRecord:
        names = ("arrival", "admitted", "first_token", "last_token", "finished")
        times = {name: at for name in names if (at := getattr(self, name)) is not None}
        if [*times.values()] != sorted(times.values()):
            *first, last = [f"{name}={at}" for name, at in times.items()]
            raise ValueError(f"{', '.join(first)} and {last} are not in this order")
        for at, (_, _, drafted, kept) in enumerate(self.rounds):
            if len(drafted) != len(kept) or any(
                more > most for more, most in zip(kept, drafted, strict=True)
            ):
                raise ValueError(f"rounds[{at}]: kept={list(kept)} does not fit drafted={list(drafted)}")
        return self

    @property
    def has_finished(self) -> bool:
        """Whether it ended by itself."""
        return self.finish_reason in ("stop", "length")

    @property
    def e2e_s(self) -> float:
        return self.finished - self.arrival

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def queue_time_s(self) -> float | None:
        return None if self.admitted is None else self.admitted - self.arrival

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for less than two."""
        if self.first_token is None or self.last_token is None or self.output_tokens < 2:
            return None
        return (self.last_token - self.first_token) / (self.output_tokens - 1)


Record = Header | RoutesChange | Decision | Rounds | RequestRecord
RECORDS: dict[str, type[Record]] = {
    "trace": Header,
    "routes": RoutesChange,
    "decision": Decision,
    "rounds": Rounds,
    "request": RequestRecord,
}


@dataclass(frozen=True)
class Trace:
    """A trace that was read; what it holds is in the order of its lines.

    routes   the names of all that were ever to be chosen from
    is_cut   the last line was cut off, and is left out
    """

    header: Header
    routes: Sequence[str]
    decisions: Sequence[Decision]
    rounds: Sequence[Rounds]
    requests: Sequence[RequestRecord]
    is_cut: bool = False
