"""What a job and a benchmark print when they are done."""

from __future__ import annotations

from typing import IO, Any

from rich.console import Console
from rich.table import Table

from ..utils.console import make_console
from ..utils.environment import hardware_text, is_busy
from .rates import FLOOR, Rates, plan_text, shares_text
from .runner import JobReport

ENGINE_NAMES = {
    "transformers": "transformers",
    "plain": "plain",
    "two_tier": "two-tier",
    "three_tier": "three-tier",
}
AT_FLOOR = (
    f"A tier keeps less than {FLOOR:.0%} of the tokens it gets. Exits that were not trained give this: the"
    ' output is right, but speculation only costs time. See docs/jobs.md, "Acceptance".'
)


def print_job(report: JobReport, file: IO[str] | None = None) -> None:
    """The summary of a job, on stdout unless `file` is given."""
    console = make_console(file)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _job_lines(report):
        table.add_row(name, value)
    console.print(table)
    if report.rates is not None and report.rates.at_floor:
        console.print(AT_FLOOR)
    if report.comparison is not None and not report.comparison.row_invariant:
        console.print(_NOT_INVARIANT)


def print_bench(result: dict[str, Any], file: IO[str] | None = None) -> None:
    """The table of a benchmark's result, on stdout unless `file` is given."""
    console = make_console(file)
    options, prompts = result["options"], result["prompts"]
    console.print(
        f"{result['model']}: {prompts['num']} prompts of {prompts['tokens_median']:.0f} tokens (median),"
        f" {options['max_tokens']} new tokens, batch {options['batch_size']},"
        f" {_sampling(options['temperature'])}, {options['repeats']} interleaved repeats"
    )
    console.print(hardware_text(result["environment"]))
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in (
        "",
        "tokens/s",
        "× plain",
        "95 %",
        "× decoding",
        "same output",
        "draft kept",
        "looked up",
        "tentative kept",
        "tokens/round",
        "passes/token",
    ):
        table.add_column(title, justify="right" if title else "left")
    for name, engine in result["engines"].items():
        acceptance = result["acceptance"].get(name, {})
        match = result["exact_match"].get(name)
        table.add_row(
            ENGINE_NAMES.get(name, name),
            f"{engine['tokens_per_s']:.1f}",
            f"{result['ratio_to_plain'][name]:.2f}",
            "" if result["ratio_by_task"] else _interval(result["ratio_interval"].get(name)),
            _number(result["decode_ratio_to_plain"].get(name)),
            f"{match[0]}/{match[1]}" if match else "",
            _percent(acceptance.get("draft_accepted")),
            _looked_up(acceptance),
            _percent(acceptance.get("tentative_accepted")),
            _number(engine.get("mean_accepted_len")),
            _number(engine.get("full_passes_per_token")),
        )
    console.print(table)
    for name, engine in result["engines"].items():
        if engine.get("plan"):
            console.print(
                f"{ENGINE_NAMES.get(name, name)}: {engine['plan']}; rounds by tokens committed:"
                f" {_histogram(engine['accept_len_histogram'])}"
            )
    if result["ratio_by_task"]:
        _print_tasks(console, "× plain, by task", result["ratio_by_task"], result["ratio_interval"])
        _print_tasks(console, "rounds alone", result["decode_ratio_by_task"], {})
    memory = [
        f"{name.removesuffix('_bytes').replace('_', ' ')} {_bytes(value)}"
        for name, value in result["memory"].items()
    ]
    console.print(f"memory: {', '.join(memory)}")
    kept = [
        tiers[name]
        for tiers in result["acceptance"].values()
        for name in ("draft_accepted", "tentative_accepted")
    ]
    if any(share is not None and share < FLOOR for share in kept):
        console.print(AT_FLOOR)
    if not result["row_invariant"]:
        console.print(_NOT_INVARIANT)
    if is_busy(result["environment"]):
        console.print(
            f"Other programs were running when this began (load {result['environment']['load']:.1f}): do not"
            " rely on these speeds."
        )


def _sampling(temperature: float) -> str:
    return f"temperature {temperature:g}" if temperature else "greedy"


def _looked_up(acceptance: dict[str, Any]) -> str:
    """Share of drafts that prompt lookup proposed, and of these the share that was kept."""
    share, kept = acceptance.get("looked_up_share"), acceptance.get("looked_up_accepted")
    return "" if share is None else f"{share:.0%}, {kept:.0%} kept" if kept is not None else f"{share:.0%}"


def _interval(bounds: list[float] | None) -> str:
    """The interval of the mean over prompts (`ratio_interval`)."""
    return "" if bounds is None else f"{bounds[0]:.2f} to {bounds[1]:.2f}"


def _print_tasks(
    console: Console, title: str, ratios: dict[str, dict[str, float]], intervals: dict[str, list[float]]
) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(title)
    for task in next(iter(ratios.values())):
        table.add_column(task, justify="right")
    if intervals:
        table.add_column("95 %", justify="right")
    for name, of_tasks in ratios.items():
        cells = [f"{ratio:.2f}" for ratio in of_tasks.values()] + [_interval(intervals.get(name))] * bool(
            intervals
        )
        table.add_row(ENGINE_NAMES.get(name, name), *cells)
    console.print(table)


_NOT_INVARIANT = (
    "This platform does not give bit-identical rows whatever else is in a pass, so outputs may differ from"
    " plain decoding's where two tokens are nearly tied."
)


def _job_lines(report: JobReport) -> list[tuple[str, str]]:
    job, timed = report.job, report.timed
    lines = [("model", job.model)]
    if report.stats:
        lines.append(("plan", plan_text(job.speculative, report.stats["num_layers"])))
        lines.append(("hardware", hardware_text(report.environment)))
    done_before = f", {report.resumed} done before" if report.resumed else ""
    lines.append(
        (
            "rows",
            (
                f"{report.num_rows}: {timed.num_results} with outputs, {timed.num_errors} with"
                f" errors{done_before}"
            ),
        )
    )
    if report.stats:
        lines.append(
            (
                "tokens",
                f"{timed.prompt_tokens} in prompts, {timed.completion_tokens} new, in {timed.seconds:.1f} s",
            )
        )
        lines.append(("tokens/s", f"{timed.tokens_per_s:.1f}"))
    if report.comparison is not None:
        plain, compared = report.comparison.plain, report.comparison
        ratio = timed.tokens_per_s / plain.tokens_per_s if plain.tokens_per_s else float("nan")
        lines.append(("plain", f"{plain.tokens_per_s:.1f} tokens/s; speculative is {ratio:.2f} × plain"))
        lines.append(
            (
                "same output",
                (
                    f"{compared.num_identical}/{compared.num_compared} rows are plain decoding's, token for"
                    " token"
                ),
            )
        )
    if shares := report.stats.get("control", {}).get("rounds_by_plan"):
        lines.append(("plans", f"{shares_text(shares)} of the rounds"))
    if report.rates is not None:
        lines += _rate_lines(report.rates, report.stats["num_layers"])
    lines.append(("output", str(job.output.path)))
    return lines


def _rate_lines(rates: Rates, num_layers: int) -> list[tuple[str, str]]:
    lines = []
    if rates.draft_accepted is not None:
        upper = "check" if rates.tentative_accepted is not None else "verify"
        kept = f"{_percent(rates.draft_accepted)} of drafted tokens kept by {upper}"
        if rates.looked_up_share is not None and 0.0 < rates.looked_up_share < 1.0:
            kept += (
                f" ({rates.looked_up_share:.0%} were looked up, {_percent(rates.looked_up_accepted)} of these"
                " kept)"
            )
        if rates.tentative_accepted is not None:
            kept += f", {_percent(rates.tentative_accepted)} of tentative tokens kept by verify"
        lines.append(("acceptance", kept))
        lines.append(
            (
                "mean accepted",
                (
                    f"{_number(rates.mean_accepted_len)} tokens per row and round"
                    f" ({_histogram(rates.accept_len_histogram)})"
                ),
            )
        )
    if rates.layer_passes_per_token is not None:
        lines.append(
            (
                "layer passes",
                (
                    f"{rates.layer_passes_per_token:.1f} per token, {_number(rates.full_passes_per_token)}"
                    f" times the model's {num_layers} layers"
                ),
            )
        )
    return lines


def _histogram(counts: list[int]) -> str:
    return ", ".join(f"{length}: {count}" for length, count in enumerate(counts) if count)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _bytes(value: float | None) -> str:
    return (
        "unknown" if value is None else f"{value / 1e6:.0f} MB" if value >= 1e7 else f"{value / 1e3:.0f} kB"
    )
