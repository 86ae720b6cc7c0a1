"""Rows that are kept elsewhere: while a job runs, at its end, and where it goes on or starts anew."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hispec.jobs.manifest import manifest_path
from hispec.jobs.upload import Upload
from hispec.jobs.writer import OutputError
from tests.helpers.fake_llm import FakeLLM
from tests.helpers.job_support import prompts, rows_of, run
from tests.helpers.uploads import NUM_ROWS, interrupted, job_to, ledger, there, uploaded

NEW_LINES = [{"id": f"new{at}", "prompt": f"new {at}"} for at in range(4)]


def test_the_whole_output_is_there_at_the_end_and_no_parts(tmp_path: Path) -> None:
    job = job_to(tmp_path)
    run(job)
    assert there(tmp_path).read_bytes() == job.output.path.read_bytes() == uploaded(tmp_path)
    names = sorted(path.name for path in (tmp_path / "there").iterdir())
    assert names == ["out.jsonl", "out.jsonl.manifest.json", "out.jsonl.upload.json"]
    assert there(tmp_path, names[1]).read_bytes() == manifest_path(job.output.path).read_bytes()
    assert ledger(tmp_path).is_complete


@pytest.mark.parametrize("order", ["input", "finished"])
@pytest.mark.parametrize("loses", ["all", "the end", "a page", "nothing"])
def test_an_interrupted_job_goes_on_wherever_its_disk_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loses: str, order: str
) -> None:
    job = job_to(tmp_path, order=order)
    interrupted(job, 40, monkeypatch)
    before = uploaded(tmp_path)
    assert before == job.output.path.read_bytes() and before and not ledger(tmp_path).is_complete
    if loses == "all":
        shutil.rmtree(tmp_path / "here")
    elif loses == "the end":
        job.output.path.write_bytes(before[: before.index(b"\n") + 1])
    elif loses == "a page":  # what a power failure leaves of rows that were not on the disk yet
        end = before.index(b"\n") + 9
        job.output.path.write_bytes(before[:end] + b"\0" * (len(before) - end))
    report = run(job)
    assert report.resumed == before.count(b"\n") and report.timed.num_results == NUM_ROWS - report.resumed
    assert sorted(row["index"] for row in rows_of(job)) == list(range(NUM_ROWS))
    assert there(tmp_path).read_bytes() == job.output.path.read_bytes()
    assert job.output.path.read_bytes().startswith(before)


def test_rows_are_uploaded_while_the_job_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    job = job_to(tmp_path)

    def on_step(number: int) -> None:
        if not seen and job.output.path.exists() and job.output.path.stat().st_size:
            until = time.monotonic() + 20.0
            while not there(tmp_path, "out.jsonl.upload.json").exists() and time.monotonic() < until:
                time.sleep(0.01)
            seen.append(uploaded(tmp_path))

    monkeypatch.setattr(FakeLLM, "on_step", on_step)
    run(job)
    assert seen and 0 < seen[0].count(b"\n") < NUM_ROWS
    assert job.output.path.read_bytes().startswith(seen[0])


def test_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    job = job_to(tmp_path)
    job.output.path.parent.mkdir()
    upload = Upload(job)
    for content in (b"", b"one\nhal", b"one\nhalf\nthird\n", b"one\nhalf\nthird\nend"):
        job.output.path.write_bytes(content)
        upload._advance()
        whole = content[: content.rfind(b"\n") + 1]
        assert (uploaded(tmp_path) if whole else b"") == whole


def test_half_a_line_waits_though_it_is_longer_than_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hispec.jobs.upload._LARGEST_PART", 3)
    test_half_a_line_waits_for_its_other_half(tmp_path)


def test_a_finished_output_of_an_extended_input_grows(tmp_path: Path) -> None:
    run(job_to(tmp_path, lines=prompts(10)))
    first = there(tmp_path).read_bytes()
    shutil.rmtree(tmp_path / "here")
    job = job_to(tmp_path)
    assert run(job).resumed == 10
    assert there(tmp_path).read_bytes() == job.output.path.read_bytes()
    assert there(tmp_path).read_bytes().startswith(first) and len(rows_of(job)) == NUM_ROWS


def test_rows_that_are_done_again_take_the_place_of_the_old_ones(tmp_path: Path) -> None:
    lines: list[Any] = [*prompts(5), {"id": "bad", "prompt": 7}]
    job = job_to(tmp_path, lines=lines)
    run(job)
    lines[-1]["prompt"] = "good"
    job = job_to(tmp_path, lines=lines, retry_failed=True)
    shutil.rmtree(tmp_path / "here")
    report = run(job)
    assert report.resumed == 5 and all(row["error"] is None for row in rows_of(job))
    assert there(tmp_path).read_bytes() == job.output.path.read_bytes() == uploaded(tmp_path)


def test_rows_that_were_taken_out_do_not_stay_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[Any] = [{"id": "bad", "prompt": 7}, *prompts(NUM_ROWS)]
    interrupted(job_to(tmp_path, lines=lines, order="finished"), 40, monkeypatch)
    lines[0]["prompt"] = "good"
    job = job_to(tmp_path, lines=lines, order="finished", retry_failed=True)
    interrupted(job, 3, monkeypatch)
    assert uploaded(tmp_path) == job.output.path.read_bytes() and b'"bad"' not in uploaded(tmp_path)
    shutil.rmtree(tmp_path / "here")
    run(job)
    assert len(rows_of(job)) == len(lines) and there(tmp_path).read_bytes() == job.output.path.read_bytes()


def test_new_replaces_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(job_to(tmp_path))
    job = job_to(tmp_path, lines=prompts(4), overwrite=True)
    interrupted(job, 2, monkeypatch)
    assert uploaded(tmp_path) == job.output.path.read_bytes()  # nothing of what was there before
    run(job_to(tmp_path, lines=prompts(4)))
    assert there(tmp_path).read_bytes() == job.output.path.read_bytes() and len(rows_of(job)) == 4


def test_a_job_that_is_killed_as_it_starts_anew_does_not_go_on_with_the_old_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(job_to(tmp_path))
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(Upload, "__enter__", lambda self: sys.exit(9))
        run(job_to(tmp_path, lines=NEW_LINES, overwrite=True))
    job = job_to(tmp_path, lines=NEW_LINES)
    assert run(job).resumed == 0 and [row["id"] for row in rows_of(job)] == ["new0", "new1", "new2", "new3"]
    assert there(tmp_path).read_bytes() == job.output.path.read_bytes() == uploaded(tmp_path)


def test_a_job_that_starts_anew_in_an_empty_place_without_a_way_there_loses_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Upload, *_: Any) -> None:
        raise OSError("no way there")

    run(job_to(tmp_path))
    shutil.rmtree(tmp_path / "here")
    with monkeypatch.context() as patch, pytest.raises(OutputError, match="no way there"):
        patch.setattr(Upload, "_writing", fails)
        run(job_to(tmp_path, lines=NEW_LINES, overwrite=True))
    job = job_to(tmp_path, lines=NEW_LINES)
    assert run(job).resumed == 4
    assert there(tmp_path).read_bytes() == job.output.path.read_bytes() == uploaded(tmp_path)


def test_new_rows_of_the_old_size_are_uploaded_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"prompt": "same"}]
    run(job_to(tmp_path, lines=lines))
    size = there(tmp_path).stat().st_size
    monkeypatch.setattr(Upload, "_try", lambda self, what: None)  # nothing reaches it before
    lines = [{"prompt": "mesa"}]
    job = job_to(tmp_path, lines=lines, overwrite=True)
    run(job)
    assert there(tmp_path).read_bytes() == job.output.path.read_bytes() and len(uploaded(tmp_path)) == size


def test_a_table_is_there_with_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_to(tmp_path, "out.csv")
    run(job)
    assert there(tmp_path, "out.csv").read_bytes() == job.output.path.read_bytes()
    shutil.rmtree(tmp_path / "here")
    more = job_to(tmp_path, "out.csv", lines=prompts(NUM_ROWS + 2))
    assert run(more).resumed == NUM_ROWS
    assert there(tmp_path, "out.csv").read_bytes().count(b"\n") == NUM_ROWS + 3


def test_a_failed_upload_costs_no_row_and_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(self: Upload, *_: Any) -> None:
        raise OSError("no way there")

    job = job_to(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Upload, "_writing", fails)
        with pytest.raises(OutputError, match=r"cannot upload.*no way there.*all rows that are done are in"):
            run(job)
    assert "will be tried again: no way there" in caplog.text
    assert len(rows_of(job)) == NUM_ROWS and not (tmp_path / "there").exists()
    assert run(job).resumed == NUM_ROWS  # without the model
    assert there(tmp_path).read_bytes() == job.output.path.read_bytes()


def test_an_upload_that_can_never_work_ends_the_job_and_costs_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is no OSError is not tried again."""

    def fails(self: Upload, *_: Any) -> None:
        raise TypeError("no such argument")

    def on_step(number: int) -> None:
        until = time.monotonic() + 20.0
        while job.output.path.stat().st_size and time.monotonic() < until:
            if all(thread.name != "hispec-upload" for thread in threading.enumerate()):
                break
            time.sleep(0.01)

    job = job_to(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Upload, "_writing", fails)
        patch.setattr(FakeLLM, "on_step", on_step)
        with pytest.raises(
            OutputError, match=r"cannot upload to .*TypeError: no such argument.*rows that are done are in"
        ):
            run(job)
    done = len(rows_of(job))
    assert 0 < done < NUM_ROWS, "it went on for hours without an upload"
    assert run(job).resumed == done
    assert there(tmp_path).read_bytes() == job.output.path.read_bytes() and len(rows_of(job)) == NUM_ROWS


def test_the_first_error_of_a_job_is_the_one_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Upload, *_: Any) -> None:
        raise TypeError("no such argument")

    monkeypatch.setattr(Upload, "_writing", fails)
    interrupted(job_to(tmp_path, upload_s=3600.0), 40, monkeypatch)


def test_a_job_that_starts_anew_does_not_need_the_store_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(job_to(tmp_path))

    def fails(self: Upload, *_: Any) -> None:
        raise OSError("no way there")

    def on_step(number: int) -> None:
        if number == 5:
            back.undo()

    with monkeypatch.context() as back:
        back.setattr(Upload, "_writing", fails)
        monkeypatch.setattr(FakeLLM, "on_step", on_step)
        job = job_to(tmp_path, lines=prompts(4), overwrite=True)
        run(job)
    assert there(tmp_path).read_bytes() == job.output.path.read_bytes() and len(rows_of(job)) == 4


def test_a_job_that_is_killed_while_it_does_rows_again_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what is there still the rows of before."""
    lines: list[Any] = [{"id": "bad", "prompt": 7}, *prompts(NUM_ROWS)]
    run(job_to(tmp_path, lines=lines))
    lines[0]["prompt"] = "good"
    job, before = job_to(tmp_path, lines=lines, retry_failed=True, upload_s=3600.0), uploaded(tmp_path)

    def killed(*_: object) -> None:
        raise SystemExit(9)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(Upload, "__enter__", killed)
        run(job)
    assert uploaded(tmp_path) == before and len(rows_of(job)) == NUM_ROWS
    assert run(job).resumed == NUM_ROWS and all(row["error"] is None for row in rows_of(job))
    assert there(tmp_path).read_bytes() == job.output.path.read_bytes() == uploaded(tmp_path)
    assert not list((tmp_path / "here").glob("*.replaces")) + list((tmp_path / "here").glob(".*.replaces"))
