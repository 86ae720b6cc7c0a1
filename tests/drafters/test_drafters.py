"""Drafters that misbehave, and draft models that do not fit: requests go on, settings are refused in
words."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ee_models.decoder import Decoder
from hispec import LLM, SamplingParams, SpeculativeConfig
from hispec.config import NgramConfig, Plan
from hispec.drafters.ngram import NgramDrafter
from hispec.errors import ConfigError, HiSpecError, build
from tests.helpers.drafters import ALL, draft_decoder, drafter_engine
from tests.helpers.interrupts import Interrupts
from tests.helpers.support import random_prompts, run
from tests.helpers.tiny import tiny_checkpoint

PROMPTS = random_prompts((1, 2, 7, 8, 9, 31, 33, 70))
SMALL: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 128, "num_kv_blocks": 64}


@pytest.mark.parametrize("where", ["follow", "prefill", "finish", "move"])
def test_a_drafter_may_fail_anywhere(
    tiny_decoder: Decoder, expected: list[list[int]], where: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = drafter_engine(tiny_decoder, ALL["model tree"], tiny_decoder, max_num_seqs=3)

    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    assert engine._runtime.drafter is not None
    setattr(engine._runtime.drafter, where, fail)
    with caplog.at_level(logging.WARNING, "hispec"):
        assert run(engine, PROMPTS) == expected  # which checks that nothing is lost or leaked
    assert (
        engine.stats()["drafter_failures"] > 0
        and "MemoryError: no room" in caplog.messages[0]
        and "request-" in caplog.messages[0]
    )
    assert len(set(caplog.messages)) == len(caplog.messages), "a request failed twice"


@pytest.mark.parametrize("where", ["propose", "prefill"])
def test_blocks_of_requests_whose_drafter_failed_are_not_reused(
    tiny_decoder: Decoder, expected: list[list[int]], where: str
) -> None:
    """They lack the draft model's KV: what reuses a prefix must still be drafted for rightly."""
    engine = drafter_engine(tiny_decoder, ALL["model"], tiny_decoder)
    drafter = engine._runtime.drafter
    assert drafter is not None
    right, calls = getattr(drafter, where), []

    def fail_first(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("once")
        return right(*arguments)

    setattr(drafter, where, fail_first)
    assert run(engine, PROMPTS) == expected
    engine.reset_stats()
    longer = [prompt + output for prompt, output in zip(PROMPTS, expected, strict=True)]
    run(engine, longer)
    stats = engine.stats()
    histogram = stats["accept_length_histogram"]
    assert sum(histogram[:4]) <= len(PROMPTS), (
        "the draft model, which is the target, was wrong: its KV had a hole"
    )


def test_what_a_drafter_sees_is_what_the_request_is(tiny_decoder: Decoder) -> None:
    """Rows move when requests leave, and are taken by others: the index follows."""
    drafter = NgramDrafter(
        NgramConfig(max_size=2, min_size=1, match_confidence=None), 2, 32, torch.device("cpu")
    )
    drafter.follow([(0, [1, 2, 3, 1]), (1, [5, 6, 5])])
    assert drafter._lookup.length(int(drafter._index_rows[1])) == 3
    drafter.follow([(1, [5, 6, 5, 6])])
    assert drafter._lookup.length(int(drafter._index_rows[0])) == 4
    drafter.follow([(2, [7]), (1, [5, 6, 5, 6, 9])])
    assert [drafter._lookup.length(int(row)) for row in drafter._index_rows] == [1, 5]
    drafter.follow([(1, [5, 6, 5, 6, 9]), (2, [7])])
    assert [drafter._lookup.length(int(row)) for row in drafter._index_rows] == [5, 1]
    assert drafter.num_bytes > 0


def test_rows_that_are_taken_over_while_rounds_run_ahead_have_texts_of_their_own() -> None:
    """B moves to A's row, D comes into that which `follow` had for B, and E into C's: the host has
    noted none of them since."""
    config = NgramConfig(max_size=2, min_size=1, match_confidence=None)
    drafter = NgramDrafter(config, 3, 32, torch.device("cpu"))
    a, b, c, d, e = (0, [1, 2]), (1, [3, 4, 5]), (2, [6]), (3, [7, 8, 9, 7]), (4, [2] * 5)
    for joins in ([{0: b}, {1: d}], [{0: b, 1: d}], [{1: d, 0: b}]):
        drafter.follow([a, b, c])
        for rows in (*joins, {2: e}):
            drafter.join(rows)
        index_rows = drafter._index_rows.tolist()
        assert sorted(index_rows) == [0, 1, 2], "two share one text"
        assert [drafter._lookup.length(row) for row in index_rows] == [3, 4, 5]
        drafter.follow([b, d, e])
        assert [drafter._lookup.length(int(row)) for row in drafter._index_rows] == [3, 4, 5]


def test_an_interrupt_of_a_drafter_costs_no_row_of_its_index() -> None:
    config = NgramConfig(max_size=2, min_size=1, match_confidence=None)
    drafter = NgramDrafter(config, 3, 32, torch.device("cpu"))
    interrupts, count = Interrupts("hispec/drafters/ngram.py"), -1
    for number in range(0, 1000, 3):
        count, rows = len(interrupts.lines), [(number + at, [at, 1, 2]) for at in range(3)]
        with suppress(KeyboardInterrupt), interrupts.armed():
            drafter.follow(rows[:2])
            drafter.join({0: rows[2], 1: rows[0]})
        drafter.follow(rows)
        assert sorted(drafter._index_rows.tolist()) == [0, 1, 2]
        if len(interrupts.lines) == count:
            break
    assert count > 20


def test_a_drafter_without_kv_that_fails_at_prompts_costs_no_prefix(
    tiny_decoder: Decoder, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody lacks what it would have computed."""
    engine = drafter_engine(tiny_decoder, ALL["ngram"])
    failed = []

    def fail(*_: Any) -> None:
        failed.append(1)
        raise RuntimeError("never")

    monkeypatch.setattr(engine._runtime.drafter, "prefill", fail)
    assert run(engine, PROMPTS) == expected and failed
    engine.reset_stats()
    assert run(engine, PROMPTS) == expected
    whole_blocks = sum((len(prompt) - 1) // 8 * 8 for prompt in PROMPTS)
    assert engine.stats()["cached_tokens"] == whole_blocks


# ---- settings ----


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"draft": {"kind": "ngram", "layer": 3}},
            "layer=3 means nothing for kind='ngram'; .*exit, adapter, hybrid",
        ),
        ({"draft": {"kind": "hybrid"}}, "kind='hybrid' needs layer"),
        ({"draft": {"kind": "model"}}, "kind='model' needs path: the model that drafts"),
        ({"draft": {"kind": "model", "path": "x", "ngram": {}}}, "ngram=.* means nothing for kind='model'"),
        (
            {"draft": {"kind": "hybrid", "layer": 3, "exit": "exit", "path": "x"}},
            "path='x' names trained exits, but exit='exit'",
        ),
        (
            {"draft": {"kind": "hybrid", "layer": 3, "num_exit_tokens": 3}},
            "num_exit_tokens=3 is more than num_draft_tokens=2",
        ),
        (
            {"draft": {"kind": "ngram", "ngram": {"max_size": 2, "min_size": 3}}},
            "min_size=3 is above max_size=2",
        ),
        (
            {"draft": {"kind": "ngram", "ngram": {"datastore_tokens": 10}}},
            "datastore_tokens=10 holds hardly one output",
        ),
        (
            {"draft": {"kind": "ngram", "ngram": {"guess_path": "folder"}}},
            "guess_path='folder' has no effect without guess_confidence",
        ),
        (
            {"draft": {"kind": "ngram", "ngram": {"learn_tokens": 100000}}},
            "learn_tokens=100000 has no effect without guess_confidence",
        ),
        (
            {"draft": {"kind": "ngram", "ngram": {"learn_tokens": 100, "guess_confidence": 0.5}}},
            "learn_tokens=100 are too few to learn from; choose 0 .* or at least 8192",
        ),
        (
            {"draft": {"kind": "ngram", "ngram": {"guess_confidence": 1.0}}},
            "guess_confidence: must be below 1, got 1.0",
        ),
        ({"draft": {"kind": "ngram", "ngram": {"max_siz": 2}}}, "max_siz: unknown setting .*max_size"),
        (
            {"draft": {"kind": "ngram"}, "draft_confidence": 0.5},
            "draft_confidence=0.5 means nothing for draft.kind='ngram'",
        ),
        (
            {"draft": {"kind": "ngram"}, "num_branches": 2},
            "num_branches=2 needs a drafter with probabilities",
        ),
        (
            {"draft": {"layer": 3}, "num_branches": 2, "acceptance": "rejection"},
            "num_branches=2 takes tokens by rank",
        ),
        ({"draft": {"layer": 3}, "num_branches": 2, "draft_confidence": 0.5}, "cannot be combined"),
        ({"draft": {"layer": 3}, "num_branches": 16, "num_draft_tokens": 5}, "more than 64 drafts per cycle"),
        (
            {"draft": {"layer": 3}, "check": {"layer": 5, "confidence": 0.5}, "acceptance": "rejection"},
            "check.confidence=0.5 keeps drafts",
        ),
        (
            {"draft": {"layer": 3}, "check": {"layer": 5, "confidence": 1.5}},
            "check.confidence: must be below 1",
        ),
        (
            {"draft": {"layer": 3}, "check": {"layer": 5, "continue_confidence": 0.4}, "num_checks": 1},
            "check.continue_confidence=0.4 decides whether another cycle follows",
        ),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(SpeculativeConfig, values, "speculative")


def test_a_window_beyond_the_longest_sequence_is_refused(tiny_decoder: Decoder) -> None:
    words = (
        r"^a round of num_draft_tokens=32, num_checks=2 and num_branches=1 takes 66 places, more than"
        r" max_model_len=40; lower one of them, or raise max_model_len"
    )
    with pytest.raises(ConfigError, match=words):
        drafter_engine(
            tiny_decoder,
            {"draft": {"layer": 3}, "check": {"layer": 6}, "num_draft_tokens": 32},
            max_model_len=40,
        )


def test_an_engine_is_given_a_draft_model_if_and_only_if_it_needs_one(tiny_decoder: Decoder) -> None:
    engine = drafter_engine(tiny_decoder, ALL["ngram"])
    with pytest.raises(ConfigError, match="needs `draft_model`"):
        engine.set_speculative(build(SpeculativeConfig, ALL["model"]))
    with pytest.raises(ConfigError, match=r"draft\.kind is not 'model'"):
        engine.set_speculative(build(SpeculativeConfig, ALL["ngram"]), draft_model=tiny_decoder)
    assert engine.plan == Plan(0, None, 5, 1), "a refused plan changed the engine"


@pytest.mark.parametrize(
    ("name", "plan", "changes", "words"),
    [
        ("ngram", Plan(3, None, 2, 1), {}, "resumes at layer 3, but draft.kind='ngram' leaves nothing there"),
        ("ngram", Plan(0, None, 2, 1, 2), {}, "has branches"),
        ("hybrid", Plan(3, None, 2, 1, 2), {}, "has branches"),
        ("tree", Plan(3, None, 2, 1, 2), {"num_branches": 1, "acceptance": "rejection"}, "has branches"),
        ("tree", Plan(3, None, 2, 1, 2), {"num_branches": 1, "draft_confidence": 0.5}, "has branches"),
    ],
    ids=str,
)
def test_a_plan_of_the_callers_that_the_drafter_cannot_serve(
    tiny_decoder: Decoder, name: str, plan: Plan, changes: dict[str, Any], words: str
) -> None:
    engine = drafter_engine(tiny_decoder, ALL["ngram"])
    with pytest.raises(ConfigError, match=words):
        engine.set_speculative(build(SpeculativeConfig, ALL[name] | changes), plan=plan)


def test_closing_gives_the_draft_models_memory_back(tiny_decoder: Decoder) -> None:
    engine = drafter_engine(tiny_decoder, ALL["model"], tiny_decoder)
    assert engine.memory()["drafter_bytes"] > 0
    engine.close()
    assert engine.memory()["drafter_bytes"] == engine.memory()["kv_bytes"] == 0


def test_a_draft_model_larger_or_shorter_than_the_target_is_refused(
    tiny_decoder: Decoder, tmp_path: Path
) -> None:
    larger = draft_decoder(tiny_checkpoint(tmp_path / "larger", num_layers=12))
    with pytest.raises(
        ConfigError, match=r"larger than the target \(.* M parameters\); choose a smaller one"
    ):
        drafter_engine(tiny_decoder, ALL["model"], larger)
    shorter = draft_decoder(tiny_checkpoint(tmp_path / "shorter", num_layers=2, max_position_embeddings=64))
    with pytest.raises(
        ConfigError, match=r"attends to 64 positions, but engine.max_model_len is 256; lower it to 64"
    ):
        drafter_engine(tiny_decoder, ALL["model"], shorter)


@pytest.fixture(scope="module")
def draft_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("draft") / "model", num_layers=2, tokenizer=True)


def test_llm_loads_a_draft_model_once(tiny_path: Path, draft_path: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12)
    with LLM(
        str(tiny_path), speculative={"draft": {"kind": "model", "path": str(draft_path)}}, **SMALL
    ) as llm:
        output = llm.generate("abcabcabc", params, use_tqdm=False)[0].outputs[0].token_ids
        assert (
            llm.stats()["drafted"] > 0
            and llm.memory()["drafter_bytes"] > 0
            and llm.memory()["draft_model_bytes"] > 0
        )
        model = llm.engine._runtime.models.draft_model
        llm.set_speculative(None)
        assert llm.generate("abcabcabc", params, use_tqdm=False)[0].outputs[0].token_ids == output
        llm.set_speculative({"draft": {"kind": "model", "path": str(draft_path)}, "num_draft_tokens": 4})
        assert llm.engine._runtime.models.draft_model is model
        assert llm.generate("abcabcabc", params, use_tqdm=False)[0].outputs[0].token_ids == output


def test_llm_refuses_draft_models_that_speak_other_tokens(
    tiny_path: Path, draft_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(words: str, path: Path, **settings: Any) -> None:
        with pytest.raises(HiSpecError if "cannot" not in words else ValueError, match=words):
            LLM(
                str(tiny_path),
                speculative={"draft": {"kind": "model", "path": str(path)}},
                **SMALL,
                **settings,
            )

    other = tiny_checkpoint(tmp_path / "other", num_layers=2, tokenizer=True)
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"<|role|>"', '"<|rule|>"'))
    config = (other / "tokenizer_config.json").read_text()
    (other / "tokenizer_config.json").write_text(config.replace("<|role|>", "<|rule|>"))
    refused(r"speculative\.draft\.path=.*vocabulary is not the target's .*<\|r[ou]le\|>", other)
    ends = tiny_checkpoint(tmp_path / "ends", num_layers=2, tokenizer=True)
    config = (ends / "tokenizer_config.json").read_text()
    (ends / "tokenizer_config.json").write_text(config.replace('"eos_token": "</s>"', '"eos_token": "<pad>"'))
    LLM(str(tiny_path), speculative={"draft": {"kind": "model", "path": str(ends)}}, **SMALL)
    assert "eos_token is '<pad>' in the draft model and '</s>' in the target" in caplog.text
    refused("has no tokenizer to compare", tiny_checkpoint(tmp_path / "mute", num_layers=2))
    refused(
        "has 300 tokens, the target 260",
        tiny_checkpoint(tmp_path / "wide", num_layers=2, vocab=300),
        skip_tokenizer_init=True,
    )
    with pytest.raises(ValueError, match=r"speculative\.draft\.path: .*nowhere"):
        LLM(
            str(tiny_path),
            speculative={"draft": {"kind": "model", "path": str(tmp_path / "nowhere")}},
            **SMALL,
        )


def test_a_row_that_got_no_text_before_an_interrupt_agrees_with_none() -> None:
    """Not even where a lookup cannot tell, as on a GPU."""
    lookup = SimpleNamespace(length=lambda row: 3, agrees=lambda *_: True)
    drafter: Any = SimpleNamespace(_known={1: 3}, _lookup=lookup)
    assert NgramDrafter._agrees(drafter, 1, 0, [5, 6, 7])
    assert not NgramDrafter._agrees(drafter, 2, 0, [5, 6, 7])
