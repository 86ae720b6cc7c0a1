"""A process of an LLM with several workers: one that loads the model and forks workers, or a worker."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import NoReturn

from ..config import EngineConfig
from ..engine import Engine
from ..engine.pretrained import Pretrained
from ..sampling_params import SamplingParams
from ..utils.memory import keep_loaded
from .messages import Hello, Setup, Start, portable
from .pipes import WorkerEnd
from .serve import Server

_log = logging.getLogger(__name__)
_WARM_UP_TOKENS = 4


def main(handle: int) -> NoReturn:
    """Runs in a process of its own, with a socket to the LLM's."""
    # Ctrl-C is for the LLM's process, which says what becomes of this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(handle)
    setup: Setup = connection.recv()
    if not setup.forks:
        os._exit(work(connection, setup, None, connection.recv()))
    try:
        loaded = _load(setup)
        _warm_up(loaded, setup)
    except Exception as error:
        connection.send(portable(error))
        os._exit(1)
    connection.send(None)
    keep_loaded()  # nor are its pages written to: workers share them
    _nurse(connection, setup, loaded)


def _nurse(control: Connection, setup: Setup, loaded: Pretrained) -> NoReturn:
    """Forks a worker for each Start that comes; ends it, and says how it ended, when its id comes. Ends, and
    all workers with it, when the LLM's process does."""
    children: set[int] = set()
    while True:
        try:
            asked = control.recv()
        except (EOFError, OSError):
            for child in children:
                os.kill(child, signal.SIGKILL)
            os._exit(0)
        if isinstance(asked, Start):
            handle = recv_handle(control)
            try:
                child = os.fork()
            except OSError as error:  # too many processes, or too little memory
                os.close(handle)
                control.send(f"no process could be forked: {error.strerror}")
                continue
            if child == 0:
                control.close()
                os._exit(work(Connection(handle), setup, loaded, asked))
            os.close(handle)
            children.add(child)
            control.send(child)
        elif asked not in children:  # of a nursery before this one
            control.send(None)
        else:
            os.kill(asked, signal.SIGKILL)
            _, status = os.waitpid(asked, 0)
            children.discard(asked)
            control.send(os.waitstatus_to_exitcode(status))


def work(connection: Connection, setup: Setup, loaded: Pretrained | None, start: Start) -> int:
    """Serves as a worker until it is told to end -> the exit code of its process. The process ends at once if
    there is nobody left to tell it."""
    with WorkerEnd(connection) as end:
        try:
            start.share.take()
            end.give_signs(setup.config.worker_timeout_s)
            loaded = loaded or _load(setup, start.config)
            from ..measure.latency import latency_for_control

            loaded.measure_latency = latency_for_control
            engine = Engine.of_pretrained(
                loaded,
                start.config,
                start.speculative,
                setup.scheduling,
                setup.length_predictor,
                name=str(setup.model),
                sharers=start.sharers,
            )
            end.send(Hello(engine.admission, loaded.decoder.row_invariant))
        except Exception as error:
            end.send(portable(error))
            return 1
        try:
            Server(end, engine, setup.is_far).run()
            return 0
        except BaseException as error:  # the requests that it has go to another
            traceback.print_exc()
            end.send(f"failed with {type(error).__name__}: {error}")
            with suppress(Exception):  # so that a trace has its end
                engine.close()
            return 1


def _load(setup: Setup, config: EngineConfig | None = None) -> Pretrained:
    loaded = Pretrained(
        setup.model,
        config or setup.config,
        setup.speculative,
        setup.revision,
        setup.skip_tokenizer_init,
        measure_latency=None,
        opened=None if setup.opened is None else pickle.loads(setup.opened),
    )
    loaded.for_plan(setup.speculative)  # reads exits and draft models
    return loaded


def _warm_up(loaded: Pretrained, setup: Setup) -> None:
    """Decodes a few tokens, on this thread alone, so that workers find kernels compiled."""
    plan = setup.speculative if setup.speculative and setup.speculative.control == "fixed" else None
    sizes = {"max_num_seqs": 1, "num_kv_blocks": None, "max_model_len": None, "trace": None, "warm_up": False}
    longest = 64 if plan is None else 64 + plan.plan(loaded.checkpoint.config.num_layers).window
    sizes["num_kv_blocks"] = -(-longest // setup.config.block_size)
    config = setup.config.model_copy(update=sizes)
    try:
        with Engine.of_pretrained(loaded, config, plan, None, None) as engine:
            params = SamplingParams(temperature=0.0, max_tokens=_WARM_UP_TOKENS, ignore_eos=True)
            engine.add_request([0] * 8, params)
            while engine.has_unfinished():
                engine.step()
    except Exception as error:  # a worker that meets the same says so
        _log.debug("warming up failed: %s", error)
