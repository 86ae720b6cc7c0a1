"""What a profile says of its exits and of the plans that it ran, in plain types."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..jobs.bench_runs import Runs, num_matches
from ..jobs.confidence_interval import noise_of_repeats
from ..jobs.rates import plan_text
from .candidates import Candidates
from .plans import kind_of, short_text
from .predict import Prediction
from .recording import Recording, Said


def agreement(recording: Recording, candidates: Candidates, max_drafts: int) -> dict[str, Any]:
    """How often each candidate says the answer's token, the model's own head after every layer, prompt lookup
    by its sizes, and the draft model (None without one).

    full_model    how much of the answers the pass itself gives
    first_right   [j - 1]: how often the first j drafts are all right, of prompt lookup where it proposes as
                  many
    """
    tasks = recording.tasks()

    def shares(tokens: Any) -> dict[str, Any]:
        return {
            "agreement": recording.agreement(tokens),
            "tasks": {task: recording.agreement(tokens, task) for task in tasks},
        }

    def drafts(said: Said) -> dict[str, Any]:
        return shares(said.tokens) | {
            "first_right": recording.first_right(recording.right(said.tokens), max_drafts)
        }

    *own, full = recording.own.items()
    ngrams = [
        {
            **sizes.model_dump(),
            "found": recording.found(found),
            "tasks": {task: recording.found(found, task) for task in tasks},
            "first_right": recording.first_right(
                recording.right_looked_up(found), found.tokens.shape[1], found.counts
            ),
        }
        for sizes, found in recording.looked_up.items()
    ]
    return {
        "positions": int(recording.lengths.sum()),
        "tasks": {task: int(recording.places(task).sum()) for task in tasks},
        "exits": [
            {"kind": candidates.tiers.kind, "layer": layer, **drafts(said)}
            for layer, said in recording.exits.items()
        ],
        "own_head": [{"layer": layer, **shares(tokens)} for layer, tokens in own],
        "full_model": recording.agreement(full[1]),
        "ngrams": ngrams,
        "draft_model": None if recording.model is None else drafts(recording.model),
    }


def measured_plans(
    chosen: Sequence[Prediction], runs: Sequence[Runs], num_layers: int
) -> list[dict[str, Any]]:
    """What was predicted of each plan that was run, and what came out; the first is plain decoding."""
    plain, noise = runs[0], noise_of_repeats([run.tokens_per_s() for run in runs])
    return [
        _measured(prediction, run, plain, noise, num_layers)
        for prediction, run in zip(chosen, runs, strict=True)
    ]


def _measured(
    prediction: Prediction, run: Runs, plain: Runs, noise: float | None, num_layers: int
) -> dict[str, Any]:
    """An entry of `measured`.

    ratio_interval   [low, high] of its speed over plain decoding's, 95 % by the noise of the repeats: what
                     other prompts would give is not in it; None for plain decoding, or a single repeat
    difference       of measured and predicted figures, as a share of the prediction
    """
    plan, stats = prediction.plan, run.stats
    ratios = {group.task: _speed(run, group.task) / _speed(plain, group.task) for group in run.groups}
    ratio = _speed(run) / _speed(plain)
    # Tokens beyond an output's end, those of prompts, and a draft model's layers are left out.
    passes = (stats["layer_passes"] - stats["prefill_layer_passes"]) / stats["num_layers"]
    counted = {
        "tokens_per_round": stats["tokens"] / stats["rounds"],
        "tokens_per_full_pass": stats["tokens"] / passes,
    }
    return {
        "kind": "plain" if plan is None else kind_of(plan),
        "plan": short_text(plan),
        "plan_text": plan_text(plan, num_layers),
        "speculative": plan.model_dump() if plan else None,
        "tokens_per_s": _speed(run),
        "tokens_per_s_runs": run.tokens_per_s(),
        "seconds_runs": [sum(seconds) for seconds in run.seconds],
        **counted,
        "ratio_to_plain": ratio,
        "ratio_interval": None if run is plain or noise is None else [ratio / noise, ratio * noise],
        "ratio_by_task": {**ratios, "mean": statistics.fmean(ratios.values())} if len(ratios) > 1 else {},
        "exact_match": num_matches(run, plain),
        "predicted": prediction.as_dict(),
        "difference": {name: value / getattr(prediction, name) - 1.0 for name, value in counted.items()},
    }


def _speed(run: Runs, task: str | None = None) -> float:
    """Tokens per second, the geometric mean of the runs, as their noise is measured (`noise_of_repeats`)."""
    return statistics.geometric_mean(run.tokens_per_s(task))


def choose(measured: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], str]:
    """The plan to take of those that were run, the first of them plain decoding; and why.

    It is the simplest that the repeats don't tell apart from the fastest: plain decoding before all others,
    then fewer tiers, then a smaller window. A plan whose rounds commit one token each is plain decoding with
    more work, and not looked at.
    """
    plain, *others = measured
    gaining = [run for run in others if run["tokens_per_round"] > 1.0]
    if not gaining:
        return plain, "plain decoding, since no other plan that was run gained a token"
    noise = noise_of_repeats([run["tokens_per_s_runs"] for run in measured])
    speeds = [run["tokens_per_s"] for run in (plain, *gaining)]
    near = [
        (_size(run), -speed, run)
        for run, speed in zip((plain, *gaining), speeds, strict=True)
        if max(speeds) / speed <= (noise or 1.0)
    ]
    chosen = min(near, key=lambda each: each[:2])[2]
    fastest = min(near, key=lambda each: each[1])[2]
    of = "" if len(gaining) == len(others) else " of plain decoding and the plans that gain a token"
    if noise is None:
        return (
            chosen,
            f"the fastest{of} by a single run of each, which does not tell noise: give --repeats 3 or more",
        )
    text = f"the noise of the repeats ({noise - 1:.1%})"
    if len(near) == 1:
        return chosen, f"the fastest{of} by more than {text}"
    reason = f"the simplest of {len(near)} that are within {text} of the fastest{of}"
    return chosen, reason if chosen is fastest else f"{reason}, {fastest['plan_text']}"


def _size(run: Mapping[str, Any]) -> tuple[int, int]:
    """Tiers and window of a plan that was run: what makes it less simple than another."""
    plan = run["speculative"]
    if plan is None:
        return 1, 1
    num_checks = 1 if plan["check"] is None else plan["num_checks"]
    window = num_checks * (plan["num_branches"] * plan["num_draft_tokens"] + 1)
    return (2 if plan["check"] is None else 3), window


def fastest_of_kinds(measured: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """{kind: the fastest of its plans that were run}, plain decoding included, in the order of `measured`."""
    fastest: dict[str, Mapping[str, Any]] = {}
    for run in measured:
        if run["kind"] not in fastest or run["tokens_per_s"] > fastest[run["kind"]]["tokens_per_s"]:
            fastest[run["kind"]] = run
    return fastest


def best_of_kind(measured: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """{kind: what `hispec bench --profile` needs of its fastest plan}, without plain decoding."""
    names = ("plan_text", "speculative", "tokens_per_s", "ratio_to_plain", "ratio_by_task")
    return {
        kind: {name: run[name] for name in names}
        for kind, run in fastest_of_kinds(measured).items()
        if run["speculative"] is not None
    }
