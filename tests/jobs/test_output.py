"""The output file: checked first, whole lines only, resumable after Ctrl-C."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hispec.errors import ConfigError
from hispec.jobs.output import OrderedWriter, OutputError
from hispec.jobs.runner import JobInterrupted
from hispec.jobs.schema import OutputConfig
from tests.helpers.fake_llm import FakeLLM
from tests.helpers.job_support import install_fake_llm, interrupt_at, make_job, prompts, rows_of, run


@pytest.fixture(autouse=True)
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_llm(monkeypatch)


def test_an_existing_output_is_an_error_before_the_model_is_loaded(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(2))
    job.output.path.write_text("results of a week\n")
    with pytest.raises(ConfigError, match=r"exists; set output\.resume=true.*output\.overwrite=true"):
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
    words = "it has 1 whole lines, one per row that is done; free some space, and do this$"
    with (
        pytest.raises(OutputError, match=words),
        OrderedWriter(path, way_on="do this") as writer,
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


def test_rows_wait_for_their_turn(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.touch()
    with OrderedWriter(path) as writer:
        writer.add(2, {"index": 2})
        writer.add(1, {"index": 1})
        assert path.read_bytes() == b"" and writer.num_waiting == 2
        writer.add(0, {"index": 0})
        assert len(path.read_bytes().splitlines()) == 3 == writer.next_index


@pytest.mark.parametrize("step", [1, 9, 40, 77])
def test_an_interrupted_job_keeps_whole_lines_and_a_resumed_one_ends_as_if_nothing_had_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    sampling = {"temperature": 0.8, "max_tokens": 40}  # sampled: seeds must not depend on when a row runs
    lines = [*prompts(30), b"broken\n", *prompts(3)]
    job = make_job(tmp_path, lines, sampling=sampling)
    run(job)
    expected = job.output.path.read_bytes()
    job.output.path.unlink()
    interrupt_at(step, monkeypatch)
    with pytest.raises(JobInterrupted, match=r"\d+ of 34 rows are done.*output\.resume=true"):
        run(job)
    part = job.output.path.read_bytes()
    assert expected.startswith(part) and (not part or part.endswith(b"\n"))
    monkeypatch.setattr(FakeLLM, "on_step", None)
    report = run(make_job(tmp_path, lines, sampling=sampling, output={"resume": True}))
    assert job.output.path.read_bytes() == expected
    assert report.resumed == len(part.splitlines())


def test_a_torn_last_line_is_done_again(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(10), output={"resume": True})
    run(job)
    expected = job.output.path.read_bytes()
    beginnings = [expected[:keep] for keep in (0, 1, len(expected) // 2, len(expected) - 1)]
    for part in (*beginnings, expected + expected[:9]):
        job.output.path.write_bytes(part)
        report = run(job)
        assert job.output.path.read_bytes() == expected
        assert report.resumed == part.count(b"\n")


def test_a_complete_output_is_resumed_without_the_model(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(5), output={"resume": True})
    run(job)
    FakeLLM.instances.clear()
    assert run(job).resumed == 5 and not FakeLLM.instances


@pytest.mark.parametrize(
    "change",
    [{"model": "another"}, {"sampling": {"max_tokens": 39, "temperature": 0.0}}, {"input": {"limit": 2}}],
)
def test_resuming_the_output_of_another_job_is_an_error_that_changes_nothing(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    job = make_job(tmp_path, prompts(5), output={"resume": True})
    run(job)
    before = job.output.path.read_bytes()
    FakeLLM.instances.clear()
    with pytest.raises(ConfigError, match=r"does not belong to this job.*output\.overwrite=true"):
        run(make_job(tmp_path, prompts(5), output={"resume": True}, **change))
    assert job.output.path.read_bytes() == before and not FakeLLM.instances


@pytest.mark.parametrize("content", [b"notes\n", b"[1]\n", b'{"index": 0}\n', b"\xff\n"])
def test_resuming_a_file_that_is_no_output_is_an_error(tmp_path: Path, content: bytes) -> None:
    job = make_job(tmp_path, prompts(5), output={"resume": True})
    job.output.path.write_bytes(content)
    with pytest.raises(ConfigError, match="line 1 is not the result of input line 1"):
        run(job)
    assert job.output.path.read_bytes() == content


@pytest.mark.parametrize("trace", ["out.jsonl", "sub/../out.jsonl"])
def test_a_trace_in_the_output_file_is_an_error(tmp_path: Path, trace: str) -> None:
    engine = {"max_num_seqs": 4, "trace": str(tmp_path / trace)}
    job = make_job(tmp_path, prompts(2), engine=engine)
    with pytest.raises(ConfigError, match=r"output\.path: .*out\.jsonl is engine\.trace too; choose"):
        run(job)
    assert not FakeLLM.instances and not job.output.path.exists()
