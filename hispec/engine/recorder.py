"""Reports rounds and requests to the controller and to the trace."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import EngineConfig
from ..control.choice import Choice, Control, FixedControl
from ..outputs import RequestMetrics
from ..runner.launchers import Flight
from ..runner.plan_cache import MOST_KEPT
from ..runner.round_inputs import Input
from ..runner.round_output import RowOutcome, make_observation
from ..scheduling.request import Request
from ..trace.writer import TraceWriter
from ..utils.environment import environment

if TYPE_CHECKING:
    import torch

_TracedRound = tuple[int, int, Sequence[int], Sequence[int]]  # as TraceWriter takes them


class Recorder:
    """Holds the controller in use, and earlier ones with what they have learnt; writes the trace, if there is
    one."""

    def __init__(self, config: EngineConfig, model: str, policy: str, device: torch.device) -> None:
        """model, policy: names, for the trace, which says what GPU the device is."""
        self.control: Control = FixedControl(None)
        self._controls: dict[Hashable, Control] = {}
        self._config, self._model, self._policy, self._device = config, model, policy, device
        self.is_tracing = True  # else decisions, rounds and requests are left out of the trace
        self._trace: TraceWriter | None = None
        self._rounds: dict[int, list[_TracedRound]] = {}  # of unfinished requests, by number

    def cached_controller(self, key: Hashable) -> Control | None:
        """The controller that was used under this key before."""
        return self._controls.get(key)

    def use_controller(self, control: Control, key: Hashable = None) -> None:
        """Makes `control` the one in use, and keeps it under `key`. Raises ConfigError, the first time, if
        the trace cannot be written."""
        routes = [str(route) for route in control.routes]
        if self._trace is not None:
            self._trace.write_routes(routes)
        elif self._config.trace is not None:  # made only now, as it replaces an earlier trace
            self._trace = TraceWriter(
                Path(self._config.trace),
                model=self._model,
                policy=self._policy,
                max_num_seqs=self._config.max_num_seqs,
                routes=routes,
                environment=environment(self._device),
            )
        self.control = control
        if isinstance(control, FixedControl):  # which has learnt nothing, while its key holds models
            return
        if key not in self._controls and len(self._controls) >= MOST_KEPT:
            del self._controls[next(iter(self._controls))]
        self._controls[key] = control

    def report_failure(self, route: int) -> None:
        """Tells the controller that the drafter of a route has failed."""
        self.control.failed(route)

    def record_decision(self, record: Mapping[str, Any]) -> None:
        """Writes a controller's decision to the trace."""
        if (trace := self._open_trace) is not None:
            trace.write_decision(record)

    def record_round(
        self, flight: Flight, choice: Choice, rows: Sequence[tuple[Request, int, RowOutcome]], seconds: float
    ) -> None:
        """Reports a round before it is committed. rows: requests with their rows and outcomes; seconds: nan
        if something else was timed too: prompts, a capture, the caller's pause."""
        trace = self._open_trace
        if not rows or (trace is None and isinstance(self.control, FixedControl)):
            return  # without a row it tells nothing: all have ended since, or their logits are no numbers
        if flight.plan != choice.plan:  # the drafter failed, or no row could speculate
            choice = Choice(None, flight.plan, is_probe=choice.is_probe)
        if choice.watches != flight.rows.watches:  # a round launched ahead of the host watches no exits
            choice = replace(choice, watches=flight.rows.watches)
        inputs = flight.rows.inputs
        observation = make_observation(
            choice,
            [(request.number, outcome) for request, _, outcome in rows],
            caps=[int(inputs[Input.CAP, row]) for _, row, _ in rows],
            rooms=[request.max_tokens - request.num_output for request, _, _ in rows],
            most_drafts=[int(inputs[Input.DRAFTS, row]) for _, row, _ in rows],
            most_checks=[int(inputs[Input.CHECKS, row]) for _, row, _ in rows],
            watched=flight.runtime.watched,
            context_tokens=sum(len(request.token_ids) for request, _, _ in rows),
            seconds=seconds,
        )
        self.control.observe(observation)
        if trace is not None:
            trace.write_rounds(observation, flight.pass_s)
            route = -1 if choice.route is None else choice.route
            for request, _, outcome in rows:
                self._rounds.setdefault(request.number, []).extend(
                    (route, each.committed, each.drafted, each.kept) for each in outcome.rounds
                )

    def record_request(self, request: Request, metrics: RequestMetrics | None) -> None:
        """Reports a request that has ended."""
        self.control.forget(request.number)
        rounds = self._rounds.pop(request.number, [])
        trace = self._open_trace
        if trace is not None and metrics is not None and request.finish_reason is not None:
            trace.write_request(request.number, metrics, request.max_tokens, request.finish_reason, rounds)

    @property
    def _open_trace(self) -> TraceWriter | None:
        return self._trace if self.is_tracing else None

    def close(self) -> None:
        """Closes the trace."""
        if self._trace is not None:
            self._trace.close()
