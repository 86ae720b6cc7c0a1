"""Running text, conversations and functions, as each source has them."""

from __future__ import annotations

import ast
import html
import io
import random
import re
import textwrap
import warnings
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path, PurePosixPath

from .cleaning import ADULT, CONTACT, MARKUP, MIN_CHARS, Row, cut, is_prose, sample

DIALOGUE_CHARS = 1400  # these have fewer characters a token
CODE_CHARS = 1100

# ---- books and speeches ----

# Spelling of 1623, and verses with numbers.
_LEFT_OUT = ("shakespeare-", "bible-")
_VERSE = ("blake-", "milton-", "whitman-")


def prose(books: Iterable[tuple[str, bytes]], per_book: int, seed: int) -> Iterator[Row]:
    """Of each book, at most `per_book` texts."""
    for name, content in books:
        book = PurePosixPath(name).stem
        if book.startswith(_LEFT_OUT):
            continue
        lines = content.decode("utf-8", "replace").replace("\r\n", "\n")
        paragraphs = [
            textwrap.dedent(each).strip("\n")
            if book.startswith(_VERSE)
            else re.sub(r"\s+", " ", each).strip()
            for each in re.split(r"\n\s*\n", lines.replace("_", "").replace("--", " – "))
        ]
        # Titles, headings and contents have no end of a sentence.
        kept = (each for each in paragraphs if re.search(r"[.,;:!?–][\"')]*$", each))
        texts = [{"text": text, "title": book} for text in cut(kept) if is_prose(text)]
        yield from sample(texts, book, seed)[:per_book]


_HEADING = re.compile(r"(?:\b[A-Z]{2,}\b\W+){3}")  # capitals in running text


def speeches(texts: Iterable[tuple[str, bytes]], per_speech: int, seed: int) -> Iterator[Row]:
    for name, content in texts:
        title = PurePosixPath(name).stem
        text = re.sub(r"\[[^\]]*\]", "", content.decode("utf-8", "replace"))
        paragraphs = [re.sub(r"\s+", " ", text).strip()]
        kept = (each for each in cut(paragraphs) if is_prose(each) and not _HEADING.search(each))
        rows = [{"text": each, "title": title} for each in kept]
        yield from sample(rows, title, seed)[:per_speech]


# ---- Wikipedia ----

_PAGE = re.compile(r"<title>([^<]*)</title>.*?<text[^>]*>(.*?)</text>", re.DOTALL)
_TAGS = "ref|math|gallery|table|pre|code|source|timeline|div|center|sup|sub|imagemap|blockquote"
_BLOCK = re.compile(rf"<({_TAGS})\b(?:[^>]*/>|[^>]*>.*?</\1\s*>)", re.DOTALL | re.IGNORECASE)
_NESTED = re.compile(r"\{\{[^{}]*\}\}|\{\|(?:(?!\{\||\|\}).)*\|\}", re.DOTALL)
_FILE = re.compile(r"\[\[(?:[^\[\]|:]+):(?:[^\[\]]|\[\[[^\[\]]*\]\])*\]\]")
_LINK = re.compile(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]")
# Articles that a program made of the same census for some 30,000 places.
_CENSUS = re.compile(r"racial makeup of|median income for a|census of 2000|United States Census Bureau")


def strip_wiki(source: str) -> list[str]:
    """The paragraphs of running text in wiki markup. Where a formula or template stood in a paragraph, all of
    it is left out; so are headings, lists and tables."""
    text = html.unescape(html.unescape(source)).replace("\0", "")
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"</?nowiki\s*/?>|\'{2,}|__[A-Z]+__", "", text)
    text = re.sub(r"<ref\b[^>]*/>|<ref\b[^>]*>.*?</ref\s*>", "", text, flags=re.DOTALL | re.IGNORECASE)
    text = _BLOCK.sub("\0", text)
    for pattern in (_NESTED, _FILE):
        for _ in range(8):  # from the innermost out
            text, changed = pattern.subn("\0" if pattern is _NESTED else "", text)
            if not changed:
                break
    text = _LINK.sub(r"\1", text)
    text = re.sub(r"\[https?:[^\s\]]*\s+([^\]]*)\]", r"\1", text)
    text = re.sub(r"\s*\[https?:[^\]]*\]", "", text)
    text = re.sub(r"</?[a-zA-Z][^<>]*>", " ", text)
    paragraphs = []
    for line in text.split("\n"):
        line = re.sub(r"[\s\xa0]+", " ", line)
        line = re.sub(r"\(\s*[;,]?\s*\)|(?<=\()[;,]\s*", "", line).replace("( ", "(").strip()
        line = re.sub(r" +(?=[.,;])|(?<= ) +", "", line.removeprefix("\0").removesuffix("\0")).strip()
        if line and line[0] not in "*#:;|!{=-" and line[-1] in '.!?")' and not MARKUP.search(line):
            paragraphs.append(line)
    return paragraphs


def articles(dump: str, seed: int) -> Iterator[tuple[str, list[str]]]:
    """(title, paragraphs) of the articles, in an order of the seed."""
    pages = [match.span() for match in _PAGE.finditer(dump)]
    random.Random(f"{seed} pages").shuffle(pages)
    for start, end in pages:
        match = _PAGE.match(dump, start, end)
        assert match is not None
        title, source = html.unescape(match[1]), match[2]
        if ":" in title or title.startswith(("List of", "Lists of")) or "isambig" in title:
            continue
        if source[:20].lower().lstrip().startswith("#redirect") or "isambig" in source or "{{dis" in source:
            continue
        if not _CENSUS.search(source) and (paragraphs := strip_wiki(source)):
            yield title, paragraphs


def encyclopedia(dump: str, per_article: int, seed: int) -> Iterator[Row]:
    """Texts with the article's title; `first`: the text is the article's beginning."""
    for title, paragraphs in articles(dump, seed):
        texts = [text for text in islice(cut(paragraphs), 40) if is_prose(text)]
        first = paragraphs[0][:80]
        rows = [{"text": text, "title": title, "first": text.startswith(first)} for text in texts]
        yield from sample(rows, title, seed)[:per_article]


# ---- dialogue ----


def turns_of(conversation: Row) -> list[str]:
    """What the two say by turns: a speaker's messages in a row are one turn."""
    turns: list[str] = []
    speaker = None
    for message in (message for group in conversation["messages"] for message in group):
        text = re.sub(r"\s+", " ", message["text"]).strip()
        if not text:
            continue
        if message["sender"] == speaker:
            turns[-1] += " " + text
        else:
            turns.append(text)
        speaker = message["sender"]
    return turns


def conversations(data: dict[str, Row]) -> Iterator[tuple[str, list[str]]]:
    """(the question that they were given, turns) of those that are English and name nothing to reach someone
    by."""
    for key in sorted(data):
        turns = turns_of(data[key])
        together = " ".join(turns)
        unfit = CONTACT.search(together) or ADULT.search(together) or not together.isascii()
        if len(turns) >= 4 and not unfit:
            yield (data[key].get("prompt") or "").strip(), turns


def dialogue(data: dict[str, Row]) -> Iterator[Row]:
    for _, turns in conversations(data):
        lines = [f"{'AB'[number % 2]}: {turn}" for number, turn in enumerate(turns)]
        for text in islice(_cut_lines(lines, DIALOGUE_CHARS), 3):
            yield {"text": text}


def _cut_lines(lines: Iterable[str], max_chars: int) -> Iterator[str]:
    part = ""
    for line in lines:
        if len(part) + len(line) + 1 > max_chars:
            if len(part) >= MIN_CHARS:
                yield part
            part = ""
        part += "\n" * bool(part) + line[:max_chars]
    if len(part) >= MIN_CHARS:
        yield part


# ---- code ----

_NOT_READ = ("test", "tests", "idlelib", "lib2to3", "site-packages", "turtledemo", "encodings", "pydoc_data")


def functions(folder: Path) -> Iterator[tuple[str, str, str]]:
    """(module, source, beginning of the source up to its docstring's end) of functions, methods and classes
    with a docstring in Python's standard library."""
    for path in sorted(folder.rglob("*.py")):
        inside = path.relative_to(folder)
        if set(inside.parts[:-1]) & set(_NOT_READ):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(source)
        except (OSError, ValueError, SyntaxError):
            continue
        lines = io.StringIO(source).readlines()  # as Python counts them: a form feed ends none
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            if ast.get_docstring(node) is None or node.end_lineno is None:
                continue
            start = min([node.lineno, *(each.lineno for each in node.decorator_list)]) - 1
            whole = textwrap.dedent("".join(lines[start : node.end_lineno]))
            head = textwrap.dedent("".join(lines[start : node.body[0].end_lineno]))
            if whole.startswith(("def ", "async def ", "class ", "@")):  # else: strings at the line's start
                yield ".".join(inside.with_suffix("").parts), whole.rstrip(), head.rstrip()


def code(folder: Path) -> Iterator[Row]:
    for module, whole, _ in functions(folder):
        if MIN_CHARS <= len(whole) <= CODE_CHARS:
            yield {"text": whole, "title": module}
