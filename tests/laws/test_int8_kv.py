"""The laws on a model whose keys and values are in int8: its own plain decoding, token for token and bit for
bit, whatever happens to them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ee_models.checkpoint.loader import open_checkpoint
from ee_models.decoder import Decoder
from ee_models.quantized import Quantization
from hispec.config import Plan
from hispec.decoding.stages import Stages
from hispec.sampling_params import SamplingParams
from tests.helpers.drafters import ALL, KINDS, drafter_engine
from tests.helpers.runs import PROMPTS, but, repetitive, spied
from tests.helpers.support import GREEDY, PLANS, make_engine, run, threads
from tests.helpers.sweeps import sweep
from tests.helpers.tiny import tiny_checkpoint

TEXTS = [*PROMPTS, *(repetitive(length, length) for length in (12, 40))]
# Greedy rows and sampled ones side by side.
PARAMS = [but(GREEDY, temperature=0.8 * (at % 2), seed=at) for at in range(len(TEXTS))]
BLOCKS = {"block_size": 16}
FEW = {"block_size": 16, "num_kv_blocks": 8}


# What weights are held in, and the numbers of a head, of which 16 or 64 are mixed together.
CASES: dict[str, tuple[Quantization | None, int]] = {
    "float32": (None, 16),
    "int8": ("int8", 16),
    "int8 of wide heads": ("int8", 64),
}


@pytest.fixture(scope="module", params=CASES)
def given(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Quantization | None, Path]:
    quantization, head_dim = CASES[request.param]
    folder = tmp_path_factory.mktemp("heads") / "model"
    return quantization, tiny_checkpoint(folder, hidden=64, head_dim=head_dim)


@pytest.fixture(scope="module")
def decoder(given: tuple[Quantization | None, Path]) -> Iterator[Decoder]:
    with threads(1):
        yield load(*given, kv_dtype=torch.int8)


def load(quantization: Quantization | None, path: Path, **numbers: Any) -> Decoder:
    checkpoint = open_checkpoint(path)
    return Decoder.load(checkpoint, torch.float32, torch.device("cpu"), quantization=quantization, **numbers)


@pytest.fixture(scope="module")
def alone(decoder: Decoder) -> list[list[int]]:
    """Round by round, each by itself."""
    return [
        run(make_engine(decoder, max_run_ms=0.0, **BLOCKS), [text], params)[0]
        for text, params in zip(TEXTS, PARAMS, strict=True)
    ]


def test_it_is_a_model_of_its_own(
    decoder: Decoder, alone: list[list[int]], given: tuple[Quantization | None, Path]
) -> None:
    assert decoder.row_invariant
    wide = load(*given)
    assert run(make_engine(wide, **BLOCKS), TEXTS, PARAMS) != alone, "or nothing was rounded"


SIZES: list[dict[str, int]] = [
    BLOCKS,
    {"max_num_seqs": 2, "block_size": 32, "max_prefill_tokens": 5},
    FEW,
]


@sweep(
    "plan, sizes",
    itertools.product(PLANS, SIZES),
    lambda case: case[0] in PLANS[SIZES.index(case[1]) :: 3],
    ids=str,
)
def test_every_plan_gives_plain_decoding(
    decoder: Decoder, alone: list[list[int]], plan: Plan, sizes: dict[str, int]
) -> None:
    assert run(make_engine(decoder, plan, **sizes), TEXTS, PARAMS) == alone


def test_several_threads_give_what_one_gives(
    given: tuple[Quantization | None, Path], alone: list[list[int]]
) -> None:
    """Of one plan: they wait for each other most of the time where other tests have their cores."""
    with threads(3):
        decoder = load(*given, kv_dtype=torch.int8)
        assert run(make_engine(decoder, Plan(3, 6, 2, 2), **BLOCKS), TEXTS, PARAMS) == alone


@sweep("name", ALL, ("ngram gated", "hybrid sure gated", "exit tree", "model", "model tree").__contains__)
def test_every_drafter_gives_plain_decoding(decoder: Decoder, alone: list[list[int]], name: str) -> None:
    for sizes in (BLOCKS, FEW):
        engine = drafter_engine(decoder, ALL[name], decoder, **sizes)
        assert run(engine, TEXTS, PARAMS) == alone


@pytest.mark.parametrize("plan", [Plan(3, None, 2, 1, 2), Plan(2, 5, 2, 2, 3)], ids=str)
def test_trees_give_plain_decoding(decoder: Decoder, alone: list[list[int]], plan: Plan) -> None:
    assert run(make_engine(decoder, plan, **BLOCKS), TEXTS, PARAMS) == alone


@pytest.mark.parametrize("swap_bytes", [0, 1 << 20])
def test_preempted_requests_go_on_where_they_were(
    decoder: Decoder, alone: list[list[int]], swap_bytes: int
) -> None:
    """Computed anew, or copied to host memory and back."""
    engine = drafter_engine(decoder, KINDS["ngram check"], swap_bytes=swap_bytes, **FEW)
    assert run(engine, TEXTS, PARAMS) == alone
    assert engine.stats()["preemptions"] > 0
    assert bool(engine.stats()["kv_moved_in"]) == bool(swap_bytes)


def test_prompts_that_begin_alike_share_their_blocks(decoder: Decoder) -> None:
    begin, params = TEXTS[4], SamplingParams(temperature=0.0, max_tokens=20)
    texts = [[*begin, each] for each in range(5)]
    expected = [
        run(make_engine(decoder, enable_prefix_caching=False, **BLOCKS), [text], params)[0] for text in texts
    ]
    engine = make_engine(decoder, Plan(3, 6, 2, 2), **BLOCKS)
    assert run(engine, texts, params) == expected
    assert engine.stats()["cached_tokens"] > 0


@pytest.mark.parametrize("name", ["ngram", "exit gated", "hybrid sure gated"])
def test_rounds_run_together_as_one_by_one(decoder: Decoder, name: str) -> None:
    params = [but(each, temperature=0.0) for each in PARAMS]
    single = drafter_engine(decoder, KINDS[name], max_run_ms=0.0, enable_prefix_caching=False, **BLOCKS)
    several = drafter_engine(decoder, KINDS[name], enable_prefix_caching=False, **BLOCKS)
    expected = run(single, TEXTS, params)
    with spied(Stages, "run_linked") as calls:
        assert run(several, TEXTS, params) == expected
    assert calls


def test_static_rounds_give_plain_decoding(decoder: Decoder, alone: list[list[int]]) -> None:
    for plan in (Plan(), Plan(3, 6, 2, 2), Plan(2, 5, 2, 2, 3)):
        assert run(make_engine(decoder, plan, is_static=True, **BLOCKS), TEXTS, PARAMS) == alone


def test_keys_and_values_are_those_of_a_prompt_computed_at_once(decoder: Decoder) -> None:
    """In chunks of any size, and token by token as they are decoded."""
    found: list[Any] = []
    text = TEXTS[4]
    output = run(make_engine(decoder, **BLOCKS), [text], GREEDY)[0]
    for prompt, sizes in ((text, 5), (text, 32), (text + output[:-1], 512)):
        engine = make_engine(decoder, max_num_seqs=1, max_prefill_tokens=sizes, **BLOCKS)
        run(engine, [prompt], but(GREEDY, max_tokens=len(output) if prompt is text else 1))
        kv = engine._runtime.kv
        slots = torch.arange(len(text) + len(output) - 1)
        found.append(
            torch.stack([kv.rows(layer, part, slots) for layer in range(kv.num_layers) for part in (0, 1)])
        )
    assert all(torch.equal(each, found[0]) for each in found[1:]) and bool(found[0].any())
