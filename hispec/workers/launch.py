"""Starts the processes of an LLM, and tells how they ended."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from threading import Thread
from typing import Any, Protocol

from ..errors import ConfigError, WorkerError, shown
from ..scheduling.lengths import check_predictor
from .messages import Setup, Start

_PATIENCE_S = 5.0  # that a process has to end by itself
_FORK_PATIENCE_S = 30.0  # that the process which holds the model has to fork, or to tell how a worker ended
# The program's own __main__ is not run again, as multiprocessing would.
_CODE = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[2]);"
    " from hispec.workers.process import main; main(int(sys.argv[1]))"
)


class NotYetError(WorkerError):
    """What a worker is to come from is being made; it may be there when it is asked for again."""


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

    def start(self, start: Start, waits: bool = True) -> Process:
        """A new worker, which is not ready yet. waits: also while a model is loaded. Raises WorkerError."""

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
        self._started: list[Process] = []
        self._loading: Future[Process] | None = None  # the nursery anew
        self._newest: Process | None = None  # of those that load, or have loaded
        self._nursery = self._load() if setup.forks else None

    @property
    def nursery_pid(self) -> int | None:
        return None if self._nursery is None else self._nursery.pid

    @property
    def waits_for(self) -> str:
        return "it loads the model"

    def start(self, start: Start, waits: bool = True) -> Process:
        if not self._setup.forks:
            process = self._spawn(start.share.threads)
            _send(process, start)
            return process
        if self._nursery is None:
            self._nursery = self._load_again(waits)
        ours, theirs = socket.socketpair()
        try:
            self._nursery.connection.send(start)
            send_handle(self._nursery.connection, theirs.fileno(), self._nursery.pid)
            answer = self._answer_of_nursery()
        except (OSError, EOFError):
            ours.close()
            raise WorkerError(f"the process that holds the model {self._end_of_nursery()}") from None
        finally:
            theirs.close()
        if isinstance(answer, str):  # why there is none
            ours.close()
            raise WorkerError(answer)
        return Process(Connection(ours.detach()), answer)

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
        if self._loading is not None:
            if self._newest is not None and self._newest.popen is not None:
                self._newest.popen.kill()
            with suppress(Exception):
                self._nursery = self._loading.result(_PATIENCE_S)
        if self._nursery is not None:
            self._end_of_nursery()
        for process in self._started:
            process.connection.close()
        for process in self._started:
            _reap(process)
        self._started.clear()

    def _load(self) -> Process:
        """A nursery that has loaded the model. Raises what loading raises there."""
        nursery = self._newest = self._spawn(threads=1)
        try:
            error = nursery.connection.recv()
        except (OSError, EOFError):
            text = f"the process that loads the model {_end(nursery)}"
            raise WorkerError(f"{text}; did memory run out?") from None
        except BaseException:
            _end(nursery)
            raise
        if error is not None:
            _end(nursery)
            raise error
        return nursery

    def _load_again(self, waits: bool) -> Process:
        """A nursery in place of one that has ended. It takes as long as the model does to load, or for ever
        where its folder hangs: in a thread, so that workers which are there go on, and one that the end of
        the program does not wait for. Raises NotYetError while it does, unless it is waited for."""
        if self._loading is None:
            self._loading = Future()
            Thread(target=self._load_into, args=(self._loading,), daemon=True).start()
        if not (waits or self._loading.done()):
            raise NotYetError("the process that holds the model has ended, and is started again")
        loading, self._loading = self._loading, None
        return loading.result()

    def _load_into(self, loading: Future[Process]) -> None:
        try:
            loading.set_result(self._load())
        except BaseException as error:
            loading.set_exception(error)

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
        return _end(nursery)

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
                [sys.executable, "-c", _CODE, str(handle), json.dumps(_search_path())],
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


def _search_path() -> list[str]:
    """Where Python looks for modules, which is in texts alone."""
    return [each for each in sys.path if isinstance(each, str)]


def check_setup(setup: Setup) -> None:
    """Raises ConfigError for what other processes cannot have."""
    if setup.length_predictor is None:
        return
    check_predictor(setup.length_predictor)
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


def _end(process: Process) -> str:
    """Ends a process that ends when its socket is closed -> how it did."""
    process.connection.close()
    return _ending(_reap(process))


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with suppress(ValueError):
        name = signal.Signals(-code).name
        cause = ", which the system sends when memory runs out" if name == "SIGKILL" else ""
        return f"was ended by {name}{cause}"
    return f"was ended by signal {-code}"
