"""Makes the controller that the settings name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ..config import GoodputConfig, Plan, SpeculativeConfig
from ..errors import ConfigError
from ..latency.model import LatencyModel
from .choice import Control, FixedControl, Route
from .controller import GoodputControl


def make_control(
    plan: Plan,
    routes: Sequence[Route],
    written_layers: Collection[int],
    speculative: SpeculativeConfig | None,
    latency: LatencyModel | None,
    on_decision: Callable[[Mapping[str, Any]], None],
) -> Control:
    """A controller that always chooses `plan`, or for control: goodput one that chooses among `routes`.
    written_layers: the exits whose KV every round writes.

    Raises ConfigError if control: goodput lacks a latency profile, or the profile a stage."""
    if speculative is not None and speculative.control == "goodput":
        if latency is None:
            raise ConfigError(
                "speculative.control='goodput' needs `latency`, what stages cost here: LLM measures it; an"
                " Engine is given it, by hispec.measure.latency.latency_for(...).model(), or by"
                " from_pretrained(measure_latency=hispec.measure.latency.latency_for_control)"
            )
        return GoodputControl(
            routes,
            latency,
            speculative.goodput or GoodputConfig(),
            written_layers=frozenset(written_layers),
            on_decision=on_decision,
        )
    if plan.is_plain:
        return FixedControl(None)
    kind = speculative.draft.kind if speculative is not None else "exit"
    return FixedControl(
        Route(kind, plan.draft_layer, plan.check_layer, plan.num_draft_tokens, plan.num_checks), plan
    )
