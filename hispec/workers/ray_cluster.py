"""A Ray cluster as a place for workers: what each gets of its machines, and how they are started there."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any
from weakref import WeakSet

from ..config import EngineConfig
from ..config.ray_cluster import CLIENT, LOCAL, NO_CLIENT, RayConfig
from ..errors import ConfigError, WorkerError, cut, shown
from ..version import __version__
from .launch import Process
from .messages import Setup, Start
from .ray_worker import END, RayWorker
from .shares import MOST_THREADS, Share

_log = logging.getLogger(__name__)
_MOST_CPUS = 8  # of a worker that is not told: more threads wait more for each other (docs/scaling.md)
_MOST_REASON = 200  # characters of Ray's words on how an actor ended
_PATIENCE_S = 5.0  # that threads have to end once their actors are gone
_JOINED: WeakSet[RayCluster] = WeakSet()  # which this program is in a cluster for


def import_ray() -> Any:
    """Raises ConfigError if Ray is not installed."""
    try:
        import ray
    except ImportError:
        raise ConfigError("ray: needs Ray: pip install '.[ray]'") from None
    return ray


class RayCluster:
    """A connection to a cluster, and what each worker gets there.

    shares    of each worker
    sharers   workers that one machine has room for, at most: they share its memory
    """

    def __init__(self, config: RayConfig, engine: EngineConfig) -> None:
        """Raises ConfigError if there is no such cluster, or no worker would ever find room in it."""
        ray = import_ray()
        check_engine(engine)
        self._join(ray, config.address)
        try:
            machines = [
                (int(node["Resources"].get("CPU", 0)), int(node["Resources"].get("GPU", 0)))
                for node in ray.nodes()
                if node["Alive"]
            ]
            self.num_cpus, self.num_gpus = _resources(config, engine, machines)
            rooms = [_room(machine, self.num_cpus, self.num_gpus) for machine in machines]
            workers = sum(rooms) if config.workers == "auto" else config.workers
            self._check_room(rooms, workers, machines)
        except BaseException:
            self.close()
            raise
        device = "cuda:0" if self.num_gpus else "cpu"  # the one that Ray shows to it
        self.shares: Sequence[Share] = [Share(None, min(self.num_cpus, MOST_THREADS), device)] * int(workers)
        self.sharers = max(1, min(max(rooms), int(workers)))

    def _check_room(self, rooms: list[int], workers: int | str, machines: list[tuple[int, int]]) -> None:
        each = f"num_cpus={self.num_cpus}, num_gpus={self.num_gpus}"
        if not workers:
            there = "; ".join(f"{cpus} CPUs and {gpus} GPUs" for cpus, gpus in sorted(set(machines)))
            raise ConfigError(
                f"ray: no machine of the cluster has room for a worker of {each} (they have {there}); lower"
                " these, or set ray.workers to a number, to wait until the cluster grows"
            )
        if sum(rooms) < int(workers):
            _log.warning(
                "the cluster has room for %d of %s workers of %s; the others start when it grows",
                sum(rooms),
                workers,
                each,
            )

    def close(self) -> None:
        """Leaves the cluster with the last of those that are in it, if one of them has joined it."""
        if self in _JOINED:
            _JOINED.discard(self)
            if not _JOINED:
                import_ray().shutdown()

    def _join(self, ray: Any, address: str) -> None:
        """Joins a cluster, unless the program itself is in one, and stays there. Raises ConfigError as
        `_connect`, and for another address than that of the cluster that it is in."""
        self._address, others = address, list(_JOINED)
        if not ray.is_initialized():
            _JOINED.clear()
            _connect(ray, address)
        elif address not in ("auto", *(other._address for other in others)):
            raise ConfigError(
                f"ray.address={shown(address)}: this program is in a Ray cluster already; leave it at auto to"
                " use that, or call ray.shutdown() before"
            )
        elif not others:
            return
        _JOINED.add(self)


class RayLauncher:
    """Starts workers as actors; as `launch.Launcher`."""

    def __init__(self, cluster: RayCluster, setup: Setup) -> None:
        """Takes `cluster` over: `close` closes it."""
        ray = import_ray()
        self._ray, self._cluster = ray, cluster
        self._bridges: dict[Process, _Bridge] = {}
        # Two threads: one takes messages, one gives them. An actor that dies is replaced by the dispatcher,
        # which knows what it had to do.
        self._worker = ray.remote(RayWorker).options(
            num_cpus=cluster.num_cpus, num_gpus=cluster.num_gpus, max_concurrency=2, max_restarts=0
        )
        # Read by an actor only once it knows that its version is ours.
        self._setup = ray.put(pickle.dumps(setup))

    @property
    def nursery_pid(self) -> None:
        return None

    @property
    def waits_for(self) -> str:
        each = f"{self._cluster.num_cpus} CPUs, {self._cluster.num_gpus} GPUs"
        return f"the cluster has no room for it ({each}), or it loads the model"

    def start(self, start: Start, waits: bool = True) -> Process:
        try:
            actor = self._worker.remote(__version__, self._setup, pickle.dumps(start))
            bridge = _Bridge(self._ray, actor)
        except Exception as error:
            raise WorkerError(f"Ray does not start a worker: {error}") from error
        self._bridges[bridge.process] = bridge
        return bridge.process

    def bury(self, process: Process) -> str:
        process.connection.close()
        self._bridges.pop(process).close()
        return "ended"

    def close(self) -> None:
        for process in list(self._bridges):
            self.bury(process)
        self._cluster.close()


class _Bridge:
    """Carries messages between a pipe, whose other end is a Process's, and an actor: by Ray's own calls, so
    that no port is opened, and Ray says when the actor is gone."""

    def __init__(self, ray: Any, actor: Any) -> None:
        ours, self._socket = socket.socketpair()
        self.process = Process(Connection(ours.detach()), None)
        self._pipe = Connection(self._socket.dup().detach())
        self._ray, self._actor = ray, actor
        self._threads = [
            threading.Thread(target=run, name=f"hispec-ray-{run.__name__}", daemon=True)
            for run in (self._take_there, self._bring_back)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        with suppress(Exception):  # Ray may be gone
            self._ray.kill(self._actor)
        self._end()
        for thread in self._threads:
            thread.join(_PATIENCE_S)
        if not any(thread.is_alive() for thread in self._threads):
            self._pipe.close()
        self._socket.close()

    def _take_there(self) -> None:
        try:
            while True:
                messages = [self._pipe.recv_bytes()]
                while self._pipe.poll():
                    messages.append(self._pipe.recv_bytes())
                # Waited for, so that calls cannot overtake each other.
                self._ray.get(self._actor.take.remote(messages))
        except (EOFError, OSError):
            pass
        except Exception:  # the other thread tells
            self._end()

    def _bring_back(self) -> None:
        try:
            while True:
                for message in self._ray.get(self._actor.give.remote()):
                    if message == END:
                        return
                    self._pipe.send_bytes(message)
        except OSError:
            pass
        except Exception as error:  # Ray's own: the actor has died, or never started
            with suppress(OSError):
                self._pipe.send(f"ended: {cut(' '.join(str(error).split()), _MOST_REASON)}")
        finally:
            self._end()

    def _end(self) -> None:
        with suppress(OSError):  # what was sent is still read
            self._socket.shutdown(socket.SHUT_RDWR)


def _connect(ray: Any, address: str) -> None:
    if address == "auto" and (named := os.environ.get("RAY_ADDRESS", "")).startswith(CLIENT):
        raise ConfigError(f"RAY_ADDRESS={shown(named)} {NO_CLIENT}")
    try:
        if address == LOCAL:
            ray.init(address=LOCAL, include_dashboard=False, logging_level="ERROR")
        else:
            ray.init(address=address, logging_level="ERROR")
    except Exception as error:  # of many kinds
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"ray.address: no Ray cluster at {shown(address)} ({reason}); start one with `ray start --head`,"
            f" name its HOST:PORT, or set {LOCAL} to use this machine alone"
        ) from None


def check_engine(engine: EngineConfig) -> None:
    """Raises ConfigError for settings that only this machine could keep."""
    if engine.trace is not None:
        raise ConfigError(
            f"engine.trace={shown(str(engine.trace))}: traces are files of the machine that writes them, and"
            " workers of a Ray cluster are on others; leave it out, or run with `workers` on one machine"
        )
    if engine.device.partition(":")[0] not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            f"engine.device={engine.device!r}: workers run on cpu and cuda; choose one, or auto"
        )
    if ":" in engine.device:
        raise ConfigError(
            f"engine.device={engine.device!r} names one GPU, and Ray chooses those of its workers; leave it"
            " at auto or cuda"
        )


def _resources(config: RayConfig, engine: EngineConfig, machines: list[tuple[int, int]]) -> tuple[int, int]:
    """CPUs and GPUs of each worker."""
    num_gpus = config.num_gpus
    if num_gpus == "auto":
        has_gpus = any(gpus for _, gpus in machines)
        num_gpus = int(engine.device == "cuda" or (engine.device == "auto" and has_gpus))
    elif bool(num_gpus) == (engine.device == "cpu") and engine.device != "auto":
        raise ConfigError(
            f"ray.num_gpus={num_gpus} and engine.device={engine.device!r} contradict each other; leave one of"
            " them at auto"
        )
    if config.num_cpus != "auto":
        return config.num_cpus, num_gpus
    sizes = [cpus for cpus, _ in machines if cpus]
    return 1 if num_gpus else min([_MOST_CPUS, *sizes]), num_gpus


def _room(machine: tuple[int, int], num_cpus: int, num_gpus: int) -> int:
    """Workers that a machine of (CPUs, GPUs) has room for."""
    cpus, gpus = machine
    return min(cpus // num_cpus, gpus // num_gpus) if num_gpus else cpus // num_cpus
