"""Passes through the same layers, fitted together: what they say of each other, and where they do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from hispec.latency.fit import Point, StageFit, by_stage, fit, fit_stage
from hispec.latency.joint_fit import _fit_passes, _made_of, cold_stages, fit_profile
from hispec.latency.model import Linear, stage_names
from hispec.measure.latency import Grid

LAYERS = 30
EXITS = (4, 7, 15)
Shape = Callable[[int], float]


@pytest.fixture(scope="module", autouse=True)
def _each_stage_is_fitted_once() -> Iterator[None]:
    """Tests compare fits of the same points."""
    known: dict[tuple[Point, ...], StageFit] = {}

    def fit_once(points: Sequence[Point]) -> StageFit:
        key = tuple(points)
        if key not in known:
            known[key] = fit_stage(points)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        for module in ("fit", "joint_fit"):
            patch.setattr(f"hispec.latency.{module}.fit_stage", fit_once)
        yield


def flat_then_rising(tokens: int) -> float:
    """Of a CPU: up to eight tokens wait for the same weights."""
    return 1.0 + 0.012 * tokens if tokens <= 8 else 0.6 + 0.062 * tokens


def lines(tokens: int) -> float:
    return 0.8 + 0.1 * tokens


def costs(shape: Shape) -> Callable[[str, int, int], float]:
    """Milliseconds of a stage over tokens with context tokens: by its layers, and by what is read."""

    def ms(stage: str, tokens: int, context_tokens: int) -> float:
        kind, _, where = stage.partition("/")
        low, _, high = where.partition("-")
        layers, head = {
            "plain": lambda: (LAYERS, 1.6),
            "verify": lambda: (LAYERS - int(low), 1.6),
            "check": lambda: (int(high) - int(low), 0.3) if int(low) else (0.7 * int(high), 0.2),
            "first": lambda: (int(low), 0.3),
            "draft": lambda: (0.7 * int(low), 0.2),
            "fill": lambda: (0.7 * int(low), 0.0),
            "shadow": lambda: (0, 0.5),
            "along": lambda: (0, 0.1),
        }.get(kind, lambda: (0, 0.2))()
        return (0.2 * layers + head) * shape(tokens) + 1e-5 * layers * context_tokens

    return ms


def measured(ms: Callable[[str, int, int], float], noise: float = 0.0, rows: int = 1) -> list[Point]:
    """All passes of a profile, as `measure_latency` times them."""
    rng, grid, found = np.random.default_rng(3), Grid.of(rows, 32, 2048, is_cuda=False, is_static=False), []
    for stage in (*stage_names(EXITS, EXITS, False), *(f"first/{layer}" for layer in EXITS)):
        is_narrow = stage.startswith(("plain", "draft", "first", "lookup"))
        shapes = [(many, 1, context) for many, context in grid.narrow()] if is_narrow else list(grid.wide())
        for many, q_len, context in shapes if stage not in ("prefill", "swap", "round") else shapes[:1]:
            value = ms(stage, many * q_len, many * context) * float(rng.lognormal(0.0, noise))
            found.append(Point(stage, many, many * q_len, many * context, value))
    return found


@pytest.mark.parametrize(("shape", "rows"), [(flat_then_rising, 1), (lines, 1)])
def test_without_noise_it_is_what_was_measured(shape: Shape, rows: int) -> None:
    points = measured(costs(shape), rows=rows)
    found = fit_profile(points, LAYERS)
    assert list(found) == list(by_stage(points))
    made = {stage: made for stage in found if (made := _made_of(stage, LAYERS))}
    together = _fit_passes({stage: each for stage, each in by_stage(points).items() if stage in made}, made)
    assert list(together) == list(made) and len(made) == 19
    for point in points:
        for fits in (found, together):
            if point.stage in fits:
                cost = fits[point.stage].cost(point.rows, point.tokens, point.context_tokens)
                assert cost == pytest.approx(point.ms, rel=0.03), point


def test_under_noise_stages_say_something_of_each_other() -> None:
    """At few tokens, where rounds run, each stage alone is off by up to a tenth."""
    ms = costs(flat_then_rising)
    points = measured(ms, noise=0.08)
    stages = ["plain", "verify/0", "verify/4", "verify/7", "verify/15", "check/0-15", "check/4-15"]
    worst = []
    for fits in (fit_profile(points, LAYERS), fit(points)):
        missed = [
            abs(float(fits[stage].cost(1, tokens, 200)) / ms(stage, tokens, 200) - 1.0)
            for stage in stages
            for tokens in ((1,) if stage == "plain" else (1, 2, 3, 5))
        ]
        worst.append(max(missed))
    assert worst[0] < 0.07 and worst[0] < worst[1]


@pytest.mark.parametrize("layers", [1.0, 3.0], ids=["fitted together", "one by one"])
def test_plain_decoding_is_a_verify_of_the_whole_model(layers: float) -> None:
    """However they are fitted: on one machine the two, each by itself, were a fifth apart."""
    of_layers = costs(flat_then_rising)

    def ms(stage: str, tokens: int, context_tokens: int) -> float:
        other = {"verify/4": layers, "check/4-7": 1 / layers, "verify/15": 1 / layers}.get(stage, 1.0)
        return other * of_layers(stage, tokens, context_tokens)

    points = measured(ms, noise=0.08)
    found = fit_profile(points, LAYERS)
    assert (found["verify/4"] == fit(points)["verify/4"]) == (layers > 1.0)
    assert found["verify/0"] == found["plain"] and found["plain"].num_points > 6


def test_stages_that_do_not_share_what_they_pass_through_are_fitted_one_by_one() -> None:
    """Of a machine on which a verify's layers cost what no other's do."""
    of_layers = costs(lines)

    def ms(stage: str, tokens: int, context_tokens: int) -> float:
        other = {"verify/4": 3.0, "check/4-7": 0.3, "verify/15": 0.4}.get(stage, 1.0)
        return other * of_layers(stage, tokens, context_tokens)

    points = measured(ms)
    found, alone = fit_profile(points, LAYERS), fit(points)
    whole = ("plain", "verify/0")
    assert all(found[stage] == alone[stage] for stage in found if stage not in whole)
    for tokens in (1, 8, 32):
        assert found["plain"].cost(1, tokens, 200) == pytest.approx(ms("plain", tokens, 200), rel=0.03)


def test_what_is_no_pass_through_layers_is_fitted_by_itself() -> None:
    points = measured(costs(flat_then_rising), noise=0.05)
    alone, found = fit(points), fit_profile(points, LAYERS)
    kinds = ("plain", "verify", "check", "first", "draft", "fill")
    others = [stage for stage in found if stage.partition("/")[0] not in kinds]
    assert len(others) == 10 and all(found[stage] == alone[stage] for stage in others)
    assert any(found[stage] != alone[stage] for stage in found)


def test_stages_that_were_not_timed_as_passes_alone_are_fitted_one_by_one() -> None:
    """As on a GPU, where a stage is what its graph does."""
    points = [each for each in measured(costs(flat_then_rising), noise=0.08) if "first" not in each.stage]
    assert fit_profile(points, LAYERS) == fit(points)


def test_too_few_passes_are_fitted_all_the_same() -> None:
    points = [Point(stage, 1, 1, 64, 10.0) for stage in ("plain", "verify/0", "first/4")]
    found = fit_profile(points, LAYERS)
    assert list(found) == ["plain", "verify/0", "first/4"]
    assert all(each.cost(1, 1, 64) == pytest.approx(10.0) for each in found.values())
    assert fit_profile([], LAYERS) == {}


def test_what_a_first_pass_takes_more_is_told_from_it_and_those_that_follow() -> None:
    fits = fit_profile(measured(costs(lines)), LAYERS)
    found = cold_stages(fits, EXITS)
    assert list(found) == ["cold/4", "cold/7", "cold/15"]
    for layer in EXITS:
        more = (0.2 * 0.3 * layer + 0.1) * lines(1)
        cost = found[f"cold/{layer}"].cost
        assert cost == Linear(cost.constant_ms) and cost.constant_ms == pytest.approx(more, rel=0.02)
    assert cold_stages(fit([Point("draft/4", 1, 1, 64, 1.0)]), [4]) == {}
    quick = {name: StageFit(Linear(ms), 2, None, None) for name, ms in (("first/4", 1.0), ("draft/4", 1.5))}
    assert cold_stages(quick, [4])["cold/4"].cost == Linear()
