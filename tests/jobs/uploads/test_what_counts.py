"""What counts of an output elsewhere: beside another machine or process, after damage, when killed."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from hispec.errors import ConfigError
from hispec.jobs.manifest import manifest_path
from hispec.jobs.runner import JobInterrupted
from hispec.jobs.upload import Upload
from tests.helpers.job_support import make_job, prompts, rows_of, run
from tests.helpers.uploads import NUM_ROWS, interrupted, job_to, there, uploaded


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


def test_what_no_job_has_uploaded_is_left_alone(tmp_path: Path) -> None:
    there(tmp_path).parent.mkdir()
    there(tmp_path).write_text("precious")
    with pytest.raises(ConfigError, match=r"exists, but out\.jsonl\.upload\.json"):
        run(job_to(tmp_path))
    assert there(tmp_path).read_text() == "precious"


# Which would be deleted in time.
ELSEWHERE = [
    b'{"parts": [{"name": "%s", "size": 0, "digest": ""}]}' % name
    for name in (b"../precious", b"..", b"a\\n")
]


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"parts": [{"name": 1}]}', b'{"parts": [], "x": 1}', b"[]", *ELSEWHERE]
)
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
