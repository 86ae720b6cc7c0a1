"""What is said along the target's own answers: shares by hand, the pass against the model itself, and prompt
lookup against the rule."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ee_models.checkpoint.exit_files import ExitInfo
from ee_models.checkpoint.loader import open_checkpoint
from ee_models.checkpoint.ngram_file import Ngrams
from ee_models.decoder import Decoder
from hispec.config import NgramConfig
from hispec.drafters import ngram_learner
from hispec.drafters.ngram_table import make_table
from hispec.profile.record_answers import RANKS, look_up, record
from hispec.profile.recording import NOTHING, Answer, LookedUp, Recording, Said, flat, said_of
from hispec.sampling_params import SamplingParams
from tests.helpers.adapters import TINY_MLP, loaded, make_exits, whole_trunk
from tests.helpers.support import make_engine, random_prompts, run

CPU = torch.device("cpu")


def by_hand() -> Recording:
    """Two answers; exit 1 is wrong at places 2 of the first and 0 of the second, exit 2 at place 3 of the
    first."""
    answers = [Answer([9], [1, 2, 3, 4, 5], 5, "chat"), Answer([9, 9], [6, 7], 8, "maths")]
    said = {1: flat([[1, 2, 0, 4, 5], [0, 7]]), 2: flat([[1, 2, 3, 0, 5], [6, 7]])}
    return Recording(answers, {layer: said_of(tokens) for layer, tokens in said.items()}, said)


def test_runs_of_right_tokens_end_at_a_wrong_one_and_with_the_answer() -> None:
    recording = by_hand()
    one, other = (recording.exits[layer].tokens for layer in (1, 2))
    assert recording.right(one).tolist() == [2, 1, 0, 2, 1, 0, 0, 1, 0]
    assert (
        recording.kept(one, recording.exits[2]).tolist()
        == [2, 1, 0, 0, 1, 0, 0, 1, 0]
        == recording.kept(other, recording.exits[1]).tolist()
    )
    assert recording.kept(recording.truth, said_of(recording.truth)).tolist() == [5, 4, 3, 2, 1, 0, 2, 1, 0]
    assert recording.after(recording.right(one)).tolist() == [1, 0, 2, 1, 0, 0, 1, 0, 0]


def test_a_check_that_is_not_sure_keeps_what_it_would_not_say() -> None:
    recording = by_hand()
    drafts, tokens = recording.exits[1].tokens, recording.exits[2].ranked
    unsure = np.array([0.9, 0.9, 0.3, 0.9, 0.9, 0, 0.9, 0.9, 0], np.float32)
    assert recording.kept(drafts, Said(tokens, unsure), 0.5).tolist() == [3, 2, 1, 0, 1, 0, 0, 1, 0]
    assert (
        recording.kept(drafts, Said(tokens, unsure), 0.3).tolist()
        == recording.kept(drafts, recording.exits[2]).tolist()
    )
    assert recording.sure(Said(tokens, unsure), 0.5).tolist() == [2, 1, 0, 2, 1, 0, 2, 1, 0]


def test_the_rank_of_a_token_says_which_branch_begins_with_it() -> None:
    said = Said(np.array([[1, 5, 2], [3, 4, 2], [2, 1, 6], [NOTHING] * 3]), np.ones(4, np.float32))
    recording = Recording([Answer([0], [2, 3, 6], 3, "all")], {1: said}, {1: said.tokens})
    assert recording.rank(said, recording.truth, 3).tolist()[:3] == [2, 0, 2] and recording.rank(
        said, recording.truth, 2
    ).tolist()[:3] == [-1, 0, -1]


def test_proposals_are_right_and_kept_up_to_the_first_that_is_not() -> None:
    answers = [Answer([9], [1, 2, 3, 4], 4, "all"), Answer([9], [5], 1, "all")]
    check = Said(flat([[1, 2, 8, 4], [6]])[:, None], np.array([1.0, 1, 0.4, 1, 0, 1, 0], np.float32))
    recording = Recording(answers, {}, {})
    tokens = np.array([[1, 2, 8], [2, 3, 4], [8, 4, 7], [4, 5, 5], [0, 0, 0], [6, 6, 6], [0, 0, 0]])
    found = LookedUp(np.array([3, 3, 2, 3, 0, 1, 0]), tokens)
    assert recording.right_looked_up(found).tolist() == [2, 3, 0, 1, 0, 0, 0]
    # After a wrong proposal that is kept, as the third's 8, what the check says is not known: what follows is
    # kept where the answer's own token, here 4, would be.
    assert recording.kept_looked_up(found, check).tolist() == [3, 1, 2, 1, 0, 1, 0]
    assert recording.kept_looked_up(found, check, 0.5).tolist() == [3, 3, 2, 1, 0, 1, 0]
    never = Said(flat([[1, 2, 8, 9], [6]])[:, None], check.probability)
    assert recording.kept_looked_up(found, never).tolist() == [3, 1, 1, 0, 0, 1, 0]
    assert recording.found(found) == pytest.approx(5 / 5) and recording.first_right(
        recording.right_looked_up(found), 2, found.counts
    ) == [3 / 5, 2 / 3]


def test_agreement_is_a_share_of_places_in_all_and_by_task() -> None:
    recording = by_hand()
    tokens = recording.exits[1].tokens
    assert recording.tasks() == ["chat", "maths"] and [
        numbers.tolist() for numbers in recording.groups()
    ] == [[0], [1]]
    assert [int(recording.places(task).sum()) for task in (None, "chat", "maths")] == [7, 5, 2]
    assert recording.agreement(tokens) == pytest.approx(5 / 7)
    assert recording.agreement(tokens, "chat") == pytest.approx(4 / 5)
    assert recording.agreement(tokens, "maths") == pytest.approx(1 / 2)
    assert recording.truth.tolist() == [1, 2, 3, 4, 5, NOTHING, 6, 7, NOTHING]


def test_first_drafts_are_right_as_often_as_counted_by_hand() -> None:
    # Right at 1 1 0 1 1 | 0 1. One draft: 5 of 7 places. Two: from 0 and 3, of the 5 places that have a
    # second. Three: none of 3.
    recording = by_hand()
    assert recording.first_right(recording.right(recording.exits[1].tokens), 6) == [
        pytest.approx(5 / 7),
        pytest.approx(2 / 5),
        0.0,
        0.0,
        0.0,
        None,
    ]


def answers_of(decoder: Decoder, lengths: list[int], num_tokens: int = 20) -> list[Answer]:
    prompts = random_prompts(lengths)
    outputs = run(make_engine(decoder), prompts, SamplingParams(temperature=0.0, max_tokens=num_tokens))
    return [
        Answer(prompt, output, num_tokens, "all") for prompt, output in zip(prompts, outputs, strict=True)
    ]


def test_the_full_model_says_its_own_answers(tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hispec.profile.record_answers._PROMPT_TOKENS_PER_PASS", 7)
    monkeypatch.setattr("hispec.profile.record_answers._ANSWER_TOKENS_PER_PASS", 6)
    answers = answers_of(tiny_decoder, [1, 2, 8, 17, 40])
    recording = record(tiny_decoder, [3, 8], [], answers, draft_model=tiny_decoder)
    assert np.array_equal(recording.own[9], recording.truth)
    assert recording.model is not None and np.array_equal(recording.model.tokens, recording.truth), (
        "the target as its own draft model"
    )
    shares = [recording.agreement(recording.own[layer]) for layer in range(1, 10)]
    assert shares[0] < 0.2 < shares[7] < 1.0, (
        "exits that are always right, or never, would prove nothing here"
    )
    assert all(
        np.array_equal(said.tokens, recording.own[layer]) for layer, said in recording.exits.items()
    ) and set(recording.exits) == {3, 8}


def test_the_likeliest_tokens_and_their_probability_are_those_of_the_logits(tiny_decoder: Decoder) -> None:
    logits: list[torch.Tensor] = []

    class Watched:
        layer, num_kv_layers, num_bytes, vocabulary = 4, 0, 0, None

        def logits(self, hidden: torch.Tensor, *args: object) -> torch.Tensor:
            logits.append(tiny_decoder.logits(hidden, 4))
            return logits[-1]

        def fill(self, *args: object) -> None:
            pass

    answers = answers_of(tiny_decoder, [3])
    said = record(tiny_decoder, [4], [Watched()], answers).exits[4]
    assert said.ranked.shape == (21, RANKS) and said.ranked[-1].tolist() == [NOTHING] * RANKS
    assert np.array_equal(said.ranked[:-1], logits[0].topk(RANKS).indices.numpy())
    np.testing.assert_allclose(said.probability[:-1], logits[0].softmax(-1).amax(-1).numpy(), rtol=1e-5)


def test_trained_exits_are_read_with_their_own_kv(
    tiny_path: Path, tiny_decoder: Decoder, tmp_path: Path
) -> None:
    """Exits that are copies of the next layers say what the model's own head says above those; the last is
    all the rest."""
    checkpoint = open_checkpoint(tiny_path)
    infos = [ExitInfo(layer=2, num_blocks=4, intermediate_size=TINY_MLP), whole_trunk(7)]
    exits = loaded(make_exits(tmp_path, checkpoint, infos, from_trunk=True), tiny_decoder, checkpoint)
    recording = record(tiny_decoder, [2, 7], exits[::-1], answers_of(tiny_decoder, [3, 30]))
    two, seven = (recording.exits[layer].tokens for layer in (2, 7))
    assert np.array_equal(two, recording.own[6]) and not np.array_equal(recording.own[2], recording.own[6])
    assert np.array_equal(seven, recording.truth) and not np.array_equal(recording.own[7], recording.truth)


def test_prompt_lookup_proposes_what_followed() -> None:
    sizes = NgramConfig(max_size=2, min_size=2, match_confidence=None)
    answers = [Answer([1, 2, 3, 4, 1], [2, 3, 7], 3, "all"), Answer([5], [6], 1, "all")]
    found = look_up(sizes, answers, 3, 2, CPU)
    assert found.counts.tolist() == [0, 3, 3, 0, 0, 0]  # after 1 2, and after 2 3
    assert found.tokens[1].tolist() == [3, 4, 1] and found.tokens[2].tolist() == [4, 1, 2]


def test_where_nothing_matches_it_guesses() -> None:
    sizes = NgramConfig(max_size=2, min_size=2, match_confidence=None, guess_confidence=0.5, guess_path="x")
    known = {1: Ngrams(np.array([[5], [6]]), np.array([6, 8]), np.array([200, 200]))}
    tables = [make_table(path, known, CPU) for path in (None, "x")]
    answers = [Answer([1, 2, 3, 4, 1], [2, 5], 2, "all"), Answer([5], [6], 1, "all")]
    found = look_up(sizes, answers, 3, 2, CPU, tables[1:])
    assert found.counts.tolist() == [0, 3, 0, 2, 0]
    assert found.tokens[1].tolist() == [3, 4, 1] and found.tokens[3].tolist() == [6, 8, NOTHING]
    with pytest.raises(KeyError):
        look_up(sizes, answers, 3, 2, CPU, tables[:1])


def test_a_datastore_is_filled_by_answers_that_have_ended() -> None:
    """With one row in the order in which tasks are run; with two, only once both have ended."""
    sizes = NgramConfig(max_size=2, min_size=2, match_confidence=None, datastore_tokens=1024)
    answers = [Answer([9], [1, 2, 3], 3, "a"), Answer([9], [1, 2, 3], 3, "b"), Answer([9], [1, 2, 4], 3, "a")]
    assert look_up(sizes, answers, 2, 1, CPU).counts.tolist() == [0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0]
    assert look_up(sizes, answers, 2, 1, CPU).tokens[6].tolist() == [
        4,
        NOTHING,
    ], "the last answer of task a came after the first"
    assert look_up(sizes, answers, 2, 2, CPU).tokens[10].tolist() == [NOTHING, NOTHING]


def test_guesses_are_learnt_from_answers_that_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_learner, "_FIRST_TOKENS", 1)
    monkeypatch.setattr(ngram_learner, "_LEAST_COUNT", 1)
    sizes = NgramConfig(max_size=9, min_size=9, guess_confidence=0.1, learn_tokens=8192)  # nothing matches
    answers = [Answer([9], [1, 2, 3], 3, "a"), Answer([9], [1, 2, 3], 3, "a")]
    found = look_up(sizes, answers, 2, 1, CPU)
    assert found.counts.tolist() == [0, 0, 0, 0, 0, 2, 1, 0]  # what follows 9, no output has said
    assert found.tokens[5].tolist() == [2, 3] and found.tokens[6].tolist() == [3, NOTHING]
    assert look_up(sizes, answers, 2, 2, CPU).counts.tolist() == [0] * 8
