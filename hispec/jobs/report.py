"""The summaries that a job and a benchmark print at their end."""

from __future__ import annotations

from dataclasses import fields
from typing import IO, Any

from rich.console import Console

from ..config import SpeculativeConfig
from ..errors import build
from ..utils.console import count, make_console, make_table, number, percent, print_if_busy
from ..utils.environment import OTHERS_SHARE, hardware_text
from .bench import plans_of
from .drive import Timed
from .rates import Rates, floor_warning, plan_text, shares_text
from .runner import JobReport

ENGINE_NAMES = {"two_tier": "two-tier", "three_tier": "three-tier"}  # others are shown as they are
_NOT_INVARIANT = (
    "This platform does not give bit-identical rows whatever else is in a pass, so outputs may differ from"
    " plain decoding's where two tokens are nearly tied."
)


def print_job(report: JobReport, file: IO[str] | None = None) -> None:
    """The summary of a job, on stdout unless `file` is given."""
    console = make_console(file)
    table = make_table("")
    table.show_header = False
    table.add_column(overflow="fold")
    for name, value in _job_lines(report).items():
        table.add_row(name, value)
    console.print(table)
    if report.rates is not None and (warning := floor_warning(report.rates, report.job.speculative)):
        console.print(warning)
    if (compared := report.comparison) is not None:
        if not compared.row_invariant:
            console.print(_NOT_INVARIANT)
        taken = [timed.others or 0.0 for timed in (report.timed, compared.plain)]
        if max(taken) > OTHERS_SHARE * (cores := report.environment["cores"]):
            console.print(
                f"Other programs took {taken[0]:.1f} of {cores} cores during the job and {taken[1]:.1f}"
                " during plain decoding: do not rely on these speeds and their ratio."
            )


def _job_lines(report: JobReport) -> dict[str, str]:
    job, timed = report.job, report.timed
    lines = {"model": job.model}
    if report.stats:
        lines["plan"] = plan_text(job.speculative, report.stats["num_layers"])
        lines["hardware"] = hardware_text(report.environment)
    rows, failed = f"{timed.num_results} with outputs, {timed.num_errors} with errors", report.failed_before
    of_these = f", {failed} of them with errors, which --retry-failed does again" if failed else ""
    if report.resumed == report.num_rows:
        rows = f"all done before{of_these}; --new starts anew"
    elif report.resumed:
        rows += f", {report.resumed} done before{of_these}"
    lines["rows"] = f"{report.num_rows}: {rows}"
    if timed.num_errors:
        lines["errors"] = "\n".join(timed.reasons.lines(3))
    if timed.num_full:
        lines["cut short"] = (
            f"{count(timed.num_full, 'row')} filled max_model_len and ended there (stop_reason)"
        )
    if report.stats and timed.num_results:
        lines["tokens"] = (
            f"{timed.prompt_tokens} in prompts, {timed.completion_tokens} new, in {timed.seconds:.1f} s"
        )
        lines["tokens/s"] = f"{timed.tokens_per_s:.1f}"
        if latency := _latency(timed):
            lines["latency"] = latency
    if (compared := report.comparison) is not None:
        plain = compared.plain.tokens_per_s
        ratio = f"; speculative is {timed.tokens_per_s / plain:.2f} × plain" if plain else ""
        lines["plain"] = f"{plain:.1f} tokens/s{ratio}"
        lines["same output"] = (
            f"{compared.num_identical}/{compared.num_compared} rows are plain decoding's, token for token"
        )
    if shares := report.stats.get("control", {}).get("rounds_by_plan"):
        lines["plans"] = f"{shares_text(shares)} of the rounds"
    if report.rates is not None and timed.num_results:
        lines |= _rate_lines(report.rates, report.stats["num_layers"])
    place = str(job.output.path)
    if job.output.upload is not None:
        place += f"\n{job.output.upload.partition('?')[0]}"
    return lines | {"output": place}


def _latency(timed: Timed) -> str:
    """Medians and 99th percentiles; "" without any."""
    parts = []
    for seconds, words in ((timed.ttft_s, "to the first token"), (timed.tpot_s, "per token after it")):
        if seconds:
            middle, most = seconds.quantiles(0.5, 0.99)
            parts.append(f"{middle:.3g} s {words} (median; p99 {most:.3g} s)")
    return ", ".join(parts)


def _rate_lines(rates: Rates, num_layers: int) -> dict[str, str]:
    lines = {}
    if rates.draft_kept is not None:
        upper = "check" if rates.tentative_accepted is not None else "verify"
        kept = f"{percent(rates.draft_kept)} of drafted tokens kept by {upper}"
        if rates.looked_up_share is not None and 0.0 < rates.looked_up_share < 1.0:
            of_these = percent(rates.looked_up_kept)
            kept += f" ({rates.looked_up_share:.0%} were looked up, {of_these} of these kept)"
        if rates.tentative_accepted is not None:
            kept += f", {percent(rates.tentative_accepted)} of tentative tokens kept by verify"
        lines["acceptance"] = kept
        lines["mean accepted"] = (
            f"{number(rates.mean_accepted_len)} tokens per row and round"
            f" ({_histogram(rates.accept_len_histogram)})"
        )
    if rates.layer_passes_per_token is not None:
        lines["service"] = (
            f"{number(rates.full_passes_per_token)} passes over the model's {num_layers} layers per token"
            " of a row (1 in plain decoding)"
        )
    return lines


def print_bench(result: dict[str, Any], file: IO[str] | None = None) -> None:
    """The tables of a benchmark's result, on stdout unless `file` is given."""
    console = make_console(file)
    options, prompts = result["options"], result["prompts"]
    sampling = f"temperature {options['temperature']:g}" if options["temperature"] else "greedy"
    console.print(
        f"{result['model']}: {count(prompts['num'], 'prompt')} of {prompts['tokens_median']:.0f} tokens"
        f" (median), {count(options['max_tokens'], 'new token')}, batch {options['batch_size']}, {sampling},"
        f" {count(options['repeats'], 'interleaved repeat')}"
    )
    console.print(hardware_text(result["environment"]))
    _print_engines(console, result)
    if result["ratio_by_task"]:
        _print_tasks(console, "× plain, by task", result["ratio_by_task"], result["ratio_interval"])
        _print_tasks(console, "rounds alone", result["decode_ratio_by_task"], {})
    memory = [
        f"{name.removesuffix('_bytes').replace('_', ' ')} {_bytes(value)}"
        for name, value in result["memory"].items()
    ]
    console.print(f"memory: {', '.join(memory)}")
    further = {name: _plan(values) for name, values in options["plans"].items()}
    for name, plan in plans_of(_plan(result["speculative"]), further).items():
        values = result["engines"][name] | result["acceptance"].get(name, {})
        rates = Rates(**{each.name: values.get(each.name) for each in fields(Rates)})
        if warning := floor_warning(rates, plan):
            console.print(f"{ENGINE_NAMES.get(name, name)}: {warning}")
    if not result["row_invariant"]:
        console.print(_NOT_INVARIANT)
    print_if_busy(console, result["environment"])


def _plan(values: dict[str, Any] | None) -> SpeculativeConfig | None:
    return None if values is None else build(SpeculativeConfig, values)


def _print_engines(console: Console, result: dict[str, Any]) -> None:
    """A row per engine, and its plan below."""
    intervals = {} if result["ratio_by_task"] else result["ratio_interval"]
    titles = ["", "tokens/s", "× plain", *(["95 %"] if intervals else []), "× decoding", "same output"]
    table = make_table(*titles, "draft kept", "looked up", "tentative kept", "tokens/round", "passes/token")
    plans = []
    for key, engine in result["engines"].items():
        name, acceptance = ENGINE_NAMES.get(key, key), result["acceptance"].get(key, {})
        table.add_row(
            name,
            f"{engine['tokens_per_s']:.1f}",
            f"{result['ratio_to_plain'][key]:.2f}",
            *([_interval(intervals.get(key))] if intervals else []),
            number(result["decode_ratio_to_plain"].get(key)),
            "/".join(map(str, result["exact_match"].get(key, ()))),
            percent(acceptance.get("draft_kept")),
            _looked_up(acceptance),
            percent(acceptance.get("tentative_accepted")),
            number(engine.get("mean_accepted_len")),
            number(engine.get("full_passes_per_token")),
        )
        if engine.get("plan"):
            lengths = _histogram(engine["accept_len_histogram"])
            plans.append(f"{name}: {engine['plan']}; rounds by tokens committed: {lengths}")
    console.print(table, *plans, sep="\n")


def _print_tasks(
    console: Console, title: str, ratios: dict[str, dict[str, float]], intervals: dict[str, list[float]]
) -> None:
    """A row per engine, a column per task."""
    table = make_table(title, *next(iter(ratios.values())), *(["95 %"] if intervals else []))
    for name, of_tasks in ratios.items():
        cells = [f"{ratio:.2f}" for ratio in of_tasks.values()]
        cells += [_interval(intervals.get(name))] if intervals else []
        table.add_row(ENGINE_NAMES.get(name, name), *cells)
    console.print(table)


def _looked_up(acceptance: dict[str, Any]) -> str:
    """Share of drafts that prompt lookup proposed, and the share of these that was kept."""
    share, kept = acceptance.get("looked_up_share"), acceptance.get("looked_up_kept")
    return percent(share, 0) + ("" if kept is None else f", {kept:.0%} kept")


def _interval(bounds: list[float] | None) -> str:
    return "" if bounds is None else f"{bounds[0]:.2f}–{bounds[1]:.2f}"


def _histogram(counts: list[int]) -> str:
    return ", ".join(f"{length}: {count}" for length, count in enumerate(counts) if count)


def _bytes(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value / 1e6:.0f} MB" if value >= 1e7 else f"{value / 1e3:.0f} kB"
