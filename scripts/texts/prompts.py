"""Prompts in the shapes of tasks, which the model is to answer itself."""

from __future__ import annotations

import html
import json
import random
import re
from collections.abc import Iterable, Iterator
from itertools import cycle, islice
from pathlib import Path, PurePosixPath

from .cleaning import Row, cut, is_prose
from .sources import articles, conversations, functions

PROMPT_CHARS = 1000  # of a text in a prompt, which leaves room for the answer
LONG_CHARS = 3200  # of a long one: some 750 tokens

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


def long_summaries(dump: str, rng: random.Random, seed: int) -> Iterator[Row]:
    """One long text an article, where it has one."""
    for title, paragraphs in articles(dump, seed):
        for text in islice(cut(paragraphs, LONG_CHARS), 1):
            if len(text) >= LONG_CHARS // 2 and is_prose(text):
                yield prompt("long", rng.choice(_SUMMARY).format(text), title=title)


def passages(rows: list[Row], rng: random.Random) -> Iterator[Row]:
    """A question after several passages, of which one or two are on what it asks."""
    for here, row in enumerate(rows):
        others = [rows[rng.randrange(len(rows))] for _ in range(rng.randint(1, 3))]
        near = [each for each in rows[here + 1 : here + 2] if each["title"] == row["title"]]
        chosen = [row, *near, *others]
        rng.shuffle(chosen)
        texts = [f"{each['title']} {_shorter(each['text'], LONG_CHARS // len(chosen))}" for each in chosen]
        form = rng.choice(_OF_THINGS[:3] + _ON_TEXT)
        yield prompt("passages", "\n".join([*texts, form.format(row["title"])]), title=row["title"])


_PLACEHOLDER = re.compile(r"[{}\[\]<>`*]|http")


def german(files: Iterable[tuple[str, bytes]], rng: random.Random) -> Iterator[Row]:
    """Sentences of a program's German texts."""

    def strings(value: object) -> Iterator[str]:
        for each in value.values() if isinstance(value, dict) else ():
            yield from [each] if isinstance(each, str) else strings(each)

    for _, content in files:
        found = (re.sub(r"\s+", " ", text).strip() for text in strings(json.loads(content)))
        kept = [text for text in found if 50 <= len(text) <= 400 and not _PLACEHOLDER.search(text)]
        for text in rng.sample(kept, min(20, len(kept))):
            yield prompt("translation", rng.choice(_TO_ENGLISH).format("German", text), language="German")


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


def _shorter(text: str, max_chars: int = PROMPT_CHARS) -> str:
    return next(cut(text.split("\n\n"), max_chars), text[:max_chars])
