"""What `hispec simulate` refuses, and what its errors name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hispec.errors import ConfigError, build
from hispec.latency.model import stage_names
from hispec.latency.profile_file import LatencyProfile, Subject, save
from hispec.simulate.arrivals import ArrivalsConfig, repeat_times
from hispec.simulate.config import (
    AcceptanceSettings,
    PredictorSettings,
    RequestsSettings,
    SimulationConfig,
)
from hispec.simulate.distributions import Distribution
from hispec.simulate.metrics import half_width
from hispec.simulate.predictors import KnownLengths, predicted_lengths
from hispec.simulate.run import Experiment, load_simulation, simulate
from tests.helpers.simulations import STAGES, experiment, share

NAN = math.nan
CONFIGS = Path(__file__).parents[2] / "configs"
MODEL = {"model": {"kind": "model", "most_drafts": 4, "acceptance": share(0.5)}}
DRIFTING = {"model": MODEL["model"] | {"acceptance": share(0.5) | {"drift": [[0.0, 1.0], [9.0, 0.5]]}}}
CHECKED = {"model": MODEL["model"] | {"check_layer": 8, "verify_acceptance": share(0.5)}}


def fixed(**changes: Any) -> dict[str, Any]:
    return {"control": {"kind": "fixed", "route": "model", "num_drafts": 2} | changes}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"arrivals": {"rates": [-1.0]}}, "at least 1e-06"),
    ({"arrivals": {"rates": [1e-320]}}, "at least 1e-06"),  # numpy's own draws fail for numbers like these
    ({"arrivals": {"kind": "gamma", "rates": [1.0], "cv": 1e-200}}, "cv: must be at least 0.001"),
    ({"arrivals": {"kind": "bursty", "rates": [1.0], "burst_s": 1e-9}}, "burst_s: must be at least 0.001"),
    ({"arrivals": {"rates": [NAN]}}, "finite number"),
    ({"arrivals": {"rates": []}}, "at least 1"),
    ({"arrivals": {}}, "needs one list of loads"),
    ({"arrivals": {"rates": [1.0], "utilisations": [0.5]}}, "needs one list of loads"),
    ({"arrivals": {"utilisations": [1.0]}}, "below 1"),
    ({"arrivals": {"rates": [1.0], "cv": 2.0}}, "means nothing for kind='poisson'"),
    ({"arrivals": {"kind": "recorded"}}, "needs arrivals.times or requests.trace"),
    ({"arrivals": {"kind": "recorded", "times": [2.0, 1.0]}}, "must ascend"),
    ({"arrivals": {"kind": "closed", "clients": [0]}}, "at least 1"),
    ({"arrivals": {"utilisations": [0.5], "reference": "other"}}, "'other' is no system; there are: only"),
    ({"arrivals": {"rates": [1.0], "reference": "only"}}, "reference='only' means nothing for rates"),
    ({"requests": {"warm_up": 1.0}}, "below 1"),
    ({"requests": {"num": 0}}, "at least 1"),
    ({"requests": {"output_tokens": {"kind": "exponential"}}}, "needs mean"),
    ({"requests": {"output_tokens": {"kind": "exponential", "mean": -3.0}}}, "at least 1e-06"),
    ({"requests": {"output_tokens": {"kind": "exponential", "mean": NAN}}}, "finite number"),
    ({"requests": {"output_tokens": {"value": 3.0, "cv": 2.0}}}, "cv=2.0 means nothing for kind='constant'"),
    ({"requests": {"output_tokens": {"kind": "uniform", "low": 5, "high": 2}}}, "low=5.0 is above high=2.0"),
    ({"requests": {"trace": "t.jsonl", "max_tokens": 5}}, "says all lengths"),
    (
        {"requests": {"classes": {"a": {"acceptance": {"nobody": {"value": 0.5}}}}}},
        "'nobody'; there are: none",
    ),
    ({"latency": {}}, "latency.stages or latency.path"),
    (
        {
            "routes": MODEL,
            "systems": {"only": {"control": {"kind": "goodput", "routes": ["model", "model"]}}},
        },
        "routes names 'model' more than once",
    ),
    (
        {"latency": {"stages": {"plain": {"knots": [[2, 3], [1, 5]]}}}},
        "plain.knots: must rise: more tokens cost no less, but (2, 3) is followed by (1, 5)",
    ),
    ({"latency": {"stages": {"plain": {"constant_ms": -1.0}}}}, "at least 0"),
    ({"latency": {"stages": {"plain": {"constant_ms": NAN}}}}, "finite number"),
    (
        {"latency": {"stages": {"plain": {"knots": [[1, 0.0]]}}}},
        "stages.plain costs nothing for one token; give it constant_ms, row_ms or a first knot above 0",
    ),
    (
        {"latency": {"stages": {"plain": {"knots": [[8, 0.0], [16, 5.0]]}}}},
        "stages.plain costs nothing for one token; give it",
    ),
    (
        {"latency": {"stages": {"plain": {"knots": [[1, 0.0]], "token_ms": 5.0}}}},
        "stages.plain costs nothing for one token; give it",
    ),
    (
        {"latency": {"stages": STAGES | {"verify/0": {}}}},
        "stages.verify/0 costs nothing for one token; give it constant_ms, row_ms or token_ms above 0",
    ),
    ({"latency": {"stages": STAGES, "row_buckets": [4, 2]}}, "must ascend"),
    (
        {"latency": {"stages": STAGES, "row_buckets": [2, 4]}},
        "row_buckets=[2, 4] mean nothing where is_static",
    ),
    ({"latency": {"stages": {"verify_0": {}}}}, "stages: 'verify_0' is no stage (did you mean 'verify/0'?)"),
    ({"latency": {"stages": {"check/8-4": {}}}}, "'check/8-4' is no stage (did you mean 'check/"),
    ({"latency": {"stages": {"lookups": {}}}}, "did you mean 'lookup'?"),
    ({"latency": {"stages": {"x" + "9" * 9999: {}}}}, "; there are plain, prefill"),
    ({"routes": {"r": {"kind": "exit", "acceptance": share(0.5)}}}, "give the layer"),
    ({"routes": {"r": {"kind": "ngram", "draft_layer": 4, "acceptance": share(0.5)}}}, "must be 0"),
    ({"routes": {"r": {"kind": "ngram", "most_checks": 2, "acceptance": share(0.5)}}}, "needs check_layer"),
    (
        {"routes": {"r": {"kind": "ngram", "check_layer": 8, "acceptance": share(0.5)}}},
        "needs verify_acceptance",
    ),
    (
        {"routes": {"r": {"kind": "model", "match": {"value": 0.5}, "acceptance": share(0.5)}}},
        "needs kind='ngram' or 'hybrid'",
    ),
    (
        {"routes": {"r": {"kind": "exit", "draft_layer": 40, "acceptance": share(0.5)}}},
        "engine.num_layers=32",
    ),
    (
        {"routes": {"r": {"kind": "ngram", "acceptance": share(0.5) | {"drift": [[2.0, 1.0], [1.0, 1.0]]}}}},
        "must ascend",
    ),
    ({"routes": {"r": {"kind": "ngram", "acceptance": share(0.5) | {"drift": [[2.0]]}}}}, "must be pairs"),
    (
        {
            "routes": {
                "r": {"kind": "ngram", "acceptance": share(0.5) | {"drift": [[n, 1.0] for n in range(65)]}}
            }
        },
        "routes.r.acceptance: drift has 65 points, 64 at most",
    ),
    (
        {"routes": {"r": {"kind": "ngram", "acceptance": share(1.5)}}},
        "routes.r.acceptance.share: a share is at most 1",
    ),
    (
        {
            "routes": {
                "r": {
                    "kind": "ngram",
                    "acceptance": share(0.5),
                    "match": {"kind": "exponential", "mean": 0.5},
                }
            }
        },
        "routes.r.match: a share is at most 1",
    ),
    (
        {"requests": {"classes": {"a": {"acceptance": {"m": {"kind": "empirical", "values": [0.5, 2.0]}}}}}},
        "requests.classes.a.acceptance.m: a share is at most 1, but kind='empirical' may draw up to 2",
    ),
    ({"systems": {}}, "at least 1"),
    ({"systems": {"a": {"scheduling": {"policy": "lifo"}}}}, "'fcfs', 'sjf', 'mlfq' or 'laps'"),
    (
        {"systems": {"a": {"scheduling": {"policy": "fcfs"}, "srtf": "service"}}},
        "takes the place of scheduling.policy",
    ),
    ({"systems": {"a": fixed()}}, "names a route 'model'; there are: none"),
    ({"routes": MODEL, "systems": {"a": fixed(num_drafts=5)}}, "more than route 'model' allows (4)"),
    ({"routes": MODEL, "systems": {"a": fixed(num_checks=2)}}, "more than route 'model' allows (1)"),
    ({"systems": {"a": {"control": {"kind": "fixed"}}}}, "needs route and num_drafts"),
    ({"systems": {"a": {"control": {"kind": "plain", "num_drafts": 2}}}}, "means nothing for kind='plain'"),
    ({"systems": {"a": {"control": {"kind": "goodput"}}}}, "nothing to choose from"),
    (
        {"routes": MODEL | {"other": DRIFTING["model"]}, "systems": {"a": {"control": {"kind": "goodput"}}}},
        "systems.a.control would choose between routes 'model' and 'other', which have the same tiers",
    ),
    (
        {"routes": MODEL, "systems": {"a": {"control": {"kind": "goodput", "goodput": {"margin": 0.5}}}}},
        "at least 1",
    ),
    (
        {"routes": MODEL, "systems": {"a": {"control": {"kind": "goodput"}, "srtf": "service"}}},
        "only if the plan is fixed",
    ),
    (
        {"systems": {"a": {"scheduling": {"max_slowdown": 5.0}, "srtf": "tokens"}}},
        "max_slowdown=5.0 means nothing for srtf='tokens'",
    ),
    *(
        (
            {"routes": MODEL, "systems": {"a": {"control": {"kind": "goodput", "goodput": {name: value}}}}},
            f"goodput.{name}=",
        )
        for name, value in (("drafters", ["ngram"]), ("layers", [4]), ("latency", "profile.json"))
    ),
    (
        {"routes": DRIFTING, "systems": {"a": fixed() | {"srtf": "service"}}},
        "systems.a.srtf='service' does not know the rounds that are left by route 'model' with a drift",
    ),
    ({"routes": CHECKED, "systems": {"a": fixed() | {"srtf": "service"}}}, "with check_layer=8"),
    (
        {"routes": MODEL, "requests": {"trace": "t.jsonl"}, "systems": {"a": fixed() | {"srtf": "service"}}},
        "with requests.trace='t.jsonl'",
    ),
    ({"systems": {"a": {"predictor": {"kind": "noisy"}}}}, "sigma belongs to kind='noisy'"),
    ({"replicas": 0}, "at least 1"),
    ({"systms": {}}, "did you mean 'systems'?"),
]


@pytest.mark.parametrize(
    ("changes", "expected"),
    REFUSED,
    ids=[f"{'-'.join(changes)}-{at}" for at, (changes, _) in enumerate(REFUSED)],
)
def test_impossible_experiments_are_refused(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        experiment(**changes)
    assert expected in str(caught.value)
    assert (
        next(iter(changes)) in str(caught.value)
        or "systems" in str(caught.value)
        or "arrivals" in str(caught.value)
    )


def test_a_stage_that_a_route_runs_must_be_there() -> None:
    stages = {name: cost for name, cost in STAGES.items() if name != "fill_model"}
    with pytest.raises(ConfigError, match="no stage 'fill_model'"):
        Experiment(experiment(latency={"stages": stages}, routes=MODEL))


def test_a_request_that_never_fits_is_refused() -> None:
    config = experiment(engine={"num_kv_tokens": 64}, requests={"num": 10, "output_tokens": {"value": 100}})
    with pytest.raises(ConfigError, match=r"engine\.num_kv_tokens=64 is less than one request may need"):
        Experiment(config).run(config.systems["only"], 1.0, 1.0, 0, lambda _: None)


def test_missing_and_foreign_files_are_refused(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    for latency in (tmp_path / "none.json", bad):
        with pytest.raises(ConfigError, match=latency.name):
            Experiment(experiment(latency={"path": str(latency)}))
    for trace in (tmp_path / "none.jsonl", bad):
        with pytest.raises(ConfigError, match=trace.name):
            Experiment(experiment(requests={"trace": str(trace)}))


def profile_of(path: Path, num_layers: int, layers: tuple[int, ...] = ()) -> str:
    """The file of a profile of 4 rows."""
    subject = Subject(
        model={"num_layers": num_layers}, layers=layers, exits={}, machine={"cpu": "any"}, versions={}
    )
    cost = {
        "constant_ms": 1.0,
        "row_ms": 0.0,
        "token_ms": 1.0,
        "context_ms": 0.0,
        "pair_ms": 0.0,
        "knots": [],
    }
    stage = cost | {"num_points": 1, "r2": None, "mean_error": None}
    values = {
        "fingerprint": subject.fingerprint,
        "subject": subject,
        "date": "2025-01-01",
        "seconds": 1.0,
        "load": None,
        "max_num_seqs": 4,
        "is_static": False,
        "row_buckets": [],
        "stages": dict.fromkeys(subject.stage_names, stage),
        "points": [],
    }
    save(build(LatencyProfile, values), path)
    return str(path)


def test_the_model_has_the_layers_of_its_profile(tmp_path: Path) -> None:
    path = profile_of(tmp_path / "profile.json", 80, (40,))
    deep = {"deep": {"kind": "exit", "draft_layer": 40, "most_drafts": 4, "acceptance": share(0.5)}}
    systems = {"only": {"control": {"kind": "fixed", "route": "deep", "num_drafts": 2}}}
    config = experiment(latency={"path": path}, routes=deep, systems=systems)
    assert Experiment(config).config.engine.num_layers == 80
    requests = {"num": 5, "output_tokens": {"value": 5}}
    result = simulate(
        config.model_copy(update={"requests": build(RequestsSettings, requests)}), progress=False
    )
    assert result["config"]["engine"]["num_layers"] == 80
    engine = {"max_num_seqs": 4, "num_layers": 80}
    assert Experiment(experiment(latency={"path": path}, engine=engine)).config.engine.num_layers == 80


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"engine": {"max_num_seqs": 5}},
            "covers max_num_seqs=4 rows, but engine.max_num_seqs is 5; measure",
        ),
        (
            {"engine": {"max_num_seqs": 4, "num_layers": 32}},
            "engine.num_layers=32 is not that of the latency profile PATH, which is of a model of 8 layers;",
        ),
        (
            {"routes": {"deep": {"kind": "exit", "draft_layer": 8, "acceptance": share(0.5)}}},
            "the latency profile has no stage 'verify/8', only",
        ),
    ],
    ids=["rows", "layers", "exit"],
)
def test_an_experiment_that_does_not_fit_its_profile_is_refused(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    path = profile_of(tmp_path / "profile.json", 8)
    with pytest.raises(ConfigError) as caught:
        Experiment(experiment(latency={"path": path}, **changes))
    assert expected.replace("PATH", path) in str(caught.value)


@pytest.mark.parametrize("name", ["simulate_smartspec", "simulate_laps", "simulate_scaling"])
def test_the_experiments_that_come_with_hispec_are_valid(name: str) -> None:
    config = load_simulation(CONFIGS / f"{name}.yaml", ["requests.num=10"])
    Experiment(config)
    assert config.requests.num == 10


@pytest.mark.parametrize(
    ("values", "mean", "cv"),
    [
        ({"value": 7.0}, 7.0, 0.0),
        ({"kind": "uniform", "low": 2.0, "high": 4.0}, 3.0, 0.1925),
        ({"kind": "exponential", "mean": 5.0}, 5.0, 1.0),
        ({"kind": "lognormal", "mean": 5.0, "cv": 0.5}, 5.0, 0.5),
        ({"kind": "beta", "mean": 0.6, "concentration": 3.0}, 0.6, math.sqrt(0.24 / 4) / 0.6),
        ({"kind": "empirical", "values": [1.0, 3.0]}, 2.0, 0.5),
    ],
    ids=lambda value: value.get("kind", "constant") if isinstance(value, dict) else "",
)
def test_distributions_have_the_mean_and_spread_that_they_say(
    values: dict[str, Any], mean: float, cv: float
) -> None:
    drawn = build(Distribution, values).sample(100_000, np.random.default_rng(0))
    assert drawn.mean() == pytest.approx(mean, rel=0.02)
    assert drawn.std() / drawn.mean() == pytest.approx(cv, rel=0.03, abs=1e-9)


@pytest.mark.parametrize(
    ("values", "cv"),
    [({}, 1.0), ({"kind": "gamma", "cv": 3.0}, 3.0), ({"kind": "bursty", "burst_factor": 20.0}, None)],
)
def test_arrivals_come_at_their_rate(values: dict[str, Any], cv: float | None) -> None:
    times = build(ArrivalsConfig, values | {"rates": [4.0]}).sample(200_000, 4.0, np.random.default_rng(0))
    gaps = np.diff(times)
    assert (gaps >= 0).all()
    assert len(times) / times[-1] == pytest.approx(4.0, rel=0.05)
    spread = gaps.std() / gaps.mean()
    assert spread > 1.3 if cv is None else spread == pytest.approx(cv, rel=0.05)


def test_recorded_times_are_run_through_again() -> None:
    times = repeat_times(np.array([5.0, 6.0, 8.0]), 7, 2.0)
    assert times.tolist() == [0.0, 0.5, 1.5, 2.25, 2.75, 3.75, 4.5]


def test_predictions_are_as_wrong_as_they_are_told_to_be() -> None:
    lengths = np.full(50_000, 100)
    assert predicted_lengths(PredictorSettings(), lengths, 0) is None
    exact = predicted_lengths(PredictorSettings(kind="exact"), lengths, 0)
    noisy = predicted_lengths(PredictorSettings(kind="noisy", sigma=0.5), lengths, 0)
    assert exact is not None and noisy is not None
    assert (exact == 100).all()
    assert np.log(noisy / 100).std() == pytest.approx(0.5, rel=0.02)
    known = KnownLengths(np.array([10.0, 50.0]))
    known.expect(1)
    predict = known.predictor(range(3), 60)
    assert [predict(tokens) for tokens in (0, 40, 49, 50, 58, 60)] == [50.0, 50.0, 50.0, 60.0, 60.0, 60.0]
    assert isinstance(experiment(), SimulationConfig)


def test_an_oracle_takes_every_experiment_that_it_foresees() -> None:
    """Plain decoding repeats no recorded round, and a bound that is none is no bound."""
    plain = {"srtf": "service", "scheduling": {"max_slowdown": None}}
    experiment(routes=DRIFTING | {"checked": CHECKED["model"]}, requests={"trace": "t"}, systems={"a": plain})
    experiment(routes=MODEL, systems={"a": fixed() | {"srtf": "service"}})


def test_all_stages_of_a_latency_model_may_be_given() -> None:
    names = [*stage_names([4, 8, 15], [4, 8], has_draft_model=True), "cold/4", "cold/15"]
    settings = experiment(latency={"stages": {name: {"constant_ms": 1.0} for name in names}}).latency
    assert settings.stages is not None and list(settings.stages) == names


@pytest.mark.parametrize(
    ("values", "largest"),
    [
        ({"value": 1.0}, 1.0),
        ({"kind": "uniform", "low": 0.5, "high": 2.0, "most": 1.0}, 1.0),
        ({"kind": "beta", "mean": 0.5, "concentration": 1.0}, 1.0),
        ({"kind": "lognormal", "mean": 0.5, "cv": 1.0, "most": 0.9}, 0.9),
        ({"kind": "empirical", "values": [0.25, 0.5]}, 0.5),
    ],
)
def test_shares_are_what_was_asked_for(values: dict[str, Any], largest: float) -> None:
    acceptance = build(AcceptanceSettings, {"share": values})
    drawn = acceptance.share.shares(np.arange(2000), np.random.default_rng(0))
    assert (drawn >= 0.0).all() and largest * 0.9 < drawn.max() <= acceptance.share.largest == largest


def test_uniform_tokens_take_both_bounds() -> None:
    drawn = build(Distribution, {"kind": "uniform", "low": 3, "high": 6}).tokens(
        40_000, np.random.default_rng(0)
    )
    values, counts = np.unique(drawn, return_counts=True)
    assert values.tolist() == [3, 4, 5, 6] and counts == pytest.approx(10_000, rel=0.05)
    clipped = build(Distribution, {"kind": "uniform", "low": 0, "high": 6, "most": 4})
    assert set(clipped.tokens(1000, np.random.default_rng(0)).tolist()) == {1, 2, 3, 4}
    between = build(Distribution, {"kind": "uniform", "low": 2.5, "high": 3.5})
    assert set(between.tokens(1000, np.random.default_rng(0)).tolist()) == {3, 4}


@pytest.mark.parametrize(("num", "t"), [(2, 12.71), (16, 2.131), (17, 2.120), (31, 2.042), (61, 2.000)])
def test_confidence_intervals_are_students(num: int, t: float) -> None:
    means = np.arange(float(num))
    expected = t * means.std(ddof=1) / math.sqrt(num)
    assert half_width(means.tolist()) == pytest.approx(expected, rel=1e-3)
