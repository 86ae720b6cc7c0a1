"""Texts of a bounded length, without what one would not show, in an order of the seed."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

CHARS = 1600  # of a text: about 370 tokens of English
MIN_CHARS = 200  # in less of a text, nearly all is guessed without context

Row = dict[str, Any]

_SENTENCE = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"')\]]))\s+(?=[\"'(\[]*[A-Z])")
_COMMON = set(
    "the of and to in a is that was for it with as on by at be are this from or an not he".split()  # noqa: SIM905
)
MARKUP = re.compile(r"[{}|<>\[\]=\\^~*_#@\0]|https?:|www\.")
CONTACT = re.compile(r"@\w|https?:|www\.|\d{3}[-. ]?\d{3}[-. ]?\d{4}|\b\d{7,}\b|\.com\b", re.IGNORECASE)
ADULT = re.compile(r"porn|\bsex|erotic|\bnud[ei]|\brap(?:e|ist)|\bfuck|\bshit|\btits\b", re.IGNORECASE)


def cut(paragraphs: Iterable[str], max_chars: int = CHARS) -> Iterator[str]:
    """Texts of MIN_CHARS to `max_chars` characters: paragraphs together as far as they fit; one that is too
    long is cut between sentences, and a sentence that is too long is left out, with which the text ends."""
    text = ""
    for paragraph in paragraphs:
        sentences = [paragraph] if len(paragraph) <= max_chars else _SENTENCE.split(paragraph)
        for number, part in enumerate(sentences):
            joined = text + (" " if number else "\n\n") * bool(text) + part
            if len(joined) > max_chars:
                if len(text) >= MIN_CHARS:
                    yield text
                joined = part if len(part) <= max_chars else ""
            text = joined
    if len(text) >= MIN_CHARS:
        yield text


def is_prose(text: str) -> bool:
    """Whether this is running English that one can show: no table, list of names, rest of markup, other
    language, or what is for adults."""
    words = re.findall(r"[a-z]+", text.lower())
    common = sum(word in _COMMON for word in words)
    odd = sum(not (char.isalpha() or char in " \n.,;:'\"!?()-") for char in text)
    foreign = sum(ord(char) > 0x2BF for char in text) - sum(text.count(char) for char in "–—‘’“”…")
    return (
        common >= 0.2 * len(words) > 0
        and odd <= 0.06 * len(text)
        and foreign <= 0.01 * len(text)
        and not MARKUP.search(text)
        and not ADULT.search(text)
    )


def distinct(rows: Iterable[Row], text_of: Callable[[Row], str]) -> Iterator[Row]:
    """Without rows that begin like an earlier one: its first 80 letters, whatever case, digits and signs."""
    seen = set()
    for row in rows:
        key = re.sub(r"[^a-z]+", "", text_of(row).lower()[:400])[:80]
        if key not in seen:
            seen.add(key)
            yield row


def sample(rows: Iterable[Row], name: str, seed: int) -> list[Row]:
    """All rows in an order of (seed, name)."""
    shuffled = list(rows)
    random.Random(f"{seed} {name}").shuffle(shuffled)
    return shuffled
