"""Workers that die: others take their place and their requests; one request that kills each fails alone."""

from __future__ import annotations

import os
import signal
import threading
import time
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from ee_models.errors import CheckpointError
from hispec import LLM, SamplingParams
from hispec.errors import ConfigError, WorkerError
from hispec.metrics.table import METRICS
from hispec.workers.dispatcher import Dispatcher
from hispec.workers.launch import LocalLauncher, NotYetError, Process
from hispec.workers.messages import Start
from hispec.workers.pipes import interval_of
from hispec.workers.state import Vacancy
from tests.workers.support import DEADLY, SMALL, Deadly, linux, pool, wait_until, worker_pids
from tests.workers.test_outputs import GREEDY, PROMPTS, SAMPLED, generate, plain

LONG = SAMPLED.model_copy(update={"max_tokens": 100, "ignore_eos": True, "tiers": True})
pytestmark = linux


def kill_one_at_work(llm: LLM, killed: set[int]) -> None:
    """Kills a worker that has requests, if there is one, and adds its pid."""
    for each in list(pool(llm)._dispatcher._workers):
        if each.tasks and each.process.pid not in killed:
            os.kill(each.process.pid, signal.SIGKILL)
            killed.add(each.process.pid)
            return


def test_requests_of_a_killed_worker_are_done_again_each_once(two: LLM, one: LLM) -> None:
    before, killed = two.stats()["workers_replaced"], set[int]()
    for seed in range(3, 23):  # mostly one will do: others may have done everything before any can be killed
        with_seeds = LONG.model_copy(update={"seed": seed})
        wanted = {str(at): output.outputs for at, output in enumerate(generate(one, with_seeds))}
        for at, prompt in enumerate(PROMPTS):
            two.add(prompt, with_seeds, str(at))
        done = {}
        while two.has_unfinished():
            for output in two.step():
                assert output.request_id not in done and output.error is None
                done[output.request_id] = plain(output).outputs
            if len(killed) < 2 and len(done) >= 3 * len(killed):
                kill_one_at_work(two, killed)
        assert done == wanted
        if len(killed) == 2:
            break
    assert len(killed) == 2
    wait_until(lambda: two.stats()["workers_replaced"] == before + 2)
    assert generate(two, with_seeds) == generate(one, with_seeds)


def test_what_a_dead_worker_had_counted_of_finished_requests_is_not_lost(two: LLM) -> None:
    two.reset_stats()
    params = GREEDY.model_copy(update={"max_tokens": 30, "ignore_eos": True})
    generate(two, params, ["before"])
    for kills in range(1, 3):
        before = two.stats()
        for at, prompt in enumerate(PROMPTS):
            two.add(prompt, params, str(at))
        done = 0
        while two.has_unfinished():
            done += len(two.step())
            if done >= 2 and two.stats()["workers_replaced"] == before["workers_replaced"]:
                os.kill(worker_pids(two)[0], signal.SIGKILL)
                wait_until(lambda n=before["workers_replaced"]: pool(two)._dispatcher.num_replaced > n)
        after = two.stats()
        assert after["finished"] == after["finished_by_reason"]["length"] == 1 + kills * len(PROMPTS)
        assert after["tokens"] >= 30 * after["finished"]
        assert sum(after["e2e_s"]["counts"]) == after["finished"]
        for metric in METRICS:
            if metric.kind == "counter" and not metric.label:
                assert after[metric.name] >= before[metric.name], metric.name
        assert (
            after["kv_blocks_used"] == after["running"] == 0 and after["num_layers"] == before["num_layers"]
        )
    two.reset_stats()
    assert two.stats()["finished"] == two.stats()["tokens"] == 0


class Counted:
    """A request that counts how often it is looked at."""

    looks = 0

    def __init__(self, number: int) -> None:
        self._number = number

    @property
    def number(self) -> int:
        Counted.looks += 1
        return self._number


def test_aborting_all_of_many_requests_looks_at_each_a_few_times() -> None:
    size = 500
    dispatcher = Dispatcher(Nothing(), [], 0, lambda *_: None, None, 60.0)  # type: ignore
    try:
        for number in range(size):
            dispatcher.post(dispatcher.add, Counted(number))
        dispatcher.ask("nothing")
        assert dispatcher.num_queued == size
        for number in range(size):
            dispatcher.post(dispatcher.abort, [number])
        dispatcher.ask("nothing")
        assert dispatcher.num_queued == 0 and Counted.looks <= 10 * size
    finally:
        dispatcher.close()


def test_a_vacant_place_is_looked_at_when_it_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher: Any = Nothing()
    dispatcher = Dispatcher(launcher, [], 0, lambda *_: None, None, 600.0)
    try:
        rare = dispatcher._at_most_s()
        assert rare == interval_of(600.0) > 1.0
        for until, least, most in ((1.0, 0.0, 1.0), (1e6, rare, rare), (-1.0, 0.0, 0.0)):
            dispatcher._vacant[0] = Vacancy(1.0, time.monotonic() + until)
            assert least <= dispatcher._at_most_s() <= most
        dispatcher._fail(WorkerError("none is left"))
        assert dispatcher._at_most_s() == rare, "nobody fills places any more"
    finally:
        dispatcher._vacant.clear()
        dispatcher.close()


class Nothing:
    """A Launcher of no process."""

    def close(self) -> None:
        pass


def test_a_stream_goes_on_where_a_killed_worker_left_it(two: LLM, one: LLM) -> None:
    killed: set[int] = set()
    for seed in range(4, 24):  # mostly one will do: it may have ended before a worker can be killed
        params = LONG.model_copy(update={"seed": seed})
        (wanted,) = generate(one, params, ["a stream"])
        deltas = []
        for delta in two.stream("a stream", params):
            deltas.append(delta)
            if len(deltas) in (2, 3):
                kill_one_at_work(two, killed)
        (output,) = wanted.outputs
        assert [token for delta in deltas for token in delta.token_ids] == output.token_ids
        assert "".join(delta.text for delta in deltas) == output.text
        assert [entry for delta in deltas for entry in delta.logprobs or []] == output.logprobs
        assert [tier for delta in deltas for tier in delta.tiers or []] == output.tiers == ["verify"] * 100
        if len(killed) >= 2:
            break
    assert len(killed) >= 2


def test_workers_that_die_before_they_are_ready_are_replaced_too(two: LLM, one: LLM) -> None:
    for _ in range(2):
        before = worker_pids(two)
        os.kill(before[0], signal.SIGKILL)
        wait_until(lambda before=before: len(worker_pids(two)) == 2 and worker_pids(two) != before)
    assert generate(two) == generate(one) and len(worker_pids(two)) == 2


@pytest.mark.slow
def test_a_killed_nursery_is_replaced_when_it_is_needed(two: LLM, one: LLM) -> None:
    launcher = pool(two)._dispatcher._launcher
    nursery = launcher._nursery
    assert nursery is not None
    os.kill(nursery.pid, signal.SIGKILL)
    wanted = generate(one)
    assert generate(two) == wanted
    os.kill(worker_pids(two)[1], signal.SIGKILL)
    wait_until(lambda: launcher._nursery is not None and launcher._nursery is not nursery)
    assert generate(two) == wanted
    wait_until(lambda: all(worker.is_ready for worker in pool(two)._dispatcher._workers))


@pytest.mark.slow
def test_workers_go_on_while_a_killed_nursery_loads_again(
    two: LLM, one: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, may_load = pool(two)._dispatcher._launcher, threading.Event()
    load = launcher._load

    def load_later() -> Process:
        assert may_load.wait(60.0)
        return load()

    monkeypatch.setattr(launcher, "_load", load_later)
    os.kill(launcher.nursery_pid, signal.SIGKILL)
    os.kill(worker_pids(two)[1], signal.SIGKILL)
    wait_until(lambda: launcher._loading is not None)
    wanted = generate(one)
    assert generate(two) == wanted and len(worker_pids(two)) == 1
    may_load.set()
    wait_until(lambda: len(worker_pids(two)) == 2)
    wait_until(lambda: all(worker.is_ready for worker in pool(two)._dispatcher._workers))
    assert generate(two) == wanted and launcher._loading is None


def test_a_nursery_is_loaded_again_beside_the_workers_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, may_load, loaded = object.__new__(LocalLauncher), threading.Event(), []
    launcher._loading = None
    ours, _ = Pipe()
    outcome = Process(ours, None)

    def load() -> Process:
        loaded.append(may_load.wait(60.0))
        if len(loaded) == 2:
            raise CheckpointError("the model is gone")
        return outcome

    monkeypatch.setattr(launcher, "_load", load)
    for _ in range(3):
        with pytest.raises(NotYetError, match="started again"):
            launcher._load_again(waits=False)
    may_load.set()
    assert launcher._load_again(waits=True) is outcome and loaded == [True]
    with pytest.raises(CheckpointError, match="gone"):
        launcher._load_again(waits=True)
    assert launcher._load_again(waits=True) is outcome and len(loaded) == 3


def test_a_request_that_kills_each_worker_fails_alone(tiny_path: Path) -> None:
    prompts = [[5, 6, 8 + at] for at in range(6)]
    prompts[2].append(DEADLY)
    with LLM(
        str(tiny_path), workers=2, scheduling={"policy": "sjf"}, length_predictor=Deadly(), **SMALL
    ) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [output.error is None for output in outputs] == [at != 2 for at in range(6)]
        assert outputs[2].error is not None
        assert "3 workers died while they served it" in outputs[2].error and "SIGKILL" in outputs[2].error
        stats = llm.stats()
        assert stats["errors"]["worker_deaths"] == stats["finished_by_reason"]["error"] == 1
        assert llm.stats()["workers_replaced"] == 3
        assert all(len(output.outputs[0].token_ids) > 0 for at, output in enumerate(outputs) if at != 2)


class Unpicklable(Deadly):
    def __init__(self) -> None:
        self.function = lambda: None


def test_a_predictor_that_cannot_be_sent_is_refused(tiny_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"length_predictor=.* cannot be sent to other processes"):
        LLM(str(tiny_path), workers=2, length_predictor=Unpicklable(), **SMALL)


@pytest.mark.slow
def test_without_a_worker_left_step_says_why(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(str(tiny_path), workers=2, **SMALL) as llm:
        dispatcher: Dispatcher = pool(llm)._dispatcher

        def start(_: object, waits: bool) -> None:
            raise WorkerError("no memory for another")

        monkeypatch.setattr(dispatcher._launcher, "start", start)
        pids = worker_pids(llm)
        for pid in pids:  # or the request might be done before they die
            os.kill(pid, signal.SIGSTOP)
        llm.add("a", SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True), "a")
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match="no memory for another"):
            while llm.has_unfinished():
                llm.step()
        with pytest.raises(WorkerError, match="no memory for another"):  # from then on
            llm.step()
        assert "rounds" in llm.stats()  # what was counted before


def test_a_place_that_could_not_be_filled_is_tried_again(
    two: LLM, one: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dispatcher = pool(two)._dispatcher
    launcher, before, tries = dispatcher._launcher, dispatcher.num_replaced, []
    start = launcher.start

    def fail_twice(given: Start, waits: bool) -> Process:
        tries.append(time.monotonic())
        if len(tries) < 3:
            raise WorkerError("no memory for another")
        return start(given, waits)

    monkeypatch.setattr(launcher, "start", fail_twice)
    monkeypatch.setattr("hispec.workers.dispatcher._VACANT_S", 0.5)
    # By its name: earlier tests have had workers replaced, in any order.
    os.kill(pool(two).pids()["worker 1"], signal.SIGKILL)
    wait_until(lambda: len(tries) == 1)
    wanted = generate(one)
    assert generate(two) == wanted, "the other goes on"
    wait_until(lambda: len(worker_pids(two)) == 2)
    first, second, third = tries
    assert second - first >= 0.5 and third - second >= 1.0, "ever longer"
    wait_until(lambda: all(each.is_ready for each in dispatcher._workers) and not dispatcher._vacant)
    assert dispatcher.num_replaced == before + 1
    assert sorted(each.place for each in dispatcher._workers) == [0, 1] and generate(two) == wanted
    assert "worker 1 cannot be replaced, which is tried again in 0 s; 1 go on: no memory" in caplog.text


def test_a_question_that_all_workers_die_of_is_asked_again(two: LLM) -> None:
    """Their replacements answer it."""
    before = worker_pids(two)
    for pid in before:
        os.kill(pid, signal.SIGSTOP)  # so that none answers first
    answer: list[Any] = []
    asking = threading.Thread(target=lambda: answer.append(two.stats()))
    asking.start()
    wait_until(lambda: all(each.calls for each in pool(two)._dispatcher._workers))
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    asking.join(30.0)
    assert answer and answer[0]["workers"] and answer[0]["workers_replaced"] >= 2
