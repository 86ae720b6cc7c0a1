"""Offline jobs: the schema, the rows, the order and wholeness of the output, resuming, comparing."""
from __future__ import annotations

import json
import math
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.fake_llm import FakeLLM, answer

from hispec.errors import ConfigError, build
from hispec.jobs.load import apply_overrides, load_job
from hispec.jobs.output import OrderedWriter, OutputError, RowError, output_row
from hispec.jobs.rows import BadRow, Row, parse_row, read_rows
from hispec.jobs.runner import REQUESTS_PER_SEAT, JobInterrupted, JobReport, run_job
from hispec.jobs.schema import InputConfig, Job, OutputConfig, RunConfig
from hispec.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from hispec.sampling_params import SamplingParams

CONFIGS = Path(__file__).parent.parent / "configs"
THREE_TIER = {"draft": {"layer": 2}, "check": {"layer": 5}}


@pytest.fixture(autouse=True)
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeLLM]]:
    module = types.ModuleType("hispec.llm")
    module.LLM = FakeLLM  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hispec.llm", module)
    for name, value in (("instances", []), ("on_step", None), ("row_invariant", True), ("wrong_when_speculative", False)):
        monkeypatch.setattr(FakeLLM, name, value)
    yield FakeLLM


def make_job(folder: Path, lines: list[Any], **fields: Any) -> Job:
    """A job over `lines` (objects, or bytes as they are); `output` fields are merged."""
    source = folder / "in.jsonl"
    source.write_bytes(b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines))
    output = {"path": str(folder / "out.jsonl")} | fields.pop("output", {})
    inputs = {"path": str(source)} | fields.pop("input", {})
    values = {"model": "fake", "engine": {"max_num_seqs": 4}, "sampling": {"max_tokens": 40, "temperature": 0.0}} | fields
    return build(Job, values | {"input": inputs, "output": output})


def prompts(num: int) -> list[dict[str, Any]]:
    return [{"id": f"p{number}", "prompt": f"prompt {number * 7919 % 101}"} for number in range(num)]


def run(job: Job) -> JobReport:
    return run_job(job, progress=False)


def rows_of(job: Job) -> list[dict[str, Any]]:
    return [json.loads(line) for line in job.output.path.read_bytes().splitlines()]


def texts_of(job: Job) -> list[str]:
    return [row["outputs"][0]["text"] for row in rows_of(job)]


# The schema


def write_yaml(folder: Path, text: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(text, encoding="utf-8")
    return path


MINIMAL = "model: m\ninput: {path: in.jsonl}\noutput: {path: out.jsonl}\n"


def test_input_path_is_relative_to_the_job_file_and_output_path_to_the_working_directory(tmp_path: Path) -> None:
    job = load_job(write_yaml(tmp_path, MINIMAL))
    assert job.input.path == tmp_path / "in.jsonl"
    assert job.output.path == Path("out.jsonl")
    assert load_job(tmp_path / "job.yaml", ["input.path=other.jsonl"]).input.path == Path("other.jsonl")


def test_every_problem_of_a_job_is_named_at_once(tmp_path: Path) -> None:
    path = write_yaml(tmp_path, MINIMAL + "engin: {}\nengine: {blocksize: 4, max_num_seqs: 0}\nsampling: {top_p: 0.0, temperature: .nan}\n")
    with pytest.raises(ConfigError) as caught:
        load_job(path, ["sampling.n=many"])
    message = str(caught.value)
    for part in (
        "engin: unknown setting (did you mean 'engine'?)",
        "engine.blocksize: unknown setting (did you mean 'block_size'?)",
        "engine.max_num_seqs: input should be greater than or equal to 1, got 0",
        "sampling.top_p: input should be greater than 0, got 0.0",
        "sampling.temperature: input should be a finite number, got nan",
        "sampling.n: input should be a valid integer, got 'many'",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("model: a\nmodel: b\n", "line 2, column 1: key 'model' is given twice, first in line 1"),
        ("model: [1\ninput: 2", "line 2"),
        ("\tmodel: a", "line 1, column 1"),
        ("", "got nothing"),
        ("- model", "got a list"),
        ("? [a]\n: 1", "a key must be a plain name"),
        ("model: !!python/object:os.system x", "could not determine a constructor"),
        ("on: 1\n", "on: unknown setting"),
        ("model: 3\n", "model: input should be a valid string, got 3"),
        ("input: {path: ''}\n", "input.path: must name a file, got ''"),
        ("sampling: {seed: " + "9" * 5000 + "}", "not readable as YAML"),
        ("output: {path: x, overwrite: true, resume: true}", "contradict"),
        ("speculative: {draft: {layer: 4}, check: {layer: 4}}", "check.layer=4 must lie above draft.layer=4"),
    ],
)
def test_bad_yaml_gets_a_clear_error(tmp_path: Path, text: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_job(write_yaml(tmp_path, text))
    assert part in str(caught.value)


def test_a_job_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        load_job(tmp_path / "nowhere.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"model: caf\xe9")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_job(tmp_path / "latin.yaml")


def test_scalars_are_read_as_yaml_1_2(tmp_path: Path) -> None:
    job = load_job(write_yaml(tmp_path, MINIMAL), ["sampling.temperature=1e-3", "sampling.seed=017", "sampling.stop=12:30", "sampling.logit_bias={12: 3}"])
    assert (job.sampling.temperature, job.sampling.seed, job.sampling.stop, job.sampling.logit_bias) == (1e-3, 17, ["12:30"], {12: 3})


def test_overrides_reach_nested_settings_in_order() -> None:
    values: dict[str, Any] = {"speculative": None}
    apply_overrides(values, ["speculative.draft.layer=2", "speculative.draft.layer=3", "speculative.check=null", "model=a=b"])
    assert values == {"speculative": {"draft": {"layer": 3}, "check": None}, "model": "a=b"}


@pytest.mark.parametrize("override", ["model", "=3", "a..b=3", "model.x=3", "model=[1"])
def test_a_malformed_override_is_named(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_overrides({"model": "m"}, [override])
    assert repr(override) in str(caught.value)


def test_compare_plain_needs_something_to_compare(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"output\.compare_plain=true has nothing to compare"):
        load_job(write_yaml(tmp_path, MINIMAL), ["output.compare_plain=true"])


@pytest.mark.parametrize("name", ["example_job.yaml", "quickstart.yaml"])
def test_configs_have_every_field_and_load(name: str) -> None:
    load_job(CONFIGS / name)
    values = yaml.safe_load((CONFIGS / name).read_text(encoding="utf-8"))
    full = Job.model_validate(values | {"input": {"path": Path("i")}, "output": {"path": Path("o")}}).model_dump()
    assert values["input"].keys() == full["input"].keys() and values["output"].keys() == full["output"].keys()

    def keys(tree: Any, at: str = "") -> set[str]:
        return {at} if not isinstance(tree, dict) or not tree else set().union(*(keys(item, f"{at}.{key}") for key, item in tree.items()))

    for section in ("engine", "speculative", "sampling"):
        assert keys(values[section]) == keys(full[section])
    assert values.keys() == full.keys()


# Input rows


def parse(raw: bytes | dict[str, Any], **sampling: Any) -> Row | BadRow:
    config = build(RunConfig, {"model": "fake", "sampling": sampling})
    return parse_row(config, 3, 7, raw if isinstance(raw, bytes) else json.dumps(raw).encode())


@pytest.mark.parametrize(
    ("raw", "part"),
    [
        (b'{"prompt": "a"', "not valid JSON"),
        (b'{"prompt": "caf\xe9"}', "not UTF-8 (byte 15 of the line)"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"prompt": "a", "sampling": {"temperature": NaN}}', "NaN is no JSON number"),
        (b'{"prompt": "a", "sampling": {"temperature": 1e999}}', "not valid JSON"),
        (b'{"prompt_token_ids": [' + b"9" * 5000 + b"]}", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'"hello"', "expected a JSON object"),
        (b"{}", "exactly one of prompt, prompt_token_ids and messages, got none"),
        (b'{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}', "got prompt and messages"),
        (b'{"promt": "a"}', "did you mean 'prompt'?"),
        (b'{"prompt": 3}', "prompt: input should be a valid string, got 3"),
        (b'{"prompt_token_ids": [1, "2"]}', "prompt_token_ids.1: input should be a valid integer"),
        (b'{"messages": []}', "messages: "),
        (b'{"messages": [{"role": "user"}]}', "messages.0.content: required"),
        (b'{"prompt": "a", "sampling": {"temprature": 1}}', "sampling.temprature: unknown setting (did you mean 'temperature'?)"),
        (b'{"prompt": "a", "sampling": {"max_tokens": -1}}', "sampling.max_tokens: input should be greater than or equal to 1, got -1"),
        (b'{"prompt": "a", "sampling": {"min_tokens": 99}}', "min_tokens=99 is above max_tokens=16"),
        (b'{"prompt": "a", "id": 1.5}', "id"),
    ],
)
def test_a_bad_line_is_named_by_number(raw: bytes, part: str) -> None:
    row = parse(raw)
    assert isinstance(row, BadRow)
    assert row.message.startswith("line 7: ") and part in row.message
    assert len(row.message) <= 1000


def test_a_row_puts_its_sampling_over_the_jobs() -> None:
    row = parse({"prompt": "a", "sampling": {"top_k": 5}}, temperature=0.5, seed=9)
    assert isinstance(row, Row)
    assert (row.sampling.top_k, row.sampling.temperature, row.sampling.seed) == (5, 0.5, 9)


def test_a_row_without_a_seed_gets_one_that_depends_on_its_place_alone() -> None:
    first, again = parse({"prompt": "a"}), parse({"prompt": "b"})
    assert isinstance(first, Row) and isinstance(again, Row)
    assert first.sampling.seed == again.sampling.seed is not None
    elsewhere = parse_row(build(RunConfig, {"model": "fake"}), 4, 7, b'{"prompt": "a"}')
    assert isinstance(elsewhere, Row) and elsewhere.sampling.seed != first.sampling.seed


def test_the_content_hash_tells_prompt_sampling_and_model_apart() -> None:
    def content_hash(raw: dict[str, Any], model: str = "fake") -> str:
        return parse_row(build(RunConfig, {"model": model}), 0, 1, json.dumps(raw).encode()).content_hash

    base = content_hash({"prompt": "a"})
    assert base == content_hash({"id": 5, "prompt": "a", "metadata": 1})
    others = [content_hash({"prompt": "b"}), content_hash({"prompt": "a", "sampling": {"top_k": 3}}), content_hash({"prompt": "a"}, "other")]
    assert base not in others and len(set(others)) == 3


def test_blank_lines_count_as_lines_but_are_no_rows(tmp_path: Path) -> None:
    job = make_job(tmp_path, [b"\xef\xbb\xbf", {"prompt": "a"}, b"\n", b"  \r\n", {"prompt": "b"}, b"\n"])
    assert [(row.index, row.line) for row in read_rows(job, job.input)] == [(0, 1), (1, 4)]
    limited = InputConfig(path=job.input.path, limit=1)
    assert len(list(read_rows(job, limited))) == 1


# Running


def test_output_is_in_input_order_one_line_per_row_whatever_finishes_first(tmp_path: Path) -> None:
    lines = prompts(50)
    job = make_job(tmp_path, lines)
    report = run(job)
    rows = rows_of(job)
    assert [row["index"] for row in rows] == list(range(50))
    assert [row["id"] for row in rows] == [line["id"] for line in lines]
    greedy = SamplingParams(temperature=0.0, max_tokens=40)
    expected = ["".join(map(chr, answer([ord(letter) for letter in line["prompt"]], greedy))) for line in lines]
    assert texts_of(job) == expected
    assert report.timed.completion_tokens == sum(map(len, expected)) == sum(row["usage"]["completion_tokens"] for row in rows)
    assert FakeLLM.instances[0].closed


def test_the_engine_holds_a_bounded_number_of_rows(tmp_path: Path) -> None:
    run(make_job(tmp_path, prompts(100)))
    assert FakeLLM.instances[0].most_unfinished == 4 * REQUESTS_PER_SEAT


def test_finished_rows_that_wait_for_a_slow_one_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hispec.jobs.runner.ROWS_WAITING_PER_SEAT", 2)
    monkeypatch.setattr("tests.fake_llm.answer", lambda ids, sampling, at=0: [97] * (sampling.max_tokens or 1))
    most_waiting = 0
    add = OrderedWriter.add

    def watched(self: OrderedWriter, index: int, row: dict[str, Any]) -> None:
        nonlocal most_waiting
        add(self, index, row)
        most_waiting = max(most_waiting, self.num_waiting)

    monkeypatch.setattr(OrderedWriter, "add", watched)
    slow = {"prompt": "slow", "sampling": {"max_tokens": 1000}}
    job = make_job(tmp_path, [slow] + [{"prompt": "quick", "sampling": {"max_tokens": 1}} for _ in range(300)])
    run(job)
    assert len(rows_of(job)) == 301
    assert 8 <= most_waiting <= 8 + 4 * REQUESTS_PER_SEAT


def test_a_bad_row_becomes_an_error_row_and_the_rest_is_unharmed(tmp_path: Path) -> None:
    lines = [{"prompt": "one"}, b"{broken\n", {"prompt": ""}, {"id": 7, "promt": "x"}, {"prompt_token_ids": [-1]}, b"\xff\n", {"prompt": "two"}]
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


def test_a_request_that_the_engine_gives_up_is_an_error_row() -> None:
    row = parse({"prompt": "a"})
    values = output_row(row, RequestOutput("row-3", None, [97], error="preempted for ever"), OutputConfig(path=Path("o")))
    assert values["error"] == {"type": "failed", "message": "preempted for ever", "line": 7}


def test_chat_token_ids_and_metadata_reach_the_engine_and_the_output(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hé"}]
    job = make_job(tmp_path, [{"messages": messages, "metadata": {"tag": [1]}}, {"prompt_token_ids": [104, 105]}], output={"token_ids": True})
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
    outputs = [CompletionOutput(0, "a", [5], logprobs, "stop", 2), CompletionOutput(1, "b", [6], None, "length", None)]
    values = output_row(parse({"prompt": "a"}), RequestOutput("row-3", None, [97], outputs), OutputConfig(path=Path("o")))
    again = json.loads(json.dumps(values, allow_nan=False))
    assert again["outputs"][0]["logprobs"] == [{"token_id": 5, "logprob": -0.5, "top": {"5": -0.5, "6": None}}]
    assert again["usage"]["completion_tokens"] == 2


# The output file


def test_an_existing_output_is_an_error_before_the_model_is_loaded(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(2))
    job.output.path.write_text("results of a week\n")
    with pytest.raises(ConfigError, match=r"exists; set output\.resume=true.*output\.overwrite=true"):
        run(job)
    assert job.output.path.read_text() == "results of a week\n" and not FakeLLM.instances


def test_overwrite_replaces_the_output_only_when_the_model_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(tmp_path, prompts(2), output={"overwrite": True})
    job.output.path.write_text("results of a week\n")
    with monkeypatch.context() as patch:
        patch.setattr(FakeLLM, "__init__", lambda self, *args, **kwargs: (_ for _ in ()).throw(ConfigError("no such model")))
        with pytest.raises(ConfigError, match="no such model"):
            run(job)
    assert job.output.path.read_text() == "results of a week\n"
    run(job)
    assert [row["index"] for row in rows_of(job)] == [0, 1]


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
    for path, part in ((tmp_path, "not a regular file"), (tmp_path / "file" / "out.jsonl", "cannot write"), (Path("/dev/full"), "not a regular file")):
        job = make_job(tmp_path, prompts(1), output={"path": str(path)})
        with pytest.raises(ConfigError, match=part):
            run(job)
    assert not FakeLLM.instances


def test_missing_folders_are_created(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(1), output={"path": str(tmp_path / "a" / "b" / "out.jsonl")})
    run(job)
    assert len(rows_of(job)) == 1


@pytest.mark.parametrize("content", [None, b"", b"\n \n"])
def test_an_input_without_rows_is_an_error_before_the_model_is_loaded(tmp_path: Path, content: bytes | None) -> None:
    job = make_job(tmp_path, [])
    job.input.path.unlink() if content is None else job.input.path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"input\.path"):
        run(job)
    assert not FakeLLM.instances and not job.output.path.exists()


def test_a_disk_that_fills_up_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.jsonl"
    path.touch()
    with pytest.raises(OutputError, match="1 rows are done"), OrderedWriter(path) as writer:
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


# Ctrl-C, and going on


def interrupt_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_step(number: int) -> None:
        if number == step:
            raise KeyboardInterrupt

    monkeypatch.setattr(FakeLLM, "on_step", on_step)


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
    for keep in (0, 1, len(expected) // 2, len(expected) - 1):
        job.output.path.write_bytes(expected[:keep])
        report = run(job)
        assert job.output.path.read_bytes() == expected
        assert report.resumed == expected[:keep].count(b"\n")


def test_a_complete_output_is_resumed_without_the_model(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(5), output={"resume": True})
    run(job)
    FakeLLM.instances.clear()
    assert run(job).resumed == 5 and not FakeLLM.instances


@pytest.mark.parametrize(
    "change",
    [{"model": "another"}, {"sampling": {"max_tokens": 39, "temperature": 0.0}}, {"input": {"limit": 2}}],
)
def test_resuming_the_output_of_another_job_is_an_error_that_changes_nothing(tmp_path: Path, change: dict[str, Any]) -> None:
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


# Comparing


def test_compare_plain_counts_identical_outputs_and_turns_prefix_caching_off(tmp_path: Path) -> None:
    job = make_job(tmp_path, [*prompts(12), b"broken\n", {"prompt": ""}], speculative=THREE_TIER, output={"compare_plain": True})
    report = run(job)
    assert report.comparison is not None and report.rates is not None
    assert (report.comparison.num_identical, report.comparison.num_compared) == (12, 12)
    assert report.comparison.plain.completion_tokens == report.timed.completion_tokens == report.stats["committed"]
    assert (report.rates.draft_accepted, report.rates.tentative_accepted) == (0.5, 0.5)
    assert len(rows_of(job)) == 14
    assert FakeLLM.instances[0].engine["enable_prefix_caching"] is False


def test_compare_plain_finds_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLLM, "wrong_when_speculative", True)
    report = run(make_job(tmp_path, prompts(12), speculative=THREE_TIER, output={"compare_plain": True}))
    assert report.comparison is not None
    assert (report.comparison.num_identical, report.comparison.num_compared) == (0, 12)


def test_ctrl_c_during_the_comparison_says_that_the_rows_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(tmp_path, prompts(8), speculative=THREE_TIER, output={"compare_plain": True})
    run(job)
    last_step = FakeLLM.instances[0].num_steps
    job.output.path.unlink()
    interrupt_at(last_step, monkeypatch)
    with pytest.raises(JobInterrupted, match="all 8 rows are done"):
        run(job)
    assert len(rows_of(job)) == 8


def test_row_errors_carry_their_type() -> None:
    values = output_row(parse(b"broken"), RowError("invalid_line", "line 7: broken"), OutputConfig(path=Path("o")))
    assert values["error"] == {"type": "invalid_line", "message": "line 7: broken", "line": 7}
