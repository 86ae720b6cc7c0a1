"""Costs of stages: what a fit finds in measured points, and which files of it are taken."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hispec.errors import ConfigError
from hispec.latency.fit import Point, StageFit, fit, fit_stage
from hispec.latency.model import LatencyModel, Linear, stage_names
from hispec.latency.profile_file import (
    LatencyProfile,
    StageCost,
    Subject,
    TimedPass,
    check,
    kept_path,
    load,
    save,
)
from hispec.measure.latency import Grid

COST = Linear(constant_ms=2.0, token_ms=0.1, knots=((1.0, 0.0), (3.0, 0.25)))
SHAPES = [
    (rows, q_len, context)
    for rows in (1, 2, 4, 16)
    for q_len in (1, 2, 4, 8, 16)
    for context in (64, 200, 512)
]


def points(
    cost: Callable[[int, int, int], float],
    shapes: list[tuple[int, int, int]] = SHAPES,
    noise: float = 0.0,
    stage: str = "verify/0",
) -> list[Point]:
    rng = np.random.default_rng(1)
    return [
        Point(
            stage,
            rows,
            rows * q_len,
            rows * context,
            cost(rows, rows * q_len, rows * context) * float(rng.lognormal(0.0, noise)),
        )
        for rows, q_len, context in shapes
    ]


# ---- the form ----


def test_a_cost_is_what_its_coefficients_say() -> None:
    cost = Linear(constant_ms=10.0, row_ms=0.5, token_ms=1.0, context_ms=0.01, pair_ms=0.001)
    assert cost(2, 3, 200) == pytest.approx(10.0 + 1.0 + 3.0 + 2.0 + 0.001 * 3 * 100)
    cost = replace(cost, knots=((2.0, 0.5), (4.0, 0.5), (5.0, 3.0)))
    for tokens, ms in ((1, 0.5), (3, 0.5), (4, 0.5), (4.5, 1.75), (5, 3.0), (10, 8.0)):
        assert cost(2, tokens, 200) == pytest.approx(10.0 + 1.0 + ms + 2.0 + 0.001 * tokens * 100)
    many = cost(np.array([2.0, 2.0, 0.0]), np.array([3.0, 10.0, 0.0]), np.array([200.0, 200.0, 0.0]))
    assert many == pytest.approx([cost(2, 3, 200), cost(2, 10, 200), 10.5])


@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf])
@pytest.mark.parametrize("name", ["constant_ms", "token_ms", "pair_ms"])
def test_costs_that_cannot_be_are_refused(name: str, value: float) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"{name}=.*must be a number >= 0; measure again: hispec profile JOB.yaml --latency",
    ):
        Linear(**{name: value})


@pytest.mark.parametrize(
    "knots",
    [
        ((1.0, 0.0), (1.0, 2.0)),
        ((2.0, 0.0), (1.0, 2.0)),
        ((1.0, 2.0), (2.0, 1.0)),
        ((-1.0, 0.0), (1.0, 1.0)),
        ((1.0, -0.5),),
        ((1.0, math.nan),),
        ((1.0, 0.0), (math.inf, 1.0)),
    ],
)
def test_knots_that_cannot_be_are_refused(knots: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(
        ConfigError, match=r"knots=.* of a stage's cost must (rise|be of numbers >= 0).*; measure again"
    ):
        Linear(knots=knots)


def test_a_profile_has_every_stage_that_plans_over_its_exits_run() -> None:
    assert stage_names([4, 1], [4], False) == [
        *(
            "plain",
            "draft/1",
            "draft/4",
            "fill/1",
            "fill/4",
            "check/0-4",
            "check/1-4",
            "verify/0",
            "verify/1",
            "verify/4",
        ),
        *("along/4", "shadow/1", "shadow/4", "lookup", "prefill", "swap", "round"),
    ]
    assert stage_names([], [], True) == [
        "plain",
        "draft_model",
        "fill_model",
        "verify/0",
        "lookup",
        "prefill",
        "swap",
        "round",
    ]
    with pytest.raises(ConfigError, match="no stage 'draft/3', only plain; measure again"):
        LatencyModel({"plain": Linear()})["draft/3"]


# ---- the fit ----


def test_the_fit_finds_the_coefficients_under_noise() -> None:
    true = Linear(constant_ms=25.0, row_ms=0.4, token_ms=1.2, context_ms=0.008, pair_ms=0.0018)
    found = fit_stage(points(true, noise=0.01))
    assert found.cost.knots == ()
    for name, value in list(vars(true).items())[:-1]:
        assert getattr(found.cost, name) == pytest.approx(value, rel=0.25, abs=0.02), name
    assert found.num_points == len(SHAPES) and found.r2 is not None and found.r2 > 0.99
    assert found.mean_error is not None and found.mean_error < 0.02 and not found.is_poor


def test_without_noise_the_fit_is_exact() -> None:
    true = Linear(constant_ms=7.0, row_ms=0.3, token_ms=0.02, context_ms=5e-5, pair_ms=1e-6)
    found = fit_stage(points(true))
    assert found.cost.knots == ()
    for name, value in list(vars(true).items())[:-1]:
        assert getattr(found.cost, name) == pytest.approx(value), name
    assert found.r2 == pytest.approx(1.0)


def test_knots_are_found_where_there_are_any_and_only_there() -> None:
    """Kernels that compute in tiles of four: five tokens cost as much as eight, and nine more."""
    lines = Linear(constant_ms=25.0, token_ms=1.4, context_ms=0.008)
    ladder = [(1, q_len, context) for q_len in (*range(1, 13), 16, 24, 32) for context in (64, 512)]

    def tiles(rows: int, tokens: int, context_tokens: int) -> float:
        return 2.0 + 0.5 * (-(-tokens // 4)) + 0.001 * context_tokens

    found = fit_stage(points(tiles, ladder, noise=0.01))
    assert found.cost.knots[-1][0] >= 8 and found.mean_error is not None and found.mean_error < 0.05
    for tokens in range(1, 13):
        assert found.cost(1, tokens, 100) == pytest.approx(tiles(1, tokens, 100), rel=0.03), tokens
    assert fit_stage(points(lines, ladder, noise=0.05)).cost.knots == ()
    assert fit_stage(points(lines, noise=0.05)).cost.knots == ()


@pytest.mark.parametrize("widest", [5, 8, 16])
def test_tiles_are_seen_in_the_few_widths_of_a_short_round(widest: int) -> None:
    """As a controller has them measured, of four drafts say."""
    grid = Grid.of(1, widest, 1024, is_cuda=False, is_static=False)

    def tiles(rows: int, tokens: int, context_tokens: int) -> float:
        return 2.0 + 1.0 * (-(-tokens // 4)) + 0.001 * context_tokens

    cost = fit_stage(points(tiles, list(grid.wide()), noise=0.01)).cost
    for tokens in range(1, min(widest, 8) + 1):
        assert cost(1, tokens, 100) == pytest.approx(tiles(1, tokens, 100), rel=0.05), tokens


def test_what_points_cannot_tell_apart_is_counted_once() -> None:
    narrow = [(rows, 1, context) for rows in (1, 2, 4, 8, 16) for context in (64, 512)]
    found = fit_stage(
        points(Linear(constant_ms=20.0, row_ms=0.5, token_ms=0.5, context_ms=0.01), narrow)
    ).cost
    assert (
        (found.row_ms, found.pair_ms) == (0.0, 0.0)
        and found.token_ms == pytest.approx(1.0)
        and found.constant_ms == pytest.approx(20.0)
    )
    same = fit_stage(points(Linear(constant_ms=3.0, token_ms=2.0), [(2, 4, 64)] * 6)).cost
    assert same == Linear(constant_ms=same.constant_ms) and same.constant_ms == pytest.approx(19.0)


def test_no_coefficient_is_negative() -> None:
    """Where more tokens take less time the best line without negative slopes is flat; the same for any random
    points."""
    falling = fit_stage(points(lambda rows, tokens, context_tokens: 50.0 - 0.1 * tokens)).cost
    assert falling.token_ms == falling.row_ms == falling.pair_ms == falling.context_ms == 0.0
    rng = np.random.default_rng(0)
    for _ in range(4):
        cost = fit_stage(
            points(lambda rows, tokens, context_tokens: float(rng.uniform(1.0, 50.0)), SHAPES[::4])
        ).cost
        assert min(cost.constant_ms, cost.row_ms, cost.token_ms, cost.context_ms, cost.pair_ms) >= 0.0


def test_small_costs_count_as_much_as_large_ones() -> None:
    """Errors are relative: a pass that is ten times as long does not outweigh ten."""
    cost = fit_stage([Point("x", 1, 1, 0, 1.0)] * 4 + [Point("x", 1, 1, 0, 100.0)]).cost
    assert 1.0 <= cost.constant_ms < 1.3


def test_held_out_points_show_what_is_not_linear() -> None:
    found = fit_stage(points(lambda rows, tokens, context_tokens: 1.0 + 20.0 * (tokens % 3), noise=0.02))
    assert found.r2 is not None and found.r2 < 0.5 and found.is_poor
    assert fit_stage(points(Linear(constant_ms=1.0), SHAPES[:5])).r2 is None, "too few to hold any out"


def test_each_stage_is_fitted_by_itself() -> None:
    found = fit([*points(Linear(constant_ms=2.0), stage="a"), *points(Linear(constant_ms=5.0), stage="b")])
    assert {name: each.cost.constant_ms for name, each in found.items()} == {
        "a": pytest.approx(2.0),
        "b": pytest.approx(5.0),
    }
    with pytest.raises(ConfigError, match="without a measured pass"):
        fit_stage([])


@pytest.mark.parametrize(
    "change",
    [{"ms": 0.0}, {"ms": math.nan}, {"ms": math.inf}, {"rows": 0}, {"tokens": -1}, {"context_tokens": -1}],
)
def test_points_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="a measured pass has at least one row"):
        Point(**{"stage": "x", "rows": 1, "tokens": 1, "context_tokens": 1, "ms": 1.0, **change})


# ---- the file ----


def subject(**changes: Any) -> Subject:
    values: dict[str, Any] = {
        "model": {"num_layers": 9, "hidden_size": 48, "dtype": "float32", "quantization": None},
        "layers": (2, 5),
        "exits": {"5": {"num_kv_layers": 1, "num_bytes": 1000}},
        "draft_model": {"num_layers": 3, "hidden_size": 48},
        "machine": {"cpu": "A", "cores": 2, "threads": 2, "gpu": None},
        "versions": {"python": "3.11.7", "torch": "2.13.0", "hispec": "0.1"},
    }
    return Subject(**values | changes)


def profile(of: Subject | None = None, **changes: Any) -> LatencyProfile:
    of = of or subject()
    cost = StageCost.of(
        StageFit(Linear(constant_ms=2.0, token_ms=0.1, knots=((1.0, 0.0), (3.0, 0.25))), 9, 0.98, 0.02)
    )
    values: dict[str, Any] = {
        "fingerprint": of.fingerprint,
        "subject": of,
        "date": "2026-01-02T03:04:05+00:00",
        "seconds": 12.5,
        "load": 0.1,
        "max_num_seqs": 16,
        "is_static": True,
        "row_buckets": (1, 2, 4, 8, 16),
        "stages": dict.fromkeys(of.stage_names, cost),
        "points": [TimedPass.of(Point("plain", 1, 1, 64, 3.5))],
    }
    return LatencyProfile(**values | changes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "profile.json"


def test_a_profile_comes_back_as_it_was_saved(path: Path) -> None:
    save(profile(), path)
    assert load(path) == profile() == load(path, subject(), 16)
    model = load(path).model()
    assert (
        model["check/2-5"] == Linear(constant_ms=2.0, token_ms=0.1, knots=((1.0, 0.0), (3.0, 0.25)))
        and model.is_static
    )
    assert [model.rows(num) for num in (1, 3, 9)] == [1, 4, 16]
    assert [each.name for each in path.parent.iterdir()] == ["profile.json"], "no half-written file is left"


def test_a_profile_that_cannot_be_written_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be written to .*file.* choose another place"):
        save(profile(), tmp_path / "file" / "profile.json")


def spoilt(path: Path, change: Callable[[Any], None]) -> str:
    """The error that a file gives after `change`."""
    save(profile(), path)
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError) as error:
        load(path, subject(), 16)
    assert str(path) in str(
        error.value
    ) and f"measure again: hispec profile JOB.yaml --latency {path}" in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (
            "stages.plain.token_ms",
            -1.0,
            r"stages\.plain\.token_ms: must be at least 0, got -1\.0",
        ),
        ("stages.plain.token_ms", math.nan, r"stages\.plain\.token_ms: .*got nan"),
        (
            "stages.plain.knots",
            [[2, 1], [1, 2]],
            r"stages\.plain\.knots: must rise: .* but \(2, 1\) is followed by \(1, 2\)",
        ),
        ("stages.plain.knots", [[1, "six"]], r"stages\.plain\.knots\.0\.1: .*got 'six'"),
        ("stages.plain.r2", 1.5, r"stages\.plain\.r2: .*got 1\.5"),
        ("stages.plain.color", 1, r"stages\.plain\.color: unknown setting"),
        ("points.0.ms", 0.0, r"points\.0\.ms: .*got 0\.0"),
        ("max_num_seqs", 0, r"max_num_seqs: .*got 0"),
        ("row_buckets", [4, 2], r"row_buckets=\[4, 2\] must rise"),
        ("seconds", math.inf, r"seconds: .*got inf"),
        ("subject.layers", [0, 2, 5], r"subject\.layers\.0: .*got 0"),
        ("subject.exits", {"7": {}}, "no exits at layers 7"),
        ("subject.model.hidden_size", 64, "fingerprint='.*' is not that of its subject"),
        ("format", "hispec trace", "format is 'hispec trace', expected 'hispec latency profile'"),
        ("version", 2, "version is 2, expected 3"),
    ],
)
def test_a_file_with_a_bad_value_is_refused_by_its_place(
    path: Path, place: str, value: Any, message: str
) -> None:
    def change(values: Any) -> None:
        *parents, last = [int(name) if name.isdigit() else name for name in place.split(".")]
        for name in parents:
            values = values[name]
        values[last] = value

    assert re.search(message, spoilt(path, change))


def test_a_file_that_lacks_something_is_refused(path: Path) -> None:
    assert "stages: check/2-5 missing" in spoilt(path, lambda values: values["stages"].pop("check/2-5"))
    assert "seconds: required, but not given" in spoilt(path, lambda values: values.pop("seconds"))


@pytest.mark.parametrize("content", ["", "{", "[1]", '"text"', "\x00\x01"])
def test_a_file_that_is_no_profile_is_refused(path: Path, content: str) -> None:
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(
        ConfigError, match=r"profile\.json.*(\n.*)?measure again: hispec profile JOB\.yaml --latency"
    ):
        load(path)


def test_a_truncated_or_missing_file_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: No such file.*measure again"):
        load(path)
    save(profile(), path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ConfigError, match=r"is damaged: .*measure again"):
        load(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": {"num_layers": 9, "hidden_size": 64, "dtype": "float32", "quantization": None}},
            "another model: hidden_size is 48 there and 64 here",
        ),
        (
            {"model": {"num_layers": 9, "hidden_size": 48, "dtype": "float32", "quantization": "int8"}},
            "quantization is None there and 'int8' here",
        ),
        ({"layers": (2, 3, 5)}, r"has exits at layers \[2, 5\], but not at \[3\]"),
        (
            {"exits": {"5": {"num_kv_layers": 2, "num_bytes": 1000}}},
            "other exits: at layer 5 num_kv_layers is 1 there and 2 here",
        ),
        (
            {"exits": {"2": {"num_kv_layers": 1}}},
            "other exits: at layer 2 num_kv_layers is None there and 1 here",
        ),
        (
            {"draft_model": {"num_layers": 4, "hidden_size": 48}},
            "another draft model: its num_layers is 3 there and 4 here",
        ),
        (
            {"machine": {"cpu": "B", "cores": 2, "threads": 2, "gpu": None}},
            "another machine: cpu is 'A' there and 'B' here",
        ),
        (
            {"machine": {"cpu": "A", "cores": 2, "threads": 1, "gpu": None}},
            "another machine: threads is 2 there and 1 here",
        ),
        (
            {"versions": {"python": "3.11.7", "torch": "2.14.0", "hispec": "0.1"}},
            "is stale: torch was '2.13.0' and is '2.14.0'",
        ),
        (
            {"versions": {"python": "3.11.7", "torch": "2.13.0", "hispec": "0.2"}},
            "is stale: hispec was '0.1' and is '0.2'",
        ),
    ],
)
def test_foreign_and_stale_profiles_are_refused_with_both_values(
    path: Path, changes: dict[str, Any], message: str
) -> None:
    save(profile(), path)
    with pytest.raises(ConfigError, match=message) as error:
        load(path, subject(**changes))
    assert str(path) in str(error.value) and "measure again: hispec profile JOB.yaml --latency" in str(
        error.value
    )


def test_a_profile_may_cover_more_than_is_asked_for(path: Path) -> None:
    check(
        profile(),
        subject(
            layers=(2,),
            exits={},
            draft_model=None,
            versions={"python": "3.12", "torch": "2.13.0", "hispec": "0.1"},
        ),
        4,
        path,
    )
    with pytest.raises(ConfigError, match=r"covers max_num_seqs=16 rows, but engine\.max_num_seqs is 17"):
        check(profile(), subject(), 17, path)


def test_a_kept_profile_is_found_by_model_and_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HISPEC_CACHE", str(tmp_path))
    mine = kept_path(subject())
    assert mine.parent == tmp_path / "latency" and mine == kept_path(subject(versions={}))
    others = {
        kept_path(subject(**change))
        for change in ({"model": {}}, {"layers": (5,)}, {"exits": {}}, {"draft_model": None}, {"machine": {}})
    }
    assert len(others | {mine}) == 6


def test_a_stage_that_costs_next_to_nothing_is_no_reason_to_warn() -> None:
    poor = StageCost.of(StageFit(Linear(constant_ms=2.0), 9, 0.2, 0.5))
    timed = [
        TimedPass(stage=name, rows=1, tokens=1, context_tokens=1, ms=ms)
        for name, ms in (("plain", 2.0), ("along/5", 0.01), ("verify/0", 2.0))
    ]
    whole = profile(stages={**profile().stages, "along/5": poor, "verify/0": poor}, points=timed)
    assert whole.poor_stages() == ["verify/0"]
