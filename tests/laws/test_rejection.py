"""Law 2, `rejection`: the output law is the full model's, by exact enumeration on a tiny vocabulary, through
both levels.

For one round from any prefix: complete what it committed by the full model's own law; the result must be the
full model's law of the next `window` tokens. By induction over rounds, that is the law of the whole output.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import hispec.decoding.acceptance
import hispec.decoding.round
import hispec.sampling.sampler
from cache.hidden import HiddenBuffer
from cache.paged_kv import PagedKV
from ee_models.decoder import Decoder
from hispec.config import EngineConfig, NgramConfig, Plan, SpeculativeConfig
from hispec.decoding.acceptance import RejectionJudge, Verdict
from hispec.decoding.batch import RoundBatch
from hispec.decoding.round import run_round
from hispec.decoding.row_steps import Notes, end_check
from hispec.decoding.stages import PassCounts, Stages
from hispec.drafters.autoregressive import ExitHead
from hispec.drafters.hybrid import HybridDrafter
from hispec.drafters.ngram import NgramDrafter
from hispec.engine import Engine
from hispec.sampling.inputs import RowSampling
from hispec.sampling.sampler import Sampler
from hispec.sampling_params import SamplingParams
from tests.helpers.drafters import FixedDrafter
from tests.helpers.scripted import ScriptedDecoder
from tests.helpers.support import exit_drafter
from tests.helpers.sweeps import sweep

VOCAB, LAYERS, FIRST = 3, 4, 1
PLANS = [
    Plan(),
    Plan(1, None, 1, 1),
    Plan(1, None, 2, 1),
    Plan(1, 2, 1, 1),
    Plan(1, 3, 2, 1),
    Plan(1, 2, 1, 2),
]


class Paths:
    """Walks every path of random outcomes of a function: each draw takes the next branch not yet seen."""

    def __init__(self) -> None:
        self._path: list[tuple[int, int]] = []
        self._depth = 0
        self.weight = 1.0

    def take(self, probabilities: Sequence[float]) -> int:
        outcomes = [index for index, probability in enumerate(probabilities) if probability > 0]
        if self._depth == len(self._path):
            self._path.append((0, len(outcomes)))
        outcome = outcomes[self._path[self._depth][0]]
        self._depth += 1
        self.weight *= probabilities[outcome]
        return outcome

    def all(self, function: Callable[[], tuple[int, ...]]) -> dict[tuple[int, ...], float]:
        law: dict[tuple[int, ...], float] = {}
        while True:
            self._depth, self.weight = 0, 1.0
            result = function()
            law[result] = law.get(result, 0.0) + self.weight
            while self._path and self._path[-1][0] + 1 == self._path[-1][1]:
                self._path.pop()
            if not self._path:
                return law
            branch, count = self._path[-1]
            self._path[-1] = branch + 1, count


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> Paths:
    """Replaces every random draw of a one-row round by a branch, weighted with its probability."""
    paths = Paths()

    def draw(logits: Tensor, key: Tensor) -> Tensor:
        return torch.tensor([paths.take(row.double().softmax(-1).tolist()) for row in logits])

    rejection = hispec.decoding.acceptance.rejection

    def branching(
        p: Tensor, q: Tensor, proposed: Tensor, num_proposed: Tensor, uniform: Tensor, keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        uniform = torch.full_like(uniform, 0.5)
        for place in range(int(num_proposed[0])):
            token = int(proposed[0, place])
            threshold = min(1.0, float(p[0, place, token]) / float(q[0, place, token]))
            accepted = paths.take([threshold, 1.0 - threshold]) == 0
            uniform[0, place] = threshold / 2 if accepted else (1.0 + threshold) / 2
            if not accepted:
                break
        return rejection(p, q, proposed, num_proposed, uniform, keys)

    monkeypatch.setattr(hispec.decoding.acceptance, "draw", draw)
    monkeypatch.setattr(hispec.sampling.sampler, "draw", draw)
    monkeypatch.setattr(hispec.decoding.acceptance, "rejection", branching)
    return paths


def lookup(row: int, column: int) -> list[int]:
    """Stands for prompt lookup itself, which looks for itself."""
    return []


def ngram_drafter() -> NgramDrafter:
    """Finds something after any token."""
    config = NgramConfig(max_size=2, min_size=1, match_confidence=None)
    drafter = NgramDrafter(config, 1, 32, torch.device("cpu"))
    drafter.follow([(0, [0, 0, 2, 1, 0, 1, 2, 0, FIRST])])
    return drafter


# What a looked-up draft may be, by the column that it follows: none, one, or more than the round has room
# for.
LOOKED_UP: dict[str, Callable[[int, int], list[int]]] = {
    "always": lambda row, column: [2, 0, 1],
    "at first": lambda row, column: [1, 1] if column == 0 else [],
    "later": lambda row, column: [] if column == 0 else [0, 2],
    "lookup": lookup,
}
OF_LOOKED_UP = [
    Plan(0, None, 2, 1),
    Plan(0, 2, 1, 1),
    Plan(0, 2, 2, 1),
    Plan(0, 2, 1, 2),
    Plan(1, None, 2, 1),
    Plan(1, 2, 1, 2),
]


def one_round(
    decoder: ScriptedDecoder,
    plan: Plan,
    limit: int,
    looked_up: Callable[[int, int], list[int]] | None = None,
    confidence: float | None = None,
    gate: float | None = None,
) -> tuple[int, ...]:
    kv = PagedKV(LAYERS, 4, 4, 1, 2, torch.float32, torch.device("cpu"))
    stages = Stages(
        decoder,
        LAYERS,
        kv,
        HiddenBuffer(2, 1, plan.window, 3, torch.float32, torch.device("cpu")),
        PassCounts(),
    )
    judge = RejectionJudge(1, plan.window, VOCAB, torch.device("cpu"), plan.check_layer is not None)
    tokens = torch.zeros(1, plan.window + 1, dtype=torch.int64)
    tokens[0, 0] = FIRST
    sampler = Sampler(
        [RowSampling(SamplingParams(temperature=1.0), 0, [FIRST], [], frozenset())],
        VOCAB,
        torch.device("cpu"),
    )
    batch = RoundBatch(
        tokens,
        torch.tensor([0]),
        torch.tensor([limit]),
        torch.tensor([plan.num_draft_tokens]),
        torch.tensor([plan.num_checks]),
        torch.tensor([[2, 0, 1, 3]]),
        4,
        16,
        sampler,
    )
    drafter: Any = exit_drafter(stages, plan, judge, confidence)
    if looked_up is not None:
        drafter = FixedDrafter(looked_up) if looked_up is not lookup else ngram_drafter()
        if plan.draft_layer:
            drafter = HybridDrafter(
                drafter, exit_drafter(stages, plan, judge), ExitHead(stages, plan.draft_layer)
            )
    result = run_round(stages, plan, judge, drafter, batch, gate)
    return tuple(result.tokens[0, 1 : 1 + int(result.counts[0])].tolist())


@sweep(
    "plan", OF_LOOKED_UP, [Plan(0, None, 2, 1), Plan(0, 2, 1, 2), Plan(1, None, 2, 1)].__contains__, ids=str
)
def test_one_round_with_looked_up_drafts_continues_the_full_models_law(paths: Paths, plan: Plan) -> None:
    """Drafts without probabilities, alone (D = 0) and where an exit drafts when there are none."""
    for looked_up in LOOKED_UP.values():
        assert_law(paths, plan, 0, looked_up)


@sweep("confidence, most", [(0.5, 1), (0.5, 2), (0.7, 2)], (0.5, 1).__eq__)
def test_one_round_that_stops_drafting_continues_the_full_models_law(
    paths: Paths, confidence: float, most: int
) -> None:
    """Where drafting stops depends on the drafter's distribution, and not on what was drawn from it."""
    plans = [Plan(1, None, 2, 1), Plan(1, 2, 1, 1), Plan(1, 2, 2, 1), Plan(1, 3, 2, 1), Plan(1, 2, 1, 2)]
    for plan in plans if most == 2 else plans[:3]:
        assert_law(paths, plan, 0, confidence=confidence)


@sweep("gate, check_layers", [(0.5, (3,)), (0.5, (2, 3)), (0.7, (2, 3))], (0.5, (3,)).__eq__)
def test_one_round_of_gated_cycles_continues_the_full_models_law(
    paths: Paths, gate: float, check_layers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether another cycle follows depends on the check's distribution at the place of its own token. Where
    a row stops the own token is kept, and judged like any other."""
    stopped: list[bool] = []

    def spy(batch: RoundBatch, first: Tensor, verdict: Verdict, notes: Notes, cycle: int) -> Tensor:
        assert verdict.goes_on is not None
        stopped.append(not verdict.goes_on.all())
        return end_check(batch, first, verdict, notes, cycle)

    monkeypatch.setattr(hispec.decoding.round, "end_check", spy)
    for check_layer in check_layers:
        assert_law(paths, Plan(1, check_layer, 1, 2), 1, gate=gate)
    assert_law(paths, Plan(0, 2, 1, 2), 1, LOOKED_UP["always"], gate=gate)
    assert set(stopped) == {False, True}


@sweep(
    "seed, plan",
    itertools.product([0, 1], PLANS),
    lambda case: case[0] == 0 and case[1] != PLANS[-1],
    ids=str,
)
def test_one_round_continues_the_full_models_law(paths: Paths, plan: Plan, seed: int) -> None:
    assert_law(paths, plan, seed)


def assert_law(
    paths: Paths,
    plan: Plan,
    seed: int,
    looked_up: Callable[[int, int], list[int]] | None = None,
    confidence: float | None = None,
    gate: float | None = None,
) -> None:
    limits = {plan.window, max(1, plan.window - 1)}
    table = torch.randn(LAYERS + 1, 16, VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5
    decoder = ScriptedDecoder(
        lambda exit_layer, position, token: table[exit_layer, position, token], LAYERS, VOCAB
    )

    def full_law(position: int, token: int) -> list[float]:
        return table[LAYERS, position, token].double().softmax(-1).tolist()

    for limit in limits:
        law = paths.all(lambda limit=limit: one_round(decoder, plan, limit, looked_up, confidence, gate))
        assert sum(law.values()) == pytest.approx(1.0, abs=1e-5)
        if not plan.is_plain and limit > 1 and looked_up is None and confidence is gate is None:
            assert max(map(len, law)) == limit and min(map(len, law)) == 1, "some outcomes were never reached"
        for sequence in itertools.product(range(VOCAB), repeat=limit):
            wanted, continuation = 1.0, [1.0] * (limit + 1)
            previous = (FIRST, *sequence)
            steps = [full_law(position, previous[position])[sequence[position]] for position in range(limit)]
            for place in range(limit - 1, -1, -1):
                continuation[place] = continuation[place + 1] * steps[place]
            wanted = continuation[0]
            got = sum(
                weight * continuation[len(committed)]
                for committed, weight in law.items()
                if sequence[: len(committed)] == committed
            )
            assert got == pytest.approx(wanted, rel=1e-4, abs=1e-7), (limit, sequence)


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize(
    "sizes", [{"datastore_tokens": 1024}, {"learn_tokens": 8192, "guess_confidence": 0.2}, {}]
)
def test_no_draft_is_judged_by_the_noise_that_decided_it(
    tiny_decoder: Decoder, acceptance: str, sizes: dict[str, Any]
) -> None:
    """Outputs of requests that have ended are drafts of others: with the same seed, a token at the same
    position would be judged by the very numbers that it was drawn with. For `coupled` that is the point."""
    config = SpeculativeConfig(draft={"kind": "ngram", "ngram": sizes}, acceptance=acceptance)
    engine = Engine(tiny_decoder, EngineConfig(max_num_seqs=2, max_model_len=64, num_kv_blocks=32), config)
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=4)
    for _ in range(2):
        engine.add_request([3, 4, 5], params)
    seeds = [request.seed for request in engine._loop.requests.values()]
    keeps_apart = acceptance == "rejection" and bool(sizes)
    assert (len({*seeds}) == 2 and 5 not in seeds) if keeps_apart else seeds == [5, 5]
