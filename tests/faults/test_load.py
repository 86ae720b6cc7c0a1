"""Thousands of requests of all kinds through one small engine: every one ends, rightly, and nothing is left
of it anywhere."""

from __future__ import annotations

import gc
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from hispec import LLM, RequestError
from hispec.outputs import RequestOutput
from hispec.sampling_params import SamplingParams

SHORT = {"max_size": 3, "min_size": 1, "match_confidence": None}
PLANS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "three tiers": {"draft": {"layer": 3}, "check": {"layer": 6}, "num_draft_tokens": 2, "num_checks": 2},
    "hybrid": {
        "draft": {"kind": "hybrid", "layer": 3, "exit": "exit", "ngram": {**SHORT, "datastore_tokens": 1024}},
        "num_draft_tokens": 4,
    },
}
POLICIES = {"plain": "laps", "three tiers": "fcfs", "hybrid": "mlfq"}
# Kept on purpose, and bounded: blocks that are found again by their content, lengths of outputs, entries that
# a heap passes over, what rows had last, the histogram of a round's tokens, and a program for each run of
# layers that a plan's stages have.
KEPT = (
    *("_published", "_cached", "_free", "_predictor", "_heap", "_written", "_sampler", "_loaded"),
    *("accept_length_histogram", "_programs"),
)
# Of the last round's rows, however many that were: never above MAX_NUM_SEQS.
OF_ROWS = ("_index_row_of", "_numbers", "_known")
MAX_NUM_SEQS = 6


def random_request(generator: random.Random, stems: list[list[int]]) -> tuple[list[int], SamplingParams]:
    """Half of the prompts share a beginning; some cannot be served."""
    own = [generator.randrange(256) for _ in range(generator.choice((1, 2, 5, 9, 17, 40)))]
    prompt = (generator.choice(stems) + own if generator.random() < 0.5 else own)[:60]
    is_greedy = generator.random() < 0.4
    max_tokens = generator.choice((1, 2, 7, 16, 30))
    values: dict[str, Any] = {
        "temperature": 0.0 if is_greedy else generator.choice((0.5, 1.0, 3.0)),
        "top_k": generator.choice((0, 0, 5)),
        "top_p": generator.choice((1.0, 1.0, 0.8)),
        "min_p": generator.choice((0.0, 0.0, 0.02)),
        "repetition_penalty": generator.choice((1.0, 1.0, 1.3)),
        "presence_penalty": generator.choice((0.0, 0.0, 0.5)),
        "logit_bias": generator.choice(({}, {}, {7: 5.0})),
        "seed": generator.randrange(1000),
        "max_tokens": max_tokens,
        "min_tokens": generator.choice((0, 0, max_tokens)),
        "stop": generator.choice(([], [], ["a"], ["zz", "b"])),
        "stop_token_ids": generator.choice(([], [], [3, 4, 5, 6])),
        "ignore_eos": generator.random() < 0.5,
        "logprobs": generator.choice((None, None, None, 0, 2)),
        "speculative": generator.random() < 0.9,
        "n": generator.choice((1, 1, 1, 2)),
    }
    return prompt, SamplingParams(**values)


def containers(root: object) -> Iterator[tuple[str, Any]]:
    """Every container of ours that can be reached from `root`, with its path."""
    seen, todo = set(), deque([("", root)])
    while todo:
        path, value = todo.popleft()
        if id(value) in seen or isinstance(value, str | bytes | int | float | torch.Tensor | type):
            continue
        seen.add(id(value))
        if isinstance(value, dict | list | set | deque | frozenset):
            yield path, value
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            todo.extend((f"{path}[{key}]", item) for key, item in items)
        elif type(value).__module__.startswith(("hispec", "cache")):
            names = [*getattr(value, "__dict__", {}), *getattr(type(value), "__slots__", ())]
            todo.extend((f"{path}.{name}", getattr(value, name)) for name in names if hasattr(value, name))


def sizes(llm: LLM) -> dict[str, int]:
    parts = {"": llm.__dict__ | {"decoder": None, "tokenizer": None}, "engine": llm.engine.__dict__}
    found = {path: len(found) for path, found in containers(parts)}
    of_rows = [path for path in found if path.endswith(OF_ROWS)]
    assert all(found[path] <= MAX_NUM_SEQS for path in of_rows), found
    return {
        path: size
        for path, size in found.items()
        if path not in of_rows and not any(name in path for name in KEPT)
    }


@pytest.mark.parametrize(
    ("plan", "count"),
    [
        *(pytest.param(plan, 100, id=f"{plan}, 100") for plan in PLANS),
        *(pytest.param(plan, 2000, id=f"{plan}, 2000", marks=pytest.mark.slow) for plan in PLANS),
    ],
)
def test_nothing_is_left_of_thousands_of_requests(tiny_path: Path, plan: str, count: int) -> None:
    generator = random.Random(count)
    stems = [[generator.randrange(256) for _ in range(length)] for length in (8, 24, 30)]
    given = [random_request(generator, stems) for _ in range(count)]
    llm = LLM(
        str(tiny_path),
        speculative=PLANS[plan],
        scheduling={
            "policy": POLICIES[plan],
            "first_quantum": 2.0,
            "review_rounds": 2,
            "swap_bytes": 1 << 18,
        },
        max_model_len=80,
        max_num_seqs=MAX_NUM_SEQS,
        block_size=4,
        num_kv_blocks=40,  # of which one request may need 20
        max_prefill_tokens=24,
    )
    got: dict[int, str] = {}  # as text, so that they are no objects that gc counts
    num_aborted = 0

    def serve(numbers: Iterable[int]) -> None:
        nonlocal num_aborted
        waiting, live = deque(numbers), set()
        while waiting or live:
            for _ in range(generator.randrange(4)):
                if waiting and len(live) < 20:
                    number = waiting.popleft()
                    try:
                        llm.add(*given[number], f"{number}")
                        live.add(f"{number}")
                    except RequestError as error:
                        got[number] = str(error)
            if live and generator.random() < 0.05:
                name = generator.choice(sorted(live))
                llm.abort(name)
                live.remove(name)
                got[int(name)] = "aborted"
                num_aborted += 1
            for output in llm.step():
                assert output.error is None
                live.remove(output.request_id)
                got[int(output.request_id)] = summary(output)
            llm.engine.check()

    serve(range(count // 2))
    before = num_objects(), sizes(llm)
    serve(range(count // 2, count))
    after = num_objects(), sizes(llm)
    stats = llm.stats()
    assert len(got) == count and not llm.has_unfinished()
    assert stats["kv_blocks_used"] == stats["running"] == stats["waiting"] == 0
    assert stats["preemptions"] > 0 and num_aborted > count // 50
    larger = {
        path: (before[1].get(path, 0), size)
        for path, size in after[1].items()
        if size > before[1].get(path, 0)
    }
    assert not larger and after[0] - before[0] < 1000, (larger, before[0], after[0])
    llm.close()
    with LLM(str(tiny_path), max_model_len=80, max_num_seqs=32) as plain:
        outputs = plain.generate(
            [prompt for prompt, _ in given], [params for _, params in given], use_tqdm=False
        )
    for number, output in enumerate(outputs):
        if got[number] != "aborted":
            assert got[number] == (output.error or summary(output)), given[number]


def summary(output: RequestOutput) -> str:
    return repr([(each.text, each.token_ids, each.finish_reason) for each in output.outputs])


def num_objects() -> int:
    gc.collect()
    return len(gc.get_objects())
