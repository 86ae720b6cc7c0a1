"""Rounds over a recording: against the engine, token for token, for every kind of drafter; and against the round written out."""
from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ee_models.decoder import Decoder
from ee_models.exit_files import ExitInfo
from ee_models.exits import AdapterExit
from ee_models.loader import open_checkpoint
from hispec.config import CheckConfig, DraftConfig, EngineConfig, NgramConfig, SpeculativeConfig
from hispec.engine import Engine
from hispec.profile.costs import Curve, StageCosts
from hispec.profile.passes import round_costs
from hispec.profile.plans import short_text
from hispec.profile.reading import record
from hispec.profile.recording import Answer, Ints, LookedUp, Recording, Said, flat
from hispec.profile.rounds import RoundCounter, Rounds, sum_of
from hispec.sampling_params import SamplingParams
from tests.adapters import TINY_MLP, loaded, make_exits, whole_trunk
from tests.support import random_prompts, run
from tests.tiny import tiny_model

LAYERS, NUM_LAYERS = [1, 3, 6, 8], 9
PARAMS = SamplingParams(temperature=0.0, max_tokens=30)
SIZES = NgramConfig(max_size=3, min_size=2, tokens_per_match=None)


def exit_(layer: int) -> dict[str, Any]:
    return {"layer": layer}


def ngram(sizes: NgramConfig = SIZES) -> dict[str, Any]:
    return {"kind": "ngram", "ngram": sizes}


def hybrid(layer: int, num_exit_tokens: int | None, sizes: NgramConfig = SIZES) -> dict[str, Any]:
    return {"kind": "hybrid", "exit": "exit", "layer": layer, "num_exit_tokens": num_exit_tokens, "ngram": sizes}


MODEL = {"kind": "model", "path": "small"}


def plan(draft: dict[str, Any], num_drafts: int, check: int | None = None, num_checks: int = 1, *, sure: float | None = None, **fields: Any) -> SpeculativeConfig:
    """`sure`: the check's confidence."""
    return SpeculativeConfig(
        draft=DraftConfig(**draft),
        check=None if check is None else CheckConfig(layer=check, confidence=sure),
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
    "model": [plan(MODEL, 1), plan(MODEL, 4), plan(MODEL, 3, 8), plan(MODEL, 2, 8, 3, sure=0.5), plan(MODEL, 3, draft_confidence=0.5)],
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


def engine(decoder: Decoder, speculative: SpeculativeConfig | None, small: Decoder | None = None, exits: Sequence[AdapterExit] = (), **config: Any) -> Engine:
    fields: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 256, "block_size": 8, "num_kv_blocks": 256, "enable_prefix_caching": False, **config}
    draft_model = small if speculative is not None and speculative.draft.kind == "model" else None
    eos = fields.pop("eos", ())
    return Engine(decoder, EngineConfig(**fields), speculative, exits=exits, draft_model=draft_model, eos_token_ids=eos)


def repeating_prompts(decoder: Decoder) -> list[list[int]]:
    """Prompts in which parts of their own answers stand already, so that looking them up is right at times."""
    prompts = random_prompts([5, 9, 40, 1, 22])
    outputs = run(engine(decoder, None), prompts, PARAMS)
    return [prompt + output + prompt[:2] + output[:7] for prompt, output in zip(prompts, outputs, strict=True)]


def flat_costs(layers: Sequence[int]) -> StageCosts:
    """Any: layers are counted whatever they cost."""
    curve, froms = Curve((1, 1000), (1.0, 1.0)), [0, *layers]
    pairs = {(lo, hi): curve for lo in froms for hi in layers if hi > lo}
    each = dict.fromkeys(layers, curve)
    return StageCosts(30, each, each, pairs, dict.fromkeys(froms, curve), curve, curve, curve, curve, curve, curve)


def layers_run(counted: Rounds, plan: SpeculativeConfig, layers: Sequence[int]) -> float:
    """By one row alone."""
    return counted.rounds * round_costs(plan, counted, [1], flat_costs(layers), NUM_LAYERS)[1].layers


def check_against_engine(
    decoder: Decoder, plans: Sequence[SpeculativeConfig], small: Decoder | None = None, layers: Sequence[int] = LAYERS, exits: Sequence[AdapterExit] = (), eos: Sequence[int] = ()
) -> None:
    """Rounds and tokens are the engine's, exactly, alone or in a batch of three; layers run are nearly so: they depend on contexts that
    were never recorded, after a wrong token. Beyond a wrong draft it is not known how sure the next ones would be."""
    prompts = repeating_prompts(decoder)
    outputs = run(engine(decoder, None, eos=eos), prompts, PARAMS)
    answers = [Answer(prompt, output, 30, "all") for prompt, output in zip(prompts, outputs, strict=True)]
    counter = RoundCounter(record(decoder, layers, exits, answers, ngrams=[SIZES, NgramConfig()], most_looked_up=12, draft_model=small))
    for number, one in enumerate(plans):
        counted = counter.count(one)
        for batch_size in (1, 3) if number % 2 else (1,):
            wanted = [exit_ for exit_ in exits if exit_.layer in one.trained_layers().values()]
            real = engine(decoder, one, small, wanted, eos=eos, max_num_seqs=batch_size)
            assert run(real, prompts, PARAMS) == outputs
            stats = real.stats()
            assert (stats["rounds"], stats["tokens"]) == (counted.rounds, counted.tokens), short_text(one)
            assert counted.per_answer.sum() == counted.rounds
            if batch_size == 1:
                layers_of_rounds = stats["layer_passes"] - stats["prefill_layer_passes"]
                is_exact = one.check is None and one.draft_confidence is None
                tolerance = 1e-9 if is_exact else 0.05 if one.draft_confidence is None else 0.1
                assert layers_run(counted, one, layers) == pytest.approx(layers_of_rounds, rel=tolerance), short_text(one)


@pytest.mark.parametrize("kind", PLANS)
def test_rounds_are_the_engines(tiny_decoder: Decoder, small_decoder: Decoder, kind: str) -> None:
    check_against_engine(tiny_decoder, PLANS[kind], small_decoder)


def test_rounds_are_the_engines_when_answers_end_early(tiny_decoder: Decoder) -> None:
    prompts = repeating_prompts(tiny_decoder)
    outputs = run(engine(tiny_decoder, None), prompts, PARAMS)
    eos = [outputs[0][6], outputs[2][17]]
    lengths = [len(output) for output in run(engine(tiny_decoder, None, eos=eos), prompts, PARAMS)]
    assert min(lengths) < 10 and max(lengths) == 30, "EOS must end some answers, and not all"
    check_against_engine(tiny_decoder, [*PLANS["exit"][2:5], *PLANS["tree"][1:4:2], PLANS["ngram"][3], PLANS["hybrid"][4]], eos=eos)


def test_rounds_are_the_engines_with_trained_exits(tiny_path: Path, tiny_decoder: Decoder, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_path)
    infos = [ExitInfo(layer=1, num_blocks=5, intermediate_size=TINY_MLP), ExitInfo(layer=4, num_blocks=4, intermediate_size=TINY_MLP), whole_trunk(7)]
    exits = loaded(make_exits(tmp_path, checkpoint, infos, from_trunk=True), tiny_decoder, checkpoint)
    drafts = [({"kind": "adapter", "layer": 4}, None, 6, 1), ({"kind": "adapter", "layer": 1}, 4, 2, 3), ({**hybrid(1, 2), "exit": "adapter"}, 7, 4, 2)]
    plans = [
        SpeculativeConfig(
            draft=DraftConfig(**draft), check=None if layer is None else CheckConfig(kind="adapter", layer=layer), num_draft_tokens=num, num_checks=checks
        )
        for draft, layer, num, checks in drafts
    ]
    check_against_engine(tiny_decoder, plans, layers=[1, 4, 7], exits=exits)


def test_a_datastore_is_used_as_by_the_engine(tiny_decoder: Decoder) -> None:
    """By one row, which serves answers in order. Prompts that come twice are answered from the store."""
    sizes = NgramConfig(max_size=3, min_size=2, tokens_per_match=None, datastore_tokens=4096)
    prompts = random_prompts([5, 9, 14]) * 2
    outputs = run(engine(tiny_decoder, None), prompts, PARAMS)
    answers = [Answer(prompt, output, 30, "all") for prompt, output in zip(prompts, outputs, strict=True)]
    counter = RoundCounter(record(tiny_decoder, [6], [], answers, ngrams=[sizes], most_looked_up=8))
    with_store = plan(ngram(sizes), 8)
    real = engine(tiny_decoder, with_store, max_num_seqs=1)
    assert run(real, prompts, PARAMS) == outputs
    counted = counter.count(with_store)
    assert (real.stats()["rounds"], real.stats()["tokens"]) == (counted.rounds, counted.tokens) and counted.per_answer[3:].sum() < counted.per_answer[:3].sum() / 2


# ---- the round written out ----


class Reference:
    """One answer's rounds in tokens and lists, as `hispec.round` does them; what is said at a place is what was recorded there."""

    def __init__(self, recording: Recording, plan: SpeculativeConfig, answer: int) -> None:
        self.recording, self.plan = recording, plan
        self.start, self.length, self.cap = int(recording.starts[answer]), int(recording.lengths[answer]), int(recording.caps[answer])
        self.rounds = self.checked = self.unchecked = self.looked_up = self.computed_passes = self.computed_positions = 0
        self.verify_positions = 0
        nodes = plan.num_branches * plan.num_draft_tokens + 1
        self.window = nodes * (plan.num_checks if plan.check else 1)
        done = 0
        while done < self.length:
            self.rounds += 1
            done += self.round(done)

    def at(self, place: int) -> int:
        return self.start + min(place, self.length)

    def said(self, place: int) -> tuple[list[int], float]:
        said = self.recording.model if self.plan.draft.layer is None else self.recording.exits[self.plan.draft.layer]
        assert said is not None
        return said.ranked[self.at(place)].tolist(), float(said.probability[self.at(place)])

    def own(self, place: int) -> tuple[int, bool]:
        """The check's token there, and whether it overrules."""
        assert self.plan.check is not None
        said = self.recording.exits[self.plan.check.layer]
        sure = self.plan.check.confidence is None or said.probability[self.at(place)] >= np.float32(self.plan.check.confidence)
        return int(said.ranked[self.at(place), 0]), bool(sure)

    def truth(self, place: int) -> int | None:
        return int(self.recording.truth[self.at(place)]) if place < self.length else None

    def computed(self, place: int, most: int, room: int) -> list[list[int]]:
        """Branches of drafts."""
        confidence = self.plan.draft_confidence
        first, _ = self.said(place)
        branches = [[token] for token in first[: self.plan.num_branches]]
        columns = [[branch * most + 1] for branch in range(len(branches))]
        for level in range(most + 1):
            live = 1 if level == 0 else sum(branch * most + level < room for branch in range(self.plan.num_branches))
            if not live or level > 0 and confidence is not None and self.said(place + level - 1)[1] < np.float32(confidence):
                break
            self.computed_passes += 1
            self.computed_positions += live
            if 0 < level < most:
                for branch, column in zip(branches, columns, strict=True):
                    branch.append(self.said(place + level)[0][0])
                    column.append(column[0] + level)
        if confidence is not None:
            sure = next((j for j in range(most) if self.said(place + j)[1] < np.float32(confidence)), most)
            return [branches[0][: min(sure, room - 1)]]
        return [[token for token, at in zip(branch, column, strict=True) if at < room] for branch, column in zip(branches, columns, strict=True)]

    def draft(self, place: int, room: int) -> tuple[list[list[int]], bool]:
        """Branches, and whether they were looked up."""
        draft, most = self.plan.draft, self.plan.num_draft_tokens
        if draft.kind in ("ngram", "hybrid"):
            found = self.recording.looked_up[draft.ngram or NgramConfig()]
            at = self.at(place)
            tokens = found.tokens[at, : min(int(found.counts[at]), most, room - 1)].tolist()
            if tokens or draft.kind == "ngram":
                self.looked_up += bool(tokens)
                return [tokens], True
            most = draft.num_exit_tokens or most
        return self.computed(place, most, room), False

    def kept(self, place: int, branches: list[list[int]], is_looked_up: bool) -> list[int]:
        """The drafts that the check keeps, of the branch that it goes along."""
        if len(branches) > 1:
            own = self.own(place)[0]
            branches = [branch for branch in branches if branch[:1] == [own]] or [[]]
            if own != self.truth(place):
                return branches[0][:1]
        kept = []
        for step, token in enumerate(branches[0]):
            own, sure = self.own(place + step)
            if place + step >= self.length or token != own and sure:
                break
            kept.append(token)
            if is_looked_up and token != self.truth(place + step):
                break
        return kept

    def round(self, done: int) -> int:
        limit, tentative = min(self.window, self.cap - done), list[int]()
        for _ in range(self.plan.num_checks if self.plan.check else 1):
            place, room = done + len(tentative), limit - len(tentative)
            branches, is_looked_up = self.draft(place, room)
            num_drafts = sum(map(len, branches))
            if self.plan.check is None:
                self.verify_positions += num_drafts + 1
                return 1 + max(self.num_right(place, branch) for branch in branches)
            if num_drafts == 0 and self.plan.num_checks == 1:
                self.unchecked += 1
                self.verify_positions += 1
                return 1
            self.checked += num_drafts + 1
            kept = self.kept(place, branches, is_looked_up)
            tentative += [*kept, self.own(place + len(kept))[0]]
            if len(tentative) >= limit:
                break
        self.verify_positions += len(tentative)
        return min(self.num_right(done, tentative) + 1, len(tentative))

    def num_right(self, place: int, tokens: Sequence[int]) -> int:
        return next((step for step, token in enumerate(tokens) if token != self.truth(place + step)), len(tokens))


def random_recording(seed: int) -> Recording:
    """Answers over ten tokens, of which exits say the right one more often the deeper they lie."""
    generator = random.Random(seed)
    lengths = [generator.randrange(1, 14) for _ in range(6)]
    answers = [Answer([0], [generator.randrange(10) for _ in range(length)], length + generator.choice([0, 0, 5]), "all") for length in lengths]

    def said(share: float) -> Said:
        ranked = []
        for answer in answers:
            for token in answer.token_ids:
                others = generator.sample([other for other in range(10) if other != token], 8)
                place = 0 if generator.random() < share else generator.randrange(1, 8)
                ranked.append([*others[:place], token, *others[place:]][:8])
            ranked.append([-1] * 8)
        return Said(np.array(ranked), np.array([generator.random() for _ in ranked], np.float32))

    truth = flat([answer.token_ids for answer in answers])

    def proposals(at: int) -> list[int]:
        ahead = [int(truth[min(at + step, len(truth) - 1)]) for step in range(6)]
        return [token if generator.random() < 0.7 else generator.randrange(10) for token in ahead]

    counts: Ints = np.array([generator.choice([0, 0, 1, 3, 6]) for _ in truth]) * (truth >= 0)
    found = LookedUp(counts, np.array([proposals(at) for at in range(len(truth))]))
    return Recording(answers, {2: said(0.5), 5: said(0.75)}, {}, {SIZES: found}, said(0.6))


def of_recording() -> list[SpeculativeConfig]:
    drafts: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (exit_(2), {}),
        (exit_(2), {"draft_confidence": 0.4}),
        (exit_(2), {"num_branches": 3}),
        (MODEL, {}),
        (ngram(), {}),
        (hybrid(2, 1), {}),
        (hybrid(2, 2), {"draft_confidence": 0.6}),
    ]
    plans = []
    for draft, fields in drafts:
        for num_drafts in (2, 3):
            plans.append(plan(draft, num_drafts, **fields))
            for num_checks in (1, 3):
                plans += [plan(draft, num_drafts, 5, num_checks, sure=sure, **fields) for sure in ((None,) if "num_branches" in fields else (None, 0.5))]
    return plans


@pytest.mark.parametrize("seed", range(4))
def test_rounds_are_those_of_the_round_written_out(seed: int) -> None:
    recording = random_recording(seed)
    counter = RoundCounter(recording)
    for one in of_recording():
        counted, references = counter.count(one), [Reference(recording, one, answer) for answer in range(len(recording.answers))]
        assert counted.per_answer.tolist() == [reference.rounds for reference in references], short_text(one)
        assert counted.tokens == recording.lengths.sum()

        def total(name: str, references: list[Reference] = references) -> int:
            return sum(getattr(reference, name) for reference in references)

        assert (sum_of(counted.checks), counted.unchecked) == (total("checked"), total("unchecked")), short_text(one)
        assert (int(counted.levels.sum()), sum_of(counted.levels)) == (total("computed_passes"), total("computed_positions")), short_text(one)
        assert int(counted.looked_up.sum()) == total("looked_up") and sum_of(counted.verifies) + counted.unchecked == total("verify_positions"), short_text(one)
