"""Inputs and outputs that are elsewhere, by pyarrow's file systems: which are taken, and which refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from hispec.errors import ConfigError, build
from hispec.jobs import uris
from hispec.jobs.schema import Job
from hispec.jobs.upload import Upload
from tests.helpers.job_support import rows_of, run
from tests.helpers.uploads import job_to, there


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
