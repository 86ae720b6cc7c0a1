"""`hispec report --html`: what the page says of each kind of file, and that it is safe and stands alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hispec.cli import main
from hispec.config import Plan
from hispec.control.choice import Choice
from hispec.errors import ConfigError
from hispec.jobs.bench import BenchOptions, run_bench
from hispec.jobs.manifest import manifest_path
from hispec.trace.summary import summarize
from hispec.trace.writer import read_trace
from tests.helpers.fake_llm import FakeLLM
from tests.helpers.job_support import THREE_TIER, install_fake_llm, make_job, prompts, run
from tests.helpers.traces import Clock, fixed_trace, goodput_trace, observation, writer

EVIL = "<script>alert('x')</script> & \"quoted\" </div>"
VOID = {"meta", "link", "img", "br", "hr", "input"}


class Page(HTMLParser):
    """The elements of a page: (name, attributes, text), and tables as lists of rows. Each element must end
    where it should."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.tables: list[list[list[str]]] = []
        self._open: list[int] = []
        self.feed(text)
        self.close()
        assert not self._open, "an element without an end"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))
        if tag not in VOID:
            self._open.append(len(self.elements) - 1)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.elements[self._open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        for at in self._open:
            self.elements[at][2].append(data)
        if self._open and self.elements[self._open[-1]][0] in ("td", "th"):
            self.tables[-1][-1][-1] += data

    def texts(self, tag: str, **wanted: str) -> list[str]:
        return [
            "".join(text)
            for name, attributes, text in self.elements
            if name == tag and all(attributes.get(key.strip("_")) == value for key, value in wanted.items())
        ]

    def table(self, *titles: str) -> list[list[str]]:
        """The rows of the only table with these titles, empty ones passed over; without the cells of bars."""
        (rows,) = (table[1:] for table in self.tables if [each for each in table[0] if each] == [*titles])
        return [row[:-1] if row[-1] == "" else row for row in rows]


def page_of(*files: Path) -> Page:
    target = files[0].with_name("page.html")
    assert main(["report", *map(str, files), "--html", str(target)]) == 0
    text = target.read_text(encoding="utf-8")
    assert not re.search(r"(https?:)?//\w|\burl\(|@import|\bsrc\s*=|\bhref\s*=", text), (
        "it refers to elsewhere"
    )
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & {name for name, _, _ in page.elements}
    assert not any(key.startswith("on") for _, attributes, _ in page.elements for key in attributes)
    return page


def output_row(index: int, **fields: Any) -> dict[str, Any]:
    return {
        "index": index,
        "id": None,
        "prompt": EVIL,
        "outputs": [{"text": "ab", "finish_reason": "stop", "stop_reason": None, **fields}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
        "error": None,
        "hash": "0" * 32,
    }


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_trace_gives_the_numbers_of_its_summary(tmp_path: Path) -> None:
    path = goodput_trace(tmp_path / "trace.jsonl")
    summary, page = summarize(read_trace(path)), page_of(path)
    plans = page.table("plan", "rounds", "seconds", "tokens/s", "share of seconds")
    assert [row[:2] for row in plans] == [
        [name, str(plan["rounds"])] for name, plan in summary["plans"].items()
    ]
    assert [row[-1] for row in plans] == ["70.0%", "20.0%", "10.0%"]
    assert page.table("of rounds", "seconds", "share") == [
        ["draft", "2.00", "20.0%"],
        ["check", "0.00", "0.0%"],
        ["verify", "6.00", "60.0%"],
        ["outside of passes", "2.00", "20.0%"],
    ]
    tiers = page.table("plan", "tier", "share")
    hybrid = "hybrid D=4 C=15 K=3 R=2"
    assert [hybrid, "tentative kept", "33.3%"] in tiers and ["ngram K=4", "draft kept", "50.0%"] in tiers
    assert len(page.texts("svg")) == 2 and any(
        "70" in text or "ngram" in text for text in page.texts("title")
    )
    decisions = page.table("seconds", "plan", "reason", "predicted tokens/s", "measured before")
    assert len(decisions) == summary["control"]["decisions"]
    assert any("layer passes per token" in text for text in page.texts("p", _class="missing"))


def test_a_trace_of_a_fixed_plan_says_that_it_has_no_decisions(tmp_path: Path) -> None:
    lacks = page_of(fixed_trace(tmp_path / "trace.jsonl")).texts("p", _class="missing")
    assert any("the plan was fixed" in text for text in lacks)


def test_nothing_is_drawn_where_nothing_ran_and_routes_differ(tmp_path: Path) -> None:
    """As often as each of ten routes runs, with a pause of minutes before the last."""
    routes, clock = [f"route {at}" for at in range(10)], Clock()
    with closing(writer(tmp_path / "trace.jsonl", clock, routes)) as trace:
        for at in (*range(10), 9):
            clock.now += 500.0 if at == 9 else 1.0
            trace.write_rounds(observation(Choice(at, Plan(0, None, 4)), seconds=0.5))
    page = page_of(tmp_path / "trace.jsonl")
    boxes = [text for text in page.texts("title") if text.startswith("route 9")]
    assert len(boxes) == 2, "a pause between them"
    fills = {attributes["style"] for name, attributes, _ in page.elements if name == "rect"}
    assert len({fill for fill in fills if fill and "--c" in fill}) == 10


def test_a_trace_that_another_program_has_written_again_is_one(tmp_path: Path) -> None:
    path = fixed_trace(tmp_path / "trace.jsonl")
    lines = [json.dumps(json.loads(line), separators=(",", ":")) for line in path.read_text().splitlines()]
    path.write_text("\n".join(lines) + "\n")
    assert any("the plan was fixed" in text for text in page_of(path).texts("p", _class="missing"))


def test_lengths_and_places_are_counted_from_requests(tmp_path: Path) -> None:
    """Two cycles: of 3 drafts 1 was kept, then of 2 both; and a plain round."""
    path = goodput_trace(tmp_path / "trace.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    requests = [line for line in lines if line["type"] == "request"]
    for line in requests:
        line["rounds"] = []
    requests[0]["rounds"] = [[1, 5, [3, 2], [1, 2]], [-1, 1, [], []]]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary, page = summarize(read_trace(path)), page_of(path)
    assert summary["accept_len_histogram"] == [0, 1, 0, 0, 0, 1]
    name = "hybrid D=4 C=15"
    assert summary["accepted_by_place"] == {name: [{"judged": 2, "kept": 2}, {"judged": 2, "kept": 1}]}
    assert page.table("route", "place", "judged", "kept") == [
        [name, "1", "2", "100.0%"],
        [name, "2", "2", "50.0%"],
    ]
    assert page.table("tokens committed by a row's round", "rounds", "share") == [
        ["1", "1", "50.0%"],
        ["5", "1", "50.0%"],
    ]


def test_a_bench_gives_its_own_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_llm(monkeypatch)
    job = make_job(tmp_path, prompts(3), speculative=THREE_TIER)
    result = run_bench(job, BenchOptions(repeats=1, transformers=False), progress=False)
    result["model"] = EVIL
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(result, indent=1))
    page = page_of(path)
    shares = page.table("tier", "share")
    assert shares[0] == ["two_tier", "draft kept", "50.0%"]
    assert ["three_tier", "tentative kept", "50.0%"] in shares
    passes = page.table("layers", "of the whole model")
    assert [row[0] for row in passes] == ["plain", "two_tier", "three_tier"]
    wanted = result["engines"]["three_tier"]["layer_passes_per_token"]
    assert passes[2][1] == f"{wanted:.2f}"
    assert any("time by stage" in text for text in page.texts("p", _class="missing")), "none were timed"
    for engine in result["engines"].values():
        engine["stage_s"] = {"verify": 3.0, "outside of passes": 1.0}
    path.write_text(json.dumps(result))
    assert page_of(path).table("of the rounds of plain", "seconds", "share")[0] == ["verify", "3.00", "75.0%"]
    histogram = page.table("three_tier: tokens committed", "rounds", "share")
    counts = result["engines"]["three_tier"]["accept_len_histogram"]
    assert [row[:2] for row in histogram] == [[str(n), str(count)] for n, count in enumerate(counts) if count]
    assert any(EVIL in text for text in page.texts("p")), "as text"
    result |= {"of_a_later_version": {"x": [1]}}
    result["engines"]["plain"]["of_a_later_version"] = None
    path.write_text(json.dumps(result))
    assert page_of(path).table("layers", "of the whole model") == passes
    for field, value in (("accept_len_histogram", [-1, 1]), ("tokens_per_s", 10**400)):
        damaged = json.loads(json.dumps(result))
        damaged["engines"]["plain"][field] = value
        path.write_text(json.dumps(damaged))
        assert main(["report", str(path), "--html", str(tmp_path / "page.html")]) == 2


def test_rows_with_tiers_are_shown_token_by_token_and_escaped(tmp_path: Path) -> None:
    pieces = ["<script>", "", " x\n\ud800", "&amp;"]
    tiers = ["draft", "check", "draft", "verify"]
    path = write_rows(
        tmp_path / "out.jsonl", output_row(0, tiers=tiers, token_texts=pieces), output_row(1), output_row(2)
    )
    page = page_of(path)
    assert page.table("tier", "tokens", "share") == [
        ["draft", "2", "50.0%"],
        ["check", "1", "25.0%"],
        ["verify", "1", "25.0%"],
    ]
    assert page.texts("span", _class="draft") == ["<script>", " x\n?"], "half a character"
    assert page.texts("span", _class="verify") == ["&amp;"] and page.texts("span", _class="check") == []
    assert page.texts("div", _class="text") == [EVIL, "".join(pieces).replace("\ud800", "?")]
    lacks = page.texts("p", _class="missing")
    assert any("no manifest" in text for text in lacks) and any("where rounds end" in text for text in lacks)


def page_of_counts(folder: Path, num_rows: int, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Page:
    """The page of a job whose manifest has its counts changed."""
    job = make_job(folder, prompts(num_rows), speculative=THREE_TIER)
    run(job)
    path = manifest_path(job.output.path)
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"counts": change(manifest["counts"])}))
    return page_of(job.output.path)


@pytest.mark.parametrize(("judged", "is_shown"), [(0, False), (5, False), (8, True)])
def test_a_share_of_tentative_tokens_needs_a_check_of_all_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judged: int, is_shown: bool
) -> None:
    """Else it is the drafts' again, or a mixture of both."""
    install_fake_llm(monkeypatch)
    changed = {"drafted": 8, "check_judged": judged, "check_kept": 0}
    page = page_of_counts(tmp_path, 4, lambda counts: counts | changed)
    names = [name for name, *_ in page.table("tier", "tokens", "share")]
    assert ("tentative tokens that verify kept" in names) == is_shown


def test_rows_without_tiers_say_so_and_the_manifest_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake_llm(monkeypatch)
    job = make_job(
        tmp_path, prompts(4), sampling={"temperature": 0.0, "stop": [EVIL]}, speculative=THREE_TIER
    )
    run(job)
    assert FakeLLM.instances
    page = page_of(job.output.path)
    counts = json.loads(manifest_path(job.output.path).read_text())["counts"]
    name, tokens, share = page.table("tier", "tokens", "share")[0]
    assert (name, tokens) == (
        "drafts that the tier above kept",
        f"{counts['draft_kept']} of {counts['drafted']}",
    )
    assert share == "50.0%"
    assert any(text.endswith("of the whole model.") for text in page.texts("p"))
    settings = dict(page.table("setting", "value"))
    assert settings["model"] == '"fake"' and EVIL in json.loads(settings["sampling.stop"])
    assert any(text.startswith("4 of 4 rows done, 0 with errors") for text in page.texts("p"))
    assert sum("sampling.tiers=true" in text for text in page.texts("p", _class="missing")) == 2


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({"drafted": "many"}, "counts.drafted is 'many'"),
        ({"tokens": -1}, "counts.tokens is -1"),
        ({"rounds": True}, "counts.rounds is True"),
        ({"round_s": 10**400}, "counts.round_s is 1000"),
        ({"num_layers": 0}, "counts.num_layers is 0"),
        ({"draft_pass_s": None}, "counts.draft_pass_s is None"),
        ({"accept_length_histogram": {"a": [[1]]}}, "counts.accept_length_histogram is {'a'"),
        ({"accept_length_histogram": [1, [2]]}, "counts.accept_length_histogram is [1, [2]]"),
        ({"accept_length_histogram": [-1, 1]}, "counts.accept_length_histogram is [-1, 1]"),
        (None, "counts.rounds is missing"),
    ],
    ids=str,
)
def test_a_manifest_whose_counts_are_damaged_is_shown_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: dict[str, Any] | None, words: str
) -> None:
    install_fake_llm(monkeypatch)
    page = page_of_counts(tmp_path, 2, lambda counts: {"a": {"b": 1}} if damage is None else counts | damage)
    lacks = page.texts("p", _class="missing")
    assert any("what its manifest has counted: " in text and words in text for text in lacks)
    assert any(text.startswith("2 of 2 rows done") for text in page.texts("p")), "the rest is shown"


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"{", "(its JSON: "), (b'{"settings": 3}', "(settings: "), (None, "(later_field: ")],
    ids=["cut", "wrong", "later"],
)
def test_rows_are_shown_though_their_manifest_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, words: str
) -> None:
    """As that of a later HiSpec, with which a job must not go on."""
    install_fake_llm(monkeypatch)
    job = make_job(tmp_path, prompts(2))
    run(job)
    path = manifest_path(job.output.path)
    if content is None:
        content = json.dumps(json.loads(path.read_text()) | {"later_field": 1}).encode()
    path.write_bytes(content)
    page = page_of(job.output.path)
    assert any(f"{path.name} is not a manifest" in text and words in text for text in page.texts("p"))
    assert any(text.startswith("2 rows, 0 with errors") for text in page.texts("p"))
    with pytest.raises(ConfigError, match="is not a manifest that HiSpec"):
        run(job)


def test_many_texts_are_cut_and_counted(tmp_path: Path) -> None:
    rows = [output_row(at, tiers=["draft"] * 2001, token_texts=["a"] * 2001) for at in range(22)]
    page = page_of(write_rows(tmp_path / "out.jsonl", *rows))
    assert len(page.texts("h4")) == 20 and len(page.texts("span", _class="draft")) == 20 * 2000
    notes = page.texts("p", _class="note")
    assert notes.count("and 1 more tokens") == 20 and "and 2 more outputs with tiers" in notes


def test_several_files_are_sections_of_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write_rows(tmp_path / "out.jsonl", output_row(0))
    traces = [goodput_trace(tmp_path / "a.jsonl"), fixed_trace(tmp_path / "b.jsonl")]
    page = page_of(rows, *traces)
    assert page.texts("h2") == ["out.jsonl", "a.jsonl, b.jsonl"]
    out = capsys.readouterr().out
    assert "tokens/s" in out and "written: " in out and not list(tmp_path.glob("*.png"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}", "none of what a page is made of: traces"),
        (b"hello", "none of what a page is made of: traces"),
        (b"\xff\xfe", "none of what a page is made of: traces"),
        (b'{"engines": {}, "ratio_to_plain": {}, "acceptance": {}}', "not a whole result of `hispec bench`"),
        (json.dumps(output_row(0) | {"usage": 3}).encode() + b"\n", "line 1: not a row of a job"),
        (
            json.dumps(output_row(0, tiers=["best"])).encode() + b"\n",
            "'best' is none of draft, check, verify",
        ),
        (
            json.dumps(output_row(0, tiers=["draft"], token_texts=[7])).encode() + b"\n",
            "line 1: not a row of a job",
        ),
        (
            json.dumps(output_row(0, tiers={"draft": 1}, token_texts=["a"])).encode() + b"\n",
            "line 1: not a row of a job",
        ),
        (json.dumps(output_row(0) | {"usage": {"prompt_tokens": "3"}}).encode() + b"\n", "line 1: not a row"),
        (b'{"type": "trace", "version": 99}\n', "version=99"),
    ],
)
def test_what_is_none_of_ours_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, message: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    assert main(["report", str(path), "--html", str(tmp_path / "page.html")]) == 2
    assert message in " ".join(capsys.readouterr().err.split()) and not (tmp_path / "page.html").exists()


def test_targets_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write_rows(tmp_path / "out.jsonl", output_row(0))
    for arguments, message in (
        (["--html", str(rows)], "is read by this command"),
        (["--html", str(tmp_path / "p"), "--json", str(tmp_path / "j")], "--json is of traces"),
        (["--html", str(tmp_path / "p"), "-o", str(tmp_path / "x.png")], "-o is of traces"),
    ):
        assert main(["report", str(rows), *arguments]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    assert main(["report", str(tmp_path / "none"), "--html", str(tmp_path / "p")]) == 2
    trace = goodput_trace(tmp_path / "t")
    both = str(tmp_path / "same")
    assert main(["report", str(trace), "--html", both, "--json", both]) == 2
    assert "both name" in capsys.readouterr().err


def test_the_template_is_in_the_wheel() -> None:
    setup = (Path(__file__).parents[2] / "setup.py").read_text(encoding="utf-8")
    assert '"page/*.html"' in setup and list((Path(__file__).parents[2] / "hispec/page").glob("*.html"))
