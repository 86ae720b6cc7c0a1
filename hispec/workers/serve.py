"""A worker's loop: takes requests from a pipe, runs the engine, and sends what ends."""

from __future__ import annotations

import os
import threading
import time
from queue import Empty, SimpleQueue
from typing import Any

from ..detokenizer import IncrementalText
from ..engine import Engine
from ..outputs import Delta, GrowingOutput
from .messages import Gained, NewRequest, portable
from .pipes import WorkerEnd
from .totals import counts_of


class Server:
    """Serves one engine.

    It takes NewRequests; lists of the numbers of requests to abort; (name, arguments) of methods of itself,
    whose results or exceptions it sends; and None, which ends it. It sends Gained.
    """

    def __init__(self, end: WorkerEnd, engine: Engine, is_far: bool = False) -> None:
        self._end, self._engine, self._is_far = end, engine, is_far
        self._tokenizer = engine.pretrained.tokenizer
        self._growing: dict[int, GrowingOutput] = {}  # of requests that are no streams
        self._inbox: SimpleQueue[Any] = SimpleQueue()

    def run(self) -> None:
        """Serves until it is told to end, and closes the engine."""
        threading.Thread(target=self._receive, daemon=True).start()
        while self._handle_messages():
            if self._engine.has_unfinished() and (deltas := self._step()):
                has_ended = any(delta.finish_reason is not None for _, delta in deltas)
                counted = counts_of(self._engine.counts()) if has_ended else None
                self._end.send(Gained(deltas, counted))

    def _receive(self) -> None:
        """In a thread of its own, so that nobody waits to send, and the end of the LLM's process ends this
        one at once, whatever it computes."""
        while True:
            try:
                self._inbox.put(self._end.recv())
            except (EOFError, OSError):
                os._exit(0)
            except Exception as error:  # a message that cannot be read: `run` raises it
                self._inbox.put(error)
                return

    def _handle_messages(self) -> bool:
        """Does what all that have come ask for; waits for one if there is nothing else to do -> whether to go
        on."""
        waits = not self._engine.has_unfinished()
        while True:
            try:
                message = self._inbox.get(block=waits)
            except Empty:
                return True
            if message is None:
                self._engine.close()
                return False
            self._handle(message)
            waits = False

    def _handle(self, message: Any) -> None:
        if isinstance(message, Exception):
            raise message
        if isinstance(message, NewRequest):
            self._add(message)
        elif isinstance(message, list):
            self._engine.abort([str(number) for number in message], notify=False)
            for number in message:
                self._growing.pop(number, None)
        else:
            name, arguments = message
            try:
                reply = getattr(self, name)(*arguments)
            except Exception as error:
                reply = portable(error)
            self._end.send((reply,))

    def _add(self, request: NewRequest) -> None:
        text = None
        if request.has_text and self._tokenizer is not None:
            stop, at_end = request.params.stop, not request.is_stream
            text = IncrementalText(self._tokenizer, stop, request.continues, at_end)
        if not request.is_stream:
            self._growing[request.number] = GrowingOutput()
        name = str(request.number)
        arrival_s = request.arrival_s
        if self._is_far:  # times of day of two machines differ by little, monotonic clocks by anything
            arrival_s = time.monotonic() - max(0.0, time.time() - request.arrived_at)
        arrival_s = min(arrival_s, time.monotonic())  # where the clock has gone back since
        self._engine.add_request(request.token_ids, request.params, name, text, arrival_s, request.is_stream)

    def _step(self) -> list[tuple[int, Delta]]:
        deltas = []
        for delta in self._engine.step():
            number = int(delta.request_id)
            if (growing := self._growing.get(number)) is None:
                deltas.append((number, delta))
                continue
            growing.add(delta)
            if delta.finish_reason is not None:
                deltas.append((number, self._growing.pop(number).make_delta()))
        return deltas

    def score(self, pairs: Any) -> Any:
        return self._engine.score(pairs)

    def stats(self) -> dict[str, Any]:
        return self._engine.stats()

    def fingerprints(self, speculative: Any) -> dict[str, str]:
        return self._engine.fingerprints(speculative)

    def reset_stats(self) -> None:
        self._engine.reset_stats()

    def memory(self) -> dict[str, int]:
        return self._engine.memory()

    def set_speculative(self, speculative: Any) -> None:
        self._engine.set_speculative(speculative)

    def set_speculative_first(self, speculative: list[Any]) -> None:
        """Of a list of one, which only one worker gets."""
        self._engine.set_speculative(*speculative)

    def set_tracing(self, on: bool) -> None:
        self._engine.set_tracing(on)
