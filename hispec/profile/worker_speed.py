"""Part of `hispec profile --latency`: how many workers are fastest here, measured with so many."""

from __future__ import annotations

import random
import time
from contextlib import closing
from typing import IO

from ..config import EngineConfig
from ..errors import ConfigError
from ..jobs.bench_inputs import token_ids_of
from ..jobs.schema import Job
from ..llm import LLM
from ..sampling_params import SamplingParams
from ..utils.console import make_bar, make_console, make_table
from ..utils.files import cache_dir
from ..workers.counts import WorkerCounts, keep, subject_of
from ..workers.shares import most_workers

_TOKENS = 96  # of a prompt and its answer, where the model has room for so many; a third are the answer's
_ROUNDS = 3  # timed passes over as many prompts as there are rows


def worker_numbers(config: EngineConfig) -> list[int]:
    """Those that are tried: 1, 2, 4, ... and one for each core; [] where there is no choice."""
    most = most_workers(config)
    powers = [2**power for power in range(most.bit_length()) if 2**power < most]
    return [*powers, most] if most > 1 else []


def measure_workers(job: Job, *, progress: bool = True) -> WorkerCounts | None:
    """Plain decoding of synthetic prompts with each number of workers, each of which has
    engine.max_num_seqs rows. None where there is only one core, or a GPU. Raises what LLM raises, and
    RequestError if it refuses the prompts."""
    numbers = worker_numbers(job.engine)
    if not numbers:
        return None
    speeds = {}
    # KV for these prompts, whatever the job has: speeds are kept for all jobs of this model.
    num_kv_blocks = job.engine.max_num_seqs * -(-_TOKENS // job.engine.block_size)
    settings = job.engine.model_dump() | {
        "trace": None,
        "enable_prefix_caching": False,
        "num_kv_blocks": num_kv_blocks,
    }
    with make_bar(len(numbers), "workers", "number", progress) as bar:
        for number in numbers:
            with closing(LLM(job.model, workers=number, **settings)) as llm:
                speeds[number] = _tokens_per_s(llm, number * job.engine.max_num_seqs)
            bar.update()
    return WorkerCounts(subject=subject_of(job.model, job.engine), tokens_per_s=speeds)


def keep_worker_speeds(job: Job, *, progress: bool = True) -> WorkerCounts | None:
    """As measure_workers, and keeps them for `workers: auto`. Raises ConfigError if they cannot be kept."""
    counts = measure_workers(job, progress=progress)
    if counts is not None:
        try:
            keep(counts)
        except OSError as error:
            raise ConfigError(
                f"speeds of workers cannot be kept in {cache_dir()}: {error.strerror}; set HISPEC_CACHE"
            ) from None
    return counts


def print_workers(counts: WorkerCounts, file: IO[str] | None = None) -> None:
    """Prints speeds by number of workers, on stdout unless `file` is given."""
    table = make_table("workers", "tokens/s, plain")
    for number, speed in sorted(counts.tokens_per_s.items()):
        table.add_row(f"{number}{' (auto)' if number == counts.best else ''}", f"{speed:.1f}")
    make_console(file).print(table)


def _tokens_per_s(llm: LLM, num_rows: int) -> float:
    """The best of a few passes: others are slower by what else the machine did. Raises RequestError if
    prompts are refused, or fail."""
    rng = random.Random(0)
    length = min(_TOKENS, llm.engine.max_model_len)
    num_new = max(1, length // 3)
    params = SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True)
    best = 0.0
    for _ in range(1 + _ROUNDS):  # the first warms up
        prompts = [[rng.randrange(1, 100) for _ in range(length - num_new)] for _ in range(num_rows)]
        started = time.perf_counter()
        results = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        best = max(best, sum(map(len, token_ids_of(results))) / seconds)
    return best
