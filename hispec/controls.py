"""Who decides what rounds do, as the settings say."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .config import GoodputConfig, SpeculativeConfig
from .control.choice import Control, FixedControl, Route
from .control.controller import GoodputControl
from .control.latency import LatencyModel
from .errors import ConfigError
from .speculation import Speculation


def make_control(
    speculation: Speculation, speculative: SpeculativeConfig | None, latency: LatencyModel | None, on_decision: Callable[[Mapping[str, Any]], None]
) -> Control:
    """Raises ConfigError if control: goodput lacks a latency profile, or the profile a stage."""
    if speculative is not None and speculative.control == "goodput":
        if latency is None:
            raise ConfigError(
                "speculative.control='goodput' needs `latency`, what stages cost here: LLM measures it; an Engine is given it, by"
                " hispec.measure.latency.latency_for(...).model()"
            )
        routes = [route for each in speculation.routes if (route := each.route) is not None]
        along = frozenset(owner for owner in speculation.owners if isinstance(owner, int))
        return GoodputControl(routes, latency, speculative.goodput or GoodputConfig(), along=along, on_decision=on_decision)
    plan = speculation.plan
    if plan.is_plain:
        return FixedControl(None)
    kind = speculative.draft.kind if speculative is not None else "exit"
    return FixedControl(Route(kind, plan.draft_layer, plan.check_layer, plan.num_draft_tokens, plan.num_checks), plan)
