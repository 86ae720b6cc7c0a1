"""Metrics in Prometheus's text format, through prometheus_client (extra [server])."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import ConfigError
from .histogram import length_histogram
from .table import METRICS, Metric

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family


class Collector(Protocol):
    """What `prometheus_client.CollectorRegistry.register` takes."""

    def collect(self) -> Iterator[Family]: ...


class _StatsCollector:
    def __init__(self, stats: Callable[[], Mapping[str, Any]]) -> None:
        self._stats = stats

    def describe(self) -> list[Family]:
        """Nothing: `register` is not to ask an engine for its stats."""
        return []

    def collect(self) -> Iterator[Family]:
        yield from _families(self._stats())


def collector(stats: Callable[[], Mapping[str, Any]]) -> Collector:
    """For a registry. stats: `stats` of an Engine, LLM or WorkerPool, or what asks the thread that owns one;
    called once in a scrape, in the thread of that. Raises ConfigError without prometheus_client."""
    _require()
    return _StatsCollector(stats)


def render_prometheus(stats: Mapping[str, Any]) -> bytes:
    """The text of one scrape, of the type `prometheus_client.CONTENT_TYPE_LATEST`, of what `stats()` has
    returned. Metrics that it lacks are left out. Raises ConfigError without prometheus_client."""
    _require()
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(collector(lambda: stats))
    return generate_latest(registry)


def _require() -> None:
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise ConfigError("metrics for Prometheus need prometheus_client: pip install '.[server]'") from None


def _families(stats: Mapping[str, Any]) -> Iterator[Family]:
    for metric in METRICS:
        if metric.name in stats:
            yield _family(metric, stats[metric.name])


def _family(metric: Metric, value: Any) -> Family:
    from prometheus_client import core

    name, labels = metric.exposed_name, [metric.label] if metric.label else []
    if metric.kind == "histogram":
        found = length_histogram(value) if isinstance(value, list) else value
        ends = [*map(str, metric.bounds), "+Inf"]
        buckets = list(zip(ends, accumulate(found["counts"]), strict=True))
        return core.HistogramMetricFamily(name, metric.meaning, buckets, found["sum"])
    make = core.CounterMetricFamily if metric.kind == "counter" else core.GaugeMetricFamily
    family = make(name, metric.meaning, labels=labels)
    for each, number in (value if metric.label else {"": value}).items():
        family.add_metric([each] if metric.label else [], number)
    return family
