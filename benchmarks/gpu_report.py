"""Writes a result of benchmarks/gpu.py into docs/performance/gpu.md, between its markers: `python
benchmarks/gpu_report.py RESULT.json [--docs FILE]`. What stands outside of the markers stays as it is.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run from a checkout: nothing needs to be installed

from benchmarks.gpu_parts.run import BENCHMARK, FIGURES, SYNTHETIC, figure_rows
from benchmarks.markdown import table
from hispec.utils.environment import hardware_text
from hispec.utils.files import write_atomically

DOCS = Path(__file__).resolve().parents[1] / "docs" / "performance" / "gpu.md"
_WIDTH = 110
BEGIN, END = "<!-- gpu: begin, written by benchmarks/gpu_report.py -->", "<!-- gpu: end -->"


class ReportError(ValueError):
    """What cannot be reported, and why."""


def read_result(path: Path) -> dict[str, Any]:
    """Raises ReportError unless it is a measurement by benchmarks/gpu.py."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ReportError(f"{path}: {error}") from None
    if not isinstance(result, dict) or result.get("benchmark") != BENCHMARK:
        raise ReportError(f"{path} was not written by benchmarks/gpu.py")
    if result.get("rehearsal") is not False:
        raise ReportError(f"{path} is a rehearsal: nothing in it is a measurement")
    figures = result.get("figures")
    if not isinstance(figures, dict) or set(figures) != set(FIGURES):
        raise ReportError(f"{path}: `figures` must have the keys {', '.join(FIGURES)}")
    if wrong := [
        key
        for key, value in figures.items()
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float))
    ]:
        raise ReportError(f"{path}: figures {', '.join(wrong)} are no numbers")
    return result


def written(document: str, lines: Sequence[str]) -> str:
    """The document with `lines` between its markers. Raises ReportError if they are not there, once each and
    in order."""
    if document.count(BEGIN) != 1 or document.count(END) != 1 or document.index(BEGIN) > document.index(END):
        raise ReportError(f"the document needs the lines {BEGIN!r} and {END!r}, once each and in this order")
    before, after = document[: document.index(BEGIN) + len(BEGIN)], document[document.index(END) :]
    return "\n".join([before, *lines, after])


def lines_of(result: dict[str, Any], source: str) -> list[str]:
    parts = result["parts"]
    lines = [
        (
            f"{hardware_text(result['environment'])}, CUDA {result['environment'].get('cuda')},"
            f" {result['date']}. Raw: {source}."
        ),
        "",
    ]
    lines += table(("figure", "value", "target", ""), figure_rows(result))
    lines += _reasons(result)
    lines += _correctness(parts.get("correctness", {}))
    lines += _smollm2(parts.get("smollm2", {}))
    lines += _shapes(parts.get("shapes", {}))
    lines += _sampled(parts.get("sampled", {}))
    lines += _profile(parts.get("profile", {}))
    lines += _compiling(parts)
    return [short for line in lines for short in _wrapped(line)]


def _wrapped(line: str) -> list[str]:
    """Prose in lines of the documents' width; a table's row stays one."""
    if line.startswith("|"):
        return [line]
    indent = "  " if line.startswith("- ") else ""
    return textwrap.wrap(
        line, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ) or [""]


def _reasons(result: dict[str, Any]) -> Iterator[str]:
    if result.get("reasons"):
        yield ""
        yield from (
            # Without the states of all parts, which the file has.
            f"- Not measured: {FIGURES[key].text}: {reason.partition(' (')[0]}."
            for key, reason in result["reasons"].items()
        )
    if result["failures"]:
        yield ""
        yield from (f"- **Failed:** {text}" for text in result["failures"])


def _correctness(part: dict[str, Any]) -> Iterator[str]:
    """One sentence per comparison that was made."""

    def step(name: str, key: str) -> dict[str, Any] | None:
        found = part.get(name)
        return found if isinstance(found, dict) and key in found else None

    said = []
    if (
        (found := part.get("replay equals eager")) is not None
        and "error" not in found
        and "left_out" not in found
    ):
        graphs, different = (sum(plan[key] for plan in found.values()) for key in ("graphs", "different"))
        said.append(
            f"{graphs} graphs of {len(found)} plans were compared with eager rounds when captured,"
            f" {different} differed."
        )
    if (found := step("fp32 equals plain", "equal")) is not None:
        said.append(
            "Equal to plain in float32: "
            + ", ".join(f"{name} {equal}/{found['prompts']}" for name, equal in found["equal"].items())
            + "."
        )
    if (found := step("bf16 against plain", "outputs")) is not None:
        said.append(
            f"In bfloat16 {found['differing']} of {found['outputs']} outputs of {found['tokens_of_each']}"
            " tokens differ from plain's somewhere."
        )
    if (found := step("exact_verify", "different")) is not None:
        cost = ", ".join(f"{name} {times:.2f}" for name, times in (found["times_slower"] or {}).items())
        differing = sum(found["different"].values())
        said.append(
            f"With exact_verify {differing} differ, in a token or a bit; it is slower by these factors:"
            f" {cost or 'not measured'}."
        )
    if said:
        yield from ("", f"Correctness, on {part['model']}: " + " ".join(said))


def _found(part: dict[str, Any], key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The batches of a part that got as far as `key`."""
    for name, value in part.items():
        if name.startswith("batch ") and isinstance(value, dict) and key in value:
            yield name, value


def _smollm2(part: dict[str, Any]) -> Iterator[str]:
    baseline, batches = (
        part.get("transformers", {}),
        sorted(_found(part, "tokens_per_s"), key=lambda item: int(item[0].split()[1])),
    )
    if not batches:
        return
    yield from (
        "",
        f"{part['model']}, {part['prompts']}, bfloat16, greedy; tokens/s of rounds alone, × plain:",
        "",
    )
    rows = []
    for name, found in batches:
        speeds, plans = found["tokens_per_s"], found["plans"]
        cells = [f"{speeds['plain']:,.0f}"] + [
            f"{speeds[kind]:,.0f} ({found[f'{kind} / plain']:.2f}, {plans[kind]})"
            for kind in ("two_tier", "three_tier")
        ]
        against = baseline.get(name.split()[1], {}).get("tokens_per_s", {})
        rows.append(
            [
                name,
                *cells,
                *(
                    f"{against[key]:,.0f}" if key in against else "-"
                    for key in ("transformers", "assistant_early_exit")
                ),
            ]
        )
    yield from table(
        ("", "plain", "best two-tier", "best three-tier", "transformers, with prompts", "its early exit"),
        rows,
    )


def _shapes(part: dict[str, Any]) -> Iterator[str]:
    stages, ratios, kernels = [], [], []
    for shape, measured in part.items():
        if not isinstance(measured, dict):
            continue
        if "kernels / layers" in measured.get("kernels", {}):
            kernels.append(f"{measured['kernels']['kernels / layers']:.1f} ({shape})")
        for batch, found in _found(measured, "synthetic"):
            for plan, values in found["rounds"].items():
                cells = [
                    f"{name} {stage['ms']:.2f} ({stage['ms / floor']:.2f})"
                    for name, stage in values["stages"].items()
                ]
                numbers = (
                    f"{values['round_ms']:.2f}",
                    f"{values['round / stages']:.2f}",
                    f"{values['host_gap']:.1%}",
                )
                stages.append([shape, batch, plan, ", ".join(cells), *numbers])
            synthetic = found["synthetic"]
            for case, value in synthetic["tokens_per_s"].items():
                ratios.append(
                    [shape, batch, case, f"{value:,.0f}", f"{synthetic['ratio_to_plain'][case]:.2f}"]
                )
    if stages:
        yield from (
            "",
            (
                f"Shapes, bfloat16. {SYNTHETIC[0].upper()}{SYNTHETIC[1:]}. Milliseconds of each stage alone"
                " (over its floor), and of a round:"
            ),
            "",
        )
        yield from table(("shape", "", "plan", "stages", "round", "/ stages", "host gap"), stages)
        yield from ("", f"Kernels of a plain round per layer: {', '.join(kernels) or 'not counted'}.")
        yield from ("", "**Synthetic acceptance**, which says nothing of any model:", "")
        yield from table(("shape", "", "plan, reading of the paper's rates", "tokens/s", "× plain"), ratios)


def _sampled(part: dict[str, Any]) -> Iterator[str]:
    rows = [
        [
            name,
            *(
                f"{found[tier]['ms_per_round']['sampled']:.3f} ({found[tier]['sampled / greedy']:.2f})"
                for tier in ("plain", "three_tier")
            ),
            f"{found['three_tier / plain']['sampled']:.2f}",
        ]
        for name, found in part.items()
        if isinstance(found, dict) and "three_tier / plain" in found
    ]
    if rows:
        how = part["sampling"]
        yield from (
            "",
            (
                f"Sampled at temperature {how['temperature']} and top_p {how['top_p']}: ms of a round (over"
                " that of a greedy one), and tokens/s of three tiers × plain's:"
            ),
            "",
        )
        yield from table(("", "plain", "three tiers", "× plain"), rows)


def _profile(part: dict[str, Any]) -> Iterator[str]:
    rows = [
        [
            name,
            str(found["kernels"]),
            f"{found['us'] / 1e3:.3f}",
            f"{found['ms']:.3f}",
            ", ".join(f"{each['name'][:40]} {each['count']} × ({each['us']:.0f} us)" for each in longest),
        ]
        for name, found in part.items()
        if isinstance(found, dict) and (longest := found.get("longest", [])[:3])
    ]
    if rows:
        yield from ("", f"One replay of a round's graph on {part['model']}, batch 1:", "")
        yield from table(("", "kernels", "ms of kernels", "ms of the replay", "longest in sum"), rows)


def _compiling(parts: dict[str, Any]) -> Iterator[str]:
    seconds = {
        name: part["compiling"]["seconds"] for name, part in parts.items() if part.get("compiling", {})
    }
    if any(seconds.values()):
        said = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items() if value)
        yield from ("", f"Compiling of kernels, left out of all times: {said}.")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path)
    parser.add_argument("--docs", type=Path, default=DOCS)
    chosen = parser.parse_args(arguments)
    try:
        result = read_result(chosen.result)
        source = f"[{chosen.result.name}](../../benchmarks/results/{chosen.result.name})"
        document = written(chosen.docs.read_text(encoding="utf-8"), lines_of(result, source))
        write_atomically(chosen.docs, document.encode())
    except (ReportError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
