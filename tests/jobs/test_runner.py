"""Running a job: order, bounds, errors of single rows, the comparison with plain decoding."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hispec.errors import ConfigError
from hispec.jobs.drive import REQUESTS_PER_ROW, WARM_UP_ROWS
from hispec.jobs.output import output_row
from hispec.jobs.report import print_job
from hispec.jobs.runner import JobInterrupted, run_job
from hispec.jobs.schema import OutputConfig
from hispec.jobs.writer import RowWriter
from hispec.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from hispec.sampling_params import SamplingParams
from tests.helpers.fake_llm import FakeLLM, answer
from tests.helpers.job_support import (
    THREE_TIER,
    install_fake_llm,
    interrupt_at,
    make_job,
    parse,
    prompts,
    rows_of,
    run,
    texts_of,
)


@pytest.fixture(autouse=True)
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_llm(monkeypatch)


def test_output_is_in_input_order_one_line_per_row_whatever_finishes_first(tmp_path: Path) -> None:
    lines = prompts(50)
    job = make_job(tmp_path, lines)
    report = run(job)
    rows = rows_of(job)
    assert [row["index"] for row in rows] == list(range(50))
    assert [row["id"] for row in rows] == [line["id"] for line in lines]
    greedy = SamplingParams(temperature=0.0, max_tokens=40)
    expected = [
        "".join(map(chr, answer([ord(letter) for letter in line["prompt"]], greedy))) for line in lines
    ]
    assert texts_of(job) == expected
    assert (
        report.timed.completion_tokens
        == sum(map(len, expected))
        == sum(row["usage"]["completion_tokens"] for row in rows)
    )
    assert FakeLLM.instances[0].closed


def test_the_engine_holds_a_bounded_number_of_rows(tmp_path: Path) -> None:
    run(make_job(tmp_path, prompts(100)))
    assert FakeLLM.instances[0].most_unfinished == 4 * REQUESTS_PER_ROW


def test_finished_rows_that_wait_for_a_slow_one_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hispec.jobs.drive.RESULTS_WAITING_PER_ROW", 2)
    monkeypatch.setattr(
        "tests.helpers.fake_llm.answer", lambda ids, sampling, at=0: [97] * (sampling.max_tokens or 1)
    )
    most_waiting = 0
    add = RowWriter.add

    def watched(self: RowWriter, index: int, row: dict[str, Any]) -> None:
        nonlocal most_waiting
        add(self, index, row)
        most_waiting = max(most_waiting, self.num_waiting)

    monkeypatch.setattr(RowWriter, "add", watched)
    slow = {"prompt": "slow", "sampling": {"max_tokens": 1000}}
    job = make_job(
        tmp_path, [slow] + [{"prompt": "quick", "sampling": {"max_tokens": 1}} for _ in range(300)]
    )
    run(job)
    assert len(rows_of(job)) == 301
    assert 8 <= most_waiting <= 8 + 4 * REQUESTS_PER_ROW


def test_progress_in_a_log_is_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hispec.utils.console._LOG_S", 0.0)
    run_job(make_job(tmp_path, prompts(20), speculative=THREE_TIER))
    lines = capsys.readouterr().err.splitlines()
    assert lines and not any("\r" in line for line in lines)
    assert all(line.startswith("rows: ") for line in lines) and "100% 20/20" in lines[-1]
    assert "errors, 50% of drafts kept, 1.00 tokens/round" in lines[-1]


def test_a_bad_row_becomes_an_error_row_and_the_rest_is_unharmed(tmp_path: Path) -> None:
    lines = [
        {"prompt": "one"},
        b"{broken\n",
        {"prompt": ""},
        {"id": 7, "promt": "x"},
        {"prompt_token_ids": [-1]},
        b"\xff\n",
        {"prompt": "two"},
    ]
    job = make_job(tmp_path, lines)
    report = run(job)
    rows = rows_of(job)
    assert [row["error"] and (row["error"]["type"], row["error"]["line"]) for row in rows] == [
        None,
        ("invalid_line", 2),
        ("refused", 3),
        ("invalid_line", 4),
        ("refused", 5),
        ("invalid_line", 6),
        None,
    ]
    assert rows[2]["error"]["message"] == "the prompt is empty: give at least one token"
    assert rows[3]["id"] == 7
    assert all(row["outputs"] == [] and row["usage"] is None for row in rows if row["error"])
    assert (report.timed.num_results, report.timed.num_errors, report.all_failed) == (2, 5, False)


def test_rows_that_fill_the_context_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = FakeLLM._result

    def full(request: list[Any]) -> RequestOutput:
        made = result(request)
        reason = "max_model_len" if request[0] == "row-1" else None
        return replace(made, outputs=[replace(output, stop_reason=reason) for output in made.outputs])

    monkeypatch.setattr(FakeLLM, "_result", staticmethod(full))
    job = make_job(tmp_path, prompts(3))
    text = io.StringIO()
    print_job(run(job), text)
    assert "1 row filled max_model_len and ended there" in text.getvalue()
    assert [row["outputs"][0]["stop_reason"] for row in rows_of(job)] == [None, "max_model_len", None]


def test_a_request_that_the_engine_gives_up_is_an_error_row() -> None:
    row = parse({"prompt": "a"})
    values = output_row(
        row, RequestOutput("row-3", None, [97], error="preempted for ever"), OutputConfig(path=Path("o"))
    )
    assert values["error"] == {"type": "failed", "message": "preempted for ever", "line": 7}


def test_chat_token_ids_and_metadata_reach_the_engine_and_the_output(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hé"}]
    job = make_job(
        tmp_path,
        [{"messages": messages, "metadata": {"tag": [1]}}, {"prompt_token_ids": [104, 105]}],
        output={"token_ids": True},
    )
    run(job)
    chat, ids = rows_of(job)
    assert chat["messages"] == messages and chat["metadata"] == {"tag": [1]}
    assert chat["usage"]["prompt_tokens"] == len("<user>hé")
    assert ids["prompt_token_ids"] == [104, 105]
    assert [chr(token) for token in ids["outputs"][0]["token_ids"]] == list(ids["outputs"][0]["text"])
    assert "hé".encode() in job.output.path.read_bytes()


def test_the_input_is_left_out_where_the_job_says_so(tmp_path: Path) -> None:
    job = make_job(tmp_path, [{"prompt": "secret"}], output={"echo_input": False})
    run(job)
    assert list(rows_of(job)[0]) == ["index", "id", "outputs", "usage", "error", "hash"]


def test_several_outputs_and_log_probabilities_are_valid_json() -> None:
    logprobs = [TokenLogprobs(5, -0.5, {5: -0.5, 6: -math.inf})]
    outputs = [
        CompletionOutput(0, "a", [5], logprobs, "stop", 2),
        CompletionOutput(1, "b", [6], None, "length", None),
    ]
    values = output_row(
        parse({"prompt": "a"}), RequestOutput("row-3", None, [97], outputs), OutputConfig(path=Path("o"))
    )
    again = json.loads(json.dumps(values, allow_nan=False))
    assert again["outputs"][0]["logprobs"] == [
        {"token_id": 5, "logprob": -0.5, "top": {"5": -0.5, "6": None}}
    ]
    assert again["usage"]["completion_tokens"] == 2


def test_tiers_are_written_with_the_text_of_each_token() -> None:
    output = CompletionOutput(0, "ab", [5, 6], None, "stop", 2, tiers=["draft", "verify"])
    row, config = parse({"prompt": "a"}), OutputConfig(path=Path("o"))
    result = RequestOutput("row-3", None, [97], [output])

    chats = []

    def split(token_ids: Sequence[int], text: str, chat: bool) -> list[str]:
        chats.append(chat)
        return list(text)

    output_row(parse({"messages": [{"role": "user", "content": "a"}]}), result, config, split)
    (written,) = output_row(row, result, config, split)["outputs"]
    assert chats == [True, False], "whose text goes on the prompt's"
    assert (written["tiers"], written["token_texts"]) == (["draft", "verify"], ["a", "b"])
    (written,) = output_row(row, result, config)["outputs"]
    assert "token_texts" not in written, "a model without a tokenizer"
    (written,) = output_row(row, RequestOutput("row-3", None, [97], [replace(output, tiers=None)]), config)[
        "outputs"
    ]
    assert "tiers" not in written and "token_texts" not in written


def test_tiers_have_no_place_in_openais_lines(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(1), sampling={"tiers": True}, output={"format": "openai"})
    with pytest.raises(ConfigError, match=r"sampling\.tiers: .* output\.format=jsonl"):
        run_job(job, progress=False)


def test_compare_plain_counts_identical_outputs_and_turns_prefix_caching_off(tmp_path: Path) -> None:
    job = make_job(
        tmp_path,
        [*prompts(12), b"broken\n", {"prompt": ""}],
        speculative=THREE_TIER,
        output={"compare_plain": True},
    )
    report = run(job)
    assert report.comparison is not None and report.rates is not None
    assert (report.comparison.num_identical, report.comparison.num_compared) == (12, 12)
    assert (
        report.comparison.plain.completion_tokens
        == report.timed.completion_tokens
        == report.stats["committed"]
    )
    assert (report.rates.draft_kept, report.rates.tentative_accepted) == (0.5, 0.5)
    assert len(rows_of(job)) == 14
    (llm,) = FakeLLM.instances
    assert llm.engine["enable_prefix_caching"] is False
    assert report.stats["drafted"] > llm.stats()["drafted"] == 0, "those of each pass by themselves"


def test_the_trace_of_a_job_is_of_its_own_pass(tmp_path: Path) -> None:
    """Neither of warm-ups nor of the comparison."""
    run(make_job(tmp_path, prompts(12), speculative=THREE_TIER, output={"compare_plain": True}))
    (llm,) = FakeLLM.instances
    assert llm.traced == list(range(2 * WARM_UP_ROWS, 2 * WARM_UP_ROWS + 12)) and len(llm.added) == 40


@pytest.mark.parametrize(("taken", "warns"), [((0.1, 1.2), True), ((1.2, 0.1), True), ((0.1, None), False)])
def test_a_comparison_beside_other_programs_is_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: tuple[float, float | None], warns: bool
) -> None:
    left = [*[None] * 2, *taken]  # warm-ups, the job, plain decoding
    monkeypatch.setattr("hispec.jobs.drive.watch_others", lambda: lambda: left.pop(0))
    report = run(make_job(tmp_path, prompts(4), speculative=THREE_TIER, output={"compare_plain": True}))
    report = replace(report, environment=report.environment | {"cores": 2})
    text = io.StringIO()
    print_job(report, text)
    words = f"took {taken[0]:.1f} of 2 cores during the job and {taken[1] or 0.0:.1f} during plain decoding"
    assert not left and (words in " ".join(text.getvalue().split())) is warns


def test_compare_plain_finds_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLLM, "wrong_when_speculative", True)
    report = run(make_job(tmp_path, prompts(12), speculative=THREE_TIER, output={"compare_plain": True}))
    assert report.comparison is not None
    assert (report.comparison.num_identical, report.comparison.num_compared) == (0, 12)


def test_ctrl_c_during_the_comparison_says_that_the_rows_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(tmp_path, prompts(8), speculative=THREE_TIER, output={"compare_plain": True})
    run(job)
    last_step = FakeLLM.instances[0].num_steps
    job.output.path.unlink()
    interrupt_at(last_step, monkeypatch)
    with pytest.raises(JobInterrupted, match="all 8 rows are done"):
        run(job)
    assert len(rows_of(job)) == 8


def test_all_workers_are_fed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for workers in (1, 3):
        monkeypatch.setattr(FakeLLM, "num_workers", workers)
        job = make_job(
            tmp_path, prompts(60), engine={"max_num_seqs": 2}, workers=3, output={"overwrite": True}
        )
        report = run(job)
        llm = FakeLLM.instances[-1]
        assert llm.workers == 3 and llm.most_unfinished == REQUESTS_PER_ROW * 2 * workers
        assert report.timed.num_results == 60
        assert workers == 1 or report.timed.others is None, "workers are no other programs"
