"""What the parts of a run of the GPU benchmark have found together; each is a process with a JSON of its
own."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts.run import BENCHMARK, FIGURES, REHEARSAL, SYNTHETIC, figure_rows, state_of
from hispec.utils.environment import environment, hardware_text


def join_parts(folder: Path, parts: Sequence[str], died: Mapping[str, str]) -> dict[str, Any]:
    """One result of those in `folder`. died: what a part's process died of, or why there was none; whatever
    its JSON holds besides is kept. Of a figure that several parts have the worst counts."""
    found = {part: _read(folder / f"{part}.json") for part in parts}
    known = [result for result in found.values() if result is not None]
    result: dict[str, Any] = {
        "benchmark": BENCHMARK,
        "rehearsal": any(each["rehearsal"] for each in known) if known else True,
        "label": known[0]["label"] if known else REHEARSAL,
        "date": time.strftime("%Y-%m-%d"),
        "environment": known[0]["environment"] if known else environment(),
        "options": known[0]["options"] if known else {},
        "parts": {},
        "failures": [],
    }
    values: dict[str, list[float]] = {}
    rehearsed: dict[str, float] = {}
    reasons: dict[str, str] = {}
    for part, own in found.items():
        entry = {} if own is None else own["parts"].get(part, {})
        if own is not None:
            result["failures"] += own["failures"]
            rehearsed |= own.get("rehearsed_not_measured", {})
            reasons |= {key: reason for key, reason in own["reasons"].items() if key in own["said"]}
            if "copy_bytes_per_s" in own:
                result["copy_bytes_per_s"] = own["copy_bytes_per_s"]
            for key, value in own["figures"].items():
                if value is not None:
                    values.setdefault(key, []).append(value)
        if part in died:
            is_left_out = died[part].startswith("left out")
            entry = {**entry, "status": died[part] if is_left_out else "failed", "error": died[part]}
            if is_left_out:
                del entry["error"]
            else:
                result["failures"].append(f"{part}: {died[part]}")
        if (log := _log_of(folder / f"{part}.log")) and entry:
            entry = {**entry, "log": log}
        result["parts"][part] = entry or {"status": "not run yet"}
    result["figures"] = {
        key: (max if figure.is_most else min)(values[key]) if key in values else None
        for key, figure in FIGURES.items()
    }
    states = ", ".join(state_of(name, part) for name, part in result["parts"].items())
    otherwise = REHEARSAL if result["rehearsal"] else f"its part has not got there ({states})"
    result["reasons"] = {
        key: reasons.get(key, otherwise) for key, value in result["figures"].items() if value is None
    }
    if result["rehearsal"]:
        result["rehearsed_not_measured"] = rehearsed
    return result


def _log_of(path: Path, most: int = 200) -> list[str]:
    """The last lines of a part's log: where only one file is brought back, it has them."""
    if not path.exists():
        return []
    return path.read_text(encoding="utf-8", errors="replace").splitlines()[-most:]


def _read(path: Path) -> dict[str, Any] | None:
    """None where a part has written none, or died while it wrote."""
    try:
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return result


def print_table(result: dict[str, Any]) -> None:
    """Short, and last."""
    print()
    if result["rehearsal"]:
        print(f"*** {REHEARSAL} ***")
    print(f"{hardware_text(result['environment'])}; {result['label']}")
    for name, part in result["parts"].items():
        compiled = part.get("compiling", {}).get("seconds", 0.0)
        said = f", {compiled} s of it compiling" if compiled else ""
        print(f"  {state_of(name, part)} ({part.get('seconds', 0.0)} s{said})")
    for name, measured in result["parts"].get("shapes", {}).items():
        for batch, found in measured.items() if isinstance(measured, dict) else ():
            if isinstance(found, dict) and "synthetic" in found:
                ratios = ", ".join(
                    f"{case} {ratio:.2f}"
                    for case, ratio in found["synthetic"]["ratio_to_plain"].items()
                    if case != "plain"
                )
                print(f"  {name}, {batch}, {SYNTHETIC.split(':')[0].upper()}, x plain: {ratios}")
    rows = [("figure", "value", "target", ""), *figure_rows(result)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for key, reason in {} if result["rehearsal"] else result["reasons"].items():
        print(f"  {key}: {reason}")
    for text in result["failures"]:
        print(f"FAILED: {text}")
    print("correct" if not result["failures"] else f"{len(result['failures'])} FAILURES")
