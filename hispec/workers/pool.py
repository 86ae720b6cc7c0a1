"""WorkerPool: what an Engine does, by several processes that each have one."""

from __future__ import annotations

import itertools
import math
import os
import pickle
import sys
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING, Any, NoReturn

from ee_models.checkpoint.loader import Checkpoint, CheckpointError, load_tokenizer
from ee_models.families import OWN_FAMILIES, find_family

from ..config import EngineConfig, SchedulingConfig, SpeculativeConfig
from ..config.draft_kinds import OWN_KINDS
from ..config.speculative import OWN_ACCEPTANCES
from ..detokenizer import IncrementalText
from ..engine.pretrained import Opened
from ..errors import ConfigError, RequestError, WorkerError, build, check_process, closed, shown
from ..loading.target_model import open_model
from ..loading.whole_paths import whole_path, with_whole_paths
from ..outputs import ContinuationScore, Delta
from ..sampling_params import SamplingParams
from ..scheduling.lengths import LengthPredictor
from ..scheduling.request import TextStream
from ..trace.merge import drop_traces_of_workers
from .dispatcher import Dispatcher, NoAnswerError
from .launch import Launcher, LocalLauncher, check_setup
from .messages import NewRequest, Setup
from .ray_cluster import RayCluster, RayLauncher
from .shares import Share
from .start import start_all, start_of
from .totals import sum_memory, sum_stats

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_PATIENCE_S = 5.0  # that workers have to tell their last counts
# How long stats are waited for while requests run, which wait, too; and how long stats stay as they are after
# that was too short.
_STATS_PATIENCE_S, _STATS_REST_S = 2.0, 30.0
_IDLE_PATIENCE_S = 10.0  # where nothing is unfinished: who does not answer by then hangs, others may serve
_MOST_TRIES = 3  # of pairs that are scored, by others when a worker has died


class WorkerPool:
    """Serves requests as one Engine would, with the same output. Not thread-safe: one thread calls it.

    Each worker has `max_num_seqs` rows and `num_kv_blocks` of its own. Requests wait here, and a worker gets
    a few more than it has rows for; with a policy other than fcfs, which is to choose among all of them, they
    are dealt out as they come.
    """

    def __init__(
        self,
        model: str | Path,
        place: Sequence[Share] | RayCluster,
        *,
        speculative: SpeculativeConfig | dict[str, Any] | None = None,
        scheduling: SchedulingConfig | dict[str, Any] | None = None,
        length_predictor: LengthPredictor | None = None,
        skip_tokenizer_init: bool = False,
        revision: str | None = None,
        **engine: Any,
    ) -> None:
        """place: the shares of this machine, or a cluster with its own, which this object closes. Other
        arguments, and what is raised, as those of LLM; WorkerError if a process ends before it serves."""
        cluster = None if isinstance(place, Sequence) else place
        shares = place if isinstance(place, Sequence) else place.shares
        config = build(EngineConfig, engine, "engine")
        order = None if scheduling is None else build(SchedulingConfig, scheduling, "scheduling")
        plan = _make_plan(speculative)
        checkpoint = open_model(model, revision)
        _check_family("model", model, checkpoint)
        self.generation_defaults = checkpoint.generation_defaults
        self.tokenizer: PreTrainedTokenizerBase | None = (
            None if skip_tokenizer_init else load_tokenizer(checkpoint)
        )
        on_cpu = shares[0].device == "cpu"
        setup = Setup(
            model=model if cluster is None else whole_path(str(model)),
            config=config.model_copy(update={"device": "cpu"}) if on_cpu else config,
            speculative=plan if cluster is None else with_whole_paths(plan),
            scheduling=order,
            length_predictor=length_predictor,
            revision=revision,
            skip_tokenizer_init=skip_tokenizer_init,
            sharers=(len(shares) if cluster is None else cluster.sharers) if on_cpu else 1,
            forks=on_cpu and cluster is None and sys.platform == "linux",
            is_far=cluster is not None,
        )
        if setup.forks:  # others are not waited for, and so large a message would be
            setup = replace(setup, opened=_pickled(Opened(checkpoint, self.tokenizer)))
        check_setup(setup)
        self._setup, self._shares = setup, list(shares)
        self._speculative = plan
        self.is_closed = self._is_woken = False
        self._pid = os.getpid()
        self._counter = itertools.count()
        self._num_refused = 0  # requests
        self._numbers: dict[str, int] = {}  # of unfinished requests
        self._ids: dict[int, str] = {}
        self._taken: list[tuple[int, Delta]] = []  # out of the outbox, not returned yet
        launcher: Launcher = LocalLauncher(setup) if cluster is None else RayLauncher(cluster, setup)
        try:
            # Of a cluster one that serves is enough: others may have to wait for machines.
            workers, num_ready, hello = start_all(launcher, setup, self._shares, waits=cluster is None)
            if config.trace is not None:  # only now, as each replaces its own
                drop_traces_of_workers(Path(config.trace), from_number=len(self._shares))
        except BaseException:
            launcher.close()
            raise
        self.admission, self.row_invariant = hello.admission, hello.row_invariant
        # Enough that a worker never runs dry, few enough that all end at about the same time.
        room = None
        if order is None or order.policy == "fcfs":
            room = config.max_num_seqs + max(2, config.max_num_seqs // 4)
        start_again = partial(start_of, setup, self._shares, hello.admission.num_blocks)
        self._dispatcher = Dispatcher(
            launcher, workers, num_ready, start_again, room, config.worker_timeout_s
        )
        weakref.finalize(self, self._dispatcher.close)
        self._reads_stats_s = -math.inf  # the clock's time from which workers are asked for them again
        self._hangs = False  # whether a worker did not answer although it had nothing to do
        self._read_stats()
        self._last_memory = self.memory()

    @property
    def failure(self) -> Exception | None:
        """Why nothing will come any more; None while workers serve, or others may take their places."""
        return self._dispatcher.failure

    @property
    def num_workers(self) -> int:
        return len(self._shares)

    @property
    def max_model_len(self) -> int:
        return self.admission.max_model_len

    @property
    def pretrained(self) -> NoReturn:
        """Raises ConfigError: the model is in other processes."""
        raise ConfigError(
            f"workers={len(self._shares)}: the model is in other processes; with 1 it is in this one"
        )

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str,
        text: TextStream | None = None,
        is_stream: bool = False,
    ) -> str:
        """As Engine.add_request. is_stream: each Delta is wanted as it comes; else one with all of them. Of
        `text` only matters whether there is one, and continues the prompt's: workers make their own. One
        that an engine would refuse is refused, too."""
        self._check_open("add_request")
        problems = []
        if isinstance(request_id, str) and request_id in self._numbers:
            problems.append("a request of this id is unfinished; ids must be unique while they live")
        try:
            self.admission.check(request_id, prompt_token_ids, params, text, problems)
        except RequestError:
            self._num_refused += 1
            raise
        number = next(self._counter)
        if params.seed is None:  # as one engine derives it, whoever serves the request
            params = params.model_copy(update={"seed": (self.admission.seed + number) % 2**63})
        # What other processes know: a class of the caller's own may be none of theirs.
        prompt = [int(token) for token in prompt_token_ids]
        if type(params) is not SamplingParams:
            params = SamplingParams(**{name: getattr(params, name) for name in SamplingParams.model_fields})
        continues = isinstance(text, IncrementalText) and text.continues
        request = NewRequest(
            number, prompt, params, text is not None, continues, is_stream, time.monotonic(), time.time()
        )
        self._numbers[request_id], self._ids[number] = number, request_id
        self._dispatcher.post(self._dispatcher.add, request)
        return request_id

    def step(self) -> list[Delta]:
        """Waits until a request has gained something, and returns what all have; [] after `wake`, or if there
        is no request. As with Engine.step nothing is lost by an interrupt. Raises WorkerError, or what the
        last worker could not start of, once there is none left."""
        self._check_open("step")
        dispatcher, taken = self._dispatcher, self._taken
        while True:
            while dispatcher.outbox:
                if not taken or taken[-1] is not dispatcher.outbox[0]:
                    taken.append(dispatcher.outbox[0])
                dispatcher.outbox.popleft()
                with suppress(Empty):
                    dispatcher.news.get_nowait()
            deltas = [
                replace(delta, request_id=request_id)
                for number, delta in taken
                if (request_id := self._ids.get(number)) is not None
            ]
            if deltas or not self._ids:
                break
            if dispatcher.failure is not None:
                raise dispatcher.failure
            dispatcher.news.get()
            if self._is_woken:
                self._is_woken = False
                return []
        live = [number for number, _ in taken if number in self._ids]
        try:
            self._taken = []
            for delta in deltas:
                if delta.finish_reason is not None:
                    del self._ids[self._numbers.pop(delta.request_id)]
            return deltas
        except BaseException:  # they did not reach the caller
            self._taken = taken
            for number, delta in zip(live, deltas, strict=True):
                self._ids[number], self._numbers[delta.request_id] = delta.request_id, number
            raise

    def wake(self) -> None:
        """Has a `step` that waits return, from another thread."""
        self._is_woken = True
        self._dispatcher.news.put(None)

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[ContinuationScore]:
        """As Engine.score; neighbours are scored by the same worker. Raises WorkerError if workers die of
        it."""
        self._check_open("score")
        self._check_idle("score() cannot run")
        self.admission.check_pairs(pairs)
        pairs = [([int(token) for token in one], [int(token) for token in other]) for one, other in pairs]
        found: dict[int, ContinuationScore] = {}
        for _ in range(_MOST_TRIES):
            left = [at for at in range(len(pairs)) if at not in found]
            if not left:
                break
            for begin, reply in self._dispatcher.ask_parts("score", [pairs[at] for at in left]):
                if isinstance(reply, Exception):
                    raise reply
                found.update(zip(left[begin:], reply, strict=False))
            if self._dispatcher.failure is not None:
                raise self._dispatcher.failure
        if len(found) < len(pairs):
            missing = len(pairs) - len(found)
            raise WorkerError(f"workers died {_MOST_TRIES} times while they scored; {missing} pairs are left")
        return [found[at] for at in range(len(pairs))]

    def abort(self, request_ids: str | Iterable[str], *, notify: bool = False) -> None:
        """Ends requests at once, without a Delta; unknown and finished ids are passed over."""
        self._check_open("abort")
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        numbers = [self._numbers[request_id] for request_id in ids if request_id in self._numbers]
        self._dispatcher.post(self._dispatcher.abort, numbers)
        for request_id in ids:  # in an order in which it can be interrupted, and called again
            if (number := self._numbers.get(request_id)) is not None:
                self._ids.pop(number, None)
                del self._numbers[request_id]

    def has_unfinished(self) -> bool:
        return bool(self._ids)

    def set_speculative(self, speculative: SpeculativeConfig | dict[str, Any] | None) -> None:
        """As Engine.set_speculative, in all workers or in none. Exits and draft models that were not named
        when the LLM was made are loaded by each for itself."""
        self._check_open("set_speculative")
        config = _make_plan(speculative)
        self._check_idle("the plan cannot change")
        try:
            if config is not None and config.control == "goodput":
                # One measures what stages cost, if nobody has yet; the others read it.
                for _, reply in self._dispatcher.ask_parts("set_speculative_first", [config]):
                    if isinstance(reply, Exception):
                        raise reply
            self._ask("set_speculative", config, is_lasting=True)
        except BaseException:  # an interrupt, too, after which nobody hears in which it failed
            self._ask("set_speculative", self._speculative, is_lasting=True, is_binding=True)
            raise
        self._speculative = config

    def set_tracing(self, on: bool) -> None:
        """As Engine.set_tracing."""
        self._check_idle("set_tracing() cannot be called")
        if not self.is_closed:
            self._ask("set_tracing", on, is_lasting=True)

    def stats(self) -> dict[str, Any]:
        """Those of all workers as one, and of requests that no worker has yet; "workers": of each by itself;
        "workers_replaced": how many died and were replaced. What the dead had counted is in the sums, but for
        their work since they were last asked for stats, or a request of theirs last ended. While requests are
        unfinished and a worker is in a step of seconds, or hangs, they are those of before."""
        if self.is_closed or self.failure is not None:
            return self._last_stats
        if time.monotonic() >= self._reads_stats_s or not (self._ids or self._hangs):
            try:
                self._read_stats(_STATS_PATIENCE_S if self._ids else _IDLE_PATIENCE_S)
                self._hangs = False
            except NoAnswerError:
                self._reads_stats_s, self._hangs = time.monotonic() + _STATS_REST_S, not self._ids
        return self._last_stats

    def fingerprints(self, speculative: SpeculativeConfig | None) -> dict[str, str]:
        """As Engine.fingerprints."""
        self._check_open("fingerprints")
        found: dict[str, str] = self._ask("fingerprints", speculative)[0]
        return found

    def reset_stats(self) -> None:
        if not self.is_closed:
            self._ask("reset_stats")
            self._dispatcher.post(self._dispatcher.forget_dead)
            self._num_refused = self._dispatcher.num_given_up = self._dispatcher.num_aborted = 0
            self._read_stats()

    def memory(self) -> dict[str, int]:
        """Bytes allocated, by purpose, in all workers."""
        if not self.is_closed and self.failure is None:
            self._last_memory = sum_memory(self._ask("memory"), shares_weights=self._setup.forks)
        return self._last_memory

    def pids(self) -> dict[str, int]:
        """Ids of the processes of this machine, by name; workers by place, the nursery if there is one."""
        return {} if self.is_closed else self._dispatcher.pids()

    def close(self) -> None:
        """Ends all requests and all processes, in bounded time. Idempotent."""
        if self.is_closed:
            return
        with suppress(Exception):  # what can still be read afterwards
            self._read_stats(_PATIENCE_S)
        self.is_closed = True
        self._numbers.clear()
        self._ids.clear()
        self._dispatcher.close()

    def _read_stats(self, patience_s: float = math.inf) -> None:
        dispatcher = self._dispatcher
        while True:
            dead = dispatcher.counts_of_dead
            each = self._ask("stats", patience_s=patience_s)
            if dispatcher.counts_of_dead is dead:  # else who died meanwhile may be in both, or in neither
                break
        total = sum_stats(each, dead)
        total["waiting"] += dispatcher.num_queued
        own = {"refused": self._num_refused, "worker_deaths": dispatcher.num_given_up}
        for name, count in own.items():
            total["errors"][name] += count
        for reason, count in (("error", own["worker_deaths"]), ("abort", dispatcher.num_aborted)):
            total["finished"] += count
            total["finished_by_reason"][reason] += count
        self._last_stats = {**total, "workers": each, "workers_replaced": dispatcher.num_replaced}

    def _ask(
        self,
        name: str,
        *arguments: Any,
        is_lasting: bool = False,
        is_binding: bool = False,
        patience_s: float = math.inf,
    ) -> list[Any]:
        """What a method returns in each worker. Raises what it raises in one, or what ended the last, and
        ProcessError."""
        check_process(f"LLM.{name}", self._pid)
        replies: list[Any] = []
        while not replies:  # all that were asked have died, and others take their places
            if self._dispatcher.failure is not None:
                raise self._dispatcher.failure
            replies = self._dispatcher.ask(
                name, *arguments, is_lasting=is_lasting, is_binding=is_binding, patience_s=patience_s
            )
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    def _check_open(self, method: str) -> None:
        if self.is_closed:
            raise closed(f"LLM.{method}")
        check_process(f"LLM.{method}", self._pid)

    def _check_idle(self, what: str) -> None:
        if self._ids:
            raise ConfigError(f"{what} while {len(self._ids)} requests are unfinished; abort them first")


def _pickled(opened: Opened) -> bytes | None:
    """None of a tokenizer whose class cannot be sent; then the process opens the model itself."""
    try:
        return pickle.dumps(opened)
    except (pickle.PicklingError, TypeError, AttributeError):
        return None


def _make_plan(speculative: SpeculativeConfig | dict[str, Any] | None) -> SpeculativeConfig | None:
    """Raises ConfigError, for what only this process knows, too."""
    if speculative is None:
        return None
    plan = build(SpeculativeConfig, speculative, "speculative")
    for name, value, known in (
        ("draft.kind", plan.draft.kind, OWN_KINDS),
        ("acceptance", plan.acceptance, OWN_ACCEPTANCES),
    ):
        if value not in known:
            raise ConfigError(
                f"speculative.{name}={value!r} was registered in this process, and workers are others; set"
                " workers to 1"
            )
    if plan.draft.traits.has_model and plan.draft.path is not None:
        draft_model = None
        with suppress(ConfigError, CheckpointError):  # workers say so; a far one may have it nevertheless
            draft_model = open_model(plan.draft.path)
        if draft_model is not None:
            _check_family("speculative.draft.path", plan.draft.path, draft_model)
    return plan


def _check_family(field: str, path: str | Path, checkpoint: Checkpoint) -> None:
    """Raises ConfigError for a family that only this process knows."""
    architecture = checkpoint.config.architecture
    if find_family(architecture, None) not in OWN_FAMILIES:
        raise ConfigError(
            f"{field}={shown(str(path))}: its family {architecture} was registered in this process, and"
            " workers are others; set workers to 1"
        )
