"""The plans that are looked at: within the limits, each once, of every kind that applies."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from ee_models.decoder import Decoder
from ee_models.exits import AdapterExit
from hispec.config import DraftConfig, NgramConfig, SpeculativeConfig
from hispec.drafters.ngram_table import make_table
from hispec.errors import ConfigError, build
from hispec.profile.candidates import Candidates
from hispec.profile.options import ProfileOptions
from hispec.profile.plans import all_plans, kind_of, lookups_of, ngram_sizes, refined, short_text

BY_MODEL = SpeculativeConfig(draft=DraftConfig(kind="model", path="small"))
SMALL = {"max_drafts": 3, "max_checks": 4, "max_window": 8}


def plans_of(
    options: dict[str, Any] = SMALL, layers: tuple[int, ...] = (1, 2, 6), own: SpeculativeConfig | None = None
) -> list[SpeculativeConfig]:
    return all_plans(build(ProfileOptions, options), Candidates(list(layers), []), own)


def test_every_plan_within_the_limits_is_looked_at_once() -> None:
    plans = plans_of(own=BY_MODEL)
    assert len(plans) == len(set(plans)) and max(plan.plan(9).window for plan in plans) == 8
    drafters = ("exit", "tree", "ngram", "hybrid", "model")
    assert {kind_of(plan) for plan in plans} == {
        f"{drafter}_{tiers}_tier" for drafter in drafters for tiers in ("two", "three")
    }
    exits = [plan for plan in plans if kind_of(plan) == "exit_two_tier" and plan.draft_confidence is None]
    assert [(plan.draft.layer, plan.num_draft_tokens) for plan in exits] == [
        (layer, num) for layer in (1, 2, 6) for num in (1, 2, 3)
    ]
    checked = {
        (plan.draft.layer, plan.check.layer, plan.num_draft_tokens, plan.num_checks)
        for plan in plans
        if plan.check is not None
        and kind_of(plan) == "exit_three_tier"
        and plan.draft_confidence is plan.check.confidence is plan.check.continue_confidence is None
    }
    assert checked == {
        (d, c, k, r)
        for d, c in ((1, 2), (1, 6), (2, 6))
        for k in (1, 2, 3)
        for r in (1, 2, 3, 4)
        if r * (k + 1) <= 8
    }
    gated = {
        (plan.draft.kind, plan.num_draft_tokens, plan.num_checks)
        for plan in plans
        if plan.check is not None and plan.check.continue_confidence == 0.4
    }
    assert gated == {
        (kind, k, min(4, 8 // (k + 1)))
        for kind in ("exit", "ngram", "hybrid", "model")
        for k in ((1, 2, 3) if kind in ("exit", "model") else (2, 3))
    }
    trees = {(plan.num_branches, plan.num_draft_tokens) for plan in plans if plan.num_branches > 1}
    assert trees == {(b, k) for b in (2, 3, 4, 8) for k in (1, 2, 3) if b * k + 1 <= 8}
    looked_up = [plan for plan in plans if plan.draft.kind == "ngram"]
    assert {plan.num_draft_tokens for plan in looked_up} == {2, 3, 4, 6} and {
        plan.check.layer for plan in looked_up if plan.check
    } == {2, 6}
    assert all((plan.draft.num_exit_tokens or 0) <= min(3, plan.num_draft_tokens) for plan in plans)


def test_some_drafters_alone() -> None:
    assert {plan.draft.kind for plan in plans_of({**SMALL, "drafters": ["ngram", "hybrid"]})} == {
        "ngram",
        "hybrid",
    }
    assert "model" not in {plan.draft.kind for plan in plans_of()}
    with pytest.raises(ConfigError, match=r"drafters: 'model' needs a draft model.*speculative.draft.path"):
        plans_of({**SMALL, "drafters": ("model",)})
    with pytest.raises(ConfigError, match=r"no plan of ngram fits into max_window=2; raise it"):
        plans_of({"max_drafts": 1, "max_window": 2, "drafters": ("ngram",)})
    for bad in ([], ["exits"]):
        with pytest.raises(ConfigError, match="drafters"):
            build(ProfileOptions, {"drafters": bad})


def test_a_window_must_hold_the_drafts() -> None:
    with pytest.raises(
        ConfigError, match=r"max_drafts=8 takes 9 positions.*max_window=8; lower max_drafts to 7"
    ):
        build(ProfileOptions, {"max_window": 8})


def test_the_jobs_own_ngram_sizes_are_tried_first() -> None:
    own = NgramConfig(max_size=7, min_size=5, datastore_tokens=2048)
    assert ngram_sizes(SpeculativeConfig(draft=DraftConfig(kind="ngram", ngram=own)))[0] == own
    assert (
        ngram_sizes(SpeculativeConfig(draft=DraftConfig(kind="hybrid", layer=2)))
        == ngram_sizes(None)
        == ngram_sizes(BY_MODEL)
    )
    assert own in {
        plan.draft.ngram
        for plan in plans_of(own=SpeculativeConfig(draft=DraftConfig(kind="ngram", ngram=own)))
    }


def test_each_table_of_ngrams_is_guessed_from_as_surely_as_copies_are_made() -> None:
    tables = [make_table(path, {}, torch.device("cpu")) for path in (None, "folder")]
    sizes = [each for each in ngram_sizes(None, tables, (0.4, 0.7)) if each.guesses]
    assert {(each.guess_path, each.guess_confidence) for each in sizes} == {
        (path, confidence) for path in (None, "folder") for confidence in (0.4, 0.7)
    }
    assert len(sizes) == 4 and all(each.match_confidence == each.guess_confidence for each in sizes)
    candidates = Candidates([2, 4], [], tables=tuple(tables[:1]))
    plans = all_plans(build(ProfileOptions, {**SMALL, "drafters": ("ngram", "hybrid")}), candidates, None)
    guessing = [plan for plan in plans if plan.draft.lookup and plan.draft.lookup.guesses]
    assert {
        (plan.draft.kind, plan.draft.ngram and plan.draft.ngram.guess_confidence) for plan in guessing
    } == {
        ("ngram", 0.2),
        ("ngram", 0.5),
        ("hybrid", 0.5),
    }
    assert len({kind_of(plan) for plan in guessing}) == 4 and len(guessing) < len(plans)
    looked_up, _ = lookups_of(plans)
    for plan in guessing[:3]:
        others = [each.draft.lookup for each in refined(plan)]
        asked = {each.guess_confidence for each in others if each}
        assert {0.1, 0.2, 0.3, 0.45, 0.6, 0.8} < asked
        assert all(each.match_confidence == each.guess_confidence for each in others if each)
        assert set(others) <= set(looked_up), "or they cannot be predicted"
    assert "guess≥0.2" in short_text(guessing[0]) and "guess" not in short_text(plans[0])


def test_default_limits_leave_thousands_of_plans() -> None:
    kinds = Counter(
        kind_of(plan) for plan in all_plans(ProfileOptions(), Candidates([2, 4, 5, 8, 10, 15, 20], []), None)
    )
    assert 5_000 < sum(kinds.values()) < 50_000 and min(kinds.values()) > 20


def test_trained_exits_are_in_every_plan(tiny_decoder: Decoder) -> None:
    exits = [AdapterExit(tiny_decoder, layer, [], torch.ones(48), None, None) for layer in (2, 5)]
    for path in (None, "folder"):
        for plan in all_plans(build(ProfileOptions, SMALL), Candidates([2, 5], exits, path=path), None):
            tiers = plan.trained_layers()
            assert tiers.get("draft") == plan.draft.layer and tiers.get("check") == (
                plan.check.layer if plan.check else None
            )
            assert {
                tier.path for tier in (plan.draft, plan.check) if tier is not None and tier.is_trained
            } <= {path}
            assert SpeculativeConfig.model_validate(plan.model_dump()) == plan


def test_refined_plans_differ_in_confidence_alone() -> None:
    for name, num_computed, num_looked_up in (
        ("exit", 9, 0),
        ("tree", 0, 0),
        ("ngram", 1, 7),  # 0.2 is among what is tried anyhow
        ("hybrid", 9, 8),
    ):
        plan = plans_of({**SMALL, "drafters": (name,)})[0]
        others = list(refined(plan))
        assert len(others) == len(set(others)) == num_computed + num_looked_up
        for other in others:
            assert SpeculativeConfig.model_validate(other.model_dump()) == other
            alike = other.model_copy(update={"draft_confidence": plan.draft_confidence})
            if other.draft != plan.draft:
                assert other.draft.ngram is not None and plan.draft.ngram is not None
                alike = alike.model_copy(update={"draft": plan.draft})
                sizes = {"match_confidence": plan.draft.ngram.match_confidence}
                assert other.draft.ngram.model_copy(update=sizes) == plan.draft.ngram
            assert alike == plan
    exits = plans_of({**SMALL, "drafters": ("exit",)})
    checked = next(plan for plan in exits if plan.check is not None)
    assert len(set(refined(checked))) == 81
    gated = next(plan for plan in exits if plan.check is not None and plan.check.continue_confidence)
    gates = {plan.check and plan.check.continue_confidence for plan in refined(gated)}
    assert len(set(refined(gated))) == 81 + 3 and gates == {None, 0.4, 0.6, 0.8}


def test_plans_that_copy_without_limit_stay_so() -> None:
    sizes = NgramConfig(min_size=2, match_confidence=None)
    plan = SpeculativeConfig(draft=DraftConfig(kind="ngram", ngram=sizes))
    assert list(refined(plan)) == [plan]
    guessing = sizes.model_copy(update={"guess_confidence": 0.4})
    others = refined(plan.model_copy(update={"draft": DraftConfig(kind="ngram", ngram=guessing)}))
    found = [each.draft.ngram for each in others if each.draft.ngram]
    assert {each.match_confidence for each in found} == {None}
    assert len({each.guess_confidence for each in found}) == len(found) == 9


def test_what_is_looked_up_is_what_any_plan_looks_up() -> None:
    plans = plans_of()
    sizes, most = lookups_of(plans)
    assert most == 6 and len(sizes) == len(set(sizes)) and set(ngram_sizes(None)) < set(sizes)
    assert {plan.draft.ngram for each in plans for plan in refined(each)} - {None} <= set(sizes)
    own = NgramConfig(max_size=7, min_size=5, match_confidence=None)
    more = SpeculativeConfig(draft=DraftConfig(kind="ngram", ngram=own), num_draft_tokens=9)
    assert lookups_of([*plans, more]) == ([*sizes, own], 9)
    assert lookups_of(plan for plan in plans if kind_of(plan).startswith("exit")) == ([], 0)


def test_a_plan_in_a_column() -> None:
    draft = DraftConfig(
        kind="hybrid", exit="exit", layer=4, ngram=NgramConfig(datastore_tokens=1024), num_exit_tokens=2
    )
    plan = SpeculativeConfig(
        draft=draft,
        check={"layer": 9, "confidence": 0.4, "continue_confidence": 0.5},
        num_draft_tokens=8,
        num_checks=2,
        draft_confidence=0.25,
    )
    assert (
        short_text(plan)
        == "hybrid 4-1 copy≥0.2 store=1024 D=4 C=9 K=8 exit=2 R=2 draft≥0.25 check≥0.4 go on≥0.5"
    )
    assert (
        short_text(SpeculativeConfig(draft={"layer": 2}, num_branches=3)) == "tree D=2 K=2 B=3"
        and short_text(None) == "plain"
    )
    assert short_text(BY_MODEL) == "model K=2"
