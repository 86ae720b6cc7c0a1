"""scripts/fetch_texts.py: archives are checked and read as data, texts are cut and cleaned. Nothing is
downloaded."""

from __future__ import annotations

import hashlib
import io
import json
import random
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "scripts"))

import fetch_texts  # noqa: E402
from texts.archives import FetchError, Package, fetch, read_members  # noqa: E402
from texts.cleaning import MIN_CHARS, cut, distinct, is_prose, sample  # noqa: E402
from texts.prompts import LONG_CHARS, chats, german, long_summaries, passages  # noqa: E402
from texts.sources import articles, conversations, functions, strip_wiki  # noqa: E402

SENTENCE = "The cat sat on the mat by the door of the house, and it was warm. "


def tar_of(path: Path, members: dict[str, bytes], link: str = "") -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        if link:
            info = tarfile.TarInfo("data/b.txt")
            info.type, info.linkname = tarfile.SYMTYPE, link
            archive.addfile(info)
    return path


def zip_of(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def package_of(path: Path, tool: str = "npm") -> Package:
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    return Package(tool, "some-texts", "1.0", path.name, found, "data/*.txt", "CC0")


# ---- archives ----


def test_only_the_named_members_are_read_and_nothing_is_written(tmp_path: Path) -> None:
    members = {"data/b.txt": b"two", "data/a.txt": b"one", "setup.py": b"raise SystemExit"}
    for path in (tar_of(tmp_path / "x.tgz", members), zip_of(tmp_path / "x.whl", members)):
        found = list(read_members(path, "data/*.txt"))
        assert found == [("data/a.txt", b"one"), ("data/b.txt", b"two")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.tgz", "x.whl"]


@pytest.mark.parametrize(
    "name", ["../evil.txt", "data/../../evil.txt", "/etc/evil.txt", "data\\..\\evil.txt"]
)
@pytest.mark.parametrize("kind", ["tgz", "whl"])
def test_an_archive_that_would_escape_its_folder_is_refused_whole(
    tmp_path: Path, kind: str, name: str
) -> None:
    members = {"data/a.txt": b"one", name: b"evil"}
    make = tar_of if kind == "tgz" else zip_of
    path = make(tmp_path / f"x.{kind}", members)
    with pytest.raises(FetchError, match="lies outside of the archive; nothing of this archive is used"):
        next(read_members(path, "data/*.txt"))


def test_links_large_members_none_and_damaged_archives_are_refused(tmp_path: Path) -> None:
    path = tar_of(tmp_path / "link.tgz", {}, link="/etc/passwd")
    with pytest.raises(FetchError, match=r"member 'data/b.txt' is not a plain file"):
        list(read_members(path, "data/*.txt"))
    for path in (
        tar_of(tmp_path / "large.tgz", {"data/a.txt": b"0" * 101}),
        zip_of(tmp_path / "large.whl", {"data/a.txt": b"0" * 101}),
    ):
        with pytest.raises(FetchError, match="has 101 bytes; the limit is 100"):
            list(read_members(path, "data/*.txt", max_bytes=100))
        with pytest.raises(FetchError, match=r"has no member like texts/\*"):
            list(read_members(path, "texts/*"))
    path.write_bytes(b"PK")
    with pytest.raises(FetchError, match=r"cannot be read: .*; delete it and run again"):
        list(read_members(path, "data/*.txt"))


def test_an_archive_with_another_sum_is_refused_where_it_lies_and_where_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = package_of(tar_of(tmp_path / "x.tgz", {"data/a.txt": b"one"}))
    assert fetch(package, tmp_path) == tmp_path / "x.tgz"
    with pytest.raises(FetchError, match=r"damaged, or not some-texts 1\.0; delete it and run again"):
        fetch(replace(package, sha256="0" * 64), tmp_path)

    def download(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        folder = command[command.index("--pack-destination") + 1]
        (Path(folder) / "y.tgz").write_bytes(b"something else")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(FetchError, match=r"damaged, or not some-texts 1\.0"):
        fetch(replace(package, file="y.tgz"), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.tgz"]


@pytest.mark.parametrize("tool", ["pip", "npm"])
def test_what_cannot_be_downloaded_is_named_with_the_tools_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str
) -> None:
    package = replace(package_of(tar_of(tmp_path / "x.tgz", {})), tool=tool, file="y.tgz")

    def offline(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nno route to host\n")

    monkeypatch.setattr(subprocess, "run", offline)
    words = "cannot download y.tgz of some-texts 1.0: no route to host; .* put the file into"
    with pytest.raises(FetchError, match=words):
        fetch(package, tmp_path)

    def missing(command: list[str], **_: Any) -> None:
        raise FileNotFoundError(command[0])

    monkeypatch.setattr(subprocess, "run", missing)
    with pytest.raises(FetchError, match="there is no "):
        fetch(package, tmp_path)


# ---- texts ----


def test_texts_are_cut_between_paragraphs_then_between_sentences() -> None:
    paragraphs = [SENTENCE.strip() + f" {number}." for number in range(30)]
    texts = list(cut(paragraphs, 600))
    assert all(MIN_CHARS <= len(text) <= 600 for text in texts)
    assert [each for text in texts for each in text.split("\n\n")] == paragraphs
    said = 'He said, "It is far to go." Then he went. '
    (first, *rest) = cut([(said * 40).strip()], 600)
    assert " ".join([first, *rest]) == (said * 40).strip()[: len(first + " ".join(["", *rest]))]
    assert len(rest) >= 2 and all(text.endswith((".", '."')) for text in (first, *rest))


def test_a_sentence_that_is_too_long_and_what_is_short_are_left_out() -> None:
    long = "word " * 200
    texts = list(cut(["Short.", long, SENTENCE * 4, "End. " + long], 500))
    assert len(texts) == 1 and texts[0].startswith(SENTENCE)


@pytest.mark.parametrize(
    "text",
    [
        "Abba, Beta, Gamma, Delta, Epsilon, Zeta, Eta, Theta, Iota, Kappa, Lambda, Mu, Nu, Xi, Omicron, Pi.",
        "Die Katze sitzt auf der Matte vor der Tür des Hauses, und es ist warm in der Sonne am Mittag.",
        "In the year of 1990: 12 34 56 78 90 12 34 56 78; of 1991: 12 34 56 78 90 12 34 56 78 the and of.",
        SENTENCE + "See [[Cat]].",
        SENTENCE + "The кошка of the дом is in the дом.",
        "",
    ],
    ids=["list", "german", "table", "markup", "letters", "empty"],
)
def test_what_is_no_english_prose_is_told(text: str) -> None:
    assert is_prose(SENTENCE)
    assert not is_prose(text)


def test_rows_that_begin_alike_are_one_and_the_order_is_the_seeds() -> None:
    rows = [{"text": SENTENCE * 2 + str(number)} for number in range(3)] + [{"text": "Other. " + SENTENCE}]
    found = list(distinct(rows, lambda row: str(row["text"])))
    assert found == [rows[0], rows[3]]
    numbers: list[dict[str, Any]] = [{"n": number} for number in range(20)]
    assert sample(numbers, "a", 0) == sample(numbers, "a", 0)
    assert sample(numbers, "a", 0) != sample(numbers, "a", 1)
    assert sample(numbers, "a", 0) != sample(numbers, "b", 0)


WIKI = """{{Infobox cat| name = [[Cat]] | {{nested|{{deep}}}} }}
[[Image:cat.jpg|thumb|A [[cat]] on a mat.]]
The '''cat''' ({{lang|la|felis}}) is dropped, a template stood in it.
The ''cat'' is a [[Mammal|small mammal]] of the family [[Felidae]].\
&lt;ref name=&quot;a&quot;&gt;A book.&lt;/ref&gt; It is [http://example.org/x loved]&amp;nbsp;by people [http://example.org].
== Behaviour ==
* a list of things.
{| class="wikitable"
| a cell of the table.
|}
It weighs &lt;math&gt;x^2&lt;/math&gt; kilograms.
It sleeps (&lt;!-- how long? --&gt;) for 16 hours , and is awake at night.
No end of a sentence
[[Category:Cats]] [[de:Katze]]"""


def test_of_wiki_markup_whole_paragraphs_of_text_are_left() -> None:
    assert strip_wiki(WIKI) == [
        "The cat is a small mammal of the family Felidae. It is loved by people.",
        "It sleeps for 16 hours, and is awake at night.",
    ]


def page(title: str, text: str) -> str:
    return f"<page><title>{title}</title><id>1</id><text xml:space='preserve'>{text}</text></page>"


def test_articles_are_pages_with_text_that_no_program_wrote() -> None:
    dump = "".join(
        [
            page("Cat", SENTENCE),
            page("Cats", "#REDIRECT [[Cat]]"),
            page("Talk:Cat", SENTENCE),
            page("List of cats", SENTENCE),
            page("Cat (disambiguation)", SENTENCE),
            page("Catville", SENTENCE + "The racial makeup of the town is this."),
            page("Dog", SENTENCE),
        ]
    )
    assert sorted(articles(dump, 0)) == [("Cat", [SENTENCE.strip()]), ("Dog", [SENTENCE.strip()])]


def test_long_texts_to_summarize_are_one_an_article_and_none_of_short_ones() -> None:
    paragraph = SENTENCE.strip()
    long = "\n".join([paragraph] * (2 * LONG_CHARS // len(paragraph)))
    dump = page("Cat", long) + page("Dog", paragraph) + page("Cow", long)
    rows = list(long_summaries(dump, random.Random(0), 0))
    assert sorted(row["metadata"]["title"] for row in rows) == ["Cat", "Cow"]
    for row in rows:
        (message,) = row["messages"]
        text = "\n\n".join(each for each in message["content"].split("\n\n") if paragraph in each)
        assert LONG_CHARS / 2 <= len(text) <= LONG_CHARS + 40


def test_a_question_comes_after_the_passages_of_which_one_is_on_it() -> None:
    rows = [{"title": f"Title{number}", "text": f"Of {number}. {SENTENCE}"} for number in range(9)]
    asked = list(passages(rows, random.Random(0)))
    assert len(asked) == 9
    for row, given in zip(asked, rows, strict=True):
        *before, question = row["messages"][0]["content"].split("\n")
        assert given["title"] in question
        assert any(each.startswith(f"{given['title']} {given['text'][:5]}") for each in before)
        assert 2 <= len(before) <= 4 and len("".join(before)) <= LONG_CHARS + 100


def test_german_to_translate_is_sentences_without_placeholders() -> None:
    whole = "Die Verbindung zum Gerät konnte nicht hergestellt werden, bitte versuche es erneut."
    texts = {
        "a": {"b": whole, "c": "Kurz."},
        "d": f"{whole} {{name}}",
        "e": [whole],
        "f": f"{whole} http://x.y",
    }
    rows = list(german([("de.json", json.dumps(texts).encode())], random.Random(0)))
    assert len(rows) == 1 and rows[0]["metadata"]["language"] == "German"
    assert rows[0]["messages"][0]["content"].startswith("Translate ") and whole in str(rows[0]["messages"])


def conversation(*turns: str, prompt: str | None = None) -> dict[str, Any]:
    messages = [[{"text": turn, "sender": str(number % 2)}] for number, turn in enumerate(turns)]
    return {"messages": messages, "prompt": prompt}


def test_conversations_become_texts_and_prompts_that_end_with_the_user() -> None:
    turns = [
        "Hello, how are you doing today, my friend?",
        "I am well.",
        "What do you like to read?",
        "Novels.",
    ]
    data = {
        "a": conversation(*turns, prompt="Mozart or Beethoven?"),
        "b": conversation("My number is 555 123 4567, do call me there.", *turns[1:]),
        "c": conversation(*turns[:3]),
    }
    data["a"]["messages"].append([{"text": "And poems.", "sender": "1"}])
    ((question, found),) = conversations(data)
    assert question == "Mozart or Beethoven?" and found == [*turns[:3], "Novels. And poems."]
    chat, alone = chats(data, random.Random(0))
    assert [message["content"] for message in chat["messages"]] == turns[:1]
    assert chat["metadata"] == {"task": "chat"} and alone["messages"][0]["content"] == question


def test_functions_stand_by_themselves_with_their_docstring(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "no.py").write_text('def no():\n    """No."""\n')
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "yes.py").write_text(
        "# A page ends here, but no line: \f\n"
        'class A:\n    @staticmethod\n    def f(x):\n        """Twice x."""\n        return 2 * x\n\n'
        "    def g(self):\n        return 1\n"
    )
    head = '@staticmethod\ndef f(x):\n    """Twice x."""'
    assert list(functions(tmp_path)) == [("yes", head + "\n    return 2 * x", head)]


# ---- the files ----


def test_files_are_made_once_and_again_where_one_is_missing_or_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def rows(_: fetch_texts.Sources) -> list[dict[str, Any]]:
        made.append("texts")
        return [{"text": f"{chr(97 + n)} {SENTENCE}", "title": "t", "first": True} for n in range(9)]

    monkeypatch.setattr(fetch_texts, "TARGETS", {"texts": fetch_texts.Target("a, b", None, rows)})
    table = fetch_texts.make_all(tmp_path, 0)
    path = tmp_path / "texts.jsonl"
    first = path.read_bytes()
    assert [set(json.loads(line)) for line in first.splitlines()] == [{"text", "title"}] * 9
    assert "| texts.jsonl | 9 | 0.0 | a, b | Python " in table and "| PSF |" in table
    assert (tmp_path / "README.md").read_text() == table
    assert fetch_texts.make_all(tmp_path, 0) == table and len(made) == 1
    path.write_bytes(first[:50])
    fetch_texts.make_all(tmp_path, 0)
    assert path.read_bytes() == first and len(made) == 2
    fetch_texts.make_all(tmp_path, 1)
    assert (
        sorted(path.read_bytes().splitlines()) == sorted(first.splitlines()) != path.read_bytes().splitlines()
    )
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "README.md",
        "archives",
        "made.json",
        "texts.jsonl",
    ]


def test_sources_are_none_of_the_evaluation_and_every_package_has_a_sum_and_a_licence() -> None:
    for name, target in fetch_texts.TARGETS.items():
        package = target.package
        assert package is None or (len(package.sha256) == 64 and package.licence), name
