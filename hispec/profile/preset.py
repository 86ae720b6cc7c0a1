"""A preset: `model`, `engine`, `speculative` and `sampling` of a job, as YAML with every field and what it
means."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from ..jobs.schema import Job, RunConfig
from ..utils.console import count
from ..utils.environment import busy_text, hardware_text
from .report import ratio_text
from .results import choose, fastest_of_kinds

_COLUMN = 32  # of the comments
_WIDTH = 118  # of the header
# Words that YAML would not read as text.
_NOT_TEXT = {"true", "false", "null", "yes", "no", "on", "off", ""}
COMMENTS = {
    "model": "a name that `hispec fetch` knows, a hub id, or a folder with a checkpoint",
    "engine": "how it runs",
    "engine.dtype": "auto, float32, bfloat16 or float16",
    "engine.kv_cache_dtype": "auto, float32, bfloat16 or int8",
    "engine.device": "auto (a GPU if there is one), cpu or cuda",
    "engine.max_num_seqs": "requests that run together, at most: as many as in the measurement",
    "engine.max_model_len": "prompt + output of one request in tokens, at most; null = the model's own limit",
    "engine.block_size": "positions per block of the KV cache",
    "engine.num_kv_blocks": (
        "blocks of the KV cache; null = enough for max_num_seqs requests of max_model_len"
    ),
    "engine.max_prefill_tokens": "prompt tokens computed per step, at most; null: 512, on a GPU 2048",
    "engine.max_run_ms": "on a CPU, how long several rounds may run in one step; 0 = one round a step",
    "engine.enable_prefix_caching": "compute equal beginnings of prompts once; it was off in the measurement",
    "engine.quantization": "null = weights as stored; int8, int4: a smaller model with other outputs",
    "engine.attention": "auto, or a backend by name: sdpa, numba, triton",
    "engine.seed": "base of the seeds of rows that bring none",
    "engine.graphs": "on a GPU, capture rounds as CUDA graphs",
    "engine.stage_graphs": "on a GPU, whether the host may end drafts and checks of a round early",
    "engine.max_graphs": "graphs kept; the least recently used makes room",
    "engine.max_graph_bytes": "GPU memory kept free for them",
    "engine.warm_up": "capture graphs at the start instead of each on first use",
    "engine.trace": "file to record decisions, rounds and requests in",
    "engine.exact_verify": "on a GPU, bit-for-bit the same output as plain decoding, slower",
    "engine.worker_timeout_s": "with workers: seconds without a sign of life after which one is replaced",
    "engine.gpu_memory_utilization": "share of a GPU's free memory that may be used, weights not counted",
    "speculative": "null = plain decoding",
    "speculative.draft": "what proposes tokens",
    "speculative.draft.kind": (
        "exit: the model's own head; adapter: a trained exit; ngram: prompt lookup; hybrid: that, else an"
        " exit; model: a small model"
    ),
    "speculative.draft.layer": (
        "D: the draft tier runs layers 0 to D-1; null = it is outside of the model (ngram, model)"
    ),
    "speculative.draft.path": (
        "folder of trained exits, null = the ones that come with HiSpec; or the small model; null for the"
        " model's own head"
    ),
    "speculative.draft.ngram": "prompt lookup of ngram and hybrid; null = the defaults",
    "speculative.draft.ngram.max_size": "longest run of tokens that is looked for in the text",
    "speculative.draft.ngram.min_size": "shortest run of tokens that counts as found",
    "speculative.draft.ngram.match_confidence": (
        "propose what followed as long as all of it is at least so sure to be right; null = always"
        " num_draft_tokens"
    ),
    "speculative.draft.ngram.datastore_tokens": "tokens of earlier outputs that are searched too; 0 = none",
    "speculative.draft.ngram.guess_confidence": (
        "where nothing sure matches: what mostly followed in answers counted beforehand, if at least so sure;"
        " null = no guesses"
    ),
    "speculative.draft.ngram.guess_path": (
        "folder of these n-grams; null = those that come with the model or HiSpec"
    ),
    "speculative.draft.ngram.learn_tokens": (
        "learn guesses from outputs that have ended, the latest so many tokens; 0 = learn nothing"
    ),
    "speculative.draft.exit": "of hybrid: adapter or exit, as in kind",
    "speculative.draft.num_exit_tokens": (
        "of hybrid: tokens that the exit drafts where nothing is found; null = num_draft_tokens"
    ),
    "speculative.check": "where drafts are checked; null = two tiers, no check",
    "speculative.check.kind": "exit: the model's own head; adapter: a trained exit",
    "speculative.check.layer": "C: the check tier runs layers D (or 0) to C-1, verify the rest",
    "speculative.check.path": (
        "folder of trained exits; null = the ones that come with HiSpec, or the model's own head"
    ),
    "speculative.check.confidence": (
        "overrule a draft only where the check is this sure of its own token (0 to 1); null = always"
    ),
    "speculative.check.continue_confidence": (
        "another cycle only while the check is this sure of its own token (0 to 1); null = always R"
    ),
    "speculative.num_draft_tokens": "K: tokens drafted before each check, at most",
    "speculative.num_checks": "R: checks before each verify; without effect where there is no check tier",
    "speculative.num_branches": "B: chains of K drafts, which begin with the likeliest tokens; 1 = one chain",
    "speculative.draft_confidence": (
        "draft no further where no token has this probability (0 to 1); null = always K"
    ),
    "speculative.acceptance": (
        "coupled: the output of plain decoding, token for token; rejection: equal in distribution"
    ),
    "speculative.control": (
        "fixed: keep this plan throughout; goodput: the one that promises most (docs/control.md)"
    ),
    "speculative.goodput": "of control goodput: how it decides",
    "speculative.goodput.latency": (
        "profile of hispec profile --latency; null = the one that is kept, measured first if there is none"
    ),
    "speculative.goodput.interval": "rounds between two decisions",
    "speculative.goodput.margin": "another plan must promise so many times the present one's goodput",
    "speculative.goodput.probe_share": "share of rounds that try other plans, at most",
    "speculative.goodput.shadow_share": "share of rounds on which exits that are not in use are read too",
    "speculative.goodput.window": "rounds after which an observation counts half",
    "speculative.goodput.prior_acceptance": "share of drafts assumed right before any was seen",
    "speculative.goodput.prior_weight": "drafts that this counts for",
    "speculative.goodput.per_request": "K and R by each request's own acceptance",
    "speculative.goodput.drafters": "kinds to choose from; null = all that can be had",
    "speculative.goodput.layers": "exits to choose from; null = all that there are",
    "speculative.graphs": "on a GPU, capture this plan's rounds",
    "scheduling": "null = first come, first served; others: docs/control.md",
    "scheduling.policy": "fcfs, sjf, mlfq or laps",
    "scheduling.num_queues": "queues of mlfq and laps",
    "scheduling.first_quantum": "passes over the model that a request gets in the first of them",
    "scheduling.quantum_growth": "growth from each queue to the next",
    "scheduling.stability_window": (
        "of laps: acceptance is stable when the means of two such windows of rounds"
    ),
    "scheduling.stability_tolerance": "differ by less",
    "scheduling.max_slowdown": (
        "who is here so many times as long as it would take alone goes first; null = never"
    ),
    "scheduling.expected_tokens": "output length that is assumed before anything has ended",
    "scheduling.review_rounds": "rounds between two looks at who should run",
    "scheduling.swap_bytes": "host memory for KV of preempted requests",
    "sampling": "of every row; measured was greedy decoding, whatever stands here",
    "sampling.n": "outputs per prompt",
    "sampling.temperature": "0 = greedy",
    "sampling.top_k": "keep the k most likely tokens; 0 = all",
    "sampling.top_p": "keep the most likely tokens that make up this probability; 1.0 = all",
    "sampling.min_p": "keep tokens of at least this share of the top probability; 0.0 = all",
    "sampling.repetition_penalty": "above 1.0: tokens of prompt and output become less likely",
    "sampling.presence_penalty": "above 0.0: tokens of the output become less likely, once",
    "sampling.frequency_penalty": "above 0.0: tokens of the output become less likely, per occurrence",
    "sampling.logit_bias": "token id: what is added to its logit",
    "sampling.seed": "null = derived from engine.seed and the row's number",
    "sampling.max_tokens": "output tokens, at most; null = as many as max_model_len and the KV blocks leave",
    "sampling.min_tokens": "no end of the output before this many tokens",
    "sampling.stop": "strings that end the output (left out of it)",
    "sampling.stop_token_ids": "tokens that end the output, besides the model's own",
    "sampling.ignore_eos": "true: go on after the model's end-of-sequence token",
    "sampling.logprobs": "log-probabilities of this many most likely tokens; null = none",
    "sampling.tiers": "true: say of each output token which tier's choice it is",
    "sampling.speculative": "false: decode these rows plainly",
}


def preset_text(job: Job, result: Mapping[str, Any], chosen: Mapping[str, Any] | None = None) -> str:
    """A measured plan of a profile's `result`, the best unless one is `chosen`, as YAML that a RunConfig
    accepts, with the figures in its header."""
    chosen = chosen or choose(result["measured"])[0]
    config = RunConfig(
        model=job.model,
        engine=job.engine.model_copy(update={"max_num_seqs": result["options"]["batch_size"]}),
        speculative=chosen["speculative"],
        scheduling=job.scheduling,
        sampling=job.sampling,
    )
    lines = [f"# {line}".rstrip() for line in _header(result, chosen)]
    if (batch := result["options"]["batch_size"]) == result["prompts"]["num"] < job.engine.max_num_seqs:
        lines.append(
            f"# There were no more prompts: the plan is for batches of {batch}, where the job's max_num_seqs"
            f" is {job.engine.max_num_seqs}."
        )
    if job.speculative is not None and job.speculative.acceptance == "rejection":
        lines.append("# Of acceptance: rejection, which the job has, nothing was measured.")
    if job.workers != 1:
        lines.append(f"# One process was measured, on all cores; the job has workers: {job.workers}.")
    lines += _settings(config.model_dump(), "", _reason(result) if config.speculative is None else None)
    return "\n".join(lines) + "\n"


def _header(result: Mapping[str, Any], chosen: Mapping[str, Any]) -> Iterator[str]:
    options, prompts, measured_on = result["options"], result["prompts"], result["environment"]
    best, reason = choose(result["measured"])
    yield f"Made by `hispec profile` on {result['date']}: a plan for this machine and these prompts."
    text = (
        f"{f'It is {reason}. ' if chosen is best else ''}"
        f"Measured on {hardware_text(measured_on)}, hispec {measured_on['hispec']}:"
        f" {count(prompts['num'], 'prompt')} of {prompts['tokens_mean']:.0f} tokens (mean),"
        f" {count(options['max_tokens'], 'new token')} at most, batch {options['batch_size']}, greedy,"
        f" geometric means of {count(options['repeats'], 'interleaved repeat')}. In brackets: 95 % intervals"
        " by the noise of the repeats; other prompts give other figures."
    )
    yield from textwrap.wrap(text, _WIDTH, break_long_words=False)
    fastest = fastest_of_kinds(result["measured"])
    for run in result["measured"]:
        if run is not chosen and run is not fastest[run["kind"]]:
            continue
        mark = " <- this plan" if run is chosen else ""
        yield (
            f"  {run['tokens_per_s']:9.1f} tokens/s, {ratio_text(run)},"
            f" {run['tokens_per_round']:.2f} tokens/round, output as plain's"
            f" {run['exact_match'][0]}/{run['exact_match'][1]}: {run['plan_text']}{mark}"
        )
    if (busy := busy_text(measured_on)) is not None:
        yield f"{busy}: do not rely on these speeds."


def _reason(result: Mapping[str, Any]) -> str:
    others = [
        run for run in result["measured"] if run["speculative"] is not None and run["tokens_per_round"] > 1.0
    ]
    if not others:
        return "no other plan that was run gained a token"
    fastest = max(others, key=lambda run: run["tokens_per_s"])
    return (
        f"plain decoding is as good: the fastest other plan ({fastest['plan_text']}) gave"
        f" {ratio_text(fastest)}"
    )


def _settings(values: Mapping[str, Any], where: str, why_plain: str | None) -> Iterator[str]:
    """Lines of nested settings, each with its comment; a blank line before each group at the top."""
    indent = "  " * where.count(".")
    for name, value in values.items():
        path = where + name
        comment = COMMENTS[path]
        if path == "speculative" and why_plain is not None:
            comment = why_plain
        is_group = isinstance(value, dict) and any(known.startswith(f"{path}.") for known in COMMENTS)
        if not where:
            yield ""
        line = f"{indent}{name}:" if is_group else f"{indent}{name}: {_scalar(value)}"
        yield f"{line:<{_COLUMN - 1}} # {comment}"
        if is_group:
            yield from _settings(value, f"{path}.", None)


def _scalar(value: Any) -> str:
    """The value as YAML: JSON, but for text that needs no quotes."""
    if (
        isinstance(value, str)
        and re.fullmatch(r"[A-Za-z_/][\w./-]*", value)
        and value.lower() not in _NOT_TEXT
    ):
        return value
    return "".join(_character(each) for each in json.dumps(value, ensure_ascii=False))


def _character(each: str) -> str:
    """What YAML would refuse, or read as the end of a line, by its number."""
    return each if each.isprintable() else f"\\U{ord(each):08x}"
