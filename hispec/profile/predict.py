"""What every plan would give, and which promise most: rounds counted over the recorded tokens, times what
their passes cost by the latency model."""

from __future__ import annotations

import copy
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from ..config import EngineConfig, SpeculativeConfig
from ..latency.drift import STEADY, Drift
from ..runner.round_runner import num_together
from ..utils.means import trimmed_mean
from .batches import stretches
from .plans import kind_of, refined, short_text
from .recording import Ints, Recording
from .replay import RoundCounter, Rounds
from .round_cost import PassTimes, RoundCost, round_costs
from .timed_runs import Step

_REFINED = 20  # plans of each kind whose confidences are tried more finely
_PREFILL_TOKENS = EngineConfig().prefill_tokens("cpu")


@dataclass(frozen=True)
class Calibration:
    """What an engine's step takes besides the passes that were measured alone.

    Means are trimmed, and those of the host over steps without prompts.

    plain_step_ms   mean of plain steps of one round with `rows` rows, stage by stage (None if there was none)
    plain_parts_ms  what its one pass takes by itself
    host_ms         what the host adds to a round that goes stage by stage: scheduling, batches, copies, text
    prefill_s       seconds that the prompts took in all
    call_ms, token_ms   what the host adds to a call of several rounds: to each, and for each token of a row
    max_run_ms      milliseconds that rounds run together for; 0.0 = none do
    links           whether those of plans do, too
    max_prefill_tokens   as EngineConfig
    drift           how much longer passes took during those steps than by themselves; times are without it
    prefill_tokens  positions of prompts in a step that computed some, on average
    """

    rows: int
    plain_step_ms: float | None
    plain_parts_ms: float
    host_ms: float
    prefill_s: float
    call_ms: float = 0.0
    token_ms: float = 0.0
    max_run_ms: float = 0.0
    links: bool = False
    max_prefill_tokens: int = _PREFILL_TOKENS
    drift: Drift = STEADY
    prefill_tokens: float = 1.0

    def during(self, drift: Drift) -> Calibration:
        """What is not passes, at another speed of the machine."""
        return replace(
            self,
            **{
                name: getattr(self, name) * float(drift(self.rows))
                for name in ("host_ms", "call_ms", "token_ms")
            },
            prefill_s=self.prefill_s * float(drift(self.prefill_tokens)),
        )

    def num_together(self, plan: SpeculativeConfig | None, parts_ms: float) -> int:
        """Rounds of the plan that run as one call, if the parts of each take so long; 0: they go stage by
        stage."""
        is_call = plan is None or (self.links and _is_compiled(plan))
        if not is_call or self.max_run_ms <= 0.0 or parts_ms <= 0.0:
            return 0
        return num_together(self.max_run_ms, parts_ms + self.token_ms)


def calibrate(
    steps: Sequence[Step],
    times: PassTimes,
    batch_size: int,
    max_run_ms: float = 0.0,
    links: bool = False,
    max_prefill_tokens: int = _PREFILL_TOKENS,
    drift: Drift = STEADY,
) -> Calibration:
    """The calibration by the steps of a plain run over all prompts.

    drift   what passes took while they ran over what they took when `times` were measured: a machine that
            others share may be a third slower for minutes, and that must not count as the engine's own work
    max_run_ms, links, max_prefill_tokens: as Calibration
    """

    def passes_ms(step: Step) -> float:
        """Of a step's rounds, at the speed of the machine that it had."""
        if step.pass_s > 0.0:
            return 1e3 * step.pass_s
        return (
            step.rounds * times.of_pass(["plain"], step.rows) * float(drift(step.rows)) if step.rows else 0.0
        )

    def host_ms(step: Step) -> float:
        """What it took besides, and would have taken when `times` were measured."""
        return (1e3 * step.seconds - passes_ms(step)) / float(drift(step.rows))

    decoding = [step for step in steps if step.rows and not step.prefill_tokens]
    by_stage = [step for step in decoding if not step.is_call]
    of_stages = _mean_or_none(map(host_ms, by_stage))
    call_ms, token_ms = _of_calls([(step.rounds, host_ms(step)) for step in decoding if step.is_call])
    if of_stages is None:  # single calls are what comes next to it
        of_stages = call_ms + token_ms
    prefills = [step for step in steps if step.prefill_tokens]
    prefill_ms = 0.0
    for step in prefills:
        of_round = call_ms + step.rounds * token_ms if step.is_call else of_stages
        besides = passes_ms(step) + of_round * float(drift(step.rows)) if step.rows else 0.0
        prefill_ms += (1e3 * step.seconds - besides) / float(drift(step.prefill_tokens))
    full = [1e3 * step.seconds / float(drift(step.rows)) for step in by_stage if step.rows == batch_size]
    return Calibration(
        batch_size,
        _mean_or_none(full),
        times.of_pass(["plain"], batch_size),
        max(0.0, of_stages),
        max(0.0, prefill_ms / 1e3),
        call_ms,
        token_ms,
        max_run_ms,
        links,
        max_prefill_tokens,
        drift,
        statistics.fmean(step.prefill_tokens for step in prefills) if prefills else 1.0,
    )


def _mean_or_none(values: Iterable[float]) -> float | None:
    found = list(values)
    return trimmed_mean(found) if found else None


def _of_calls(calls: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Milliseconds that the host adds to each call, and for each token of a row, by what it added to calls of
    plain decoding (rounds, milliseconds); 0.0 where there were none."""
    one = _mean_or_none(ms for rounds, ms in calls if rounds == 1)
    several = [(rounds, ms) for rounds, ms in calls if rounds > 1]
    if one is None or not several:
        return max(0.0, one or 0.0), 0.0
    more = trimmed_mean(ms for _, ms in several) - one
    token_ms = min(max(0.0, more / (statistics.fmean(rounds for rounds, _ in several) - 1)), max(0.0, one))
    return max(0.0, one - token_ms), token_ms


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
        self._prompts = np.array([len(answer.prompt_token_ids) - 1 for answer in recording.answers])
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
        runs = self._stretches(rounds)
        steps: Counter[int] = Counter()
        for (rows, num), count in runs.items():
            steps[rows] += num * count
        costs = round_costs(plan, rounds, {*steps, self._batch_size}, self._times, self.num_layers)
        passes_ms = sum(count * costs[rows].ms for rows, count in steps.items())
        host_ms = self._host_ms(plan, rounds, runs, costs)
        share = self._draft_model_share if plan is not None and plan.draft.traits.has_model else 0.0
        seconds = self._calibration.prefill_s * (1.0 + share) + (passes_ms + host_ms) / 1e3
        tokens_per_s = rounds.tokens / seconds
        if self._plain_tokens_per_s is None:
            self._plain_tokens_per_s = tokens_per_s if plan is None else self.predict(None).tokens_per_s
        num, cost = self._batch_size, costs[self._batch_size]
        together = max(1, self._calibration.num_together(plan, cost.ms))
        return Prediction(
            plan=plan,
            tokens_per_round=rounds.tokens_per_round,
            tokens_per_full_pass=rounds.tokens
            * self.num_layers
            / sum(count * costs[rows].layers for rows, count in steps.items()),
            verify_positions=rounds.verify_positions,
            round_ms=cost.ms + self._host_ms(plan, rounds, {(num, together): 1}, {num: cost}) / together,
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

    def _host_ms(
        self,
        plan: SpeculativeConfig | None,
        rounds: Rounds,
        runs: Mapping[tuple[int, int], int],
        costs: Mapping[int, RoundCost],
    ) -> float:
        """What the host adds to `runs`, as `stretches` has them."""
        calibration, ms = self._calibration, 0.0
        for (rows, num), count in runs.items():
            if together := calibration.num_together(plan, costs[rows].ms):
                calls = -(-num // together)
                tokens = num * rounds.tokens_per_round
                ms += count * (calls * calibration.call_ms + tokens * calibration.token_ms)
            else:
                ms += count * num * calibration.host_ms
        return ms

    def _stretches(self, rounds: Rounds) -> Counter[tuple[int, int]]:
        """As `stretches`, if one group after the other is run."""
        found: Counter[tuple[int, int]] = Counter()
        for numbers in self._groups:
            of_group = rounds.per_answer[numbers], self._prompts[numbers]
            found += stretches(*of_group, self._batch_size, self._calibration.max_prefill_tokens)
        return found


def _is_compiled(plan: SpeculativeConfig) -> bool:
    """Whether rounds of the plan have a compiled form, if their rows take the likeliest tokens."""
    return not plan.draft.traits.has_model and plan.num_branches == 1


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
    known = set(plans)  # and in their order, which equal ones keep
    finer = predictor.predict_all(plan for plan in dict.fromkeys(near) if plan not in known)
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


def _are_twins(one: Prediction, other: Prediction) -> bool:
    return replace(one, plan=None) == replace(other, plan=None)


def _first_of_each(
    predictions: Iterable[Prediction], group_of: Callable[[SpeculativeConfig], Hashable], top: int
) -> dict[Hashable, list[Prediction]]:
    """{group: the first `top` of its predictions}, without plain decoding, and without plans that do what one
    before them does: another confidence may change nothing."""
    groups: dict[Hashable, list[Prediction]] = {}
    for prediction in predictions:
        if prediction.plan is not None:
            group = groups.setdefault(group_of(prediction.plan), [])
            if len(group) < top and not any(_are_twins(prediction, each) for each in group):
                group.append(prediction)
    return groups
