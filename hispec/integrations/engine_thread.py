"""One thread that steps an LLM, for hosts that hand in requests from others."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from ..errors import RequestError, closed
from ..llm import LLM
from ..outputs import RequestOutput
from ..sampling_params import SamplingParams

_Request = tuple[Any, SamplingParams, bool, "Future[RequestOutput]"]


class EngineThread:
    """Requests that come at any time and from any thread run together; each is a Future of its
    RequestOutput. Should the engine break, all that wait get its exception, and those that come later too."""

    def __init__(self, llm: LLM) -> None:
        """Takes `llm` over: nobody else may call it any more, and `close` closes it."""
        self._llm = llm
        self._arrived: SimpleQueue[_Request | None] = SimpleQueue()
        self._running: dict[str, Future[RequestOutput]] = {}
        self._lock = threading.Lock()  # of _end and what is put behind it
        self._end: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="hispec engine", daemon=True)
        self._thread.start()

    def submit(self, prompt: Any, sampling: SamplingParams, chat: bool = False) -> Future[RequestOutput]:
        """Queues a request, with arguments as those of `LLM.add`. The Future's exception is a RequestError
        for one that can never be served, a ClosedError after `close`, or what broke the engine."""
        future: Future[RequestOutput] = Future()
        with self._lock:
            if self._end is None:
                self._arrived.put((prompt, sampling, chat, future))
            else:
                future.set_exception(self._end)
        return future

    def close(self) -> None:
        """Ends all requests with a ClosedError, and closes the LLM. Idempotent."""
        self._arrived.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._serve()
            end: BaseException = closed("EngineThread.submit")
        except BaseException as error:  # whatever it is, nobody may wait for ever
            end = error
        with self._lock:
            self._end = end
        self._llm.close()
        waiting = list(self._running.values())
        while not self._arrived.empty():
            request = self._arrived.get()
            waiting += [request[3]] if request is not None else []
        for future in waiting:
            if not future.done():
                future.set_exception(end)

    def _serve(self) -> None:
        number = 0
        while True:
            while not self._running or not self._arrived.empty():
                request = self._arrived.get()
                if request is None:
                    return
                prompt, sampling, chat, future = request
                if not future.set_running_or_notify_cancel():
                    continue
                request_id = str(number)
                number += 1
                self._running[request_id] = future
                try:
                    self._llm.add(prompt, sampling, request_id, chat=chat)
                except RequestError as error:
                    del self._running[request_id]
                    future.set_exception(RequestError(str(error).removeprefix(f"{request_id}: ")))
            for output in self._llm.step():
                self._running.pop(output.request_id).set_result(output)
