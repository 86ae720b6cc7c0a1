"""What the host needs for a round: engines whose device is a stub, so that nothing but Python is left.

    python benchmarks/host_cost.py [--rows 128] [--rounds 200] [--out FILE]

A round's outcome comes from a table, the same for every round; the host reads it, commits it, and launches
the next round before it reads this one, as it does on a GPU. Milliseconds per round are medians and least
values; beside other programs only the least means something. What launching costs of a device's own interface
(copies, events, the replay of a graph) is not in it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run from a checkout: nothing needs to be installed

from benchmarks.arguments import at_least_one
from benchmarks.command import check_results, exit_code
from benchmarks.gpu_parts.engines import make_engine
from benchmarks.gpu_parts.shapes import TINY_SHAPES
from benchmarks.gpu_parts.subjects import random_decoder
from ee_models.decoder import Decoder
from hispec.config import CheckConfig, DraftConfig, Plan, SpeculativeConfig
from hispec.decoding.batch import RoundResult
from hispec.engine import Engine
from hispec.runner.launchers import Flight, Rows
from hispec.runner.plan_runtime import PlanRuntime
from hispec.runner.round_output import pack, unpack
from hispec.sampling_params import SamplingParams
from hispec.utils.environment import busy_text, environment, hardware_text, watch_others
from hispec.utils.files import write_json

PLANS: dict[str, SpeculativeConfig | None] = {
    "plain": None,
    "three tiers, 2 x 2": SpeculativeConfig(
        draft=DraftConfig(layer=1), check=CheckConfig(layer=2), num_draft_tokens=2, num_checks=2
    ),
}
PROMPT_TOKENS, MARGIN = 64, 8


class StubLauncher:
    """Does no work: each round of each row commits the same, some tokens of every tier's own."""

    runs_ahead = True

    def launch(self, runtime: PlanRuntime, plan: Plan, rows: Rows) -> Flight:
        result = table(plan, rows.inputs.shape[1])
        return Flight(
            runtime,
            plan,
            rows,
            result,
            partial(unpack, pack(result, None), plan),
            result.tokens,
            is_timed=True,
        )

    def advance(self, flight: Flight) -> None:
        pass

    def launch_next(self, flight: Flight, rows: Rows, changed: Sequence[int]) -> Flight:
        return self.launch(flight.runtime, flight.plan, rows)


_tables: dict[tuple[Plan, int], RoundResult] = {}


def table(plan: Plan, num_rows: int) -> RoundResult:
    """A round's outcome for each row: half of the window is committed, as much as the tiers say was kept."""
    if (plan, num_rows) not in _tables:
        ones = torch.ones(num_rows, dtype=torch.int64)
        by_cycle = torch.ones(num_rows, plan.num_checks, dtype=torch.int64)
        is_plain = plan.is_plain
        committed = 1 if is_plain else 1 + plan.num_checks
        _tables[plan, num_rows] = RoundResult(
            counts=committed * ones,
            tokens=(5 + torch.arange(plan.window + 1)).expand(num_rows, -1).contiguous(),
            drafted=-by_cycle if is_plain else plan.num_draft_tokens * by_cycle,
            kept=0 * by_cycle if is_plain else by_cycle,
            source=0 * by_cycle,
            tentative=0 * ones if is_plain else 2 * plan.num_checks * ones,
            accepted=(committed - 1) * ones,
            evidence=torch.zeros(num_rows),
            logits=None,
            span=cast(Any, None),  # of logits, which are not kept
            nodes=torch.zeros(num_rows, 1, dtype=torch.int64),
        )
    return _tables[plan, num_rows]


def stubbed(decoder: Decoder, speculative: SpeculativeConfig | None, rows: int, rounds: int) -> Engine:
    """An engine with `rows` requests that are ready, none of which ends within `rounds`."""
    window = speculative.plan(decoder.config.num_layers).window if speculative else 1
    length = PROMPT_TOKENS + (rounds + MARGIN) * window
    engine = make_engine(decoder, speculative, rows=rows, length=length, graphs=False)
    for number in range(rows):
        prompt = [5 + (number + place) % 200 for place in range(PROMPT_TOKENS)]
        engine.add_request(
            prompt, SamplingParams(temperature=0.0, max_tokens=length - PROMPT_TOKENS, ignore_eos=True)
        )
    engine._rounds._launcher = StubLauncher()
    return engine


def cost(
    engine: Engine, rows: int, rounds: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Milliseconds of each of `rounds` rounds of all rows."""
    while not engine.step():  # prompts
        pass
    while sum(len(delta.token_ids) > 0 for delta in engine.step()) < rows:
        pass
    found = []
    for _ in range(rounds):
        started = clock()
        deltas = engine.step()
        found.append((clock() - started) * 1e3)
        assert len(deltas) == rows and all(delta.token_ids for delta in deltas)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=at_least_one, default=128)
    parser.add_argument("--rounds", type=at_least_one, default=200)
    parser.add_argument("--out", type=Path, help="file of the JSON; none: only printed")
    chosen = parser.parse_args(arguments)
    return exit_code("host_cost", lambda: run(chosen))


def run(chosen: argparse.Namespace) -> None:
    """Measures, prints, and writes --out."""
    check_results(chosen, ("--out",))
    others = watch_others()
    values = environment()
    shape = TINY_SHAPES["Llama-3-8B"].config
    result: dict[str, Any] = {"rows": chosen.rows, "rounds": chosen.rounds, "ms_per_round": {}}
    for name, plan in PLANS.items():
        length = PROMPT_TOKENS + (chosen.rounds + MARGIN) * 6
        decoder = random_decoder(shape, torch.device("cpu"), torch.float32, length)
        engine = stubbed(decoder, plan, chosen.rows, chosen.rounds)
        try:
            ms = cost(engine, chosen.rows, chosen.rounds)
        finally:
            engine.close()
        result["ms_per_round"][name] = {"median": statistics.median(ms), "least": min(ms)}
        print(f"{name}: median {statistics.median(ms):.3f} ms, least {min(ms):.3f} ms", flush=True)
    values["others"] = others()
    result["environment"] = values
    print(hardware_text(values))
    if (busy := busy_text(values)) is not None:
        print(f"{busy}: only the least of each means something")
    if chosen.out is not None:
        write_json(chosen.out, result)


if __name__ == "__main__":
    sys.exit(main())
