"""What must be right before any time means anything: replays against eager rounds, speculative against plain
output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.gpu_parts.engines import (
    CheckedGraphs,
    Decoded,
    TokenIds,
    decode,
    graph_device,
    grouped,
    make_engine,
    speed,
)
from benchmarks.gpu_parts.run import Bench
from benchmarks.gpu_parts.subjects import Loaded, Subject, Texts, found_subject, loaded, texts_of
from hispec.config import CheckConfig, DraftConfig, NgramConfig, SpeculativeConfig
from hispec.jobs.rates import plan_text
from hispec.outputs import TokenLogprobs

NEAR_TIE = 0.5  # of logits that bfloat16 holds in steps of 0.06 to 0.125, after some hundred roundings
_NUM_TOP = 4
LOOKUP = NgramConfig(max_size=3, min_size=1, match_confidence=None)


@dataclass(frozen=True)
class Sizes:
    length: int
    tokens: int
    rows: int  # that run together
    mixes: tuple[int, ...]  # rows whose captures are compared


def plans_for(subject: Subject) -> dict[str, SpeculativeConfig]:
    """One of every kind of round; those with a check are three-tier."""
    low, middle, high = subject.layers
    draft = DraftConfig(kind=subject.exit_kind, layer=low)
    check, late = (CheckConfig(kind=subject.exit_kind, layer=layer) for layer in (middle, high))
    hybrid = DraftConfig(kind="hybrid", layer=low, ngram=LOOKUP, exit=subject.exit_kind, num_exit_tokens=2)
    ngram = DraftConfig(kind="ngram", ngram=LOOKUP)
    return {
        "exits, two tiers": SpeculativeConfig(draft=draft, num_draft_tokens=2),
        "exits, three tiers": SpeculativeConfig(draft=draft, check=late, num_draft_tokens=2, num_checks=2),
        "tree, three tiers": SpeculativeConfig(
            draft=draft, check=middle_of(check), num_draft_tokens=1, num_checks=1, num_branches=4
        ),
        "n-grams, three tiers": SpeculativeConfig(
            draft=ngram, check=middle_of(check), num_draft_tokens=4, num_checks=2
        ),
        "hybrid, three tiers": SpeculativeConfig(draft=hybrid, check=late, num_draft_tokens=4, num_checks=2),
        "hybrid, sure of its drafts": SpeculativeConfig(
            draft=hybrid, num_draft_tokens=4, draft_confidence=0.2
        ),
    }


def middle_of(check: CheckConfig) -> CheckConfig:
    """Overrules only where it is sure."""
    return check.model_copy(update={"confidence": 0.9})


def run(bench: Bench, out: dict[str, Any]) -> None:
    sizes = Sizes(96, 10, 4, (1, 3)) if bench.is_tiny else Sizes(512, 64, 8, (1, 3, 8))
    with found_subject(bench) as subject:
        out["model"] = subject.label
        with loaded(bench, subject, "bfloat16", sizes.length) as model:
            texts = texts_of(bench, model, sizes.length // 2)
            out["prompts"] = texts.label
            out["plans"] = {
                name: plan_text(plan, model.decoder.config.num_layers)
                for name, plan in plans_for(subject).items()
            }
            # Without it no other figure means anything.
            bench.step(out, "replay equals eager", 40, partial(_replays, bench, model, texts, sizes))
            bench.step(out, "bf16 against plain", 20, partial(_near_ties, bench, model, texts, sizes))
            ordinary = bench.step(out, "speed", 10, partial(_speeds, model, texts, sizes, exact=False))
        with loaded(bench, subject, "float32", sizes.length) as model:
            bench.step(out, "fp32 equals plain", 20, partial(_exact, bench, model, texts, sizes))
        bench.step(out, "exact_verify", 30, partial(_exact_verify, bench, subject, texts, sizes, ordinary))


def _all(
    model: Loaded,
    plan: SpeculativeConfig | None,
    texts: Texts,
    sizes: Sizes,
    logprobs: int | None = None,
    exact: bool = False,
) -> list[Decoded]:
    engine = make_engine(
        model.decoder, plan, model.exits(plan), rows=sizes.rows, length=sizes.length, exact=exact
    )
    try:
        return [
            decode(engine, group, sizes.tokens, logprobs=logprobs)
            for group in grouped(texts.prompts, sizes.rows)
        ]
    finally:
        engine.close()


def _outputs(runs: Sequence[Decoded], texts: Texts) -> list[TokenIds]:
    """Of each prompt, without those that only filled a group up."""
    return [output for run in runs for output in run.outputs][: len(texts.prompts)]


def _three_tiers(model: Loaded) -> dict[str, SpeculativeConfig]:
    return {name: plan for name, plan in plans_for(model.subject).items() if plan.check is not None}


def _exact(bench: Bench, model: Loaded, texts: Texts, sizes: Sizes) -> dict[str, Any]:
    """Greedy three-tier output in float32, TF32 off, against plain's: every token."""
    expected = _outputs(_all(model, None, texts, sizes), texts)
    equal: dict[str, int] = {}
    bench.found |= {"prompts": len(expected), "equal": equal}
    for name, plan in _three_tiers(model).items():
        with bench.case(name):
            got = _outputs(_all(model, plan, texts, sizes), texts)
            equal[name] = sum(one == other for one, other in zip(got, expected, strict=True))
            if equal[name] < len(expected):
                bench.fail(
                    f"float32, {name}: {len(expected) - equal[name]} of {len(expected)} outputs differ from"
                    " plain decoding's"
                )
    return bench.found


@dataclass(frozen=True)
class Difference:
    """The first of an output: where, and how far below the reference's best the token stood that was taken
    there."""

    place: int
    gap: float | None  # None = not even among the reference's likeliest


def first_difference(
    output: TokenIds, reference: TokenIds, logprobs: Sequence[TokenLogprobs]
) -> Difference | None:
    for place, (token, said) in enumerate(zip(output, logprobs, strict=False)):
        if token != reference[place]:
            return Difference(place, max(said.top.values()) - said.top[token] if token in said.top else None)
    return None


def _near_ties(bench: Bench, model: Loaded, texts: Texts, sizes: Sizes) -> dict[str, Any]:
    """Outputs in bfloat16: where one first differs from plain's, the two tokens must be nearly as likely
    there."""
    reference = _all(model, None, texts, sizes, logprobs=_NUM_TOP)
    expected, said = _outputs(reference, texts), [one for run in reference for one in run.logprobs]
    found: dict[str, list[dict[str, Any]]] = {}
    bench.found["first_differences"] = found
    differing = compared = 0
    for name, plan in _three_tiers(model).items():
        outputs: list[TokenIds] = []
        with bench.case(name):
            outputs = _outputs(_all(model, plan, texts, sizes), texts)
            found[name] = []
        for number, output in enumerate(outputs):
            difference = first_difference(output, expected[number], said[number])
            compared += 1
            if difference is None:
                continue
            differing += 1
            found[name].append({"prompt": number, **vars(difference)})
            if difference.gap is None or difference.gap > NEAR_TIE:
                bench.fail(
                    f"bfloat16, {name}, prompt {number}, token {difference.place}: no near-tie, but"
                    f" {difference.gap} below the best (limit {NEAR_TIE})"
                )
    if not compared:
        return bench.found
    if model.subject.is_real or bench.is_tiny:
        bench.figure("bf16_divergence_rate", differing / compared)
    else:
        bench.missing(
            "bf16_divergence_rate",
            f"it was {differing}/{compared} on random weights, whose logits lie closer than a trained"
            " model's",
        )
    return {
        "outputs": compared,
        "differing": differing,
        "tokens_of_each": sizes.tokens,
        "limit": NEAR_TIE,
        "first_differences": found,
    }


def _replays(bench: Bench, model: Loaded, texts: Texts, sizes: Sizes) -> dict[str, Any]:
    """Every graph against an eager run of the same round when it is captured, and outputs against those of
    eager engines."""
    tokens = min(sizes.tokens, 12)
    for name, plan in {"plain": None, **plans_for(model.subject)}.items():
        with bench.case(name):
            bench.found[name] = _replay(bench, model, texts, sizes, name, plan, tokens)
    return bench.found


def _replay(
    bench: Bench,
    model: Loaded,
    texts: Texts,
    sizes: Sizes,
    name: str,
    plan: SpeculativeConfig | None,
    tokens: int,
) -> dict[str, int]:
    checked = CheckedGraphs(graph_device(bench.device))
    captured, eager = (
        make_engine(
            model.decoder,
            plan,
            model.exits(plan),
            rows=max(sizes.mixes),
            length=sizes.length,
            graphs=graphs,
            captured_on=checked,
        )
        for graphs in (True, False)
    )
    try:
        different = 0
        for rows, temperature in [(rows, 0.0) for rows in sizes.mixes] + [(sizes.mixes[1], 0.8)]:
            outputs = [
                decode(engine, texts.prompts[:rows], tokens, temperature=temperature).outputs
                for engine in (captured, eager)
            ]
            different += outputs[0] != outputs[1]
        stats = captured.stats()
    finally:
        for engine in (captured, eager):
            engine.close()
    if checked.num_different or different or not checked.num_checked:
        bench.fail(
            f"graphs, {name}: {checked.num_different} of {checked.num_checked} replays and {different}"
            " batches differ from eager rounds"
        )
    return {
        "graphs": checked.num_checked,
        "different": checked.num_different,
        "outputs_different": different,
        "replays": stats["graph_replays"],
    }


def _speeds(model: Loaded, texts: Texts, sizes: Sizes, exact: bool) -> dict[str, float]:
    """Tokens per second, batch 1, rounds alone: of plain decoding and of one three-tier plan."""
    speeds = {}
    for name, plan in {
        "plain": None,
        "exits, three tiers": plans_for(model.subject)["exits, three tiers"],
    }.items():
        engine = make_engine(model.decoder, plan, model.exits(plan), rows=1, length=sizes.length, exact=exact)
        runs = [decode(engine, [prompt], sizes.tokens) for prompt in texts.prompts[:4]]
        speeds[name] = speed(runs[1:])  # the first captures
        engine.close()
    return speeds


def _exact_verify(
    bench: Bench, subject: Subject, texts: Texts, sizes: Sizes, ordinary: dict[str, float] | None
) -> dict[str, Any]:
    """With exact_verify verify's logits are plain decoding's, bit for bit, so tokens and log-probabilities
    are too."""
    dtype = "float32" if bench.device.type == "cpu" else "bfloat16"  # a CPU keeps bits in float32 alone
    with loaded(bench, subject, dtype, sizes.length, exact=True) as model:
        expected = _all(model, None, texts, sizes, logprobs=_NUM_TOP, exact=True)
        different: dict[str, int] = {}
        bench.found["different"] = different
        for name, plan in _three_tiers(model).items():
            with bench.case(name):
                got = _all(model, plan, texts, sizes, logprobs=_NUM_TOP, exact=True)
                pairs = [
                    pair
                    for one, other in zip(got, expected, strict=True)
                    for pair in zip(_said(one), _said(other), strict=True)
                ]
                different[name] = sum(one != other for one, other in pairs)
                if different[name]:
                    bench.fail(
                        f"exact_verify, {name}: {different[name]} of {len(pairs)} outputs differ from plain"
                        " decoding's in a token or in a bit"
                    )
        speeds = _speeds(model, texts, sizes, exact=True)
    cost = (
        {name: ordinary[name] / value for name, value in speeds.items()}
        if ordinary and "plain" in ordinary
        else None
    )
    return {"different": different, "tokens_per_s": speeds, "times_slower": cost}


def _said(run: Decoded) -> list[tuple[TokenIds, list[TokenLogprobs]]]:
    return list(zip(run.outputs, run.logprobs, strict=True))
