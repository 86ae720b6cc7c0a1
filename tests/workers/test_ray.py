"""Workers that are actors of a Ray cluster: the same output, deaths, and what is refused at once."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from hispec import LLM, ConfigError
from hispec.config import EngineConfig
from hispec.config.ray_cluster import RayConfig
from hispec.errors import RequestError, build
from hispec.workers import ray_cluster, ray_worker
from hispec.workers.ray_cluster import RayCluster
from tests.workers.support import SMALL, actors, linux, wait_until
from tests.workers.test_outputs import GREEDY, PROMPTS, SAMPLED, generate

Machines = Sequence[tuple[float, float]]


class FakeRay(SimpleNamespace):
    """A cluster of machines with so many CPUs and GPUs each, and one that is gone."""

    def __init__(self, machines: Machines, is_initialized: bool = False) -> None:
        super().__init__(calls=[], machines=machines, joined=is_initialized)

    def is_initialized(self) -> bool:
        return self.joined

    def init(self, **arguments: Any) -> None:
        self.calls.append(arguments["address"])
        self.joined = True

    def shutdown(self) -> None:
        self.calls.append("shutdown")
        self.joined = False

    def nodes(self) -> list[dict[str, Any]]:
        alive = [{"Alive": True, "Resources": {"CPU": cpus, "GPU": gpus}} for cpus, gpus in self.machines]
        return [*alive, {"Alive": False, "Resources": {"CPU": 512.0}}]


def cluster_of(
    monkeypatch: pytest.MonkeyPatch, machines: Machines, engine: dict[str, Any] | None = None, **config: Any
) -> tuple[RayCluster, FakeRay]:
    fake = FakeRay(machines)
    monkeypatch.setattr(ray_cluster, "import_ray", lambda: fake)
    return RayCluster(build(RayConfig, config, "ray"), build(EngineConfig, engine or {}, "engine")), fake


@pytest.mark.parametrize(
    ("machines", "config", "shares"),
    [
        ([(0, 0), (16, 0), (16, 0)], {}, (4, 8, "cpu")),  # the head has no CPUs to give
        ([(4, 0), (16, 0)], {}, (5, 4, "cpu")),
        ([(16, 0), (7, 0)], {"num_cpus": 3}, (7, 3, "cpu")),
        ([(16, 4), (16, 4)], {}, (8, 1, "cuda:0")),
        ([(3, 4), (16, 0)], {}, (3, 1, "cuda:0")),
        ([(16, 4)], {"num_gpus": 0}, (2, 8, "cpu")),
        ([(16, 0)], {"workers": 5}, (5, 8, "cpu")),
    ],
)
def test_auto_takes_what_the_cluster_has(
    monkeypatch: pytest.MonkeyPatch, machines: Machines, config: dict[str, Any], shares: tuple[int, int, str]
) -> None:
    cluster, _ = cluster_of(monkeypatch, machines, **config)
    assert (len(cluster.shares), cluster.shares[0].threads, cluster.shares[0].device) == shares
    assert cluster.shares[0].cores is None


def test_workers_of_one_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cluster_of(monkeypatch, [(8, 0), (32, 0)])[0].sharers == 4
    assert cluster_of(monkeypatch, [(8, 0), (32, 0)], workers=3)[0].sharers == 3
    assert cluster_of(monkeypatch, [(0, 0)], workers=2)[0].sharers == 1  # it has yet to grow


@pytest.mark.parametrize(
    ("machines", "engine", "config", "words"),
    [
        ([(2, 0)], {}, {"num_cpus": 4}, "room for a worker of num_cpus=4.*they have 2 CPUs"),
        ([(2, 0)], {"device": "cuda"}, {}, "num_gpus=1"),
        ([(2, 0)], {"device": "cuda"}, {"num_gpus": 0}, "contradict"),
        ([(2, 1)], {"device": "cpu"}, {"num_gpus": 1}, "contradict"),
        ([(2, 1)], {"device": "cuda:1"}, {}, "names one GPU"),
        ([(2, 1)], {"device": "gpu"}, {}, "device='gpu': workers run on cpu and cuda; choose one, or auto"),
        ([(2, 0)], {"trace": "t.jsonl"}, {}, "engine.trace"),
    ],
)
def test_what_can_never_run_is_refused_and_the_cluster_is_left(
    monkeypatch: pytest.MonkeyPatch, machines: Machines, engine: Any, config: Any, words: str
) -> None:
    fake = FakeRay(machines)
    monkeypatch.setattr(ray_cluster, "import_ray", lambda: fake)
    with pytest.raises(ConfigError, match=words):
        RayCluster(build(RayConfig, config, "ray"), build(EngineConfig, engine, "engine"))
    assert fake.calls in ([], ["auto", "shutdown"])


def test_a_cluster_is_left_with_the_last_that_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    first, fake = cluster_of(monkeypatch, [(16, 0)], address="local")
    make = partial(RayCluster, engine=EngineConfig())
    others = [make(RayConfig()), make(RayConfig(address="local"))]
    with pytest.raises(ConfigError, match="address='head:6379': this program is in a Ray cluster already"):
        make(RayConfig(address="head:6379"))
    for cluster in (first, first, *others):
        assert fake.calls == ["local"]
        cluster.close()
    assert fake.calls == ["local", "shutdown"]
    fake.init(address="mine")
    make(RayConfig()).close()
    assert fake.joined, "the program is there by itself"
    with pytest.raises(ConfigError, match="already"):
        make(RayConfig(address="local"))


def test_a_client_of_a_cluster_is_refused_wherever_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(ConfigError, match="RAY_ADDRESS='ray://head:10001' is a Ray Client"):
        cluster_of(monkeypatch, [(16, 0)])
    assert cluster_of(monkeypatch, [(16, 0)], address="local")[1].calls == ["local"]


@pytest.mark.parametrize(
    "config",
    [
        {"address": "ray://head:10001"},
        {"address": ""},
        {"workers": 0},
        {"num_cpus": 0},
        {"num_cpus": "all"},
        {"num_gpus": 2},
        {"num_gpus": -1},
        {"cpus": 2},
    ],
)
def test_wrong_settings_are_named(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"ray\.{next(iter(config))}"):
        build(RayConfig, config, "ray")


def test_workers_of_this_machine_and_of_a_cluster_contradict_each_other(tiny_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set ray\.workers"):
        LLM(str(tiny_path), workers=2, ray={})


def test_a_cluster_that_is_not_there_is_named(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: Any) -> None:
        raise ConnectionError("nobody answers")

    fake = FakeRay([])
    fake.init = init
    monkeypatch.setattr(ray_cluster, "import_ray", lambda: fake)
    with pytest.raises(ConfigError, match=r"ray\.address: no Ray cluster at 'head:6379' \(nobody answers\)"):
        LLM(str(tiny_path), ray={"address": "head:6379"})


@pytest.fixture(scope="module")
def on_ray(tiny_path: Path) -> Iterator[LLM]:
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    try:
        with LLM(str(tiny_path), ray={"workers": 2, "num_cpus": 1}, **SMALL) as llm:
            yield llm
        assert ray.is_initialized()  # it was there before
    finally:
        ray.shutdown()


@pytest.mark.slow
def test_outputs_are_those_of_one_process(on_ray: LLM, one: LLM) -> None:
    for params in (GREEDY, SAMPLED.model_copy(update={"seed": 3})):
        assert generate(on_ray, params) == generate(one, params)
    assert on_ray.num_workers == 2 and on_ray.row_invariant == one.row_invariant


@pytest.mark.slow
def test_what_an_llm_is_asked_is_asked_of_all(on_ray: LLM, one: LLM) -> None:
    wait_until(lambda: len(on_ray.stats()["workers"]) == 2)
    on_ray.set_speculative({"draft": {"layer": 3}, "num_draft_tokens": 2})
    on_ray.reset_stats()
    assert generate(on_ray) == generate(one)
    assert on_ray.stats()["drafted"] > 0
    assert on_ray.fingerprints() == one.fingerprints()
    on_ray.set_speculative(None)
    with pytest.raises(ConfigError, match="draft"):
        on_ray.set_speculative({"draft": {"layer": 99}})
    with pytest.raises(RequestError, match="long: "):
        on_ray.add([1] * 1000, GREEDY, "long")


@pytest.mark.slow
def test_streams_and_aborts(on_ray: LLM, one: LLM) -> None:
    deltas = list(on_ray.stream("a stream", GREEDY))
    (wanted,) = generate(one, GREEDY, ["a stream"])
    assert "".join(delta.text for delta in deltas) == wanted.outputs[0].text
    on_ray.add(PROMPTS[0], GREEDY, "gone")
    on_ray.abort("gone")
    assert not on_ray.has_unfinished() and generate(on_ray) == generate(one)


@linux
@pytest.mark.slow
def test_rows_of_a_killed_actor_are_done_again_each_once(on_ray: LLM, one: LLM) -> None:
    params = SAMPLED.model_copy(update={"max_tokens": 100, "ignore_eos": True, "seed": 3})
    wanted = {str(at): output.outputs for at, output in enumerate(generate(one, params))}
    for at, prompt in enumerate(PROMPTS):
        on_ray.add(prompt, params, str(at))
    done: dict[str, Any] = {}
    is_killed = False
    while on_ray.has_unfinished():
        for output in on_ray.step():
            assert output.request_id not in done and output.error is None
            done[output.request_id] = [each.token_ids for each in output.outputs]
        if len(done) >= 2 and not is_killed:
            is_killed = True
            os.kill(actors()[0], signal.SIGKILL)
    assert done == {at: [each.token_ids for each in outputs] for at, outputs in wanted.items()} and is_killed
    assert on_ray.stats()["workers_replaced"] == 1
    assert generate(on_ray, params) == generate(one, params)


@pytest.mark.slow
def test_another_version_on_a_machine_is_refused() -> None:
    worker = ray_worker.RayWorker("0.0.1", b"not read", b"not read")
    messages = worker.give()
    while messages[-1] != ray_worker.END:
        messages += worker.give()
    with pytest.raises(ConfigError, match=r"this one 0\.0\.1; install the same"):
        raise pickle.loads(messages[0])
