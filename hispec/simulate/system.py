"""Makes the replicas of one of the systems that are compared, with all their parts."""

from __future__ import annotations

from typing import Literal

from ..config import GoodputConfig
from ..control.choice import Control, FixedControl
from ..control.controller import GoodputControl
from ..errors import ConfigError, build
from ..latency.model import LatencyModel
from ..latency.profile_file import check, load
from ..scheduling.make import make_policy
from ..scheduling.sjf import ShortestRemaining
from ..utils.files import expanded
from .batch_state import Setup
from .config import ControlSettings, EngineSettings, SimulationConfig, SystemSettings
from .predictors import make_predictor, predicted_lengths
from .replica import Replica
from .tables import Tables
from .workload import Workload


def with_latency(config: SimulationConfig) -> tuple[SimulationConfig, LatencyModel]:
    """The experiment with the layers that its profile says, and what its stages cost. Raises ConfigError for
    a profile that cannot be read, or that the experiment does not fit."""
    settings = config.latency
    if settings.path is None:
        stages = {name: each.cost for name, each in (settings.stages or {}).items()}
        origin = "latency.stages", "add it there"
        return config, LatencyModel(stages, settings.is_static, settings.row_buckets, origin)
    path, engine = expanded(settings.path), config.engine
    profile = load(path)
    # Of another model or machine it may be, but not of fewer rows.
    check(profile, profile.subject, engine.max_num_seqs, path)
    num_layers = profile.subject.model.get("num_layers", engine.num_layers)
    if "num_layers" in engine.model_fields_set and engine.num_layers != num_layers:
        raise ConfigError(
            f"engine.num_layers={engine.num_layers} is not that of the latency profile {path}, which is of a"
            f" model of {num_layers} layers; leave it out, or give the profile of another model"
        )
    engine = build(
        EngineSettings, engine.model_dump(exclude_unset=True) | {"num_layers": num_layers}, "engine"
    )
    return config.model_copy(update={"engine": engine}), profile.model()


def make_replicas(
    config: SimulationConfig,
    system: SystemSettings,
    latency: LatencyModel,
    workload: Workload,
    tables: Tables,
    seed: int,
) -> list[Replica]:
    """Raises ConfigError if a request can never have its blocks."""
    _check_room(config, workload)
    routes = route_numbers(config, system.control)
    setup = Setup(config.engine, latency, workload, tables, system.scheduling.swap_bytes, routes)
    lengths = predicted_lengths(system.predictor, workload.output_tokens, seed)
    replicas = []
    for index in range(config.replicas):
        control = make_control(config, system.control, latency, seed + index)
        predictor = make_predictor(lengths, system.scheduling.expected_tokens)
        if system.srtf is None:
            replicas.append(Replica(setup, make_policy(system.scheduling), control, predictor))
            continue
        remaining = _Remaining(setup, system.srtf, system.control.num_drafts or 0)
        policy = ShortestRemaining(remaining, system.scheduling.review_rounds)
        remaining.replica = Replica(setup, policy, control, predictor)
        replicas.append(remaining.replica)
    return replicas


def route_numbers(config: SimulationConfig, control: ControlSettings) -> tuple[int, ...]:
    """Indices of a controller's routes among the experiment's."""
    names = {"plain": (), "fixed": (control.route,), "goodput": control.routes or tuple(config.routes)}[
        control.kind
    ]
    return tuple(list(config.routes).index(name) for name in names if name is not None)


def make_control(
    config: SimulationConfig, settings: ControlSettings, latency: LatencyModel, seed: int
) -> Control:
    all_routes = [each.route for each in config.routes.values()]
    routes = [all_routes[number] for number in route_numbers(config, settings)]
    if settings.kind == "plain":
        return FixedControl(None)
    if settings.kind == "fixed":
        return FixedControl(routes[0], routes[0].plan(settings.num_drafts or 0, settings.num_checks))
    return GoodputControl(routes, latency, settings.goodput or GoodputConfig(), seed=seed)


class _Remaining:
    """Remaining service of a request: the true rounds, and what is left of its prompt by its cost in rounds;
    its true tokens; or those predicted."""

    replica: Replica

    def __init__(
        self, setup: Setup, what: Literal["service", "tokens", "predicted"], num_drafts: int
    ) -> None:
        from .round_parts_numba import rounds_left

        self._setup, self._what, self._num_drafts, self._rounds_left = setup, what, num_drafts, rounds_left
        self._route = setup.route_numbers[0] if setup.route_numbers else 0
        self._prefill_rounds = setup.prefill_s(1024) / 1024 / (setup.latency["plain"](1, 1, 256) / 1e3)
        self._known: dict[int, tuple[int, int]] = {}  # by request: output tokens, rounds left then

    def __call__(self, request: int) -> float:
        output, num_prefill = self.replica.progress_of(request)
        if self._what == "predicted":
            return self.replica.predicted(request, output) - output
        target = self._setup.workload.output_tokens[request]
        if self._what == "tokens":
            return float(target - output)
        known = self._known.get(request)
        if known is None or known[0] != output:
            rounds = self._rounds_left(
                self._setup.tables, request, self._route, self._num_drafts, output, target
            )
            known = self._known[request] = output, int(rounds)
        return known[1] + num_prefill * self._prefill_rounds


def _check_room(config: SimulationConfig, workload: Workload) -> None:
    room = config.engine.num_kv_tokens
    if room is None:
        return
    window = max((each.most_checks * (each.most_drafts + 1) for each in config.routes.values()), default=1)
    largest = int((workload.prompt_tokens + workload.output_tokens).max()) + window + config.engine.block_size
    if largest > room:
        raise ConfigError(
            f"engine.num_kv_tokens={room} is less than one request may need ({largest} positions); raise it,"
            " or limit requests.*_tokens with `most`"
        )
