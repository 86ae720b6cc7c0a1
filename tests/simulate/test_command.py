"""`hispec simulate` from file to figures, and requests that an engine recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hispec.cli import main
from hispec.errors import ConfigError
from hispec.simulate import metrics
from hispec.simulate.replayed_trace import read_recording
from hispec.simulate.row_state import T_KEPT, T_ROUNDS
from hispec.simulate.run import Experiment
from hispec.simulate.workload import DRAFT, make_workload
from tests.helpers.simulations import experiment, latencies, run, share

YAML = """
engine: {max_num_seqs: 2}
latency:
  stages:
    plain: &step {constant_ms: 10}
    verify/0: *step
    prefill: {token_ms: 0.1}
routes:
  lookup:
    kind: ngram
    most_drafts: 3
    match: {value: 0.5}
    acceptance: {share: {kind: beta, mean: 0.6, concentration: 4}}
requests: {num: 60, prompt_tokens: {value: 20}, output_tokens: {kind: exponential, mean: 20}}
arrivals: {rates: [2, 6]}
systems:
  plain: {}
  goodput: {control: {kind: goodput}}
  laps: {scheduling: {policy: laps}, control: {kind: fixed, route: lookup, num_drafts: 3}}
repeats: 2
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "experiment.yaml"
    path.write_text(YAML)
    return path


def test_the_json_has_every_policy_at_every_load(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, plots = tmp_path / "out" / "result.json", tmp_path / "plots"
    assert (
        main(
            [
                "simulate",
                str(config),
                "--json",
                str(target),
                "--plots",
                str(plots),
                "--no-progress",
                "--set",
                "requests.num=50",
            ]
        )
        == 0
    )
    result = json.loads(target.read_text())
    assert [load["load"] for load in result["loads"]] == [2.0, 6.0]
    assert {"config", "environment", "seconds"} <= result.keys()
    assert result["config"]["requests"]["num"] == 50
    for load in result["loads"]:
        assert list(load["policies"]) == ["plain", "goodput", "laps"]
        for figures in load["policies"].values():
            assert 0.0 < figures["p50_s"] <= figures["p90_s"] <= figures["p99_s"] <= figures["max_s"]
            assert figures["mean_error_s"] > 0.0 and figures["num_counted"] == 2 * 45
            assert 0.0 < figures["utilisation"] <= 1.0
            assert sum(figures["plans"].values()) == pytest.approx(1.0)
    assert {path.name for path in plots.iterdir()} == {"mean_s.png", "p99_s.png", "goodput_tokens_per_s.png"}
    printed = capsys.readouterr().out
    assert "rates 2" in printed and "laps" in printed and "± 95 %" in printed


@pytest.mark.parametrize("flag", ["--json", "--plots"])
def test_what_cannot_be_written_is_found_before_anything_is_run(
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flag: str,
) -> None:
    monkeypatch.setattr("hispec.simulate.run.simulate", lambda *_, **__: pytest.fail("it was run"))
    (tmp_path / "file").touch()
    place = tmp_path if flag == "--json" else tmp_path / "file"
    for path in (place, tmp_path / "file" / "below"):
        assert main(["simulate", str(config), flag, str(path)]) == 2
        assert capsys.readouterr().err.startswith(f"hispec: {flag}: ")


def test_progress_in_a_log_is_a_line_now_and_then(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(config)]) == 0
    log = capsys.readouterr().err
    assert "\r" not in log and len(log.splitlines()) == 2
    assert log.splitlines()[-1].startswith("rates 6, laps: 100% 720/720 [") and "request/s" in log


def test_figures_do_not_replace_the_experiment(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = config.read_text()
    assert main(["simulate", str(config), "--json", str(config)]) == 2
    assert "is read by this command" in capsys.readouterr().err and config.read_text() == before
    trace = config.with_name("trace.jsonl")
    trace.write_text("{}")
    assert main(["simulate", str(config), "--set", f"requests={{trace: {trace}}}", "--json", str(trace)]) == 2
    assert "is read by this command" in capsys.readouterr().err and trace.read_text() == "{}"


def test_bad_experiments_end_with_one_line(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(config), "--set", "arrivals.rates=[-1]"]) == 2
    printed = capsys.readouterr().err
    assert "arrivals.rates.0" in printed and "at least 1e-06" in printed and "Traceback" not in printed
    assert main(["simulate", str(config.parent / "nothing.yaml")]) == 2


def trace_of(path: Path, requests: list[dict[str, Any]], route: str = "ngram") -> None:
    head = {
        "type": "trace",
        "version": 1,
        "model": "m",
        "policy": "fcfs",
        "max_num_seqs": 2,
        "routes": [route],
        "environment": {},
    }
    path.write_text("".join(json.dumps(line) + "\n" for line in [head, *requests]))


def request(number: int, arrival: float, prompt: int, rounds: list[Any], cached: int = 0) -> dict[str, Any]:
    output = sum(each[1] for each in rounds)
    return {
        "type": "request",
        "number": number,
        "arrival": arrival,
        "first_token": arrival,
        "finished": arrival + 1.0,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "output_tokens": output,
        "max_tokens": 50,
        "finish_reason": "stop",
        "preemptions": 0,
        "rounds": rounds,
    }


def test_recorded_requests_are_drafted_as_they_were(tmp_path: Path) -> None:
    """Two requests, far apart: latencies are sums of the stages that their rounds ran."""
    trace = tmp_path / "trace.jsonl"
    first = [[0, 3, [3], [2]], [-1, 1, [], []], [0, 1, [2], [0]]]
    second = [[0, 4, [3], [3]]]
    trace_of(trace, [request(1, 100.0, 11, second, cached=4), request(0, 10.0, 21, first)])
    settings = {"kind": "ngram", "most_drafts": 3, "acceptance": share(0.0)}
    control = {"control": {"kind": "fixed", "route": "lookup", "num_drafts": 3}}
    stages = {"plain": {"constant_ms": 10.0}, "verify/0": {"token_ms": 1.0}, "prefill": {"token_ms": 0.5}}
    config = experiment(
        latency={"stages": stages},
        routes={"lookup": settings},
        requests={"num": 4, "warm_up": 0.0, "trace": str(trace)},
        arrivals={"kind": "recorded"},
        systems={"only": control},
    )
    done = run(config)
    # The plain round is drawn anew by the plan that is simulated: four positions, none kept.
    expected = [20 * 0.5 + 4 + 4 + 3, 6 * 0.5 + 4]
    assert latencies(done) * 1e3 == pytest.approx(expected * 2)
    assert done.outcomes.arrival_s.tolist() == [0.0, 90.0, 180.0, 270.0]


def test_a_trace_without_requests_is_refused(tmp_path: Path) -> None:
    trace_of(tmp_path / "empty.jsonl", [])
    with pytest.raises(ConfigError, match="no request was finished"):
        Experiment(experiment(requests={"trace": str(tmp_path / "empty.jsonl")}))


def test_requests_that_did_not_end_by_themselves_are_not_repeated(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    done, gone = request(0, 0.0, 11, [[-1, 5, [], []]]), request(1, 0.0, 7, [[-1, 3, [], []]])
    trace_of(trace, [done, gone | {"finish_reason": "abort"}])
    settings = {"requests": {"num": 2, "trace": str(trace)}, "arrivals": {"kind": "recorded"}}
    recording = read_recording(experiment(**settings))
    assert recording is not None and recording.prompt_tokens.tolist() == [11]
    trace_of(trace, [gone | {"finish_reason": "abort"}])
    with pytest.raises(ConfigError, match="no request was finished"):
        read_recording(experiment(**settings))


def test_repeats_of_a_trace_draw_their_own_rates(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace_of(trace, [request(at, float(at), 11, [[-1, 5, [], []]]) for at in range(5)])
    acceptance = {"share": {"kind": "uniform", "low": 0.2, "high": 0.9}}
    config = experiment(
        routes={"model": {"kind": "model", "most_drafts": 4, "acceptance": acceptance}},
        requests={"num": 10, "trace": str(trace)},
        arrivals={"kind": "recorded"},
    )
    shares = [
        make_workload(config, 10, seed, read_recording(config)).shares[0, :, DRAFT] for seed in (0, 0, 1)
    ]
    assert shares[0].tolist() == shares[1].tolist() != shares[2].tolist()
    assert shares[0][:5].tolist() == shares[0][5:].tolist(), "a request has its rates as often as it comes"


def test_the_share_of_drafts_that_are_kept_leaves_out_what_a_check_puts_in_their_place() -> None:
    """No draft is right, and verify takes all that the check says."""
    route = {
        "kind": "ngram",
        "most_drafts": 2,
        "most_checks": 2,
        "check_layer": 8,
        "acceptance": share(0.0),
        "verify_acceptance": share(1.0),
    }
    control = {"kind": "fixed", "route": "lookup", "num_drafts": 2, "num_checks": 2}
    config = experiment(
        routes={"lookup": route}, requests={"num": 20}, systems={"only": {"control": control}}
    )
    found = metrics.figures(config, config.systems["only"], [run(config)])
    assert found["draft_kept"] == 0.0 and found["tokens_per_row_round"] > 1.5


def test_routes_of_the_same_tiers_all_repeat_what_was_recorded(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace_of(trace, [request(0, 0.0, 11, [[0, 4, [3], [3]], [0, 1, [3], [0]], [0, 2, [1], [1]]])])
    routes = {
        name: {"kind": "ngram", "most_drafts": most, "acceptance": share(0.0)}
        for name, most in (("short", 3), ("long", 8))
    }
    systems = {name: {"control": {"kind": "fixed", "route": name, "num_drafts": 3}} for name in routes}
    arrivals = {"kind": "recorded"}
    config = experiment(
        routes=routes, requests={"num": 1, "trace": str(trace)}, arrivals=arrivals, systems=systems
    )
    short, long = run(config, "short"), run(config, "long")
    assert short.totals.tolist() == long.totals.tolist()
    assert short.totals[T_ROUNDS] == 3 and short.totals[T_KEPT] == 4


@pytest.mark.parametrize("found", [0.0, 1.0])
def test_recorded_rounds_of_a_hybrid_are_drawn_anew(tmp_path: Path, found: float) -> None:
    """For a trace does not say what was looked up, which costs less."""
    trace = tmp_path / "trace.jsonl"
    trace_of(trace, [request(0, 0.0, 11, [[0, 1, [4], [0]]] * 20)], "hybrid D=4")
    hybrid = {"kind": "hybrid", "draft_layer": 4, "most_drafts": 4, "match": {"value": found}}
    hybrid |= {"acceptance": share(1.0), "exit_acceptance": share(1.0), "num_exit_tokens": 1}
    arrivals = {"kind": "recorded"}
    systems = {"only": {"control": {"kind": "fixed", "route": "hybrid", "num_drafts": 4}}}
    config = experiment(
        routes={"hybrid": hybrid},
        requests={"num": 1, "trace": str(trace)},
        arrivals=arrivals,
        systems=systems,
    )
    assert run(config).totals[T_ROUNDS] == 20 / (5 if found else 2)


def test_slowdown_of_a_lone_request_is_one() -> None:
    requests = {"num": 20, "prompt_tokens": {"value": 30}, "output_tokens": {"value": 20}}
    config = experiment(requests=requests, arrivals={"kind": "recorded", "times": [0.0, 9.0]})
    done = run(config)
    assert latencies(done) == pytest.approx(done.alone_s)
    assert done.alone_s[0] * 1e3 == pytest.approx(2.0 + 29 * 0.1 + 20 * (10.75 + 0.32))
    assert np.isfinite(done.alone_s).all()


@pytest.mark.parametrize("kind", ["a route", "a trace"])
def test_slowdown_of_a_lone_request_is_one_by_a_plan(tmp_path: Path, kind: str) -> None:
    """Alone, a request has the window that it has in company, and repeats what was recorded of it."""
    requests: dict[str, Any] = {
        "num": 20,
        "prompt_tokens": {"value": 30},
        "output_tokens": {"value": 19},
        "max_tokens": 50,
    }
    if kind == "a trace":
        trace_of(tmp_path / "trace.jsonl", [request(0, 0.0, 30, [[0, 4, [3], [3]], [0, 2, [3], [1]]])])
        requests = {"num": 20, "trace": str(tmp_path / "trace.jsonl")}
    config = experiment(
        routes={"lookup": {"kind": "ngram", "most_drafts": 3, "acceptance": share(0.3)}},
        requests=requests,
        arrivals={"kind": "recorded", "times": [0.0, 9.0]},
        systems={"only": {"control": {"kind": "fixed", "route": "lookup", "num_drafts": 3}}},
    )
    done = run(config)
    assert latencies(done) == pytest.approx(done.alone_s)
