"""SmolLM2-135M on real prompts: plain, the best two- and three-tier plans over all drafters, and
transformers, in one process."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_parts.correctness import LOOKUP, plans_for
from benchmarks.gpu_parts.engines import Decoded, TokenIds, decode, grouped, make_engine, speed, steady
from benchmarks.gpu_parts.floors import round_against_stages
from benchmarks.gpu_parts.run import Bench
from benchmarks.gpu_parts.subjects import Loaded, Subject, Texts, found_subject, loaded, texts_of
from hispec.config import CheckConfig, DraftConfig, SpeculativeConfig
from hispec.engine import Engine
from hispec.jobs.hf_baseline import TransformersBaseline
from hispec.jobs.rates import Rates, plan_text

Plans = dict[str, SpeculativeConfig]


@dataclass(frozen=True)
class Sizes:
    length: int
    tokens: int
    batches: tuple[int, ...]
    rounds: int  # of a steady loop
    baseline_batches: tuple[int, ...]  # those of transformers, which is slow
    baseline_prompts: int  # that it is given one by one
    repeats: int


def candidates(subject: Subject, rows: int) -> Plans:
    """What is tried at a batch of so many rows; those with a check are three-tier. Wide rounds are left out
    where width costs arithmetic."""
    low, middle, high = subject.layers
    exit_ = DraftConfig(kind=subject.exit_kind, layer=low)
    ngram = DraftConfig(kind="ngram", ngram=LOOKUP)
    hybrid = DraftConfig(kind="hybrid", layer=low, ngram=LOOKUP, exit=subject.exit_kind, num_exit_tokens=2)

    def check(layer: int, confidence: float | None = None) -> CheckConfig:
        return CheckConfig(kind=subject.exit_kind, layer=layer, confidence=confidence)

    def plan(
        draft: DraftConfig, drafts: int, by: CheckConfig | None = None, checks: int = 1, **fields: Any
    ) -> SpeculativeConfig:
        return SpeculativeConfig(draft=draft, check=by, num_draft_tokens=drafts, num_checks=checks, **fields)

    wide = 6 if rows <= 8 else 3
    found = {
        "exit, 1": plan(exit_, 1),
        "exit, 2": plan(exit_, 2),
        "n-gram": plan(ngram, wide),
        "hybrid": plan(hybrid, wide),
        "exit, checked 1": plan(exit_, 1, check(high)),
        "exit, checked 2 x 2": plan(exit_, 2, check(high), 2),
        "exit, early check 2 x 2": plan(exit_, 2, check(middle), 2),
        "n-gram, checked": plan(ngram, wide, check(middle, 0.9)),
        "n-gram, checked 3 x 2": plan(ngram, 3, check(middle, 0.9), 2),
        "hybrid, checked": plan(hybrid, wide, check(middle, 0.9)),
        "hybrid, late check 3 x 2": plan(hybrid, 3, check(high, 0.9), 2),
    }
    if rows <= 8:
        found["tree"] = plan(DraftConfig(kind=subject.exit_kind, layer=middle), 1, num_branches=4)
        found["tree, checked"] = plan(exit_, 1, check(high), num_branches=4)
        found["hybrid, sure"] = plan(hybrid, 6, draft_confidence=0.2)
    return found


def run(bench: Bench, out: dict[str, Any]) -> None:
    sizes = (
        Sizes(160, 8, (1, 2), 6, (1, 2), 1, 1)
        if bench.is_tiny
        else Sizes(512, 64, (1, 32, 8, 128), 60, (1, 32), 1, 3)
    )  # those that figures are of come first
    with found_subject(bench) as subject, loaded(bench, subject, "bfloat16", sizes.length) as model:
        out["model"] = subject.label
        texts = texts_of(bench, model, sizes.length - sizes.tokens - 32)
        out["prompts"] = texts.label
        bench.step(out, "captured vs eager", 15, partial(_captured, bench, model, texts, sizes))
        bench.step(out, "round vs stages", 20, partial(_stages, bench, model, texts, sizes))
        for place, rows in enumerate(sizes.batches):
            if place == 1:
                bench.step(out, "transformers", 35, partial(_transformers, bench, model, texts, sizes))
            if subject.is_real or bench.is_tiny:
                bench.step(out, f"batch {rows}", 25, partial(_batch, bench, model, texts, sizes, rows))
    if not subject.is_real and not bench.is_tiny:
        for key in ("three_tier_vs_plain_b1", "three_tier_vs_two_tier_b1", "three_tier_vs_plain_b32"):
            bench.missing(key, "SmolLM2 is not on this machine: `hispec fetch smollm2`, or --model FOLDER")


def _captured(bench: Bench, model: Loaded, texts: Texts, sizes: Sizes) -> dict[str, Any]:
    """Milliseconds of a round at batch 1, from a graph and eagerly: the same rounds otherwise."""
    found = bench.found
    for name, plan in {
        "plain": None,
        "exits, three tiers": plans_for(model.subject)["exits, three tiers"],
    }.items():
        ms = {}
        for how, graphs in (("captured", True), ("eager", False)):
            engine = make_engine(
                model.decoder, plan, model.exits(plan), rows=1, length=sizes.length, graphs=graphs
            )
            ms[how] = [
                decode(engine, [prompt], sizes.tokens).ms_per_round
                for prompt in texts.prompts[: sizes.repeats + 1]
            ][1:]  # the first captures
            engine.close()
        medians = {how: statistics.median(runs) for how, runs in ms.items()}
        found[name] = {**medians, "runs": ms, "eager / captured": medians["eager"] / medians["captured"]}
        bench.figure("captured_vs_eager", found[name]["eager / captured"])
    return found


def _stages(bench: Bench, model: Loaded, texts: Texts, sizes: Sizes) -> dict[str, Any]:
    """Host gap and stages of plain decoding and of a three-tier plan, batch 1."""
    found = bench.found
    prompt = max(texts.prompts, key=len)
    for name, plan in {
        "plain": None,
        "exits, three tiers": plans_for(model.subject)["exits, three tiers"],
    }.items():
        exits = model.exits(plan)
        engine = make_engine(model.decoder, plan, exits, rows=1, length=sizes.length)
        in_engine = steady(bench, engine, [prompt], sizes.rounds, sizes.length - len(prompt) - 1)
        engine.close()
        bench.figure("host_gap_fraction", in_engine["host_gap"])
        of_stages = round_against_stages(
            bench,
            model.decoder,
            exits,
            (plan.plan(model.decoder.config.num_layers) if plan else None),
            prompt,
            1,
        )
        ratio = in_engine["round_ms"] / of_stages["sum_ms"]
        found[name] = {**in_engine, **of_stages, "round / stages": ratio}
        bench.figure("round_vs_stage_floors", ratio)
    return found


def _transformers(bench: Bench, model: Loaded, texts: Texts, sizes: Sizes) -> dict[str, Any]:
    """Tokens per second, prompts included, of transformers' generate and of plain decoding in turn, by batch;
    and with an early exit of its own as its drafter, which it offers at batch 1 alone."""
    found = bench.found
    dtype = str(model.decoder.dtype).removeprefix("torch.")
    for rows in sizes.baseline_batches:
        groups = grouped(texts.prompts, rows)[: sizes.baseline_prompts if rows == 1 else 1]
        baseline = TransformersBaseline(
            model.subject.path,
            dtype=dtype,
            device=str(bench.device),
            batch_size=rows,
            max_tokens=sizes.tokens,
            ignore_eos=True,
        )
        engine = make_engine(model.decoder, rows=rows, length=sizes.length)
        runs: dict[str, Callable[[list[TokenIds]], list[TokenIds]]] = {
            "transformers": baseline.generate,
            "plain": partial(_plain, engine, sizes.tokens),
        }
        errors: dict[str, str] = {}
        if rows == 1:
            runs["assistant_early_exit"] = partial(_early_exit, baseline, model.subject.layers[0])
        speeds: dict[str, list[float]] = {name: [] for name in runs}
        for repeat in range(sizes.repeats + 1):
            for name, generate in list(runs.items()):
                try:
                    speeds[name].append(_timed(bench, generate, groups))
                except Exception as error:
                    if name != "assistant_early_exit":
                        raise
                    errors[name] = f"{type(error).__name__}: {str(error)[:300]}"  # not every version has it
                    del runs[name]
            if repeat == 0:
                speeds = {name: [] for name in runs}  # a warm-up
        engine.close()
        medians = {name: statistics.median(values) for name, values in speeds.items()}
        found[str(rows)] = {
            "tokens_per_s": medians,
            "runs": speeds,
            "plain / transformers": medians["plain"] / medians["transformers"],
            "errors": errors,
        }
        if rows == 1:
            bench.figure("smollm2_plain_vs_transformers", medians["plain"] / medians["transformers"])
    return found


def _plain(engine: Engine, max_tokens: int, prompts: list[TokenIds]) -> list[TokenIds]:
    return decode(engine, prompts, max_tokens).outputs


def _early_exit(baseline: TransformersBaseline, layer: int, prompts: list[TokenIds]) -> list[TokenIds]:
    (prompt,) = prompts
    ids = torch.tensor([prompt], device=baseline._model.device)
    with torch.inference_mode():
        out = baseline._model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), assistant_early_exit=layer
        )
    return [out[0, len(prompt) :].tolist()]


def _timed(
    bench: Bench, generate: Callable[[list[TokenIds]], list[TokenIds]], groups: Sequence[list[TokenIds]]
) -> float:
    """Tokens per second."""
    outputs: list[list[TokenIds]] = []
    ms = bench.clock.ms(lambda: outputs.extend([generate(group) for group in groups]))
    return sum(len(output) for group in outputs for output in group) / ms * 1e3


def _batch(bench: Bench, model: Loaded, texts: Texts, sizes: Sizes, rows: int) -> dict[str, Any]:
    """The best two-tier and the best three-tier plan of a short run each, and then both and plain in turn,
    over all prompts."""
    groups = grouped(texts.prompts, rows)
    quick = groups[: 6 if rows == 1 else 1]
    layers = model.decoder.config.num_layers
    best: dict[str, tuple[float, str, SpeculativeConfig, Engine]] = {}
    tried: dict[str, Any] = {}
    bench.found["tried"] = tried
    for name, plan in candidates(model.subject, rows).items():
        rate, kind = -1.0, "two_tier" if plan.check is None else "three_tier"
        engine = make_engine(model.decoder, plan, model.exits(plan), rows=rows, length=sizes.length)
        with bench.case(name):
            decode(engine, groups[0], sizes.tokens, while_full=True)  # captures
            rate = speed(
                [decode(engine, group, max(8, sizes.tokens // 2), while_full=True) for group in quick]
            )
        if rate < 0.0:
            engine.close()
            continue
        tried[name] = {"kind": kind, "tokens_per_s": rate, "plan": plan_text(plan, layers)}
        loser: Engine | None = engine
        if kind not in best or rate > best[kind][0]:
            loser = best[kind][3] if kind in best else None
            best[kind] = rate, name, plan, engine
        if loser is not None:
            loser.close()
    engines = {
        "plain": make_engine(model.decoder, rows=rows, length=sizes.length),
        **{kind: found[3] for kind, found in best.items()},
    }
    decode(engines["plain"], groups[0], sizes.tokens, while_full=True)
    runs: dict[str, list[list[Decoded]]] = {name: [] for name in engines}
    for engine in engines.values():
        engine.reset_stats()
    for _ in range(sizes.repeats):
        for name, engine in engines.items():
            runs[name].append([decode(engine, group, sizes.tokens, while_full=True) for group in groups])
    stats = {kind: _rates(engines[kind], found[2]) for kind, found in best.items()}
    for engine in engines.values():
        engine.close()
    out = {
        "plans": {kind: found[1] for kind, found in best.items()},
        "tried": tried,
        "stats": stats,
        **compared(runs, texts.tasks if rows == 1 else None),
    }
    ends = set(model.decoder.config.eos_token_ids)
    outputs = [output for run in runs["plain"][0] for output in run.outputs]
    out["ended_early"] = (
        f"{sum(bool(ends & set(output[:-1])) for output in outputs)} of {len(outputs)} texts had ended before"
        " their last token"
    )
    if rows in (1, 32) or bench.is_tiny:
        bench.figure(f"three_tier_vs_plain_b{1 if rows == 1 else 32}", out["three_tier / plain"])
    if rows == 1:
        bench.figure("three_tier_vs_two_tier_b1", out["three_tier / two_tier"])
    return out


def _rates(engine: Engine, plan: SpeculativeConfig) -> dict[str, Any]:
    rates = asdict(Rates.of(engine.stats(), plan))
    return {
        name: value
        for name, value in rates.items()
        if name not in ("accept_len_histogram", "draft_model_passes_per_token")
    }


def compared(runs: dict[str, list[list[Decoded]]], tasks: Sequence[str] | None) -> dict[str, Any]:
    """Medians over repeats; ratios of rounds alone, over tasks where each prompt ran by itself, and with
    prompts."""

    def median(name: str, numbers: Sequence[int] | None = None, whole: bool = False) -> float:
        return statistics.median(
            speed([run[number] for number in numbers] if numbers is not None else run, whole)
            for run in runs[name]
        )

    by_task: dict[str, list[int]] = {"all": list(range(len(runs["plain"][0])))}
    if tasks is not None:
        by_task = {
            task: [number for number, other in enumerate(tasks) if other == task]
            for task in dict.fromkeys(tasks)
        }
    ratios = {
        name: {task: median(name, numbers) / median("plain", numbers) for task, numbers in by_task.items()}
        for name in runs
    }
    means = {name: statistics.mean(values.values()) for name, values in ratios.items()}
    return {
        "tokens_per_s": {name: median(name) for name in runs},
        "tokens_per_s_with_prompts": {name: median(name, whole=True) for name in runs},
        "ratio_by_task": ratios,
        "ratio_with_prompts": {name: median(name, whole=True) / median("plain", whole=True) for name in runs},
        "two_tier / plain": means["two_tier"],
        "three_tier / plain": means["three_tier"],
        "three_tier / two_tier": means["three_tier"] / means["two_tier"],
        "runs": {name: [speed(run) for run in values] for name, values in runs.items()},
    }
