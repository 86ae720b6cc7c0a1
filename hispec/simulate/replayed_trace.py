"""Reads requests that an engine recorded in a trace."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import ConfigError
from ..trace.records import RequestRecord
from ..trace.writer import read_trace
from ..utils.files import expanded
from .config import SimulationConfig
from .distributions import Floats, Ints
from .workload import Recorded, Workload

_UNKNOWN = -2  # a route whose rounds are simulated, not repeated: not in the experiment, or a hybrid


def read_recording(config: SimulationConfig) -> Workload | None:
    """Reads the requests of requests.trace that ended by themselves, in order of arrival; None without a
    trace. Raises ConfigError for a file that cannot be read or has none."""
    if config.requests.trace is None:
        return None
    path = expanded(config.requests.trace)
    requests = sorted(
        (each for each in read_trace(path).requests if each.output_tokens and each.has_finished),
        key=lambda each: each.arrival,
    )
    if not requests:
        raise ConfigError(f"requests.trace: no request was finished in {path}; record a longer run")
    num = len(requests)
    shares = np.ones((max(1, len(config.routes)), num, 4))  # each repeat draws its own
    routes = [each.route for each in config.routes.values()]
    names = [str(route) for route in routes]
    # Drafts that a hybrid looked up cost less than its exit's, and a trace does not tell one from the other.
    numbers = {str(route): names.index(str(route)) for route in routes if not route.traits.is_mixed}
    times: Floats = np.array([each.arrival for each in requests])
    return Workload(
        _whole([each.prompt_tokens for each in requests]),
        _whole([min(each.cached_tokens, each.prompt_tokens - 1) for each in requests]),
        _whole([each.output_tokens for each in requests]),
        _whole([each.max_tokens for each in requests]),
        np.zeros(num, np.int64),
        ("recorded",),
        (False,),
        np.random.default_rng([config.seed, 2]).integers(0, 2**63, num, dtype=np.uint64),
        shares,
        np.arange(num),
        _rounds(requests, numbers, [names.index(name) for name in names]),
        times,
    )


def _rounds(requests: list[RequestRecord], numbers: dict[str, int], routes: list[int]) -> Recorded:
    starts, rounds = [0], list[tuple[int, ...]]()
    cycles: list[tuple[int, ...]] = []
    for request in requests:
        for route, committed, drafted, kept in request.rounds:
            number = -1 if route < 0 else numbers.get(request.routes[route], _UNKNOWN)
            rounds.append((number, committed, len(cycles), len(cycles) + len(drafted)))
            cycles += zip(drafted, kept, strict=True)
        starts.append(len(rounds))
    return Recorded(
        _whole(starts), _whole(routes), _whole(rounds).reshape(-1, 4), _whole(cycles).reshape(-1, 2)
    )


def _whole(values: Sequence[int] | Sequence[tuple[int, ...]]) -> Ints:
    return np.array(values, np.int64)
