"""`hispec simulate` from an experiment to its result."""

from __future__ import annotations

import datetime
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..jobs.load import load_settings
from ..scheduling.aging import Aging
from ..utils.console import make_bar
from ..utils.environment import environment
from ..utils.files import check_folder, check_targets, expanded, write_json
from ..utils.plots import check_matplotlib
from .arrivals import repeat_times
from .batch_state import new_row
from .cluster import Cluster, Router
from .config import SimulationConfig, SystemSettings
from .distributions import Floats
from .metrics import Run, compare, figures
from .plots import draw_plots
from .replayed_trace import read_recording
from .row_state import MANY, ROW, RoundPlan, make_log
from .system import make_replicas, with_latency
from .tables import Tables, make_tables
from .workload import Workload, make_workload

# Requests in the run that measures capacity, at least: for each row, and in all.
_CALIBRATION, _LEAST_CALIBRATION = 50, 2000


def load_simulation(path: Path, overrides: list[str]) -> SimulationConfig:
    """Loads an experiment from a YAML file. Raises ConfigError with all that is wrong."""
    return load_settings(SimulationConfig, path, overrides, [("latency", "path"), ("requests", "trace")])


def simulate_to_files(
    config: SimulationConfig,
    json_path: Path | None,
    plots: Path | None,
    *,
    config_file: Path | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Runs `simulate` and writes its result, whole or not at all. Raises ConfigError for what cannot be
    written, or is config_file, where the settings come from, before anything is run."""
    read = (config_file, config.requests.trace, config.latency.path)
    check_targets({"--json": json_path}, [expanded(path) for path in read if path is not None])
    if plots is not None:
        check_matplotlib("--plots")
        check_folder("--plots", plots)
    try:
        result = simulate(config, progress=progress)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("Nothing was written; the same command starts again") from None
    if json_path is not None:
        write_json(json_path, result)
    if plots is not None:
        draw_plots(result, plots)
    return result


def simulate(config: SimulationConfig, *, progress: bool = True) -> dict[str, Any]:
    """Runs every system at every load -> what `--json` writes. Raises ConfigError."""
    started, experiment = time.perf_counter(), Experiment(config)
    config = experiment.config
    num_runs = len(config.arrivals.loads) * len(config.systems) * config.repeats
    total, loads = num_runs * config.requests.num, []
    with make_bar(total, None, "request", progress, unit_scale=True, smoothing=0.1) as bar:
        for load in config.arrivals.loads:
            policies = {}
            rates = [experiment.rate(load, seed) for seed in experiment.seeds]
            for name, system in config.systems.items():
                what = f"{config.arrivals.what} {load:g}, {name}"
                bar.set_description(what, refresh=sys.stderr.isatty())  # a log has a line now and then
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
    """What runs of one seed share. alone_s: seconds [requests] that each takes alone, by plan; capacity: of
    the reference system in requests/s, once measured."""

    workload: Workload
    tables: Tables
    alone_s: dict[RoundPlan, Floats] = field(default_factory=dict)
    capacity: float | None = None


class Experiment:
    """The runs of an experiment, and what they share."""

    def __init__(self, config: SimulationConfig) -> None:
        config, self._latency = with_latency(config)
        self.config = config
        self.seeds = [config.seed + repeat for repeat in range(config.repeats)]
        self._recording = read_recording(config)
        self._seeded: dict[int, _Seeded] = {}
        self._with_seed(config.seed)  # raises now if the latency model lacks a stage

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
        """Runs one system at one load."""
        config, arrivals, seeded = self.config, self.config.arrivals, self._with_seed(seed)
        workload = seeded.workload
        replicas = make_replicas(config, system, self._latency, workload, seeded.tables, seed)
        cluster = Cluster(replicas, Router(config.router, config.replicas), len(workload), progress)
        if arrivals.kind == "closed":
            outcomes = cluster.serve_closed(int(load), arrivals.think_s)
        else:
            outcomes = cluster.serve_open(self._arrival_times(load, rate, seed, workload).tolist())
        urgent = [each.policy.num_urgent for each in replicas if isinstance(each.policy, Aging)]
        return Run(
            outcomes,
            [each.counts for each in replicas],
            int(workload.output_tokens.sum()),
            self._alone_s(system, seeded),
            sum(urgent) if urgent else None,
        )

    def _with_seed(self, seed: int) -> _Seeded:
        if seed not in self._seeded:
            workload = make_workload(self.config, self.config.requests.num, seed, self._recording)
            self._seeded[seed] = _Seeded(workload, make_tables(self.config, self._latency, workload))
        return self._seeded[seed]

    def _arrival_times(self, load: float, rate: float | None, seed: int, workload: Workload) -> Floats:
        arrivals = self.config.arrivals
        if rate is not None:
            return arrivals.sample(len(workload), rate, np.random.default_rng([seed, 0]))
        times = np.array(arrivals.times) if arrivals.times is not None else workload.recorded_times
        assert times is not None
        return repeat_times(times, len(workload), load)

    def _capacity(self, seed: int) -> float:
        """Requests per second that the reference system finishes while each replica has work: the sum of what
        each does in the middle of such a run, over requests of its own if the experiment has too few."""
        seeded, config = self._with_seed(seed), self.config
        if seeded.capacity is None:
            one, rows = config.model_copy(update={"replicas": 1}), config.engine.max_num_seqs
            num = max(_LEAST_CALIBRATION, _CALIBRATION * rows)
            workload, tables = seeded.workload, seeded.tables
            if len(workload) < num:
                workload = make_workload(config, num, seed, self._recording)
                tables = make_tables(config, self._latency, workload)
            system = config.systems[config.arrivals.reference or next(iter(config.systems))]
            replicas = make_replicas(one, system, self._latency, workload, tables, seed)
            cluster = Cluster(replicas, Router(config.router, 1), num, lambda _: None)
            finished = np.sort(cluster.serve_closed(2 * rows, 0.0).finished_s)
            low, high = num // 5, num * 4 // 5
            seeded.capacity = config.replicas * float((high - low) / (finished[high] - finished[low]))
        return seeded.capacity

    def _alone_s(self, system: SystemSettings, seeded: _Seeded) -> Floats:
        """Seconds [requests] that each takes on an engine of its own, from second 0 of a drift on: by the
        system's fixed plan, or by plain decoding."""
        from .rounds_numba import run_rounds

        control, plan = system.control, RoundPlan(-1, 0, 1)
        if control.route is not None:
            route = list(self.config.routes).index(control.route)
            plan = RoundPlan(route, control.num_drafts or 0, control.num_checks)
        if plan not in seeded.alone_s:
            rows, order, seconds = np.zeros(1, ROW), np.zeros(1, np.int64), np.zeros(len(seeded.workload))
            log = make_log()
            for request in range(len(seconds)):
                rows[0] = new_row(seeded.workload, request)
                seconds[request], _ = run_rounds(
                    seeded.tables, rows, order, plan, -1, 0.0, math.inf, MANY, log
                )
            seeded.alone_s[plan] = seconds
        return seeded.alone_s[plan]
