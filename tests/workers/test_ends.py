"""No process outlives its LLM, however that ends; errors of the start are those of one engine."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ee_models.errors import CheckpointError
from hispec import LLM
from hispec.config import EngineConfig
from hispec.errors import ConfigError, WorkerError
from hispec.outputs import RequestOutput
from hispec.workers import dispatcher, launch
from hispec.workers import pool as pool_module
from hispec.workers.launch import LocalLauncher
from hispec.workers.messages import Setup
from hispec.workers.shares import make_shares
from hispec.workers.start import start_of
from tests.helpers.forked import said_in_a_fork
from tests.helpers.interrupts import Interrupts
from tests.helpers.sweeps import sweep
from tests.workers.support import SMALL, all_pids, is_alive, linux, pool, wait_until, worker_pids
from tests.workers.test_outputs import GREEDY, PROMPTS, generate, plain

pytestmark = linux
ROOT = Path(__file__).parents[2]
ENDLESS = GREEDY.model_copy(update={"max_tokens": 110, "ignore_eos": True})
PROGRAM = """
import sys, time
from hispec import LLM
from tests.workers.support import SMALL, all_pids
llm = LLM(sys.argv[1], workers=2, **SMALL)
llm.add("busy", {"max_tokens": 100, "ignore_eos": True}, "a")
print(*all_pids(llm), flush=True)
if sys.argv[2] == "waits":
    time.sleep(1000)
"""


def test_close_leaves_no_process(tiny_path: Path) -> None:
    llm = LLM(str(tiny_path), workers=2, **SMALL)
    pids = all_pids(llm)
    assert len(pids) == 3 and all(map(is_alive, pids))
    llm.add("a", ENDLESS, "a")
    llm.close()
    assert not any(map(is_alive, pids))


@pytest.mark.slow
def test_close_waits_only_so_long_for_a_worker_that_hangs(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (pool_module, dispatcher):
        monkeypatch.setattr(module, "_PATIENCE_S", 0.2)
    llm = LLM(str(tiny_path), workers=2, **SMALL)
    pids = all_pids(llm)
    os.kill(worker_pids(llm)[1], signal.SIGSTOP)
    closing = threading.Thread(target=llm.close, daemon=True)
    closing.start()
    closing.join(20.0)
    is_over = not closing.is_alive()
    for pid in pids:  # in any case
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert is_over and not any(map(is_alive, pids)) and llm.stats()["workers_replaced"] == 0


@pytest.mark.slow
def test_an_llm_that_nobody_holds_leaves_no_process(tiny_path: Path) -> None:
    llm = LLM(str(tiny_path), workers=2, **SMALL)
    pids = all_pids(llm)
    del llm
    gc.collect()
    wait_until(lambda: not any(map(is_alive, pids)))


@sweep("ending", ["ends", "waits"], "ends".__eq__)
def test_the_end_of_the_program_ends_all_processes(tiny_path: Path, ending: str) -> None:
    """By itself without close(), or by kill -9."""
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tiny_path), ending],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert program.stdout is not None
    pids = [int(pid) for pid in program.stdout.readline().split()]
    assert len(pids) == 3
    if ending == "waits":
        assert all(map(is_alive, pids))
        program.kill()
    program.wait(60)
    program.stdout.close()
    wait_until(lambda: not any(map(is_alive, pids)))


def started() -> list[int]:
    """Children of this process that run hispec.workers."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split()
    return [int(pid) for pid in children if is_alive(int(pid))]


def test_what_goes_wrong_while_loading_is_raised_and_no_process_is_left(
    tiny_path: Path, tmp_path: Path
) -> None:
    before = started()
    (tmp_path / "config.json").write_text((tiny_path / "config.json").read_text())
    small = dict(SMALL)
    for model, more, kind, words in [
        (tmp_path, {}, CheckpointError, "safetensors"),  # the process that loads
        (tiny_path, {"num_kv_blocks": 1 << 40}, ConfigError, "for each of 2 workers"),  # a worker
        (tiny_path, {"speculative": {"draft": {"layer": 99}}}, ConfigError, r"draft\.layer"),
    ]:
        with pytest.raises(kind, match=words):
            LLM(str(model), workers=2, **{**small, **more})
        assert started() == before


def test_a_process_that_ends_before_it_has_loaded_is_told(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_CODE", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(WorkerError, match=r"that loads the model was ended by SIGKILL.*memory"):
        LLM(str(tiny_path), workers=2, **SMALL)


@pytest.mark.slow
def test_workers_ignore_ctrl_c(two: LLM, one: LLM) -> None:
    pids = all_pids(two)
    groups = {os.getpgid(pid) for pid in pids}
    assert os.getpgid(0) not in groups, "a terminal's Ctrl-C would reach them"
    for pid in pids:
        os.kill(pid, signal.SIGINT)
    assert generate(two) == generate(one) and all_pids(two) == pids


def test_a_fork_of_the_llms_process_says_so_and_ends_nothing(two: LLM, one: LLM) -> None:
    pids = all_pids(two)
    calls: dict[str, Callable[[], Any]] = {
        "generate": lambda: generate(two),
        "step": two.step,
        "memory": two.memory,
    }
    for method, call in calls.items():
        said = said_in_a_fork(call)
        assert said.startswith(f"ProcessError: LLM.{method}(): this LLM was made in process {os.getpid()}, w")
    assert generate(two) == generate(one) and all_pids(two) == pids


@pytest.mark.parametrize("at", [1, 2])
def test_an_interrupt_at_any_line_of_a_step_loses_nothing(two: LLM, one: LLM, at: int) -> None:
    params = GREEDY.model_copy(update={"n": 2, "ignore_eos": True, "temperature": 1.0, "seed": 3})
    wanted = generate(one, params)
    interrupts = Interrupts("hispec/llm.py", "hispec/workers/pool.py", at=at)
    done: dict[str, RequestOutput] = {}
    for number, prompt in enumerate(PROMPTS):
        two.add(prompt, params, str(number))
    while two.has_unfinished():
        try:
            with interrupts.armed():
                two._advance()
        except KeyboardInterrupt:
            continue
        for output in two.step():
            assert output.request_id not in done
            done[output.request_id] = output
    assert len(interrupts.lines) > 20
    assert [plain(done[str(number)]).outputs for number in range(len(PROMPTS))] == [
        output.outputs for output in wanted
    ]


def test_an_interrupted_add_abort_or_stream_leaves_nothing(two: LLM) -> None:
    def add_and_abort() -> None:
        two.add("one", ENDLESS, "a")
        two.abort("a")

    calls: list[Callable[[], Any]] = [add_and_abort, lambda: list(two.stream("one", GREEDY))]
    for call in calls:
        interrupts, count = Interrupts("hispec/llm.py", "hispec/workers/pool.py"), -1
        while count < len(interrupts.lines):
            count = len(interrupts.lines)
            with suppress(KeyboardInterrupt), interrupts.armed():
                call()
            known = {name for pending in two._pending.values() for name in pending.sequences}
            assert set(pool(two)._numbers) <= known
            two.abort(list(two._pending))
            assert not two.has_unfinished() and not pool(two).has_unfinished()
        assert count > 15
    wait_until(lambda: not pool(two)._dispatcher._tasks)
    wait_until(lambda: not any(each["running"] + each["waiting"] for each in two.stats()["workers"]))


@pytest.mark.slow
def test_without_fork_each_worker_loads_for_itself(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on other systems, and on GPUs."""
    monkeypatch.setattr(sys, "platform", "other")
    with LLM(str(tiny_path), **SMALL) as single, LLM(str(tiny_path), workers=2, **SMALL) as llm:
        monkeypatch.undo()
        assert pool(llm)._dispatcher._launcher._nursery is None and len(worker_pids(llm)) == 2
        pids = worker_pids(llm)
        assert generate(llm) == generate(single)
        assert llm.memory()["weights_bytes"] == 2 * single.memory()["weights_bytes"]
        os.kill(pids[0], signal.SIGKILL)
        assert generate(llm) == generate(single)
        pids += worker_pids(llm)
    assert not any(map(is_alive, pids))


@pytest.mark.slow
def test_a_nursery_has_one_thread_and_workers_share_its_pages(tiny_path: Path) -> None:
    """A fork with threads would lose them, and hang whoever waits for one."""
    config = EngineConfig(**SMALL)
    setup = Setup(tiny_path, config, None, None, None, None, False, sharers=1, forks=True)
    launcher = LocalLauncher(setup)
    try:
        assert launcher._nursery is not None
        assert len(os.listdir(f"/proc/{launcher._nursery.pid}/task")) == 1
        assert make_shares(1, config)[0].device == "cpu"
    finally:
        launcher.close()


def test_a_worker_in_anothers_place_has_all_memory_that_is_free(tiny_path: Path) -> None:
    """The others hold theirs by then: divided by their number again, it would be less than the dead one's."""
    config = EngineConfig(**SMALL)
    setup = Setup(tiny_path, config, None, None, None, None, False, sharers=4, forks=True)
    shares = make_shares(2, config)
    assert [start_of(setup, shares, 8, 1, num_replaced).sharers for num_replaced in (0, 1)] == [4, 1]


def test_workers_are_bound_to_their_cores(two: LLM) -> None:
    """With the threads that they have started; their shares are `test_shares.py`'s."""
    generate(two)
    shares = pool(two)._shares
    for share, pid in zip(shares, worker_pids(two), strict=True):
        wanted = os.sched_getaffinity(0) if share.cores is None else set(share.cores)
        for thread in os.listdir(f"/proc/{pid}/task"):
            assert os.sched_getaffinity(int(thread)) == wanted
