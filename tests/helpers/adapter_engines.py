"""Engines with trained exits over the tiny model: the plans and exits that their laws are shown on. Its
fixtures are in tests.fixtures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ee_models.checkpoint.exit_files import ExitInfo, ExitsFile
from ee_models.checkpoint.loader import Checkpoint, open_checkpoint
from ee_models.decoder import Decoder
from hispec.config import Plan
from hispec.engine import Engine
from tests.helpers.adapters import TINY_MLP, adapter_engine, loaded, make_exits, whole_trunk
from tests.helpers.support import make_engine, random_prompts, run
from tests.laws.test_rejection import FIRST, LAYERS, VOCAB, Paths, paths  # noqa: F401 - `paths` is a fixture

PROMPTS = random_prompts((1, 2, 7, 8, 9, 31, 33, 70))

# Exits that start as copies of the trunk, so that they are sometimes right; by the layers that they are read
# at.
MIXES: dict[str, tuple[ExitInfo, ...]] = {
    "draft": (ExitInfo(layer=3, num_blocks=2, intermediate_size=TINY_MLP),),
    "kangaroo": (ExitInfo(layer=7),),
    "both": (
        ExitInfo(layer=4, num_blocks=2, intermediate_size=TINY_MLP),
        ExitInfo(layer=7, intermediate_size=TINY_MLP),
    ),
    "check": (ExitInfo(layer=6, num_blocks=2, intermediate_size=TINY_MLP),),
    "norm_and_mlp": (
        ExitInfo(layer=4, num_blocks=0),
        ExitInfo(layer=7, attention=False, intermediate_size=TINY_MLP),
    ),
    "reduced": (
        ExitInfo(layer=4, vocabulary_size=100),
        ExitInfo(layer=7, intermediate_size=TINY_MLP, vocabulary_size=180),
    ),
}
CASES = [
    ("draft", Plan(3, None, 1, 1)),
    ("draft", Plan(3, None, 4, 1)),
    ("draft", Plan(3, 6, 2, 2)),
    ("draft", Plan(3, 8, 1, 3)),
    ("kangaroo", Plan(7, None, 3, 1)),
    ("check", Plan(3, 6, 2, 2)),
    ("check", Plan(5, 6, 4, 1)),
    ("both", Plan(4, 7, 1, 1)),
    ("both", Plan(4, 7, 3, 2)),
    ("norm_and_mlp", Plan(4, 7, 2, 3)),
    ("reduced", Plan(4, 7, 2, 2)),
    ("reduced", Plan(4, None, 2, 1)),
]
# Always right; the draft tier's, the check tier's, or both.
RIGHT = [
    (Plan(3, None, 3, 1), (3,)),
    (Plan(3, 6, 2, 2), (3, 6)),
    (Plan(1, 2, 1, 3), (1, 2)),
    (Plan(8, None, 1, 1), (8,)),
]


@pytest.fixture(scope="module")
def checkpoint(tiny_path: Path) -> Checkpoint:
    return open_checkpoint(tiny_path)


@pytest.fixture(scope="module")
def expected(tiny_decoder: Decoder) -> list[list[int]]:
    """Plain decoding's, which is transformers' (test_laws_exact)."""
    return run(make_engine(tiny_decoder), PROMPTS)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, checkpoint: Checkpoint) -> dict[str, ExitsFile]:
    folder = tmp_path_factory.mktemp("exits")
    made = {
        name: make_exits(folder / name, checkpoint, infos, from_trunk=True) for name, infos in MIXES.items()
    }
    made["random"] = make_exits(folder / "random", checkpoint, [whole_trunk(3), whole_trunk(6)])
    made["right"] = make_exits(
        folder / "right", checkpoint, [whole_trunk(layer) for layer in (1, 2, 3, 6, 8)], from_trunk=True
    )
    return made


Make = Callable[..., Engine]


@pytest.fixture
def engine_of(tiny_decoder: Decoder, checkpoint: Checkpoint, files: dict[str, ExitsFile]) -> Make:
    """make(name of the exits, plan, layers=those of the file that the plan reads, **config)."""

    def make(name: str, plan: Plan, **config: Any) -> Engine:
        layers = [layer for layer in files[name].layers if layer in (plan.draft_layer, plan.check_layer)]
        return adapter_engine(
            tiny_decoder, plan, loaded(files[name], tiny_decoder, checkpoint, layers), **config
        )

    return make


def assert_always_accepted(engine: Engine) -> None:
    stats = engine.stats()
    assert stats["drafted"] > 0 and stats["draft_kept"] == stats["drafted"], (
        "the check tier rejected what is always right"
    )
    assert stats["tentative"] > 0 and stats["accepted"] == stats["tentative"], (
        "verify rejected what is always right"
    )
