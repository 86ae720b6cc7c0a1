"""Drafters from outside, whatever they do: requests go on, and no other notices."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ee_models.decoder import Decoder
from hispec import SamplingParams
from hispec.decoding import drafter as drafter_module
from hispec.decoding import row_steps_numba
from hispec.decoding.acceptance import RejectionJudge
from hispec.decoding.batch import RoundBatch
from hispec.decoding.draft_tree import DraftTree
from hispec.decoding.drafter import Draft
from hispec.decoding.row_steps import zeros
from hispec.engine import Engine
from tests.helpers.drafters import ALL, FixedDrafter, drafter_engine, with_drafter
from tests.helpers.support import make_engine, random_prompts, run
from tests.helpers.tiny import EOS_ID, TINY_VOCAB

TWO_TIER, THREE_TIER, MANY_CHECKS = "ngram", "ngram check", "ngram checks"
PROMPTS = random_prompts((1, 2, 7, 8, 9, 31, 33, 70))


def misbehaving(engine: Engine, tokens: Any) -> FixedDrafter:
    drafter = FixedDrafter(tokens)
    with_drafter(engine, drafter)
    return drafter


@pytest.mark.parametrize("name", [TWO_TIER, THREE_TIER, MANY_CHECKS])
@pytest.mark.parametrize(
    "what", ["nothing", "garbage", "out of range", "the end and more", "more than fits", "now and then"]
)
def test_whatever_a_drafter_proposes_the_output_is_plain_decodings(
    tiny_decoder: Decoder, expected: list[list[int]], name: str, what: str
) -> None:
    generator = random.Random(0)

    def tokens(row: int, column: int) -> list[int]:
        return {
            "nothing": [],
            "garbage": [generator.randrange(TINY_VOCAB) for _ in range(3)],
            "out of range": [-5, TINY_VOCAB, 2**40],
            "the end and more": [EOS_ID, generator.randrange(TINY_VOCAB), EOS_ID],
            "more than fits": [generator.randrange(TINY_VOCAB) for _ in range(200)],
            "now and then": [generator.randrange(TINY_VOCAB)] * (row % 2),
        }[what]

    engine = drafter_engine(tiny_decoder, ALL[name], eos=(EOS_ID,))
    drafter = misbehaving(engine, tokens)
    assert run(engine, PROMPTS) == run(make_engine(tiny_decoder, eos=(EOS_ID,)), PROMPTS)
    stats = engine.stats()
    assert drafter.num_asked > 0 and stats["drafter_failures"] == 0
    assert (stats["drafted"] == 0) == (what == "nothing")
    if what == "nothing" and name != MANY_CHECKS:
        assert stats["layer_passes"] - stats["prefill_layer_passes"] == 9 * stats["steps"], (
            "a round without drafts costs more than a plain one"
        )


@pytest.mark.parametrize("name", [TWO_TIER, THREE_TIER])
def test_a_right_drafter_is_followed_to_the_last_token(
    tiny_decoder: Decoder, expected: list[list[int]], name: str
) -> None:
    """It proposes what plain decoding would say, beyond the end of the request too; nothing beyond it comes
    out."""
    engine = drafter_engine(
        tiny_decoder, ALL[name] | {"check": None} if name == TWO_TIER else ALL[name], max_num_seqs=1
    )
    longer = run(make_engine(tiny_decoder), [PROMPTS[4]], SamplingParams(temperature=0.0, max_tokens=60))[0]
    done = [0]

    def tokens(row: int, column: int) -> list[int]:
        return longer[done[0] + column :][:40]

    misbehaving(engine, tokens)
    engine.add_request(PROMPTS[4], SamplingParams(temperature=0.0, max_tokens=24))
    output: list[int] = []
    while engine.has_unfinished():
        for delta in engine.step():
            output += delta.token_ids
            done[0] = len(output)
    assert output == longer[:24] == expected[4]
    if name == TWO_TIER:
        assert engine.stats()["accepted"] == engine.stats()["tentative"] and engine.stats()["rounds"] == 4


class Raises(FixedDrafter):
    """Fails at its third call."""

    def propose(self, batch: RoundBatch, first: torch.Tensor, tree: DraftTree) -> Draft:
        draft = super().propose(batch, first, tree)
        if self.num_asked == 3:
            raise OSError("the drafter's disk is full")
        return draft


class Asserts(FixedDrafter):
    """Finds itself in a state that it has thought impossible, at its third call."""

    def propose(self, batch: RoundBatch, first: torch.Tensor, tree: DraftTree) -> Draft:
        draft = super().propose(batch, first, tree)
        assert self.num_asked != 3, "OSError: the drafter's disk is full"
        return draft


@pytest.mark.parametrize("kind", [Raises, Asserts])
@pytest.mark.parametrize("name", [TWO_TIER, THREE_TIER, MANY_CHECKS])
def test_a_drafter_that_raises_leaves_plain_decoding(
    tiny_decoder: Decoder,
    expected: list[list[int]],
    name: str,
    kind: type[FixedDrafter],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = tuple(set(drafter_module.OUR_PACKAGES) - {"tests"})  # whose drafters are from outside here
    monkeypatch.setattr(drafter_module, "OUR_PACKAGES", ours)
    engine = drafter_engine(tiny_decoder, ALL[name], max_num_seqs=3)
    drafter = kind(lambda row, column: [1, 2])
    with_drafter(engine, drafter)
    with caplog.at_level(logging.WARNING, "hispec"):
        assert run(engine, PROMPTS) == expected
    (warning,) = caplog.messages
    assert (
        "OSError: the drafter's disk is full" in warning
        and "request-0" in warning
        and "plain decoding" in warning
    )
    assert engine.stats()["drafter_failures"] == 1
    assert drafter.num_asked > 10, "requests that came later are not drafted for"


class Counts(FixedDrafter):
    """Counts columns in the tensor that it is given."""

    def propose(self, batch: RoundBatch, first: torch.Tensor, tree: DraftTree) -> Draft:
        first += 1
        return super().propose(batch, first - 1, tree)


class Strided(FixedDrafter):
    """Its numbers of drafts lie in a column of others."""

    def propose(self, batch: RoundBatch, first: torch.Tensor, tree: DraftTree) -> Draft:
        draft = super().propose(batch, first, tree)
        assert isinstance(draft.source, torch.Tensor)
        counts, source = (
            torch.stack((each, each), 1)[:, 0] for each in (draft.proposals.counts, draft.source)
        )
        return Draft(replace(draft.proposals, counts=counts), source)


@pytest.mark.parametrize("name", [TWO_TIER, THREE_TIER, MANY_CHECKS])
@pytest.mark.parametrize("kind", [Counts, Strided])
def test_what_a_drafter_does_with_its_tensors_changes_no_others(
    tiny_decoder: Decoder, expected: list[list[int]], name: str, kind: type[FixedDrafter]
) -> None:
    engine = drafter_engine(tiny_decoder, ALL[name])
    with_drafter(engine, kind(lambda row, column: [1, 2]))
    known = list(row_steps_numba._take_drafts.signatures)
    assert run(engine, PROMPTS) == expected
    assert engine.stats()["drafted"] > 0 and engine.stats()["drafter_failures"] == 0
    assert not zeros(len(PROMPTS), tiny_decoder.device).any(), "other rounds begin with these"
    new = [given for given in row_steps_numba._take_drafts.signatures if given not in known]
    assert not any("'A'" in str(given) for given in new), "compiled in the middle of an answer"


class Foreign(FixedDrafter):
    """From outside: calls what is ours as it must not be called."""

    __module__ = "someone.elses"

    def propose(self, batch: RoundBatch, first: torch.Tensor, tree: DraftTree) -> Draft:
        choose: Any = RejectionJudge.choose
        choose(None, None, batch, None, num=2)
        return super().propose(batch, first, tree)


def test_an_invariant_of_ours_that_a_drafter_from_outside_breaks_is_its_own_failure(
    tiny_decoder: Decoder, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    engine = drafter_engine(tiny_decoder, ALL[THREE_TIER])
    with_drafter(engine, Foreign(lambda row, column: []))
    with caplog.at_level(logging.WARNING, "hispec"):
        assert run(engine, PROMPTS) == expected
    assert "drafts by rank are not drawn" in caplog.text and engine.stats()["drafter_failures"] > 0


@pytest.mark.parametrize("name", [TWO_TIER, THREE_TIER])
@pytest.mark.parametrize("tokens", [[-5, TINY_VOCAB, 2**40], [7] * 200])
def test_the_rejection_test_takes_drafts_as_they_are_cut(
    tiny_decoder: Decoder, name: str, tokens: list[int]
) -> None:
    engine = drafter_engine(tiny_decoder, {**ALL[name], "acceptance": "rejection"})
    drafter = FixedDrafter(lambda row, column: tokens)
    with_drafter(engine, drafter)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=20)
    outputs = run(engine, PROMPTS, params)
    assert all(len(output) == 20 for output in outputs)
    assert drafter.num_asked > 0 and engine.stats()["drafter_failures"] == 0


class Misshapes(FixedDrafter):
    """Gives numbers of drafts for fewer rows than there are, or of another kind."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(lambda row, column: [1, 2])
        self._change = change

    def propose(self, batch: RoundBatch, first: torch.Tensor, tree: DraftTree) -> Draft:
        draft = super().propose(batch, first, tree)
        return replace(draft, proposals=replace(draft.proposals, counts=self._change(draft.proposals.counts)))


@pytest.mark.parametrize("name", [TWO_TIER, THREE_TIER])
@pytest.mark.parametrize("change", [lambda counts: counts[1:], lambda counts: counts.float()])
def test_a_drafter_whose_numbers_have_another_shape_leaves_plain_decoding(
    tiny_decoder: Decoder,
    expected: list[list[int]],
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = drafter_engine(tiny_decoder, ALL[name], max_num_seqs=3)
    with_drafter(engine, Misshapes(change))
    with caplog.at_level(logging.WARNING, "hispec"):
        assert run(engine, PROMPTS) == expected
    assert "counts of its drafts are" in caplog.messages[0] and "[3] torch.int64" in caplog.messages[0]
    assert engine.stats()["drafter_failures"] > 0


def test_opted_out_rows_are_not_drafted_for(tiny_decoder: Decoder, expected: list[list[int]]) -> None:
    engine = drafter_engine(tiny_decoder, ALL["ngram"])
    drafter = misbehaving(engine, lambda row, column: [1])
    assert run(engine, PROMPTS, SamplingParams(temperature=0.0, max_tokens=24, speculative=False)) == expected
    assert drafter.num_asked == 0
