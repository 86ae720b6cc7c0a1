"""The trace: what is written is read again, whatever happens to file, disk or engine."""

from __future__ import annotations

import errno
import gc
import json
import logging
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hispec.config import Plan
from hispec.control.choice import Choice
from hispec.errors import ConfigError
from hispec.trace.merge import drop_traces_of_workers
from hispec.trace.writer import MOST_ROUNDS, TraceWriter, read_trace
from tests.helpers.steps import count_steps
from tests.helpers.traces import (
    HYBRID,
    NGRAM,
    PLAIN_CHOICE,
    ROUTES,
    Clock,
    decision,
    goodput_trace,
    metrics,
    observation,
    writer,
)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, *records: dict[str, Any] | str) -> Path:
    path.write_text(
        "".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records)
    )
    return path


HEADER = {
    "type": "trace",
    "version": 1,
    "model": "m",
    "policy": "fcfs",
    "max_num_seqs": 1,
    "routes": ["ngram"],
    "environment": {},
}
ROUNDS = {
    "type": "rounds",
    "t": 1.0,
    "route": 0,
    "num_drafts": 4,
    "num_checks": 1,
    "rows": 2,
    "context_tokens": 9.5,
    "rounds": 3,
    "seconds": 0.5,
}
ROUNDS |= {"tokens": 6, "drafted": 8, "kept": 4, "tentative": 8, "accepted": 4}
REQUEST = {
    "type": "request",
    "number": 3,
    "arrival": 0.1,
    "first_token": 0.4,
    "finished": 2.5,
    "prompt_tokens": 40,
    "cached_tokens": 0,
    "output_tokens": 64,
}
REQUEST |= {
    "max_tokens": 64,
    "finish_reason": "stop",
    "preemptions": 0,
    "rounds": [[0, 3, [4, 4], [2, 0]], [-1, 1, [], []]],
}
DECISION = {
    "type": "decision",
    "t": 1.0,
    **decision(Choice(0, Plan(0, None, 4)), alternatives=[], acceptance={}),
}


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    clock = Clock()
    trace = writer(tmp_path / "new" / "trace.jsonl", clock)
    clock.now = 101.5
    trace.write_decision(decision(HYBRID))
    trace.write_rounds(observation(HYBRID, rows=3))
    trace.write_request(
        7,
        metrics(100.25, 102.0, preemptions=2),
        64,
        "stop",
        [(1, 3, (4, 4), np.array([2, 1])), (-1, 1, (), ())],
    )
    trace.close()
    read = read_trace(tmp_path / "new" / "trace.jsonl")
    assert (read.header.model, read.header.policy, read.header.max_num_seqs, read.header.routes) == (
        "tiny",
        "laps",
        4,
        tuple(ROUTES),
    )
    (decided,), (rounds,), (request,) = read.decisions, read.rounds, read.requests
    assert (decided.t, decided.predicted, decided.alternatives) == (
        1.5,
        110.0,
        (("hybrid D=4 C=15 K=3", 110.0), ("plain", None)),
    )
    assert decided.acceptance == {ROUTES[1]: {"draft_kept": 0.5, "tentative_accepted": 0.75}}
    assert (rounds.plan, rounds.has_check, rounds.rows, rounds.rounds, rounds.context_tokens) == (
        "hybrid D=4 C=15 K=3 R=2",
        True,
        3,
        1,
        300.0,
    )
    assert (rounds.tokens, rounds.drafted, rounds.kept, rounds.tentative, rounds.accepted) == (6, 12, 6, 9, 3)
    assert (
        request.arrival,
        request.first_token,
        request.finished,
        request.e2e_s,
        request.preemptions,
    ) == (0.25, 0.75, 2.0, 1.75, 2)
    assert request.rounds == ((1, 3, (4, 4), (2, 1)), (-1, 1, (), ())) and request.routes == tuple(ROUTES)
    assert not read.is_cut


def test_consecutive_rounds_of_one_choice_are_one_line(tmp_path: Path) -> None:
    trace = writer(tmp_path / "t", Clock())
    probe = Choice(0, NGRAM.plan, is_probe=True)
    shorter = Choice(0, Plan(0, None, 2))
    others = [
        observation(NGRAM, rows=3),
        observation(probe),
        observation(NGRAM, seconds=math.nan),
        observation(shorter),
        observation(HYBRID),
    ]
    for seen in [
        *[observation(Choice(0, Plan(0, None, 4)))] * 20,
        *others,
        observation(NGRAM),
        observation(NGRAM, rounds=MOST_ROUNDS),
    ]:
        trace.write_rounds(seen)
    trace.write_decision(decision(NGRAM))
    trace.write_rounds(observation(NGRAM))
    trace.close()
    read = read_trace(tmp_path / "t").rounds
    assert [line.rounds for line in read] == [16, 4, 1, 1, 1, 1, 1, 1, 16, 1]
    assert [line.is_probe for line in read[:4]] == [False, False, False, True]
    assert [line.seconds for line in read[:5]] == [pytest.approx(0.16), pytest.approx(0.04), 0.01, 0.01, None]
    assert read[0].drafted == 16 * 8 and read[0].context_tokens == 200.0


def test_the_seconds_of_passes_are_summed(tmp_path: Path) -> None:
    trace = writer(tmp_path / "t", Clock())
    for _ in range(3):
        trace.write_rounds(observation(HYBRID), (0.001, 0.002, 0.004))
    trace.write_rounds(observation(NGRAM))
    trace.close()
    assert [line.pass_s for line in read_trace(tmp_path / "t").rounds] == [(0.003, 0.006, 0.012), ()]


def test_a_pause_ends_a_line(tmp_path: Path) -> None:
    clock = Clock()
    trace = writer(tmp_path / "t", clock)
    for seconds in (0.2, math.nan):
        for _ in range(2):
            trace.write_rounds(observation(NGRAM, seconds=seconds))
            clock.now += 30.0
    trace.close()
    read = read_trace(tmp_path / "t").rounds
    assert [(line.t, line.rounds) for line in read] == [(30.0 * at, 1) for at in range(4)]


def test_slow_rounds_are_written_after_a_second(tmp_path: Path) -> None:
    clock = Clock()
    trace = writer(tmp_path / "t", clock)
    for _ in range(6):
        clock.now += 0.4
        trace.write_rounds(observation(PLAIN_CHOICE, seconds=0.4))
    assert [line["rounds"] for line in lines(tmp_path / "t")[1:]] == [4], "1.2 s after the group's first"
    trace.close()
    assert [line["rounds"] for line in lines(tmp_path / "t")[1:]] == [4, 2]


def test_lines_wait_a_second_at_most_and_no_longer_than_the_writer(tmp_path: Path) -> None:
    clock = Clock()
    trace = writer(tmp_path / "t", clock)
    assert len(lines(tmp_path / "t")) == 1, "the header is there at once"
    trace.write_decision(decision(NGRAM))
    assert len(lines(tmp_path / "t")) == 1
    clock.now += 1.0
    trace.write_decision(decision(NGRAM))
    assert len(lines(tmp_path / "t")) == 3
    trace.write_decision(decision(NGRAM))
    del trace
    gc.collect()
    assert len(lines(tmp_path / "t")) == 4


def test_lines_of_a_program_that_forgot_to_close_are_there(tmp_path: Path) -> None:
    code = (
        "from tests.helpers.traces import *\nw = writer(Path('t'),"
        " Clock())\nw.write_decision(decision(NGRAM))\nw.write_rounds(observation(NGRAM))"
    )
    root = Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(root)!r})\n{code}"],
        cwd=tmp_path,
        check=True,
        timeout=60,
    )
    trace = read_trace(tmp_path / "t")
    assert len(trace.decisions) == 1 and [each.rounds for each in trace.rounds] == [1]


def test_numbers_that_are_not_finite_are_null_and_numpys_are_numbers(tmp_path: Path) -> None:
    trace = writer(tmp_path / "t", Clock())
    trace.write_decision(
        decision(
            NGRAM,
            predicted=np.float32("nan"),
            measured=math.inf,
            round=np.int64(9),
            acceptance={"ngram": {"draft": np.float64("nan")}},
        )
    )
    trace.close()
    (line,) = lines(tmp_path / "t")[1:]
    assert (line["predicted"], line["measured"], line["round"], line["acceptance"]) == (
        None,
        None,
        9,
        {"ngram": {"draft": None}},
    )
    assert read_trace(tmp_path / "t").decisions[0].predicted is None


def test_routes_may_change(tmp_path: Path) -> None:
    trace = writer(tmp_path / "t", Clock(), ["ngram"])
    trace.write_rounds(observation(NGRAM))
    trace.write_routes(["adapter D=4", "model"])
    trace.write_rounds(observation(NGRAM))
    trace.write_rounds(observation(Choice(1, NGRAM.plan)))
    trace.write_request(0, metrics(100.0, 101.0), 8, "stop", [(1, 2, [4], [1])])
    trace.close()
    read = read_trace(tmp_path / "t")
    assert [line.plan for line in read.rounds] == ["ngram K=4", "adapter D=4 K=4", "model K=4"]
    assert (
        read.header.routes == ("ngram",)
        and read.routes == ["ngram", "adapter D=4", "model"]
        and read.requests[0].routes == ("adapter D=4", "model")
    )


@pytest.mark.parametrize("content", ["", json.dumps(HEADER) + "\n", '{"type": "trace", "versi'])
def test_a_trace_is_replaced(tmp_path: Path, content: str) -> None:
    (tmp_path / "t").write_text(content)
    writer(tmp_path / "t", Clock()).close()
    assert read_trace(tmp_path / "t").header.model == "tiny"


def test_another_file_is_not(tmp_path: Path) -> None:
    (tmp_path / "t").write_text('{"prompt": "hello"}\n')
    with pytest.raises(
        ConfigError,
        match=r"engine\.trace: .*t exists and is no trace of HiSpec; move it away, or choose another path",
    ):
        writer(tmp_path / "t", Clock())
    assert (tmp_path / "t").read_text() == '{"prompt": "hello"}\n'
    with pytest.raises(ConfigError, match="is not a regular file"):
        writer(tmp_path, Clock())
    with pytest.raises(ConfigError, match=r"engine\.trace: cannot write .*: (Not a directory|File exists)"):
        writer(tmp_path / "t" / "below", Clock())


class FullDisk:
    """Takes 10 bytes more."""

    def __init__(self, file: Any) -> None:
        self.file, self.closed, self.left = file, False, 10

    def write(self, content: bytes) -> int:
        if not self.left:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.left, taken = 0, self.left
        return int(self.file.write(content[:taken]))

    def close(self) -> None:
        self.closed = True
        self.file.close()


def test_a_full_disk_ends_the_trace_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    trace = writer(tmp_path / "t", clock)
    monkeypatch.setattr(trace._lines, "_file", FullDisk(trace._lines._file))
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            clock.now += 2.0
            trace.write_decision(decision(NGRAM))
            trace.write_rounds(observation(NGRAM))
            trace.write_request(0, metrics(100.0, 101.0), 8, "stop")
        trace.close()
    (record,) = caplog.records
    assert (
        "the trace ends here: cannot write" in record.message and "No space left on device" in record.message
    )
    assert read_trace(tmp_path / "t").is_cut


def test_what_comes_after_close_is_passed_over(tmp_path: Path) -> None:
    trace = writer(tmp_path / "t", Clock())
    trace.close()
    trace.write_decision(decision(NGRAM))
    trace.write_rounds(observation(NGRAM))
    trace.close()
    assert len(lines(tmp_path / "t")) == 1


def test_a_last_line_that_was_cut_off_anywhere_is_left_out(tmp_path: Path) -> None:
    whole = goodput_trace(tmp_path / "whole").read_bytes()
    complete = read_trace(tmp_path / "whole")
    last = len(whole.splitlines(keepends=True)[-1])
    for cut in range(2, last):
        (tmp_path / "t").write_bytes(whole[:-cut])
        read = read_trace(tmp_path / "t")
        assert read.is_cut and read.rounds == complete.rounds[:-1] and read.requests == complete.requests
    (tmp_path / "t").write_bytes(whole[:-1])
    assert read_trace(tmp_path / "t") == complete, "nothing but the end of the line is missing"


def test_unknown_lines_and_fields_are_passed_over(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "t", HEADER, {"type": "weather", "t": 1}, ROUNDS | {"colour": "red"}, REQUEST, DECISION
    )
    read = read_trace(path)
    assert (len(read.rounds), len(read.requests), len(read.decisions)) == (1, 1, 1)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{", "line 2: not a line of a trace, which is JSON"),
        ("[1]", 'line 2: expected a JSON object with a "type"'),
        ({"t": 1}, 'line 2: expected a JSON object with a "type"'),
        (json.dumps(ROUNDS).replace("0.5", "NaN"), "line 2: .*NaN is no JSON number"),
        (HEADER, "line 2: a second header"),
        (ROUNDS | {"t": -1.0}, "line 2: t: must be at least 0, got -1.0"),
        (ROUNDS | {"rounds": 0}, "line 2: rounds: .*got 0"),
        (ROUNDS | {"tokens": "6"}, "line 2: tokens: .*got '6'"),
        (ROUNDS | {"tokens": 10**400}, "line 2: tokens: must be at most"),
        (ROUNDS | {"seconds": 10**400}, "line 2: seconds: .*got 1000"),
        (ROUNDS | {"seconds": 1e-320}, r"line 2: seconds=1e-320 is less than a microsecond"),
        (REQUEST | {"arrival": -1e308}, r"line 2: arrival: must be at least 0, got -1e\+308"),
        (REQUEST | {"max_tokens": 0}, "line 2: max_tokens: must be at least 1, got 0"),
        (ROUNDS | {"kept": 9}, "line 2: kept=9 is more than drafted=8"),
        (ROUNDS | {"route": 1}, "line 2: route=1 is none of the 1 that the trace names"),
        (ROUNDS | {"route": -1}, "line 2: route=-1 is none of the 1"),
        (
            {name: value for name, value in ROUNDS.items() if name != "rows"},
            "line 2: rows: required, but not given",
        ),
        (
            REQUEST | {"finished": 0.2},
            r"line 2: arrival=0.1, first_token=0.4 and finished=0.2 are not in this order",
        ),
        (
            REQUEST | {"rounds": [[0, 3, [4], [5]]]},
            r"line 2: rounds\[0\]: kept=\[5\] does not fit drafted=\[4\]",
        ),
        (REQUEST | {"rounds": [[0, 3, [4], []]]}, r"line 2: rounds\[0\]: kept=\[\] does not fit"),
        (REQUEST | {"rounds": [[0, 10**12, [4], [1]]]}, "line 2: rounds.0.1: must be at most 65536"),
        (REQUEST | {"rounds": [[2, 3, [4], [1]]]}, "line 2: route=2 is none of the 1"),
        (REQUEST | {"rounds": [[-2, 3, [4], [1]]]}, "line 2: rounds.0.0: .*got -2"),
        (REQUEST | {"finish_reason": "tired"}, "line 2: finish_reason: .*got 'tired'"),
        (DECISION | {"predicted": -3.0}, "line 2: predicted: .*got -3.0"),
        (DECISION | {"alternatives": [["plain"]]}, "line 2: alternatives.0"),
    ],
)
def test_a_broken_line_is_refused_by_its_number(
    tmp_path: Path, record: dict[str, Any] | str, message: str
) -> None:
    path = write_lines(tmp_path / "t", HEADER, record, ROUNDS)
    with pytest.raises(ConfigError, match=message) as error:
        read_trace(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty; a trace is written by an engine with engine.trace=FILE"),
        ('{"type": "tra', "line 1: not a line of a trace"),
        (json.dumps(ROUNDS), 'line 1: not a trace of HiSpec, whose first line has "type": "trace"'),
        (
            json.dumps(HEADER | {"version": 2}),
            "line 1: version=2 of the trace is not 1, which this HiSpec reads",
        ),
        (json.dumps(HEADER | {"max_num_seqs": 0}), "line 1: max_num_seqs"),
        ("\xff\xfe", "line 1: not a line of a trace"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "t").write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=message):
        read_trace(tmp_path / "t")


def test_a_plain_round_has_the_name_of_plain_decoding_whatever_its_line_says(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t", HEADER, ROUNDS | {"route": None, "name": "foo"})
    assert [one.name for one in read_trace(path).rounds] == ["plain"]


def test_traces_of_earlier_workers_are_dropped_whatever_their_name_looks_like(tmp_path: Path) -> None:
    for name in ("tr[1].0.jsonl", "tr[1].12.jsonl", "tr1.0.jsonl", "tr[1].x.jsonl"):
        write_lines(tmp_path / name, HEADER)
    drop_traces_of_workers(tmp_path / "tr[1].jsonl", from_number=12)
    assert (tmp_path / "tr[1].0.jsonl").exists() and not (tmp_path / "tr[1].12.jsonl").exists()
    drop_traces_of_workers(tmp_path / "tr[1].jsonl", from_number=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tr1.0.jsonl", "tr[1].x.jsonl"]


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the trace .*: No such file"):
        read_trace(tmp_path / "none")


def test_a_round_takes_few_steps_however_many_rows_it_has(tmp_path: Path) -> None:
    """Some 300, which are 10 µs here."""
    trace = TraceWriter(
        tmp_path / "t", model="m", policy="fcfs", max_num_seqs=256, routes=ROUTES, environment={}
    )
    steps = []
    for rows in (16, 256):
        seen = observation(NGRAM, rows=rows)
        trace.write_rounds(seen)
        steps.append(count_steps(lambda seen=seen: [trace.write_rounds(seen) for _ in range(100)]))
    trace.close()
    assert max(steps) < 100 * 600 and steps[1] < 1.1 * steps[0]


def test_the_trace_needs_neither_torch_nor_matplotlib() -> None:
    code = "import sys; sys.modules.update(torch=None, matplotlib=None)\nimport hispec.trace.writer"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True, timeout=60)
