"""The processes of benchmarks/peers_cpu.py: one for each engine, which waits to be told to run."""

from __future__ import annotations

import multiprocessing
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peers_engines import ENGINES, Engine, EngineError, Setup, TokenIds
from hispec.utils.environment import peak_memory_bytes

SPAWN = multiprocessing.get_context("spawn")
CLOSE_S = 20  # that a process may take to end


class Run(NamedTuple):
    """Some prompts decoded. `peak_bytes` is the most memory that the process has had resident."""

    seconds: float
    outputs: list[TokenIds]
    peak_bytes: int | None


def _peak_bytes() -> int | None:
    """What Linux counts from a process's start; getrusage would begin with the memory of its parent."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return peak_memory_bytes()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def _serve(pipe: Connection, engine: Engine, setup: Setup, batch_size: int) -> None:
    """Opens the engine, decodes one batch to warm up, and then what prompts it is told to. What it
    sends after each of these is a Run, or the text of an error."""
    try:
        generate = engine.open(setup, batch_size)
        generate(setup.prompts[:batch_size])
        pipe.send(None)
        while True:
            part, num_parts = pipe.recv()
            start = time.perf_counter()
            outputs = generate(setup.prompts[part::num_parts])
            pipe.send(Run(time.perf_counter() - start, outputs, _peak_bytes()))
    except EOFError:  # the measurement was broken off
        pass
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


class Worker:
    """An engine at one batch size, loaded and warm, in its own process."""

    def __init__(self, name: str, setup: Setup, batch_size: int) -> None:
        self.name, self.max_tokens = name, setup.max_tokens
        self._pipe, other_end = SPAWN.Pipe()
        arguments = other_end, ENGINES[name], setup, batch_size
        self._process = SPAWN.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        other_end.close()
        self._receive()

    def run(self, part: int, num_parts: int) -> Run:
        """Decodes prompts `part`, `part` + num_parts, ... Raises EngineError, also for an output that isn't
        as long as was asked for."""
        with suppress(OSError):  # its process has died; what it left is found out below
            self._pipe.send((part, num_parts))
        run = self._receive()
        if wrong := [len(output) for output in run.outputs if len(output) != self.max_tokens]:
            raise EngineError(
                f"{self.name}: {len(wrong)} of {len(run.outputs)} outputs do not have the {self.max_tokens}"
                f" new tokens that were asked for, the first has {wrong[0]}"
            )
        return run

    def close(self) -> None:
        self._pipe.close()
        self._process.join(CLOSE_S)
        self._process.kill()
        self._process.join()

    def _receive(self) -> Any:
        try:
            message = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            raise EngineError(
                f"{self.name}: its process ended with exit code {self._process.exitcode}"
            ) from None
        if isinstance(message, str):
            raise EngineError(f"{self.name}: {message}")
        return message
