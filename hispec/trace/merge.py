"""Traces of several workers as one."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path

from ..errors import ConfigError
from .lines import is_ours
from .records import Decision, RequestRecord, Rounds, Trace
from .writer import read_trace

_TIMES = ("arrival", "admitted", "first_token", "last_token", "finished")


def trace_of_worker(path: Path, number: int) -> Path:
    """Where the worker of this number writes, such as trace.0.jsonl for trace.jsonl."""
    return path.with_name(f"{path.stem}.{number}{path.suffix}")


def drop_traces_of_workers(path: Path, from_number: int) -> None:
    """Deletes those of an earlier run, which may have had more workers, from this number on."""
    for old in path.parent.glob(f"{glob.escape(path.stem)}.*{glob.escape(path.suffix)}"):
        number = old.name.removeprefix(f"{path.stem}.").removesuffix(path.suffix)
        if number.isdecimal() and int(number) >= from_number and old.is_file() and is_ours(old):
            old.unlink()


def read_together(paths: Sequence[Path]) -> Trace:
    """The traces at `paths` as one. Raises ConfigError for a file that is none, or is named twice, and for
    those of different models or policies: these are not the workers of one run."""
    if len({os.path.realpath(path) for path in paths}) < len(paths):
        raise ConfigError("a trace is named twice, and would be counted twice; name each once")
    traces = [read_trace(path) for path in paths]
    for path, trace in zip(paths, traces, strict=True):
        for name in ("model", "policy"):
            first, own = (getattr(each.header, name) for each in (traces[0], trace))
            if own != first:
                raise ConfigError(
                    f"{path} is of {name} {own}, {paths[0]} of {first}: several traces are shown as those of"
                    " one run's workers; give each run a report of its own"
                )
    return merge(traces)


def merge(traces: Sequence[Trace]) -> Trace:
    """One trace with the rounds, decisions and requests of all, by their times; as many rows as all have."""
    if len(traces) == 1:
        return traces[0]
    begins = [trace.header.started for trace in traces]
    first = min((begin for begin in begins if begin is not None), default=0.0)
    decisions: list[Decision] = []
    rounds: list[Rounds] = []
    requests: list[RequestRecord] = []
    for at, (trace, begin) in enumerate(zip(traces, begins, strict=True)):
        later = 0.0 if begin is None else begin - first
        decisions += [one.model_copy(update={"t": one.t + later, "worker": at}) for one in trace.decisions]
        rounds += [one.model_copy(update={"t": one.t + later}) for one in trace.rounds]
        requests += [_shifted(one, later, one.number * len(traces) + at) for one in trace.requests]
    header = traces[0].header
    return Trace(
        header.model_copy(update={"max_num_seqs": sum(trace.header.max_num_seqs for trace in traces)}),
        list(dict.fromkeys(route for trace in traces for route in trace.routes)),
        sorted(decisions, key=lambda one: one.t),
        sorted(rounds, key=lambda one: one.t),
        sorted(requests, key=lambda one: one.finished),
        is_cut=any(trace.is_cut for trace in traces),
    )


def _shifted(request: RequestRecord, later: float, number: int) -> RequestRecord:
    moved = {name: None if (at := getattr(request, name)) is None else at + later for name in _TIMES}
    return request.model_copy(update={"number": number, **moved})
