"""Changing between plans with trained exits: their KV, the prefix cache, and what is refused."""

from __future__ import annotations

import pytest

from ee_models.checkpoint.exit_files import ExitsFile
from ee_models.checkpoint.loader import Checkpoint
from ee_models.decoder import Decoder
from ee_models.exits import AdapterExit
from hispec.config import Plan, SpeculativeConfig
from hispec.engine import Engine
from hispec.errors import ConfigError
from tests.helpers.adapter_engines import PROMPTS, assert_always_accepted
from tests.helpers.adapters import HistoryExit, adapter_engine, loaded
from tests.helpers.scripted import ScriptedDecoder, one_hot_script, true_next
from tests.helpers.support import GREEDY, make_engine, run
from tests.laws.test_rejection import FIRST, LAYERS, VOCAB, Paths, paths  # noqa: F401 - `paths` is a fixture


def right(
    tiny_decoder: Decoder, checkpoint: Checkpoint, files: dict[str, ExitsFile], *layers: int
) -> list[AdapterExit]:
    return loaded(files["right"], tiny_decoder, checkpoint, layers)


def test_changing_plans_grows_the_kv_and_forgets(
    tiny_decoder: Decoder, checkpoint: Checkpoint, files: dict[str, ExitsFile], expected: list[list[int]]
) -> None:
    """Prompts that were seen in plain mode have no KV of the adapters: what is cached must be forgotten."""
    engine = make_engine(tiny_decoder)
    plain_bytes = engine.memory()["kv_bytes"]
    assert run(engine, PROMPTS) == expected
    exits, plan = right(tiny_decoder, checkpoint, files, 3, 6), Plan(3, 6, 2, 2)

    engine.set_speculative(None, exits=exits, plan=plan)
    assert engine.memory()["kv_bytes"] == plain_bytes * (9 + 6 + 3) // 9
    assert engine.memory()["exit_bytes"] == sum(exit_.num_bytes for exit_ in exits) > 0
    engine.reset_stats()
    assert run(engine, PROMPTS) == expected
    assert engine.stats()["cached_tokens"] == 0
    assert_always_accepted(engine)

    engine.set_speculative(None, exits=exits, plan=plan)  # the same: what is cached is of use
    engine.reset_stats()
    assert run(engine, PROMPTS) == expected
    assert engine.stats()["cached_tokens"] > 0
    assert_always_accepted(engine)

    engine.set_speculative(None)
    # What has grown stays, so that profiling can go from plan to plan; or shrinks. Either way memory() says
    # what is there.
    assert engine.memory()["kv_bytes"] == engine._runtime.kv.num_bytes and engine.memory()["exit_bytes"] == 0
    engine.reset_stats()
    assert run(engine, PROMPTS) == expected
    assert engine.stats()["cached_tokens"] == 0

    engine.set_speculative(
        None, exits=exits[1:], plan=Plan(3, 6, 2, 2)
    )  # fewer layers, in which another exit's KV lay
    engine.reset_stats()
    assert run(engine, PROMPTS) == expected
    stats = engine.stats()
    assert stats["cached_tokens"] == 0 and stats["accepted"] == stats["tentative"]


def test_other_exits_of_the_same_size_do_not_inherit_kv(
    tiny_decoder: Decoder, checkpoint: Checkpoint, files: dict[str, ExitsFile], expected: list[list[int]]
) -> None:
    engine = adapter_engine(
        tiny_decoder, Plan(3, None, 3, 1), loaded(files["random"], tiny_decoder, checkpoint, [3])
    )
    kv_bytes = engine.memory()["kv_bytes"]
    assert run(engine, PROMPTS) == expected
    assert engine.stats()["accepted"] < engine.stats()["tentative"] / 2
    engine.set_speculative(None, exits=right(tiny_decoder, checkpoint, files, 3), plan=Plan(3, None, 3, 1))
    engine.reset_stats()
    assert run(engine, PROMPTS) == expected
    assert engine.memory()["kv_bytes"] == kv_bytes
    assert_always_accepted(engine)


def test_an_adapter_plan_needs_its_exits(
    tiny_decoder: Decoder, checkpoint: Checkpoint, files: dict[str, ExitsFile], expected: list[list[int]]
) -> None:
    both = SpeculativeConfig(draft={"kind": "adapter", "layer": 3}, check={"kind": "adapter", "layer": 6})
    engine = adapter_engine(tiny_decoder, Plan(3, 6, 2, 2), right(tiny_decoder, checkpoint, files, 3, 6))
    run(engine, PROMPTS[:2])
    with pytest.raises(
        ConfigError,
        match=r"speculative\.check is an adapter, but none for layer 6 was given; pass it in `exits`",
    ):
        engine.set_speculative(both, exits=right(tiny_decoder, checkpoint, files, 3))
    with pytest.raises(ConfigError, match=r"speculative\.draft is an adapter, but none for layer 3"):
        Engine(tiny_decoder, engine._config, both)
    # Refused, nothing changed: the exits that are loaded still serve.
    assert run(engine, PROMPTS) == expected
    assert_always_accepted(engine)


def test_exits_that_a_plan_does_not_read_leave_no_gap_for_the_next(
    tiny_decoder: Decoder, checkpoint: Checkpoint, files: dict[str, ExitsFile], expected: list[list[int]]
) -> None:
    """They are refused; and what was cached without the other exit's KV is forgotten."""
    exits = right(tiny_decoder, checkpoint, files, 3, 6)
    with pytest.raises(ConfigError, match=r"does not read trained exits at layers \[6\]"):
        adapter_engine(tiny_decoder, Plan(3, None, 2, 1), exits)
    engine = adapter_engine(tiny_decoder, Plan(3, None, 2, 1), exits[:1])
    assert run(engine, PROMPTS) == expected
    engine.set_speculative(None, exits=exits, plan=Plan(3, 6, 2, 2))
    run(engine, [prompt + output for prompt, output in zip(PROMPTS, expected, strict=True)])
    assert_always_accepted(engine)


def test_no_trained_exit_takes_the_full_models_place() -> None:
    """Plans of full depth are known to tests only, but the engine takes them."""
    full, wrong = (
        one_hot_script(
            lambda exit_layer, position, token, shift=shift: (true_next(position, token) + shift) % 50
        )
        for shift in (0, 1)
    )
    plain = run(make_engine(ScriptedDecoder(full)), [[3]])
    try:
        engine = adapter_engine(ScriptedDecoder(full), Plan(9, None, 2, 1), [HistoryExit(9, wrong)])
    except ConfigError:
        return
    assert run(engine, [[3]]) == plain


def test_the_plan_cannot_change_under_live_requests(
    tiny_decoder: Decoder, checkpoint: Checkpoint, files: dict[str, ExitsFile]
) -> None:
    engine = make_engine(tiny_decoder)
    request_id = engine.add_request(PROMPTS[0], GREEDY)
    with pytest.raises(ConfigError, match="1 requests are unfinished"):
        engine.set_speculative(
            None, exits=right(tiny_decoder, checkpoint, files, 3), plan=Plan(3, None, 2, 1)
        )
    engine.abort([request_id], notify=False)
    engine.set_speculative(None, exits=right(tiny_decoder, checkpoint, files, 3), plan=Plan(3, None, 2, 1))
