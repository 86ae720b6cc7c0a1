"""The trace of an engine: what was decided, what rounds did and what requests took, one JSON object per line
(docs/control.md).

The first line is the header. Times are seconds since the engine started. Numbers that are not finite are
written as null.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..control.choice import Observation
from ..errors import ConfigError, build
from ..outputs import FinishReason, RequestMetrics
from ..utils.files import parse_json
from .lines import FLUSH_S, Lines
from .records import PLAIN_NAME, RECORDS, Decision, Header, Record, RequestRecord, Rounds, RoutesChange, Trace

VERSION = 1
MOST_ROUNDS = 16  # of one line


class TraceWriter:
    """Writes a trace. After construction it never raises: when the file can't be written any more it warns
    once, and stops.

    Whole lines are flushed about once a second, at the next call; on close; and when the writer is collected.
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
        """Replaces an earlier trace; creates the folder. Raises ConfigError for a file that is no trace, and
        for what can't be written.

        clock   seconds; that of `RequestMetrics`
        """
        self._clock, self._started_s, self._latest_s = clock, clock(), 0.0
        self._groups: list[_Group] = []  # none, or the one that is not written yet
        self._lines = Lines(path, clock)
        self._finalizer = weakref.finalize(self, _close, self._lines, self._groups)
        header = {
            "type": "trace",
            "version": VERSION,
            "model": model,
            "policy": policy,
            "max_num_seqs": max_num_seqs,
            "routes": list(routes),
            "environment": dict(environment),
            "started": round(self._started_s, 6),
        }
        self._lines.add(header, now=True)

    def write_routes(self, routes: Sequence[str]) -> None:
        """The plan was changed: from here on route numbers index these names."""
        self._end_group()
        self._lines.add({"type": "routes", "t": self._elapsed_s(), "routes": list(routes)})

    def write_decision(self, record: Mapping[str, Any]) -> None:
        """A decision of the controller: the fields of a line of type "decision", but for `t`."""
        self._end_group()
        self._lines.add({"type": "decision", "t": self._elapsed_s(), **record})

    def write_rounds(self, seen: Observation, pass_s: Sequence[float] = (0.0, 0.0, 0.0)) -> None:
        """Rounds that ended now. Consecutive ones of one choice with as many rows become one line: at most
        16, and little more than a second.

        pass_s   of their seconds, those in passes of draft, check and verify; zeros: not measured
        """
        now = self._elapsed_s()
        if self._groups and not self._groups[0].takes(seen, now):
            self._end_group()
        if not self._groups:
            self._groups.append(_Group(seen, now))
        (group,) = self._groups
        group.add(seen, now, pass_s)
        if group.rounds >= MOST_ROUNDS or now - group.started_s >= FLUSH_S:
            self._end_group()

    def write_request(
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

        def elapsed(at: float | None) -> float | None:
            # A request may have come to a worker that died before this one began.
            return None if at is None else max(0.0, round(at - self._started_s, 6))

        self._lines.add(
            {
                "type": "request",
                "number": number,
                "arrival": elapsed(metrics.arrival_s),
                "admitted": elapsed(metrics.admitted_s),
                "first_token": elapsed(metrics.first_token_s),
                "last_token": elapsed(metrics.last_token_s),
                "finished": elapsed(metrics.finished_s),
                "prompt_tokens": metrics.num_prompt_tokens,
                "cached_tokens": metrics.num_cached_tokens,
                "output_tokens": metrics.num_output_tokens,
                "max_tokens": max_tokens,
                "finish_reason": finish_reason,
                "preemptions": metrics.preemptions,
                "rounds": list(rounds),
            }
        )

    def close(self) -> None:
        """Idempotent; lines written afterwards are dropped."""
        self._finalizer()

    def _end_group(self) -> None:
        _write(self._lines, self._groups)

    def _elapsed_s(self) -> float:
        self._latest_s = max(self._latest_s, round(self._clock() - self._started_s, 6))  # never back
        return self._latest_s


def _write(lines: Lines, groups: list[_Group]) -> None:
    while groups:
        lines.add(groups.pop().make_line())


def _close(lines: Lines, groups: list[_Group]) -> None:
    _write(lines, groups)
    lines.close()


class _Group:
    """Consecutive rounds of one choice with the same number of rows, summed."""

    def __init__(self, seen: Observation, started_s: float) -> None:
        self.started_s = self._ended_s = started_s
        self._choice, self._num_rows, self._is_timed = seen.choice, seen.num_rows, math.isfinite(seen.seconds)
        self.rounds = 0
        self._context = self._seconds = 0.0
        self._pass_s = np.zeros(3)
        self._counts = dict.fromkeys(("tokens", "drafted", "kept", "tentative", "accepted"), 0)

    def takes(self, seen: Observation, ended_s: float) -> bool:
        own, other = self._choice, seen.choice
        is_same = own is other or (
            own.route == other.route and own.plan == other.plan and own.is_probe == other.is_probe
        )
        fits = self.rounds + seen.rounds <= MOST_ROUNDS and self._is_timed == math.isfinite(seen.seconds)
        begun_s = ended_s - (seen.seconds if math.isfinite(seen.seconds) else 0.0)
        is_next = begun_s - self._ended_s < FLUSH_S  # no pause between
        return is_same and fits and is_next and self._num_rows == seen.num_rows

    def add(self, seen: Observation, ended_s: float, pass_s: Sequence[float]) -> None:
        self._ended_s = ended_s
        self.rounds += seen.rounds
        self._context += seen.context_tokens * seen.rounds
        self._seconds += seen.seconds
        self._pass_s += pass_s
        for name in self._counts:
            self._counts[name] += int(np.add.reduce(getattr(seen, name), axis=None))

    def make_line(self) -> dict[str, Any]:
        choice = self._choice
        return {
            "type": "rounds",
            "t": self._ended_s,
            "route": choice.route,
            "num_drafts": choice.plan.num_draft_tokens,
            "num_checks": choice.plan.num_checks,
            "rows": self._num_rows,
            "context_tokens": round(self._context / max(self.rounds, 1), 1),
            "rounds": self.rounds,
            "seconds": round(self._seconds, 6),
            **({"pass_s": self._pass_s.round(6).tolist()} if self._pass_s.any() else {}),
            **self._counts,
            **({"is_probe": True} if choice.is_probe else {}),
        }


def read_trace(path: Path) -> Trace:
    """The trace in a file. A last line that was cut off, because the engine was killed, is left out; lines of
    unknown types are passed over.

    Raises ConfigError, with file and line, for anything else that is not as `TraceWriter` writes it.
    """
    header: Header | None = None
    names: tuple[str, ...] = ()
    routes: dict[str, None] = {}
    records: dict[type[Record], list[Any]] = {kind: [] for kind in RECORDS.values()}
    is_cut = False
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                try:
                    record = _parse_line(raw, names, is_first=header is None)
                except ConfigError as error:
                    if header is not None and not raw.endswith(b"\n"):
                        is_cut = True
                        break
                    raise ConfigError(f"{path}, line {number}: {error}") from None
                if record is None:
                    continue
                records[type(record)].append(record)
                if isinstance(record, Header | RoutesChange):
                    names = record.routes
                    routes |= dict.fromkeys(names)
                if isinstance(record, Header):
                    header = record
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from None
    if header is None:
        raise ConfigError(f"{path} is empty; a trace is written by an engine with engine.trace=FILE")
    return Trace(
        header, list(routes), records[Decision], records[Rounds], records[RequestRecord], is_cut=is_cut
    )


def _parse_line(raw: bytes, names: Sequence[str], is_first: bool) -> Record | None:
    """The record of a line; None = of an unknown type. Raises ConfigError."""
    try:
        values = parse_json(raw)
    except ValueError as error:
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
    elif "route" in values:
        route = values["route"]
        values["name"] = _name(route, names) if isinstance(route, int) else PLAIN_NAME
    record = build(RECORDS[kind], values)
    if isinstance(record, RequestRecord):
        for route in {route for route, *_ in record.rounds if route >= 0}:
            _name(route, names)
    return record


def _name(route: int, names: Sequence[str]) -> str:
    if not 0 <= route < len(names):
        raise ConfigError(f"route={route} is none of the {len(names)} that the trace names")
    return names[route]
