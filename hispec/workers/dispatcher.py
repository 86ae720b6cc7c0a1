"""The thread that talks to workers: deals requests out, and gives those of a dead worker to others, or of one
that hangs."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

from ..errors import WorkerError
from ..outputs import Delta
from .launch import Launcher, NotYetError, Process
from .messages import Alive, Gained, Hello, NewRequest, Start
from .pipes import Ended, LlmEnd, interval_of
from .state import Call, Task, Vacancy, Worker
from .totals import counts_of, sum_counts

_log = logging.getLogger(__name__)
# Of workers that served a request, which was served alone before the last; of workers one after the other
# before they were ready.
_MOST_DEATHS = 3
_PATIENCE_S = 5.0  # that workers have to end, their traces written
# After which a worker is started again where none could be; each time twice as long, up to so many.
_VACANT_S, _VACANT_AT_MOST_S = 60.0, 1800.0
_SOON_S = 1.0  # the same, where what it comes from is being made


class NoAnswerError(WorkerError):
    """A worker has not answered in time; it may be in a long step, or hang."""


class Dispatcher:
    """Knows all workers, in its own thread, where no interrupt comes. Others call `post`, and read `outbox`.

    workers     by place, of which the first num_ready are

    outbox      (number of a request, Delta), as they came; `news` gets something after each, and when
    failure     is set: why nothing will come any more
    counts_of_dead   what workers had counted that have died; another object after each death
    start_of    what a new worker is started with, by its place and how many were replaced
    room        requests that a worker has at most; None = all are dealt out at once
    timeout_s   without a sign of life, once it has given one, after which a worker counts as dead
    """

    def __init__(
        self,
        launcher: Launcher,
        workers: list[Process],
        num_ready: int,
        start_of: Callable[[int, int], Start],
        room: int | None,
        timeout_s: float,
    ) -> None:
        self.outbox: deque[tuple[int, Delta]] = deque()
        self.news: SimpleQueue[None] = SimpleQueue()
        self.failure: Exception | None = None
        self.num_replaced = self.num_given_up = self.num_aborted = 0
        self.counts_of_dead: dict[str, Any] = {}
        self._launcher, self._start_of, self._room = launcher, start_of, room
        self._timeout_s, self._looked_at = timeout_s, time.monotonic()
        self._inbox: SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]] = SimpleQueue()
        self._workers = [self._know(process, place) for place, process in enumerate(workers)]
        for worker in self._workers[:num_ready]:
            worker.has_started, worker.is_ready, worker.silent_s = True, True, 0.0
        self._queue: OrderedDict[int, Task] = OrderedDict()  # by number, first the next to be dealt out
        self._suspects: OrderedDict[int, Task] = OrderedDict()  # likewise: those that workers died of twice
        self._tasks: dict[int, Task] = {}
        self._vacant: dict[int, Vacancy] = {}  # by place
        self._is_closing, self._unready_deaths = False, 0
        self._after_start: dict[str, tuple[Any, ...]] = {}  # calls that later workers must hear of, too
        self._thread = threading.Thread(target=self._run, name="hispec-workers", daemon=True)
        self._thread.start()

    def post(self, what: Callable[..., None], *arguments: Any) -> None:
        """Has a method of this object called in its thread."""
        self._inbox.put((what, arguments))

    def ask(
        self,
        name: str,
        *arguments: Any,
        is_lasting: bool = False,
        is_binding: bool = False,
        patience_s: float = math.inf,
    ) -> list[Any]:
        """What a method of `serve.Server` returns or raises in each worker that is ready; of none, once there
        is a `failure`, or if all died. is_lasting: workers that start later are to hear of it, too, and do
        not serve without it. is_binding: nor do those that are ready, if it fails in them. Raises
        NoAnswerError if they take more than `patience_s` seconds."""
        call = Call(name, arguments, is_binding=is_binding)
        self.post(self._call_all, call, is_lasting)
        replies: list[Any] = self._get(call.done, patience_s)
        return replies

    def ask_parts(self, name: str, items: Sequence[Any]) -> list[tuple[int, Any]]:
        """Has each worker that is ready run a method over a part of `items` -> (where the part begins, what
        the method returns or raises); nothing of workers that die meanwhile."""
        dealt: SimpleQueue[list[tuple[int, Call]]] = SimpleQueue()
        self.post(self._call_each, name, items, dealt)
        parts = self._get(dealt)
        return [(begin, reply) for begin, call in parts for reply in self._get(call.done)]

    def _get(self, queue: SimpleQueue[Any], patience_s: float = math.inf) -> Any:
        until = time.monotonic() + patience_s
        while True:
            try:
                return queue.get(timeout=max(0.0, min(1.0, until - time.monotonic())))
            except Empty:
                if not self._thread.is_alive():
                    raise self.failure or WorkerError("the LLM was closed meanwhile") from None
                if time.monotonic() >= until:
                    raise NoAnswerError(f"a worker has not answered for {patience_s:g} seconds") from None

    @property
    def num_queued(self) -> int:
        """Requests that no worker has yet."""
        return len(self._queue) + len(self._suspects)

    def pids(self) -> dict[str, int]:
        """Ids of the processes of this machine, by name."""
        nursery = self._launcher.nursery_pid
        workers = [(each.place, each.process.pid) for each in self._workers]
        found = {"nursery": nursery, **{f"worker {place}": pid for place, pid in workers}}
        return {name: pid for name, pid in found.items() if pid is not None}

    def close(self) -> None:
        """Ends the workers and the thread, in bounded time. Idempotent."""
        self._is_closing = True
        self.post(lambda: None)
        if threading.current_thread() is not self._thread:  # it may collect what closes this
            self._thread.join(4 * _PATIENCE_S)

    def forget_dead(self) -> None:
        """Counts of dead workers begin at 0 again."""
        self.counts_of_dead = {}

    def add(self, request: NewRequest) -> None:
        self._tasks[request.number] = task = Task(request)
        self._queue[request.number] = task

    def abort(self, numbers: list[int]) -> None:
        gone = [number for number in numbers if self._tasks.pop(number, None) is not None]
        for number in gone:
            waited = (self._queue.pop(number, None), self._suspects.pop(number, None))
            self.num_aborted += waited != (None, None)
        for worker in self._workers:
            if own := [number for number in gone if worker.tasks.pop(number, None) is not None]:
                worker.end.send(own)

    def _call_all(self, call: Call, is_lasting: bool) -> None:
        if is_lasting:
            self._after_start[call.name] = call.arguments
        # Those that start yet have nothing to tell, and may have to wait for a machine.
        ready = [worker for worker in self._workers if worker.is_ready] or self._workers
        call.waits_for = set(ready)
        if not ready:
            call.done.put([])
        for worker in self._workers:
            if worker in call.waits_for:
                self._call(worker, call)
            elif is_lasting:
                self._call(worker, Call(call.name, call.arguments, {worker}, is_binding=True))

    def _call_each(self, name: str, items: Sequence[Any], dealt: SimpleQueue[list[tuple[int, Call]]]) -> None:
        ready = [worker for worker in self._workers if worker.is_ready] or self._workers
        size = -(-len(items) // max(1, len(ready)))
        parts = []
        for worker, begin in zip(ready, range(0, len(items), size), strict=False):
            call = Call(name, (items[begin : begin + size],), {worker})
            self._call(worker, call)
            parts.append((begin, call))
        dealt.put(parts)

    def _know(self, process: Process, place: int) -> Worker:
        worker = Worker(process, place)
        worker.end = LlmEnd(process.connection, lambda message: self.post(self._receive, worker, message))
        return worker

    def _run(self) -> None:
        try:
            while not self._is_closing:
                with suppress(Empty):
                    for _ in range(max(1, self._inbox.qsize())):
                        what, arguments = self._inbox.get(timeout=self._at_most_s())
                        what(*arguments)
                self._end_silent()
                if self.failure is None:
                    self._fill_vacant()
                self._deal()
        except Exception as error:
            _log.exception("the thread that talks to workers failed")
            self._fail(error)
        finally:
            self._end()

    def _at_most_s(self) -> float:
        """How long to wait for news: until a sign of life is due, or a vacant place is to be filled."""
        taken, now = {worker.place for worker in self._workers}, time.monotonic()
        due = [vacancy.until - now for place, vacancy in self._vacant.items() if place not in taken]
        return max(0.0, min((interval_of(self._timeout_s), *due)))

    def _end_silent(self) -> None:
        """Ends workers that hang. Time in which this thread did not look counts little: then nobody could
        have heard them."""
        now = time.monotonic()
        passed = min(now - self._looked_at, 2.0 * interval_of(self._timeout_s))
        self._looked_at = now
        for worker in list(self._workers):
            if worker.silent_s is None:
                continue
            worker.silent_s += passed
            if worker.silent_s > self._timeout_s:
                worker.last_words = (
                    f"gave no sign of life for {self._timeout_s:g} s (engine.worker_timeout_s) and was ended"
                )
                if worker.process.pid is not None:  # its own still, since its pipe is open
                    with suppress(ProcessLookupError):
                        os.kill(worker.process.pid, signal.SIGKILL)
                self._bury(worker)

    def _receive(self, worker: Worker, message: Any) -> None:
        if worker not in self._workers:  # it was ended
            return
        worker.silent_s = 0.0
        if isinstance(message, Ended):
            self._bury(worker)
        elif isinstance(message, Alive):
            pass
        elif isinstance(message, Gained):
            worker.counted = message.counted or worker.counted
            for number, delta in message.deltas:
                self._take(worker, number, delta)
        elif isinstance(message, tuple):
            self._take_reply(worker, worker.calls.popleft(), *message)
        elif isinstance(message, Hello):
            worker.has_started = True
            worker.is_ready = not worker.calls
        elif isinstance(message, str):
            worker.last_words = message
        else:
            worker.failure = message

    def _take_reply(self, worker: Worker, call: Call, reply: Any) -> None:
        if call.name == "reset_stats":
            worker.counted = None
        elif call.name == "stats" and isinstance(reply, dict):
            worker.counted = counts_of(reply)
        is_last = all(later.name != call.name for later in worker.calls)
        if call.is_binding and is_last and isinstance(reply, Exception):
            worker.last_words = f"failed in {call.name} with {type(reply).__name__}: {reply}"
            self._bury(worker)
            call.end_for(worker)
            return
        worker.is_ready = worker.is_ready or (worker.has_started and not worker.calls)
        call.end_for(worker, reply)

    def _take(self, worker: Worker, number: int, delta: Delta) -> None:
        task = worker.tasks.get(number)
        if task is None:  # aborted
            return
        if not task.goes_on_with(delta):
            worker.end.send([number])
            del worker.tasks[number]
            self._give_up(
                number,
                f"a worker died after {len(task.given_tokens)} tokens of the stream, and the one that does it"
                " again says something else; ask again, and see `acceptance` for outputs that come again",
            )
            return
        skipped, cut = min(task.skip_tokens, len(delta.token_ids)), min(task.skip_text, len(delta.text))
        task.skip_tokens, task.skip_text = task.skip_tokens - skipped, task.skip_text - cut
        if skipped or cut:  # of a stream that another worker had begun
            logprobs = None if delta.logprobs is None else delta.logprobs[skipped:]
            tiers = None if delta.tiers is None else delta.tiers[skipped:]
            token_ids, text = delta.token_ids[skipped:], delta.text[cut:]
            delta = replace(delta, token_ids=token_ids, text=text, logprobs=logprobs, tiers=tiers)
        task.given_tokens += delta.token_ids
        task.given_text += len(delta.text)
        if delta.finish_reason is not None:
            del worker.tasks[number], self._tasks[number]
        if delta.token_ids or delta.text or delta.finish_reason is not None:
            self._put(number, delta)

    def _put(self, number: int, delta: Delta) -> None:
        self.outbox.append((number, delta))
        self.news.put(None)

    def _deal(self) -> None:
        """Gives requests to whoever has the fewest, up to its room; suspects to a worker of their own."""
        for worker in self._workers:
            worker.is_alone = worker.is_alone and bool(worker.tasks)
        free = [worker for worker in self._workers if worker.is_ready and not worker.is_alone]
        while self._suspects and free:
            worker = min(free, key=lambda each: len(each.tasks))
            free.remove(worker)
            if worker.tasks:  # it gets nothing new until it has ended these
                break
            worker.is_alone = True
            self._give(worker, self._suspects.popitem(last=False)[1])
        while self._queue and free:
            worker = min(free, key=lambda each: len(each.tasks))
            if self._room is not None and len(worker.tasks) >= self._room:
                break
            self._give(worker, self._queue.popitem(last=False)[1])

    def _give(self, worker: Worker, task: Task) -> None:
        worker.tasks[task.request.number] = task
        worker.end.send(task.request)

    def _call(self, worker: Worker, call: Call) -> None:
        worker.calls.append(call)
        worker.end.send((call.name, call.arguments))

    def _bury(self, worker: Worker) -> None:
        """Does what a dead worker leaves: gives its requests to others, and starts another."""
        self._workers.remove(worker)
        worker.end.close()
        self.counts_of_dead = sum_counts([self.counts_of_dead, worker.counted or {}])
        ending = self._launcher.bury(worker.process)
        how = worker.last_words or ending
        for call in worker.calls:
            call.end_for(worker)
        for task in reversed(worker.tasks.values()):
            self._do_again(task, how)
        self._unready_deaths = 0 if worker.is_ready else self._unready_deaths + 1
        if worker.failure is None and self._unready_deaths < _MOST_DEATHS:
            _log.warning("worker %d %s; another takes its place", worker.place, how)
            self._replace(worker.place)
        else:
            text = f"{self._unready_deaths} workers ended before they were ready, the last {how}"
            self._go_without(worker.place, worker.failure or WorkerError(text))

    def _replace(self, place: int) -> None:
        number = self.num_replaced + 1
        try:
            process = self._launcher.start(self._start_of(place, number), waits=not self._workers)
            worker = self._know(process, place)
        except Exception as error:
            self._go_without(place, error)
            return
        self.num_replaced = number
        self._workers.append(worker)
        for name, arguments in self._after_start.items():
            self._call(worker, Call(name, arguments, {worker}, is_binding=True))

    def _go_without(self, place: int, error: Exception) -> None:
        """Leaves a place vacant, for a while: memory may be short for a moment only."""
        if not self._workers:
            self._fail(error)
            return
        former = self._vacant.get(place)
        if isinstance(error, NotYetError):
            if former is None:
                _log.warning("worker %d is replaced as soon as it can be: %s", place, error)
            wait_s = 0.5 * _VACANT_S if former is None else former.wait_s
            self._vacant[place] = Vacancy(wait_s, time.monotonic() + _SOON_S)
            return
        wait_s = _VACANT_S if former is None else min(2.0 * former.wait_s, _VACANT_AT_MOST_S)
        self._vacant[place] = Vacancy(wait_s, time.monotonic() + wait_s)
        words = "worker %d cannot be replaced, which is tried again in %.0f s; %d go on: %s"
        _log.warning(words, place, wait_s, len(self._workers), error)

    def _fill_vacant(self) -> None:
        taken = {worker.place: worker for worker in self._workers}
        for place, vacancy in list(self._vacant.items()):
            if place not in taken and time.monotonic() >= vacancy.until:
                _log.info("starting worker %d again", place)
                self._replace(place)
            elif place in taken and taken[place].is_ready:
                del self._vacant[place]

    def _do_again(self, task: Task, how: str) -> None:
        task.deaths += 1
        task.skip_tokens, task.skip_text = len(task.given_tokens), task.given_text
        if task.deaths >= _MOST_DEATHS:
            error = f"{task.deaths} workers died while they served it, the last this request alone: it {how}"
            self._give_up(task.request.number, error)
            return
        again = self._suspects if task.deaths == _MOST_DEATHS - 1 else self._queue
        again[task.request.number] = task
        again.move_to_end(task.request.number, last=False)

    def _give_up(self, number: int, error: str) -> None:
        self.num_given_up += 1
        del self._tasks[number]
        self._put(number, Delta("", [], "", None, "error", None, error=error))

    def _fail(self, error: Exception) -> None:
        """From now on nothing comes."""
        self.failure = error
        self._vacant.clear()  # nobody fills them any more
        for worker in self._workers:
            for call in worker.calls:
                call.end_for(worker)
        self.news.put(None)

    def _end(self) -> None:
        for worker in self._workers:
            worker.end.send(None)
        alive = set(self._workers)
        until = time.monotonic() + _PATIENCE_S
        while alive and (left := until - time.monotonic()) > 0.0:
            with suppress(Empty):
                what, arguments = self._inbox.get(timeout=left)
                if what == self._receive and isinstance(arguments[1], Ended):
                    alive.discard(arguments[0])
        for worker in self._workers:
            worker.end.close()
            self._launcher.bury(worker.process)
        self._launcher.close()
        self._workers.clear()
