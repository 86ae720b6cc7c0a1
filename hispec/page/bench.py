"""A benchmark's JSON on the page: its own numbers, as `hispec bench` prints them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..utils.console import number, percent
from .markup import Html, bar, element, histogram, join, missing, paragraph, table, times

_TIERS = (
    ("draft_kept", "draft kept"),
    ("looked_up_kept", "of these looked up: kept"),
    ("tentative_accepted", "tentative kept"),
)


def bench_section(result: Mapping[str, Any]) -> Html:
    engines = result["engines"]
    parts = [paragraph(f"{result['model']}: {result['prompts']['num']} prompts, batch {_batch(result)}.")]
    fastest = max(engine["tokens_per_s"] for engine in engines.values())
    rows = [
        (
            name,
            number(engine["tokens_per_s"], 1),
            number(result["ratio_to_plain"].get(name)),
            "/".join(map(str, result["exact_match"].get(name, ()))),
            bar(engine["tokens_per_s"] / fastest if fastest else None),
        )
        for name, engine in engines.items()
    ]
    parts += [element("h3", "Speed"), table(("", "tokens/s", "× plain", "same output", ""), rows)]
    parts += [paragraph(f"{name}: {one['plan']}") for name, one in engines.items() if one.get("plan")]
    parts += [element("h3", "Acceptance by tier"), _acceptance(result["acceptance"])]
    parts += [element("h3", "Acceptance by place in the draft")]
    parts += [missing("acceptance by place, which a trace has (engine.trace)")]
    parts += [element("h3", "Accepted lengths"), _lengths(engines)]
    parts += [element("h3", "Where time goes"), _time(engines)]
    parts += [
        times(f"of the rounds of {name}", engine["stage_s"])
        for name, engine in engines.items()
        if engine.get("stage_s")
    ] or [missing("time by stage, which only rounds on a CPU tell")]
    parts += [element("h3", "Layer passes per token"), _passes(engines)]
    parts += [element("h3", "Decisions of the controller"), missing("decisions, which a trace has")]
    return join(parts)


def _batch(result: Mapping[str, Any]) -> str:
    return str(result["options"].get("batch_size", "unknown"))


def _acceptance(acceptance: Mapping[str, Mapping[str, Any]]) -> Html:
    rows = [
        (name, tier, percent(values[key]), bar(values[key]))
        for name, values in acceptance.items()
        for key, tier in _TIERS
        if values.get(key) is not None
    ]
    return table(("", "tier", "share", ""), rows) if rows else missing("drafts: decoding was plain")


def _lengths(engines: Mapping[str, Mapping[str, Any]]) -> Html:
    found = [
        histogram(f"{name}: tokens committed", engine["accept_len_histogram"])
        for name, engine in engines.items()
        if engine.get("accept_len_histogram")
    ]
    return join(found) if found else missing("accepted lengths")


def _time(engines: Mapping[str, Mapping[str, Any]]) -> Html:
    rows = []
    for name, engine in engines.items():
        if engine.get("group_decode_seconds") and engine.get("group_seconds"):
            rounds, whole = sum(engine["group_decode_seconds"]), sum(engine["group_seconds"])
            share = rounds / whole if whole else None
            rows.append((name, number(whole), number(rounds), percent(share), bar(share)))
    if not rows:
        return missing("seconds of rounds")
    return table(("", "seconds", "of these in rounds", "share of rounds", ""), rows)


def _passes(engines: Mapping[str, Mapping[str, Any]]) -> Html:
    known = {
        name: engine for name, engine in engines.items() if engine.get("layer_passes_per_token") is not None
    }
    if not known:
        return missing("layer passes")
    most = max(engine["layer_passes_per_token"] for engine in known.values())
    rows = [
        (
            name,
            number(engine["layer_passes_per_token"]),
            number(engine.get("full_passes_per_token")),
            bar(engine["layer_passes_per_token"] / most if most else None),
        )
        for name, engine in known.items()
    ]
    return table(("", "layers", "of the whole model", ""), rows)
