"""The trace of an engine: what was decided, what rounds did and what requests took, one JSON object per line
(docs/control.md).

The first line is the header. Times are seconds since the engine started. Numbers that are not finite are
written as null.
"""

from __future__ import annotations

import json
import math
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ..control.choice import Observation
from ..errors import ConfigError, build
from ..outputs import FinishReason, RequestMetrics
from .lines import FLUSH_S, Lines
from .records import RECORDS, Decision, Header, Record, RequestRecord, Rounds, RoutesChange, Trace

VERSION = 1
MOST_ROUNDS = 16  # of one line


class TraceWriter:
    """Writes a trace. Never fails once it is there: when the file can't be written any more it says so once,
    and stops.

    Whole lines are handed to the system about once a second, at the next call; and on close, or when the
    writer is dropped.
    """

    def __init__(
        self,
        path: Path,
        *,
        model: str,
        policy: str,
        max_num_seqs: int,
        routes: Sequence[str],
        environment: Mapping[str, Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Replaces a trace that is there, with its folder made if need be. Raises ConfigError for a file that
        is no trace, and for what can't be written.

        clock   seconds; that of `RequestMetrics`
        """
        self._clock, self._started_s = clock, clock()
        self._group: _Group | None = None
        self._lines = Lines(path, clock)
        self._finalizer = weakref.finalize(self, self._lines.close)
        header = {
            "version": VERSION,
            "model": model,
            "policy": policy,
            "max_num_seqs": max_num_seqs,
            "routes": list(routes),
            "environment": dict(environment),
        }
        self._lines.add({"type": "trace", **header}, now=True)

    def routes(self, routes: Sequence[str]) -> None:
        """From here on numbers of routes mean these: the plan was changed."""
        self._end_group()
        self._lines.add({"type": "routes", "t": self._now(), "routes": list(routes)})

    def decision(self, record: Mapping[str, Any]) -> None:
        """What the controller decided: the fields of a line of type "decision", but for `t`."""
        self._end_group()
        self._lines.add({"type": "decision", "t": self._now(), **record})

    def round(self, seen: Observation) -> None:
        """Rounds that ended now. Consecutive ones of one choice over as many rows become one line: at most
        16, and little more than a second."""
        group = self._group
        if group is not None and not group.takes(seen):
            self._end_group()
            group = None
        if group is None:
            group = self._group = _Group(seen, self._now())
        else:
            group.add(seen)
        group.ended_s = self._now()
        if group.rounds >= MOST_ROUNDS or group.ended_s - group.started_s >= FLUSH_S:
            self._end_group()

    def request(
        self,
        number: int,
        metrics: RequestMetrics,
        max_tokens: int,
        finish_reason: FinishReason,
        rounds: Iterable[tuple[int, int, Sequence[int], Sequence[int]]] = (),
    ) -> None:
        """A request has ended.

        rounds   those it was in: (route, -1 = plain decoding; tokens that it committed; drafts, and those
                 kept, of each cycle)
        """
        since = self._started_s
        times = {
            "arrival": metrics.arrival_s,
            "first_token": metrics.first_token_s,
            "finished": metrics.finished_s,
        }
        line = {
            "type": "request",
            "number": number,
            **{name: None if at is None else round(at - since, 6) for name, at in times.items()},
        }
        line |= {
            "prompt_tokens": metrics.num_prompt_tokens,
            "cached_tokens": metrics.num_cached_tokens,
            "output_tokens": metrics.num_output_tokens,
        }
        line |= {"max_tokens": max_tokens, "finish_reason": finish_reason, "preemptions": metrics.preemptions}
        self._lines.add(line | {"rounds": list(rounds)})

    def close(self) -> None:
        """Idempotent; what comes afterwards is passed over."""
        self._end_group()
        self._finalizer()

    def _end_group(self) -> None:
        if self._group is not None:
            self._lines.add(self._group.line())
            self._group = None

    def _now(self) -> float:
        return round(self._clock() - self._started_s, 6)


class _Group:
    """Consecutive rounds of one choice over the same number of rows."""

    def __init__(self, seen: Observation, started_s: float) -> None:
        self.started_s = self.ended_s = started_s
        self._choice, self._num_rows, self._is_timed = seen.choice, seen.num_rows, math.isfinite(seen.seconds)
        self.rounds = 0
        self._context = self._seconds = 0.0
        self._counts = [0] * 5
        self.add(seen)

    def takes(self, seen: Observation) -> bool:
        own, other = self._choice, seen.choice
        is_same = own is other or (
            own.route == other.route and own.plan == other.plan and own.is_probe == other.is_probe
        )
        fits = self.rounds + seen.rounds <= MOST_ROUNDS and self._is_timed == math.isfinite(seen.seconds)
        return is_same and fits and self._num_rows == seen.num_rows

    def add(self, seen: Observation) -> None:
        self.rounds += seen.rounds
        self._context += seen.context_tokens * seen.rounds
        self._seconds += seen.seconds
        sums = (
            int(np.add.reduce(values)) for values in (seen.drafted, seen.kept, seen.tentative, seen.accepted)
        )
        self._counts = [
            before + more for before, more in zip(self._counts, (seen.tokens, *sums), strict=True)
        ]

    def line(self) -> dict[str, Any]:
        choice = self._choice
        plan = {
            "route": choice.route,
            "num_drafts": choice.plan.num_draft_tokens,
            "num_checks": choice.plan.num_checks,
        }
        where = {
            "rows": self._num_rows,
            "context_tokens": round(self._context / max(self.rounds, 1), 1),
            "rounds": self.rounds,
        }
        counts = dict(zip(("tokens", "drafted", "kept", "tentative", "accepted"), self._counts, strict=True))
        probe = {"is_probe": True} if choice.is_probe else {}
        return {
            "type": "rounds",
            "t": self.ended_s,
            **plan,
            **where,
            "seconds": round(self._seconds, 6),
            **counts,
            **probe,
        }


def read_trace(path: Path) -> Trace:
    """The trace in a file. A last line that was cut off, because the engine was killed, is left out; lines of
    unknown types are passed over.

    Raises ConfigError, with file and line, for anything else that is not as `TraceWriter` writes it.
    """
    header: Header | None = None
    names: tuple[str, ...] = ()
    routes: dict[str, None] = {}
    records: list[Record] = []
    is_cut = False
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                try:
                    record = _record(raw, names, is_first=header is None)
                except ConfigError as error:
                    if header is not None and not raw.endswith(b"\n"):
                        is_cut = True
                        break
                    raise ConfigError(f"{path}, line {number}: {error}") from None
                if isinstance(record, Header | RoutesChange):
                    names = record.routes
                    routes |= dict.fromkeys(names)
                if isinstance(record, Header):
                    header = record
                elif record is not None:
                    records.append(record)
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from None
    if header is None:
        raise ConfigError(f"{path} is empty; a trace is written by an engine with engine.trace=FILE")
    return Trace(
        header,
        routes=list(routes),
        decisions=[record for record in records if isinstance(record, Decision)],
        rounds=[record for record in records if isinstance(record, Rounds)],
        requests=[record for record in records if isinstance(record, RequestRecord)],
        is_cut=is_cut,
    )


def _record(raw: bytes, names: Sequence[str], is_first: bool) -> Record | None:
    """What a line says; None = it is of an unknown type. Raises ConfigError."""
    try:
        values = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not a line of a trace, which is JSON: {error}") from None
    kind = values.pop("type", None) if isinstance(values, dict) else None
    if (kind == "trace") != is_first:
        raise ConfigError(
            "a second header: two traces in one file"
            if kind == "trace"
            else 'not a trace of HiSpec, whose first line has "type": "trace"'
        )
    if is_first and (version := values.pop("version", None)) != VERSION:
        raise ConfigError(
            f"version={version!r} of the trace is not {VERSION}, which this HiSpec reads; read it with the"
            " HiSpec that wrote it"
        )
    if not isinstance(kind, str):
        raise ConfigError('expected a JSON object with a "type"')
    if kind not in RECORDS:
        return None
    if kind == "request":
        values["routes"] = names
    elif isinstance(route := values.get("route"), int):
        values["name"] = _name(route, names)
    record = build(RECORDS[kind], values)
    for route in (
        {route for route, *_ in record.rounds if route >= 0} if isinstance(record, RequestRecord) else ()
    ):
        _name(route, names)
    return record


def _name(route: int, names: Sequence[str]) -> str:
    if not 0 <= route < len(names):
        raise ConfigError(f"route={route} is none of the {len(names)} that the trace names")
    return names[route]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
