"""What rounds did, told to whoever decides what the next ones do, and to the trace."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config import EngineConfig
from ..control.choice import Choice, Control, FixedControl
from ..outputs import RequestMetrics
from ..runner.launchers import Flight, Input
from ..runner.round_output import RowOutcome, observed
from ..scheduling.request import Request
from ..trace.writer import TraceWriter
from ..utils.environment import environment

_MOST_KEPT = 8


class Recorder:
    """Of one engine."""

    def __init__(self, config: EngineConfig, model: str, policy: str) -> None:
        self.control: Control = FixedControl(None)
        self._controls: dict[
            Hashable, Control
        ] = {}  # with what they have learnt, for when their plan comes back
        self._config, self._model, self._policy = config, model, policy
        self._trace: TraceWriter | None = None
        self._rounds: dict[
            int, list[tuple[int, int, Sequence[int], Sequence[int]]]
        ] = {}  # of unfinished requests, by number

    def known(self, key: Hashable) -> Control | None:
        """Who decided when this was asked for before."""
        return self._controls.get(key)

    def use(self, control: Control, key: Hashable = None) -> None:
        """Who decides from now on. Raises ConfigError, the first time, if the trace cannot be written."""
        routes = [str(route) for route in control.routes]
        path = self._config.trace
        if (
            path is not None and self._trace is None
        ):  # not before all else was found right: an earlier trace is replaced
            about, rows = environment(), self._config.max_num_seqs
            self._trace = TraceWriter(
                Path(path),
                model=self._model,
                policy=self._policy,
                max_num_seqs=rows,
                routes=routes,
                environment=about,
            )
        elif self._trace is not None:
            self._trace.write_routes(routes)
        if key not in self._controls and len(self._controls) >= _MOST_KEPT:
            del self._controls[next(iter(self._controls))]
        self._controls[key] = self.control = control

    def decided(self, record: Mapping[str, Any]) -> None:
        if self._trace is not None:
            self._trace.write_decision(record)

    def round(
        self, flight: Flight, choice: Choice, rows: Sequence[tuple[Request, int, RowOutcome]], seconds: float
    ) -> None:
        """A round of these requests, in these rows, before it is committed. seconds: nan if something else
        was timed too."""
        if self._trace is None and isinstance(self.control, FixedControl):
            return
        if flight.plan != choice.plan:  # the drafter failed, or no row could speculate
            choice = Choice(None, flight.plan)
        if choice.watches != flight.rows.watches:  # rounds that run ahead of the host are not watched
            choice = replace(choice, watches=flight.rows.watches)
        inputs = flight.rows.inputs
        seen = observed(
            choice,
            [(request.number, outcome) for request, _, outcome in rows],
            limits=[
                min(int(inputs[Input.CAP, row]), request.max_tokens - request.num_output)
                for request, row, _ in rows
            ],
            most_drafts=[int(inputs[Input.DRAFTS, row]) for _, row, _ in rows],
            watched=flight.runtime.watched,
            context_tokens=sum(len(request.token_ids) for request, _, _ in rows),
            seconds=seconds,
        )
        self.control.observe(seen)
        if self._trace is not None:
            self._trace.write_rounds(seen)
            route = -1 if choice.route is None else choice.route
            for request, _, outcome in rows:
                self._rounds.setdefault(request.number, []).append(
                    (route, len(outcome.token_ids), outcome.drafted, outcome.kept)
                )

    def finished(self, request: Request, metrics: RequestMetrics | None) -> None:
        self.control.forget(request.number)
        rounds = self._rounds.pop(request.number, [])
        if self._trace is not None and metrics is not None and request.finish_reason is not None:
            self._trace.write_request(
                request.number, metrics, request.max_tokens, request.finish_reason, rounds
            )

    def close(self) -> None:
        if self._trace is not None:
            self._trace.close()
