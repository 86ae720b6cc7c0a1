"""Experiments for the tests of the simulator."""

from __future__ import annotations

from typing import Any

import numpy as np

from hispec.errors import build
from hispec.simulate.config import SimulationConfig
from hispec.simulate.metrics import Run
from hispec.simulate.run import Experiment

STEP = {"constant_ms": 10.0, "token_ms": 0.5, "row_ms": 0.25}
STAGES: dict[str, dict[str, Any]] = {
    "plain": STEP,
    "prefill": {"constant_ms": 2.0, "token_ms": 0.1},
    "verify/0": STEP,
    "verify/4": {"constant_ms": 6.0, "token_ms": 0.3, "knots": [[1, 0.5], [6, 0.6], [8, 2.0], [20, 5.0]]},
    "verify/8": {"constant_ms": 3.0, "token_ms": 0.2},
    "draft/4": {"constant_ms": 4.0, "token_ms": 0.2},
    "fill/4": {"constant_ms": 3.5, "token_ms": 0.15},
    "check/4-8": {"constant_ms": 3.2, "token_ms": 0.11},
    "check/0-8": {"constant_ms": 7.0, "token_ms": 0.3},
    "draft_model": {"constant_ms": 1.5, "token_ms": 0.05},
    "fill_model": {"constant_ms": 1.25, "token_ms": 0.04},
    "lookup": {"constant_ms": 0.1, "row_ms": 0.01},
    "swap": {"constant_ms": 0.5, "token_ms": 0.01},
    "round": {"constant_ms": 0.3, "row_ms": 0.02},
}
EXPONENTIAL = {"kind": "exponential", "mean": 30}


def share(value: float) -> dict[str, Any]:
    return {"share": {"value": value}}


def experiment(**changes: Any) -> SimulationConfig:
    """One system, first come first served with plain decoding, at 1 request/s, unless changed."""
    values: dict[str, Any] = {
        "engine": {"max_num_seqs": 4},
        "latency": {"stages": STAGES},
        "requests": {
            "num": 200,
            "warm_up": 0.0,
            "prompt_tokens": {"kind": "uniform", "low": 1, "high": 40},
            "output_tokens": EXPONENTIAL,
        },
        "arrivals": {"rates": [1.0]},
        "systems": {"only": {}},
    }
    return build(SimulationConfig, values | changes)


def run(config: SimulationConfig, name: str = "only", load: float | None = None, seed: int = 0) -> Run:
    trial = Experiment(config)
    load = config.arrivals.loads[0] if load is None else load
    return trial.run(config.systems[name], load, trial.rate(load, seed), seed, lambda _: None)


def latencies(done: Run) -> np.ndarray[Any, np.dtype[np.float64]]:
    return done.outcomes.finished_s - done.outcomes.arrival_s
