"""Rates from the engine's counts, and a plan in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import zip_longest
from typing import Any

from ..config import SpeculativeConfig
from ..errors import shown
from ..stats import STAGES, RoundCounts, rate

FLOOR = 0.05  # exits that were never trained stay below this share of kept tokens
LEAST_JUDGED = 200  # tokens; of fewer, a tier that keeps 10 % may by chance seem to keep less than FLOOR
_MOST_COUNT = 2**63  # that a file may have: beyond it is no count of anything

_COUNTS = (
    *(count.name for count in fields(RoundCounts) if count.name != "accept_length_histogram"),
    *("row_layer_passes", "row_draft_model_layer_passes"),
    *("round_s", *(f"{stage}_pass_s" for stage in STAGES)),
)


def add_counts(total: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """`LLM.stats()` of a run in parts: the counts that Rates divides and the times of rounds are summed, all
    else is as in `part`."""
    name = "accept_length_histogram"
    histogram = map(sum, zip_longest(total.get(name, []), part[name], fillvalue=0))
    return {**part, **{each: total.get(each, 0) + part[each] for each in _COUNTS}, name: list(histogram)}


def sum_counts(total: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """Only what `add_counts` sums, and the number of layers."""
    found = add_counts(total, part)
    return {name: found[name] for name in (*_COUNTS, "accept_length_histogram", "num_layers")}


def problem_of(counts: Mapping[str, Any]) -> str | None:
    """What of a `sum_counts` that was read from a file is missing or is no such count, in words; None if it
    is whole."""
    for name in (*_COUNTS, "num_layers"):
        if name not in counts:
            return f"counts.{name} is missing"
        if not _is_count(counts[name]) or (name == "num_layers" and not counts[name]):
            return f"counts.{name} is {shown(counts[name])}"
    lengths = counts.get("accept_length_histogram")
    if not isinstance(lengths, list) or not all(map(_is_count, lengths)):
        return f"counts.accept_length_histogram is {shown(lengths)}"
    return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MOST_COUNT


@dataclass(frozen=True)
class Rates:
    """Rates of one run; None where the run has no such tier.

    draft_kept          share of drafted tokens kept by the tier above the draft (check, or verify in
                            two-tier)
    looked_up_kept      the same of those that prompt lookup proposed; None without it
    looked_up_share         share of drafted tokens that prompt lookup proposed; None without it
    tentative_accepted      share of tentative tokens kept by verify; None without a check tier, where it is
                            the same
    mean_accepted_len       tokens committed per row and round
    layer_passes_per_token  layers that rounds ran for a row, per output token of it: a pass over a batch
                            counts once for each row in it
    full_passes_per_token   the same in passes over the whole model: attained service; 1 in plain decoding
    draft_model_passes_per_token  layers of a separate draft model, likewise; None without one
    accept_len_histogram    [i] = rounds of a row that committed i tokens
    drafted, tentative      how many tokens the shares are of
    """

    draft_kept: float | None
    looked_up_kept: float | None
    looked_up_share: float | None
    tentative_accepted: float | None
    mean_accepted_len: float | None
    layer_passes_per_token: float | None
    full_passes_per_token: float | None
    draft_model_passes_per_token: float | None
    accept_len_histogram: list[int]
    drafted: int = 0
    tentative: int = 0

    @classmethod
    def of(cls, stats: dict[str, Any], speculative: SpeculativeConfig | None) -> Rates:
        """The rates of a run with these settings, whose `LLM.stats()` is given."""
        # With plans that change, tentative tokens are drafts in some rounds, and drafts kept by a check in
        # others: a rate of both says nothing.
        is_fixed = speculative is not None and speculative.control == "fixed"
        has_check = speculative is not None and is_fixed and speculative.check is not None
        traits = speculative.draft.traits if speculative is not None else None
        looks_up = traits is not None and (traits.looks_up or not is_fixed)
        layers = rate(stats["row_layer_passes"], stats["tokens"])
        return cls(
            draft_kept=rate(stats["draft_kept"], stats["drafted"]),
            looked_up_kept=rate(stats["looked_up_kept"], stats["looked_up"]) if looks_up else None,
            looked_up_share=rate(stats["looked_up"], stats["drafted"]) if looks_up else None,
            tentative_accepted=rate(stats["accepted"], stats["tentative"]) if has_check else None,
            mean_accepted_len=rate(stats["committed"], stats["rounds"]),
            layer_passes_per_token=layers,
            full_passes_per_token=None if layers is None else layers / stats["num_layers"],
            draft_model_passes_per_token=(
                rate(stats["row_draft_model_layer_passes"], stats["tokens"])
                if traits is not None and traits.has_model
                else None
            ),
            accept_len_histogram=list(stats["accept_length_histogram"]),
            drafted=stats["drafted"],
            tentative=stats["tentative"],
        )

    @property
    def at_floor(self) -> bool:
        """Whether less than FLOOR of a tier's tokens are kept, so that speculation only costs time."""
        return any(
            share is not None and share < FLOOR and judged >= LEAST_JUDGED
            for share, judged in (
                (self.draft_kept, self.drafted),
                (self.tentative_accepted, self.tentative),
            )
        )


def floor_warning(rates: Rates, speculative: SpeculativeConfig | None) -> str | None:
    """What may be wrong with these settings, where speculation only costs time; None elsewhere."""
    if speculative is None or not rates.at_floor:
        return None
    return (
        f"Less than {FLOOR:.0%} of a tier's tokens were kept: the output is right, but speculation only costs"
        f' time. {"; ".join(_causes(speculative))}. See docs/jobs.md, "Acceptance".'
    )


def _causes(speculative: SpeculativeConfig) -> Iterator[str]:
    draft, check = speculative.draft, speculative.check
    if speculative.control == "goodput":
        yield "No plan that control tried drafts well here"
        return
    tiers = [(draft.layer, draft.is_trained), (check and check.layer, check is not None and check.is_trained)]
    layers = {
        is_trained: " and ".join(str(layer) for layer, trained in tiers if layer and trained == is_trained)
        for is_trained in (False, True)
    }
    if layers[False]:
        yield (
            f"Exits read through the model's own head, here at layer {layers[False]}, are untrained unless"
            " the model was trained for early exit"
        )
    elif layers[True]:
        yield f"The trained exits, here at layer {layers[True]}, do not fit these texts"
    if draft.traits.looks_up:
        yield "Prompt lookup rarely matches what comes next in these texts"
    elif draft.traits.has_model:
        yield f"The draft model {shown(draft.path)} rarely agrees with the model"
    elif not draft.traits.in_trunk:
        yield f"The drafter of kind {draft.kind!r} is rarely right"


def shares_text(rounds_by_plan: Mapping[str, int], most: int = 4) -> str:
    """The shares of a controller's rounds, such as `61% hybrid D=4 K=16, 30% plain, 9% 3 others`."""
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
        sizes = f"K={speculative.num_draft_tokens} drafts, R={speculative.num_checks} checks"
        return f"chosen by goodput, up to {sizes}"
    draft, check = speculative.draft, speculative.check
    ends = {"draft": draft.layer, "check": check and check.layer, "verify": num_layers}
    tiers = [(name, end) for name, end in ends.items() if end is not None]
    starts = [0] + [end for _, end in tiers]
    stages = " → ".join(f"{name} [{start}, {end})" for start, (name, end) in zip(starts, tiers, strict=False))
    if (ngram := draft.lookup) is not None:
        copies = ngram.match_confidence
        limit = f", copies p>={copies:g}" if copies is not None else ""
        store = f", store of {ngram.datastore_tokens}" if ngram.datastore_tokens else ""
        guess = ngram.guess_confidence
        of = "" if ngram.guess_path is None else f" of {ngram.guess_path}"
        store += f", guesses p>={guess:g}{of}" if guess is not None else ""
        store += f" learnt from the latest {ngram.learn_tokens} tokens" if ngram.learn_tokens else ""
        joint = "or" if draft.traits.is_mixed else "→"
        stages = f"n-grams of {ngram.max_size} to {ngram.min_size}{limit}{store} {joint} {stages}"
    elif draft.traits.has_model:
        stages = f"draft by {draft.path} → {stages}"
    checks = f", R={speculative.num_checks} checks" if check is not None else ""
    exits = f" ({draft.num_exit_tokens} by the exit)" if draft.num_exit_tokens is not None else ""
    branches = f", B={speculative.num_branches} branches" if speculative.num_branches > 1 else ""
    sure = {
        "draft": speculative.draft_confidence,
        "check": check and check.confidence,
        "another cycle": check and check.continue_confidence,
    }
    confidence = "".join(f", {tier} p>={value:g}" for tier, value in sure.items() if value is not None)
    return f"{stages}, K={speculative.num_draft_tokens} drafts{exits}{branches}{checks}{confidence}"
