"""Rows of a job on the page: its manifest, tokens by tier, and texts in the colours of tiers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, get_args

from ..jobs.manifest import Manifest
from ..jobs.rates import problem_of
from ..outputs import TokenTier
from ..stats import STAGES, stage_seconds
from ..utils.console import percent
from .markup import Html, bar, element, histogram, join, legend, missing, paragraph, table, times

MOST_TEXTS = 20  # outputs whose text is shown
MOST_TOKENS = 2000  # of each that are
_TIERS = get_args(TokenTier)


@dataclass
class Rows:
    """What is kept of the rows of a job, one after the other.

    texts   (name of the row, prompt, tiers, what each token added) of the first outputs that have them
    """

    num: int = 0
    num_errors: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    num_with_tiers: int = 0
    tiers: Counter[str] = field(default_factory=Counter)
    texts: list[tuple[str, str, list[str], list[str]]] = field(default_factory=list)

    def add(self, row: Mapping[str, Any]) -> None:
        """Raises KeyError, TypeError or ValueError for what is no row of a job."""
        self.num += 1
        self.num_errors += row["error"] is not None
        if (usage := row["usage"]) is not None:
            self.prompt_tokens += usage["prompt_tokens"]
            self.completion_tokens += usage["completion_tokens"]
        name = f"row {row['index']}" if row["id"] is None else str(row["id"])
        prompt = row.get("prompt", row.get("messages", row.get("prompt_token_ids", "")))
        for output in row["outputs"]:
            if (tiers := output.get("tiers")) is None:
                continue
            pieces = output.get("token_texts")
            _check_list("tiers", tiers)
            _check_list("token_texts", [] if pieces is None else pieces)
            if unknown := set(tiers) - set(_TIERS):
                raise ValueError(f"tiers: {sorted(unknown)[0]!r} is none of {', '.join(_TIERS)}")
            self.num_with_tiers += 1
            self.tiers.update(tiers)
            if pieces is not None and len(pieces) != len(tiers):
                raise ValueError(f"{len(tiers)} tiers and {len(pieces)} token_texts")
            if pieces is not None and len(self.texts) < MOST_TEXTS:
                shown = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
                self.texts.append((name, shown, tiers, pieces))


def _check_list(name: str, value: Any) -> None:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise TypeError(f"{name} must be a list of strings")


def rows_section(rows: Rows, manifest: Manifest | None, problem: str | None = None) -> Html:
    """problem: why the manifest cannot be read."""
    parts = [
        paragraph(
            f"{rows.num} rows, {rows.num_errors} with errors: {rows.prompt_tokens} tokens in prompts,"
            f" {rows.completion_tokens} new."
        ),
        element("h3", "Settings"),
        missing(f"settings: {problem or 'there is no manifest beside it'}")
        if manifest is None
        else _settings(manifest),
        element("h3", "Tokens by tier"),
        _tiers(rows),
    ]
    counts = {} if manifest is None else manifest.counts
    if counts and (damage := problem_of(counts)) is not None:
        parts.append(missing(f"what its manifest has counted: {damage}"))
        counts = {}
    others = (
        ("Acceptance by tier", _acceptance(counts), "drafts that were not kept, which its manifest has"),
        ("Acceptance by place in the draft", None, "places, which a trace has (engine.trace)"),
        ("Accepted lengths", _lengths(counts), "where rounds end, which its manifest has"),
        ("Where time goes", _times(counts), "times by stage, which its manifest has of rounds on a CPU"),
        ("Layer passes per token", _passes(counts), "layer passes, which its manifest has"),
        ("Decisions of the controller", None, "decisions, which a trace has"),
    )
    for title, found, what in others:
        parts += [element("h3", title), missing(what) if found is None else found]
    parts += [element("h3", "Texts"), _texts(rows)]
    return join(parts)


def _settings(manifest: Manifest) -> Html:
    state = f"{manifest.done} of {manifest.rows} rows done, {manifest.errors} with errors"
    times = f"begun {manifest.started}, {f'ended {manifest.finished}' if manifest.finished else 'not ended'}"
    values = [(name, json.dumps(value, ensure_ascii=False)) for name, value in manifest.settings.items()]
    return join(
        (paragraph(f"{state}; {times}; HiSpec {manifest.hispec}."), table(("setting", "value"), values))
    )


def _acceptance(counts: Mapping[str, Any]) -> Html | None:
    tiers = [
        ("drafts that the tier above kept", "draft_kept", "drafted"),
        ("of these looked up", "looked_up_kept", "looked_up"),
        ("drafts that a check kept", "check_kept", "check_judged"),
    ]
    # Without a check tentative tokens are the drafts again, and where plans change, a mixture of both.
    if counts.get("check_judged") == counts.get("drafted"):
        tiers.append(("tentative tokens that verify kept", "accepted", "tentative"))
    rows = [
        (name, f"{counts[kept]} of {counts[whole]}", percent(share), bar(share))
        for name, kept, whole in tiers
        if counts.get(whole)
        for share in [counts[kept] / counts[whole]]
    ]
    return table(("tier", "tokens", "share", ""), rows) if rows else None


def _lengths(counts: Mapping[str, Any]) -> Html | None:
    lengths = counts.get("accept_length_histogram", ())
    return histogram("tokens committed by a row's round", lengths) if sum(lengths) else None


def _times(counts: Mapping[str, Any]) -> Html | None:
    seconds = counts and stage_seconds([counts[f"{stage}_pass_s"] for stage in STAGES], counts["round_s"])
    return times("of rounds", seconds) if seconds else None


def _passes(counts: Mapping[str, Any]) -> Html | None:
    if not counts.get("tokens"):
        return None
    layers = counts["row_layer_passes"] / counts["tokens"]
    return paragraph(f"{layers:.2f} layers, {layers / counts['num_layers']:.2f} of the whole model.")


def _tiers(rows: Rows) -> Html:
    total = rows.tiers.total()
    if not total:
        return missing("tiers, which a job with sampling.tiers=true writes")
    shares = [(tier, rows.tiers[tier], rows.tiers[tier] / total) for tier in _TIERS]
    return table(
        ("tier", "tokens", "share", ""),
        [(tier, str(n), f"{share:.1%}", bar(share)) for tier, n, share in shares],
    )


def _texts(rows: Rows) -> Html:
    if not rows.texts:
        return missing("texts with tiers, which a job with sampling.tiers=true writes")
    parts = [legend((tier, f"var(--{tier})") for tier in _TIERS)]
    for name, prompt, tiers, pieces in rows.texts:
        cut = len(tiers) - MOST_TOKENS
        parts.append(element("h4", name))
        if prompt:
            parts.append(
                element("details", element("summary", "prompt"), element("div", prompt, _class="text"))
            )
        parts.append(element("div", *_spans(tiers[:MOST_TOKENS], pieces), _class="text"))
        if cut > 0:
            parts.append(paragraph(f"and {cut} more tokens"))
    if (left := rows.num_with_tiers - len(rows.texts)) > 0:
        parts.append(paragraph(f"and {left} more outputs with tiers"))
    return join(parts)


def _spans(tiers: Iterable[str], pieces: Iterable[str]) -> Iterable[Html]:
    """A span for each token that has text."""
    for tier, group in groupby(zip(tiers, pieces, strict=False), key=lambda each: each[0]):
        for _, piece in group:
            if piece:
                yield element("span", piece, _class=tier, title=tier)
