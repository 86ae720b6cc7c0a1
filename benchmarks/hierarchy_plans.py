"""Kinds of plans, by tiers, drafter and gate, and the best plan of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hispec.config import SpeculativeConfig
from hispec.profile.plans import drafter_of, short_text
from hispec.profile.predict import Prediction, Predictor, search

DRAFTERS = {"exit": "exit", "adapter": "exit", "tree": "tree", "ngram": "n-gram", "hybrid": "hybrid"}


def is_gated(plan: SpeculativeConfig) -> bool:
    return plan.check is not None and plan.check.continue_confidence is not None


def kind_of(plan: SpeculativeConfig | None) -> str:
    """Such as `three-tier hybrid, gated`."""
    if plan is None:
        return "plain"
    tiers = "two" if plan.check is None else "three"
    return f"{tiers}-tier {DRAFTERS[drafter_of(plan)]}{', gated' if is_gated(plan) else ''}"


KINDS = [
    "plain",
    *(f"two-tier {drafter}" for drafter in dict.fromkeys(DRAFTERS.values())),
    *(
        f"three-tier {drafter}{gate}"
        for drafter in dict.fromkeys(DRAFTERS.values())
        for gate in ("", ", gated")
    ),
]


def best_of_kinds(predictor: Predictor, plans: Sequence[SpeculativeConfig]) -> dict[str, Prediction]:
    """{kind: its fastest plan}, plain decoding first. Those with a fixed number of checks and gated ones are
    searched apart, so that neither takes the other's place among those that are refined; without a gated one
    in `plans` none is tried."""
    best = {"plain": predictor.predict(None)}
    apart = [[plan for plan in plans if is_gated(plan) == gated] for gated in (False, True)]
    found = [
        each for group in apart for each in search(predictor, group)[0] if apart[1] or not is_gated(each.plan)
    ]
    for each in sorted(found, key=lambda each: (-each.tokens_per_s, short_text(each.plan))):
        best.setdefault(kind_of(each.plan), each)
    return {kind: best[kind] for kind in KINDS if kind in best}


def fastest(best: Mapping[str, Prediction], tiers: str) -> str:
    """The kind of the fastest plan of so many tiers: `two` or `three`."""
    return max((kind for kind in best if kind.startswith(tiers)), key=lambda kind: best[kind].tokens_per_s)


def plans_tuned(best: Mapping[str, Prediction]) -> dict[str, dict[str, Any]]:
    return {
        kind: {
            "plan": short_text(each.plan),
            "speculative": each.plan.model_dump() if each.plan is not None else None,
            "tuned": each.as_dict(),
        }
        for kind, each in best.items()
    }
