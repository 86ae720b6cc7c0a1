"""Settings of `hispec simulate` (docs/simulation.md)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from ..config import TRAITS, DraftKind, GoodputConfig, SchedulingConfig, Settings
from ..config.base import Pair, Tuple
from ..control.choice import Route
from ..errors import nearest, shown
from ..latency.model import Linear, cold_stage, rising, stage_names
from .arrivals import ArrivalsConfig
from .distributions import Distribution, Shares, constant

MOST_NAME = 80  # characters
Name = Annotated[str, Field(min_length=1, max_length=MOST_NAME)]
Cost = Annotated[float, Field(ge=0.0, le=1e9)]
MOST_POINTS = 64  # of a drift


class EngineSettings(Settings):
    """Each replica's engine; fields as in EngineConfig.

    num_kv_tokens       positions that all KV blocks hold; None = enough for all rows
    kv_bytes_per_token  bytes of KV per position, for scheduling.swap_bytes
    num_layers          layers of the model, for attained service, which is counted in passes; left out with
                        latency.path: the profile's
    """

    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] = 32
    max_prefill_tokens: Annotated[int, Field(ge=1)] = 512
    num_kv_tokens: Annotated[int, Field(ge=1)] | None = None
    block_size: Annotated[int, Field(ge=1, le=1024)] = 16
    kv_bytes_per_token: Annotated[int, Field(ge=1)] = 1 << 17
    num_layers: Annotated[int, Field(ge=1)] = 32


class StageSettings(Settings):
    """Cost of a stage; fields as in `Linear`."""

    constant_ms: Cost = 0.0
    row_ms: Cost = 0.0
    token_ms: Cost = 0.0
    context_ms: Cost = 0.0
    pair_ms: Cost = 0.0
    knots: Annotated[Tuple[Pair[Cost]], AfterValidator(rising)] = ()

    @property
    def is_free(self) -> bool:
        """Whether the least pass costs nothing: of one row and one token at context 1."""
        return self.cost(1, 1, 1) == 0.0

    @property
    def cost(self) -> Linear:
        return Linear(**self.model_dump())


def _check_stage(name: str) -> str:
    layers = {int(digits) for digits in re.findall(r"\d+", name[:MOST_NAME])[:2]} - {0}
    known = [*stage_names(layers, layers, has_draft_model=True), *map(cold_stage, sorted(layers))]
    if name not in known:
        raise ValueError(
            f"{shown(name)} is no stage{nearest(name[:MOST_NAME], known)}; there are plain, prefill, swap,"
            " round, lookup, draft_model, fill_model and, with numbers of layers, draft/D, fill/D, cold/D,"
            " along/D, shadow/D, check/lo-C and verify/lo"
        )
    return name


StageName = Annotated[str, AfterValidator(_check_stage)]  # as `LatencyModel` lists them


class LatencySettings(Settings):
    """Costs of stages: either each by name (`LatencyModel` lists them), or a profile that `hispec profile
    --latency` wrote.

    A profile is refused that covers fewer rows than engine.max_num_seqs, or is of a model of other layers
    than engine.num_layers says.

    is_static, row_buckets  whether rounds have static shapes, and the row counts to which they are padded
    """

    stages: dict[StageName, StageSettings] | None = None
    path: Annotated[str, Field(min_length=1)] | None = None
    is_static: bool = False
    row_buckets: Tuple[Annotated[int, Field(ge=1)]] = ()

    @model_validator(mode="after")
    def _one_source(self) -> LatencySettings:
        if (self.stages is None) == (self.path is None):
            raise ValueError("give either latency.stages or latency.path, the file of a profile")
        if self.path is not None and (self.is_static or self.row_buckets):
            raise ValueError(
                "is_static and row_buckets are said by the profile that latency.path names; leave them out"
            )
        for name, stage in (self.stages or {}).items():
            # Every round has one of these: time would stand still.
            if (name == "plain" or name.startswith("verify/")) and stage.is_free:
                rest = "a first knot" if stage.knots else "token_ms"
                raise ValueError(
                    f"stages.{name} costs nothing for one token; give it constant_ms, row_ms or {rest} above"
                    " 0"
                )
        if list(self.row_buckets) != sorted(set(self.row_buckets)):
            raise ValueError(f"row_buckets={list(self.row_buckets)} must ascend")
        if self.row_buckets and not self.is_static:
            raise ValueError(
                f"row_buckets={list(self.row_buckets)} mean nothing where is_static is false; leave them out,"
                " or set is_static: true"
            )
        return self


class AcceptanceSettings(Settings):
    """Probability that a draft is kept, given that those before it in its cycle were: share * by_position *
    drift, clipped to [0, 1].

    share        drawn once per request
    by_position  factors of the first, second, ... draft of a cycle; the last is that of all further ones
    drift        points [seconds, factor] over time, linear in between; none = 1
    """

    share: Shares
    by_position: Annotated[
        Tuple[Annotated[float, Field(ge=0.0, le=10.0)]], Field(min_length=1, max_length=32)
    ] = (1.0,)
    drift: Tuple[Tuple[Annotated[float, Field(ge=0.0, le=1e9)]]] = ()

    @model_validator(mode="after")
    def _ascending(self) -> AcceptanceSettings:
        if any(len(point) != 2 for point in self.drift):
            raise ValueError(f"drift={[list(point) for point in self.drift]} must be pairs [seconds, factor]")
        times = [point[0] for point in self.drift]
        if times != sorted(set(times)):
            raise ValueError(f"drift={[list(point) for point in self.drift]} must ascend in its seconds")
        if len(self.drift) > MOST_POINTS:
            raise ValueError(
                f"drift has {len(self.drift)} points, {MOST_POINTS} at most; leave some out, it is linear in"
                " between"
            )
        return self


class GateSettings(Settings):
    """How often a check is sure enough of its own token for another cycle, as
    `speculative.check.continue_confidence` asks: a gate that says much is often sure where it is right, and
    seldom where it is wrong.

    right, wrong   share of checks that go on, where verify would accept all that is tentative, and where not
    """

    right: Annotated[float, Field(ge=0.0, le=1.0)]
    wrong: Annotated[float, Field(ge=0.0, le=1.0)]


class RouteSettings(Settings):
    """The tiers of a route, and their acceptance rates.

    kind               kind of drafter
    draft_layer        D; 0 = ngram, model
    check_layer        C; None = two tiers
    most_drafts        largest K
    most_checks        largest R
    num_exit_tokens    hybrid: most drafts of the exit in a cycle in which lookup finds no match
    acceptance         of drafts, by the tier above; hybrid: of drafts that were looked up
    exit_acceptance    hybrid: of the exit's drafts
    verify_acceptance  three tiers: of tentative tokens, by verify
    gate               three tiers, most_checks of 2 or more: how often a check goes on; None = always
    match              ngram and hybrid: share of cycles in which lookup finds a match, drawn once per request
    """

    kind: DraftKind
    draft_layer: Annotated[int, Field(ge=0)] = 0
    check_layer: Annotated[int, Field(ge=2)] | None = None
    most_drafts: Annotated[int, Field(ge=1, le=32)] = 8
    most_checks: Annotated[int, Field(ge=1, le=16)] = 1
    num_exit_tokens: Annotated[int, Field(ge=1, le=32)] | None = None
    acceptance: AcceptanceSettings
    exit_acceptance: AcceptanceSettings | None = None
    verify_acceptance: AcceptanceSettings | None = None
    gate: GateSettings | None = None
    match: Shares = constant(1.0)

    @model_validator(mode="after")
    def _fits_together(self) -> RouteSettings:
        traits = TRAITS[self.kind]
        if traits.in_trunk != (self.draft_layer > 0):
            raise ValueError(
                f"draft_layer={self.draft_layer} of kind={self.kind!r}:"
                f" {'give the layer, >= 1' if traits.in_trunk else 'must be 0, it is outside'}"
            )
        if self.check_layer is not None and self.check_layer <= self.draft_layer:
            raise ValueError(f"check_layer={self.check_layer} must lie above draft_layer={self.draft_layer}")
        for name, given, allowed, why in (
            ("most_checks", self.most_checks > 1, self.check_layer is not None, "check_layer"),
            (
                "verify_acceptance",
                self.verify_acceptance is not None,
                self.check_layer is not None,
                "check_layer",
            ),
            ("gate", self.gate is not None, self.most_checks > 1, "most_checks of 2 or more"),
            ("exit_acceptance", self.exit_acceptance is not None, traits.is_mixed, "kind='hybrid'"),
            ("num_exit_tokens", self.num_exit_tokens is not None, traits.is_mixed, "kind='hybrid'"),
            ("match", "match" in self.model_fields_set, traits.looks_up, "kind='ngram' or 'hybrid'"),
        ):
            if given and not allowed:
                raise ValueError(f"{name}={shown(getattr(self, name))} needs {why}; leave it out")
        if self.check_layer is not None and self.verify_acceptance is None:
            raise ValueError(
                f"check_layer={self.check_layer} needs verify_acceptance: how often verify keeps what the"
                " check kept"
            )
        if traits.is_mixed and self.exit_acceptance is None:
            raise ValueError("kind='hybrid' needs exit_acceptance: how often the exit's drafts are kept")
        return self

    @property
    def route(self) -> Route:
        return Route(
            self.kind,
            self.draft_layer,
            self.check_layer,
            self.most_drafts,
            self.most_checks,
            self.num_exit_tokens,
            is_gated=self.gate is not None,
        )


class ClassSettings(Settings):
    """A class of requests: its share of all (weight over the sum of weights), and what differs from
    `requests`.

    has_template  whether its prompts begin alike, so that a length predictor can recognise the class
    acceptance    by route, what replaces the route's acceptance.share
    """

    weight: Annotated[float, Field(gt=0.0, le=1e9)] = 1.0
    prompt_tokens: Distribution | None = None
    output_tokens: Distribution | None = None
    has_template: bool = False
    acceptance: dict[Name, Shares] = Field(default_factory=dict)


class RequestsSettings(Settings):
    """The requests.

    num            requests per run
    warm_up        share of them, the first ones, that figures leave out
    prompt_tokens, output_tokens   lengths; policies do not know those of outputs
    max_tokens     most tokens that a request may output, which policies know
    classes        by name; none = one class
    trace          a file that the engine recorded (engine.trace): lengths, drafts and how many were kept;
                   also arrivals if these are `recorded`. Repeated as often as `num` needs. It does not say
                   which drafts were looked up, so rounds of a hybrid are drawn anew
    """

    num: Annotated[int, Field(ge=1, le=100_000_000)] = 10_000
    warm_up: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    prompt_tokens: Distribution = constant(128.0)
    output_tokens: Distribution = constant(128.0)
    max_tokens: Annotated[int, Field(ge=1)] = 2048
    classes: dict[Name, ClassSettings] = Field(default_factory=dict)
    trace: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one_source(self) -> RequestsSettings:
        if self.trace is not None and (
            self.classes or {"prompt_tokens", "output_tokens", "max_tokens"} & self.model_fields_set
        ):
            raise ValueError(
                f"trace={shown(self.trace)} says all lengths; leave prompt_tokens, output_tokens, max_tokens"
                " and classes out"
            )
        return self


# Fields of GoodputConfig that say what an experiment says elsewhere, and where.
_NOT_SIMULATED = {
    "drafters": "name the routes in control.routes",
    "layers": "name the routes in control.routes",
    "latency": "name the profile in latency.path",
}


class ControlSettings(Settings):
    """What decides the plan of a round.

    kind        "plain"; "fixed": always num_drafts of `route`, with num_checks; "goodput": the controller,
                with settings `goodput`, but for drafters, layers and latency
    routes      goodput: the routes it chooses from; None = all
    """

    kind: Literal["plain", "fixed", "goodput"] = "plain"
    route: Name | None = None
    num_drafts: Annotated[int, Field(ge=1, le=32)] | None = None
    num_checks: Annotated[int, Field(ge=1, le=16)] = 1
    goodput: GoodputConfig | None = None
    routes: Annotated[Tuple[Name], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _fields_of_kind(self) -> ControlSettings:
        if self.kind == "fixed" and (self.route is None or self.num_drafts is None):
            raise ValueError("kind='fixed' needs route and num_drafts")
        takes = {
            "plain": set(),
            "fixed": {"route", "num_drafts", "num_checks"},
            "goodput": {"goodput", "routes"},
        }[self.kind]
        for name in sorted(self.model_fields_set - {"kind"} - takes):
            raise ValueError(
                f"{name}={shown(getattr(self, name))} means nothing for kind={self.kind!r}; leave it out"
            )
        if twice := [name for name in self.routes or () if (self.routes or ()).count(name) > 1]:
            raise ValueError(f"routes names {shown(twice[0])} more than once; name it once")
        if self.goodput is not None:
            for name, instead in _NOT_SIMULATED.items():
                if (value := getattr(self.goodput, name)) is not None:
                    raise ValueError(
                        f"goodput.{name}={shown(value)} means nothing in a simulation; leave it out, and"
                        f" {instead}"
                    )
        return self


class PredictorSettings(Settings):
    """How policies predict output lengths.

    kind   "online": the engine's own; "noisy": the truth times a lognormal error; "exact": the truth
    sigma  noisy: standard deviation of the logarithm of the error
    """

    kind: Literal["online", "noisy", "exact"] = "online"
    sigma: Annotated[float, Field(gt=0.0, le=10.0)] | None = None

    @model_validator(mode="after")
    def _fields_of_kind(self) -> PredictorSettings:
        if (self.sigma is not None) != (self.kind == "noisy"):
            raise ValueError(
                f"sigma={self.sigma!r} and kind={self.kind!r}: sigma belongs to kind='noisy', which needs it"
            )
        return self


class SystemSettings(Settings):
    """One of the systems that are compared.

    scheduling  the engine's scheduling settings
    srtf        in place of scheduling.policy: preemptive shortest remaining first, by the true "service"
                (rounds; the oracle that bounds all policies, for plain decoding and fixed plans of two tiers
                without drift or trace), the true "tokens", or the "predicted" tokens
    """

    scheduling: SchedulingConfig = SchedulingConfig()
    srtf: Literal["service", "tokens", "predicted"] | None = None
    control: ControlSettings = ControlSettings()
    predictor: PredictorSettings = PredictorSettings()

    @model_validator(mode="after")
    def _one_order(self) -> SystemSettings:
        if self.srtf == "service" and self.control.kind == "goodput":
            raise ValueError(
                "srtf='service' knows the rounds that are left only if the plan is fixed; set control.kind to"
                " plain or fixed, or srtf: tokens"
            )
        if self.srtf is not None and "policy" in self.scheduling.model_fields_set:
            raise ValueError(
                f"srtf={self.srtf!r} takes the place of scheduling.policy={self.scheduling.policy!r}; leave"
                " one of them out"
            )
        bound = self.scheduling.max_slowdown
        if self.srtf is not None and "max_slowdown" in self.scheduling.model_fields_set and bound is not None:
            raise ValueError(
                f"scheduling.max_slowdown={bound} means nothing for srtf={self.srtf!r}, under which no"
                " request becomes urgent; leave one of them out"
            )
        return self

    @property
    def is_oracle(self) -> bool:
        """Whether it uses knowledge that no real system has."""
        return self.srtf in ("service", "tokens") or self.predictor.kind == "exact"


class SimulationConfig(Settings):
    """An experiment: every system at every load.

    replicas  engines behind one router
    router    "round_robin", or "least_work": fewest predicted tokens outstanding
    seed      of arrivals, lengths and acceptance, which are the same for every system
    repeats   runs with different seeds, for confidence intervals
    """

    engine: EngineSettings = EngineSettings()
    latency: LatencySettings
    routes: dict[Name, RouteSettings] = Field(default_factory=dict)
    requests: RequestsSettings = RequestsSettings()
    arrivals: ArrivalsConfig
    systems: Annotated[dict[Name, SystemSettings], Field(min_length=1)]
    replicas: Annotated[int, Field(ge=1, le=100_000)] = 1
    router: Literal["round_robin", "least_work"] = "round_robin"
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    repeats: Annotated[int, Field(ge=1, le=1000)] = 1

    def _check_exits(self) -> None:
        """Raises ValueError for an exit that the model has not."""
        for name, each in self.routes.items():
            if max(each.draft_layer, each.check_layer or 0) >= self.engine.num_layers:
                raise ValueError(
                    f"routes.{name} has an exit beyond engine.num_layers={self.engine.num_layers}; lower it,"
                    " or raise num_layers"
                )

    def _check_choice(self, system: str, names: Sequence[str]) -> None:
        """Raises ValueError if a controller could not tell two of these routes apart."""
        by_route: dict[Route, str] = {}
        for name in names:
            if (other := by_route.setdefault(self.routes[name].route, name)) != name:
                raise ValueError(
                    f"systems.{system}.control would choose between routes {shown(other)} and {shown(name)},"
                    " which have the same tiers and sizes; name one of them in its `routes`"
                )

    @model_validator(mode="after")
    def _names_are_known(self) -> SimulationConfig:
        known = ", ".join(self.routes) or "none"
        named = [
            (f"requests.classes.{name}.acceptance", route)
            for name, each in self.requests.classes.items()
            for route in each.acceptance
        ]
        for name, system in self.systems.items():
            control = system.control
            named += [
                (f"systems.{name}.control", route)
                for route in (*((control.route,) if control.route else ()), *(control.routes or ()))
            ]
            if control.kind == "goodput" and not self.routes:
                raise ValueError(
                    f"systems.{name}.control.kind='goodput' has nothing to choose from; give routes"
                )
        for where, route in named:
            if route not in self.routes:
                raise ValueError(f"{where} names a route {shown(route)}; there are: {known}")
        for name, system in self.systems.items():
            if system.control.kind == "goodput":
                self._check_choice(name, system.control.routes or list(self.routes))
            if system.control.kind == "fixed" and system.control.route is not None:
                planned = self.routes[system.control.route]
                _check_plan(name, system.control, planned)
                if system.srtf == "service":
                    _check_oracle(name, system.control, planned, self.requests.trace)
        if self.arrivals.reference is not None and self.arrivals.reference not in self.systems:
            raise ValueError(
                f"arrivals.reference={shown(self.arrivals.reference)} is no system; there are:"
                f" {', '.join(self.systems)}"
            )
        # Where it is the profile's that counts, there are no stages of exits beyond it.
        if self.latency.path is None or "num_layers" in self.engine.model_fields_set:
            self._check_exits()
        if self.arrivals.kind == "recorded" and self.arrivals.times is None and self.requests.trace is None:
            raise ValueError("arrivals.kind='recorded' needs arrivals.times or requests.trace")
        return self


def _check_plan(name: str, control: ControlSettings, route: RouteSettings) -> None:
    for field, value, most in (
        ("num_drafts", control.num_drafts or 0, route.most_drafts),
        ("num_checks", control.num_checks, route.most_checks),
    ):
        if value > most:
            raise ValueError(
                f"systems.{name}.control.{field}={value} is more than route {control.route!r} allows"
                f" ({most}); lower it, or raise the route's"
            )


def _check_oracle(name: str, control: ControlSettings, route: RouteSettings, trace: str | None) -> None:
    """What rounds_left in round_parts_numba.py does not foresee."""
    drifts = any(each.drift for each in (route.acceptance, route.exit_acceptance) if each is not None)
    for is_there, what in (
        (route.check_layer is not None, f"check_layer={route.check_layer}"),
        (drifts, "a drift"),
        (trace is not None, f"requests.trace={shown(trace)}"),
    ):
        if is_there:
            raise ValueError(
                f"systems.{name}.srtf='service' does not know the rounds that are left by route"
                f" {shown(control.route)} with {what}; set srtf: tokens, or leave that out"
            )
