"""`hispec generate`: streams, settings, templates."""

from __future__ import annotations

import io
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from hispec.cli import main
from hispec.outputs import Delta
from tests.helpers.fake_llm import FakeLLM


def test_a_request_that_fails_is_told_by_its_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stream(self: FakeLLM, *_: object, **__: object) -> Iterator[Delta]:
        yield Delta("0", [], "", None, "error", None, error="the model's logits are nan")

    monkeypatch.setattr(FakeLLM, "stream", stream)
    assert main(["generate", "--model", "fake", "hello"]) == 2
    assert capsys.readouterr().err == "hispec: the model's logits are nan\n"


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


def test_generate_refuses_a_prompt_of_other_bytes_than_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8"))
    assert main(["generate", "--model", "fake", "-"]) == 2
    assert "standard input is not UTF-8: byte 0xe9 at position 3" in capsys.readouterr().err
    assert not FakeLLM.instances


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


def test_generates_layers_change_a_presets_tiers_and_leave_the_rest_of_them(tmp_path: Path) -> None:
    preset = tmp_path / "preset.yaml"
    preset.write_text(
        "{model: fake, speculative: {draft: {kind: adapter, layer: 4}, num_draft_tokens: 3,"
        " check: {kind: adapter, layer: 7, confidence: 0.9}}}"
    )
    layers = ["--draft-layer", "5", "--check-layer", "9"]
    assert main(["generate", "--preset", str(preset), *layers, "hello"]) == 0
    speculative = FakeLLM.instances[0].speculative
    assert (speculative.draft.kind, speculative.draft.layer) == ("adapter", 5)
    assert (speculative.check.kind, speculative.check.layer) == ("adapter", 9)
    assert speculative.check.confidence == 0.9 and speculative.num_draft_tokens == 3
    preset.write_text("{model: fake, speculative: {draft: {kind: ngram}, num_draft_tokens: 3}}")
    assert main(["generate", "--preset", str(preset), "--draft-layer", "5", "hello"]) == 0
    speculative = FakeLLM.instances[1].speculative
    assert (speculative.draft.kind, speculative.draft.layer) == ("exit", 5), "another drafter"


def test_generate_refuses_an_empty_prompt_with_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", "fake", "--no-chat", ""]) == 2
    assert "is empty" in capsys.readouterr().err


def test_a_prompt_may_follow_settings() -> None:
    settings = ["--set", "sampling.max_tokens=4", "engine.seed=3"]
    assert main(["generate", "--model", "fake", "--no-chat", *settings, "is 1+1=2 so?"]) == 0
    assert FakeLLM.instances[0].engine["seed"] == 3


@pytest.mark.parametrize("rest", [[], ["--no-chat"]], ids=["nothing", "an option"])
def test_set_without_a_setting_is_refused(rest: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--model", "fake", "hello", "--set", *rest])
    assert "--set: expected at least one argument" in capsys.readouterr().err
