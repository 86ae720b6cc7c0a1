"""The code of README.md and docs/ runs as it stands: Python with a tiny model under the name that the pages
use, settings through the checks of the files that they are for, commands through the parsers that take
them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from hispec import LLM, cli
from hispec.jobs.load import load_job
from hispec.loading.known_models import KNOWN_MODELS, RECORD_NAME, model_dir
from hispec.training.schema import load_training
from tests.helpers.tiny import tiny_checkpoint
from tests.serving.support import SMALL, serving

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").glob("**/*.md")),
]
BLOCK = re.compile(r"(?:^    .*\n|^\n(?=    ))+", re.MULTILINE)
RunsCode = Callable[..., dict[str, Any]]


def blocks(page: str) -> list[str]:
    """The indented code of a page, block by block."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return ["\n".join(line[4:] for line in block.splitlines()).strip("\n") for block in BLOCK.findall(text)]


# What makes each command of README's list small, for the slow test that runs them. `train` takes hours and
# prompts that do not come with HiSpec: tests/training has runs of it.
FEW = ["input.limit=2", "sampling.max_tokens=8", "output.path=out.jsonl"]
TINY = ["--limit=2", "--max-tokens=8", "--repeats=1"]
SMALL_RUNS: dict[str, list[str] | None] = {
    "hispec run configs/quickstart.yaml": ["--set", *FEW, "engine.trace=trace.jsonl"],
    "hispec run configs/quickstart.yaml --preset FILE.yaml": ["--set", *FEW[:2], "output.path=preset.jsonl"],
    "hispec run configs/quickstart.yaml --ray": ["local", "--set", *FEW],
    "hispec serve smollm2": ["--port", "0"],
    'hispec generate --model smollm2 "Why is the sky blue?"': ["--max-tokens", "8"],
    "hispec bench configs/quickstart.yaml": [
        "--limit=2",
        "--max-tokens=8",
        "--repeats=1",
        "--no-transformers",
    ],
    "hispec report trace.jsonl out.jsonl --html report.html": [],
    "hispec profile configs/quickstart.yaml": [*TINY, "--top=1"],
    "hispec profile configs/quickstart.yaml --numbers": TINY,
    "hispec train configs/train_smollm2.yaml": None,
    "hispec simulate configs/simulate_smartspec.yaml": ["--no-progress", "--set", "requests.num=200"],
    "hispec env": [],
}


def python_of(page: str) -> list[str]:
    return [block for block in blocks(page) if re.match(r"(from [\w.]+ )?import \w", block)]


def commands_of(page: str) -> list[str]:
    """What is typed into a shell, without what stands behind it: a comment, or two spaces and an
    explanation."""
    lines = [line for block in blocks(page) for line in re.sub(r" *\\\n *", " ", block).splitlines()]
    typed = [re.split(r"\s+#|(?<=\S) {2,}(?=[^-\s])", line)[0] for line in lines]
    return [line for line in typed if re.match(r"(hispec|python) ", line)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which a tiny model has the name `smollm2`."""
    path = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HISPEC_CACHE", str(path))
        known = KNOWN_MODELS["smollm2"]
        made = tiny_checkpoint(model_dir(known), tokenizer=True)
        (made / RECORD_NAME).write_text(json.dumps({"sha256": known.sha256}))
    return path


@pytest.fixture
def runs(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunsCode:
    """Runs code in an empty folder, with these names known to it."""
    monkeypatch.setenv("HISPEC_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)

    def run(code: str, **names: Any) -> dict[str, Any]:
        exec(compile(code, "a page", "exec"), names)
        return names

    return run


def test_all_python_of_the_pages_is_run_by_a_test() -> None:
    """Here or, of docs/embedding.md, in tests/test_embedding.py; that of Ray Data needs a cluster's path, and
    its class has tests of its own."""
    found = {page: len(python_of(page)) for page in PAGES if python_of(page)}
    assert found == {
        "README.md": 1,
        "docs/embedding.md": 3,
        "docs/evaluation.md": 2,
        "docs/metrics.md": 2,
        "docs/scaling.md": 1,
        "docs/serving.md": 1,
    }


def test_readme(runs: RunsCode, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = python_of("README.md")
    with contextlib.closing(runs(code)["llm"]) as llm:
        assert llm.stats()["tokens"] == 64
    assert capsys.readouterr().out


def test_likelihoods(runs: RunsCode, capsys: pytest.CaptureFixture[str]) -> None:
    _, code = python_of("docs/evaluation.md")
    with contextlib.closing(runs(code)["llm"]):
        total, is_greedy = capsys.readouterr().out.split()
    assert float(total) < 0 and is_greedy in ("True", "False")


def test_metrics(runs: RunsCode, cache: Path) -> None:
    prometheus_client = pytest.importorskip("prometheus_client")
    text, registered = python_of("docs/metrics.md")
    with LLM("smollm2", **SMALL) as llm:
        assert b"hispec_tokens_total" in runs(text, llm=llm)["body"]
        before = set(prometheus_client.REGISTRY._collector_to_names)
        runs(registered, engine=llm)
        assert b"hispec_tokens_total" in prometheus_client.generate_latest()
    for collector in set(prometheus_client.REGISTRY._collector_to_names) - before:
        prometheus_client.REGISTRY.unregister(collector)


def test_clients(runs: RunsCode, tiny_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = python_of("docs/serving.md")
    with serving(tiny_path) as server:
        runs(code.replace("http://127.0.0.1:8000", server.url).replace('"smollm2"', '"tiny"'))
    assert capsys.readouterr().out


def test_ray_data(runs: RunsCode, tmp_path: Path) -> None:
    """All but the reading and writing, which the pages do from S3: Ray stands aside, the class is its own."""
    (code,) = python_of("docs/scaling.md")

    class Dataset:
        def map_batches(self, function: Any, **arguments: Any) -> Dataset:
            self.function, self.arguments = function, arguments
            return self

        def write_parquet(self, path: str) -> None:
            self.written = path

    dataset = Dataset()
    ray = type("Ray", (), {"data": type("Data", (), {"read_json": staticmethod(lambda path: dataset)})})
    runs(code.replace("import ray\n", ""), ray=ray)
    settings = dataset.arguments["fn_constructor_kwargs"]
    settings["engine"] |= {"max_model_len": 128, "num_kv_blocks": 64}
    generate = dataset.function(**settings)
    import pyarrow

    batch = pyarrow.table({"question": ["one two"], "key": ["a"]})

    async def one() -> Any:
        return await generate(batch)

    try:
        (row,) = asyncio.run(one()).to_pylist()
    finally:
        generate.close()
    assert row["error"] is None and row["completion_tokens"] > 0 and dataset.written.startswith("s3://")


@pytest.mark.parametrize("page", PAGES)
def test_settings_are_taken(page: str, tmp_path: Path) -> None:
    """Each block of YAML, with what its page leaves to the reader."""
    for block in (block for block in blocks(page) if not block.startswith("{")):
        try:
            sections = yaml.safe_load(block)
        except yaml.YAMLError:
            continue
        if not isinstance(sections, dict) or not all(re.fullmatch("[a-z]+", str(key)) for key in sections):
            continue
        (tmp_path / "in.jsonl").write_text('{"prompt": "one"}\n')
        (tmp_path / "my_answers.jsonl").write_text('{"question": "one", "answer": "two"}\n')
        file = tmp_path / "settings.yaml"
        if "recipe" in sections:
            base = yaml.safe_load((ROOT / "configs" / "train_smollm2_ee.yaml").read_text())
            del base[base["recipe"]]
            file.write_text(yaml.safe_dump({**base, **sections}))
            load_training(file)
        else:
            base = {"model": "smollm2", "input": {"path": "in.jsonl"}, "output": {"path": "out.jsonl"}}
            file.write_text(yaml.safe_dump({**base, **sections}))
            load_job(file)


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_taken(page: str) -> None:
    for command in commands_of(page):
        program, *arguments = shlex.split(re.sub(r"[\[\]]|\.\.\.", "", command))
        if program == "hispec":
            numbers = [re.sub(r"^[A-Z]$", "1", argument) for argument in arguments]
            try:
                cli._parser().parse_args(numbers)
            except SystemExit as refused:
                pytest.fail(f"{command}: {refused}")
        elif arguments[0].endswith(".py"):
            folder = (ROOT / arguments[0]).parent
            source = "".join(
                path.read_text() for path in [ROOT / arguments[0], folder / "arguments.py"] if path.exists()
            )
            for option in (word for word in arguments if word.startswith("--")):
                assert f'"{option}"' in source, f"{command}: no {option}"


def readme_commands() -> list[str]:
    (block,) = (block for block in blocks("README.md") if block.startswith("hispec run"))
    return [re.split(r"\s+#", line)[0] for line in block.splitlines()]


@pytest.mark.slow
def test_readmes_commands_run(tmp_path: Path) -> None:
    """With the model that `make test-slow` has fetched; in README's order: one reads what another wrote."""
    commands = readme_commands()
    assert commands == list(SMALL_RUNS)
    shutil.copy(ROOT / "configs" / "smollm2.yaml", tmp_path / "FILE.yaml")
    for command in commands:
        if (small := SMALL_RUNS[command]) is None:
            continue
        _, *words = shlex.split(command.replace("configs/", f"{ROOT}/configs/"))
        process = subprocess.Popen(
            [sys.executable, "-m", "hispec", *words, *small],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        if words[0] == "serve":
            url = next(
                found.group() for line in process.stdout if (found := re.search(r"http://[\d.:]+", line))
            )
            assert httpx.get(f"{url}/health", timeout=60.0).status_code == 200
            process.terminate()
        said = process.stdout.read()
        ends = (0, -signal.SIGTERM) if words[0] == "serve" else (0,)
        assert process.wait(60) in ends, f"{command}: {said}"
        assert said or words[0] in ("serve", "report"), command
    assert (tmp_path / "report.html").exists() and (tmp_path / "out.jsonl").exists()
