"""Each output token's tier of origin: known answers for every pattern of who agrees with whom, and sums that
hold for every drafter, plan and way of running."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ee_models.checkpoint.loader import open_checkpoint
from ee_models.decoder import Decoder
from hispec.config import EngineConfig, Plan, SpeculativeConfig
from hispec.engine import Engine
from hispec.outputs import Delta, GrowingOutput, TokenTier
from hispec.runner.round_output import RowOutcome
from hispec.sampling_params import SamplingParams
from hispec.stats import RowRound
from tests.helpers.drafters import ALL, FixedDrafter, draft_decoder, drafter_engine, with_drafter
from tests.helpers.restless import flat_latency, make_restless
from tests.helpers.scripted import ScriptedDecoder, one_hot_script, true_next
from tests.helpers.support import make_engine, random_prompts
from tests.helpers.sweeps import sweep
from tests.helpers.tiny import tiny_checkpoint

PROMPTS = random_prompts((1, 7, 9, 33), vocab=250)
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, tiers=True)


def tiers_of(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams = PARAMS
) -> list[list[TokenTier]]:
    """By prompt; one for each token of every Delta."""
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    outputs: dict[str, list[Delta]] = {request_id: [] for request_id in ids}
    while engine.has_unfinished():
        for delta in engine.step():
            assert delta.error is None and delta.tiers is not None
            assert len(delta.tiers) == len(delta.token_ids)
            outputs[delta.request_id].append(delta)
    for deltas in outputs.values():
        whole = GrowingOutput(deltas).make_delta().tiers
        assert whole == [tier for delta in deltas for tier in delta.tiers or []]
    return [GrowingOutput(outputs[name]).make_output(0, False, True).tiers or [] for name in ids]


def expected(plan: Plan, wrong_draft: set[int], wrong_check: set[int]) -> list[TokenTier]:
    """Of the first round, told from the patterns alone: until verify overrules somebody."""
    tiers: list[TokenTier] = []
    if plan.check_layer is None:
        for column in range(plan.num_draft_tokens):
            if column in wrong_draft:
                break
            tiers.append("draft")
        return [*tiers, "verify"]
    for _ in range(plan.num_checks):
        for _ in range(plan.num_draft_tokens):
            column = len(tiers)
            if (column in wrong_draft) != (column in wrong_check):
                break
            if column in wrong_check:  # the check keeps what is wrong in the same way
                return [*tiers, "verify"]
            tiers.append("draft")
        if len(tiers) in wrong_check:
            return [*tiers, "verify"]
        tiers.append("check")
    return tiers


@pytest.mark.parametrize(
    "plan", [Plan(2, None, 3, 1), Plan(2, 5, 2, 1), Plan(2, 5, 1, 2), Plan(2, 5, 2, 2)], ids=str
)
def test_every_pattern_of_agreement(plan: Plan) -> None:
    wrongs = [set(some) for size in range(3) for some in itertools.combinations(range(4), size)]
    checks = wrongs if plan.check_layer is not None else [set()]
    for wrong_draft, wrong_check in itertools.product(wrongs, checks):

        def next_token(
            exit_layer: int, position: int, token: int, wrong: Any = (wrong_draft, wrong_check)
        ) -> int:
            off = {plan.draft_layer: wrong[0], plan.check_layer: wrong[1]}.get(exit_layer, ())
            return (true_next(position, token) + (17 if position in off else 0)) % 50

        engine = make_engine(ScriptedDecoder(one_hot_script(next_token)), plan)
        engine.add_request([3], PARAMS)
        (delta,) = engine.step()
        assert delta.tiers == expected(plan, wrong_draft, wrong_check), (wrong_draft, wrong_check)


def test_looked_up_drafts_rounds_without_any_and_plain_requests() -> None:
    """Prompt lookup finds nothing in the second round: without a check tier, or where no row has a draft,
    that is a plain one. A request that opts out of drafting has the check's own token where others have
    drafts."""

    def propose(row: int, column: int) -> list[int]:
        return [true_next(0, 3), true_next(1, true_next(0, 3)), 0] if row == 0 and calls.pop() else []

    script = ScriptedDecoder(one_hot_script(lambda exit_layer, position, token: true_next(position, token)))
    for check, third in ((None, "verify"), (5, "check")):
        wanted = ["draft", "draft", third, "verify"]
        calls = [False, True]
        engine = make_engine(script, Plan(0, check, 3, 1))
        engine = with_drafter(engine, FixedDrafter(propose))
        assert tiers_of(engine, [[3]], PARAMS.model_copy(update={"max_tokens": 4})) == [wanted]
        calls = [True]
        engine = make_engine(script, Plan(0, check, 3, 1))
        engine = with_drafter(engine, FixedDrafter(propose))
        for speculative in (True, False):
            engine.add_request([3], PARAMS.model_copy(update={"speculative": speculative}))
        assert [delta.tiers for delta in engine.step()] == [wanted[:3], [third]]


def test_an_outcome_of_a_tree_or_gated_cycles_tells_by_its_cycles() -> None:
    """A cycle keeps one path of a tree, which then lies like a chain; a gate leaves cycles out."""
    of_tree = RowRound(5, 5, 4, drafted=(4, 4), kept=(2, 1), looked_up=(False, False), has_check=True)
    assert RowOutcome([1, 2, 3, 4, 5], [of_tree]).tiers() == ["draft", "draft", "check", "draft", "verify"]
    of_one_cycle = RowRound(3, 3, 3, drafted=(2,), kept=(2,), looked_up=(False,), has_check=True)
    assert RowOutcome([1, 2, 3], [of_one_cycle]).tiers() == ["draft", "draft", "check"]
    assert RowOutcome([1], [RowRound(1)]).tiers() == ["verify"]


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    path = tmp_path_factory.mktemp("draft") / "model"
    return draft_decoder(tiny_checkpoint(path, hidden=32, num_layers=2, vocab=250, seed=5, **special))


def check_sums(engine: Engine, tiers: Sequence[Sequence[TokenTier]]) -> Counter[str]:
    """Tokens of lower tiers are those that verify accepted; its own are all others that rounds committed.
    Outputs end by max_tokens, which no round exceeds, so that nothing was cut off."""
    stats = engine.stats()
    counts = Counter(itertools.chain(*tiers))
    assert counts.total() == stats["tokens"] == stats["committed"]
    assert counts.total() == sum(n * rounds for n, rounds in enumerate(stats["accept_length_histogram"]))
    assert counts["draft"] + counts["check"] == stats["accepted"]
    assert counts["draft"] <= stats["draft_kept"] and counts["check"] <= stats["cycles"]
    return counts


@sweep("name", ALL, 2)
def test_tiers_add_up_with_the_counts(tiny_decoder: Decoder, draft_model: Decoder, name: str) -> None:
    """In packed rounds, in static ones, and with requests that are preempted."""
    found = []
    for more in ({}, {"is_static": True}, {"num_kv_blocks": 12}):
        engine = drafter_engine(tiny_decoder, ALL[name], draft_model, **more)
        found.append(tiers_of(engine, PROMPTS))
        counts, stats = check_sums(engine, found[-1]), engine.stats()
        assert (stats["preemptions"] > 0) == ("num_kv_blocks" in more)
        if "check" in ALL[name]:
            assert counts["check"] > 0
        else:
            assert counts["check"] == 0 and counts["draft"] == stats["draft_kept"]
    # Where no row has a draft, a packed round may leave the check out, which a static one does not.
    drafts = [[[tier == "draft" for tier in tiers] for tiers in one] for one in found]
    assert drafts[1] == drafts[0]


def test_plans_that_change_every_round(tiny_decoder: Decoder) -> None:
    routes = {
        "control": "goodput",
        "draft": {"layer": 5},
        "check": {"layer": 8},
        "num_draft_tokens": 3,
        "num_checks": 2,
    }
    engine = Engine(
        tiny_decoder,
        EngineConfig(max_num_seqs=4, max_model_len=256, block_size=8, num_kv_blocks=256),
        SpeculativeConfig(**routes),
        latency=flat_latency((5, 8)),
    )
    make_restless(engine, seed=3)
    counts = check_sums(engine, tiers_of(engine, PROMPTS))
    assert all(counts[tier] for tier in ("draft", "check", "verify"))


def test_a_request_that_starts_over_goes_on_with_verifys_own(tiny_path: Path) -> None:
    """A drafter's nonsense in the text makes logits that are no numbers; the request starts over, plainly."""
    decoder = Decoder.load(open_checkpoint(tiny_path), torch.float32, torch.device("cpu"))
    decoder.embedding[255] = float("nan")
    engine = make_engine(decoder, Plan(0, None, 2, 1))
    asked = itertools.count()
    engine = with_drafter(engine, FixedDrafter(lambda row, column: [255, 255] if next(asked) == 2 else []))
    (tiers,) = tiers_of(engine, PROMPTS[:1])
    assert len(tiers) == 24 and set(tiers) == {"verify"}


def test_only_requests_that_ask_have_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    script = ScriptedDecoder(one_hot_script(lambda exit_layer, position, token: true_next(position, token)))
    engine = make_engine(script, Plan(2, 5, 2, 2))

    def refuse(outcome: RowOutcome) -> Any:
        raise AssertionError("derived for nobody")

    monkeypatch.setattr(RowOutcome, "tiers", refuse)
    engine.add_request([3], SamplingParams(temperature=0.0, max_tokens=12))
    while engine.has_unfinished():
        assert all(delta.tiers is None for delta in engine.step())


def test_every_tier_right_or_wrong_over_a_whole_output() -> None:
    def agreeing(exit_layer: int, position: int, token: int) -> int:
        return true_next(position, token)

    def lonely(exit_layer: int, position: int, token: int) -> int:
        return (true_next(position, token) + (exit_layer < 9) * exit_layer) % 50

    params = PARAMS.model_copy(update={"max_tokens": 9})
    for plan, script, wanted in (
        (Plan(2, 5, 2, 1), agreeing, ["draft", "draft", "check"] * 3),
        (Plan(2, None, 2, 1), agreeing, ["draft", "draft", "verify"] * 3),
        (Plan(2, 5, 2, 2), lonely, ["verify"] * 9),
        (Plan(), agreeing, ["verify"] * 9),
    ):
        assert tiers_of(make_engine(ScriptedDecoder(one_hot_script(script)), plan), [[3]], params) == [wanted]
