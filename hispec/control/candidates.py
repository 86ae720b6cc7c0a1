"""The ways to speculate that a controller may choose from: all that the exits and models at hand allow."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ..config import CheckConfig, DraftConfig, DraftKind, GoodputConfig, NgramConfig, SpeculativeConfig
from ..errors import ConfigError
from .choice import Route

_CAUTIOUS = NgramConfig(max_size=4, min_size=2, tokens_per_match=1)


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

    def check(self, layer: int, confidence: float | None = None) -> CheckConfig:
        return CheckConfig(kind=self.kind, path=self.path, layer=layer, confidence=confidence)


def candidates(speculative: SpeculativeConfig, trained: Collection[int]) -> list[SpeculativeConfig]:
    """Each drafter at each layer, without a check and with one at each layer above; K and R as in
    `speculative`, which says the most. The exits are those at layers `trained` if it names trained ones, else
    those that it names. Prompt lookup comes as `speculative` has it, and as a cautious one, for batches in
    which a wrong draft costs more. Raises ConfigError for kinds that cannot be had.
    """
    goodput, draft = speculative.goodput or GoodputConfig(), speculative.draft
    layers = exit_layers(speculative, trained)
    there: list[DraftKind] = [
        "ngram",
        *((_exit_tiers(speculative).kind, "hybrid") if layers else ()),
        *(("model",) if draft.kind == "model" else ()),
    ]
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
        found.append(_two_tier(speculative, DraftConfig(kind="ngram", ngram=_CAUTIOUS)))
    return list(dict.fromkeys(found))


def exit_layers(speculative: SpeculativeConfig, trained: Collection[int]) -> list[int]:
    """Layers of the exits to choose from."""
    goodput, named = speculative.goodput or GoodputConfig(), _named_layers(speculative)
    if goodput.layers is not None:
        missing = sorted(set(goodput.layers) - set(trained)) if uses_trained(speculative) else []
        if missing:
            raise ConfigError(
                f"speculative.goodput.layers={list(goodput.layers)}: no trained exit at layer {missing[0]};"
                f" there are some at {sorted(trained)}"
            )
        return sorted(goodput.layers)
    return sorted(trained) if uses_trained(speculative) else named


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
        lookup="cautious" if way.draft.kind == "ngram" and way.draft.ngram == _CAUTIOUS else None,
    )


def _named_layers(speculative: SpeculativeConfig) -> list[int]:
    draft, check = speculative.draft, speculative.check
    return sorted({layer for layer in (draft.layer, check.layer if check else None) if layer is not None})


def _exit_tiers(speculative: SpeculativeConfig) -> ExitTiers:
    return ExitTiers("adapter" if uses_trained(speculative) else "exit", trained_path(speculative))


def _drafts(speculative: SpeculativeConfig, kind: DraftKind, layers: Sequence[int]) -> Iterator[DraftConfig]:
    draft = speculative.draft
    if kind == "ngram":
        yield DraftConfig(kind="ngram", ngram=draft.ngram)
    elif kind == "model":
        yield DraftConfig(kind="model", path=draft.path)
    else:
        tiers, ngram = _exit_tiers(speculative), draft.ngram if draft.kind in ("ngram", "hybrid") else None
        for layer in layers:
            if kind == "hybrid":
                yield tiers.hybrid(layer, ngram, draft.num_exit_tokens)
            else:
                yield tiers.draft(layer)


def _ways(
    speculative: SpeculativeConfig, draft: DraftConfig, layers: Sequence[int]
) -> Iterator[SpeculativeConfig]:
    two_tier, tiers = _two_tier(speculative, draft), _exit_tiers(speculative)
    yield two_tier
    confidence = speculative.check.confidence if speculative.check else None
    for layer in layers:
        if layer > max(draft.layer or 0, 1):
            update = {"check": tiers.check(layer, confidence), "num_checks": speculative.num_checks}
            yield two_tier.model_copy(update=update)


def _two_tier(speculative: SpeculativeConfig, draft: DraftConfig) -> SpeculativeConfig:
    confidence = None if draft.kind == "ngram" else speculative.draft_confidence
    given = {
        "draft": draft,
        "check": None,
        "num_checks": 1,
        "control": "fixed",
        "goodput": None,
        "draft_confidence": confidence,
    }
    return speculative.model_copy(update=given)
