"""AsyncEngine: an LLM that asyncio tasks share, stepped by a thread of its own."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from ..errors import (
    BusyError,
    ClosedError,
    ConfigError,
    EngineDeadError,
    HiSpecError,
    RequestError,
    closed,
)
from ..llm import LLM
from ..outputs import Delta, RequestOutput
from ..sampling_params import SamplingParams

Sampling = SamplingParams | dict[str, Any] | None
Item = tuple[int, Delta] | RequestOutput | BaseException
T = TypeVar("T")
_ADMISSION_S = 0.02  # for which prompts are read while those that run wait for their next step
_LONG = 1 << 16  # characters of a prompt, or tokens, from which it is not read before it is known to fit


@dataclass(eq=False)
class _Request:
    """A request, and what its task has not taken of it yet. Its task alone touches `arrived`; the thread
    hands items over in the task's event loop."""

    prompt: Any
    sampling: Sampling
    chat: bool
    is_stream: bool
    loop: asyncio.AbstractEventLoop
    name: str
    num_outputs: int
    arrived: deque[Item] = field(default_factory=deque)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, items: list[Item]) -> None:
        self.arrived.extend(items)
        self.news.set()

    async def get(self) -> tuple[int, Delta] | RequestOutput:
        while not self.arrived:
            self.news.clear()
            await self.news.wait()
        item = self.arrived.popleft()
        if isinstance(item, BaseException):
            raise item
        return item


class AsyncEngine:
    """Requests of any number of tasks, of one event loop or of several, run together in one LLM.

    A task that is cancelled, or closes its generator (`contextlib.aclosing` does at the end of a block),
    aborts its request; nobody else notices. Should the LLM break, all that wait, and all that come later, get
    an EngineDeadError. A task that reads slowly delays nobody: what it has not read is kept.

    `async with` closes it.
    """

    def __init__(self, llm: LLM | Callable[[], LLM], *, max_requests: int | None = None) -> None:
        """Takes `llm` over: nobody else may call it any more, and `close` closes it.

        llm            better a function that makes it: it is called in the thread that steps. On a CPU each
                       thread that has computed keeps threads of its own to compute with; where those of two
                       are more than the cores, all wait for each other asleep, and rounds take half as long
                       again
        max_requests   unfinished ones that the LLM has at most, each counted as its `n` outputs; others wait
                       here, in the order in which they came. None = all are the LLM's
        Raises ConfigError for max_requests below 1, and what making the LLM raises.
        """
        if max_requests is not None and max_requests < 1:
            raise ConfigError(f"max_requests: must be at least 1, got {max_requests}")
        self._most = max_requests
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._running: dict[str, _Request] = {}
        self._waiting: dict[str, _Request] = {}
        self._outgoing: dict[_Request, list[Item]] = {}
        self._idle: list[Future[None]] = []  # of those that wait until nothing is unfinished
        self._numbers = itertools.count()
        self._lock = threading.RLock()  # of what follows, which both sides use
        self._end: HiSpecError | None = None  # what newcomers get
        # One prompt after the other: they are few, and the event loop's own threads are for answers.
        self._reader = ThreadPoolExecutor(1, "hispec-reader")
        self._num_unfinished = 0
        self._is_stopping = self._is_over = False
        made: Future[LLM] = Future()
        self._thread = threading.Thread(target=self._run, args=(llm, made), name="hispec-engine", daemon=True)
        try:
            self._thread.start()
            self._llm = made.result()
        except BaseException:  # an interrupt, for one: what is made yet, nobody would close
            self._end, self._is_stopping = closed("AsyncEngine.stream"), True
            raise

    async def stream(
        self, prompt: Any, sampling: Sampling = None, *, chat: bool = False, wait: bool = True
    ) -> AsyncIterator[Delta]:
        """One request's Deltas as they come; arguments as those of `LLM.stream`. wait: False raises BusyError
        where it would be more than `max_requests` that are unfinished.

        Raises RequestError for a request that can never be served, or of several outputs (or of more than
        `max_requests`, in `stream_each` and `generate`); ConfigError for
        wrong sampling; ClosedError after `drain` or `close`; EngineDeadError.
        """
        each = self.stream_each(prompt, sampling, chat=chat, wait=wait, most_outputs=1)
        try:
            async for _, delta in each:
                yield delta
        finally:
            await each.aclose()

    async def stream_each(
        self,
        prompt: Any,
        sampling: Sampling = None,
        *,
        chat: bool = False,
        wait: bool = True,
        most_outputs: int | None = None,
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        """As `stream`, of `n` outputs: (which of them, Delta)."""
        if most_outputs is not None and (n := self._params(sampling).n) > most_outputs:
            raise RequestError(f"n={n}: a stream has one output; take stream_each()")
        await self._check_length(prompt, sampling, chat, wait)
        request = self._submit(prompt, sampling, chat, wait, is_stream=True)
        try:
            while not isinstance(item := await request.get(), RequestOutput):
                yield item
        finally:
            self._leave(request)

    async def generate(
        self, prompt: Any, sampling: Sampling = None, *, chat: bool = False, wait: bool = True
    ) -> RequestOutput:
        """One request with all its outputs; otherwise as `stream`."""
        await self._check_length(prompt, sampling, chat, wait)
        request = self._submit(prompt, sampling, chat, wait, is_stream=False)
        try:
            output = await request.get()
            assert isinstance(output, RequestOutput)
            return output
        finally:
            self._leave(request)

    @property
    def llm(self) -> LLM:
        """For what does not change: its settings, its tokenizer. Only the engine's thread may call it."""
        return self._llm

    @property
    def num_unfinished(self) -> int:
        """Outputs of requests that have not ended, waiting ones included."""
        return self._num_unfinished

    @property
    def is_dead(self) -> bool:
        """Whether the LLM broke, or its workers did, which nobody else notices before the next request."""
        return isinstance(self._end, EngineDeadError) or (self._end is None and self._llm.failure is not None)

    @property
    def is_full(self) -> bool:
        return self._most is not None and self._num_unfinished >= self._most

    async def stats(self) -> dict[str, Any]:
        """As LLM.stats(); "waiting" counts the outputs of requests that wait here, too. After the end, the
        last ones."""
        return await asyncio.wrap_future(self._call(self._stats))

    async def drain(self) -> None:
        """Takes no more requests, and waits until all have ended. Raises EngineDeadError."""
        with self._lock:
            self._end = self._end or ClosedError("AsyncEngine: drain() was called; it takes no more requests")
        idle: Future[None] = Future()
        self._post(partial(self._note_idle, idle))
        await asyncio.wrap_future(idle)

    def close(self) -> None:
        """Ends all requests with a ClosedError, and closes the LLM, after the step that runs. Idempotent."""
        with self._lock:
            self._end = self._end or closed("AsyncEngine.stream")
        self._is_stopping = True
        self._reader.shutdown(wait=False, cancel_futures=True)
        self._post(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    async def aclose(self) -> None:
        """As `close`, without blocking the event loop."""
        await asyncio.to_thread(self.close)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _params(self, sampling: Sampling) -> SamplingParams:
        return SamplingParams.of(sampling, "sampling")

    async def _check_length(self, prompt: Any, sampling: Sampling, chat: bool, wait: bool) -> None:
        """Raises RequestError for a prompt that is much too long: the thread that steps would read it for
        seconds, in which nobody gets a token. Meanwhile it counts as unfinished."""
        admission, n = self._llm.engine.admission, self._params(sampling).n
        if chat and isinstance(prompt, list | tuple) and len(prompt) > admission.max_model_len:
            with self._lock:
                self._check_room(n, wait)
            raise RequestError(
                f"{len(prompt)} messages, each a token at least, but max_model_len={admission.max_model_len};"
                " leave some out"
            )
        if _size_of(prompt) < _LONG:
            return
        with self._lock:
            self._check_room(n, wait)
            self._num_unfinished += n
        try:
            token_ids = await asyncio.wrap_future(self._reader.submit(self._llm.encode, prompt, chat))
        except (asyncio.CancelledError, RuntimeError):
            task = asyncio.current_task()
            if task is None or task.cancelling() == 0:  # not by who waits: close() may have come between
                with self._lock:
                    self._check_room(n, wait=True)
            raise
        finally:
            with self._lock:
                self._num_unfinished -= n
        if problem := admission.too_long(len(token_ids)):
            raise RequestError(problem)

    def _submit(self, prompt: Any, sampling: Sampling, chat: bool, wait: bool, is_stream: bool) -> _Request:
        n = self._params(sampling).n
        with self._lock:
            self._check_room(n, wait)
            self._num_unfinished += n
        loop, name = asyncio.get_running_loop(), str(next(self._numbers))
        request = _Request(prompt, sampling, chat, is_stream, loop, name, n)
        self._post(partial(self._take, request))
        return request

    def _check_room(self, n: int, wait: bool) -> None:
        """Raises what a request of n outputs gets that cannot be taken now, or ever."""
        most = self._most
        if self._end is not None:
            raise self._ending(self._end)
        if most is not None and n > most:
            raise RequestError(f"n={n}: at most {most} outputs may be unfinished (max_requests); lower n")
        if not wait and most is not None and self._num_unfinished + n > most:
            raise BusyError(
                f"{self._num_unfinished} outputs are unfinished, at most {most} may be, and this request has"
                f" {n}"
            )

    @staticmethod
    def _ending(end: HiSpecError) -> HiSpecError:
        """`end` for one of those who get it: an exception that is raised again keeps the frames, and so the
        prompts, of all who got it before."""
        own = type(end)(*end.args)
        own.__cause__ = end.__cause__
        return own

    def _leave(self, request: _Request) -> None:
        """Its task wants no more of it."""
        self._post(partial(self._abort, request))

    def _call(self, run: Callable[[], T]) -> Future[T]:
        """What `run` returns in the thread that steps; once that has ended, here."""
        future: Future[T] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(run())
            except BaseException as error:
                future.set_exception(error)

        self._post(call)
        return future

    def _post(self, run: Callable[[], None]) -> None:
        with self._lock:
            self._inbox.put(run)
            if self._is_over:
                self._end_all()
            else:
                self._llm.wake()

    # What follows runs in the thread that steps.

    def _run(self, llm: LLM | Callable[[], LLM], made: Future[LLM]) -> None:
        try:
            self._llm = llm() if callable(llm) else llm
        except BaseException as error:
            made.set_exception(error)
            return
        made.set_result(self._llm)
        try:
            while not self._is_stopping:
                self._read_inbox()
                # With something to do a step raises it, once it has given what there is.
                if not self._running and (failure := self._llm.failure) is not None:
                    raise failure
                self._admit()
                self._hand_over()  # refusals: with workers a step waits until others have gained something
                if self._running:
                    for output in self._llm.step():
                        self._end_request(self._running[output.request_id], output)
                self._hand_over()
        except BaseException as error:  # whatever it is, nobody may wait for ever
            dead = EngineDeadError(f"the engine has failed: {type(error).__name__}: {error}")
            dead.__cause__ = error
            with self._lock:
                self._end = dead
        with suppress(Exception):
            self._llm.close()
        with self._lock:
            self._is_over = True
            self._end_all()

    def _end_all(self) -> None:
        """Does what was asked for until now, and ends what there is of requests."""
        end = self._end
        assert end is not None
        with suppress(Empty):
            while True:
                self._inbox.get_nowait()()
        for request in [*self._running.values(), *self._waiting.values()]:
            self._end_request(request, self._ending(end))
        self._hand_over()

    def _read_inbox(self) -> None:
        """All that has come; waits for something if there is nothing else to do."""
        if not (self._running or self._waiting):
            self._inbox.get()()
        with suppress(Empty):
            while True:
                self._inbox.get_nowait()()

    def _take(self, request: _Request) -> None:
        self._waiting[request.name] = request

    def _admit(self) -> None:
        until_s = time.monotonic() + _ADMISSION_S
        while self._waiting:
            request = next(iter(self._waiting.values()))
            if self._most is not None:
                num_running = sum(each.num_outputs for each in self._running.values())
                if num_running + request.num_outputs > self._most:
                    return
            del self._waiting[request.name]
            on_delta = partial(self._put_delta, request) if request.is_stream else None
            self._running[request.name] = request
            try:
                self._llm.add(request.prompt, request.sampling, request.name, request.chat, on_delta)
            except (RequestError, ConfigError) as error:
                message = str(error).removeprefix(f"{request.name}: ")
                self._end_request(request, type(error)(message))
            except Exception as error:  # it was not foreseen, and is of this request alone
                self._end_request(request, error)
            if self._waiting and self._running and time.monotonic() >= until_s:
                self._llm.wake()  # with workers a step would wait until others have gained something
                return

    def _put_delta(self, request: _Request, index: int, delta: Delta) -> None:
        self._put(request, (index, delta))

    def _put(self, request: _Request, item: Item) -> None:
        self._outgoing.setdefault(request, []).append(item)

    def _abort(self, request: _Request) -> None:
        if self._waiting.pop(request.name, None) is None and self._running.pop(request.name, None) is None:
            return
        self._outgoing.pop(request, None)
        if not self._is_over:
            self._llm.abort(request.name)
        self._count_out(request)

    def _end_request(self, request: _Request, last: Item) -> None:
        self._put(request, last)
        self._running.pop(request.name, None)
        self._waiting.pop(request.name, None)
        self._count_out(request)

    def _count_out(self, request: _Request) -> None:
        with self._lock:
            self._num_unfinished -= request.num_outputs

    def _hand_over(self) -> None:
        """Gives each task what has come for it, with one call into each event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Request, list[Item]]]] = {}
        for request, items in self._outgoing.items():
            by_loop.setdefault(request.loop, []).append((request, items))
        self._outgoing.clear()
        for loop, parcels in by_loop.items():
            with suppress(RuntimeError):  # the loop has ended, and its tasks with it
                loop.call_soon_threadsafe(_deliver, parcels)
        if self._idle and not (self._running or self._waiting):
            for future in self._idle:
                self._end_idle(future)
            self._idle.clear()

    def _note_idle(self, future: Future[None]) -> None:
        if self._running or self._waiting:
            self._idle.append(future)
        else:
            self._end_idle(future)

    def _end_idle(self, future: Future[None]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        if isinstance(self._end, EngineDeadError):
            future.set_exception(self._ending(self._end))
        else:
            future.set_result(None)

    def _stats(self) -> dict[str, Any]:
        stats = self._llm.stats()
        num_here = sum(request.num_outputs for request in self._waiting.values())
        return stats | {"waiting": stats["waiting"] + num_here}


def _size_of(prompt: Any) -> int:
    """Characters of all its texts, besides token ids, messages and parts of these, each as one; no more than
    needed for _LONG."""
    size, left = 0, [prompt]
    while left and size < _LONG:
        each = left.pop()
        if isinstance(each, dict):
            each = list(each.values())
        if isinstance(each, str | list | tuple):
            size += len(each)
        if isinstance(each, list | tuple) and size < _LONG:
            left += [one for one in each if not isinstance(one, int)]  # token ids have no texts
    return size


def _deliver(parcels: list[tuple[_Request, list[Item]]]) -> None:
    for request, items in parcels:
        request.put(items)
