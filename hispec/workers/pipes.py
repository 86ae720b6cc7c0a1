"""Both ends of the pipe between an LLM and a worker: neither waits for the other."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from .messages import Alive

_log = logging.getLogger(__name__)
_SIGNS = 10  # of life, in the time after which a worker without one is given up
_MOST_INTERVAL_S = 10.0


class Ended:
    """What an LlmEnd gives after the last message."""


def interval_of(timeout_s: float) -> float:
    """Seconds between two signs of life of a worker that has `timeout_s` to give one."""
    return min(timeout_s / _SIGNS, _MOST_INTERVAL_S)


class LlmEnd:
    """The LLM's end, with a thread for each direction: a worker that stops in the middle of a message, or
    takes none, holds up nobody else."""

    def __init__(self, connection: Connection, take: Callable[[Any], None]) -> None:
        """take: gets each message, and Ended() after the last, in the thread that reads; it must not wait.
        `close` closes the connection."""
        self._connection, self._take = connection, take
        self._to_send: SimpleQueue[bytes | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=run, name=f"hispec-worker-{name}", daemon=True)
            for name, run in (("reads", self._read), ("writes", self._write))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, message: Any) -> None:
        """Returns at once, whether the worker takes it or not. Raises what pickle does."""
        self._to_send.put(pickle.dumps(message))

    def close(self) -> None:
        """Ends both threads, whatever they wait for; what was not sent is lost. Idempotent."""
        if self._connection.closed:
            return
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as own:
            own.shutdown(socket.SHUT_RDWR)
        self._to_send.put(None)
        for thread in self._threads:
            thread.join()
        self._connection.close()  # not before: its number may become another file's

    def _read(self) -> None:
        try:
            while True:
                self._take(self._connection.recv())
        except (EOFError, OSError):
            pass
        except Exception:
            _log.exception("a worker's message cannot be read")
        finally:
            self._take(Ended())

    def _write(self) -> None:
        with suppress(OSError):  # it has died: the other thread tells
            while (data := self._to_send.get()) is not None:
                self._connection.send_bytes(data)


class WorkerEnd:
    """The worker's end, which says from a thread of its own that the process is alive, whatever it computes.
    As a context it ends that thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    def give_signs(self, timeout_s: float) -> None:
        """From now on: often enough for an LLM that gives a worker up after `timeout_s` without one."""
        self._thread = threading.Thread(
            target=self._give_signs, args=(interval_of(timeout_s),), name="hispec-alive", daemon=True
        )
        self._thread.start()

    def send(self, message: Any) -> None:
        data = pickle.dumps(message)
        with self._lock:
            self._connection.send_bytes(data)

    def recv(self) -> Any:
        return self._connection.recv()

    def _give_signs(self, interval_s: float) -> None:
        with suppress(OSError):  # the LLM has ended
            self.send(Alive())
            while not self._is_closed.wait(interval_s):
                self.send(Alive())

    def __enter__(self) -> WorkerEnd:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed.set()
        if self._thread is not None:
            self._thread.join()
