"""Inputs and outputs of other formats: what goes in comes out."""

from __future__ import annotations

import datetime
import gzip
import io
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from hispec.errors import ConfigError, build
from hispec.jobs import inputs
from hispec.jobs.load import load_job
from hispec.jobs.manifest import manifest_path
from hispec.jobs.runner import JobInterrupted
from hispec.jobs.schema import Job
from hispec.jobs.tables import _batches
from hispec.jobs.writer import OutputError
from tests.helpers.fake_llm import FakeLLM
from tests.helpers.job_support import install_fake_llm, interrupt_at, make_job, prompts, rows_of, run

LINES = [
    {"id": "a", "prompt": 'one, "two"\nthree', "sampling": {"max_tokens": 5}, "metadata": {"tag": [1]}},
    {"id": "b", "messages": [{"role": "user", "content": "hé"}]},
    {"id": "c", "prompt_token_ids": [104, 105]},
    {"id": "d", "prompt": ""},
]


@pytest.fixture(autouse=True)
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_llm(monkeypatch)


def job_of(folder: Path, source: Any, output: str = "out.jsonl", **fields: Any) -> Job:
    given = {"path": str(source)} if isinstance(source, Path | str) else {"path": list(map(str, source))}
    values = {
        "model": "fake",
        "engine": {"max_num_seqs": 4},
        "sampling": {"max_tokens": 40, "temperature": 0.0},
        "input": given | fields.pop("input", {}),
        "output": {"path": output if output == "-" else str(folder / output)} | fields.pop("output", {}),
    }
    return build(Job, values | fields)


def results(job: Job) -> list[Any]:
    return [(row["id"], [one["text"] for one in row["outputs"]], row.get("metadata")) for row in rows_of(job)]


@pytest.fixture
def expected(tmp_path: Path) -> list[Any]:
    (tmp_path / "plain").mkdir()
    job = make_job(tmp_path / "plain", LINES)
    run(job)
    return results(job)


def write(path: Path, lines: list[dict[str, Any]] = LINES) -> Path:
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    columns = ("id", "prompt", "messages", "prompt_token_ids", "sampling", "metadata")
    if path.suffix == ".parquet":
        pa.parquet.write_table(pa.Table.from_pylist([dict.fromkeys(columns) | line for line in lines]), path)
        return path
    if ".csv" in path.suffixes:
        rows = [
            {name: value if isinstance(value, str) else json.dumps(value) for name, value in line.items()}
            for line in lines
        ]
        stream = io.BytesIO()
        pa.csv.write_csv(pa.Table.from_pylist([dict.fromkeys(columns) | row for row in rows]), stream)
        text = stream.getvalue()
    if path.suffix == ".zst":
        with pa.CompressedOutputStream(str(path), "zstd") as stream:
            stream.write(text)
    else:
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


@pytest.mark.parametrize(
    "name", ["in.jsonl.gz", "in.jsonl.zst", "in.parquet", "in.csv", "in.csv.gz", "in.CSV.zst"]
)
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str, expected: list[Any]) -> None:
    lines = LINES
    if "csv" in name.lower():  # in which an empty text is a missing one
        lines = LINES[:3]
        path = write(tmp_path / name.lower(), lines)
        path = path.rename(tmp_path / name)
    else:
        path = write(tmp_path / name, lines)
    job = job_of(tmp_path, path)
    run(job)
    assert results(job) == expected[: len(lines)]
    FakeLLM.instances.clear()
    assert run(job).resumed == len(lines) and not FakeLLM.instances


def test_several_files_are_one_input_and_their_rows_named_by_file(tmp_path: Path) -> None:
    for number in (2, 1):
        write(tmp_path / f"shard-{number}.jsonl", [{"id": f"{number}{at}", "prompt": "x"} for at in range(3)])
    (tmp_path / "more.jsonl").write_text('{"prompt": "y"}\n{broken\n')
    job = job_of(tmp_path, [tmp_path / "shard-*.jsonl", tmp_path / "more.jsonl"])
    run(job)
    assert [row["id"] for row in rows_of(job)] == ["10", "11", "12", "20", "21", "22", None, None]
    assert rows_of(job)[-1]["error"]["message"].startswith("more.jsonl, line 2: not valid JSON")
    files = json.loads(manifest_path(job.output.path).read_text())["input"]
    assert [Path(file["path"]).name for file in files] == ["shard-1.jsonl", "shard-2.jsonl", "more.jsonl"]
    assert files[2]["bytes"] == (tmp_path / "more.jsonl").stat().st_size == 24


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        (["none-*.jsonl"], "no file is named like .*none-"),
        (["in.jsonl", "in.*"], "names a file twice"),
        (["in.jsonl", "."], r"is not a regular file; name its files, such as .*/\*\.jsonl"),
        ([], "must name at least one file"),
    ],
)
def test_files_that_are_not_there_are_named(tmp_path: Path, paths: list[str], words: str) -> None:
    write(tmp_path / "in.jsonl")
    with pytest.raises(ConfigError, match=words):
        run(job_of(tmp_path, [tmp_path / path for path in paths]))
    assert not FakeLLM.instances


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("in.jsonl.gz", b"no gzip", "cannot read .*in.jsonl.gz"),
        ("in.jsonl.gz", gzip.compress(b'{"prompt": "a"}\n' * 99, mtime=0)[:30], "cannot read .*in.jsonl.gz"),
        ("in.jsonl.zst", b"no zstd", "cannot read .*in.jsonl.zst"),
        ("in.parquet", b"no parquet", "cannot read .*in.parquet"),
        ("in.csv", b"", "cannot read .*in.csv as csv: its first line must name each column once"),
        ("in.csv", b"a,a\n1,2\n", "must name each column once, got a, a"),
        ("in.csv", b'prompt\na\n"a"b\n', "cannot read .*in.csv as csv: line 3: "),
        ("in.csv", b"prompt\xff\na\n", "cannot read .*in.csv as csv: its first line is not UTF-8"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        run(job_of(tmp_path, tmp_path / name))
    assert not FakeLLM.instances


def test_a_row_of_a_table_that_cannot_be_read_fails_alone(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_bytes(b"id,prompt\n1,caf\xe9\n2,a,b\n3,good\n\xe9,bad\n")
    texts = pa.array([b"one", b"\xff", b"three"]).cast(pa.string(), safe=False)
    pa.parquet.write_table(pa.table({"id": ["1", "2", "3"], "text": texts}), tmp_path / "in.parquet")
    for name, of_input, expected in (
        (
            "in.csv",
            {},
            ["row 1: prompt: not UTF-8; save", "row 2: has 3 values, and the first", None, "row 4: id: not"],
        ),
        ("in.parquet", {"columns": {"id": "id", "prompt": "text"}}, [None, "row 2: cannot be read: ", None]),
    ):
        job = job_of(tmp_path, tmp_path / name, f"{name}.jsonl", input=of_input)
        for _ in range(2):  # a job that goes on finds all of them done
            run(job)
            errors = [row["error"] for row in rows_of(job)]
            for error, words in zip(errors, expected, strict=True):
                assert (error is None) == (words is None)
                assert error is None or (words in error["message"] and error["type"] == "invalid_line")
        FakeLLM.instances.clear()


def test_messages_of_parquet_are_those_of_lines(tmp_path: Path) -> None:
    """Without the fields of others, which Arrow writes as null, and as JSON can hold them."""

    def call(**arguments: str) -> dict[str, Any]:
        function = {"name": "now", "arguments": arguments}
        return {"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}

    asked = {"role": "user", "content": "hi"}
    rows = [[asked, call(city="x"), asked], [asked, call(day="3"), asked], [{**asked, "name": "me"}]]
    lines = write(tmp_path / "in.jsonl", [{"messages": row} for row in rows])
    pa.parquet.write_table(pa.table({"messages": rows}), tmp_path / "in.parquet")
    found = []
    for path in (lines, tmp_path / "in.parquet"):
        job = job_of(tmp_path, path, f"{path.suffix[1:]}.out.jsonl")
        run(job)
        found.append([row["messages"] for row in rows_of(job)])
        FakeLLM.instances.clear()
    assert found[0] == found[1] and found[0][2] == [{**asked, "name": "me"}]
    late = [[{**asked, "at": datetime.datetime(2024, 1, 1)}], [{**asked, "at": None}]]
    pa.parquet.write_table(pa.table({"messages": late}), tmp_path / "late.parquet")
    job = job_of(tmp_path, tmp_path / "late.parquet", "late.jsonl")
    run(job)
    bad, good = rows_of(job)
    assert "messages: must be what JSON can hold" in bad["error"]["message"] and good["error"] is None


def test_csv_has_texts_of_any_spelling_and_length(tmp_path: Path) -> None:
    words = ["NA", "null", "nan", "N/A", "None", "1e5", "true", "x" * 3_000_000]
    (tmp_path / "in.csv").write_text("id,prompt\n" + "".join(f"{word[:9]},{word}\n" for word in words))
    job = job_of(tmp_path, tmp_path / "in.csv")
    run(job)
    assert [(row["id"], row["prompt"]) for row in rows_of(job)] == [(word[:9], word) for word in words]


def test_a_cut_off_zst_is_an_error_and_one_of_two_parts_is_read(tmp_path: Path) -> None:
    parts = [write(tmp_path / f"{name}.jsonl.zst", [{"prompt": name * 99}]) for name in "ab"]
    whole = tmp_path / "in.jsonl.zst"
    whole.write_bytes(b"".join(part.read_bytes() for part in parts))
    job = job_of(tmp_path, whole)
    run(job)
    assert [row["prompt"][0] for row in rows_of(job)] == ["a", "b"]
    whole.write_bytes(parts[0].read_bytes()[:-3])
    with pytest.raises(ConfigError, match=r"cannot read .*in.jsonl.zst|has no rows"):
        run(job_of(tmp_path, whole, "other.jsonl"))


@pytest.mark.parametrize("name", ["in.jsonl", "in.parquet", "in.csv"])
def test_prompts_may_stand_in_other_columns(tmp_path: Path, name: str) -> None:
    lines = [
        {"question": "what", "key": "k1", "answer": "42"},
        {"question": "why", "key": "k2", "answer": "so"},
    ]
    path = tmp_path / name
    if name == "in.jsonl":
        write(path, lines)
    elif name == "in.csv":
        pa.csv.write_csv(pa.Table.from_pylist(lines), path)
    else:
        pa.parquet.write_table(pa.Table.from_pylist(lines), path)
    job = job_of(tmp_path, path, input={"columns": {"prompt": "question", "id": "key"}})
    run(job)
    assert [(row["id"], row["prompt"], row["error"]) for row in rows_of(job)] == [
        ("k1", "what", None),
        ("k2", "why", None),
    ]
    with pytest.raises(ConfigError, match=r"input\.columns"):
        job_of(tmp_path, path, input={"columns": {"promt": "question"}})


def test_of_parquet_only_the_columns_of_rows_are_read(tmp_path: Path) -> None:
    """Others may hold what Python has no value for, which is an error by name where all are read."""
    odd = {
        "late": pa.array([253402300800 * 10**6], pa.timestamp("us")),
        "text": pa.array([b"\xff"]).cast(pa.string(), safe=False),
    }
    for name, values in odd.items():
        path = tmp_path / f"{name}.parquet"
        pa.parquet.write_table(pa.table({"question": ["what"], "odd": values}), path)
        job = job_of(tmp_path, path, f"{name}.jsonl", input={"columns": {"prompt": "question", "id": "key"}})
        run(job)
        assert [(row["prompt"], row["error"]) for row in rows_of(job)] == [("what", None)]
        FakeLLM.instances.clear()
        with pytest.raises(ConfigError, match=rf"cannot read .*{name}\.parquet as parquet: .*input\.columns"):
            run(job_of(tmp_path, path, "all.jsonl"))
        assert not FakeLLM.instances
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    pa.parquet.write_table(twice, tmp_path / "in.parquet")
    with pytest.raises(ConfigError, match="several columns of the name prompt; name each once"):
        run(job_of(tmp_path, tmp_path / "in.parquet"))
    pa.parquet.write_table(pa.table({"question": ["what", "why"]}), tmp_path / "in.parquet")
    job = job_of(tmp_path, tmp_path / "in.parquet", input={"columns": {"prompt": "answer"}})
    run(job)
    assert ["got none" in row["error"]["message"] for row in rows_of(job)] == [True, True]


def test_a_file_whose_name_is_not_utf_8_is_an_input(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"in\xff.jsonl")
    write(path, LINES[:1])
    job = job_of(tmp_path, str(tmp_path / "in*.jsonl"))
    run(job)
    (file,) = json.loads(manifest_path(job.output.path).read_text())["input"]
    assert len(rows_of(job)) == 1 and file["path"].endswith(r"in\udcff.jsonl")


def test_rows_on_standard_output_are_not_there_to_go_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at(30, monkeypatch)
    words = r"rows are done, whole lines of standard output; the same command starts again from the first row"
    with pytest.raises(JobInterrupted, match=words):
        run(job_of(tmp_path, write(tmp_path / "in.jsonl", prompts(9)), "-"))


def test_standard_input_and_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    inputs._standard_input.cache_clear()
    text = b"".join(json.dumps(line).encode() + b"\n" for line in prompts(5))
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(text)))
    monkeypatch.chdir(tmp_path)
    job = job_of(tmp_path, "-", "-")
    report = run(job)
    rows = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert [row["id"] for row in rows] == [f"p{at}" for at in range(5)]
    assert report.num_rows == 5 and not list(tmp_path.iterdir())
    inputs._standard_input.cache_clear()


def test_names_in_a_job_file_are_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("model: m\ninput: {path: [a.jsonl, '-', /b/*.jsonl]}\noutput: {path: o}\n")
    assert load_job(path).input.paths == [tmp_path / "a.jsonl", Path("-"), Path("/b/*.jsonl")]
    path.write_text("model: m\ninput: {path: '-'}\noutput: {path: o}\n")
    assert load_job(path).input.paths == [Path("-")]


@pytest.mark.parametrize("name", ["out.parquet", "out.csv", "out.csv.gz", "out.jsonl.gz", "out.jsonl.zst"])
def test_outputs_that_are_made_as_a_whole(tmp_path: Path, name: str, expected: list[Any]) -> None:
    source = write(tmp_path / "in.jsonl", LINES[:3])
    job = job_of(tmp_path, source, name)
    run(job)
    write(source)  # one more row: the job goes on from the rows beside its output
    FakeLLM.instances.clear()
    assert run(job).resumed == 3
    assert len(FakeLLM.instances) == 1
    path = job.output.path
    if "jsonl" in name:
        raw = pa.input_stream(str(path), compression="zstd" if name.endswith("zst") else "gzip").read()
        assert raw == path.with_name(f"{name}.rows.jsonl").read_bytes()
        return
    table = pa.parquet.read_table(path) if name == "out.parquet" else pa.csv.read_csv(path)
    rows = table.to_pylist()
    assert [row["id"] for row in rows] == ["a", "b", "c", "d"]
    assert [row["text"] or None for row in rows] == [(texts or [None])[0] for _, texts, _ in expected]
    assert [row["error_type"] or None for row in rows] == [None, None, None, "refused"]
    assert json.loads(rows[0]["metadata"]) == {"tag": [1]} and rows[2]["prompt_tokens"] == 2
    path.unlink()  # made again without the model
    FakeLLM.instances.clear()
    run(job)
    assert path.exists() and not FakeLLM.instances
    path.with_name(f"{name}.rows.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"exists, but .*rows.jsonl, from which a job goes on, does not"):
        run(job)


def test_a_job_that_starts_anew_and_ends_before_its_first_row_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it says itself; what is there of the old output is not its own."""
    job = job_of(tmp_path, write(tmp_path / "in.jsonl"), "out.parquet")
    run(job)
    rows = job.output.path.with_name("out.parquet.rows.jsonl")
    anew = job.model_copy(update={"output": job.output.model_copy(update={"overwrite": True})})
    interrupt_at(1, monkeypatch)
    with pytest.raises(JobInterrupted, match="0 of 4 rows are done"):
        run(anew)
    monkeypatch.setattr(FakeLLM, "on_step", None)
    assert rows.stat().st_size == 0 and job.output.path.exists()
    for other in ({"model": "another"}, {"output": job.output.model_copy(update={"resume": False})}):
        with pytest.raises(ConfigError):  # what is there is not for it to replace
            run(job.model_copy(update=other))
    report = run(job)
    assert report.resumed == 0 and pa.parquet.read_table(job.output.path).num_rows == 4
    rows.write_bytes(b"")  # a disk that has lost them
    with pytest.raises(ConfigError, match="from which a job goes on, does not"):
        run(job)


def test_a_table_takes_only_so_many_bytes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column of a batch holds 2 GB of text at most."""
    monkeypatch.setattr("hispec.jobs.tables._BATCH_BYTES", 600)
    job = job_of(tmp_path, write(tmp_path / "in.jsonl"), "out.parquet")
    run(job)
    with pa.parquet.ParquetFile(job.output.path) as file:
        sizes = [file.metadata.row_group(at).num_rows for at in range(file.metadata.num_row_groups)]
    assert sum(sizes) == 4 and 1 < len(sizes) < 4
    assert [row["index"] for row in pa.parquet.read_table(job.output.path).to_pylist()] == [0, 1, 2, 3]
    lines = job.output.path.with_name("out.parquet.rows.jsonl").read_bytes().splitlines(keepends=True)
    batches = list(_batches(lines))
    assert all(len(batch) == 1 or sum(map(len, batch)) <= 600 for batch in batches)
    assert [line for batch in batches for line in batch] == lines


def test_what_pyarrow_refuses_is_no_traceback_and_loses_no_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise pa.lib.ArrowCapacityError("Cannot convert: a column has more than 2 GB")

    job = job_of(tmp_path, write(tmp_path / "in.jsonl"), "out.parquet")
    monkeypatch.setattr("hispec.jobs.tables._columns", refuse)
    with pytest.raises(
        OutputError, match=r"cannot make .*out.parquet: Cannot convert.*all rows are in .*l; the same"
    ):
        run(job)
    assert not job.output.path.exists() and not list(tmp_path.glob(".*"))


def test_an_output_that_is_made_as_a_whole_and_is_a_link_stays_one(tmp_path: Path) -> None:
    job = job_of(tmp_path, write(tmp_path / "in.jsonl"), "out.jsonl.gz")
    place = tmp_path / "elsewhere" / "place.gz"
    place.parent.mkdir()
    job.output.path.symlink_to(place)
    run(job)
    assert job.output.path.is_symlink() and len(gzip.decompress(place.read_bytes()).splitlines()) == 4
    assert list(place.parent.iterdir()) == [place]


def test_a_disk_that_is_full_at_the_end_loses_no_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(tmp_path, write(tmp_path / "in.jsonl"), "out.jsonl.gz")

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("hispec.jobs.tables.shutil.copyfileobj", full)
        with pytest.raises(OutputError, match=r"cannot make .*out.jsonl.gz.*all rows are in .*rows.jsonl"):
            run(job)
    assert not job.output.path.exists() and not list(tmp_path.glob(".*"))
    FakeLLM.instances.clear()
    assert run(job).resumed == 4 and job.output.path.exists() and not FakeLLM.instances


def test_ctrl_c_while_the_output_is_made_loses_no_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(tmp_path, write(tmp_path / "in.jsonl"), "out.parquet")

    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("hispec.jobs.tables._columns", interrupted)
        with pytest.raises(JobInterrupted, match=r"all 4 rows are done, in .*rows.jsonl; only .*out.parquet"):
            run(job)
    assert not job.output.path.exists() and not list(tmp_path.glob(".*"))
    FakeLLM.instances.clear()
    assert run(job).resumed == 4 and job.output.path.exists() and not FakeLLM.instances


def test_pyarrow_is_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for job in (
        job_of(tmp_path, tmp_path / "in.parquet"),
        job_of(tmp_path, write(tmp_path / "in.jsonl"), "o.parquet"),
    ):
        (tmp_path / "in.parquet").write_text("")
        with pytest.raises(ConfigError, match=r"needs pyarrow: pip install '\.\[data\]'"):
            run(job)


@pytest.mark.parametrize(
    ("pattern", "output", "is_refused"),
    [
        ("*.jsonl", "out.jsonl", True),
        ("**/*.jsonl", "a/b/out.jsonl", True),
        ("*/../*.jsonl", "a/out.jsonl", False),
        ("*.jsonl", "there/out.jsonl", False),
        ("*.jsonl", ".out.jsonl", False),
        ("*", "out.parquet", True),
        ("*.rows.jsonl", "out.parquet", True),  # which the rows of a table are called
        ("[in]*.jsonl", "out.jsonl", False),
    ],
)
def test_an_output_is_no_file_of_the_input(
    tmp_path: Path, pattern: str, output: str, is_refused: bool
) -> None:
    write(tmp_path / ("in.rows.jsonl" if "rows" in pattern else "in.jsonl"), LINES[:3])
    (tmp_path / "a").mkdir()
    write(tmp_path / "z.rows.jsonl", LINES[3:])
    job = job_of(tmp_path, str(tmp_path / pattern), output)
    if is_refused:
        with pytest.raises(ConfigError, match=r"would be a file of the input .*; choose a path that this"):
            run(job)
        assert not FakeLLM.instances
    else:
        run(job)
        assert run(job).resumed == len(rows_of(job))


def test_metadata_of_a_table_is_repeated_or_its_row_is_bad(tmp_path: Path) -> None:
    values = ["train", datetime.datetime(2026, 1, 2), None]
    for at, value in enumerate(values):
        table = pa.table({"prompt": ["a", "b"], "metadata": pa.array([value, value])})
        pa.parquet.write_table(table, tmp_path / f"{at}.parquet")
    job = job_of(tmp_path, [tmp_path / f"{at}.parquet" for at in range(3)])
    run(job)
    rows = rows_of(job)
    assert [row.get("metadata") for row in rows] == ["train"] * 2 + [None] * 4
    assert [row["error"] is None for row in rows] == [True] * 2 + [False] * 2 + [True] * 2
    assert "metadata: must be what JSON can hold, got datetime" in rows[2]["error"]["message"]
    assert run(job).resumed == 6


@pytest.mark.parametrize("name", ["out.csv", "out.parquet"])
def test_half_a_surrogate_pair_keeps_no_table_from_being_made(tmp_path: Path, name: str) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"id": "b\\ud83d", "prompt": "a"}\n{"id": "c", "prompt": "a"}\n')
    job = job_of(tmp_path, tmp_path / "in.jsonl", name)
    run(job)
    path = job.output.path
    table = pa.parquet.read_table(path) if name == "out.parquet" else pa.csv.read_csv(path)
    assert table["id"].to_pylist() == ["b\\ud83d", "c"] and run(job).resumed == 2
    (tmp_path / "in.csv").write_text('prompt,metadata\na,"""\\ud83d"""\nb,"{}"\n')
    job = job_of(tmp_path, tmp_path / "in.csv", "of_csv.jsonl")
    run(job)
    assert "half of a surrogate pair" in rows_of(job)[0]["error"]["message"]
    assert rows_of(job)[1]["metadata"] == {}
