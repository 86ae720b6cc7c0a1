"""How the machine is divided among workers."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hispec import LLM
from hispec.config import EngineConfig
from hispec.config.draft_kinds import KINDS, TRAITS
from hispec.config.speculative import ACCEPTANCES
from hispec.engine.admission import Admission
from hispec.engine.kv_sizing import host_num_blocks
from hispec.errors import ConfigError, build
from hispec.jobs.schema import Job
from hispec.utils import memory
from hispec.workers import shares
from hispec.workers.messages import Hello, Start
from hispec.workers.shares import Share, make_shares
from hispec.workers.start import start_all

CPU = EngineConfig(device="cpu")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 4, 5, 6, 7}, raising=False)
    monkeypatch.setattr(shares, "_CPU_MAX", Path("/nowhere"))
    monkeypatch.setattr(shares, "_CPU_GROUP", Path("/nowhere"))
    monkeypatch.setattr(shares, "free_memory_bytes", lambda: 100 << 30)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def cores(workers: int | str) -> list[tuple[int, ...] | None]:
    return [share.cores for share in make_shares(workers, CPU)]


def test_cores_are_dealt_out_without_rest() -> None:
    assert cores(2) == [(2, 3, 4), (5, 6, 7)]
    assert cores(4) == [(2,), (3, 4), (5,), (6, 7)]
    assert [share.threads for share in make_shares(4, CPU)] == [1, 2, 1, 2]
    assert cores("auto") == [(each,) for each in range(2, 8)]


def test_more_workers_than_cores_have_one_each() -> None:
    found = make_shares(8, CPU)
    assert len(found) == 8 and {share.cores for share in found} == {(each,) for each in range(2, 8)}
    assert all(share.threads == 1 for share in found)


def test_auto_wants_memory_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "free_memory_bytes", lambda: 5 << 30)
    assert len(make_shares("auto", CPU)) == 2
    monkeypatch.setattr(shares, "free_memory_bytes", lambda: 1)
    assert len(make_shares("auto", CPU)) == 1


def test_a_containers_quota_counts_and_nothing_is_bound(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limit = tmp_path / "cpu.max"
    monkeypatch.setattr(shares, "_CPU_MAX", limit)
    limit.write_text("350000 100000\n")
    assert make_shares("auto", CPU) == [Share(None, 1, "cpu")] * 4
    assert make_shares(2, CPU) == [Share(None, 2, "cpu")] * 2
    limit.write_text("max 100000\n")
    assert len(make_shares("auto", CPU)) == 6


@pytest.mark.parametrize(
    ("quota", "number"), [("250000", 3), ("-1", 6), ("9000000", 6), ("0", 6), ("none", 6)]
)
def test_so_does_one_of_the_first_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str, number: int
) -> None:
    monkeypatch.setattr(shares, "_CPU_GROUP", tmp_path)
    (tmp_path / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (tmp_path / "cpu.cfs_period_us").write_text("100000\n")
    assert len(make_shares("auto", CPU)) == number


@pytest.mark.parametrize(
    ("device", "words"),
    [("tpu", "device='tpu'"), ("gpu", "device='gpu'"), ("meta", "cpu and cuda; choose one of them")],
)
def test_a_device_that_there_is_not_is_refused_as_of_one_worker(device: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_shares(2, EngineConfig(device=device))


def test_a_gpu_that_there_is_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(shares, "select_device", asked.append)  # which says so
    for device in ("cuda", "cuda:0", "auto", "cpu"):
        with suppress(ConfigError):
            make_shares(2, EngineConfig(device=device))
    assert asked == ["cuda", "cuda:0"]


def test_omp_num_threads_limits_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert [share.threads for share in make_shares(2, CPU)] == [2, 2]
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    with pytest.raises(ConfigError, match="OMP_NUM_THREADS='many'"):
        make_shares(2, CPU)


def test_on_gpus_each_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    auto = EngineConfig()
    assert [share.device for share in make_shares("auto", auto)] == ["cuda:0", "cuda:1", "cuda:2"]
    assert [share.device for share in make_shares(2, EngineConfig(device="cuda"))] == ["cuda:0", "cuda:1"]
    with pytest.raises(ConfigError, match="workers=4: each has a GPU of its own, and there are 3"):
        make_shares(4, auto)
    with pytest.raises(ConfigError, match=r"engine.device='cuda:1' names one"):
        make_shares(2, EngineConfig(device="cuda:1"))
    assert len(make_shares("auto", EngineConfig(device="cuda:1"))) == 1


@pytest.mark.parametrize("workers", [0, -1, True, 2.0, "two", None, 4096])
def test_other_numbers_are_refused(workers: object, tiny_path: Path) -> None:
    with pytest.raises(ConfigError, match="workers: must be auto, or an integer from 1 to 1024, got"):
        LLM(str(tiny_path), workers=workers)  # type: ignore[arg-type]
    job = {"model": "m", "input": {"path": "a"}, "output": {"path": "b"}}
    with pytest.raises(ConfigError, match=r"^workers: must be auto, or an integer from 1 to 1024, got"):
        build(Job, {**job, "workers": workers})
    assert build(Job, {**job, "workers": "auto"}).workers == "auto"


def test_kv_takes_its_part_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hispec.engine.kv_sizing.free_memory_bytes", lambda: 1200)
    config = EngineConfig(max_num_seqs=1000)
    found = [host_num_blocks(config, 10, 1000, sharers) for sharers in (1, 2, 3)]
    assert found == [60, 30, 20] and memory.free_memory_bytes() > 0


def test_what_this_process_has_registered_is_refused(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "_cores", lambda: ([0, 1], 2))
    monkeypatch.setitem(TRAITS, "mine", TRAITS["ngram"])
    KINDS.append("mine")
    ACCEPTANCES.append("ours")
    try:
        for plan, words in (
            ({"draft": {"kind": "mine"}}, "speculative.draft.kind='mine' was registered in this process"),
            ({"draft": {"kind": "ngram"}, "acceptance": "ours"}, "speculative.acceptance='ours' was"),
        ):
            with pytest.raises(ConfigError, match=words):
                LLM(str(tiny_path), workers=2, device="cpu", speculative=plan)
    finally:
        KINDS.remove("mine")
        ACCEPTANCES.remove("ours")


class Starts:
    """A Launcher of GPUs that have room for so many blocks each; `asked`: what each was told to have."""

    def __init__(self, room: list[int]) -> None:
        self.room, self.asked = room, list[int | None]()

    def start(self, start: Start) -> Any:
        at = len(self.asked)
        self.asked.append(start.config.num_kv_blocks)
        blocks = start.config.num_kv_blocks or self.room[at]
        hello = Hello(Admission(100, 64, blocks, 8, 0, frozenset()), True)
        return SimpleNamespace(connection=SimpleNamespace(poll=lambda _: True, recv=lambda: hello))


@pytest.mark.parametrize(
    ("device", "asked", "blocks"), [("cuda", [None] * 3, 40), ("cpu", [None, 50, 50], 50)]
)
def test_each_gpu_has_the_blocks_that_it_has_room_for(
    device: str, asked: list[int | None], blocks: int
) -> None:
    launcher = Starts([50, 40, 60])
    setup: Any = SimpleNamespace(config=EngineConfig(), speculative=None, sharers=3)
    shares = [Share(None, 1, f"cuda:{at}" if device == "cuda" else "cpu") for at in range(3)]
    processes, num_ready, hello = start_all(launcher, setup, shares, waits=True)  # type: ignore[arg-type]
    assert launcher.asked == asked and len(processes) == num_ready == 3
    assert hello.admission.num_blocks == blocks  # that any of them can serve
