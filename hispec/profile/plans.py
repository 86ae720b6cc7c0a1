"""Every plan that a profile looks at: what drafts, in how many tiers, and how much of it in a round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..config import CheckConfig, DraftConfig, NgramConfig, SpeculativeConfig
from ..errors import ConfigError
from .candidates import Candidates
from .options import ProfileOptions

# Tried with every plan, and then with the best ones of each kind (`refined`).
_COARSE_DRAFT, _COARSE_CHECK = (None, 0.6), (None, 0.5)
_FINE = (None, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_BRANCHES, _MOST_BRANCH_DRAFTS = (2, 3, 4, 8), 3
_NGRAMS = (
    NgramConfig(),
    NgramConfig(max_size=3, min_size=2, tokens_per_match=None),
    NgramConfig(max_size=4, min_size=2, tokens_per_match=None),
    NgramConfig(max_size=3, min_size=1, tokens_per_match=None),
)
_LOOKED_UP = (2, 3, 4, 6, 8, 12, 16)  # drafts of prompt lookup: what is found costs nothing
_MOST_EXIT_TOKENS = 3  # of an exit, where prompt lookup finds nothing
_MOST_CHECKS_OF_NGRAM, _MOST_CHECKS_OF_HYBRID = 4, 3


def all_plans(
    options: ProfileOptions, candidates: Candidates, own: SpeculativeConfig | None
) -> list[SpeculativeConfig]:
    """Each once. `own`: the job's plan, whose n-gram sizes and draft model are looked at too.

    Raises ConfigError if `options` asks for a draft model and the job names none, or if nothing at all is
    left.
    """
    space = _Space(options, candidates)
    ngrams = ngram_sizes(own)
    model = own.draft if own is not None and own.draft.traits.has_model else None
    makers: dict[str, Callable[[], Iterator[SpeculativeConfig]]] = {
        "exit": space.exits,
        "tree": space.trees,
        "ngram": partial(space.ngrams, ngrams),
        "hybrid": partial(space.hybrids, ngrams),
        "model": partial(space.models, model),
    }
    if model is None and options.drafters is not None and "model" in options.drafters:
        raise ConfigError(
            "drafters: 'model' needs a draft model; name it in the job: speculative.draft.kind=model,"
            " speculative.draft.path=..."
        )
    found = [
        plan
        for name, make in makers.items()
        if options.drafters is None or name in options.drafters
        for plan in make()
    ]
    if not found:
        raise ConfigError(
            f"drafters: no plan of {', '.join(options.drafters or makers)} fits into"
            f" max_window={options.max_window}; raise it, or add drafters"
        )
    return list(dict.fromkeys(found))


def refined(plan: SpeculativeConfig) -> Iterator[SpeculativeConfig]:
    """The plan with every other confidence of its drafts, of its check, and of both."""
    if plan.num_branches > 1:
        return
    of_draft = _FINE if plan.draft.traits.computes else (None,)
    of_check = (None,) if plan.check is None else _FINE
    for confidence in of_draft:
        for check_confidence in of_check:
            check = (
                None if plan.check is None else plan.check.model_copy(update={"confidence": check_confidence})
            )
            yield plan.model_copy(update={"draft_confidence": confidence, "check": check})


def ngram_sizes(own: SpeculativeConfig | None) -> list[NgramConfig]:
    """What prompt lookup is tried with; the job's own is among it."""
    named = None if own is None else own.draft.lookup
    return list(dict.fromkeys([*(() if named is None else (named,)), *_NGRAMS]))


def drafter_of(plan: SpeculativeConfig) -> str:
    """exit, adapter, tree, ngram, hybrid or model."""
    return "tree" if plan.num_branches > 1 else plan.draft.kind


def kind_of(plan: SpeculativeConfig) -> str:
    """Such as `hybrid_three_tier`: plans of one kind are compared with each other."""
    return f"{drafter_of(plan)}_{'two' if plan.check is None else 'three'}_tier"


def short_text(plan: SpeculativeConfig | None) -> str:
    """A plan for a column of a table: layers first, then sizes."""
    if plan is None:
        return "plain"
    draft, sizes = plan.draft, plan.draft.lookup
    parts = [drafter_of(plan)]
    if sizes is not None:
        parts.append(
            f"{sizes.max_size}-{sizes.min_size}"
            + (f"×{sizes.tokens_per_match}" if sizes.tokens_per_match is not None else "")
        )
        parts += [f"store={sizes.datastore_tokens}"] if sizes.datastore_tokens else []
    for name, value in (
        ("D", draft.layer),
        ("C", plan.check.layer if plan.check else None),
        ("K", plan.num_draft_tokens),
    ):
        parts += [f"{name}={value}"] if value is not None else []
    parts += [f"exit={draft.num_exit_tokens}"] if draft.num_exit_tokens is not None else []
    parts += [f"B={plan.num_branches}"] if plan.num_branches > 1 else []
    parts += [f"R={plan.num_checks}"] if plan.check is not None else []
    for name, confidence in (
        ("draft", plan.draft_confidence),
        ("check", plan.check.confidence if plan.check else None),
    ):
        parts += [f"{name}≥{confidence:g}"] if confidence is not None else []
    return " ".join(parts)


@dataclass(frozen=True)
class Reach:
    """Positions of a row that one pass computes at most, over a set of plans; 0 = there is no such pass.

    level      of one level of a tree of drafts
    fill       of a draft pass whose logits nobody asks for
    check      of a check that resumes from a draft exit; `check_all` of one that begins at the embedding
    verify     likewise, and `verify_all`
    lookup     proposals of prompt lookup
    """

    level: int = 0
    fill: int = 0
    check: int = 0
    check_all: int = 0
    verify: int = 0
    verify_all: int = 0
    lookup: int = 0

    @classmethod
    def of(cls, plans: Iterable[SpeculativeConfig]) -> Reach:
        most = dict.fromkeys(cls.__dataclass_fields__, 0)
        for plan in plans:
            nodes = plan.num_branches * plan.num_draft_tokens + 1
            suffix = "" if plan.draft.layer is not None else "_all"
            reached = {f"verify{suffix}": nodes * (plan.num_checks if plan.check else 1)}
            if plan.check is not None:
                reached[f"check{suffix}"] = nodes
            if plan.draft.layer is not None:
                reached["level"] = plan.num_branches
                reached["fill"] = nodes if plan.draft.traits.is_mixed else plan.num_branches
            if plan.draft.traits.looks_up:
                reached["lookup"] = plan.num_draft_tokens
            for name, size in reached.items():
                most[name] = max(most[name], size)
        return cls(**most)


class _Space:
    """The plans of each kind of drafter."""

    def __init__(self, options: ProfileOptions, candidates: Candidates) -> None:
        self._options, self._candidates = options, candidates

    def exits(self) -> Iterator[SpeculativeConfig]:
        for layer in self._candidates.layers:
            draft = self._candidates.draft(layer)
            for num_drafts in range(1, self._options.max_drafts + 1):
                yield from self._tiers(draft, num_drafts, self._options.max_checks)

    def trees(self) -> Iterator[SpeculativeConfig]:
        for layer in self._candidates.layers:
            draft = self._candidates.draft(layer)
            for num_branches in _BRANCHES:
                for num_drafts in range(1, _MOST_BRANCH_DRAFTS + 1):
                    yield from self._tiers(draft, num_drafts, 1, num_branches)

    def ngrams(self, sizes: Iterable[NgramConfig]) -> Iterator[SpeculativeConfig]:
        for ngram in sizes:
            for num_drafts in _LOOKED_UP:
                yield from self._tiers(
                    DraftConfig(kind="ngram", ngram=ngram),
                    num_drafts,
                    min(self._options.max_checks, _MOST_CHECKS_OF_NGRAM),
                )

    def hybrids(self, sizes: Iterable[NgramConfig]) -> Iterator[SpeculativeConfig]:
        for ngram in sizes:
            for layer in self._candidates.layers:
                for num_exit_tokens in range(1, _MOST_EXIT_TOKENS + 1):
                    draft = self._candidates.hybrid(layer, ngram, num_exit_tokens)
                    for num_drafts in _LOOKED_UP:
                        if num_drafts >= num_exit_tokens:
                            yield from self._tiers(
                                draft, num_drafts, min(self._options.max_checks, _MOST_CHECKS_OF_HYBRID)
                            )

    def models(self, draft: DraftConfig | None) -> Iterator[SpeculativeConfig]:
        for num_drafts in range(1, self._options.max_drafts + 1) if draft is not None else ():
            assert draft is not None
            yield from self._tiers(draft, num_drafts, self._options.max_checks)

    def _tiers(
        self, draft: DraftConfig, num_drafts: int, max_checks: int, num_branches: int = 1
    ) -> Iterator[SpeculativeConfig]:
        """The two-tier plans of these drafts, and the three-tier ones; none if a cycle alone exceeds the
        window."""
        num_nodes = num_branches * num_drafts + 1
        if num_nodes > self._options.max_window:
            return
        confidences = _COARSE_DRAFT if draft.traits.computes and num_branches == 1 else (None,)
        for confidence in confidences:
            shape: dict[str, Any] = {
                "draft": draft,
                "num_draft_tokens": num_drafts,
                "num_branches": num_branches,
                "draft_confidence": confidence,
            }
            yield SpeculativeConfig(**shape, num_checks=1)
            for check in self._checks(draft.layer or 1, (None,) if num_branches > 1 else _COARSE_CHECK):
                for num_checks in range(1, min(max_checks, self._options.max_window // num_nodes) + 1):
                    yield SpeculativeConfig(**shape, check=check, num_checks=num_checks)

    def _checks(self, above: int, confidences: Iterable[float | None]) -> Iterator[CheckConfig]:
        for layer in self._candidates.layers:
            if layer > above:
                yield from (self._candidates.check(layer, confidence) for confidence in confidences)
