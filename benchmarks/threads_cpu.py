"""One engine on all cores of this CPU beside an engine for each: what threads cost that share every pass.

    python benchmarks/threads_cpu.py MODEL --prompts prompts.jsonl [--limit N] [--quantization int8]
    [--batch-size 64] [--max-tokens 64] [--repeats 3] [--json FILE]

Plain decoding, greedy, the end of a text ignored. The engine on all cores has --batch-size rows and all
prompts; each of the others one thread, bound to a core, its share of the rows, and of the prompts every n-th
(the time is that of the last to finish). They take turns, and sleep while it is another's. Tokens per second
are medians of the repeats, prompts included. Needs a system that binds processes to cores (Linux).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run from a checkout: nothing needs to be installed

from benchmarks.arguments import at_least_one
from benchmarks.markdown import table
from ee_models.errors import CheckpointError
from hispec.errors import ConfigError, HiSpecError, build
from hispec.jobs.bench_inputs import good_rows
from hispec.jobs.rows import count_rows
from hispec.jobs.schema import Job
from hispec.utils.environment import environment, hardware_text
from hispec.utils.files import check_target, write_json

USER_ERROR = 2
SPAWN = multiprocessing.get_context("spawn")


def _serve(
    pipe: Connection, cores: list[int], settings: dict[str, Any], prompts: list[tuple[Any, bool]]
) -> None:
    """Decodes all prompts whenever it is told to, on these cores with a thread each. What it sends after
    loading is None, then new tokens each time; or the text of an error."""
    os.sched_setaffinity(0, cores)
    import torch

    torch.set_num_threads(len(cores))
    from hispec import LLM, SamplingParams

    try:
        max_tokens = settings.pop("max_tokens")
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        with LLM(**settings, enable_prefix_caching=False) as llm:
            token_ids = [llm.encode(prompt, chat=is_chat) for prompt, is_chat in prompts]
            llm.generate(token_ids[: settings["max_num_seqs"]], params, use_tqdm=False)  # to warm up
            pipe.send(None)
            while True:
                pipe.recv()
                outputs = llm.generate(token_ids, params, use_tqdm=False)
                pipe.send(sum(len(output.outputs[0].token_ids) for output in outputs))
    except EOFError:  # the measurement is over
        pass
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


class Engine:
    """An engine in a process of its own."""

    def __init__(self, cores: list[int], settings: dict[str, Any], prompts: list[tuple[Any, bool]]) -> None:
        self._pipe, other_end = SPAWN.Pipe()
        self._process = SPAWN.Process(target=_serve, args=(other_end, cores, settings, prompts), daemon=True)
        self._process.start()
        other_end.close()

    def start(self) -> None:
        self._pipe.send(None)

    def wait(self) -> int:
        """The new tokens of a run, or 0 once it is loaded. Raises ConfigError with what it died of."""
        try:
            answer = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise ConfigError(f"an engine's process ended with exit code {self._process.exitcode}") from None
        if isinstance(answer, str):
            raise ConfigError(answer)
        return answer or 0

    def close(self) -> None:
        self._pipe.close()
        self._process.join(20)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Raises ConfigError for what cannot be measured, before a model is loaded."""
    if options.json is not None:
        check_target("--json", options.json)
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("this system does not bind processes to cores, as Linux does")
    cores = sorted(os.sched_getaffinity(0))
    given = {"model": options.model, "input": {"path": options.prompts}, "output": {"path": "unused"}}
    job = build(Job, given)
    count_rows(job.input)
    prompts = [(row.prompt, row.is_chat) for row in good_rows(job)[: options.limit]]
    if min(len(prompts), options.batch_size) < len(cores):
        raise ConfigError(
            f"{len(prompts)} prompts and --batch-size={options.batch_size}: there must be one for each"
            f" of {len(cores)} cores"
        )
    settings = {"model": options.model, "quantization": options.quantization}
    shares = {"one engine": [cores], "an engine for each core": [[core] for core in cores]}
    runs: dict[str, list[float]] = {name: [] for name in shares}
    with ExitStack() as stack:
        engines: dict[str, list[Engine]] = {}
        for name, of_engines in shares.items():
            rows = -(-options.batch_size // len(of_engines))
            own = settings | {"max_num_seqs": rows, "max_tokens": options.max_tokens}
            engines[name] = [
                stack.enter_context(closing(Engine(of_engine, own, prompts[at :: len(of_engines)])))
                for at, of_engine in enumerate(of_engines)
            ]
            for engine in engines[name]:
                engine.wait()
        for _ in range(options.repeats):
            for name, together in engines.items():
                start = time.perf_counter()
                for engine in together:
                    engine.start()
                num_tokens = sum(engine.wait() for engine in together)
                runs[name].append(num_tokens / (time.perf_counter() - start))
    return {
        "benchmark": "threads_cpu",
        "environment": environment(),
        "prompts": len(prompts),
        "options": {"batch_size": options.batch_size, "max_tokens": options.max_tokens} | settings,
        "tokens_per_s": runs,
    }


def print_result(result: dict[str, Any]) -> None:
    of_cores = statistics.median(result["tokens_per_s"]["an engine for each core"])
    rows = [
        [name, f"{statistics.median(runs):.1f}", f"{statistics.median(runs) / of_cores:.2f}"]
        for name, runs in result["tokens_per_s"].items()
    ]
    print(hardware_text(result["environment"]))
    print(*table(["", "tokens/s", "of an engine for each core"], rows), sep="\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE")
    parser.add_argument("--limit", type=at_least_one, metavar="N", help="the first N prompts")
    parser.add_argument("--quantization", choices=["int8", "int4"])
    parser.add_argument("--batch-size", type=at_least_one, default=64)
    parser.add_argument("--max-tokens", type=at_least_one, default=64)
    parser.add_argument("--repeats", type=at_least_one, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    try:
        result = measure(options)
        if options.json is not None:
            write_json(options.json, result)
    except (HiSpecError, CheckpointError, OSError) as error:
        print(f"threads_cpu: {error}", file=sys.stderr)
        return USER_ERROR
    print_result(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
