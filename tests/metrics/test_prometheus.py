"""Prometheus's text has the table's metrics, with the numbers of stats, of one engine and of workers."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from ee_models.decoder import Decoder
from hispec.config import Plan
from hispec.errors import ConfigError
from hispec.metrics.prometheus import collector, render_prometheus
from hispec.metrics.table import ERROR_KINDS, METRICS
from hispec.stats import EngineStats
from hispec.workers.totals import sum_stats
from tests.helpers.support import make_engine, random_prompts, run


def samples_of(stats: Mapping[str, Any]) -> dict[tuple[str, tuple[str, ...]], float]:
    """Values by name and values of labels, read as a scraper reads them."""
    families = text_string_to_metric_families(render_prometheus(stats).decode())
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.fixture
def stats(tiny_decoder: Decoder) -> dict[str, Any]:
    engine = make_engine(tiny_decoder, Plan(3, 6, 2, 2))
    run(engine, random_prompts((3, 20, 9)))
    return engine.stats()


def test_every_metric_of_an_engine_is_exposed_once(stats: dict[str, Any]) -> None:
    samples = samples_of(stats)
    for metric in METRICS:
        if metric.name == "workers_replaced":
            continue
        name, value = metric.exposed_name, stats[metric.name]
        if metric.label:
            assert {labels[0]: n for (one, labels), n in samples.items() if one == name} == value
        elif metric.kind == "histogram":
            counts = value if isinstance(value, list) else value["counts"]
            assert samples[f"{name}_count", ()] == samples[f"{name}_bucket", ("+Inf",)] == sum(counts) > 0
            buckets = [n for (one, _), n in samples.items() if one == f"{name}_bucket"]
            assert buckets == sorted(buckets) and len(buckets) == len(metric.bounds) + 1
        else:
            assert samples[name, ()] == value, name
    assert samples["hispec_accept_length_tokens_sum", ()] == stats["committed"]
    assert samples["hispec_ttft_seconds_sum", ()] == pytest.approx(stats["ttft_s"]["sum"])


def test_workers_are_exposed_by_their_sums(stats: dict[str, Any]) -> None:
    total = {**sum_stats([stats, stats]), "workers": [stats, stats], "workers_replaced": 3}
    samples = samples_of(total)
    assert samples["hispec_workers_replaced_total", ()] == 3
    assert samples["hispec_tokens_total", ()] == 2 * stats["tokens"] > 0
    assert samples["hispec_ttft_seconds_count", ()] == 6
    assert samples["hispec_num_layers", ()] == stats["num_layers"]
    assert samples["hispec_finished_by_reason_requests_total", ("length",)] == 6


def test_names_are_prometheus_names_with_base_units() -> None:
    names = [metric.exposed_name for metric in METRICS]
    assert len(set(names)) == len(names) == len({metric.name for metric in METRICS})
    for metric in METRICS:
        assert re.fullmatch(r"hispec_[a-z][a-z0-9_]*", metric.exposed_name)
        assert metric.exposed_name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert ("seconds" in metric.exposed_name) == (metric.unit == "seconds") == metric.name.endswith("_s")
        assert list(metric.bounds) == sorted(set(metric.bounds))
        assert bool(metric.bounds) == (metric.kind == "histogram")


def test_the_table_leaves_out_only_what_is_for_people(stats: dict[str, Any]) -> None:
    """A new key of stats goes into the table, or here and on the page."""
    others = {"control", "layer_positions", "adapter_passes", "draft_model_layer_passes"}
    assert stats.keys() == {metric.name for metric in METRICS} - {"workers_replaced"} | others
    assert set(EngineStats().as_dict()["errors"]) == set(ERROR_KINDS)


def test_a_registered_collector_asks_when_it_is_scraped(stats: dict[str, Any]) -> None:
    asked = [0]

    def ask() -> Mapping[str, Any]:
        asked[0] += 1
        return {**stats, "waiting": asked[0]}

    registry = CollectorRegistry()
    registry.register(collector(ask))
    assert asked == [0]
    assert registry.get_sample_value("hispec_waiting_requests") == 1
    assert registry.get_sample_value("hispec_waiting_requests") == 2


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[server\]'"):
        render_prometheus({})
