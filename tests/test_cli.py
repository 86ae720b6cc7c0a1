"""The command line: what goes to which stream, exit codes, errors without tracebacks, and a quick --help."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from ee_models.errors import CheckpointError
from hispec import __version__
from hispec.cli import main
from hispec.errors import ConfigError
from tests.helpers.fake_llm import FakeLLM
from tests.helpers.job_support import install_fake_llm, interrupt_at

ROOT = Path(__file__).parent.parent
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
SPECULATIVE = ["speculative.draft.layer=2", "speculative.check.layer=5"]


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_llm(monkeypatch)
    monkeypatch.delenv("HISPEC_DEBUG", raising=False)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job file of six rows, one of them bad."""
    lines = [json.dumps({"prompt": f"prompt {number}"}) for number in range(5)] + ["{"]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    path = tmp_path / "job.yaml"
    path.write_text(
        f"model: fake\ninput: {{path: in.jsonl}}\noutput: {{path: {tmp_path}/out.jsonl}}\nsampling:"
        " {temperature: 0.0}\n"
    )
    return path


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


def test_python_m_hispec_is_the_command() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "hispec", "--version"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == f"hispec {__version__}\n"


def test_run_prints_a_summary_and_writes_rows(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(job), "--set", *SPECULATIVE, "--set", "output.compare_plain=true"]) == 0
    out, err = capsys.readouterr()
    assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == 6
    for part in (
        "fake",
        "draft [0, 2) → check [2, 5) → verify [5, 10)",
        "6: 5 with outputs, 1 with errors",
        "5/5 rows",
        "50.0% of drafted tokens kept by check, 50.0% of tentative tokens kept by verify",
        "× plain",
        str(tmp_path / "out.jsonl"),
    ):
        assert part in out
    assert "tokens/s" in err and "rows" in err


def test_acceptance_at_its_floor_is_said_plainly(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stats = FakeLLM.stats
    monkeypatch.setattr(FakeLLM, "stats", lambda self: stats(self) | {"draft_kept": 1})
    assert main(["run", str(job), "--set", *SPECULATIVE]) == 0
    assert "docs/jobs.md" in capsys.readouterr().out


def test_a_resumed_complete_job_says_so_without_the_model(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(job)]) == 0
    FakeLLM.instances.clear()
    assert main(["run", str(job), "--set", "output.resume=true"]) == 0
    assert "6 done before" in capsys.readouterr().out and not FakeLLM.instances


def test_a_job_whose_rows_all_fail_exits_with_1_and_says_why(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["{", *['{"prompt": ""}'] * 2, *["{}"] * 3, '{"prompt": 1}', '{"prompt": 2}']
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    assert main(["run", str(job), "--set", *SPECULATIVE, "output.compare_plain=true"]) == 1
    out = capsys.readouterr().out
    assert re.findall(r"\d × .*?(?= *$)", out, re.MULTILINE) == [
        "3 × a row needs exactly one of prompt, prompt_token_ids and messages, got none",
        "2 × the prompt is empty: give at least one token",
        "1 × not valid JSON: Expecting property name enclosed in double quotes, at character 2",
        "2 × other reasons",
    ]
    assert not any(word in out for word in ("nan", "tokens/s", "× plain"))


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


def test_generate_streams_to_stdout_and_counts_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "generate",
                "--model",
                "fake",
                "--draft-layer",
                "2",
                "--check-layer",
                "5",
                "--num-draft-tokens",
                "3",
                "--max-tokens",
                "9",
                "hello",
            ]
        )
        == 0
    )
    out, err = capsys.readouterr()
    assert re.fullmatch(r"[a-z]{9}\n", out)
    assert (
        re.search(r"9 tokens, the first after \d+\.\d s, then \d+\.\d tokens/s", err)
        and "50% of drafted tokens kept, 50% of tentative tokens kept" in err
    )
    (llm,) = FakeLLM.instances
    assert llm.speculative.plan(10).num_draft_tokens == 3 and llm.engine["max_num_seqs"] == 1 and llm.closed


def test_generate_counts_tiers_and_colours_them_on_a_terminal_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["generate", "--model", "fake", "--max-tokens", "5", "--show-tiers", "hello"]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert re.fullmatch(r"[a-z]{5}\n", out), "no terminal: the text alone"
    assert "draft: 2 (drafted and kept), check: 2 (the check's own), verify: 1 (the full model's own)" in err
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    for name, value in (("TERM", "xterm-256color"), ("COLORTERM", "truecolor")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(command) == 0
    coloured, _ = capsys.readouterr()
    codes = ["36", "4;33", "1;35", "36", "4;33"]
    assert (
        coloured
        == "".join(f"\x1b[{code}m{letter}\x1b[0m" for code, letter in zip(codes, out.strip(), strict=True))
        + "\n"
    )
    assert main([*command[:-2], "hello"]) == 0
    assert "tier" not in "".join(capsys.readouterr())


def test_generate_without_a_draft_layer_is_plain(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "generate",
                "--model",
                "fake",
                "--no-chat",
                "hello",
                "--set",
                "sampling.max_tokens=4",
                "engine.seed=3",
            ]
        )
        == 0
    )
    out, err = capsys.readouterr()
    assert re.fullmatch(r"[a-z]{4}\n", out) and "kept" not in err
    assert FakeLLM.instances[0].speculative is None and FakeLLM.instances[0].engine["seed"] == 3


def test_a_prompt_may_follow_settings() -> None:
    settings = ["--set", "sampling.max_tokens=4", "engine.seed=3"]
    assert main(["generate", "--model", "fake", "--no-chat", *settings, "is 1+1=2 so?"]) == 0
    assert FakeLLM.instances[0].engine["seed"] == 3


@pytest.mark.parametrize("rest", [[], ["--no-chat"]], ids=["nothing", "an option"])
def test_set_without_a_setting_is_refused(rest: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--model", "fake", "hello", "--set", *rest])
    assert "--set: expected at least one argument" in capsys.readouterr().err


def test_generate_puts_the_prompt_into_the_chat_template_unless_told_not_to(
    capsys: pytest.CaptureFixture[str],
) -> None:
    texts = []
    for arguments in ([], ["--chat"], ["--no-chat"]):
        main(["generate", "--model", "fake", "hello", *arguments])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_generate_reads_a_prompt_from_stdin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["generate", "--model", "fake", "hello"])
    expected = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(read=lambda: "hello"))
    main(["generate", "--model", "fake", "-"])
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--check-layer", "5"], "--check-layer: nothing drafts; add --draft-layer D"),
        (
            ["--num-draft-tokens", "4", "--num-checks", "2"],
            "--num-draft-tokens, --num-checks: nothing drafts; add --draft-layer D, --set"
            " speculative.draft.kind=ngram (prompt lookup), or --preset",
        ),
        (["--draft-layer", "5", "--check-layer", "5"], "check.layer=5 must lie above draft.layer=5"),
        (
            ["--draft-layer", "5", "--num-draft-tokens", "0"],
            "speculative.num_draft_tokens: must be at least 1, got 0",
        ),
        (["--max-tokens", "-3"], "sampling.max_tokens: must be at least 1, got -3"),
        (["--temperature", "nan"], "sampling.temperature: must be a finite number, got nan"),
        (["--top-p", "0"], "sampling.top_p: must be above 0, got 0.0"),
    ],
)
def test_generates_settings_are_checked_like_a_jobs(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--model", "fake", "hello", *arguments]) == 2
    assert part in capsys.readouterr().err and not FakeLLM.instances


def test_generates_flags_are_put_over_a_presets_plan(tmp_path: Path) -> None:
    preset = tmp_path / "preset.yaml"
    preset.write_text("{model: fake, speculative: {draft: {kind: ngram}, num_draft_tokens: 8}}")
    assert main(["generate", "--preset", str(preset), "--num-draft-tokens", "3", "hello"]) == 0
    lookup = ["--num-draft-tokens", "3", "--set", "speculative.draft.kind=ngram"]
    assert main(["generate", "--model", "fake", "hello", *lookup]) == 0
    for llm in FakeLLM.instances:
        assert (llm.speculative.draft.kind, llm.speculative.num_draft_tokens) == ("ngram", 3)


def test_generate_refuses_an_empty_prompt_with_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", "fake", "--no-chat", ""]) == 2
    assert "is empty" in capsys.readouterr().err


def test_bench_prints_a_table_and_writes_json(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bench.json"
    arguments = [
        "bench",
        str(job),
        "--json",
        str(path),
        "--no-transformers",
        "--limit",
        "5",
        "--repeats",
        "2",
        "--batch-size",
        "2",
        "--by-batch",
        "--max-tokens",
        "6",
    ]
    assert main([*arguments, "--set", *SPECULATIVE]) == 0
    result = json.loads(path.read_text())
    assert len(result["groups"]) == 3, "two prompts, two, and one"
    assert result["options"] == {
        "repeats": 2,
        "batch_size": 2,
        "max_tokens": 6,
        "context": None,
        "temperature": 0.0,
        "transformers": False,
        "plans": {},
        "by_batch": True,
    }
    assert result["exact_match"] == {"two_tier": [5, 5], "three_tier": [5, 5]}
    assert "three-tier" in capsys.readouterr().out


def test_bench_finds_an_unwritable_json_file_before_the_work(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["bench", str(job), "--json", str(tmp_path / "file" / "bench.json")]) == 2
    assert "--json: cannot write" in capsys.readouterr().err and not FakeLLM.instances


def test_a_bench_that_is_interrupted_leaves_the_json_file_as_it_was(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(number: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeLLM, "on_step", interrupt)
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    old.write_text("{}")
    for path in (new, old):
        assert main(["bench", str(job), "--limit", "5", "--json", str(path)]) == 130
        assert "Interrupted. Nothing was written; the same command starts again" in capsys.readouterr().err
    assert not new.exists() and old.read_text() == "{}"


def test_fetch_prints_the_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []
    monkeypatch.setattr(
        "hispec.loading.fetch.fetch", lambda name, force: (calls.append((name, force)), tmp_path)[1]
    )
    assert main(["fetch", "smollm2", "--force"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n" and calls == [("smollm2", True)]


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
    assert "Interrupted. No row was run; give the same command again" in error
    assert "Interrupted. Nothing of it is kept; the same command starts again" in error


@pytest.mark.parametrize(
    ("first", "way_on"),
    [
        ([], ""),
        (["output.resume=false"], "output.resume=true"),
        (["output.overwrite=true"], "output.resume=true output.overwrite=false"),
        (["output.resume=true"], ""),
    ],
)
def test_an_interrupted_job_says_how_to_go_on_and_that_works(
    job: Path,
    first: list[str],
    way_on: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(5, patch)
        assert main(["run", str(job), "--set", *first, "output.token_ids=true"]) == 130
    flags = f" with --set {way_on}" if way_on else ""
    assert f"; the same command{flags} goes on from there" in capsys.readouterr().err
    assert main(["run", str(job), "--set", *first, "output.token_ids=true", *way_on.split()]) == 0
    assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == 6


SLOW_RUN = """
import signal, sys, time, types
# A shell in the background starts what it starts with SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
from tests.helpers.fake_llm import FakeLLM
module = types.ModuleType("hispec.llm")
module.LLM = FakeLLM
sys.modules["hispec.llm"] = module
FakeLLM.on_step = lambda number: time.sleep(0.01)
from hispec.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_real_sigint_leaves_whole_lines_and_exit_code_130(job: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(
        "".join(json.dumps({"prompt": f"prompt {number}"}) + "\n" for number in range(10_000))
    )
    out = tmp_path / "out.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_RUN, "run", str(job)], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not (out.exists() and out.stat().st_size > 10_000) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err
    found = re.search(r"Interrupted\. (\d+) of 10000 rows are done", err)
    lines = out.read_bytes().splitlines(keepends=True)
    assert found is not None and len(lines) == int(found[1]) > 10
    assert all(
        line.endswith(b"\n") and json.loads(line)["index"] == index for index, line in enumerate(lines)
    )


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SLOW_RUN, "generate", "--model", "fake", "--max-tokens", "9", "hello"]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=30) == 141


def test_bench_measures_the_best_plans_of_a_profile(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {
        "ngram_two_tier": {"draft": {"kind": "ngram"}, "num_draft_tokens": 4},
        "exit_three_tier": {"draft": {"layer": 2}, "check": {"layer": 5}},
    }
    profile = tmp_path / "profile.json"
    profile.write_text(
        json.dumps(
            {
                "best_of_kind": {
                    name: {"speculative": plan, "tokens_per_s": 1.0} for name, plan in found.items()
                }
            }
        )
    )
    arguments = [
        "bench",
        str(job),
        "--profile",
        str(profile),
        "--no-transformers",
        "--repeats",
        "1",
        "--limit",
        "5",
        "--json",
        str(tmp_path / "bench.json"),
    ]
    assert main(arguments) == 0
    engines = json.loads((tmp_path / "bench.json").read_text())["engines"]
    assert found.keys() <= engines.keys() and engines["ngram_two_tier"]["plan"].startswith(
        "n-grams of 4 to 1"
    )
    taken = tmp_path / "ngram_two_tier.yaml"
    taken.write_text("{model: fake, speculative: {draft: {kind: ngram}}}")
    assert main([*arguments, "--plan", str(taken)]) == 2
    assert "'ngram_two_tier' is also a name in" in capsys.readouterr().err
    for content, words in (
        ("{}", "is not what `hispec profile --json` writes"),
        ('{"best_of_kind": {"a": {"speculative": {"draft": {}}}}}', "best_of_kind.a"),
    ):
        profile.write_text(content)
        assert main(arguments) == 2
        assert words in capsys.readouterr().err


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


def test_the_flag_for_ray_says_where_workers_are_in_place_of_the_file(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def no_run(job: Any, progress: bool) -> None:
        seen.append((job.workers, job.ray.address, job.ray.num_cpus))
        raise ConfigError("enough")

    monkeypatch.setattr("hispec.jobs.runner.run_job", no_run)
    with job.open("a", encoding="utf-8") as file:
        file.write("\nworkers: 4\nray: {num_cpus: 3}\n")
    for flags in (["--ray"], ["--ray", "head:6379"], ["--ray", "--set", "ray.num_cpus=2"]):
        assert main(["run", str(job), *flags]) == 2
    assert seen == [(1, "auto", 3), (1, "head:6379", 3), (1, "auto", 2)]
