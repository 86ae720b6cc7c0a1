"""Rounds over a recording, against the engine: token for token, for every kind of drafter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ee_models.checkpoint.exit_files import ExitInfo
from ee_models.checkpoint.loader import open_checkpoint
from ee_models.decoder import Decoder
from ee_models.exits import AdapterExit
from hispec.config import CheckConfig, DraftConfig, EngineConfig, NgramConfig, SpeculativeConfig
from hispec.drafters import ngram_learner
from hispec.engine import Engine
from hispec.latency.model import NOTHING, LatencyModel, stage_names
from hispec.profile.plans import short_text
from hispec.profile.record_answers import record
from hispec.profile.recording import Answer
from hispec.profile.replay import RoundCounter, Rounds
from hispec.profile.round_cost import PassTimes, round_costs
from hispec.sampling_params import SamplingParams
from tests.helpers.adapters import TINY_MLP, loaded, make_exits, whole_trunk
from tests.helpers.support import random_prompts, run
from tests.helpers.tiny import tiny_model

LAYERS, NUM_LAYERS = [1, 3, 6, 8], 9
PARAMS = SamplingParams(temperature=0.0, max_tokens=24)
SIZES = NgramConfig(max_size=3, min_size=2, match_confidence=None)


def exit_(layer: int) -> dict[str, Any]:
    return {"layer": layer}


def ngram(sizes: NgramConfig = SIZES) -> dict[str, Any]:
    return {"kind": "ngram", "ngram": sizes}


def hybrid(layer: int, num_exit_tokens: int | None, sizes: NgramConfig = SIZES) -> dict[str, Any]:
    return {
        "kind": "hybrid",
        "exit": "exit",
        "layer": layer,
        "num_exit_tokens": num_exit_tokens,
        "ngram": sizes,
    }


MODEL = {"kind": "model", "path": "small"}


def plan(
    draft: dict[str, Any],
    num_drafts: int,
    check: int | None = None,
    num_checks: int = 1,
    *,
    sure: float | None = None,
    gate: float | None = None,
    **fields: Any,
) -> SpeculativeConfig:
    """`sure`, `gate`: the check's confidence, and how sure it must be for another cycle."""
    return SpeculativeConfig(
        draft=DraftConfig(**draft),
        check=None if check is None else CheckConfig(layer=check, confidence=sure, continue_confidence=gate),
        num_draft_tokens=num_drafts,
        num_checks=num_checks,
        **fields,
    )


PLANS = {
    "exit": [
        plan(exit_(1), 1),
        plan(exit_(3), 4),
        plan(exit_(8), 8),
        plan(exit_(1), 1, 3),
        plan(exit_(3), 2, 6, 2),
        plan(exit_(3), 3, 8, 4),
        plan(exit_(6), 1, 8, 5),
        plan(exit_(1), 2, 8, 8),
    ],
    "sure": [
        plan(exit_(6), 4, draft_confidence=0.5),
        plan(exit_(6), 3, 8, draft_confidence=0.6),
        plan(exit_(3), 2, 6, 3, sure=0.4),
        plan(exit_(6), 3, 8, 2, sure=0.7, draft_confidence=0.3),
        plan(hybrid(6, 2), 6, 8, sure=0.6, draft_confidence=0.4),
    ],
    "tree": [
        plan(exit_(3), 1, num_branches=8),
        plan(exit_(6), 3, num_branches=3),
        plan(exit_(8), 2, num_branches=2),
        plan(exit_(6), 2, 8, num_branches=4),
        plan(exit_(3), 3, 6, num_branches=2),
        plan(exit_(6), 2, 8, 2, num_branches=2),
    ],
    "ngram": [
        plan(ngram(), 6),
        plan(ngram(NgramConfig()), 4),
        plan(ngram(), 4, 8),
        plan(ngram(), 3, 6, 3, sure=0.5),
        plan(ngram(NgramConfig()), 12, 8, 2, sure=0.9),
    ],
    "hybrid": [
        plan(hybrid(6, 1), 6),
        plan(hybrid(3, None), 3),
        plan(hybrid(6, 2, NgramConfig()), 8),
        plan(hybrid(3, 1), 6, 8),
        plan(hybrid(6, 2, NgramConfig()), 4, 8, 3),
    ],
    "gated": [
        plan(exit_(3), 2, 8, 4, gate=0.5),
        plan(exit_(6), 1, 8, 8, gate=0.4),
        plan(exit_(6), 2, 8, 3, num_branches=2, gate=0.6),
        plan(ngram(), 3, 6, 5, gate=0.3),
        plan(hybrid(6, 2, NgramConfig()), 4, 8, 6, sure=0.3, gate=0.7, draft_confidence=0.4),
        plan(MODEL, 2, 8, 5, gate=0.6),
    ],
    "model": [
        plan(MODEL, 1),
        plan(MODEL, 4),
        plan(MODEL, 3, 8),
        plan(MODEL, 2, 8, 3, sure=0.5),
        plan(MODEL, 3, draft_confidence=0.5),
    ],
}


@pytest.fixture(scope="module")
def small_decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """The first six layers of the tiny model, as a model that is right as often as an exit there."""
    model = tiny_model()
    model.model.layers = model.model.layers[:6]
    model.config.num_hidden_layers = 6
    model.config.layer_types = None
    folder = tmp_path_factory.mktemp("small")
    model.save_pretrained(folder)
    return Decoder.load(open_checkpoint(folder), torch.float32, torch.device("cpu"))


def engine(
    decoder: Decoder,
    speculative: SpeculativeConfig | None,
    small: Decoder | None = None,
    exits: Sequence[AdapterExit] = (),
    **config: Any,
) -> Engine:
    fields: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_model_len": 256,
        "block_size": 8,
        "num_kv_blocks": 256,
        "enable_prefix_caching": False,
        **config,
    }
    draft_model = small if speculative is not None and speculative.draft.kind == "model" else None
    eos = fields.pop("eos", ())
    return Engine(
        decoder, EngineConfig(**fields), speculative, exits=exits, draft_model=draft_model, eos_token_ids=eos
    )


def repeating_prompts(decoder: Decoder) -> list[list[int]]:
    """Prompts in which parts of their own answers stand already, so that looking them up is right at
    times."""
    prompts = random_prompts([5, 30, 1, 17])
    outputs = run(engine(decoder, None), prompts, PARAMS)
    return [
        prompt + output + prompt[:2] + output[:7] for prompt, output in zip(prompts, outputs, strict=True)
    ]


def layers_run(counted: Rounds, plan: SpeculativeConfig, layers: Sequence[int]) -> float:
    """By one row alone; layers are counted whatever they cost."""
    latency = LatencyModel(dict.fromkeys(stage_names(layers, (), has_draft_model=True), NOTHING))
    return counted.rounds * round_costs(plan, counted, [1], PassTimes(latency, 30), NUM_LAYERS)[1].layers


def check_against_engine(
    decoder: Decoder,
    plans: Sequence[SpeculativeConfig],
    small: Decoder | None = None,
    layers: Sequence[int] = LAYERS,
    exits: Sequence[AdapterExit] = (),
    eos: Sequence[int] = (),
) -> None:
    """Rounds and tokens are the engine's, exactly, alone or in a batch of three; layers run are nearly so:
    they depend on contexts that were never recorded, after a wrong token: how sure the next drafts and checks
    would be there, and what prompt lookup would find.
    """
    prompts = repeating_prompts(decoder)
    outputs = run(engine(decoder, None, eos=eos), prompts, PARAMS)
    answers = [Answer(prompt, output, 24, "all") for prompt, output in zip(prompts, outputs, strict=True)]
    counter = RoundCounter(
        record(
            decoder,
            layers,
            exits,
            answers,
            ngrams=[SIZES, NgramConfig()],
            most_looked_up=12,
            draft_model=small,
        )
    )
    for number, one in enumerate(plans):
        counted = counter.count(one)
        for batch_size in (1, 3) if number % 3 == 1 else (1,):
            wanted = [exit_ for exit_ in exits if exit_.layer in one.trained_layers().values()]
            real = engine(decoder, one, small, wanted, eos=eos, max_num_seqs=batch_size)
            assert run(real, prompts, PARAMS) == outputs
            stats = real.stats()
            assert (stats["rounds"], stats["tokens"]) == (counted.rounds, counted.tokens), short_text(one)
            assert counted.per_answer.sum() == counted.rounds
            if batch_size == 1:
                layers_of_rounds = stats["layer_passes"] - stats["prefill_layer_passes"]
                is_gated = one.check is not None and one.check.continue_confidence is not None
                is_guessed = one.draft_confidence is not None or (
                    one.draft.kind == "hybrid" and one.num_checks > 1
                )
                tolerance = (
                    0.2 if is_gated else 0.12 if is_guessed else 0.05 if one.check is not None else 1e-9
                )
                assert layers_run(counted, one, layers) == pytest.approx(layers_of_rounds, rel=tolerance), (
                    short_text(one)
                )


@pytest.mark.parametrize("kind", PLANS)
def test_rounds_are_the_engines(tiny_decoder: Decoder, small_decoder: Decoder, kind: str) -> None:
    check_against_engine(tiny_decoder, PLANS[kind], small_decoder)


def test_rounds_are_the_engines_when_answers_end_early(tiny_decoder: Decoder) -> None:
    prompts = repeating_prompts(tiny_decoder)
    outputs = run(engine(tiny_decoder, None), prompts, PARAMS)
    eos = [outputs[0][6], outputs[2][17]]
    lengths = [len(output) for output in run(engine(tiny_decoder, None, eos=eos), prompts, PARAMS)]
    assert min(lengths) < 10 and max(lengths) == 24, "EOS must end some answers, and not all"
    check_against_engine(
        tiny_decoder,
        [*PLANS["exit"][2:5], *PLANS["tree"][1:4:2], PLANS["ngram"][3], PLANS["hybrid"][4]],
        eos=eos,
    )


def test_rounds_are_the_engines_with_trained_exits(
    tiny_path: Path, tiny_decoder: Decoder, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(tiny_path)
    infos = [
        ExitInfo(layer=1, num_blocks=5, intermediate_size=TINY_MLP),
        ExitInfo(layer=4, num_blocks=4, intermediate_size=TINY_MLP),
        whole_trunk(7),
    ]
    exits = loaded(make_exits(tmp_path, checkpoint, infos, from_trunk=True), tiny_decoder, checkpoint)
    drafts = [
        ({"kind": "adapter", "layer": 4}, None, 6, 1),
        ({"kind": "adapter", "layer": 1}, 4, 2, 3),
        ({**hybrid(1, 2), "exit": "adapter"}, 7, 4, 2),
    ]
    plans = [
        SpeculativeConfig(
            draft=DraftConfig(**draft),
            check=None if layer is None else CheckConfig(kind="adapter", layer=layer),
            num_draft_tokens=num,
            num_checks=checks,
        )
        for draft, layer, num, checks in drafts
    ]
    check_against_engine(tiny_decoder, plans, layers=[1, 4, 7], exits=exits)


@pytest.mark.parametrize(
    "kept", [{"datastore_tokens": 4096}, {"learn_tokens": 8192, "guess_confidence": 0.01}]
)
def test_outputs_are_kept_as_by_the_engine(
    tiny_decoder: Decoder, kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one row, which serves answers in order. Prompts that come twice are answered from those before."""
    monkeypatch.setattr(ngram_learner, "_FIRST_TOKENS", 1)
    monkeypatch.setattr(ngram_learner, "_LEAST_COUNT", 1)
    sizes = NgramConfig(max_size=3, min_size=2, match_confidence=None, **kept)
    prompts = random_prompts([5, 9, 14]) * 2
    outputs = run(engine(tiny_decoder, None), prompts, PARAMS)
    answers = [Answer(prompt, output, 24, "all") for prompt, output in zip(prompts, outputs, strict=True)]
    counter = RoundCounter(record(tiny_decoder, [6], [], answers, ngrams=[sizes], most_looked_up=8))
    keeping = plan(ngram(sizes), 8)
    real = engine(tiny_decoder, keeping, max_num_seqs=1)
    assert run(real, prompts, PARAMS) == outputs
    counted = counter.count(keeping)
    assert (real.stats()["rounds"], real.stats()["tokens"]) == (counted.rounds, counted.tokens)
    assert counted.per_answer[3:].sum() < counted.per_answer[:3].sum() / 2
