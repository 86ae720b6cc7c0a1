"""Inputs and outputs that are elsewhere, by pyarrow's file systems: here a folder that is named by a URI."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from hispec.errors import ConfigError, build
from hispec.jobs import uris
from hispec.jobs.manifest import manifest_path
from hispec.jobs.runner import JobInterrupted
from hispec.jobs.schema import Job
from hispec.jobs.upload import Ledger, Upload
from hispec.jobs.writer import OutputError
from tests.helpers.fake_llm import FakeLLM
from tests.helpers.job_support import install_fake_llm, interrupt_at, make_job, prompts, rows_of, run

NUM_ROWS = 30


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    install_fake_llm(monkeypatch)
    monkeypatch.setenv("HISPEC_CACHE", str(tmp_path / "cache"))
    yield
    uris.fetch.cache_clear()


def job_to(tmp_path: Path, name: str = "out.jsonl", lines: Any = None, **output: Any) -> Job:
    there = f"file://{tmp_path}/there/{name}"
    more = {"upload": there, "upload_s": 0.1, "path": str(tmp_path / "here" / name)} | output
    return make_job(tmp_path, prompts(NUM_ROWS) if lines is None else lines, output=more)


def there(tmp_path: Path, name: str = "out.jsonl") -> Path:
    return tmp_path / "there" / name


def ledger(tmp_path: Path) -> Ledger:
    return Ledger.model_validate_json(there(tmp_path, "out.jsonl.upload.json").read_bytes())


def uploaded(tmp_path: Path) -> bytes:
    """The rows that count."""
    parts = [there(tmp_path, part.name).read_bytes()[: part.size] for part in ledger(tmp_path).parts]
    return b"".join(parts)


def interrupted(job: Job, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_at(step, monkeypatch)
    with pytest.raises(JobInterrupted):
        run(job)
    monkeypatch.setattr(FakeLLM, "on_step", None)


def test_the_whole_output_is_there_at_the_end_and_no_parts(tmp_path: Path) -> None:
    job = job_to(tmp_path)
    run(job)
    assert there(tmp_path).read_bytes() == job.output.path.read_bytes() == uploaded(tmp_path)
    names = sorted(path.name for path in (tmp_path / "there").iterdir())
    assert names == ["out.jsonl", "out.jsonl.manifest.json", "out.jsonl.upload.json"]
    assert there(tmp_path, names[1]).read_bytes() == manifest_path(job.output.path).read_bytes()
    assert ledger(tmp_path).is_complete


@pytest.mark.parametrize("order", ["input", "finished"])
@pytest.mark.parametrize("loses", ["all", "the end", "nothing"])
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


NEW_LINES = [{"id": f"new{at}", "prompt": f"new {at}"} for at in range(4)]


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


def test_rows_of_another_machine_are_never_mixed_with_those_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_to(tmp_path)
    interrupted(job, 40, monkeypatch)
    here = job.output.path.read_bytes()
    other = make_job(
        tmp_path,
        prompts(NUM_ROWS),
        output={"upload": job.output.upload, "path": str(tmp_path / "other" / "out.jsonl")},
    )
    run(other)  # another machine goes on
    job.output.path.write_bytes(here[: here.index(b"\n") + 1] + b'{"index": 9}\n')
    with pytest.raises(ConfigError, match="different rows: another machine"):
        run(job)
    job.output.path.write_bytes(b" " + other.output.path.read_bytes())
    with pytest.raises(ConfigError, match="different rows: another machine"):
        run(job)
    job.output.path.unlink()
    assert run(job).resumed == NUM_ROWS


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


def test_what_no_job_has_uploaded_is_left_alone(tmp_path: Path) -> None:
    there(tmp_path).parent.mkdir()
    there(tmp_path).write_text("precious")
    with pytest.raises(ConfigError, match=r"exists, but out\.jsonl\.upload\.json"):
        run(job_to(tmp_path))
    assert there(tmp_path).read_text() == "precious"


@pytest.mark.parametrize("content", [b"", b"{", b'{"parts": [{"name": 1}]}', b'{"parts": [], "x": 1}', b"[]"])
def test_a_damaged_ledger_is_an_error_and_changes_nothing(tmp_path: Path, content: bytes) -> None:
    job = job_to(tmp_path)
    run(job)
    there(tmp_path, "out.jsonl.upload.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"output\.upload: cannot read"):
        run(job)
    assert len(rows_of(job)) == NUM_ROWS


def test_a_damaged_part_is_not_taken_over(tmp_path: Path) -> None:
    job = job_to(tmp_path)
    run(job)
    shutil.rmtree(tmp_path / "here")
    there(tmp_path).write_bytes(there(tmp_path).read_bytes().replace(b"p7", b"p8"))
    with pytest.raises(ConfigError, match="is not what was uploaded"):
        run(job)
    assert not job.output.path.exists()


def test_inputs_are_read_from_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(3):
        rows = [{"id": f"{number}-{at}", "prompt": f"row {at}"} for at in range(4)]
        (folder / f"shard-{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "readme.txt").write_text("no rows")

    def ids(*paths: str) -> list[str]:
        name = f"{abs(hash(paths))}.jsonl"
        job = job_to(tmp_path, path=str(tmp_path / name), upload=None)
        values = job.model_dump(exclude_unset=True)
        values["input"] = {"path": list(paths) if len(paths) > 1 else paths[0]}
        made = build(Job, values)
        run(made)
        assert made.output.path.with_name(f"{name}.manifest.json").read_text().count(f"file://{folder}") >= 1
        return [row["id"] for row in rows_of(made)]

    wanted = [f"{number}-{at}" for number in range(3) for at in range(4)]
    assert ids(f"file://{folder}/shard-*.jsonl") == wanted
    assert ids(f"file://{folder}/shard-1.jsonl") == wanted[4:8]
    assert ids(f"file://{folder}/shard-2.jsonl", str(folder / "shard-0.jsonl")) == wanted[8:] + wanted[:4]
    (folder / "readme.txt").unlink()
    assert ids(f"file://{folder}/") == wanted


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("file:///nowhere/at/all.jsonl", "no file is named like"),
        ("file:///nowhere/*.jsonl", "no file is named like"),
        ("gopher://host/x.jsonl", "cannot open 'gopher"),
        ("file:///no*where/x.jsonl", "for names of files, not of folders"),
    ],
)
def test_an_input_that_is_not_there_is_named(tmp_path: Path, uri: str, words: str) -> None:
    job = job_to(tmp_path, upload=None)
    values = job.model_dump(exclude_unset=True) | {"input": {"path": uri}}
    with pytest.raises(ConfigError, match=words) as raised:
        run(build(Job, values))
    assert "input.path" in str(raised.value)


def test_an_output_path_elsewhere_is_short_for_upload(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/there/out.jsonl"
    values = job_to(tmp_path).model_dump(exclude_unset=True)
    job = build(Job, values | {"output": {"path": uri}})
    assert job.output.upload == uri and job.output.path.name == "out.jsonl"
    assert job.output.path.is_relative_to(tmp_path / "cache" / "jobs")
    run(job)
    assert there(tmp_path).read_bytes() == job.output.path.read_bytes()


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ({"path": "s3://bucket/x.jsonl", "upload": "s3://bucket/y.jsonl"}, "short for upload"),
        ({"path": "x.jsonl", "upload": "folder/x.jsonl"}, "must be a URI"),
        ({"path": "x.jsonl", "upload": "s3://bucket/folder/"}, "not a folder"),
        ({"path": "s3://bucket/"}, "not a folder"),
        ({"path": "x.jsonl", "upload": "s3://b/x", "upload_s": 0}, "upload_s"),
    ],
)
def test_wrong_places_are_refused(tmp_path: Path, output: dict[str, Any], words: str) -> None:
    values = job_to(tmp_path).model_dump(exclude_unset=True)
    with pytest.raises(ConfigError, match=words):
        build(Job, values | {"output": output})


def test_standard_output_is_not_uploaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"output\.upload: standard output"):
        run(job_to(tmp_path, path="-"))


@pytest.mark.parametrize("field", ["input.path", "output.upload"])
def test_a_password_in_a_uri_is_refused_and_not_repeated(tmp_path: Path, field: str) -> None:
    """It would stand in the manifest."""
    section, name = field.split(".")
    values = job_to(tmp_path).model_dump(exclude_unset=True)
    values[section] = values[section] | {name: "s3://KEY:hush@bucket/x.jsonl"}
    with pytest.raises(ConfigError, match=rf"{field}: .*AWS_SECRET_ACCESS_KEY") as refused:
        run(build(Job, values))
    assert "hush" not in str(refused.value)
    assert not any("hush" in path.read_text() for path in tmp_path.rglob("*.json"))


def test_a_query_is_part_of_the_way_there_and_not_of_the_name() -> None:
    uri = "s3://bucket/a/out.jsonl?endpoint_override=http://host:9000/x"
    assert uris.name_in(uri) == "out.jsonl"
    assert isinstance(uris.open_store("output.upload", uri)[0], fs.S3FileSystem)


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


def test_rows_that_were_to_be_replaced_are_not_if_another_machine_went_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[Any] = [{"id": "bad", "prompt": 7}, *prompts(5)]
    run(job_to(tmp_path, lines=lines))
    lines[0]["prompt"] = "good"
    job = job_to(tmp_path, lines=lines, retry_failed=True)
    shutil.copytree(tmp_path / "here", tmp_path / "other")
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(Upload, "__enter__", lambda self: sys.exit(9))
        run(job)
    shutil.move(tmp_path / "here", tmp_path / "first")
    shutil.move(tmp_path / "other", tmp_path / "here")
    run(job)  # on another machine
    shutil.rmtree(tmp_path / "here")
    shutil.move(tmp_path / "first", tmp_path / "here")
    before = uploaded(tmp_path)
    run(job)  # its rows are the beginning of those there
    assert uploaded(tmp_path) == before == job.output.path.read_bytes()


@pytest.mark.parametrize(
    ("source", "is_refused"),
    [
        ("there/", True),
        ("there/*", True),
        ("there/*.jsonl", True),
        ("there/*.json", True),  # what it is made of
        ("there/*.part-*", True),
        ("there/out.jsonl", True),
        ("there/in*.jsonl", False),
        ("there/input.jsonl", False),
        ("other/*.jsonl", False),
    ],
)
def test_an_output_that_would_be_of_the_input_is_refused(
    tmp_path: Path, source: str, is_refused: bool
) -> None:
    """Before anything is read, or written: the next run would else take rows of the first for its input."""
    for folder in ("there", "other"):
        (tmp_path / folder).mkdir()
        for ending in ("jsonl", "json", "part-1"):
            (tmp_path / folder / f"input.{ending}").write_text('{"prompt": "a"}\n')
    if source == "there/out.jsonl":
        there(tmp_path).write_text('{"prompt": "precious"}\n')
    before = sorted(tmp_path.rglob("*"))
    for path in (f"file://{tmp_path}/{source}", str(tmp_path / source)):
        if source.endswith("/") and not path.startswith("file:"):
            continue
        values = job_to(tmp_path, overwrite=True).model_dump(exclude_unset=True)
        job = build(Job, values | {"input": {"path": path}})
        if is_refused:
            with pytest.raises(ConfigError, match=r"output\.upload: what .* would be of the input .*folder"):
                run(job)
            assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "in.jsonl"])
        else:
            Upload(job)


def test_a_finished_output_is_never_written_over_while_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an input that was extended: cut short, the new object would be neither the old rows nor the new."""
    run(job_to(tmp_path, lines=prompts(10)))

    def cut_short(self: Upload, name: str, file: Path) -> str:
        with self._writing(name) as target:
            target.write(file.read_bytes()[:100])
        raise KeyboardInterrupt

    job = job_to(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Upload, "_put", cut_short)
        with pytest.raises(
            JobInterrupted,
            match=f"all {NUM_ROWS} rows are done.*not made of them yet; the same command goes on",
        ):
            run(job)
    assert uploaded(tmp_path) == job.output.path.read_bytes()
    shutil.rmtree(tmp_path / "here")
    assert run(job).resumed == NUM_ROWS
    assert there(tmp_path).read_bytes() == job.output.path.read_bytes() == uploaded(tmp_path)


@pytest.mark.parametrize("name", ["out.jsonl.upload.json", "out.jsonl.manifest.json"])
def test_what_says_what_counts_is_replaced_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    job = job_to(tmp_path, lines=prompts(4))
    run(job)
    before, upload = there(tmp_path, name).read_bytes(), Upload(job)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(upload, "_store", Killed(upload._store, killed))
    with pytest.raises(KeyboardInterrupt):
        upload._write(name, b"{}")
    assert there(tmp_path, name).read_bytes() == before


class Killed:
    """A store whose files are written, and not moved to their places."""

    def __init__(self, store: Any, move: Any) -> None:
        self._store, self.move = store, move

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_a_damaged_ledger_does_not_keep_a_job_from_starting_anew(tmp_path: Path) -> None:
    run(job_to(tmp_path))
    there(tmp_path, "out.jsonl.upload.json").write_bytes(b"")
    with pytest.raises(ConfigError, match="--new"):
        run(job_to(tmp_path))
    job = job_to(tmp_path, lines=prompts(4), overwrite=True)
    run(job)
    assert there(tmp_path).read_bytes() == job.output.path.read_bytes() == uploaded(tmp_path)
    assert len(rows_of(job)) == 4


def test_of_two_that_fetch_the_same_rows_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each would go on with a file of its own, one of which nobody sees."""
    job = job_to(tmp_path)
    interrupted(job, 40, monkeypatch)
    shutil.rmtree(tmp_path / "here")
    reading, refused = Upload._reading, []

    def read(self: Upload, name: str) -> Any:
        if not refused and ".part-" in name:
            refused.append(name)
            with pytest.raises(ConfigError, match="is being written by another process"):
                Upload(job).restore()
        return reading(self, name)

    monkeypatch.setattr(Upload, "_reading", read)
    assert run(job).resumed > 0 and refused
    assert not list((tmp_path / "here").glob(".*download"))


def test_rows_that_another_has_fetched_meanwhile_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_to(tmp_path)
    interrupted(job, 40, monkeypatch)
    rows, manifest = job.output.path.read_bytes(), manifest_path(job.output.path).read_bytes()
    shutil.rmtree(tmp_path / "here")
    upload, size_here = Upload(job), Upload._size_here

    def size(self: Upload) -> int:
        found = size_here(self)
        if not job.output.path.exists():
            job.output.path.parent.mkdir(exist_ok=True)
            job.output.path.write_bytes(rows)
            manifest_path(job.output.path).write_bytes(manifest)
        return found

    reading, fetched = Upload._reading, []

    def read(self: Upload, name: str) -> Any:
        fetched.extend([name] * (".part-" in name))
        return reading(self, name)

    monkeypatch.setattr(Upload, "_size_here", size)
    monkeypatch.setattr(Upload, "_reading", read)
    upload.restore()
    assert fetched == [] and job.output.path.read_bytes() == rows
