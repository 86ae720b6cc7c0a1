"""Workers that hang: nobody waits for them, others take their places and their requests."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from hispec import LLM
from hispec.errors import WorkerError
from hispec.outputs import Delta
from hispec.workers.dispatcher import Dispatcher
from hispec.workers.launch import NotYetError, Process
from hispec.workers.messages import Alive, Gained, Hello, NewRequest
from hispec.workers.pipes import WorkerEnd
from hispec.workers.state import Call
from tests.workers.support import SMALL, is_alive, linux, pool, wait_until, worker_pids
from tests.workers.test_outputs import GREEDY, PROMPTS, generate, plain

LARGE = list(range(100_000))  # tokens: a request that no socket's buffer has room for
NEVER = 3600.0


class Fakes:
    """A Launcher of workers that are nothing but our ends of their pipes. buried: by place."""

    nursery_pid = None

    def __init__(self) -> None:
        self.ends: list[Connection] = []
        self.buried: list[int] = []

    def start(self, start: object, waits: bool = True) -> Process:
        ours, theirs = socket.socketpair()
        self.ends.append(Connection(theirs.detach()))
        return Process(Connection(ours.detach()), None)

    def bury(self, process: Process) -> str:
        self.buried.append(len(self.buried))
        return "ended"

    def close(self) -> None:
        pass


Make = Callable[..., tuple[Dispatcher, list[Connection]]]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes a dispatcher of fake workers, all of which are ready."""
    monkeypatch.setattr("hispec.workers.dispatcher._PATIENCE_S", 0.1)
    with ExitStack() as stack:

        def make(count: int, timeout_s: float = NEVER) -> tuple[Dispatcher, list[Connection]]:
            fakes = Fakes()
            processes = [fakes.start(None) for _ in range(count)]
            dispatcher = Dispatcher(fakes, processes, count, lambda *_: None, None, timeout_s)  # type: ignore
            for end in fakes.ends:
                stack.callback(end.close)
            stack.callback(dispatcher.close)
            return dispatcher, fakes.ends

        yield make


def request(number: int, token_ids: list[int]) -> NewRequest:
    return NewRequest(number, token_ids, GREEDY, False, False, False, 0.0, 0.0)


def received(end: Connection) -> Any:
    """The next message; a failure, not a test that waits for ever, if there is none."""
    assert end.poll(30.0), "nothing came"
    return end.recv()


def ended(number: int) -> Gained:
    return Gained([(number, Delta("", [1], "a", None, "length", None))], None)


def test_a_place_whose_worker_cannot_come_yet_holds_up_nobody(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is asked for again soon, and said once."""
    monkeypatch.setattr("hispec.workers.dispatcher._SOON_S", 0.02)
    dispatcher, (dead, good) = make(2, timeout_s=2.0)
    fakes, asked = dispatcher._launcher, []
    start = fakes.start

    def not_yet(given: Any, waits: bool) -> Process:
        asked.append(waits)
        if len(asked) < 4:
            raise NotYetError("it loads")
        return start(given, waits)

    monkeypatch.setattr(fakes, "start", not_yet)
    dead.close()
    wait_until(lambda: len(asked) > 0)
    for number in range(4):
        dispatcher.post(dispatcher.add, request(number, [1]))
        assert received(good).number == number
        good.send(ended(number))
        wait_until(lambda number=number: len(dispatcher.outbox) == number + 1)
        wait_until(lambda number=number: len(asked) > min(number, 3))
    wait_until(lambda: len(dispatcher._workers) == 2)
    assert asked == [False] * 4, "others go on, so that nobody waits"
    assert sum("is replaced as soon as it can be: it loads" in text for text in caplog.messages) == 1


def test_a_worker_that_takes_nothing_holds_up_nobody(make: Make) -> None:
    dispatcher, (stuck, good) = make(2)
    for number in range(6):
        dispatcher.post(dispatcher.add, request(number, LARGE))
    for _ in range(3):
        got = received(good)
        assert got.token_ids == LARGE
        good.send(ended(got.number))
    wait_until(lambda: len(dispatcher.outbox) == 3)
    # Once it takes them it has its own, whole and in order.
    assert [len(received(stuck).token_ids) for _ in range(3)] == [len(LARGE)] * 3


def test_a_worker_that_stops_in_a_message_holds_up_nobody(make: Make) -> None:
    dispatcher, (stuck, good) = make(2)
    message = pickle.dumps(ended(0))
    os.write(stuck.fileno(), len(message).to_bytes(4, "big") + message[:5])
    for number in range(4):
        dispatcher.post(dispatcher.add, request(number, [1]))
    own = [received(stuck).number, received(stuck).number]
    for _ in range(2):
        good.send(ended(received(good).number))
    wait_until(lambda: len(dispatcher.outbox) == 2)
    os.write(stuck.fileno(), message[5:])
    wait_until(lambda: len(dispatcher.outbox) == (3 if 0 in own else 2))


def part(number: int, token_ids: list[int], text: str, finish_reason: str | None = None) -> Gained:
    return Gained([(number, Delta("", token_ids, text, None, finish_reason, None))], None)


@pytest.mark.parametrize(
    ("parts", "given", "goes_on"),
    [
        ([([1], "a", None), ([2, 3, 4], "bcd", "length")], [4], True),
        ([([1, 2, 3], "abc", None), ([4], "d", "stop")], [4], True),
        ([([1, 9, 3, 4], "azcd", "length")], [], False),
        ([([1], "a", None), ([2, 9], "bz", None)], [], False),
        ([([1, 2], "ab", "stop")], [], False),
    ],
    ids=["in parts", "its own parts", "another token", "another token later", "an earlier end"],
)
def test_a_stream_that_is_done_again_goes_on_or_ends_with_an_error(
    make: Make, parts: list[tuple[list[int], str, str | None]], given: list[int], goes_on: bool
) -> None:
    dispatcher, (first, other) = make(2)
    dispatcher.post(dispatcher.add, request(0, [1]))
    assert received(first).number == 0
    first.send(part(0, [1, 2, 3], "abc"))
    wait_until(lambda: len(dispatcher.outbox) == 1)
    first.close()
    wait_until(lambda: dispatcher.num_replaced == 1)
    assert received(other).number == 0
    for each in parts:
        other.send(part(0, *each))
    wait_until(lambda: len(dispatcher.outbox) == 2)
    last = dispatcher.outbox[1][1]
    assert (last.token_ids, last.finish_reason) == (given, parts[-1][2] if goes_on else "error")
    if not goes_on:
        assert last.error is not None and last.error.startswith("a worker died after 3 tokens of the stream")
        assert received(other) == [0], "aborted there"
    dispatcher.post(dispatcher.add, request(1, [1]))
    assert received(other).number == 1


def test_who_gives_no_sign_of_life_is_replaced_and_who_does_is_not(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    dispatcher, ends = make(2, timeout_s=1.0)
    for number in range(2):
        dispatcher.post(dispatcher.add, request(number, [1]))
    numbers = [received(end).number for end in ends]

    def is_replaced() -> bool:
        ends[1].send(Alive())
        return [worker.place for worker in dispatcher._workers] == [1, 0]

    with caplog.at_level(logging.WARNING):
        wait_until(is_replaced)
    assert dispatcher.num_replaced == 1
    assert "worker 0 gave no sign of life for 1 s (engine.worker_timeout_s)" in caplog.text
    with pytest.raises(EOFError):
        ends[0].recv()
    assert received(ends[1]).number == numbers[0]  # it does the other's request again


def test_time_in_which_nobody_listened_is_no_silence(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the machine, or this process, was stopped."""
    dispatcher, _ = make(1, timeout_s=NEVER)
    dispatcher.post(lambda: setattr(dispatcher, "_looked_at", dispatcher._looked_at - 1000 * NEVER))
    for _ in range(3):
        done: list[int] = []
        dispatcher.post(done.append, 1)
        wait_until(lambda done=done: bool(done))
    assert dispatcher.num_replaced == 0 and dispatcher._workers[0].silent_s < NEVER / 10


def test_a_worker_that_has_not_spoken_yet_is_waited_for(make: Make) -> None:
    """It may wait for a machine, or load."""
    dispatcher, _ = make(1, timeout_s=0.1)
    wait_until(lambda: dispatcher.num_replaced == 1)
    fakes_end = dispatcher._launcher.ends[-1]  # type: ignore[attr-defined]
    done: list[int] = []
    for _ in range(20):  # looks
        dispatcher._inbox.put((done.append, (1,)))
        wait_until(lambda: bool(done))
        dispatcher.post(lambda: setattr(dispatcher, "_looked_at", dispatcher._looked_at - 1.0))
    assert dispatcher.num_replaced == 1
    fakes_end.send(Alive())
    wait_until(lambda: dispatcher.num_replaced == 2)


def test_a_message_that_cannot_be_read_ends_its_worker(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    dispatcher, (bad, _) = make(2)
    bad.send_bytes(b"no pickle")
    wait_until(lambda: dispatcher.num_replaced == 1)
    assert "a worker's message cannot be read" in caplog.text and dispatcher.failure is None


def test_a_worker_that_starts_serves_once_it_has_done_what_all_do(make: Make) -> None:
    dispatcher, ends = make(1)
    dispatcher.post(dispatcher._call_all, Call("set_speculative", ("new",)), True)
    assert received(ends[0]) == ("set_speculative", ("new",))
    ends[0].close()
    wait_until(lambda: dispatcher.num_replaced == 1)
    second = dispatcher._launcher.ends[-1]  # type: ignore[attr-defined]
    dispatcher.post(dispatcher.add, request(0, [1]))
    assert received(second) == ("set_speculative", ("new",))
    second.send(Hello(None, True))  # type: ignore[arg-type]
    assert not second.poll(0.2)
    second.send((WorkerError("no memory"),))
    wait_until(lambda: dispatcher.num_replaced == 2)  # it would serve with another plan
    third = dispatcher._launcher.ends[-1]  # type: ignore[attr-defined]
    third.send(Hello(None, True))  # type: ignore[arg-type]
    assert received(third) == ("set_speculative", ("new",))
    third.send((None,))
    assert received(third).number == 0


def test_a_worker_that_cannot_go_back_to_the_last_plan_is_replaced(make: Make) -> None:
    dispatcher, (good, bad) = make(2)
    call = Call("set_speculative", ("old",), is_binding=True)
    dispatcher.post(dispatcher._call_all, call, True)
    for end in (good, bad):
        assert received(end) == ("set_speculative", ("old",))
    good.send((None,))
    bad.send((WorkerError("broken"),))
    assert call.done.get(timeout=30.0) == [None]
    wait_until(lambda: dispatcher.num_replaced == 1)
    assert received(dispatcher._launcher.ends[-1]) == ("set_speculative", ("old",))  # type: ignore


def test_a_worker_says_that_it_is_alive_whatever_it_does() -> None:
    ours, theirs = socket.socketpair()
    with Connection(ours.detach()) as llm, Connection(theirs.detach()) as worker:
        with WorkerEnd(worker) as end:
            end.give_signs(0.1)
            assert [received(llm) for _ in range(3)] == [Alive()] * 3
            end.send("a message between them")
            while received(llm) == Alive():
                pass
        while llm.poll():
            assert llm.recv() == Alive()
        assert not llm.poll(0.1)


@linux
def test_requests_of_a_stopped_worker_are_done_again(
    tiny_path: Path, one: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = {str(at): output.outputs for at, output in enumerate(generate(one))}
    with LLM(str(tiny_path), workers=2, worker_timeout_s=4.0, **SMALL) as llm:
        stopped = worker_pids(llm)[0]
        os.kill(stopped, signal.SIGSTOP)
        for at, prompt in enumerate(PROMPTS):
            llm.add(prompt, GREEDY, str(at))
        done = {}
        while llm.has_unfinished():
            for output in llm.step():
                assert output.request_id not in done and output.error is None
                done[output.request_id] = plain(output).outputs
        assert done == wanted
        assert not is_alive(stopped) and pool(llm).pids() and llm.stats()["workers_replaced"] >= 1
        assert "gave no sign of life for 4 s (engine.worker_timeout_s) and was ended" in caplog.text


@linux
def test_nobody_waits_for_the_stats_of_a_stopped_worker(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hispec.workers.pool._STATS_PATIENCE_S", 0.2)
    with LLM(str(tiny_path), workers=2, worker_timeout_s=NEVER, **SMALL) as llm:
        llm.generate([PROMPTS[0]] * 4, GREEDY, use_tqdm=False)
        before = llm.stats()
        stopped = worker_pids(llm)[0]
        os.kill(stopped, signal.SIGSTOP)
        for at, prompt in enumerate(PROMPTS):
            llm.add(prompt, GREEDY, str(at))
        assert llm.stats() == llm.stats() == before  # and comes back
        os.kill(stopped, signal.SIGCONT)
        while llm.has_unfinished():
            llm.step()
        assert llm.stats()["finished"] == before["finished"] + len(PROMPTS)
        llm.reset_stats()
        assert llm.stats()["finished"] == 0


@linux
def test_nor_where_nothing_is_to_be_done(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server asks on, for its metrics, and serves by the other worker."""
    monkeypatch.setattr("hispec.workers.pool._IDLE_PATIENCE_S", 0.3)
    with LLM(str(tiny_path), workers=2, worker_timeout_s=NEVER, **SMALL) as llm:
        before = llm.stats()
        stopped = worker_pids(llm)[0]
        os.kill(stopped, signal.SIGSTOP)
        assert llm.stats() == before
        monkeypatch.setattr("hispec.workers.pool._IDLE_PATIENCE_S", NEVER)
        assert llm.stats() == before, "it is not asked again at once"
        os.kill(stopped, signal.SIGCONT)
        llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False)
        llm.reset_stats()
        assert llm.stats()["finished"] == 0
