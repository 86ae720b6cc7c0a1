"""Gated cycles: a row goes on to another cycle only while its check is sure of its own token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ee_models.decoder import Decoder
from hispec.engine import Engine
from hispec.sampling_params import SamplingParams
from tests.helpers.drafters import ALL, drafter_engine
from tests.helpers.scripted import ScriptedDecoder, true_next

D, C, L, VOCAB, ROUNDS = 2, 5, 9, 50, 6
PROMPTS = [[3], [11], [29], [40]]


def says(exit_layer: int, position: int, token: int) -> tuple[int, float]:
    """What an exit says, and the probability that it gives that: 0.9, or 0.3 or 0.6 where the check is less
    sure. The draft exit and the check are wrong now and then, each in its own places."""
    place = position * 31 + token * 17
    wrong = (exit_layer == D and place % 4 == 1) or (exit_layer == C and place % 7 == 2)
    sure = (0.3, 0.6, 0.9)[place % 3] if exit_layer == C else 0.9
    return (true_next(position, token) + (17 if wrong else 0)) % VOCAB, sure


def script(exit_layer: int, position: int, token: int) -> Tensor:
    chosen, sure = says(exit_layer, position, token)
    probabilities = torch.full((VOCAB,), (1.0 - sure) / (VOCAB - 1))
    probabilities[chosen] = sure
    return probabilities.log()


def simulate(prompt: int, num_drafts: int, num_checks: int, gate: float | None) -> dict[str, int]:
    """What the first rounds of one request do, told from the script alone."""
    text = [prompt]
    sums = dict.fromkeys(("cycles", "drafted", "tentative", "committed", "layer_positions"), 0)
    for _ in range(ROUNDS):
        limit, n = num_checks * (num_drafts + 1), len(text) - 1
        tokens = text[-1:]
        for _ in range(num_checks):
            first = len(tokens) - 1
            drafts = tokens[-1:]
            while len(drafts) <= min(num_drafts, limit - first - 1):
                drafts.append(says(D, n + first + len(drafts) - 1, drafts[-1])[0])
            sums["cycles"] += 1
            sums["drafted"] += len(drafts) - 1
            sums["layer_positions"] += len(drafts) * C
            for at, token in enumerate(drafts):
                own, sure = says(C, n + first + at, token)
                tokens.append(own)
                if drafts[at + 1 : at + 2] != [own]:
                    break
            if len(tokens) - 1 == limit or (gate is not None and sure < gate):
                break
        sums["tentative"] += len(tokens) - 1
        sums["layer_positions"] += (len(tokens) - 1) * (L - C)
        for at in range(len(tokens) - 1):
            own, _ = says(L, n + at, tokens[at])
            text.append(own)
            sums["committed"] += 1
            if own != tokens[at + 1]:
                break
    return sums


def settings(gate: float | None, num_drafts: int, num_checks: int) -> dict[str, Any]:
    return {
        "draft": {"layer": D},
        "check": {"layer": C, "continue_confidence": gate},
        "num_draft_tokens": num_drafts,
        "num_checks": num_checks,
    }


COUNTS = ("cycles", "drafted", "tentative", "committed")
OPTIONS: dict[str, Any] = {"max_num_seqs": 4, "max_run_ms": 0.0}  # a round a step


def first_rounds(engine: Engine) -> dict[str, Any]:
    """Counts of the first rounds, in which all rows take part and none is near its end."""
    for prompt in PROMPTS:
        engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=200))
    while engine.stats()["rounds"] < ROUNDS * len(PROMPTS):
        engine.step()
    return engine.stats()


@pytest.mark.parametrize(("num_drafts", "num_checks"), [(1, 2), (2, 2), (1, 4), (2, 5)])
def test_each_row_stops_at_its_own_unsure_check(num_drafts: int, num_checks: int) -> None:
    """Whatever the other rows of the batch do; and a row that has stopped computes nothing more before
    verify."""
    seen = set()
    for gate in (None, 0.5, 0.7):
        engine = drafter_engine(ScriptedDecoder(script), settings(gate, num_drafts, num_checks))
        stats = first_rounds(engine)
        expected = [simulate(prompt[0], num_drafts, num_checks, gate) for prompt in PROMPTS]
        for name in (*COUNTS, "layer_positions"):
            assert stats[name] == sum(each[name] for each in expected), (gate, name)
        seen.add(stats["tentative"])
    assert len(seen) == 3, "the gate made no difference"


@pytest.mark.parametrize("name", ["ngram gated", "exit gated", "hybrid sure gated", "tree gated"])
def test_rounds_of_static_shape_stop_where_packed_ones_do(tiny_decoder: Decoder, name: str) -> None:
    packed, static = (
        first_rounds(drafter_engine(tiny_decoder, ALL[name], is_static=is_static, **OPTIONS))
        for is_static in (False, True)
    )
    for count in COUNTS:
        assert packed[count] == static[count], count
    most = ALL[name]["num_checks"] * packed["rounds"]
    assert packed["rounds"] < packed["cycles"] < most, "the gate made no difference"


@pytest.mark.parametrize("is_static", [False, True])
def test_cycles_that_no_row_takes_are_not_run(tiny_decoder: Decoder, is_static: bool) -> None:
    """No check is ever so sure: the first cycle is the only one."""
    passes = set()
    for gate, num_checks in ((None, 1), (0.9999, 4)):
        values = settings(gate, 2, num_checks)
        engine = drafter_engine(tiny_decoder, values, is_static=is_static, stage_graphs=True, **OPTIONS)
        stats = first_rounds(engine)
        assert stats["cycles"] == stats["rounds"]
        passes.add(stats["layer_passes"] / stats["steps"])
    assert len(passes) == 1
