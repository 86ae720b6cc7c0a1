"""Jobs that go on: whatever cut them short, every row is there once."""

from __future__ import annotations

import json
import os
import random
import string
import tempfile
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hispec.errors import ConfigError
from hispec.jobs import row_index, tables
from hispec.jobs.manifest import manifest_path
from hispec.jobs.resume import read_line
from hispec.jobs.runner import JobInterrupted
from hispec.jobs.writer import RowWriter
from hispec.outputs import RequestOutput
from tests.helpers.fake_llm import FakeLLM
from tests.helpers.job_support import (
    THREE_TIER,
    install_fake_llm,
    interrupt_at,
    make_job,
    manifest_of,
    prompts,
    rows_of,
    run,
)

SAMPLED = {"temperature": 0.8, "max_tokens": 40}  # seeds must not depend on when a row runs


@pytest.fixture(autouse=True)
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_llm(monkeypatch)


@pytest.mark.parametrize("order", ["input", "finished"])
@pytest.mark.parametrize("step", [1, 9, 40, 77])
def test_the_same_command_goes_on_and_ends_as_if_nothing_had_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, order: str
) -> None:
    lines = [*prompts(30), b"broken\n", {"prompt": "no id"}, {"prompt": "no id"}]
    job = make_job(tmp_path, lines, sampling=SAMPLED, output={"order": order})
    run(job)
    expected = job.output.path.read_bytes()
    job.output.path.unlink()
    interrupt_at(step, monkeypatch)
    with pytest.raises(JobInterrupted, match=r"\d+ of 33 rows are done.*the same command goes on"):
        run(job)
    part = job.output.path.read_bytes()
    assert not part or part.endswith(b"\n")
    assert manifest_of(job)["done"] == part.count(b"\n") and manifest_of(job)["finished"] is None
    monkeypatch.setattr(FakeLLM, "on_step", None)
    report = run(job)
    assert report.resumed == part.count(b"\n")
    done = job.output.path.read_bytes()
    assert sorted(done.splitlines()) == sorted(expected.splitlines())
    if order == "input":
        assert done == expected
    assert (
        manifest_of(job)["finished"] is not None
        and manifest_of(job)["done"] == 33 == manifest_of(job)["rows"]
    )
    assert manifest_of(job)["errors"] == 1
    # Of both runs: tokens that the first had computed and not written were computed again.
    whole = sum(
        row["usage"]["completion_tokens"] for row in map(json.loads, done.splitlines()) if row["usage"]
    )
    assert manifest_of(job)["counts"]["tokens"] >= whole >= report.stats["tokens"]


def test_what_has_ended_is_never_only_in_memory_where_rows_are_written_as_they_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tests.helpers.fake_llm.answer", lambda ids, sampling, at=0: [97] * (sampling.max_tokens or 1)
    )
    slow = {"id": "slow", "prompt": "slow", "sampling": {"max_tokens": 500}}
    quick = [{"id": at, "prompt": "quick", "sampling": {"max_tokens": 1}} for at in range(100)]
    interrupt_at(300, monkeypatch)
    for order, written in (("finished", 100), ("input", 0)):
        job = make_job(tmp_path, [slow, *quick], output={"order": order, "path": str(tmp_path / order)})
        with pytest.raises(JobInterrupted):
            run(job)
        assert len(rows_of(job)) == written


@pytest.mark.parametrize("tail", [b"", b"\0" * 7, b'{"index": 3, "id', b'{"index"' + b"\0" * 40 + b"\n"])
def test_a_torn_end_is_done_again(tmp_path: Path, tail: bytes) -> None:
    job = make_job(tmp_path, prompts(10))
    run(job)
    expected = job.output.path.read_bytes()
    ends = [at + 1 for at, byte in enumerate(expected) if byte == 10]
    for cut in (0, 1, ends[0], ends[3] - 1, ends[3], ends[3] + 30, len(expected) - 1, len(expected)):
        whole = max([end for end in ends if end <= cut], default=0)
        job.output.path.write_bytes(expected[: whole if tail else cut] + tail)
        report = run(job)
        assert job.output.path.read_bytes() == expected
        assert report.resumed == expected[:whole].count(b"\n")


@pytest.mark.parametrize("name", ["out.jsonl.gz", "out.csv", "out.parquet"])
def test_an_output_that_is_made_as_a_whole_is_made_once(tmp_path: Path, name: str) -> None:
    job = make_job(tmp_path, prompts(3), output={"path": str(tmp_path / name)})
    run(job)
    before = job.output.path.read_bytes(), job.output.path.stat().st_mtime_ns, job.output.path.stat().st_ino
    run(job)
    assert before == (
        job.output.path.read_bytes(),
        job.output.path.stat().st_mtime_ns,
        job.output.path.stat().st_ino,
    )


def test_a_complete_output_is_left_as_it_is_without_the_model(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(5))
    run(job)
    before = job.output.path.read_bytes()
    FakeLLM.instances.clear()
    assert run(job).resumed == 5 and not FakeLLM.instances
    assert job.output.path.read_bytes() == before


def test_new_starts_anew(tmp_path: Path) -> None:
    run(make_job(tmp_path, prompts(9)))
    job = make_job(tmp_path, prompts(4), output={"overwrite": True}, model="another")
    assert (
        run(job).resumed == 0
        and len(rows_of(job)) == 4
        and manifest_of(job)["settings"]["model"] == "another"
    )


def test_rows_that_failed_are_done_again_where_the_job_says_so(tmp_path: Path) -> None:
    lines: list[Any] = [*prompts(3), {"id": "empty", "prompt": ""}, b"broken\n", *prompts(6)[3:]]
    job = make_job(tmp_path, lines)
    run(job)
    good = [line for line in job.output.path.read_bytes().splitlines() if b'"error": null' in line]
    assert run(job).resumed == 8
    retried = make_job(tmp_path, lines, output={"retry_failed": True})
    report = run(retried)
    assert report.resumed == 6 and report.timed.num_errors == 2
    assert job.output.path.read_bytes().splitlines()[:6] == good and len(rows_of(job)) == 8
    mended = [*lines]
    mended[4] = {"prompt": "whole again"}
    job = make_job(tmp_path, mended, output={"retry_failed": True})
    run(job)
    assert Counter(row["id"] for row in rows_of(job) if row["id"]) == Counter(
        [*(f"p{at}" for at in range(6)), "empty"]
    )
    assert sum(row["error"] is not None for row in rows_of(job)) == 1 == manifest_of(job)["errors"]


def fail_rows(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    """The engine gives these rows up."""
    result, ids = FakeLLM._result, {f"row-{number}" for number in numbers}

    def failing(request: list[Any]) -> RequestOutput:
        made = result(request)
        return replace(made, outputs=[], error="gave up") if request[0] in ids else made

    monkeypatch.setattr(FakeLLM, "_result", staticmethod(failing))


def test_of_equal_rows_those_are_done_again_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a seed of its own: none comes twice, and none is left out."""
    lines = [{"prompt": "same prompt"} for _ in range(10)]
    with monkeypatch.context() as patch:
        fail_rows(patch, 2, 5)
        run(make_job(tmp_path, lines, sampling=SAMPLED))
    job = make_job(tmp_path, lines, sampling=SAMPLED, output={"retry_failed": True})
    assert run(job).resumed == 8
    texts = [row["outputs"][0]["text"] for row in rows_of(job)]
    assert len(texts) == 10 == len(set(texts))
    kept = [line for line in job.output.path.read_bytes().splitlines(True) if json.loads(line)["index"] % 3]
    job.output.path.write_bytes(b"".join(kept))
    assert run(job).resumed == 6
    assert {row["outputs"][0]["text"] for row in rows_of(job)} == set(texts) and len(rows_of(job)) == 10


@pytest.mark.parametrize("flag", ["resume", "retry_failed", "overwrite"])
def test_a_run_beside_another_is_refused_and_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    with monkeypatch.context() as patch:
        fail_rows(patch, 1)
        job = make_job(tmp_path, prompts(4))
        run(job)
    FakeLLM.instances.clear()
    with RowWriter(job.output.path, job.output.path.stat().st_size) as first:
        with pytest.raises(ConfigError, match="is being written by another process"):
            run(make_job(tmp_path, prompts(5), output={flag: True}))
        first.add(9, {"mine": True})
    assert not FakeLLM.instances and b'"mine"' in job.output.path.read_bytes()
    assert len(job.output.path.read_bytes().splitlines()) == 5


def test_what_another_process_has_written_while_the_model_was_loaded_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, init = make_job(tmp_path, prompts(3)), FakeLLM.__init__

    def other_run(self: FakeLLM, *arguments: Any, **fields: Any) -> None:
        job.output.path.write_bytes(b"rows of another run\n")
        init(self, *arguments, **fields)

    monkeypatch.setattr(FakeLLM, "__init__", other_run)
    with pytest.raises(ConfigError, match=r"another process has written .*out\.jsonl meanwhile"):
        run(job)
    assert job.output.path.read_bytes() == b"rows of another run\n"


def test_zeros_that_a_power_failure_left_are_rows_to_do_again(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(6))
    run(job)
    lines = job.output.path.read_bytes().splitlines(keepends=True)
    half = len(lines[2]) // 2
    lost = lines[0] + b"\0" * (len(lines[1]) + half) + lines[2][half:] + b"".join(lines[3:])
    job.output.path.write_bytes(lost)
    assert run(job).resumed == 4
    assert sorted(row["index"] for row in rows_of(job)) == list(range(6))


def test_rows_settings_and_names_are_put_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, fsync = set(), os.fsync

    def watched(number: int) -> None:
        synced.add(os.fstat(number).st_ino)
        fsync(number)

    monkeypatch.setattr(os, "fsync", watched)
    job = make_job(tmp_path, prompts(2))
    run(job)
    for path in (job.output.path, manifest_path(job.output.path), tmp_path):
        assert path.stat().st_ino in synced
    table = make_job(tmp_path, prompts(2), output={"path": str(tmp_path / "out.csv")})
    run(table)
    assert table.output.path.stat().st_ino in synced


def test_what_a_kill_left_of_a_table_is_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = make_job(tmp_path, prompts(2), output={"path": str(tmp_path / "out.csv")})

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tables, "replace_file", killed)
        patch.setattr(Path, "unlink", lambda *_: None)  # the process is no more
        with pytest.raises(KeyboardInterrupt):
            run(table)
    (left,) = tmp_path.glob(".out.csv*")
    assert not table.output.path.exists()
    run(table)
    assert table.output.path.exists() and not left.exists()


def test_an_error_of_the_disk_after_the_last_row_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    def broken(number: int) -> None:
        failed.set()
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output error"):
        patch.setattr(os, "fsync", broken)
        writer = RowWriter(tmp_path / "out.jsonl", sync_s=0.001)
        writer.add(0, {"index": 0})
        assert failed.wait(60)
        while writer._broken is None:
            time.sleep(0.001)
        patch.setattr(os, "fsync", lambda number: None)
        writer.close()


def test_a_bad_row_that_was_mended_is_done_again_where_the_job_says_so(tmp_path: Path) -> None:
    run(make_job(tmp_path, [{"id": "a", "promt": "x"}, {"id": "b", "prompt": "y"}]))
    mended = [{"id": "a", "prompt": "x"}, {"id": "b", "prompt": "y"}]
    with pytest.raises(ConfigError, match="do it again with --retry-failed"):
        run(make_job(tmp_path, mended))
    job = make_job(tmp_path, mended, output={"retry_failed": True})
    assert run(job).resumed == 1
    assert {row["id"]: row["error"] for row in rows_of(job)} == {"a": None, "b": None}


def test_an_id_that_two_rows_have_is_an_error_before_the_model_is_loaded(tmp_path: Path) -> None:
    lines = [*prompts(4), {"prompt": "x"}, b"\n", {"id": "p2", "prompt": "y"}, {"id": "p0", "prompt": "y"}]
    with pytest.raises(ConfigError, match=r"line 1 and line 8 have the same id \(in all 2 rows"):
        run(make_job(tmp_path, lines))
    assert not FakeLLM.instances
    run(make_job(tmp_path, [{"id": 1, "prompt": "x"}, {"id": "1", "prompt": "x"}]))
    (tmp_path / "more.jsonl").write_text('{"id": 1, "prompt": "x"}\n')
    paths = [str(tmp_path / "in.jsonl"), str(tmp_path / "more.jsonl")]
    job = make_job(tmp_path, [{"id": 1, "prompt": "x"}], input={"path": paths}, output={"overwrite": True})
    with pytest.raises(ConfigError, match=r"in\.jsonl, line 1 and more\.jsonl, line 1 have the same id"):
        run(job)


def test_a_row_whose_prompt_has_changed_is_refused_by_its_line(tmp_path: Path) -> None:
    lines = prompts(5)
    run(make_job(tmp_path, lines))
    lines[3] = {"id": "p3", "prompt": "another"}
    with pytest.raises(ConfigError, match="has a result for the id of line 4, of another prompt"):
        run(make_job(tmp_path, lines))
    job = make_job(tmp_path, lines, output={"only_missing": True})
    assert run(job).resumed == 5


def test_rows_that_come_to_the_input_while_it_runs_are_for_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(tmp_path, prompts(40))

    def extend(step: int) -> None:
        if step == 5:
            with job.input.path.open("a") as file:  # type: ignore[union-attr]
                file.write('{"id": "late", "prompt": "late"}\n')

    monkeypatch.setattr(FakeLLM, "on_step", extend)
    assert run(job).num_rows == 40 == len(rows_of(job))
    monkeypatch.setattr(FakeLLM, "on_step", None)
    report = run(job)
    assert (report.resumed, report.num_rows) == (40, 41) and rows_of(job)[-1]["id"] == "late"


def test_files_that_grow_or_come_while_the_model_is_loaded_shift_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()

    def write(name: str, num: int) -> None:
        lines = [json.dumps({"id": f"{name}{at}", "prompt": f"{name} {at}"}) + "\n" for at in range(num)]
        (tmp_path / "in" / name).write_text("".join(lines))

    job = make_job(
        tmp_path,
        [],
        input={"path": str(tmp_path / "in" / "*")},
        speculative=THREE_TIER,
        output={"compare_plain": True},
    )
    write("a", 3)
    write("c", 3)
    init = FakeLLM.__init__

    def others_write(self: FakeLLM, *arguments: Any, **fields: Any) -> None:
        init(self, *arguments, **fields)
        write("a", 5)
        write("b", 2)
        write("c", 4)

    with monkeypatch.context() as patch:
        patch.setattr(FakeLLM, "__init__", others_write)
        report = run(job)
    assert [row["id"] for row in rows_of(job)] == ["a0", "a1", "a2", "c0", "c1", "c2"]
    assert report.comparison is not None and report.comparison.num_identical == 6
    assert [Path(file["path"]).name for file in manifest_of(job)["input"]] == ["a", "c"]
    assert run(job).resumed == 6
    assert Counter(row["id"] for row in rows_of(job)) == Counter(
        f"{name}{at}" for name, num in (("a", 5), ("b", 2), ("c", 4)) for at in range(num)
    )


def test_a_file_that_has_lost_rows_while_the_model_was_loaded_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, init = make_job(tmp_path, prompts(9)), FakeLLM.__init__

    def other_cuts(self: FakeLLM, *arguments: Any, **fields: Any) -> None:
        init(self, *arguments, **fields)
        make_job(tmp_path, prompts(4))

    monkeypatch.setattr(FakeLLM, "__init__", other_cuts)
    with pytest.raises(ConfigError, match=r"in\.jsonl had 9 rows when the job began and has 4 now"):
        run(job)
    assert run(job).num_rows == 4 == len(rows_of(job))


def test_a_temporary_folder_without_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(row_index, "_TABLES", "PRAGMA max_page_count = 3;" + row_index._TABLES)
        with pytest.raises(ConfigError, match=f"temporary folder {tmp_path}: .*is full; .*TMPDIR"):
            run(make_job(tmp_path, prompts(2000)))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=f"temporary folder {tmp_path}/gone: .*TMPDIR"):
        run(make_job(tmp_path, prompts(3)))
    assert not FakeLLM.instances and not list(tmp_path.glob("hispec-rows-*"))


KEYS = st.sampled_from([None, *string.ascii_lowercase[:6], *range(4)])
ROWS = st.lists(
    st.tuples(KEYS, st.sampled_from("xyz")),
    min_size=1,
    max_size=12,
    unique_by=lambda row: object() if row[0] is None else row[0],
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=ROWS, second=ROWS, cut=st.floats(0, 1), seed=st.integers(0, 9))
def test_rows_may_come_go_and_change_places(
    tmp_path: Path, first: list[Any], second: list[Any], cut: float, seed: int
) -> None:
    """Against a count by hand: what stands in the output is what the first run left of its rows, and of the
    second input what is missing there."""
    wording = {key: prompt for key, prompt in first if key is not None}  # an id keeps its prompt
    second = [(key, wording.get(key, prompt)) for key, prompt in second]
    second += random.Random(seed).sample(first, len(first) // 2)
    second = list({key if key is not None else object(): (key, prompt) for key, prompt in second}.values())

    def lines(rows: list[Any]) -> list[Any]:
        return [{"prompt": prompt} | ({} if key is None else {"id": key}) for key, prompt in rows]

    job = make_job(tmp_path, lines(first), output={"overwrite": True})
    run(job)
    content = job.output.path.read_bytes()
    job.output.path.write_bytes(content[: int(cut * len(content))])
    kept = Counter(
        (row["id"], row["prompt"])
        for row in map(json.loads, content[: int(cut * len(content))].splitlines(keepends=True)[:-1])
    )
    if content[: int(cut * len(content))].endswith(b"\n"):
        last = json.loads(content[: int(cut * len(content))].splitlines()[-1])
        kept[last["id"], last["prompt"]] += 1
    job = make_job(tmp_path, lines(second))
    run(job)
    found = Counter((row["id"], row["prompt"]) for row in rows_of(job))
    assert found == kept | Counter(second)


@given(st.text(), st.text())
def test_lines_are_read_back_without_parsing_them_whole(row_id: str, text: str) -> None:
    for shown in (row_id, len(row_id), None):
        row = {"index": 3, "id": shown, "prompt": text, "outputs": [], "usage": None, "error": None}
        line = json.dumps(row | {"hash": "0" * 32}, ensure_ascii=False) + "\n"
        found = read_line(line.encode("utf-8", "surrogatepass"))
        assert found is not None and found.identity.id == shown and not found.failed and found.number == 3
    failed = json.dumps(row | {"error": {"message": text}, "hash": "a" * 32}) + "\n"
    found = read_line(failed.encode())
    assert found is not None and found.failed and found.identity.content_hash == "a" * 32
