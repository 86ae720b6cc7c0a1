"""What exits say along the target's own answers: shares by hand, and the pass against the model itself."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ee_models.decoder import Decoder
from ee_models.exit_files import ExitInfo
from ee_models.loader import open_checkpoint
from hispec.profile.recording import NOTHING, Answer, Recording, flat, record
from tests.adapters import TINY_MLP, loaded, make_exits, whole_trunk
from tests.support import make_engine, random_prompts, run


def by_hand() -> Recording:
    """Two answers; exit 1 is wrong at places 2 of the first and 0 of the second, exit 2 at place 3 of the first."""
    answers = [Answer([9], [1, 2, 3, 4, 5], 5, "chat"), Answer([9, 9], [6, 7], 8, "maths")]
    said = {1: flat([[1, 2, 0, 4, 5], [0, 7]]), 2: flat([[1, 2, 3, 0, 5], [6, 7]])}
    return Recording(answers, said, said)


def test_runs_of_right_tokens_end_at_a_wrong_one_and_with_the_answer() -> None:
    recording = by_hand()
    assert recording.right(recording.said[1]).tolist() == [2, 1, 0, 2, 1, 0, 0, 1, 0]
    assert recording.same(recording.said[1], recording.said[2]).tolist() == [2, 1, 0, 0, 1, 0, 0, 1, 0]
    assert recording.same(recording.truth, recording.truth).tolist() == [5, 4, 3, 2, 1, 0, 2, 1, 0]


def test_agreement_is_a_share_of_places_in_all_and_by_task() -> None:
    recording = by_hand()
    assert recording.tasks() == ["chat", "maths"]
    assert [int(recording.places(task).sum()) for task in (None, "chat", "maths")] == [7, 5, 2]
    assert recording.agreement(recording.said[1]) == pytest.approx(5 / 7)
    assert recording.agreement(recording.said[1], "chat") == pytest.approx(4 / 5)
    assert recording.agreement(recording.said[1], "maths") == pytest.approx(1 / 2)
    assert recording.truth.tolist() == [1, 2, 3, 4, 5, NOTHING, 6, 7, NOTHING]


def test_first_drafts_are_right_as_often_as_counted_by_hand() -> None:
    # Right at 1 1 0 1 1 | 0 1. One draft: 5 of 7 places. Two: from 0 and 3, of the 5 places that have a second. Three: none of 3.
    assert by_hand().first_right(by_hand().said[1], 6) == [pytest.approx(5 / 7), pytest.approx(2 / 5), 0.0, 0.0, 0.0, None]


def answers_of(decoder: Decoder, lengths: list[int], num_tokens: int = 20) -> list[Answer]:
    from hispec.sampling_params import SamplingParams

    prompts = random_prompts(lengths)
    outputs = run(make_engine(decoder), prompts, SamplingParams(temperature=0.0, max_tokens=num_tokens))
    return [Answer(prompt, output, num_tokens, "all") for prompt, output in zip(prompts, outputs, strict=True)]


def test_the_full_model_says_its_own_answers(tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hispec.profile.recording._PROMPT_TOKENS_PER_PASS", 7)
    monkeypatch.setattr("hispec.profile.recording._ANSWER_TOKENS_PER_PASS", 6)
    answers = answers_of(tiny_decoder, [1, 2, 8, 17, 40])
    recording = record(tiny_decoder, [3, 8], [], answers)
    assert np.array_equal(recording.own[9], recording.truth)
    shares = [recording.agreement(recording.own[layer]) for layer in range(1, 10)]
    assert shares[0] < 0.2 < shares[7] < 1.0, "exits that are always right, or never, would prove nothing here"
    assert all(np.array_equal(recording.said[layer], recording.own[layer]) for layer in (3, 8)) and set(recording.said) == {3, 8}


def test_trained_exits_are_read_with_their_own_kv(tiny_path: Path, tiny_decoder: Decoder, tmp_path: Path) -> None:
    """Exits that are copies of the next layers say what the model's own head says above those; the last is all the rest."""
    checkpoint = open_checkpoint(tiny_path)
    infos = [ExitInfo(layer=2, num_blocks=4, intermediate_size=TINY_MLP), whole_trunk(7)]
    exits = loaded(make_exits(tmp_path, checkpoint, infos, from_trunk=True), tiny_decoder, checkpoint)
    recording = record(tiny_decoder, [2, 7], exits[::-1], answers_of(tiny_decoder, [3, 30]))
    assert np.array_equal(recording.said[2], recording.own[6]) and not np.array_equal(recording.own[2], recording.own[6])
    assert np.array_equal(recording.said[7], recording.truth) and not np.array_equal(recording.own[7], recording.truth)
