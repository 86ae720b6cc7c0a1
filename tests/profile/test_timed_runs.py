"""Plans that are timed against each other: in which turns, and what is counted of them."""

from __future__ import annotations

from typing import Any, cast

import pytest

from hispec import LLM
from hispec.config import SpeculativeConfig
from hispec.errors import build
from hispec.jobs.bench_inputs import TokenIds
from hispec.profile import timed_runs
from hispec.profile.timed_runs import time_plans
from hispec.sampling_params import SamplingParams

PROMPTS, TASKS = [[1], [2], [3], [4]], ["maths", "code", "maths", "chat"]
GROUPS = [[[1], [3]], [[2]], [[4]]]


class Timed:
    """Stands for an LLM: notes which plan ran which prompts. Of each prompt it commits three tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, has_graphs: bool = False) -> None:
        self.plan: SpeculativeConfig | None = None
        self.runs: list[tuple[SpeculativeConfig | None, list[TokenIds]]] = []
        self.num_warm_ups, self._tokens, self._has_graphs = 0, 0, has_graphs
        monkeypatch.setattr(timed_runs, "generate", self._generate)
        monkeypatch.setattr(timed_runs, "warm_up", self._warm_up)

    def _generate(self, llm: Timed, taken: list[TokenIds], sampling: SamplingParams) -> list[TokenIds]:
        self.runs.append((self.plan, taken))
        self._tokens += 3 * len(taken)
        return [[7, 8, 9] for _ in taken]

    def _warm_up(self, *_: Any) -> None:
        self.num_warm_ups += 1
        self._tokens += 1000

    def set_speculative(self, plan: SpeculativeConfig | None) -> None:
        self.plan = plan

    def memory(self) -> dict[str, int]:
        return {"graph_bytes": 0} if self._has_graphs else {}

    def reset_stats(self) -> None:
        self._tokens = 0

    def stats(self) -> dict[str, int]:
        tokens = self._tokens
        return {
            "tokens": tokens,
            "rounds": tokens // 3,
            "layer_passes": 8 * tokens + 5,
            "prefill_layer_passes": 5,
            "num_layers": 8,
            "kv_blocks_used": 1,
        }


def ngram(**sizes: Any) -> SpeculativeConfig:
    return build(SpeculativeConfig, {"draft": {"kind": "ngram", "ngram": sizes}})


def timed(
    llm: Timed, plans: list[SpeculativeConfig | None], repeats: int
) -> tuple[list[timed_runs.Runs], int]:
    pauses: list[int] = []
    sampling, between = SamplingParams(), lambda: pauses.append(len(llm.runs))
    given = (cast(LLM, llm), plans, PROMPTS, TASKS, sampling, repeats)
    runs = time_plans(*given, batch_size=2, progress=False, between=between)
    return runs, len(pauses)


def test_plans_take_turns_task_by_task_in_changing_order(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, plans, repeats = Timed(monkeypatch), [None, ngram(), ngram(max_size=3)], 8
    runs, num_pauses = timed(llm, plans, repeats)
    turns = [llm.runs[start : start + 3] for start in range(0, len(llm.runs), 3)]
    assert [[taken for _, taken in turn] for turn in turns] == [[group] * 3 for group in repeats * GROUPS]
    orders = {tuple(plans.index(plan) for plan, _ in turn) for turn in turns}
    assert all(sorted(order) == [0, 1, 2] for order in orders) and len(orders) == 6
    assert num_pauses == len(llm.runs) and llm.num_warm_ups == 3
    for run in runs:
        assert run.outputs == [[[7, 8, 9]] * 4] * repeats
        assert [len(seconds) for seconds in run.seconds] == [3] * repeats
        # Of the last run, all tasks, and nothing of warming up.
        counted = {"tokens": 12, "rounds": 4, "layer_passes": 8 * 12 + 15, "prefill_layer_passes": 15}
        assert run.stats == counted | {"num_layers": 8}


@pytest.mark.parametrize("has_graphs", [False, True])
def test_where_plans_keep_outputs_or_graphs_turns_are_whole_runs(
    monkeypatch: pytest.MonkeyPatch, has_graphs: bool
) -> None:
    llm = Timed(monkeypatch, has_graphs)
    plans: list[SpeculativeConfig | None] = [None, ngram(datastore_tokens=0 if has_graphs else 1024)]
    runs, num_pauses = timed(llm, plans, 2)
    for start in range(0, len(llm.runs), 3):
        part = llm.runs[start : start + 3]
        assert all(plan is part[0][0] for plan, _ in part) and [taken for _, taken in part] == GROUPS
    assert num_pauses == len(llm.runs) == 6 * len(plans) and llm.num_warm_ups == 2 * len(plans)
    assert all(run.stats["tokens"] == 12 for run in runs)
