"""What README.md and docs/ name exists: files, anchors, commands, functions; the picture of the round is up
to date."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from hispec.cli import main
from hispec.metrics.table import (
    ERROR_KINDS,
    FINISH_REASONS,
    LENGTH_BOUNDS,
    REQUEST_BOUNDS,
    TOKEN_BOUNDS,
    table_lines,
)

from .test_imports import LEVELS, PACKAGES

ROOT = Path(__file__).resolve().parents[1]
TOP = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
PAGES = [*TOP, *sorted((ROOT / "docs").glob("**/*.md"))]
FOLDERS = "hispec|ee_models|cache|tests|configs|benchmarks|examples|scripts|docs"
WIDE = [ROOT / "README.md"]  # pages that may have lines of more than 110 columns
# A path as prose and code blocks name it; not the end of another one, nor of a URL.
PATH = re.compile(rf"(?<![\w./~$-])(?:{FOLDERS})/[\w./*<>-]*")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def anchors_of(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)) for title in titles]
    return {title.strip().lower().replace(" ", "-") for title in plain}


def broken_links(page: Path, text: str) -> Iterator[str]:
    for link in LINK.findall(text):
        if link.startswith(("http:", "https:", "mailto:")):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        exists = target.exists()
        if exists and anchor:
            exists = anchor in anchors_of(target.read_text(encoding="utf-8") if file else text)
        if not exists:
            yield link


def missing_paths(text: str) -> Iterator[str]:
    """Paths in the repository that a text names and that do not exist; `*` stands for any characters, and a
    path with NAME in it for one of the reader's."""
    for found in sorted(set(PATH.findall(text))):
        path = found.rstrip("./-")
        if "NAME" not in path and not any(ROOT.glob(path)):
            yield path


def test_the_checks_find_what_they_look_for() -> None:
    page = ROOT / "docs" / "README.md"
    text = "# A `b`: c, d\n[1](jobs.md) [2](no.md) [3](#a-b-c-d) [4](#e) [5](jobs.md#no) [6](http://x/no.md)"
    assert list(broken_links(page, text)) == ["no.md", "#e", "jobs.md#no"]
    text = (
        "`hispec/llm.py`, hispec/no.py. tests/laws/test_*.py, tests/no_*.py (docs/) ~/.cache/hispec x/cache/a"
    )
    assert list(missing_paths(text)) == ["hispec/no.py", "tests/no_*.py"]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not list(broken_links(page, text))
    assert not list(missing_paths(text))


def test_every_page_stands_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    linked = set(LINK.findall(index))
    assert {page.name for page in PAGES if page.parent.name == "docs"} - {"README.md"} <= linked
    figures = LINK.findall((ROOT / "docs" / "performance.md").read_text(encoding="utf-8"))
    pages = {f"performance/{page.name}" for page in PAGES if page.parent.name == "performance"}
    assert pages and pages <= {link.partition("#")[0] for link in figures}


@cache
def options_of(command: str) -> str:
    """What `hispec COMMAND --help` prints; "" if there is no such command."""
    import contextlib
    import io

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        try:
            main([command, "--help"])
        except SystemExit as end:
            if end.code:
                return ""
    return printed.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_and_their_options_exist(page: Path) -> None:
    """In code: `hispec COMMAND ... --option`, also over lines that end with a backslash; `make TARGET`."""
    text = page.read_text(encoding="utf-8").replace("\\\n", "")
    code = re.findall(r"^ {4,}(.*)$", text, re.MULTILINE) + re.findall(r"`([^`]+)`", text)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for line in code:
        if found := re.match(r"hispec ([a-z]+)(.*)", line.partition("#")[0], re.DOTALL):
            command, rest = found.groups()
            help_text = options_of(command)
            assert help_text, f"no such command: hispec {command}"
            for option in re.findall(r"(?<!\S)\[?(--[\w-]+)", rest):
                assert option == "--help" or option in help_text, f"hispec {command} has no {option}"
        elif (words := line.split())[:1] == ["make"] and len(words) > 1:
            assert words[1] in targets, f"no such target: {line}"


def test_names_after_a_file_stand_in_it() -> None:
    """In docs/architecture.md, `file.py` followed by a colon and `names` in the same sentence."""
    checked = 0
    for file, sentence in re.findall(
        r"`((?:hispec|ee_models|cache)/[\w/]+\.py)`:((?:[^.]|\.\w)*)", ARCHITECTURE
    ):
        name = re.match(r"\s+`([\w.]+)`", sentence)
        if name is not None:
            last = name.group(1).split(".")[-1]
            source = (ROOT / file).read_text(encoding="utf-8")
            assert re.search(rf"\b(?:def|class) {last}\b", source), f"{file} has no {name.group(1)}"
            checked += 1
    assert checked >= 8


def test_classes_and_their_members_exist() -> None:
    """In docs/architecture.md, `Class` and `Class.member`, wherever the class is."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    source = "\n".join(path.read_text(encoding="utf-8") for path in files)
    for name, member in sorted(set(re.findall(r"`([A-Z]\w*[a-z]\w*)(?:\.(\w+))?`", ARCHITECTURE))):
        body = re.search(rf"^class {name}\b.*?(?=^\S|\Z)", source, re.MULTILINE | re.DOTALL)
        assert body is not None, f"there is no class {name}"
        assert not member or re.search(rf"\b{member}\b", body.group()), f"{name} has no {member}"


def test_the_floors_of_imports_are_those_of_the_test() -> None:
    rows = re.findall(r"^\| \d+ \| (.*) \|$", ARCHITECTURE, re.MULTILINE)
    assert [set(re.findall(r"`(\w+)`", row)) for row in rows] == LEVELS


def test_every_folder_is_explained() -> None:
    folders = {path.parent.name for path in (ROOT / "hispec").glob("*/__init__.py")}
    explained = set(re.findall(r"^\| `hispec/(\w+)/` \|", ARCHITECTURE, re.MULTILINE))
    assert explained == folders


def test_the_picture_of_the_round_is_what_its_script_draws() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "draw_round.py"))
    drawn = (ROOT / "docs" / "images" / "round.svg").read_text(encoding="utf-8")
    assert drawn == script["draw"](), "run python scripts/draw_round.py"


def test_the_picture_of_the_round_marks_all_that_was_dropped() -> None:
    """Cells and hidden states alike: of the draft tier and the check for what the check dropped, of all three
    for what verify dropped; besides, the KV after the round, and the legend."""
    drawn = (ROOT / "docs" / "images" / "round.svg").read_text(encoding="utf-8")
    assert drawn.count("url(#dropped-check)") == 2 + 2 + 1
    assert drawn.count("url(#dropped-verify)") == 3 + 2 + 1 + 1


@pytest.mark.parametrize("page", [page for page in PAGES if page not in WIDE], ids=name_of)
def test_prose_is_at_most_110_columns_wide(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if len(line) > 110 and not line.startswith("|")]


def test_the_page_of_metrics_has_the_table_of_the_code() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert "\n".join(table_lines()) in text
    for bounds in (REQUEST_BOUNDS, TOKEN_BOUNDS, LENGTH_BOUNDS):
        assert f"| {', '.join(f'{bound:g}' for bound in bounds)} |" in text
    for name in (*ERROR_KINDS, *FINISH_REASONS):
        assert f"`{name}`" in text
