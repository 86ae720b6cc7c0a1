"""Latency profiles on disk: what was measured, of what, and where; refused where it does not fit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from ..config.base import Pair, Settings, Tuple
from ..errors import ConfigError, build
from ..utils.files import cache_dir, write_json
from .fit import Point, StageFit
from .model import LatencyModel, Linear, rising, stage_names

_FORMAT = "hispec latency profile"
_NOTHING_BESIDE = 0.02  # share of a round of plain decoding
_AGAIN = "measure again: hispec profile JOB.yaml --latency"
_OF_WORKERS = (
    " (of several workers each has its share of the cores: leave speculative.goodput.latency out, and the"
    " first of them measures, or measure within such a share, as with taskset)"
)

Count = Annotated[int, Field(ge=0)]
NotNegative = Annotated[float, Field(ge=0.0)]
Facts = dict[str, str | int | float | bool | None]


class Subject(Settings):
    """What a profile is of. Two subjects with the same facts have the same costs.

    model        sizes of the model and of a position's KV, dtype, quantization, attention backend, kernels
    layers       of the exits
    exits        of the trained ones among them, by layer: their sizes
    draft_model  as `model`; None = none was measured
    machine      cpu, cores, threads, gpu
    versions     of python, torch and hispec
    """

    model: Facts
    layers: Tuple[Annotated[int, Field(ge=1)]]
    exits: dict[str, Facts]
    draft_model: Facts | None = None
    machine: Facts
    versions: dict[str, str]

    @model_validator(mode="after")
    def _exits_at_layers(self) -> Subject:
        if stray := sorted(self.exits.keys() - set(map(str, self.layers))):
            raise ValueError(
                f"exits: there are no exits at layers {', '.join(stray)}, only at {list(self.layers)}"
            )
        return self

    @property
    def fingerprint(self) -> str:
        """A hash of the model's facts and of its exits'."""
        return _hash(self.model_dump(include={"model", "layers", "exits", "draft_model"}))

    @property
    def stage_names(self) -> list[str]:
        return stage_names(self.layers, [int(layer) for layer in self.exits], self.draft_model is not None)


class StageCost(Settings):
    """A stage: its coefficients (see Linear), how many points they were fitted to, and how well they predict
    held-out ones (see StageFit)."""

    constant_ms: NotNegative
    row_ms: NotNegative
    token_ms: NotNegative
    context_ms: NotNegative
    pair_ms: NotNegative
    knots: Annotated[Tuple[Pair[NotNegative]], AfterValidator(rising)]
    num_points: Annotated[int, Field(ge=1)]
    r2: Annotated[float, Field(le=1.0)] | None
    mean_error: NotNegative | None

    @staticmethod
    def of(fit: StageFit) -> StageCost:
        return StageCost(**vars(fit.cost), num_points=fit.num_points, r2=fit.r2, mean_error=fit.mean_error)

    @property
    def cost(self) -> Linear:
        return Linear(**self.model_dump(exclude={"num_points", "r2", "mean_error"}))

    @property
    def is_poor(self) -> bool:
        return StageFit(self.cost, self.num_points, self.r2, self.mean_error).is_poor


class TimedPass(Settings):
    """A Point in the file."""

    stage: str
    rows: Annotated[int, Field(ge=1)]
    tokens: Count
    context_tokens: Count
    ms: Annotated[float, Field(gt=0.0)]

    @staticmethod
    def of(point: Point) -> TimedPass:
        return TimedPass(**vars(point))


class LatencyProfile(Settings):
    """A latency profile as it stands in its file.

    fingerprint   of the subject: a file whose subject was edited is refused
    date          on which it was measured; seconds that it took; load of the machine just before, None = not
                  known
    max_num_seqs  rows at most
    is_static, row_buckets   as LatencyModel has them
    """

    format: Literal["hispec latency profile"] = "hispec latency profile"
    version: Literal[3] = 3
    fingerprint: str
    subject: Subject
    date: str
    seconds: NotNegative
    load: NotNegative | None
    max_num_seqs: Annotated[int, Field(ge=1)]
    is_static: bool
    row_buckets: Tuple[Annotated[int, Field(ge=1)]]
    stages: dict[str, StageCost]
    points: Tuple[TimedPass]

    @property
    def widest(self) -> int:
        """Positions of a row in the widest pass that was timed: costs of wider ones are a guess."""
        return max(
            (point.tokens // point.rows for point in self.points if point.stage == "verify/0"), default=0
        )

    @property
    def longest(self) -> int:
        """Positions that a row had before a pass at most: costs of longer contexts are a guess."""
        return max(
            (point.context_tokens // point.rows for point in self.points if point.stage == "plain"), default=0
        )

    @model_validator(mode="after")
    def _is_whole(self) -> LatencyProfile:
        if self.fingerprint != self.subject.fingerprint:
            raise ValueError(
                f"fingerprint={self.fingerprint!r} is not that of its subject, {self.subject.fingerprint!r}:"
                " one of them was changed"
            )
        if missing := [name for name in self.subject.stage_names if name not in self.stages]:
            raise ValueError(f"stages: {', '.join(missing)} missing")
        if list(self.row_buckets) != sorted(set(self.row_buckets)):
            raise ValueError(f"row_buckets={list(self.row_buckets)} must rise")
        return self

    def model(self) -> LatencyModel:
        """The costs of its stages."""
        return LatencyModel(
            {name: stage.cost for name, stage in self.stages.items()}, self.is_static, self.row_buckets
        )

    def poor_stages(self) -> list[str]:
        """Stages whose held-out points are predicted badly, without those that cost next to nothing beside a
        round."""
        longest = {
            stage: max(point.ms for point in self.points if point.stage == stage)
            for stage in {point.stage for point in self.points}
        }
        least = _NOTHING_BESIDE * self.stages["plain"].cost.least_ms
        return [
            name for name, stage in self.stages.items() if stage.is_poor and longest.get(name, 0.0) > least
        ]


def kept_path(subject: Subject) -> Path:
    """Where the profile of a model on a machine is kept: both are in the name, since machines may share the
    folder."""
    return cache_dir() / "latency" / f"{subject.fingerprint}-{_hash(subject.machine)}.json"


def save(profile: LatencyProfile, path: Path) -> None:
    """Writes the profile whole or not at all, and makes its folder. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, profile.model_dump(mode="json"))
    except OSError as error:
        raise ConfigError(
            f"the latency profile cannot be written to {path}: {error.strerror}; choose another place, or set"
            " HISPEC_CACHE"
        ) from None


def load(path: Path, expected: Subject | None = None, max_num_seqs: int = 1) -> LatencyProfile:
    """The profile at `path`.

    expected      what it must be of; None = whatever it says (as for a simulation)
    max_num_seqs  rows that it must cover
    Raises ConfigError for a file that is not there, damaged, foreign (of another model or machine) or stale
    (of other versions).
    """
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"the latency profile {path} cannot be read: {error.strerror}; {_AGAIN} {path}"
        ) from None
    except (ValueError, RecursionError) as error:
        # What is no JSON is not replaced: it could be anything.
        raise ConfigError(
            f"the latency profile {path} is damaged: {error}; remove it, and {_AGAIN} {path}"
        ) from None
    if isinstance(values, dict):
        for name, known in (("format", _FORMAT), ("version", 3)):
            if values.get(name) != known:
                raise ConfigError(
                    f"{path} is not a latency profile of this hispec: {name} is {values.get(name)!r},"
                    f" expected {known!r}; {_AGAIN} {path}"
                )
    try:
        profile = build(LatencyProfile, values, str(path))
    except ConfigError as error:
        raise ConfigError(f"{error}\nThe latency profile cannot be used; {_AGAIN} {path}") from None
    if expected is not None:
        check(profile, expected, max_num_seqs, path)
    return profile


def check(profile: LatencyProfile, expected: Subject, max_num_seqs: int, path: Path) -> None:
    """Raises ConfigError, with both values, if the profile is not of what is expected. It may cover more:
    exits, a draft model, rows."""
    found = profile.subject

    def refuse(what: str) -> None:
        raise ConfigError(f"the latency profile {path} {what}; {_AGAIN} {path}")

    def same(mine: Mapping[str, object], its: Mapping[str, object], what: str, where: str) -> None:
        if its and (unknown := sorted(mine.keys() - its.keys())):
            refuse(f"is stale: {where}it does not say {', '.join(unknown)}, as an older hispec's does not")
        for name in sorted(mine.keys() | its.keys()):
            if mine.get(name) != its.get(name):
                hint = _OF_WORKERS if its is found.machine and name in ("cores", "threads") else ""
                both = f"{its.get(name)!r} there and {mine.get(name)!r} here"
                refuse(f"is of {what}: {where}{name} is {both}{hint}")

    same(expected.model, found.model, "another model", "")
    if missing := sorted(set(expected.layers) - set(found.layers)):
        refuse(f"has exits at layers {list(found.layers)}, but not at {missing}")
    for layer, facts in expected.exits.items():
        same(facts, found.exits.get(layer, {}), "other exits", f"at layer {layer} ")
    untrained = {str(layer) for layer in expected.layers} - expected.exits.keys()
    if trained := sorted(untrained & found.exits.keys(), key=int):
        refuse(
            f"is of other exits: at layer {trained[0]} of a trained one there, of the model's own head here"
        )
    if expected.draft_model is not None:
        same(expected.draft_model, found.draft_model or {}, "another draft model", "its ")
    same(expected.machine, found.machine, "another machine", "")
    for name in ("torch", "hispec"):
        if found.versions.get(name) != expected.versions.get(name):
            refuse(
                f"is stale: {name} was {found.versions.get(name)!r} and is {expected.versions.get(name)!r}"
            )
    if profile.max_num_seqs < max_num_seqs:
        refuse(f"covers max_num_seqs={profile.max_num_seqs} rows, but engine.max_num_seqs is {max_num_seqs}")


def _hash(values: object) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
