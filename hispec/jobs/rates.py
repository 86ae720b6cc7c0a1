"""Rates from the engine's counts. The engine keeps counts only; this is where they are divided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from ..config import SpeculativeConfig
from ..stats import rate

FLOOR = 0.05  # exits that were never trained stay below this share of kept tokens


_COUNTS = (
    *(
        "rounds",
        "tokens",
        "committed",
        "drafted",
        "draft_accepted",
        "looked_up",
        "looked_up_accepted",
        "tentative",
        "accepted",
    ),
    *("layer_passes", "prefill_layer_passes", "draft_model_layer_passes"),
)


def add_counts(total: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """`LLM.stats()` of a run in parts: the counts that Rates divides are summed, all else is as in `part`."""
    histograms = zip_longest(
        total.get("accept_length_histogram", []), part["accept_length_histogram"], fillvalue=0
    )
    counts = {name: total.get(name, 0) + part[name] for name in _COUNTS}
    return {**part, **counts, "accept_length_histogram": [sum(pair) for pair in histograms]}


@dataclass(frozen=True)
class Rates:
    """What a run's counts say; None where the run has no such tier.

    draft_accepted          share of drafted tokens kept by the tier above the draft (check, or verify in
                            two-tier)
    looked_up_accepted      the same of those that prompt lookup proposed; None without it
    looked_up_share         share of drafted tokens that prompt lookup proposed; None without it
    tentative_accepted      share of tentative tokens kept by verify; None without a check tier, where it is
                            the same
    mean_accepted_len       tokens committed per row and round
    layer_passes_per_token  layers run in rounds per output token, a pass over a whole batch counted once
    full_passes_per_token   the same, in passes over the whole model
    draft_model_passes_per_token  layers of a separate draft model, likewise; None without one
    accept_len_histogram    [i] = rounds of a row that committed i tokens
    """

    draft_accepted: float | None
    looked_up_accepted: float | None
    looked_up_share: float | None
    tentative_accepted: float | None
    mean_accepted_len: float | None
    layer_passes_per_token: float | None
    full_passes_per_token: float | None
    draft_model_passes_per_token: float | None
    accept_len_histogram: list[int]

    @classmethod
    def of(cls, stats: dict[str, Any], speculative: SpeculativeConfig | None) -> Rates:
        """From `LLM.stats()` of a run with these settings."""
        # Of plans that change, what was put before verify is drafts at one time and what a check kept at
        # another: no rate of either.
        is_fixed = speculative is not None and speculative.control == "fixed"
        has_check = speculative is not None and is_fixed and speculative.check is not None
        traits = speculative.draft.traits if speculative is not None else None
        looks_up = traits is not None and (traits.looks_up or not is_fixed)
        layers = rate(stats["layer_passes"] - stats["prefill_layer_passes"], stats["tokens"])
        return cls(
            draft_accepted=rate(stats["draft_accepted"], stats["drafted"]),
            looked_up_accepted=rate(stats["looked_up_accepted"], stats["looked_up"]) if looks_up else None,
            looked_up_share=rate(stats["looked_up"], stats["drafted"]) if looks_up else None,
            tentative_accepted=rate(stats["accepted"], stats["tentative"]) if has_check else None,
            mean_accepted_len=rate(stats["committed"], stats["rounds"]),
            layer_passes_per_token=layers,
            full_passes_per_token=None if layers is None else layers / stats["num_layers"],
            draft_model_passes_per_token=(
                rate(stats["draft_model_layer_passes"], stats["tokens"])
                if traits is not None and traits.has_model
                else None
            ),
            accept_len_histogram=list(stats["accept_length_histogram"]),
        )

    @property
    def at_floor(self) -> bool:
        """Whether a tier keeps almost nothing, so that speculation only costs."""
        return any(
            share is not None and share < FLOOR for share in (self.draft_accepted, self.tentative_accepted)
        )


def shares_text(rounds_by_plan: Mapping[str, int], most: int = 4) -> str:
    """Of a controller's rounds, such as `61% hybrid D=4 K=16, 30% plain, 9% 3 others`."""
    total = sum(rounds_by_plan.values())
    ordered = sorted(rounds_by_plan.items(), key=lambda item: -item[1])
    parts = [f"{count / total:.0%} {name}" for name, count in ordered[:most]]
    if rest := ordered[most:]:
        parts.append(f"{sum(count for _, count in rest) / total:.0%} {len(rest)} others")
    return ", ".join(parts)


def plan_text(speculative: SpeculativeConfig | None, num_layers: int) -> str:
    """The plan in one line, such as `draft [0, 6) → check [6, 18) → verify [18, 30), K=2 drafts, R=2
    checks`."""
    if speculative is None:
        return f"plain [0, {num_layers})"
    if speculative.control == "goodput":
        return (
            f"chosen by goodput, up to K={speculative.num_draft_tokens} drafts, R={speculative.num_checks}"
            " checks"
        )
    draft = speculative.draft
    tiers = [] if draft.layer is None else [("draft", draft.layer)]
    if speculative.check is not None:
        tiers.append(("check", speculative.check.layer))
    tiers.append(("verify", num_layers))
    starts = [0] + [layer for _, layer in tiers]
    stages = " → ".join(f"{name} [{start}, {end})" for start, (name, end) in zip(starts, tiers, strict=False))
    if (sizes := draft.lookup) is not None:
        limit = f" x{sizes.tokens_per_match}" if sizes.tokens_per_match is not None else ""
        store = f", store of {sizes.datastore_tokens}" if sizes.datastore_tokens else ""
        stages = (
            f"n-grams of {sizes.max_size} to {sizes.min_size}{limit}{store}"
            + (" or " if draft.traits.is_mixed else " → ")
            + stages
        )
    elif draft.traits.has_model:
        stages = f"draft by {draft.path} → {stages}"
    checks = f", R={speculative.num_checks} checks" if speculative.check is not None else ""
    exits = f" ({draft.num_exit_tokens} by the exit)" if draft.num_exit_tokens is not None else ""
    branches = f", B={speculative.num_branches} branches" if speculative.num_branches > 1 else ""
    sure = [
        ("draft", speculative.draft_confidence),
        ("check", speculative.check.confidence if speculative.check is not None else None),
    ]
    confidence = "".join(f", {tier} p>={value:g}" for tier, value in sure if value is not None)
    return f"{stages}, K={speculative.num_draft_tokens} drafts{exits}{branches}{checks}{confidence}"
