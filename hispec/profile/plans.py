"""Every plan that a profile predicts: its drafter, its tiers, and its sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, get_args

from ..config import CheckConfig, DraftConfig, NgramConfig, SpeculativeConfig
from ..drafters.ngram_table import NgramTable
from ..errors import ConfigError
from .candidates import Candidates
from .options import Drafters, ProfileOptions

# Tried with every plan, and then with the best ones of each kind (`refined`).
_COARSE_DRAFT, _COARSE_CHECK = (None, 0.6), (None, 0.5)
_FINE = (None, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_COARSE_GATE, _GATES = 0.4, (None, 0.4, 0.6, 0.8)  # with as many checks as there may be
_BRANCHES, _MOST_BRANCH_DRAFTS = (2, 3, 4, 8), 3
# Of copies and guesses alike. An exit that drafts where neither is sure is better than most of them.
_COARSE_LOOKUP: dict[str, tuple[float, ...]] = {"ngram": (0.2, 0.5), "hybrid": (0.5,)}
_LOOKUPS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.45, 0.6, 0.8)
_NGRAM = NgramConfig()
_UNLIMITED = NgramConfig(min_size=2, match_confidence=None)
_LOOKED_UP = (2, 3, 4, 6, 8, 12, 16)  # drafts of prompt lookup: what is found costs nothing
_MOST_EXIT_TOKENS = 3  # of an exit, where prompt lookup finds nothing
_MOST_CHECKS_OF_NGRAM, _MOST_CHECKS_OF_HYBRID = 4, 3


def all_plans(
    options: ProfileOptions, candidates: Candidates, own: SpeculativeConfig | None
) -> list[SpeculativeConfig]:
    """Every plan to predict, each once. `own`: the job's plan, whose n-gram sizes and draft model are tried
    too, and whose `graphs` all plans have.

    Raises ConfigError if `options` asks for a draft model and the job names none, or if nothing at all is
    left.
    """
    if options.drafters is not None and "model" in options.drafters and not _models(own):
        raise ConfigError(
            "drafters: 'model' needs a draft model; name it in the job: speculative.draft.kind=model,"
            " speculative.draft.path=..."
        )
    drafters = options.drafters or get_args(Drafters)
    shapes = (shape for drafter in drafters for shape in _shapes(drafter, options, candidates, own))
    found = [plan for shape in shapes for plan in _plans_of(shape, options, candidates)]
    if not found:
        raise ConfigError(
            f"drafters: no plan of {', '.join(drafters)} fits into"
            f" max_window={options.max_window}; raise it, or add drafters"
        )
    if own is not None:  # a job that turns graphs off has its reasons
        found = [plan.model_copy(update={"graphs": own.graphs}) for plan in found]
    return list(dict.fromkeys(found))


def refined(plan: SpeculativeConfig) -> Iterator[SpeculativeConfig]:
    """The plan with every combination of confidences of its drafts and its check, with those at which further
    cycles follow, and with those of what it looks up; none of a tree."""
    if plan.num_branches > 1:
        return
    of_draft = _FINE if plan.draft.traits.computes else (None,)
    of_check = (None,) if plan.check is None else _FINE
    for confidence, check_confidence in product(of_draft, of_check):
        check = plan.check and plan.check.model_copy(update={"confidence": check_confidence})
        yield plan.model_copy(update={"draft_confidence": confidence, "check": check})
    if plan.check is not None and plan.num_checks > 1:
        for gate in _GATES:
            yield plan.model_copy(update={"check": _gated(plan.check, gate)})
    for sizes in _surer_or_less(plan.draft.lookup)[1:]:
        yield plan.model_copy(update={"draft": plan.draft.model_copy(update={"ngram": sizes})})


def ngram_sizes(
    own: SpeculativeConfig | None,
    tables: Sequence[NgramTable] = (),
    confidences: Sequence[float] = _COARSE_LOOKUP["ngram"],
) -> list[NgramConfig]:
    """The n-gram sizes that prompt lookup is tried with, the job's own first: copies that are at least so
    sure, and any; and with guesses of each table that are as sure."""
    named = None if own is None else own.draft.lookup
    sizes = [_NGRAM.model_copy(update={"match_confidence": each}) for each in confidences]
    guessing = [
        each.model_copy(update={"guess_confidence": each.match_confidence, "guess_path": table.path})
        for each, table in product(sizes, tables)
    ]
    return list(dict.fromkeys([*(() if named is None else (named,)), *sizes, _UNLIMITED, *guessing]))


def drafter_of(plan: SpeculativeConfig) -> str:
    """The kind of drafter: exit, adapter, tree, ngram, hybrid or model."""
    return "tree" if plan.num_branches > 1 else plan.draft.kind


def kind_of(plan: SpeculativeConfig) -> str:
    """Drafter and number of tiers, such as `hybrid_three_tier`."""
    return f"{drafter_of(plan)}_{'two' if plan.check is None else 'three'}_tier"


def short_text(plan: SpeculativeConfig | None) -> str:
    """The plan in a few words for a column of a table: layers first, then sizes."""
    if plan is None:
        return "plain"
    draft, sizes = plan.draft, plan.draft.lookup
    parts = [drafter_of(plan)]
    if sizes is not None:
        parts.append(f"{sizes.max_size}-{sizes.min_size}")
        parts += [f"copy≥{sizes.match_confidence:g}"] if sizes.match_confidence is not None else []
        parts += [f"store={sizes.datastore_tokens}"] if sizes.datastore_tokens else []
        if sizes.guess_confidence is not None:
            parts.append(f"guess≥{sizes.guess_confidence:g}")
            parts += [f"of {Path(sizes.guess_path).name}"] if sizes.guess_path is not None else []
            parts += [f"learn={sizes.learn_tokens}"] if sizes.learn_tokens else []
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
        ("go on", plan.check.continue_confidence if plan.check else None),
    ):
        parts += [f"{name}≥{confidence:g}"] if confidence is not None else []
    return " ".join(parts)


def lookups_of(plans: Iterable[SpeculativeConfig]) -> tuple[list[NgramConfig], int]:
    """Sizes of prompt lookup that the plans use, or may be refined to, and how many tokens one of them
    proposes at most."""
    most: dict[NgramConfig, int] = {}
    for plan in plans:
        for sizes in _surer_or_less(plan.draft.lookup):
            most[sizes] = max(most.get(sizes, 0), plan.num_draft_tokens)
    return list(most), max(most.values(), default=0)


def _surer_or_less(sizes: NgramConfig | None) -> list[NgramConfig]:
    """These sizes, and the same with other confidences, one for copies and guesses; none of None."""
    if sizes is None:
        return []
    asked = [name for name in ("match_confidence", "guess_confidence") if getattr(sizes, name) is not None]
    others = (sizes.model_copy(update=dict.fromkeys(asked, confidence)) for confidence in _LOOKUPS)
    return list(dict.fromkeys([sizes, *others]))


def _models(own: SpeculativeConfig | None) -> list[DraftConfig]:
    """The draft model that the job names, if it does."""
    return [own.draft] if own is not None and own.draft.traits.has_model else []


class _Shape(NamedTuple):
    """A drafter with its K and B, and the largest R to try."""

    draft: DraftConfig
    num_drafts: int
    num_branches: int
    max_checks: int


def _shapes(
    drafter: Drafters, options: ProfileOptions, candidates: Candidates, own: SpeculativeConfig | None
) -> Iterator[_Shape]:
    """All shapes of one kind of drafter, also those that do not fit into the window."""
    layers, tiers, max_checks = candidates.layers, candidates.tiers, options.max_checks
    if drafter == "tree":
        for layer, num_branches in product(layers, _BRANCHES):
            for num_drafts in range(1, _MOST_BRANCH_DRAFTS + 1):
                yield _Shape(tiers.draft(layer), num_drafts, num_branches, 1)
    elif drafter == "ngram":
        sizes = ngram_sizes(own, candidates.tables, _COARSE_LOOKUP["ngram"])
        for ngram, num_drafts in product(sizes, _LOOKED_UP):
            draft = DraftConfig(kind="ngram", ngram=ngram)
            yield _Shape(draft, num_drafts, 1, min(max_checks, _MOST_CHECKS_OF_NGRAM))
    elif drafter == "hybrid":
        sizes = ngram_sizes(own, candidates.tables, _COARSE_LOOKUP["hybrid"])
        exit_tokens = range(1, _MOST_EXIT_TOKENS + 1)
        for ngram, layer, num_exit_tokens in product(sizes, layers, exit_tokens):
            draft = tiers.hybrid(layer, ngram, num_exit_tokens)
            for num_drafts in _LOOKED_UP:
                if num_drafts >= num_exit_tokens:
                    yield _Shape(draft, num_drafts, 1, min(max_checks, _MOST_CHECKS_OF_HYBRID))
    else:
        drafts = _models(own) if drafter == "model" else [tiers.draft(layer) for layer in layers]
        for draft, num_drafts in product(drafts, range(1, options.max_drafts + 1)):
            yield _Shape(draft, num_drafts, 1, max_checks)


def _gated(check: CheckConfig, gate: float | None) -> CheckConfig:
    return check.model_copy(update={"continue_confidence": gate})


def _plans_of(shape: _Shape, options: ProfileOptions, candidates: Candidates) -> Iterator[SpeculativeConfig]:
    """The two-tier plans of this shape, and the three-tier ones, of a fixed R or gated; none if a cycle alone
    exceeds the window."""
    draft, num_drafts, num_branches, max_checks = shape
    num_nodes = num_branches * num_drafts + 1
    if num_nodes > options.max_window:
        return
    most_checks = min(options.max_checks, options.max_window // num_nodes)
    of_check = (None,) if num_branches > 1 else _COARSE_CHECK
    above = [layer for layer in candidates.layers if layer > (draft.layer or 1)]
    checks = [candidates.tiers.check(*each) for each in product(above, of_check)]
    for confidence in _COARSE_DRAFT if draft.traits.computes and num_branches == 1 else (None,):
        fields: dict[str, Any] = {
            "draft": draft,
            "num_draft_tokens": num_drafts,
            "num_branches": num_branches,
            "draft_confidence": confidence,
        }
        yield SpeculativeConfig(**fields, num_checks=1)
        for check, num_checks in product(checks, range(1, min(max_checks, most_checks) + 1)):
            yield SpeculativeConfig(**fields, check=check, num_checks=num_checks)
        for check in checks if most_checks > 1 and num_branches == 1 else ():
            yield SpeculativeConfig(**fields, check=_gated(check, _COARSE_GATE), num_checks=most_checks)
