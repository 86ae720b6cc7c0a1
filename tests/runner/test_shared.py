"""What plans share: it is held once, counted once, and each has what is its own."""

from __future__ import annotations

from typing import Any

from ee_models.decoder import Decoder
from hispec.config import SpeculativeConfig
from hispec.decoding.stages import PassCounts
from hispec.drafters.model import ModelDrafter
from hispec.errors import build
from hispec.runner.plan_runtime import make_plan_runtime, memory_of
from hispec.runner.plan_spec import EngineSizes, Models, PlanSpec
from tests.helpers.drafters import ALL, drafter_engine
from tests.helpers.recorded_graphs import RecordedGraphs

SIZES = EngineSizes(4, 128, 64, 8)


def model_plan(num_draft_tokens: int, **more: Any) -> dict[str, Any]:
    return {"draft": {"kind": "model", "path": "tiny"}, "num_draft_tokens": num_draft_tokens, **more}


def test_memory_of_plans_that_are_kept_is_counted_once(tiny_decoder: Decoder) -> None:
    engine = drafter_engine(
        tiny_decoder, model_plan(2), tiny_decoder, is_static=True, graph_device=RecordedGraphs()
    )
    alone, draft_kv = engine.memory(), engine._runtime.draft_kv
    assert draft_kv is not None and alone["drafter_bytes"] == draft_kv.num_bytes > 0
    engine.set_speculative(build(SpeculativeConfig, model_plan(3)), draft_model=tiny_decoder)
    both = engine.memory()
    assert len(engine._plans.kept) == 2
    for name in ("kv_bytes", "drafter_bytes", "exit_bytes"):
        assert both[name] == alone[name], name
    assert both["hidden_bytes"] > alone["hidden_bytes"], "each plan has its own"


def test_a_table_that_plans_guess_from_is_counted_once(tiny_decoder: Decoder) -> None:
    engine = drafter_engine(tiny_decoder, ALL["ngram guesses"])
    (table,) = engine._runtime.models.tables
    (drafter,) = engine._runtime.drafters
    assert engine.memory()["drafter_bytes"] == table.num_bytes + drafter.num_bytes > table.num_bytes > 0
    runtimes = [engine._plans.make(64, PlanSpec(engine._runtime.models, None)) for _ in range(2)]
    assert memory_of(runtimes)["drafter_bytes"] == table.num_bytes


def test_plans_that_share_a_draft_model_have_judges_of_their_own(tiny_decoder: Decoder) -> None:
    """A judge may keep what it has chosen, and one of a check may be another than one without."""
    check = {"check": {"layer": 6, "confidence": 0.5}}
    settings = model_plan(3, **check, control="goodput", goodput={"drafters": ["model"]})
    spec = PlanSpec(Models(tiny_decoder, draft_model=tiny_decoder), build(SpeculativeConfig, settings))
    runtime = make_plan_runtime(spec, SIZES, (PassCounts(), PassCounts()), None, None)
    drafters = [route.drafter for route in runtime.routes if isinstance(route.drafter, ModelDrafter)]
    judges = [route.judge for route in runtime.routes if isinstance(route.drafter, ModelDrafter)]
    assert len(drafters) > 1 and len({id(drafter.head) for drafter in drafters}) == 1
    assert [drafter._judge for drafter in drafters] == judges and len({*map(id, judges)}) > 1
    assert len(runtime.drafters) == 1, "told of prompts once"
    assert memory_of([runtime, runtime]) == memory_of([runtime])
