"""The goodput controller: every few rounds it takes the plan with the most expected tokens per second
[SmartSpec], for three tiers and several drafters."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..config import GoodputConfig, Plan
from ..errors import ConfigError
from ..latency.model import LatencyModel
from ..utils.clock import seconds_since
from .choice import Choice, Observation, Route
from .forecast import Forecast, Forecaster, Selection
from .probes import Probes, ShadowSchedule

_MOST_BUFFERED = 512  # observations
_DEVIATIONS = 1.5  # standard errors of acceptance in the optimistic estimates by which probes are picked
_LEAST_PROBED = 3  # drafts of a probe: fewer say little of a route
_MANY_SWITCHES = 4.0  # recent switches that double what the margin is above 1
# Within the margin, a CUSUM test decides: advantages of another plan, less the slack, are summed up over
# decisions; it is taken when the sum exceeds so many margins.
_CUSUM_SLACK, _CUSUM_THRESHOLD = 0.003, 4.0
_NUM_ALTERNATIVES = 5
_COUNTED = ("decisions", "switches", "probes", "start_rounds", "probe_rounds", "shadow_rounds", "failures")


class GoodputControl:
    """Chooses among plain decoding and the plans of `routes`. The engine reports each round to `observe`;
    decisions are made in `choose`.

    Another plan is taken if it promises `margin` times the tokens/s of the present one by the newest
    estimates, or less, but persistently (CUSUM); the margin widens while plans change often. Routes that were
    never run are probed before they are taken, unless probes are off (probe_share = 0).
    """

    def __init__(
        self,
        routes: Sequence[Route],
        latency: LatencyModel,
        config: GoodputConfig,
        *,
        written_layers: Collection[int] = frozenset(),
        on_decision: Callable[[dict[str, Any]], None] | None = None,
        seed: int = 0,
    ) -> None:
        """written_layers: exits whose KV every round writes; on_decision: is called with a record of each
        decision, in plain types; seed: of the phase of shadow rounds. Raises ConfigError for impossible
        routes, and if the latency model lacks a stage.
        """
        _check(routes)
        self._routes, self._config, self._on_decision = tuple(routes), config, on_decision
        self._forecaster = Forecaster(routes, latency, config, written_layers)
        self._probes = Probes(len(routes), config)
        self._shadows = ShadowSchedule(config.shadow_share, float(np.random.default_rng(seed).random()))
        self._exits = frozenset(
            layer for route in routes for layer in (route.draft_layer, route.check_layer) if layer
        )
        self._selected: Selection | None = None  # the present plan
        self._running: Selection | None = None  # that, or a probe
        self._previous: Choice | None = None
        self._forecast: Forecast | None = None
        self._may_shadow = self._is_shadowed = False
        self._shadowed = Choice(watches=True)  # the running choice, with shadows
        self._round_index = self._decide_at = self._decided_at = 0
        self._recent_switches, self._switches_at, self._cusum = 0.0, 0, 0.0
        self._buffer: list[Observation] = []
        self._tokens, self._seconds, self._measured = 0, 0.0, math.nan
        self._counts: Counter[str] = Counter()
        self._rounds_of: Counter[tuple[int | None, Plan]] = Counter()
        self._overhead_s = 0.0

    @property
    def routes(self) -> Sequence[Route]:
        return self._routes

    @property
    def rounds_left(self) -> int:
        if self._is_shadowed:
            return 1
        left = float(self._decide_at - self._round_index)
        if self._may_shadow:
            left = min(left, self._shadows.rounds_left(self._round_index))
        return max(1, math.ceil(left))

    @property
    def is_due(self) -> bool:
        return self.rounds_left <= 1

    def holds_for(self, num_rows: int) -> bool:
        return not self._has_resized(num_rows)

    def choose(self, numbers: Sequence[int], context_tokens: int) -> Choice:
        if not numbers:
            return self._for_one(context_tokens)
        start = time.perf_counter()
        if self._round_index >= self._decide_at or self._running is None or self._has_resized(len(numbers)):
            self._decide(numbers, context_tokens)
        assert self._running is not None
        self._is_shadowed = self._may_shadow and self._shadows.rounds_left(self._round_index) <= 0.0
        if self._is_shadowed:
            self._shadows.advance(self._round_index)
        self._overhead_s += seconds_since(start)
        return self._shadowed if self._is_shadowed else self._running.choice

    def observe(self, seen: Observation) -> None:
        start = time.perf_counter()
        choice, rounds = seen.choice, seen.rounds
        self._round_index += rounds
        self._buffer.append(seen)
        self._rounds_of[choice.route, choice.plan] += rounds
        self._probes.record_run(choice.route, self._round_index)
        if choice.is_probe:
            self._count_probe(seen)
        elif choice.watches:
            self._counts["shadow_rounds"] += rounds
        self._probes.earn(rounds)
        if seen.seconds > 0.0:  # not nan
            self._tokens, self._seconds = self._tokens + seen.tokens, self._seconds + seen.seconds
        if len(self._buffer) >= _MOST_BUFFERED:
            self._learn()
        self._overhead_s += seconds_since(start)

    def failed(self, route: int) -> None:
        self._probes.record_failure(route, self._round_index)
        self._decide_at = self._round_index
        self._counts["failures"] += 1

    def forget(self, number: int) -> None:
        self._forecaster.acceptance.requests.forget(number)

    def stats(self) -> dict[str, Any]:
        return {
            "rounds": self._round_index,
            **{name: self._counts[name] for name in _COUNTED},
            "overhead_s": self._overhead_s,
            "rounds_by_plan": {
                self._forecaster.grid.name(route, plan): count
                for (route, plan), count in self._rounds_of.most_common()
            },
            "decision": self._record(),
            **self._forecaster.stats(self._round_index, 1 if self._forecast is None else self._forecast.rows),
        }

    def _has_resized(self, rows: int) -> bool:
        """Whether the batch changed by more than a quarter, or from or to a single row."""
        before = 0 if self._forecast is None else self._forecast.rows
        return abs(rows - before) * 4 > before or (rows == 1) != (before == 1)

    def _count_probe(self, seen: Observation) -> None:
        self._counts["start_rounds" if self._probes.is_start else "probe_rounds"] += seen.rounds
        probe, selected = self._running, self._selected
        if probe is not None and probe.choice.route is not None and seen.choice.route is None:
            self._probes.record_nothing(probe.choice.route, self._round_index)
        if probe is not None and selected is not None:
            ms = seen.seconds * 1e3 / seen.rounds if seen.seconds > 0.0 else probe.milliseconds
            self._probes.spend(seen.rounds, ms / max(selected.milliseconds, 1e-9))

    def _learn(self) -> None:
        """Updates the forecaster by the observations since the last call."""
        seen, self._buffer = self._buffer, []  # first: nothing is to fail again and again of one observation
        if seen:
            self._forecaster.learn(seen, self._selected, self._round_index)

    def _decide(self, numbers: Sequence[int], context_tokens: int) -> None:
        resized = self._forecast is not None and len(numbers) != self._forecast.rows
        self._forecaster.acceptance.requests.track(numbers)
        self._learn()
        forecast = self._forecaster.predict(numbers, context_tokens)
        selected = self._best(forecast, resized)
        if self._selected is not None and selected.index != self._selected.index:
            self._counts["switches"] += 1
            self._recent_switches += not resized
        self._previous = None if self._running is None else self._running.choice
        self._selected, self._forecast = selected, forecast
        probe = self._probe(forecast, selected)
        self._running = running = probe or selected
        self._shadowed = replace(running.choice, watches=True)
        plan = running.choice.plan
        unused = self._exits - {plan.draft_layer, plan.check_layer}
        self._may_shadow = self._config.shadow_share > 0.0 and probe is None and bool(unused)
        rounds = self._config.interval
        if probe is not None:
            rounds = Probes.num_rounds(len(numbers), probe.milliseconds / max(selected.milliseconds, 1e-9))
        self._decide_at, self._decided_at = self._round_index + rounds, self._round_index
        self._counts["decisions"] += 1
        self._counts["probes"] += probe is not None
        self._measured = self._tokens / self._seconds if self._seconds > 0.0 else math.nan
        self._tokens, self._seconds = 0, 0.0
        if self._on_decision is not None and (record := self._record()) is not None:
            self._on_decision(record)

    def _best(self, forecast: Forecast, resized: bool) -> Selection:
        may_run = self._probes.may_run(self._round_index)
        if not self._probes.may_run_untried:
            may_run = may_run & self._probes.was_tried
        may_run[-1] = True  # plain decoding
        promised = np.where(may_run[self._forecaster.grid.sizes.route], forecast.tokens_per_s, 0.0)
        index, reason = int(promised.argmax()), "best"
        if len(promised) == 1:
            reason = "only plan"
        elif self._selected is None:
            reason = "start"
        elif (
            index != (present := self._selected.index)
            and promised[present]
            and not self._should_switch(float(promised[index] / promised[present]), resized)
        ):
            index, reason = present, "kept: within margin"
        return self._forecaster.select(index, reason, forecast)

    def _should_switch(self, ratio: float, resized: bool) -> bool:
        """Whether to switch to a plan that promises `ratio` times the present tokens/s: beyond the margin at
        once, within it when the CUSUM exceeds its threshold."""
        self._recent_switches *= 0.5 ** ((self._round_index - self._switches_at) / self._config.window)
        self._switches_at = self._round_index
        widening = 1.0 if resized else 1.0 + min(self._recent_switches / _MANY_SWITCHES, 1.0)
        least = (self._config.margin - 1.0) * widening
        self._cusum = max(0.0, self._cusum + ratio - 1.0 - _CUSUM_SLACK) if not resized else 0.0
        if ratio - 1.0 <= least and self._cusum <= _CUSUM_THRESHOLD * widening * least:
            return False
        self._cusum = 0.0
        return True

    def _probe(self, forecast: Forecast, selected: Selection) -> Selection | None:
        """A candidate to try now, if the budget allows."""
        route_of = self._forecaster.grid.sizes.route
        if len(route_of) == 1 or not self._probes.is_due(forecast.rows, self._round_index):
            return None
        now, rows, present = self._round_index, forecast.rows, selected.choice.route
        optimistic = self._forecaster.optimistic_tokens_per_s(forecast, now, _DEVIATIONS)
        cost = forecast.milliseconds / max(selected.milliseconds, 1e-9)
        index = self._probes.pick(route_of, optimistic, cost, present, selected.tokens_per_s, rows, now)
        if index is None:
            return None
        index = self._forecaster.grid.telling(index, _LEAST_PROBED)
        reason = "start" if self._probes.is_start else "probe"
        return self._forecaster.select(index, reason, forecast, is_probe=True)

    def _for_one(self, context_tokens: int) -> Choice:
        """The choice for one unknown request; changes nothing."""
        if self._selected is not None and self._forecast is not None and self._forecast.rows == 1:
            return self._selected.choice
        forecast, grid = self._forecaster.predict((), context_tokens), self._forecaster.grid
        index = int(forecast.tokens_per_s.argmax())
        return Choice(grid.route(index), grid.plan(index))

    def _record(self) -> dict[str, Any] | None:
        """The last decision, as a line of the trace."""
        running, forecast, previous = self._running, self._forecast, self._previous
        if running is None or forecast is None:
            return None
        choice = running.choice
        return {
            "type": "decision",
            "round": self._decided_at,
            "route": choice.route,
            "plan": self._forecaster.name(choice),
            "num_drafts": choice.plan.num_draft_tokens,
            "num_checks": choice.plan.num_checks,
            "rows": forecast.rows,
            "context_tokens": forecast.context_tokens,
            "predicted": running.tokens_per_s,
            "measured": None if math.isnan(self._measured) else self._measured,
            "previous": None if previous is None else self._forecaster.name(previous),
            "reason": running.reason,
            "is_probe": choice.is_probe,
            "alternatives": self._forecaster.best_of_routes(forecast, _NUM_ALTERNATIVES),
            "acceptance": self._forecaster.acceptance.shares(),
        }


def _check(routes: Sequence[Route]) -> None:
    """Raises ConfigError for a route that no plan can have."""
    for at, route in enumerate(routes):
        what, draft, check = f"routes[{at}] = {route}: ", route.draft_layer, route.check_layer
        most = route.most_checks
        if not 1 <= route.most_drafts <= 64:
            raise ConfigError(
                f"{what}most_drafts={route.most_drafts!r} must be 1 to 64; plain decoding is always among the"
                " plans and needs no route"
            )
        if most < 1 or (check is None and most != 1):
            raise ConfigError(f"{what}most_checks={most!r} must be at least 1, and 1 without a check tier")
        if (draft > 0) != route.traits.in_trunk:
            raise ConfigError(
                f"{what}draft_layer={draft!r} must be the exit's layer for exit, adapter and hybrid, and 0"
                " for others"
            )
        if check is not None and check <= draft:
            raise ConfigError(f"{what}check_layer={check!r} must lie above draft_layer={draft}")
        if route in routes[:at]:
            raise ConfigError(f"{what}is there twice; leave one of them out")
