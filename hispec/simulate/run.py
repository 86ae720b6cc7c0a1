"""`hispec simulate` from an experiment to its result."""

from __future__ import annotations

import datetime
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from ..jobs.load import load_settings
from ..scheduling.aging import Aging
from ..utils.environment import environment
from ..utils.files import write_atomically
from .arrivals import repeated
from .cluster import Outcomes, Router, serve_closed, serve_open
from .config import SimulationConfig, SystemSettings
from .costs import Costs, latency_of, make_costs
from .distributions import Floats
from .metrics import Run, compare, figures
from .plots import check_matplotlib, draw_plots
from .replayed_trace import read_recording
from .row_columns import (
    CHECKS,
    DRAFTS,
    FIRST,
    LEFT,
    LENGTH,
    MANY,
    MOST,
    NUM_REAL,
    NUM_TOTALS,
    NUM_WHOLE,
    TARGET,
    Kept,
    Rows,
)
from .workload import Workload, make_workload

if TYPE_CHECKING:
    from .replica import Replica

_CALIBRATION = 50  # requests per row for what a saturated system gets done, at least


def load_simulation(path: Path, overrides: list[str]) -> SimulationConfig:
    """The experiment in a YAML file. Raises ConfigError with all that is wrong."""
    return load_settings(SimulationConfig, path, overrides, [("latency", "path"), ("requests", "trace")])


def simulate_to_files(
    config: SimulationConfig, json_path: Path | None, plots: Path | None, *, progress: bool = True
) -> dict[str, Any]:
    """As `simulate`, and writes its result, whole or not at all. Raises ConfigError for what cannot be
    written, before anything is run."""
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
    if plots is not None:
        check_matplotlib()
        plots.mkdir(parents=True, exist_ok=True)
    try:
        result = simulate(config, progress=progress)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("Nothing was written.") from None
    if json_path is not None:
        write_atomically(
            json_path, (json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
        )
    if plots is not None:
        draw_plots(result, plots)
    return result


def simulate(config: SimulationConfig, *, progress: bool = True) -> dict[str, Any]:
    """Runs every system at every load -> what `--json` writes. Raises ConfigError."""
    started, experiment = time.perf_counter(), Experiment(config)
    num_runs = len(config.arrivals.loads) * len(config.systems) * config.repeats
    loads = []
    with tqdm(
        total=num_runs * config.requests.num,
        unit="request",
        unit_scale=True,
        disable=not progress,
        smoothing=0.1,
    ) as bar:
        for load in config.arrivals.loads:
            policies = {}
            rates = [experiment.rate(load, seed) for seed in experiment.seeds]
            for name, system in config.systems.items():
                bar.set_description(f"{config.arrivals.what} {load:g}, {name}")
                runs = [
                    experiment.run(system, load, rate, seed, bar.update)
                    for seed, rate in zip(experiment.seeds, rates, strict=True)
                ]
                policies[name] = figures(config, system, runs)
            compare(config, policies)
            loads.append({"load": load, "rate": _mean(rates), "policies": policies})
    return {
        "date": datetime.date.today().isoformat(),
        "what": config.arrivals.what,
        "seconds": time.perf_counter() - started,
        "loads": loads,
        "config": config.model_dump(mode="json"),
        "environment": environment(),
    }


def _mean(rates: list[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return float(np.mean(known)) if known else None


@dataclass
class _Seeded:
    """What runs of one seed share: requests, what they take alone by plan, and the capacity of the reference,
    if it is known."""

    workload: Workload
    alone_s: dict[tuple[int, int, int], Floats]
    capacity: float | None = None


class Experiment:
    """The runs of an experiment, with what they share."""

    def __init__(self, config: SimulationConfig) -> None:
        self.config = config
        self.seeds = [config.seed + repeat for repeat in range(config.repeats)]
        self._costs: Costs = make_costs(latency_of(config.latency), config.routes, config.engine.num_layers)
        self._recording = read_recording(config)
        self._seeded: dict[int, _Seeded] = {}

    def rate(self, load: float, seed: int) -> float | None:
        """Requests per second of an open load; None for closed and recorded ones."""
        arrivals = self.config.arrivals
        if arrivals.what == "rates":
            return load
        return load * self._capacity(seed) if arrivals.what == "utilisations" else None

    def run(
        self,
        system: SystemSettings,
        load: float,
        rate: float | None,
        seed: int,
        progress: Callable[[int], object],
    ) -> Run:
        """One system at one load."""
        config, arrivals, seeded = self.config, self.config.arrivals, self._of(seed)
        workload = seeded.workload
        replicas, router = self._replicas(system, workload, seed), Router(config.router, config.replicas)
        if arrivals.kind == "closed":
            outcomes = serve_closed(
                replicas, router, len(workload), int(load) * config.replicas, arrivals.think_s, progress
            )
        else:
            outcomes = serve_open(replicas, router, self._times(load, rate, seed, workload), progress)
        urgent = [each.policy.num_urgent for each in replicas if isinstance(each.policy, Aging)]
        return self._made(system, seeded, outcomes, replicas, sum(urgent) if urgent else None)

    def _made(
        self,
        system: SystemSettings,
        seeded: _Seeded,
        outcomes: Outcomes,
        replicas: list[Replica],
        num_urgent: int | None,
    ) -> Run:
        control, names = system.control, list(self.config.routes)
        plan = (
            (names.index(control.route), control.num_drafts or 0, control.num_checks)
            if control.route is not None
            else (0, 0, 1)
        )
        if plan not in seeded.alone_s:
            seeded.alone_s[plan] = self._alone(seeded.workload, *plan)
        return Run(
            outcomes,
            [each.counts for each in replicas],
            int(seeded.workload.output_tokens.sum()),
            seeded.alone_s[plan],
            num_urgent,
        )

    def _of(self, seed: int) -> _Seeded:
        if seed not in self._seeded:
            self._seeded[seed] = _Seeded(
                make_workload(self.config, self.config.requests.num, seed, self._recording), {}
            )
        return self._seeded[seed]

    def _replicas(self, system: SystemSettings, workload: Workload, seed: int) -> list[Replica]:
        from .system import make_replicas

        return make_replicas(self.config, system, self._costs, workload, seed)

    def _times(self, load: float, rate: float | None, seed: int, workload: Workload) -> Floats:
        arrivals = self.config.arrivals
        if rate is not None:
            return arrivals.sample(len(workload), rate, np.random.default_rng([seed, 0]))
        times = np.array(arrivals.times) if arrivals.times is not None else workload.recorded_times
        assert times is not None
        return repeated(times, len(workload), load)

    def _capacity(self, seed: int) -> float:
        """Requests per second that the reference system gets done when it always has work, in the middle of
        such a run."""
        seeded, config = self._of(seed), self.config
        if seeded.capacity is None:
            rows = config.engine.max_num_seqs * config.replicas
            num = min(len(seeded.workload), max(2000, _CALIBRATION * rows))
            reference = config.systems[config.arrivals.reference or next(iter(config.systems))]
            replicas = self._replicas(reference, seeded.workload, seed)
            outcomes = serve_closed(
                replicas, Router(config.router, config.replicas), num, 2 * rows, 0.0, lambda _: None
            )
            finished = np.sort(outcomes.finished_s)
            low, high = num // 5, num * 4 // 5
            seeded.capacity = float((high - low) / (finished[high] - finished[low]))
        return seeded.capacity

    def _alone(self, workload: Workload, route: int, num_drafts: int, num_checks: int) -> Floats:
        """Seconds [requests] that each would take with an engine for itself, by a fixed plan."""
        from .rounds_numba import run_rounds
        from .system import tables_of

        rows = Rows(
            np.zeros((1, NUM_WHOLE), np.int64),
            np.zeros((1, NUM_REAL)),
            np.zeros(1, np.uint64),
            np.zeros((1, workload.shares.shape[0], 4)),
        )
        kept = Kept(False, np.zeros((1, 5), np.int64), np.zeros((1, 3), np.int64), np.zeros(2, np.int64))
        order, totals, tables = np.zeros(1, np.int64), np.zeros(NUM_TOTALS), tables_of(self._costs, workload)
        engine, seconds, row = self.config.engine, np.zeros(len(workload)), rows.whole[0]
        lengths = zip(
            workload.prompt_tokens.tolist(),
            workload.cached_tokens.tolist(),
            workload.output_tokens.tolist(),
            strict=True,
        )
        for request, (prompt, cached, output) in enumerate(lengths):
            row[:] = 0
            row[[LEFT, LENGTH, TARGET, MOST, FIRST, DRAFTS, CHECKS]] = (
                prompt - 1 - cached,
                prompt,
                output,
                output,
                -1,
                -1,
                -1,
            )
            rows.seeds[0], rows.shares[0] = workload.seeds[request], workload.shares[:, request]
            seconds[request], _ = run_rounds(
                rows,
                1,
                order,
                route,
                num_drafts,
                num_checks,
                tables,
                engine.max_prefill_tokens,
                engine.block_size,
                -1,
                0.0,
                math.inf,
                MANY,
                kept,
                totals,
            )
        return seconds
