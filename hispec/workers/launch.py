"""Starts the processes of an LLM, and tells how they ended."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any, Protocol

from ..errors import ConfigError, WorkerError, shown
from .messages import Setup, Start

_PATIENCE_S = 5.0  # that a process has to end by itself
_FORK_PATIENCE_S = 30.0  # that the process which holds the model has to fork, or to tell how a worker ended
# The program's own __main__ is not run again, as multiprocessing would.
_CODE = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[2]);"
    " from hispec.workers.process import main; main(int(sys.argv[1]))"
)


@dataclass(eq=False)
class Process:
    """A worker's process, and the socket to it. pid: None = it is on another machine, or may be."""

    connection: Connection
    pid: int | None
    popen: subprocess.Popen[bytes] | None = None  # None: the nursery's child


class Launcher(Protocol):
    """Starts workers.

    nursery_pid   of a process that all of them come from
    waits_for     what a worker that is not ready may be waiting for, in words
    """

    @property
    def nursery_pid(self) -> int | None: ...

    @property
    def waits_for(self) -> str: ...

    def start(self, start: Start) -> Process:
        """A new worker, which is not ready yet. Raises WorkerError."""

    def bury(self, process: Process) -> str:
        """Ends a worker, if it has not ended -> how it did, in words."""

    def close(self) -> None:
        """Ends all processes: those that do not end by themselves once their sockets are closed, after some
        seconds."""


class LocalLauncher:
    """Starts workers on this machine.

    On a CPU of Linux a nursery loads the model, on one thread, and is forked for each of them: they share the
    pages of the weights until somebody writes to them, which nobody does. Elsewhere each loads the model for
    itself.
    """

    def __init__(self, setup: Setup) -> None:
        """Loads the model, if workers are forked. Raises ConfigError or CheckpointError, as loading does, and
        WorkerError if that process ends."""
        self._setup = setup
        self._nursery: Process | None = None
        self._started: list[Process] = []
        try:
            if setup.forks:
                self._load()
        except BaseException:
            self.close()
            raise

    @property
    def nursery_pid(self) -> int | None:
        return None if self._nursery is None else self._nursery.pid

    @property
    def waits_for(self) -> str:
        return "it loads the model"

    def start(self, start: Start) -> Process:
        if not self._setup.forks:
            process = self._spawn(start.share.threads)
            _send(process, start)
            return process
        if self._nursery is None:
            self._load()
        assert self._nursery is not None
        ours, theirs = socket.socketpair()
        try:
            self._nursery.connection.send(start)
            send_handle(self._nursery.connection, theirs.fileno(), self._nursery.pid)
            pid = self._answer_of_nursery()
        except (OSError, EOFError):
            ours.close()
            raise WorkerError(f"the process that holds the model {self._end_of_nursery()}") from None
        finally:
            theirs.close()
        return Process(Connection(ours.detach()), pid)

    def bury(self, process: Process) -> str:
        process.connection.close()
        if process.popen is not None:
            self._started.remove(process)
            process.popen.kill()
            try:
                return _ending(process.popen.wait(_PATIENCE_S))
            except subprocess.TimeoutExpired:  # the system holds it, in a driver or a file for example
                return "does not end"
        if self._nursery is not None:
            try:
                self._nursery.connection.send(process.pid)
                code = self._answer_of_nursery()
                return "ended" if code is None else _ending(code)
            except (OSError, EOFError):
                self._end_of_nursery()
        return "ended"  # nobody can tell how; it does once its socket is closed

    def close(self) -> None:
        if self._nursery is not None:
            self._end_of_nursery()
        for process in self._started:
            process.connection.close()
        for process in self._started:
            _reap(process)
        self._started.clear()

    def _load(self) -> None:
        self._nursery = self._spawn(threads=1)
        try:
            error = self._nursery.connection.recv()
        except (OSError, EOFError):
            text = f"the process that loads the model {self._end_of_nursery()}"
            raise WorkerError(f"{text}; did memory run out?") from None
        if error is not None:
            self._end_of_nursery()
            raise error

    def _answer_of_nursery(self) -> Any:
        """Raises EOFError if it has ended, or hangs and was ended; its workers go on."""
        assert self._nursery is not None and self._nursery.popen is not None
        if not self._nursery.connection.poll(_FORK_PATIENCE_S):
            self._nursery.popen.kill()
            raise EOFError
        return self._nursery.connection.recv()

    def _end_of_nursery(self) -> str:
        nursery, self._nursery = self._nursery, None
        assert nursery is not None
        nursery.connection.close()
        return _ending(_reap(nursery))

    def _spawn(self, threads: int) -> Process:
        """A process of `hispec.workers.process`, in a process group of its own: Ctrl-C in a terminal is not
        for it. Raises ConfigError for what cannot be sent there."""
        ours, theirs = socket.socketpair()
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",  # a fork would lose their threads
        }
        handle = theirs.fileno()
        try:
            popen = subprocess.Popen(
                [sys.executable, "-c", _CODE, str(handle), json.dumps(sys.path)],
                pass_fds=[handle],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=2,
                process_group=0,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        process = Process(Connection(ours.detach()), popen.pid, popen)
        try:
            _send(process, self._setup)
        except BaseException:
            process.connection.close()
            _reap(process)
            raise
        if not self._setup.forks:
            self._started.append(process)
        return process


def check_setup(setup: Setup) -> None:
    """Raises ConfigError for what other processes cannot have."""
    if setup.length_predictor is None:
        return
    try:
        is_known = type(setup.length_predictor).__module__ != "__main__"
        pickle.dumps(replace(setup))
    except Exception:
        is_known = False
    if not is_known:
        raise ConfigError(
            f"length_predictor={shown(setup.length_predictor)} cannot be sent to other processes: its class"
            " must be in a module, and it must be picklable; or set workers to 1"
        )


def _send(process: Process, message: Any) -> None:
    with suppress(OSError):  # it has ended: whoever reads finds out
        process.connection.send(message)


def _reap(process: Process) -> int:
    assert process.popen is not None
    try:
        return process.popen.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.popen.kill()
        return process.popen.wait()


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with suppress(ValueError):
        name = signal.Signals(-code).name
        cause = ", which the system sends when memory runs out" if name == "SIGKILL" else ""
        return f"was ended by {name}{cause}"
    return f"was ended by signal {-code}"
