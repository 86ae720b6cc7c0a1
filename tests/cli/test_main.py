"""The command line: what goes to which stream, exit codes, errors without tracebacks, and a quick --help."""

from __future__ import annotations

import io
import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ee_models.errors import CheckpointError
from hispec import __version__
from hispec.cli import env, main
from tests.helpers.command import ENVIRONMENT, SLOW_RUN
from tests.helpers.fake_llm import FakeLLM


def test_help_needs_no_heavy_import() -> None:
    code = (
        "import sys; from hispec.cli import main\ntry: main(['--help'])\nfinally: print({'torch',"
        " 'transformers', 'pydantic', 'rich'} & sys.modules.keys())"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert run.stdout.rstrip().endswith("set()")
    assert all(command in run.stdout for command in ("run", "generate", "bench", "fetch"))


@pytest.mark.parametrize("number", [1, 2])
def test_a_standard_stream_that_is_closed_is_told(number: int) -> None:
    """In words, or in the exit code alone: what is opened next would get its number."""
    command = "[sys.executable, '-m', 'hispec', 'env']"
    code = f"import os, sys; os.close({number}); os.execv(sys.executable, {command})"
    run = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True)
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr == (
        "hispec: standard output is closed; send it to /dev/null instead\n" if number == 1 else ""
    )


def test_a_standard_input_that_is_closed_is_empty() -> None:
    command = "[sys.executable, '-m', 'hispec', 'generate', '--model', 'fake', '-']"
    code = f"import os, sys; os.close(0); os.execv(sys.executable, {command})"
    run = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True)
    assert run.returncode == 2 and run.stderr.startswith("hispec: ") and "Traceback" not in run.stderr


def test_python_m_hispec_is_the_command() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "hispec", "--version"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == f"hispec {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--set", "engine.blocksize=4"], "did you mean 'block_size'?"),
        (["--set", "input.path=nowhere.jsonl"], "cannot read nowhere.jsonl"),
        (["--set", "output.path=/dev/null"], "not a regular file"),
    ],
)
def test_a_users_error_is_a_message_and_exit_code_2(
    job: Path, arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(job), *arguments]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("hispec: ") and part in err and "Traceback" not in err and out == ""


@pytest.mark.parametrize(
    "error", [CheckpointError("no config.json in x"), PermissionError(13, "Permission denied", "x")]
)
def test_errors_of_the_model_are_the_users_too(
    job: Path, error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any, **fields: Any) -> None:
        raise error

    monkeypatch.setattr(FakeLLM, "__init__", fail)
    assert main(["run", str(job)]) == 2
    assert capsys.readouterr().err.strip() == f"hispec: {error}"
    monkeypatch.setenv("HISPEC_DEBUG", "1")
    with pytest.raises(type(error)):
        main(["run", str(job)])


def test_a_bug_keeps_its_traceback(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLLM, "step", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["run", str(job)])


def test_fetch_prints_the_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []
    monkeypatch.setattr(
        "hispec.loading.fetch.fetch", lambda name, force: (calls.append((name, force)), tmp_path)[1]
    )
    assert main(["fetch", "smollm2", "--force"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n" and calls == [("smollm2", True)]


def test_fetch_without_a_name_lists_what_there_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HISPEC_CACHE", str(tmp_path))
    assert main(["fetch"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines[1:]} >= {"smollm2", "smollm2-ee", "smollm2-maths"}
    assert any("93 MB to download" in line for line in lines) and not list(tmp_path.iterdir())


def test_fetch_of_an_unknown_model_is_a_users_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", "smollm"]) == 2
    assert "did you mean 'smollm2'?" in capsys.readouterr().err


def test_ctrl_c_anywhere_is_a_message_and_exit_code_130(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*args: Any, **fields: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeLLM, "stream", interrupt)
    assert main(["generate", "--model", "fake", "hello"]) == 130
    monkeypatch.setattr(FakeLLM, "__init__", interrupt)
    assert main(["run", str(job)]) == 130
    assert main(["bench", str(job)]) == 2  # the bad row comes first
    assert main(["bench", str(job), "--limit", "5"]) == 130
    monkeypatch.setattr("hispec.loading.fetch.fetch", interrupt)
    assert main(["fetch", "smollm2"]) == 130
    error = capsys.readouterr().err
    assert error.count("Interrupted") == 4
    assert "Interrupted. What is done is kept; the same command goes on from there" in error
    assert "Interrupted. Nothing half-done is kept; the same command goes on" in error


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SLOW_RUN, "generate", "--model", "fake", "--max-tokens", "9", "hello"]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=30) == 141


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_rows_that_nobody_reads_any_more_are_no_error(job: Path, unbuffered: str) -> None:
    command = [sys.executable, "-c", SLOW_RUN, "run", str(job), "--set", "output.path=-"]
    environment = ENVIRONMENT | {"PYTHONUNBUFFERED": unbuffered}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert b"free some space" not in process.stderr.read()
    assert process.wait(timeout=30) == 141


def test_a_terminal_of_another_encoding_ends_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
    monkeypatch.setattr(env, "_env", lambda options: print("draft≥0.5") or 0)
    assert main(["env"]) == 0
    assert written.getvalue() == b"draft\\u22650.5\n"


def test_env_says_what_a_bug_report_needs_and_nothing_private(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("HISPEC_CACHE", "/home/somebody/cache")
    monkeypatch.setenv("HISPEC_API_KEY", "secret")
    monkeypatch.setattr("hispec.utils.bug_report.free_memory_bytes", lambda: 1 / 0)
    assert main(["env", "--json"]) == 0
    text = capsys.readouterr().out
    found = json.loads(text)
    assert found["hispec"] == __version__ and found["packages"]["torch"] != "missing"
    assert found["cache"] == "~/cache" and found["memory"].startswith("not found out: ZeroDivisionError")
    assert "somebody" not in text and "secret" not in text
    assert main(["env"]) == 0
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) == len(found) and "torch " in printed


def test_serve_checks_its_settings_before_it_loads_a_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for arguments, words in (
            ([], "model"),
            (["m", "--port", "70000"], "serve.port"),
            (["m", "--max-requests", "0"], "serve.max_requests"),
            (["m", "--host", "no.such.host.invalid"], "cannot listen at no.such.host.invalid:8000"),
            (["m", "--port", port], f"cannot listen at 127.0.0.1:{port}.*choose another --port"),
            (["m", "--set", "engine.max_num_seqs=0"], "engine.max_num_seqs"),
        ):
            assert main(["serve", *arguments]) == 2
            assert re.search(words, capsys.readouterr().err)
    assert not FakeLLM.instances
    seen: list[Any] = []
    monkeypatch.setattr("hispec.serving.run.serve", lambda _, *given: seen.append(given[:2]))
    preset = tmp_path / "preset.yaml"
    preset.write_text("model: m\nengine: {max_num_seqs: 3}\nsampling: {temperature: 0.5}\n")
    monkeypatch.setenv("HISPEC_API_KEY", "secret")
    assert main(["serve", "--preset", str(preset), "--port", "0", "--name", "mine"]) == 0
    assert main(["serve", "m"]) == 0
    (config, sampling), (_, model_defaults) = seen
    assert (config.name, config.api_key, config.host) == ("mine", "secret", "127.0.0.1")
    assert sampling == {"temperature": 0.5} and model_defaults is None
