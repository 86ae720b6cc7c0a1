"""A worker of a Ray cluster: an actor with one engine, which takes and gives the messages of `messages`."""

from __future__ import annotations

import pickle
import socket
import threading
from multiprocessing.connection import Connection

from ..errors import ConfigError
from ..version import __version__

END = b""  # after the last message


class RayWorker:
    """Has a pipe to a thread that serves, as a process of `process` has one to the LLM's. The calls of `take`
    come one after the other, and so do those of `give`."""

    def __init__(self, version: str, setup: bytes, start: bytes) -> None:
        """Returns at once; what goes wrong is given as a message."""
        ours, theirs = socket.socketpair()
        self._pipe = Connection(ours.detach())
        served = Connection(theirs.detach())
        arguments = (served, version, setup, start)
        threading.Thread(target=_serve, args=arguments, name="hispec-engine", daemon=True).start()

    def take(self, messages: list[bytes]) -> None:
        """Hands messages to the thread that serves."""
        for message in messages:
            self._pipe.send_bytes(message)

    def give(self) -> list[bytes]:
        """All messages that have come from it; waits for one."""
        messages = [self._pipe.recv_bytes()]
        while messages[-1] != END and self._pipe.poll():
            messages.append(self._pipe.recv_bytes())
        return messages


def _serve(connection: Connection, version: str, setup: bytes, start: bytes) -> None:
    try:
        if version != __version__:
            connection.send(
                ConfigError(
                    f"ray: a machine of the cluster has HiSpec {__version__}, and this one {version}; install"
                    " the same everywhere"
                )
            )
            return
        from .process import work

        work(connection, pickle.loads(setup), None, pickle.loads(start))
    finally:
        connection.send_bytes(END)
