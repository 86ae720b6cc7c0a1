"""The output file: checked first, whole lines only, resumable after Ctrl-C."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hispec.errors import ConfigError
from hispec.jobs import writer as writer_module
from hispec.jobs.schema import OutputConfig
from hispec.jobs.writer import OutputError, RowWriter, drop_lines, hold
from tests.helpers.fake_llm import FakeLLM
from tests.helpers.job_support import install_fake_llm, make_job, prompts, rows_of, run


@pytest.fixture(autouse=True)
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_llm(monkeypatch)


@pytest.mark.parametrize(
    ("resume", "words"),
    [
        (False, r"exists; set output\.resume=true.*output\.overwrite=true"),
        (True, r"out\.jsonl\.manifest\.json, by which.*does not; start anew with --new"),
    ],
)
def test_an_existing_output_is_an_error_before_the_model_is_loaded(
    tmp_path: Path, resume: bool, words: str
) -> None:
    job = make_job(tmp_path, prompts(2), output={"resume": resume})
    job.output.path.write_text("results of a week\n")
    with pytest.raises(ConfigError, match=words):
        run(job)
    assert job.output.path.read_text() == "results of a week\n" and not FakeLLM.instances


def test_overwrite_replaces_the_output_only_when_the_model_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(tmp_path, prompts(2), output={"overwrite": True})
    job.output.path.write_text("results of a week\n")
    with monkeypatch.context() as patch:
        patch.setattr(
            FakeLLM,
            "__init__",
            lambda self, *args, **kwargs: (_ for _ in ()).throw(ConfigError("no such model")),
        )
        with pytest.raises(ConfigError, match="no such model"):
            run(job)
    assert job.output.path.read_text() == "results of a week\n"
    assert set(tmp_path.iterdir()) == {job.input.path, job.output.path}
    run(job)
    assert [row["index"] for row in rows_of(job)] == [0, 1]


@pytest.mark.parametrize("resume", [False, True])
def test_a_model_that_cannot_be_loaded_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: bool
) -> None:
    output = {"path": str(tmp_path / "a" / "b" / "out.jsonl"), "resume": resume}
    job = make_job(tmp_path, prompts(2), output=output)

    def fail(*args: Any, **fields: Any) -> None:
        raise ConfigError("no such model")

    monkeypatch.setattr(FakeLLM, "__init__", fail)
    with pytest.raises(ConfigError, match="no such model"):
        run(job)
    assert list(tmp_path.iterdir()) == [job.input.path]


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to", None])
def test_output_equal_to_input_is_an_error_through_links_too(tmp_path: Path, link: str | None) -> None:
    job = make_job(tmp_path, prompts(2), output={"overwrite": True})
    before = job.input.path.read_bytes()
    path = tmp_path / "folder" / ".." / "in.jsonl"
    if link is None:
        (tmp_path / "folder").mkdir()
    else:
        path = tmp_path / "link.jsonl"
        getattr(path, link)(job.input.path)
    job = job.model_copy(update={"output": OutputConfig(path=path, overwrite=True)})
    with pytest.raises(ConfigError, match="is the input file"):
        run(job)
    assert job.input.path.read_bytes() == before and not FakeLLM.instances


def test_an_output_that_cannot_be_written_is_found_before_the_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path, part in (
        (tmp_path, "not a regular file"),
        (tmp_path / "file" / "out.jsonl", "cannot write"),
        (Path("/dev/full"), "not a regular file"),
    ):
        job = make_job(tmp_path, prompts(1), output={"path": str(path)})
        with pytest.raises(ConfigError, match=part):
            run(job)
    assert not FakeLLM.instances


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv"])
def test_a_link_that_leads_nowhere_is_found_before_the_model_is_loaded(tmp_path: Path, name: str) -> None:
    for target, part in (
        (tmp_path / "nowhere" / name, r"leads to .*nowhere.*, in a folder that does not exist; make it"),
        (tmp_path / name, "is not a regular file"),
    ):
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).symlink_to(target)
        with pytest.raises(ConfigError, match=f"output.path: .*{part}"):
            run(make_job(tmp_path, prompts(1), output={"path": str(tmp_path / name), "overwrite": True}))
    assert not FakeLLM.instances
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to(tmp_path / f"other-{name}")
    run(make_job(tmp_path, prompts(1), output={"path": str(tmp_path / name)}))
    assert (tmp_path / name).is_symlink() and (tmp_path / f"other-{name}").read_bytes()


@pytest.mark.parametrize("has_output", [False, True])
def test_an_input_that_is_missing_or_leads_to_itself_is_named(tmp_path: Path, has_output: bool) -> None:
    job = make_job(tmp_path, prompts(1))
    if has_output:
        job.output.path.write_text("")
    job.input.path.unlink()
    with pytest.raises(ConfigError, match=r"input.path: cannot read .*in.jsonl: No such file"):
        run(job)
    job.input.path.symlink_to(job.input.path)
    with pytest.raises(ConfigError, match=r"input.path: cannot read .*in.jsonl: Too many levels"):
        run(job)


def test_missing_folders_are_created(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(1), output={"path": str(tmp_path / "a" / "b" / "out.jsonl")})
    run(job)
    assert len(rows_of(job)) == 1


@pytest.mark.parametrize("content", [None, b"", b"\n \n"])
def test_an_input_without_rows_is_an_error_before_the_model_is_loaded(
    tmp_path: Path, content: bytes | None
) -> None:
    job = make_job(tmp_path, [])
    job.input.path.unlink() if content is None else job.input.path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"input\.path"):
        run(job)
    assert not FakeLLM.instances and not job.output.path.exists()


def test_a_disk_that_fills_up_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.jsonl"
    path.touch()
    words = "it has 1 whole lines of this run, one per row that is done; free some space, and do this$"
    with (
        pytest.raises(OutputError, match=words),
        RowWriter(path, way_on="do this") as writer,
    ):
        writer.add(0, {"index": 0})
        real = writer._file

        class Full:
            def write(self, line: bytes) -> int:
                real.write(line[:5])
                raise OSError(28, "No space left on device")

            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

        monkeypatch.setattr(writer, "_file", Full())
        writer.add(1, {"index": 1})
    assert path.read_bytes() == b'{"index": 0}\n'


class Filling(io.FileIO):
    """A file that takes at most 7 bytes at once, and of all less than `room`, as on a disk that fills up."""

    room = 1000

    def write(self, content: Any) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        taken = super().write(content[: min(7, self.room)])
        self.room -= taken
        return taken


LINES = b"the first\nthe second\nthe third\n"


def drop_second(path: Path) -> tuple[Any, int]:
    held = hold(path)
    return drop_lines(path, held, len(LINES), lambda line: line == b"the second\n", "do this")


def test_lines_are_taken_out_whole_where_a_write_takes_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(LINES + b"torn")
    monkeypatch.setattr(writer_module, "hold", lambda path: Filling(path, "ab"))
    kept, size = drop_second(path)
    kept.close()
    assert path.read_bytes() == b"the first\nthe third\n" and size == 20


def test_lines_that_cannot_be_taken_out_leave_the_output_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(LINES)
    monkeypatch.setattr(writer_module, "hold", lambda path: Filling(path, "ab"))
    monkeypatch.setattr(Filling, "room", 12)
    with pytest.raises(OutputError, match=r"out\.jsonl .*No space left.*it is as it was; .*, and do this$"):
        drop_second(path)
    assert path.read_bytes() == LINES and list(tmp_path.iterdir()) == [path]


def test_an_output_that_is_a_link_stays_one_when_lines_are_taken_out(tmp_path: Path) -> None:
    place, path = tmp_path / "place.jsonl", tmp_path / "out.jsonl"
    place.write_bytes(LINES)
    path.symlink_to(place)
    kept, _ = drop_second(path)
    kept.close()
    assert path.is_symlink() and place.read_bytes() == b"the first\nthe third\n"


def test_rows_wait_for_their_turn(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.touch()
    with RowWriter(path, turns=iter([0, 1, 4])) as writer:
        writer.add(4, {"index": 4})
        writer.add(1, {"index": 1})
        assert path.read_bytes() == b"" and writer.num_waiting == 2
        writer.add(0, {"index": 0})
        assert len(path.read_bytes().splitlines()) == 3 == writer.num_written


def test_rows_that_are_written_as_they_end_do_not_wait(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with RowWriter(path) as writer:
        for index in (2, 0):
            writer.add(index, {"index": index})
        assert path.read_bytes() == b'{"index": 2}\n{"index": 0}\n' and not writer.num_waiting


@pytest.mark.parametrize("trace", ["out.jsonl", "sub/../out.jsonl"])
def test_a_trace_in_the_output_file_is_an_error(tmp_path: Path, trace: str) -> None:
    engine = {"max_num_seqs": 4, "trace": str(tmp_path / trace)}
    job = make_job(tmp_path, prompts(2), engine=engine)
    with pytest.raises(ConfigError, match=r"output\.path: .*out\.jsonl is engine\.trace too; choose"):
        run(job)
    assert not FakeLLM.instances and not job.output.path.exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda path: path.unlink(),
            r"was moved, removed or replaced, and rows .* by another program; put it back, and do this$",
        ),
        (lambda path: path.rename(path.with_name("other")), r"was moved, removed or replaced"),
        (lambda path: os.truncate(path, 5), r"was cut to \d+ of \d+ bytes, by another program; do this$"),
    ],
    ids=["removed", "moved", "cut"],
)
@pytest.mark.parametrize("sync_s", [0.0, None], ids=["at the next row", "at the end"])
def test_a_file_that_others_take_away_is_told(
    tmp_path: Path, change: Callable[[Path], None], words: str, sync_s: float | None
) -> None:
    path = tmp_path / "out.jsonl"
    with (
        pytest.raises(OutputError, match=rf"^output\.path: .*out\.jsonl {words}"),
        RowWriter(path, sync_s=sync_s, way_on="do this") as writer,
    ):
        writer.add(0, {"index": 0})
        change(path)
        if sync_s is not None:
            writer.add(1, {"index": 1})
            with pytest.raises(OutputError, match=words):
                writer.add(2, {"index": 2})
    assert not path.exists() or b"\0" not in path.read_bytes()


@pytest.mark.parametrize("path", [".", "./", "..", "/", "folder/..", "new/", Path()])
def test_a_folder_is_no_output(path: str | Path) -> None:
    with pytest.raises(ValueError, match="must name a file, not a folder"):
        OutputConfig.model_validate({"path": path})


def test_a_name_leaves_those_beside_it_their_room(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a name of at most 225 bytes, .*, got one of 227"):
        OutputConfig.model_validate({"path": "ä" * 111 + ".json"})
    name = "ä" * 110 + ".json"
    job = make_job(tmp_path, prompts(2), output={"path": str(tmp_path / name)})
    run(job)
    assert len(rows_of(job)) == 2 and len(name.encode()) == 225
