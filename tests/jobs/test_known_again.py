"""How a job knows its own output again: by its settings, its model and its rows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hispec.errors import ConfigError
from hispec.jobs.manifest import manifest_path
from tests.helpers.fake_llm import FakeLLM
from tests.helpers.job_support import (
    install_fake_llm,
    make_job,
    manifest_of,
    prompts,
    rows_of,
    run,
)


@pytest.fixture(autouse=True)
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_llm(monkeypatch)


def test_two_results_of_one_row_are_one_that_is_done(tmp_path: Path) -> None:
    """As when outputs were put together by hand."""
    given = [{"id": "q", "prompt": "one"}, {"id": "r", "prompt": "other"}]
    job = make_job(tmp_path, given)
    run(job)
    lines = job.output.path.read_bytes().splitlines(keepends=True)
    changed = re.sub(rb'"hash": "[0-9a-f]{32}"', b'"hash": "%s"' % (b"0" * 32), lines[0])
    job.output.path.write_bytes(lines[0] + changed)
    job = make_job(tmp_path, given, output={"only_missing": True})
    assert run(job).resumed == 1 and [row["id"] for row in rows_of(job)] == ["q", "q", "r"]


def test_rows_that_cannot_be_read_are_done_once_though_another_file_comes(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "i.csv").write_text("id,prompt\n1,one\nbroken\n")
    paths = [tmp_path / "a" / "i.csv", tmp_path / "i.csv"]
    jobs = [make_job(tmp_path, [], input={"path": [str(path) for path in paths[:n]]}) for n in (1, 2)]
    run(jobs[0])
    (tmp_path / "i.csv").write_text("id,prompt\n2,two\nbroken\n")
    assert run(jobs[1]).resumed == 2
    rows = rows_of(jobs[1])
    assert [row["id"] for row in rows] == ["1", None, "2", None]
    assert str(paths[1]) in rows[3]["error"]["message"], "two files of one name are told apart"


def test_files_of_one_name_that_are_elsewhere_are_told_apart_by_where_that_is(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    uris = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "i.jsonl").write_text("broken\n")
        uris.append(f"file://{tmp_path}/{folder}/i.jsonl")
    job = make_job(tmp_path, [], input={"path": uris})
    run(job)
    for row, uri in zip(rows_of(job), uris, strict=True):
        assert uri in row["error"]["message"]


def test_no_limit_is_another_than_none_that_is_named(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(1), sampling={"max_tokens": None, "temperature": 0.0})
    run(job)
    with pytest.raises(ConfigError, match=r"sampling\.max_tokens was None and is not set"):
        run(make_job(tmp_path, prompts(2), sampling={"temperature": 0.0}))


def test_errors_of_rows_that_have_left_the_input_are_none_of_it(tmp_path: Path) -> None:
    lines = [b"broken\n", b"also broken\n", {"prompt": "one"}]
    run(make_job(tmp_path, lines))
    job = make_job(tmp_path, lines[1:])
    run(job)
    assert [manifest_of(job)[name] for name in ("rows", "done", "errors")] == [2, 2, 1]


@pytest.mark.parametrize("content", [b"notes\n", b"[1]\n", b'{"index": 0}\n', b"\xff\n"])
def test_a_line_of_somebody_elses_is_an_error_that_changes_nothing(tmp_path: Path, content: bytes) -> None:
    job = make_job(tmp_path, prompts(5))
    run(job)
    lines = job.output.path.read_bytes().splitlines(keepends=True)
    for at in (0, 2, 5):
        foreign = b"".join([*lines[:at], content, *lines[at:]])
        job.output.path.write_bytes(foreign)
        with pytest.raises(ConfigError, match=f"line {at + 1} of .*out.jsonl is no row of an output"):
            run(job)
        assert job.output.path.read_bytes() == foreign


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"model": "another"}, "model was 'fake' and is 'another'"),
    ({"sampling": {"max_tokens": 39, "temperature": 0.0}}, "sampling.max_tokens was 40 and is 39"),
    ({"engine": {"max_num_seqs": 4, "seed": 5}}, "engine.seed was 0 and is 5"),
    (
        {"engine": {"max_num_seqs": 4, "quantization": "int8"}},
        "engine.quantization was not set and is 'int8'",
    ),
    ({"engine": {"max_num_seqs": 4, "dtype": "bfloat16"}}, "engine.dtype was not set and is 'bfloat16'"),
    (
        {"engine": {"max_num_seqs": 4, "kv_cache_dtype": "int8"}},
        "engine.kv_cache_dtype was not set and is 'int8'",
    ),
    ({"output": {"token_ids": True}}, "output.token_ids was not set and is True"),
]


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_other_settings_are_refused_by_name_and_nothing_is_changed(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    job = make_job(tmp_path, prompts(5))
    run(job)
    before = job.output.path.read_bytes()
    FakeLLM.instances.clear()
    with pytest.raises(ConfigError, match=f"{words}.*--new.*--only-missing"):
        run(make_job(tmp_path, prompts(6), **change))
    assert job.output.path.read_bytes() == before and not FakeLLM.instances


def test_another_models_weights_are_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(tmp_path, prompts(5))
    run(job)
    before, known = job.output.path.read_bytes(), manifest_of(job)
    monkeypatch.setattr(FakeLLM, "weights", "trained on")
    with pytest.raises(ConfigError, match=r"fingerprint\.model was 'some' and is 'trained on'"):
        run(make_job(tmp_path, prompts(6)))
    assert job.output.path.read_bytes() == before and manifest_of(job) == known


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv"])
def test_a_format_that_is_what_the_name_says_is_no_other(tmp_path: Path, name: str) -> None:
    kind, path = name.partition(".")[2], str(tmp_path / name)
    for lines, output in ((2, {}), (3, {"format": kind}), (4, {})):
        assert run(make_job(tmp_path, prompts(lines), output={"path": path, **output})).timed.num_results


def test_a_limit_that_chat_rows_had_not_is_another_setting_though_it_is_the_default(tmp_path: Path) -> None:
    """Chats in OpenAI's lines have no limit of tokens where nobody names one."""
    body = {"messages": [{"role": "user", "content": "a"}]}
    lines = [
        {"custom_id": str(at), "method": "POST", "url": "/v1/chat/completions", "body": body}
        for at in range(2)
    ]
    run(make_job(tmp_path, lines[:1], sampling={"temperature": 0.0}))
    with pytest.raises(ConfigError, match=r"sampling\.max_tokens was not set and is 16"):
        run(make_job(tmp_path, lines, sampling={"temperature": 0.0, "max_tokens": 16}))
    run(make_job(tmp_path, lines, sampling={"temperature": 0.0}))


def test_plans_and_sizes_may_change(tmp_path: Path) -> None:
    run(make_job(tmp_path, prompts(3)))
    plan = {"draft": {"layer": 2}, "num_draft_tokens": 3}
    job = make_job(tmp_path, prompts(6), speculative=plan, engine={"max_num_seqs": 2, "dtype": "float32"})
    assert run(job).resumed == 3 and len(rows_of(job)) == 6
    with pytest.raises(ConfigError, match="speculative was not set"):
        run(make_job(tmp_path, prompts(7), speculative=plan | {"acceptance": "rejection"}))


def test_only_missing_keeps_what_other_settings_made(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(4))
    run(job)
    before = job.output.path.read_bytes()
    longer = {"sampling": {"max_tokens": 50, "temperature": 0.0}}
    job = make_job(tmp_path, prompts(6), output={"only_missing": True}, **longer)
    assert run(job).resumed == 4
    assert job.output.path.read_bytes().startswith(before) and len(rows_of(job)) == 6
    assert manifest_of(job)["settings"]["sampling.max_tokens"] == 50
    assert [one["sampling.max_tokens"] for one in manifest_of(job)["earlier"]] == [40]


@pytest.mark.parametrize("content", [b"", b"{", b'{"format": 99, "settings": {}}', b'{"settings": 3}'])
def test_a_manifest_that_cannot_be_read_is_an_error(tmp_path: Path, content: bytes) -> None:
    job = make_job(tmp_path, prompts(2))
    run(job)
    manifest_path(job.output.path).write_bytes(content)
    with pytest.raises(ConfigError, match=r"manifest.json is not a manifest.*--new"):
        run(job)
