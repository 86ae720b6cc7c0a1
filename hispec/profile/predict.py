"""What every plan would give, and which promise most: rounds counted over the recorded tokens, times what
their passes cost by the latency model."""

from __future__ import annotations

import copy
import heapq
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..config import SpeculativeConfig
from ..latency.drift import STEADY, Drift
from ..runner.round_runner import num_together
from ..utils.means import trimmed_mean
from .plans import kind_of, refined, short_text
from .recording import Ints, Recording
from .replay import RoundCounter, Rounds
from .round_cost import PassTimes, RoundCost, round_costs
from .timed_runs import Step

_REFINED = 20  # plans of each kind whose confidences are tried more finely


@dataclass(frozen=True)
class Calibration:
    """What an engine's step takes besides the passes that were measured alone.

    plain_step_ms   mean of the engine's plain steps with `rows` rows (None if there was none without a prompt
                    in it)
    plain_parts_ms  what its one pass takes by itself
    host_ms         mean of the difference, over all plain steps: scheduling, batches, copies, text
    prefill_s       seconds that the prompts took in all
    max_run_ms      as EngineConfig: rounds that run together share the host's work
    links           whether those of plans run together, too, as one call
    drift           how much longer passes took during those steps than by themselves; times are without it
    prefill_tokens  positions of prompts in a step that computed some, on average
    """

    rows: int
    plain_step_ms: float | None
    plain_parts_ms: float
    host_ms: float
    prefill_s: float
    max_run_ms: float = 0.0
    links: bool = False
    drift: Drift = STEADY
    prefill_tokens: float = 1.0

    def during(self, drift: Drift) -> Calibration:
        """What is not passes, at another speed of the machine."""
        return replace(
            self,
            host_ms=self.host_ms * float(drift(self.rows)),
            prefill_s=self.prefill_s * float(drift(self.prefill_tokens)),
        )

    def host_ms_of(self, plan: SpeculativeConfig | None, parts_ms: float) -> float:
        """The host's share of a round of the plan whose parts take so long."""
        if parts_ms <= 0.0 or not (plan is None or (self.links and _is_compiled(plan))):
            return self.host_ms
        return self.host_ms / num_together(self.max_run_ms, parts_ms)


def calibrate(
    steps: Sequence[Step],
    times: PassTimes,
    batch_size: int,
    max_run_ms: float = 0.0,
    links: bool = False,
    drift: Drift = STEADY,
) -> Calibration:
    """The calibration by the steps of a plain run over all prompts, in which no rounds ran together.

    drift   what passes took while they ran over what they took when `times` were measured: a machine that
            others share may be a third slower for minutes, and that must not count as the engine's own work
    max_run_ms, links: as Calibration
    """
    steps = [
        replace(step, seconds=step.seconds / float(drift(step.rows + step.prefill_tokens))) for step in steps
    ]
    plain = partial(times.of_pass, ["plain"])
    decoding = [step for step in steps if step.rows and not step.prefill_tokens]
    full = [1e3 * step.seconds for step in decoding if step.rows == batch_size]
    host_ms = (
        max(0.0, trimmed_mean(1e3 * step.seconds - plain(step.rows) for step in decoding))
        if decoding
        else 0.0
    )
    prefills = [step for step in steps if step.prefill_tokens]
    prefill_ms = sum(
        1e3 * step.seconds - (plain(step.rows) + host_ms if step.rows else 0.0) for step in prefills
    )
    return Calibration(
        batch_size,
        trimmed_mean(full) if full else None,
        plain(batch_size),
        host_ms,
        max(0.0, prefill_ms / 1e3),
        max_run_ms,
        links,
        drift,
        statistics.fmean(step.prefill_tokens for step in prefills) if prefills else 1.0,
    )


@dataclass(frozen=True)
class Prediction:
    """What a plan (None: plain decoding) is expected to give.

    tokens_per_round      tokens that a row's round adds: exact, under greedy decoding, where rows keep their
                          bits
    tokens_per_full_pass  tokens per as many layers as the model has; a pass over several rows counts once.
                          Prompts are left out, and so are a draft model's own layers
    verify_positions      positions of a row that verify computes in a round, on average
    round_ms              of a round of a full batch, the engine's own work included
    tokens_per_s          over all prompts, their processing included
    """

    plan: SpeculativeConfig | None
    tokens_per_round: float
    tokens_per_full_pass: float
    verify_positions: float
    round_ms: float
    tokens_per_s: float
    ratio_to_plain: float

    def as_dict(self) -> dict[str, Any]:
        """The figures in plain types, with the plan's kind, text, layers and sizes."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "plan"}
        if self.plan is None:
            return {"kind": "plain", **values}
        draft, check = self.plan.draft, self.plan.check
        return {
            "kind": kind_of(self.plan),
            "plan": short_text(self.plan),
            "draft_layer": draft.layer,
            "check_layer": check.layer if check is not None else None,
            "num_draft_tokens": self.plan.num_draft_tokens,
            "num_checks": self.plan.num_checks if check is not None else 1,
            **values,
        }


class AnswerRounds(NamedTuple):
    """What the rounds of one answer give and take, if it is served alone: its passes, without the engine's
    own work."""

    tokens: int
    rounds: int
    ms: float
    layers: float


class Predictor:
    """Predicts plans for one recording on one machine.

    groups              numbers of the answers that are served together, one group after the other; None =
                        those of a task
    draft_model_share   what a draft model adds to the processing of prompts, as a share of the model's own
    """

    def __init__(
        self,
        recording: Recording,
        times: PassTimes,
        calibration: Calibration,
        batch_size: int,
        num_layers: int,
        draft_model_share: float = 0.0,
        groups: Sequence[Ints] | None = None,
    ) -> None:
        self._counter, self._num_answers = RoundCounter(recording), len(recording.answers)
        self._groups = recording.groups() if groups is None else groups
        self._times, self._calibration = times, calibration
        self._batch_size, self.num_layers = batch_size, num_layers
        self._draft_model_share = draft_model_share
        self._plain_tokens_per_s: float | None = None

    def during(self, drift: Drift) -> Predictor:
        """The same at another speed of the machine than that of its times."""
        other = copy.copy(self)
        other._times, other._calibration = self._times.during(drift), self._calibration.during(drift)
        other._plain_tokens_per_s = None
        return other

    def predict(self, plan: SpeculativeConfig | None) -> Prediction:
        rounds = self._counter.count(plan)
        steps = self._steps(rounds)
        costs = round_costs(plan, rounds, {*steps, self._batch_size}, self._times, self.num_layers)
        tokens_per_s = rounds.tokens / self._seconds(plan, steps, costs)
        if self._plain_tokens_per_s is None:
            self._plain_tokens_per_s = tokens_per_s if plan is None else self.predict(None).tokens_per_s
        return Prediction(
            plan=plan,
            tokens_per_round=rounds.tokens_per_round,
            tokens_per_full_pass=rounds.tokens
            * self.num_layers
            / sum(count * costs[rows].layers for rows, count in steps.items()),
            verify_positions=rounds.verify_positions,
            round_ms=self._round_ms(plan, costs[self._batch_size]),
            tokens_per_s=tokens_per_s,
            ratio_to_plain=tokens_per_s / self._plain_tokens_per_s,
        )

    def by_answer(self, plan: SpeculativeConfig | None) -> list[AnswerRounds]:
        """The rounds of each answer alone; in all they are those that `predict` has at batch size 1."""
        found = []
        for answer in range(self._num_answers):
            rounds = self._counter.count(plan, answer)
            cost = round_costs(plan, rounds, [1], self._times, self.num_layers)[1]
            found.append(
                AnswerRounds(
                    rounds.tokens, rounds.rounds, rounds.rounds * cost.ms, rounds.rounds * cost.layers
                )
            )
        return found

    def predict_all(self, plans: Iterable[SpeculativeConfig]) -> list[Prediction]:
        """Predictions of all plans, the fastest first."""
        return sorted(map(self.predict, plans), key=lambda prediction: -prediction.tokens_per_s)

    def _seconds(
        self, plan: SpeculativeConfig | None, steps: Mapping[int, int], costs: Mapping[int, RoundCost]
    ) -> float:
        """Seconds that all prompts and answers take."""
        share = self._draft_model_share if plan is not None and plan.draft.traits.has_model else 0.0
        decode_ms = sum(count * self._round_ms(plan, costs[rows]) for rows, count in steps.items())
        return self._calibration.prefill_s * (1.0 + share) + decode_ms / 1e3

    def _round_ms(self, plan: SpeculativeConfig | None, cost: RoundCost) -> float:
        return self._calibration.host_ms_of(plan, cost.ms) + cost.ms

    def _steps(self, rounds: Rounds) -> dict[int, int]:
        """{rows: steps with so many live rows}, if one task after the other is run."""
        live = np.concatenate(
            [_occupancy(rounds.per_answer[numbers], self._batch_size) for numbers in self._groups]
        )
        return {rows: count for rows, count in enumerate(np.bincount(live).tolist()) if count}


def _is_compiled(plan: SpeculativeConfig) -> bool:
    """Whether rounds of the plan have a compiled form, if their rows take the likeliest tokens."""
    return not plan.draft.traits.has_model and plan.num_branches == 1


def _occupancy(rounds: Ints, batch_size: int) -> Ints:
    """Rows that are live in each step, if answers of so many `rounds` are served in order by `batch_size`
    rows."""
    free_at = [0] * min(batch_size, len(rounds))
    changes = np.zeros(int(rounds.sum()) + 1, np.int64)
    for count in rounds.tolist():
        start = heapq.heappop(free_at)
        changes[start] += 1
        changes[start + count] -= 1
        heapq.heappush(free_at, start + count)
    return np.cumsum(changes)[: max(free_at)]


def search(predictor: Predictor, plans: Sequence[SpeculativeConfig]) -> tuple[list[Prediction], int]:
    """Predictions of all `plans`, and then of finer ones around the best of each kind, the fastest first; and
    how many these are."""
    found = predictor.predict_all(plans)
    near = [
        plan
        for prediction in best_of_each_kind(found, _REFINED)
        if prediction.plan is not None
        for plan in refined(prediction.plan)
    ]
    finer = predictor.predict_all(dict.fromkeys(near).keys() - set(plans))
    found = sorted(found + finer, key=lambda prediction: -prediction.tokens_per_s)
    return found, len(found)


def best_of_each_kind(predictions: Iterable[Prediction], top: int) -> list[Prediction]:
    """The first `top` of each kind, kind by kind in the order of their best; `predictions` has the fastest
    first."""
    kinds = _first_of_each(predictions, kind_of, top)
    return [prediction for of_kind in kinds.values() for prediction in of_kind]


def best_by_layers(predictions: Iterable[Prediction], top: int = 5) -> list[Prediction]:
    """The first `top` of each kind at each pair of layers, the fastest first: the whole search would make a
    file of many megabytes."""

    def kind_and_layers(plan: SpeculativeConfig) -> Hashable:
        return kind_of(plan), plan.draft.layer, plan.check.layer if plan.check else None

    groups = _first_of_each(predictions, kind_and_layers, top).values()
    return sorted((each for group in groups for each in group), key=lambda each: -each.tokens_per_s)


def _first_of_each(
    predictions: Iterable[Prediction], group_of: Callable[[SpeculativeConfig], Hashable], top: int
) -> dict[Hashable, list[Prediction]]:
    """{group: the first `top` of its predictions}, without plain decoding."""
    groups: dict[Hashable, list[Prediction]] = {}
    for prediction in predictions:
        if prediction.plan is not None:
            group = groups.setdefault(group_of(prediction.plan), [])
            if len(group) < top:
                group.append(prediction)
    return groups
