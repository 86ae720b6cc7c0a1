"""The ways to speculate that a controller may choose from: all that the exits and models at hand allow."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..config import (
    TRAITS,
    CheckConfig,
    DraftConfig,
    DraftKind,
    GoodputConfig,
    NgramConfig,
    SpeculativeConfig,
)
from ..errors import ConfigError
from .choice import Route

CAUTIOUS = NgramConfig(match_confidence=0.6)


@dataclass(frozen=True)
class ExitTiers:
    """Makes draft and check tiers of one kind of exits.

    kind   adapter: trained ones, in the folder `path` (None = those that come with HiSpec); exit: the model's
           own head
    """

    kind: Literal["exit", "adapter"]
    path: str | None = None

    def draft(self, layer: int) -> DraftConfig:
        return DraftConfig(kind=self.kind, path=self.path, layer=layer)

    def hybrid(self, layer: int, ngram: NgramConfig | None, num_exit_tokens: int | None) -> DraftConfig:
        """Prompt lookup, and the exit at `layer` where that finds nothing."""
        return DraftConfig(
            kind="hybrid",
            exit=self.kind,
            path=self.path,
            layer=layer,
            ngram=ngram,
            num_exit_tokens=num_exit_tokens,
        )

    def check(
        self, layer: int, confidence: float | None = None, continue_confidence: float | None = None
    ) -> CheckConfig:
        return CheckConfig(
            kind=self.kind,
            path=self.path,
            layer=layer,
            confidence=confidence,
            continue_confidence=continue_confidence,
        )


def candidates(speculative: SpeculativeConfig, trained: Collection[int]) -> list[SpeculativeConfig]:
    """Each drafter at each layer, without a check and with one at each layer above; K and R as in
    `speculative`, which says the most. The exits are those at layers `trained` if it names trained ones, else
    those that it names. Prompt lookup comes as `speculative` has it, and as a cautious one, for batches in
    which a wrong draft costs more. Raises ConfigError for kinds that cannot be had.
    """
    goodput, layers = speculative.goodput or GoodputConfig(), exit_layers(speculative, trained)
    there = [kind for kind in TRAITS if _is_at_hand(speculative, kind, bool(layers))]
    kinds = there if goodput.drafters is None else goodput.drafters
    if missing := sorted(set(kinds) - set(there)):
        raise ConfigError(
            f"speculative.goodput.drafters={list(kinds)}: {missing[0]!r} cannot be had here, only"
            f" {', '.join(there)}; name exits (draft.layer, check.layer or goodput.layers) or a model"
            " (draft.kind: model) to draft with"
        )
    found = [
        way
        for kind in dict.fromkeys(kinds)
        for each in _drafts(speculative, kind, layers)
        for way in _ways(speculative, each, layers)
    ]
    if "ngram" in kinds:
        found.append(_two_tier(speculative, DraftConfig(kind="ngram", ngram=CAUTIOUS)))
    return list(dict.fromkeys(found))


def exit_layers(speculative: SpeculativeConfig, trained: Collection[int]) -> list[int]:
    """Layers of the exits to choose from: those of `goodput.layers`; else the trained ones, if a tier names
    one; else those that tiers name. Raises ConfigError for a layer without a trained exit where exits are
    trained ones, and for a plan of both kinds, of which one would be left out."""
    goodput, named = speculative.goodput or GoodputConfig(), _named_layers(speculative)
    if goodput.layers is not None:
        missing = sorted(set(goodput.layers) - set(trained)) if uses_trained(speculative) else []
        if missing:
            raise ConfigError(
                f"speculative.goodput.layers={list(goodput.layers)}: no trained exit at layer {missing[0]};"
                f" there are some at {sorted(trained)}"
            )
        return sorted(goodput.layers)
    if not uses_trained(speculative):
        return named
    own_head = sorted(set(named) - set(speculative.trained_layers().values()))
    if own_head and speculative.control == "goodput":
        raise ConfigError(
            "speculative: control='goodput' takes trained exits alone, or the model's own head alone, and"
            f" tiers name both: the exit at layer {own_head[0]} is no trained one; there are some at"
            f" {sorted(trained)}"
        )
    return sorted(trained)


def uses_trained(speculative: SpeculativeConfig) -> bool:
    """Whether its exits are trained ones: as the tiers say that it names, and if it names none only in
    `goodput.layers`, they are."""
    goodput = speculative.goodput or GoodputConfig()
    return bool(speculative.trained_layers()) or (
        goodput.layers is not None and not _named_layers(speculative)
    )


def trained_path(speculative: SpeculativeConfig) -> str | None:
    """The folder of trained exits; None = those that come with HiSpec. Raises ConfigError if two are
    named."""
    paths = trained_paths(speculative)
    if len(paths) > 1:
        draft, check = speculative.draft, speculative.check
        both = f"draft.path={draft.path!r} and check.path={check.path if check else None!r}"
        raise ConfigError(
            f"speculative: {both} differ, and control='goodput' takes exits of one folder; put them into one"
        )
    return paths[0] if paths else None


def trained_paths(speculative: SpeculativeConfig | None) -> list[str | None]:
    """The folders of trained exits that the tiers name, each once; None = those that come with HiSpec."""
    tiers = () if speculative is None else (speculative.draft, speculative.check)
    return list(dict.fromkeys(tier.path for tier in tiers if tier is not None and tier.is_trained))


def route_of(way: SpeculativeConfig) -> Route:
    """The route of a candidate."""
    return Route(
        kind=way.draft.kind,
        draft_layer=way.draft.layer or 0,
        check_layer=way.check.layer if way.check else None,
        most_drafts=way.num_draft_tokens,
        most_checks=way.num_checks if way.check else 1,
        num_exit_tokens=way.draft.num_exit_tokens,
        has_confidence=way.draft_confidence is not None,
        is_gated=way.check is not None and way.check.continue_confidence is not None,
        lookup="cautious" if not way.draft.traits.computes and way.draft.ngram == CAUTIOUS else None,
    )


def _named_layers(speculative: SpeculativeConfig) -> list[int]:
    draft, check = speculative.draft, speculative.check
    return sorted({layer for layer in (draft.layer, check.layer if check else None) if layer is not None})


def _is_at_hand(speculative: SpeculativeConfig, kind: DraftKind, has_exits: bool) -> bool:
    """Whether `speculative` names what drafters of this kind need."""
    traits = TRAITS[kind]
    if not traits.has_costs:
        return False
    if traits.has_model:
        return speculative.draft.kind == kind
    if traits.in_trunk and "exit" not in traits.fields:  # it drafts by one kind of exit only
        return has_exits and traits.is_trained == uses_trained(speculative)
    return has_exits or not traits.in_trunk


def _drafts(speculative: SpeculativeConfig, kind: DraftKind, layers: Sequence[int]) -> Iterator[DraftConfig]:
    """The drafters of one kind: one for each of the layers if it drafts by an exit."""
    draft, traits, path = speculative.draft, TRAITS[kind], trained_path(speculative)
    settings = {
        "path": draft.path if traits.has_model else path,
        "exit": "adapter" if uses_trained(speculative) else "exit",
        "ngram": draft.ngram,
        "num_exit_tokens": draft.num_exit_tokens,
    }
    taken: dict[str, Any] = {name: value for name, value in settings.items() if name in traits.fields}
    for layer in layers if traits.in_trunk else (None,):
        yield DraftConfig(kind=kind, layer=layer, **taken)


def _ways(
    speculative: SpeculativeConfig, draft: DraftConfig, layers: Sequence[int]
) -> Iterator[SpeculativeConfig]:
    two_tier = _two_tier(speculative, draft)
    tiers = ExitTiers("adapter" if uses_trained(speculative) else "exit", trained_path(speculative))
    yield two_tier
    own = speculative.check
    confidences = (own.confidence, own.continue_confidence) if own else (None, None)
    for layer in layers:
        if layer > max(draft.layer or 0, 1):
            update = {"check": tiers.check(layer, *confidences), "num_checks": speculative.num_checks}
            yield two_tier.model_copy(update=update)


def _two_tier(speculative: SpeculativeConfig, draft: DraftConfig) -> SpeculativeConfig:
    confidence = speculative.draft_confidence if draft.traits.computes else None
    given = {
        "draft": draft,
        "check": None,
        "num_checks": 1,
        "control": "fixed",
        "goodput": None,
        "draft_confidence": confidence,
    }
    return speculative.model_copy(update=given)
