"""What every plan would give: rounds counted over the recorded tokens, times what each of their passes was measured to cost."""
from __future__ import annotations

import heapq
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..config import PLAIN, Plan
from .costs import StageCosts
from .recording import Ints, Recording
from .runs import Step


@dataclass(frozen=True)
class Calibration:
    """What an engine's step takes besides the passes that were measured alone.

    plain_step_ms   median of the engine's plain steps with `rows` rows (None if there was none without a prompt in it)
    plain_parts_ms  what its one pass takes by itself
    host_ms         median of the difference, over all plain steps: scheduling, batches, copies, text
    prefill_s       seconds that the prompts took in all
    """

    rows: int
    plain_step_ms: float | None
    plain_parts_ms: float
    host_ms: float
    prefill_s: float


def calibrate(steps: Sequence[Step], costs: StageCosts, batch_size: int) -> Calibration:
    """From the steps of a plain run over all prompts."""
    decoding = [step for step in steps if step.rows and not step.prefill_tokens]
    full = [1e3 * step.seconds for step in decoding if step.rows == batch_size]
    host_ms = max(0.0, statistics.median(1e3 * step.seconds - costs.plain(step.rows) for step in decoding)) if decoding else 0.0
    prefill_ms = sum(1e3 * step.seconds - (costs.plain(step.rows) + host_ms if step.rows else 0.0) for step in steps if step.prefill_tokens)
    return Calibration(batch_size, statistics.median(full) if full else None, costs.plain(batch_size), host_ms, max(0.0, prefill_ms / 1e3))


@dataclass(frozen=True)
class Rounds:
    """A plan's rounds over all answers: of each (`per_answer`), and in all, in the order in which `walk` counts."""

    per_answer: Ints
    rounds: int
    tokens: int
    draft_passes: int
    fill_passes: int
    checks: int
    check_positions: int
    verify_positions: int

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds


@dataclass(frozen=True)
class Prediction:
    """What a plan is expected to give.

    tokens_per_round      tokens that a row's round adds: exact, under greedy decoding, where rows keep their bits
    tokens_per_full_pass  tokens per as many layers as the model has; a pass over several rows counts once
    verify_positions      positions of a row that verify computes in a round, on average
    round_ms              of a round of a full batch, the engine's own work included
    tokens_per_s          over all prompts, their processing included
    """

    plan: Plan
    tokens_per_round: float
    tokens_per_full_pass: float
    verify_positions: float
    round_ms: float
    tokens_per_s: float
    ratio_to_plain: float

    def as_dict(self) -> dict[str, Any]:
        values = asdict(self)
        return values.pop("plan") | values


class Predictor:
    """Predicts plans for one recording on one machine."""

    def __init__(self, recording: Recording, costs: StageCosts, calibration: Calibration, batch_size: int, num_layers: int) -> None:
        self._recording, self._costs, self._calibration = recording, costs, calibration
        self._batch_size, self._num_layers = batch_size, num_layers
        self._right = {layer: recording.right(tokens) for layer, tokens in recording.said.items()}
        self._same: dict[tuple[int, int], Ints] = {}
        self.plain_tokens_per_s = self._tokens_per_s(PLAIN, self.rounds(PLAIN))

    def rounds(self, plan: Plan) -> Rounds:
        """Counts the rounds of `plan`, row by row."""
        lengths = self._recording.lengths
        if plan.is_plain:
            total = int(lengths.sum())
            return Rounds(lengths, total, total, 0, 0, 0, 0, total)
        same = self._right[plan.draft_layer]
        if plan.check_layer is not None:
            pair = plan.draft_layer, plan.check_layer
            if pair not in self._same:
                said = self._recording.said
                self._same[pair] = self._recording.same(said[plan.draft_layer], said[plan.check_layer])
            same = self._same[pair]
        return count_rounds(self._recording, plan, same, self._right[plan.top_layer])

    def predict(self, plan: Plan) -> Prediction:
        rounds = self.rounds(plan)
        tokens_per_s = self._tokens_per_s(plan, rounds)
        occupancy = _occupancy(rounds.per_answer, self._batch_size)
        return Prediction(
            plan=plan,
            tokens_per_round=rounds.tokens_per_round,
            tokens_per_full_pass=rounds.tokens * self._num_layers / (len(occupancy) * self._layers_per_round(plan, rounds)),
            verify_positions=rounds.verify_positions / rounds.rounds,
            round_ms=self.round_ms(plan, rounds, self._batch_size),
            tokens_per_s=tokens_per_s,
            ratio_to_plain=tokens_per_s / self.plain_tokens_per_s,
        )

    def predict_all(self, plans: Iterable[Plan]) -> list[Prediction]:
        """The fastest first."""
        return sorted(map(self.predict, plans), key=lambda prediction: -prediction.tokens_per_s)

    def round_ms(self, plan: Plan, rounds: Rounds, rows: int) -> float:
        """Milliseconds of a round of `rows` rows, each of which does what a row does on average."""
        costs, host_ms = self._costs, self._calibration.host_ms
        if plan.is_plain:
            return host_ms + costs.plain(rows)
        ms = rounds.draft_passes * costs.draft[plan.draft_layer](rows) + rounds.fill_passes * costs.fill[plan.draft_layer](rows)
        if plan.check_layer is not None:
            ms += rounds.checks * costs.check[plan.draft_layer, plan.check_layer](rows * rounds.check_positions / rounds.checks)
        return host_ms + ms / rounds.rounds + costs.verify[plan.top_layer](rows * rounds.verify_positions / rounds.rounds)

    def _tokens_per_s(self, plan: Plan, rounds: Rounds) -> float:
        steps = np.bincount(_occupancy(rounds.per_answer, self._batch_size))
        decode_ms = sum(int(count) * self.round_ms(plan, rounds, rows) for rows, count in enumerate(steps) if count)
        return rounds.tokens / (self._calibration.prefill_s + decode_ms / 1e3)

    def _layers_per_round(self, plan: Plan, rounds: Rounds) -> float:
        shallow = (rounds.draft_passes + rounds.fill_passes) * plan.draft_layer + rounds.checks * (plan.top_layer - plan.draft_layer)
        return shallow / rounds.rounds + self._num_layers - plan.top_layer


def count_rounds(recording: Recording, plan: Plan, same: Ints, right: Ints) -> Rounds:
    """The rounds of a speculative plan; `same` and `right` as in `walk`.

    What a round commits is exact: its drafts and checks are on the true context up to the first tentative token that is
    wrong, and nothing is committed beyond that. After it, the tiers go on in that round from a wrong token, and what they
    would say there was not recorded. They are taken to agree with each other as they do at those places on the true
    context; only the width of verify depends on that.
    """
    from . import walk  # here: numba

    per_answer, totals = np.zeros(len(recording.answers), np.int64), np.zeros(walk.NUM_TOTALS, np.int64)
    shape = plan.num_draft_tokens, plan.num_checks, plan.check_layer is not None
    walk.walk(recording.starts, recording.lengths, recording.caps, same, right, *shape, per_answer, totals)
    return Rounds(per_answer, *map(int, totals))


def _occupancy(rounds: Ints, batch_size: int) -> Ints:
    """Rows that are live in each step, if answers of so many `rounds` are served in order by `batch_size` rows."""
    free_at = [0] * min(batch_size, len(rounds))
    changes = np.zeros(int(rounds.sum()) + 1, np.int64)
    for count in rounds.tolist():
        start = heapq.heappop(free_at)
        changes[start] += 1
        changes[start + count] -= 1
        heapq.heappush(free_at, start + count)
    return np.cumsum(changes)[: max(free_at)]
