"""`hispec report`: what it says of a trace, and its picture."""

from __future__ import annotations

import builtins
import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hispec.cli import main
from hispec.config import GoodputConfig
from hispec.control.choice import Observation, Route
from hispec.control.controller import GoodputControl
from hispec.latency.model import LatencyModel, Linear
from hispec.trace.merge import merge
from hispec.trace.plots import draw_trace, find_stretches, make_looks, make_picture, spans, trace_speed
from hispec.trace.summary import acceptance, summarize
from hispec.trace.writer import read_trace
from tests.helpers.traces import (
    HYBRID,
    NGRAM,
    ROUTES,
    Clock,
    decision,
    fixed_trace,
    goodput_trace,
    observation,
    writer,
)

PNG = b"\x89PNG\r\n\x1a\n"


def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def imported(name: str, *rest: Any, **named: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return original(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", imported)


def test_the_summary_counts_rounds_and_seconds_by_plan(tmp_path: Path) -> None:
    summary = summarize(read_trace(goodput_trace(tmp_path / "t")))
    assert (summary["rounds"], summary["tokens"], summary["round_s"]) == (101, 404, pytest.approx(10.0))
    assert summary["tokens_per_s"] == pytest.approx(40.0), "the round without a time does not count"
    ngram, plain, hybrid = (
        summary["plans"][name] for name in ("ngram K=4", "plain", "hybrid D=4 C=15 K=3 R=2")
    )
    assert list(summary["plans"]) == [
        "ngram K=4",
        "plain",
        "hybrid D=4 C=15 K=3 R=2",
    ], "the one that took longest first"
    assert [plan["rounds"] for plan in (ngram, plain, hybrid)] == [71, 20, 10]
    assert [plan["seconds_share"] for plan in (ngram, plain, hybrid)] == [
        pytest.approx(share) for share in (0.7, 0.2, 0.1)
    ]
    assert (ngram["draft_kept"], ngram["tentative_accepted"], ngram["rows"]) == (0.5, None, 2.0)
    assert (hybrid["draft_kept"], hybrid["tentative_accepted"], hybrid["route"]) == (
        0.5,
        pytest.approx(1 / 3),
        ROUTES[1],
    )
    assert (plain["draft_kept"], plain["route"]) == (None, None)


def test_what_came_before_the_first_round_is_no_part_of_the_span(tmp_path: Path) -> None:
    """Such as a warm-up, which is not recorded."""
    clock = Clock()
    trace = writer(tmp_path / "t", clock)
    for clock.now, choice in ((130.0, NGRAM), (132.0, HYBRID)):
        trace.write_rounds(observation(choice, seconds=0.5))
    trace.close()
    assert summarize(read_trace(tmp_path / "t"))["span_s"] == pytest.approx(2.5)


def test_the_summary_counts_switches_probes_and_errors_of_prediction(tmp_path: Path) -> None:
    control = summarize(read_trace(goodput_trace(tmp_path / "t")))["control"]
    assert (control["decisions"], control["switches"], control["route_switches"], control["probes"]) == (
        4,
        1,
        1,
        1,
    ), "going back from a probe is no switch"
    assert control["reasons"] == {"start": 1, "best": 1, "probe": 1, "kept: within margin": 1}
    assert (control["probe_rounds_share"], control["probe_seconds_share"]) == (
        pytest.approx(10 / 101),
        pytest.approx(0.1),
    )
    # Predicted were 40, 110 and 110; measured after them 40, 100 and 55.
    assert control["predicted_to_measured"]["mean"] == pytest.approx((1.0 + 1.1 + 2.0) / 3)
    assert control["predicted_to_measured"]["p50"] == pytest.approx(1.1)


def test_the_summary_has_the_latencies_of_requests_that_ended_by_themselves(tmp_path: Path) -> None:
    requests = summarize(read_trace(goodput_trace(tmp_path / "t")))["requests"]
    assert (requests["finished"], requests["others"], requests["preemptions"], requests["preempted"]) == (
        3,
        1,
        2,
        2,
    )
    assert requests["e2e_s"] == {"mean": 5.0, "p50": 5.0, "p90": 5.8, "p99": 5.98, "max": 6.0}
    assert requests["ttft_s"]["p99"] == 0.5 and requests["cached_tokens"] == 48
    # Half of the time to the first token in the queue, and the last of 8 tokens at the end.
    assert requests["queue_time_s"] == dict.fromkeys(("mean", "p50", "p90", "p99", "max"), 0.25)
    assert requests["tpot_s"]["mean"] == pytest.approx((5.0 - 0.5) / 7)


def test_the_controllers_of_several_workers_are_judged_each_by_itself(tmp_path: Path) -> None:
    traces = [read_trace(goodput_trace(tmp_path / f"{at}.jsonl")) for at in range(2)]
    one, both = (summarize(trace)["control"] for trace in (traces[0], merge(traces)))
    for name in ("decisions", "switches", "route_switches", "probes"):
        assert both[name] == 2 * one[name]
    assert both["predicted_to_measured"]["mean"] == pytest.approx(one["predicted_to_measured"]["mean"])


def test_latencies_do_not_depend_on_when_a_worker_began(tmp_path: Path) -> None:
    first, second = (read_trace(goodput_trace(tmp_path / f"{at}.jsonl")) for at in range(2))
    first, second = (
        replace(trace, header=trace.header.model_copy(update={"started": at}))
        for trace, at in ((first, 1000.0), (second, 1007.5))
    )
    merged = merge([first, second])
    times = ("arrival", "admitted", "first_token", "last_token", "finished")
    for name in ("e2e_s", "queue_time_s", "ttft_s", "tpot_s"):
        wanted = sorted(getattr(one, name) or 0.0 for one in [*first.requests, *second.requests])
        assert sorted(getattr(one, name) or 0.0 for one in merged.requests) == pytest.approx(wanted), name
    for one in merged.requests:
        at = [time for name in times if (time := getattr(one, name)) is not None]
        assert at == sorted(at)


def test_rounds_lie_one_after_the_other_in_time(tmp_path: Path) -> None:
    rounds = read_trace(goodput_trace(tmp_path / "t")).rounds
    places = spans(rounds)
    assert places[0][0] == pytest.approx(0.0, abs=1e-6) and places[-1][1] == pytest.approx(10.0)
    assert all(start <= end for start, end in places)
    assert all(before[1] <= after[0] for before, after in pairwise(places))


def test_the_command_prints_draws_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = goodput_trace(tmp_path / "trace.jsonl")
    assert main(["report", str(trace), "--json", str(tmp_path / "new" / "report.json")]) == 0
    printed = capsys.readouterr().out
    said = (
        "tiny: policy laps",
        "101 rounds in 10.0 s",
        "ngram K=4",
        "70.0%",
        "hybrid D=4 C=15 K=3 R=2",
        "4 decisions (start 1, best 1, probe 1",
        "mean 1.37",
    )
    for text in said:
        assert text in printed, printed
    assert (
        "3 requests finished, 1 aborted or failed; 2 preemptions, of 2 requests" in printed
        and "5.980" in printed
    )
    picture = (tmp_path / "trace.png").read_bytes()
    assert picture.startswith(PNG) and len(picture) > 20_000
    summary = json.loads((tmp_path / "new" / "report.json").read_text())
    assert summary == json.loads(json.dumps(summarize(read_trace(trace))))
    assert main(["report", str(trace), "-o", str(tmp_path / "pictures" / "a.png")]) == 0
    assert (tmp_path / "pictures" / "a.png").read_bytes().startswith(PNG)


def test_the_picture_shows_each_plan_that_ran(tmp_path: Path) -> None:
    """Another plan is another picture, and a probe is a mark of its own."""
    draw_trace(read_trace(goodput_trace(tmp_path / "a")), tmp_path / "a.png")
    draw_trace(read_trace(goodput_trace(tmp_path / "b")), tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    without = [
        line
        for line in (tmp_path / "a").read_text().splitlines(keepends=True)
        if '"is_probe": true' not in line
    ]
    (tmp_path / "b").write_text("".join(without))
    draw_trace(read_trace(tmp_path / "b"), tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() != (tmp_path / "b.png").read_bytes()


@pytest.mark.parametrize("num", [1, 8, 10, 70])
def test_each_route_looks_its_own_way_and_none_like_plain_decoding(num: int) -> None:
    from matplotlib.colors import to_rgb

    looks = make_looks([f"adapter D={number}" for number in range(num)])
    assert len(looks) == len(set(looks.values())) == num + 1
    plain = looks.pop("plain")
    assert all(max(to_rgb(look.color)) - min(to_rgb(look.color)) > 0.2 for look in looks.values()), "no grey"
    assert to_rgb(plain.color) == pytest.approx((0.6, 0.6, 0.6))
    assert len({look.color for look in looks.values()}) == min(num, 9)


def test_legends_cover_no_pane(tmp_path: Path) -> None:
    figure = make_picture(read_trace(goodput_trace(tmp_path / "t")))
    figure.canvas.draw()
    panes = [axes.get_window_extent() for axes in figure.axes]
    legends = [legend.get_window_extent() for axes in figure.axes if (legend := axes.get_legend())]
    assert len(legends) == 3 and not any(
        legend.overlaps(other) for legend in legends for other in (*panes, *legends) if other is not legend
    )


def test_the_speed_is_level_while_rounds_run_and_ends_where_they_pause(tmp_path: Path) -> None:
    clock = Clock()
    trace = writer(tmp_path / "t", clock)
    for pause in (0.0, 0.05, 30.0, 0.0):
        clock.now += pause
        for choice, seconds in ((NGRAM, 0.1), (HYBRID, 0.4)):
            clock.now += seconds
            trace.write_rounds(observation(choice, seconds=seconds))
    trace.close()
    read = read_trace(tmp_path / "t")
    times, speeds = trace_speed(read.rounds)
    assert times == sorted(times)
    for (before, old), (after, new) in pairwise(zip(times, speeds, strict=True)):
        assert before == after or old == new or math.isnan(old) or math.isnan(new), "no slopes"
    gaps = [at for at, speed in enumerate(speeds) if math.isnan(speed)]
    assert [round(times[at - 1], 2) for at in gaps] == [1.05] and round(times[gaps[0] + 1], 2) == 31.05
    assert [len(part) for part in find_stretches(read.rounds)] == [4, 4]


def test_the_plan_is_white_where_no_round_ran_and_named_however_late_the_trace_begins(
    tmp_path: Path,
) -> None:
    clock = Clock()
    trace = writer(tmp_path / "t", clock)
    for pause in (1000.0, 0.0, 0.3, 0.0):
        clock.now += pause + 0.4
        trace.write_rounds(observation(NGRAM, seconds=0.4))
        trace.write_routes(ROUTES)  # ends the line
    trace.close()
    plans = make_picture(read_trace(tmp_path / "t")).axes[0]
    (filled,) = plans.collections
    edges = [sorted({round(float(x), 2) for x in path.vertices[:, 0]}) for path in filled.get_paths()]
    assert edges == [[1000.0, 1000.8], [1001.1, 1001.9]]
    assert [text.get_text() for text in plans.texts] == ["K=4", "K=4"]


def test_a_fixed_plan_has_a_report_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(fixed_trace(tmp_path / "t"))]) == 0
    printed = capsys.readouterr().out
    assert "No decisions: the plan was fixed." in printed and "0 requests finished; 0 preemptions" in printed
    assert (tmp_path / "t.png").read_bytes().startswith(PNG)
    assert summarize(read_trace(tmp_path / "t"))["control"] is None


@pytest.mark.parametrize("decides", [False, True])
def test_an_empty_trace_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str], decides: bool) -> None:
    trace = writer(tmp_path / "t", Clock(), [])
    if decides:
        trace.write_decision(decision(NGRAM, route=None, alternatives=[], acceptance={}))
    trace.close()
    assert main(["report", str(tmp_path / "t")]) == 0
    assert "No round was recorded." in capsys.readouterr().out
    assert (tmp_path / "t.png").read_bytes().startswith(PNG)


def test_a_trace_that_was_cut_off_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = goodput_trace(tmp_path / "t").read_bytes()
    (tmp_path / "t").write_bytes(content[:-7])
    assert main(["report", str(tmp_path / "t")]) == 0
    assert "The last line was cut off" in capsys.readouterr().out


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = goodput_trace(tmp_path / "t")
    without_matplotlib(monkeypatch)
    assert main(["report", str(trace)]) == 0
    captured = capsys.readouterr()
    assert (
        "101 rounds" in captured.out
        and "pip install '.[plots]' in a checkout" in captured.err
        and not (tmp_path / "t.png").exists()
    )
    assert main(["report", str(trace), "-o", str(tmp_path / "a.png")]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "-o needs matplotlib" in captured.err
    page = ["--html", str(tmp_path / "page.html"), "-o", str(tmp_path / "a.png")]
    assert main(["report", str(trace), *page]) == 2 and not (tmp_path / "page.html").exists()


def test_a_folder_that_may_not_be_written_costs_the_picture_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = goodput_trace(tmp_path / "t")
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    assert main(["report", str(trace)]) == 0
    captured = capsys.readouterr()
    assert "101 rounds" in captured.out and f"not drawn: {tmp_path} cannot be written" in captured.err


def test_several_traces_are_those_of_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (goodput_trace(tmp_path / name) for name in "ab")
    assert main(["report", str(first), str(second)]) == 0
    assert main(["report", str(first), str(tmp_path / "." / "a")]) == 2
    assert "a trace is named twice" in capsys.readouterr().err
    for name in ("model", "policy"):
        header, _, rest = second.read_bytes().partition(b"\n")
        other = tmp_path / f"other-{name}"
        other.write_bytes(json.dumps(json.loads(header) | {name: "another"}).encode() + b"\n" + rest)
        for more in ([], ["--html", str(tmp_path / "page.html")]):
            assert main(["report", str(first), str(other), *more]) == 2
            assert f"is of {name} another" in capsys.readouterr().err


def test_a_link_to_itself_is_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert main(["report", str(tmp_path / "loop")]) == 2
    assert "cannot read the trace" in capsys.readouterr().err
    trace = goodput_trace(tmp_path / "t")
    assert main(["report", str(trace), "-o", str(tmp_path / "t.png"), "--json", str(tmp_path / "loop")]) == 2
    assert "loop is not a regular file" in capsys.readouterr().err


def test_a_number_is_another_route_after_a_change_of_plans(tmp_path: Path) -> None:
    trace = writer(tmp_path / "t", Clock(), ["ngram"])
    trace.write_decision(decision(NGRAM, route=0, reason="start", previous=None))
    trace.write_routes(["adapter D=4"])
    trace.write_decision(decision(NGRAM, route=0, previous=None))
    trace.close()
    control = summarize(read_trace(tmp_path / "t"))["control"]
    assert (control["switches"], control["route_switches"]) == (1, 1)


def test_a_file_that_is_written_may_be_named_after_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    trace = goodput_trace(tmp_path / "t")
    assert main(["report", str(trace), "--json=~/out/t.json", "-o", str(tmp_path / "t.png")]) == 0
    assert (tmp_path / "home" / "out" / "t.json").is_file() and not (tmp_path / "~").exists()
    with pytest.raises(SystemExit):
        main(["report", str(trace), "--json=~nobody-of-that-name/t.json"])
    assert "in the home folder of nobody here" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", ["", ".", "/", "..", "none"])
def test_what_is_no_file_is_no_trace(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", name]) == 2
    assert "cannot read the trace" in capsys.readouterr().err


def test_what_must_not_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = goodput_trace(tmp_path / "trace.png")
    before = trace.read_bytes()
    (tmp_path / "link.png").symlink_to(trace)
    for options, message in (
        ([], "-o: .*trace.png is read by this command"),
        (["-o", str(tmp_path / "link.png")], "-o: .* is read by this command"),
        (["-o", str(tmp_path / "a.pdf")], "is drawn as PNG; give it a name that ends with .png"),
        (["-o", str(tmp_path / "a.png"), "--json", str(trace)], "--json: .* is read by this command"),
        (["-o", str(tmp_path / "a.png"), "--json", str(tmp_path / "a.png")], "-o and --json both name"),
        (["-o", str(tmp_path / "a.png"), "--json", str(tmp_path)], "--json: .* is not a regular file"),
        (["-o", str(trace / "a.png")], "-o: cannot write to .*trace.png: it is not a folder; choose"),
    ):
        assert main(["report", str(trace), *options]) == 2
        error = capsys.readouterr().err
        assert re.search(message, error), error
    assert trace.read_bytes() == before
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "cannot read the trace" in capsys.readouterr().err


def test_what_the_controller_decides_can_be_read(tmp_path: Path) -> None:
    """Its own records, of rounds that never ran: each row's drafts are right or wrong by turns."""
    clock = Clock()
    stages = {
        "plain": Linear(10.0, token_ms=1.0),
        "lookup": Linear(0.1),
        "verify/0": Linear(10.0, token_ms=1.0),
        "round": Linear(0.1),
    }
    trace = writer(tmp_path / "t", clock, ["ngram"])
    control = GoodputControl(
        [Route("ngram", 0, None, 4)], LatencyModel(stages), GoodputConfig(), on_decision=trace.write_decision
    )
    for number in range(200):
        choice = control.choose([1, 2], 200)
        drafts = choice.plan.num_draft_tokens
        kept = [drafts, 0] if number % 2 else [drafts, drafts]
        seconds = 0.02 + 0.001 * drafts
        clock.now += seconds
        rows, tokens = np.array([1, 2]), 2 + sum(kept)
        cycles = {
            "numbers": rows,
            "caps": np.array([4, 4]),
            "drafted": np.full(2, drafts),
            "kept": np.array(kept),
            "looked_up": np.ones(2, np.int64),
        }
        verified = {"rows": rows, "tentative": np.full(2, drafts), "accepted": np.array(kept)}
        seen = Observation(
            choice, 2, 200.0, seconds, tokens, **(cycles | verified if choice.route is not None else {})
        )
        control.observe(seen)
        trace.write_rounds(seen)
    trace.close()
    read = read_trace(tmp_path / "t")
    summary = summarize(read)
    assert (
        summary["rounds"] == 200
        and summary["control"]["decisions"] == len(read.decisions) == control.stats()["decisions"]
    )
    assert (
        summary["control"]["probes"] == control.stats()["probes"] >= summary["control"]["probes_at_start"] > 0
    )
    assert all(
        decision.plan == "plain" or decision.plan.startswith("ngram K=") for decision in read.decisions
    )
    assert {line.plan for line in read.rounds} == {decision.plan for decision in read.decisions}, (
        "both are worded alike"
    )
    (plan,) = {line.name for line in read.rounds} - {"plain"}
    measured = acceptance([line for line in read.rounds if line.name == plan])["draft_kept"]
    assert read.decisions[-1].acceptance[plan]["draft_kept"] == pytest.approx(measured, abs=0.05), (
        "estimates are of what is measured"
    )
    settled = summary["control"]["predicted_to_measured"]["p50"]
    assert 0.8 < settled < 1.25
