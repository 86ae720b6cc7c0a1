"""The goodput controller: every few rounds the plan that promises the most tokens per second [SmartSpec], for
three tiers and several drafters."""

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
from .choice import Choice, Observation, Route
from .forecast import Outlook, Outlooks, Standing
from .probes import Evenly, Probes

_MOST_BUFFERED = 512  # observations
_DEVIATIONS = 1.5  # standard errors of acceptance that a route is given the benefit of
_LEAST_PROBED = 3  # drafts: fewer say little of a route
_RESTLESS = 4.0  # switches of late that double what the margin is above 1
_NOISE, _PATIENCE = (
    0.003,
    4.0,
)  # of what other plans promise beyond the present: not counted; margins of it, added up over decisions
_NUM_ALTERNATIVES = 5
_COUNTED = ("decisions", "switches", "probes", "start_rounds", "probe_rounds", "shadow_rounds", "failures")


class GoodputControl:
    """Chooses among plain decoding and the plans of `routes`. Whoever runs rounds tells it of each
    (`observe`); decisions are made in `choose`.

    Another plan is taken if it promises `margin` times what the present one does, both by the newest
    estimates, or less but for long; the margin widens while plans change often. What was never run is tried
    by probes before it is taken, unless there are none (probe_share = 0).
    """

    def __init__(
        self,
        routes: Sequence[Route],
        latency: LatencyModel,
        config: GoodputConfig,
        *,
        along: Collection[int] = frozenset(),
        on_decision: Callable[[dict[str, Any]], None] | None = None,
        seed: int = 0,
    ) -> None:
        """along: exits whose KV every round writes; on_decision: is given a record of each decision, in plain
        types; seed: when, in their turn, exits are watched first. Raises ConfigError for impossible routes,
        and if the latency model lacks a stage.
        """
        _check(routes)
        self._routes, self._config, self._on_decision = tuple(routes), config, on_decision
        self._outlooks, self._probes = Outlooks(routes, latency, config, along), Probes(len(routes), config)
        self._watch = Evenly(config.shadow_share, float(np.random.default_rng(seed).random()))
        self._exits = frozenset(
            layer for route in routes for layer in (route.draft_layer, route.check_layer) if layer
        )
        self._standing: Standing | None = None  # what is kept
        self._running: Standing | None = None  # that, or a probe
        self._previous: Choice | None = None
        self._outlook: Outlook | None = None
        self._may_watch = self._is_watched = False
        self._watching = Choice(watches=True)
        self._now = self._decide_at = self._decided_at = 0
        self._restless, self._restless_at, self._missed = 0.0, 0, 0.0
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
        """For how many rounds the last choice holds, counted from the last one observed, while the rows stay
        what they are; at least 1."""
        if self._is_watched:
            return 1
        left = float(self._decide_at - self._now)
        return max(1, math.ceil(min(left, self._watch.left(self._now)) if self._may_watch else left))

    @property
    def is_due(self) -> bool:
        """With one round under way that was not observed yet."""
        return self.rounds_left <= 1

    def choose(self, numbers: Sequence[int], context_tokens: int) -> Choice:
        if not numbers:
            return self._for_one(context_tokens)
        start = time.perf_counter()
        if self._now >= self._decide_at or self._running is None or self._has_resized(len(numbers)):
            self._decide(numbers, context_tokens)
        assert self._running is not None
        self._is_watched = self._may_watch and self._watch.left(self._now) <= 0.0
        if self._is_watched:
            self._watch.take(self._now)
        self._overhead_s += time.perf_counter() - start
        return self._watching if self._is_watched else self._running.choice

    def observe(self, seen: Observation) -> None:
        start = time.perf_counter()
        choice, rounds = seen.choice, seen.rounds
        self._now += rounds
        self._buffer.append(seen)
        self._rounds_of[choice.route, choice.plan] += rounds
        self._probes.ran(choice.route, self._now)
        if choice.is_probe:
            self._count_probe(seen)
        elif choice.watches:
            self._counts["shadow_rounds"] += rounds
        self._probes.earn(rounds)
        if seen.seconds > 0.0:  # not nan
            self._tokens, self._seconds = self._tokens + seen.tokens, self._seconds + seen.seconds
        if len(self._buffer) >= _MOST_BUFFERED:
            self._learn()
        self._overhead_s += time.perf_counter() - start

    def failed(self, route: int) -> None:
        self._probes.failed(route, self._now)
        self._decide_at = self._now
        self._counts["failures"] += 1

    def forget(self, number: int) -> None:
        self._outlooks.acceptance.requests.forget(number)

    def stats(self) -> dict[str, Any]:
        return {
            "rounds": self._now,
            **{name: self._counts[name] for name in _COUNTED},
            "overhead_s": self._overhead_s,
            "rounds_by_plan": {
                self._outlooks.grid.name(route, plan): count
                for (route, plan), count in self._rounds_of.most_common()
            },
            "decision": self._record(),
            **self._outlooks.stats(self._now, 1 if self._outlook is None else self._outlook.rows),
        }

    def _has_resized(self, rows: int) -> bool:
        """Whether the batch is another one: by more than a quarter, or alone or not."""
        before = 0 if self._outlook is None else self._outlook.rows
        return abs(rows - before) * 4 > before or (rows == 1) != (before == 1)

    def _count_probe(self, seen: Observation) -> None:
        self._counts["start_rounds" if self._probes.is_start else "probe_rounds"] += seen.rounds
        probe, standing = self._running, self._standing
        if probe is not None and standing is not None:
            ms = seen.seconds * 1e3 / seen.rounds if seen.seconds > 0.0 else probe.milliseconds
            self._probes.spend(seen.rounds, ms / max(standing.milliseconds, 1e-9))

    def _learn(self) -> None:
        """From all that was observed since the last time."""
        if self._buffer:
            self._outlooks.learn(self._buffer, self._standing, self._now)
            self._buffer = []

    def _decide(self, numbers: Sequence[int], context_tokens: int) -> None:
        resized = self._outlook is not None and len(numbers) != self._outlook.rows
        self._outlooks.acceptance.requests.keep(numbers)
        self._learn()
        outlook = self._outlooks.look(numbers, context_tokens)
        standing = self._best(outlook, resized)
        if self._standing is not None and standing.index != self._standing.index:
            self._counts["switches"] += 1
            self._restless += not resized
        self._previous = None if self._running is None else self._running.choice
        self._standing, self._outlook = standing, outlook
        probe = self._probe(outlook, standing)
        self._running = running = probe or standing
        self._watching = replace(running.choice, watches=True)
        plan = running.choice.plan
        self._may_watch = (
            self._config.shadow_share > 0.0
            and probe is None
            and not self._exits <= {plan.draft_layer, plan.check_layer}
        )
        rounds = (
            self._config.interval
            if probe is None
            else Probes.rounds(len(numbers), probe.milliseconds / max(standing.milliseconds, 1e-9))
        )
        self._decide_at, self._decided_at = self._now + rounds, self._now
        self._counts["decisions"] += 1
        self._counts["probes"] += probe is not None
        self._measured = self._tokens / self._seconds if self._seconds > 0.0 else math.nan
        self._tokens, self._seconds = 0, 0.0
        if self._on_decision is not None and (record := self._record()) is not None:
            self._on_decision(record)

    def _best(self, outlook: Outlook, resized: bool) -> Standing:
        may_run = self._probes.may_run(self._now)
        if not self._probes.may_run_untried:
            may_run = may_run & (self._probes.was_tried > 0)
        may_run[-1] = True  # plain decoding
        promised = np.where(may_run[self._outlooks.grid.sizes.route], outlook.tokens_per_s, 0.0)
        index, reason = int(promised.argmax()), "best"
        if len(promised) == 1:
            reason = "only plan"
        elif self._standing is None:
            reason = "start"
        elif (
            index != (present := self._standing.index)
            and promised[present]
            and not self._is_worth(float(promised[index] / promised[present]), resized)
        ):
            index, reason = present, "kept: within margin"
        return self._outlooks.stand(index, reason, outlook)

    def _is_worth(self, ratio: float, resized: bool) -> bool:
        """Whether to switch to what promises so many times as much: beyond the margin, or within it for
        long."""
        self._restless *= 0.5 ** ((self._now - self._restless_at) / self._config.window)
        self._restless_at = self._now
        calm = 1.0 if resized else 1.0 + min(self._restless / _RESTLESS, 1.0)
        least = (self._config.margin - 1.0) * calm
        self._missed = max(0.0, self._missed + ratio - 1.0 - _NOISE) if not resized else 0.0
        if ratio - 1.0 <= least and self._missed <= _PATIENCE * calm * least:
            return False
        self._missed = 0.0
        return True

    def _probe(self, outlook: Outlook, standing: Standing) -> Standing | None:
        """A candidate to try now, if the budget allows."""
        route_of = self._outlooks.grid.sizes.route
        if len(route_of) == 1 or not self._probes.is_due(outlook.rows, self._now):
            return None
        hopeful = self._outlooks.hopeful(outlook.numbers, outlook.context_tokens, self._now, _DEVIATIONS)
        cost = outlook.milliseconds / max(standing.milliseconds, 1e-9)
        index = self._probes.pick(
            route_of, hopeful, cost, standing.choice.route, standing.tokens_per_s, outlook.rows, self._now
        )
        index = None if index is None else self._outlooks.grid.telling(index, _LEAST_PROBED)
        return (
            None
            if index is None
            else self._outlooks.stand(
                index, "start" if self._probes.is_start else "probe", outlook, is_probe=True
            )
        )

    def _for_one(self, context_tokens: int) -> Choice:
        """As for one request, of which nothing is known; decides nothing."""
        if self._standing is not None and self._outlook is not None and self._outlook.rows == 1:
            return self._standing.choice
        outlook, grid = self._outlooks.look((), context_tokens), self._outlooks.grid
        index = int(outlook.tokens_per_s.argmax())
        return Choice(grid.route(index), grid.plan(index))

    def _record(self) -> dict[str, Any] | None:
        """Of the last decision."""
        running, outlook, previous = self._running, self._outlook, self._previous
        if running is None or outlook is None:
            return None
        choice = running.choice
        return {
            "type": "decision",
            "round": self._decided_at,
            "route": choice.route,
            "plan": self._outlooks.name(choice),
            "num_drafts": choice.plan.num_draft_tokens,
            "num_checks": choice.plan.num_checks,
            "rows": outlook.rows,
            "context_tokens": outlook.context_tokens,
            "predicted": running.tokens_per_s,
            "measured": None if math.isnan(self._measured) else self._measured,
            "previous": None if previous is None else self._outlooks.name(previous),
            "reason": running.reason,
            "is_probe": choice.is_probe,
            "alternatives": [
                list(each) for each in self._outlooks.best_of_routes(outlook, _NUM_ALTERNATIVES)
            ],
            "acceptance": self._outlooks.acceptance.tiers(),
        }


def _check(routes: Sequence[Route]) -> None:
    for at, route in enumerate(routes):
        what = f"routes[{at}] = {route}: "
        if not 1 <= route.most_drafts <= 64:
            raise ConfigError(
                f"{what}most_drafts={route.most_drafts!r} must be 1 to 64; plain decoding is always among the"
                " plans and needs no route"
            )
        if route.most_checks < 1 or (route.check_layer is None and route.most_checks != 1):
            raise ConfigError(
                f"{what}most_checks={route.most_checks!r} must be at least 1, and 1 without a check tier"
            )
        if (route.draft_layer > 0) != route.traits.in_trunk:
            raise ConfigError(
                f"{what}draft_layer={route.draft_layer!r} must be the exit's layer for exit, adapter and"
                " hybrid, and 0 for others"
            )
        if route.check_layer is not None and route.check_layer <= route.draft_layer:
            raise ConfigError(
                f"{what}check_layer={route.check_layer!r} must lie above draft_layer={route.draft_layer}"
            )
        if route in routes[:at]:
            raise ConfigError(f"{what}is there twice; leave one of them out")
