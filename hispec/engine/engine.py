"""Engine: continuous batching of rounds. Token ids in, Deltas out; no tokenizer here."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from cache.blocks import BlockPool
from cache.host_kv import HostKV
from ee_models.exits import Exit

from ..config import EngineConfig, Plan, SchedulingConfig, SpeculativeConfig
from ..control.choice import Choice
from ..control.make import make_control
from ..decoding.batch import RoundResult
from ..decoding.stages import DecoderLike, PassCounts
from ..errors import ConfigError
from ..latency.model import LatencyModel
from ..outputs import Delta
from ..runner.backfill import fall_behind
from ..runner.block_tables import RowTables
from ..runner.cuda_graphs import GraphDevice
from ..runner.drafter_failures import tell_of_end
from ..runner.launchers import Flight, context_buckets
from ..runner.plan_cache import PlanCache, Wanted
from ..runner.plan_runtime import PlanRuntime
from ..runner.prefill import prefill
from ..runner.round_output import RowOutcome
from ..runner.round_runner import RoundRunner
from ..sampling_params import SamplingParams
from ..scheduling.lengths import LengthPredictor
from ..scheduling.make import make_scheduler
from ..scheduling.policy import Service
from ..scheduling.request import Request, TextStream
from ..scheduling.scheduler import Chunk
from ..stats import EngineStats
from ..utils.memory import is_out_of_memory
from .admission import Admission
from .kv_offload import KVOffloader, cheaper_to_move
from .kv_sizing import default_num_blocks, max_model_len
from .recorder import Recorder

_log = logging.getLogger(__name__)
_LEAST_PREFILL = 16  # positions; below that an allocation failure is no matter of their number


class Engine:
    """Serves many requests with one decoder. Not thread-safe: one thread calls it.

    A step computes a bounded piece of waiting prompts, then one round for every request that is ready, and
    says what each of them gained. Requests join and leave between steps.
    """

    def __init__(
        self,
        decoder: DecoderLike,
        config: EngineConfig,
        speculative: SpeculativeConfig | None = None,
        *,
        exits: Sequence[Exit] = (),
        draft_model: DecoderLike | None = None,
        plan: Plan | None = None,
        latency: LatencyModel | None = None,
        scheduling: SchedulingConfig | None = None,
        length_predictor: LengthPredictor | None = None,
        eos_token_ids: Sequence[int] = (),
        name: str = "",
        is_static: bool | None = None,
        graph_device: GraphDevice | None = None,
    ) -> None:
        """As `set_speculative` for `speculative`, `exits`, `draft_model`, `plan` and `latency`. Raises
        ConfigError for what does not fit the model or memory.

        scheduling                who is served first; None = who came first
        length_predictor          how long outputs will be, for policies that ask; None = learnt from those
                                  that have ended
        name                      of the model, for the trace
        is_static, graph_device   whether rounds have static shapes, and where they are captured; None = as
                                  the device wants it
        """
        model = decoder.config
        scheduling = scheduling or SchedulingConfig()
        self._decoder, self._config = decoder, config
        self.max_model_len = max_model_len(
            config, min(model.max_position_embeddings, decoder.max_positions), model.sliding_window
        )
        self._counts, self._draft_counts = PassCounts(), PassCounts()  # of the model, and of a draft model
        self._plans = PlanCache(decoder, config, self.max_model_len, self._counts, self._draft_counts)
        wanted = Wanted(speculative, exits, draft_model, plan, latency)
        parts = config, decoder, exits, draft_model, self.max_model_len
        num_blocks = config.num_kv_blocks or default_num_blocks(*parts, lambda: self._plans.make(1, wanted))
        self._pool = BlockPool(num_blocks, config.block_size)
        self._is_move_cheaper = cheaper_to_move(latency, config.max_prefill_tokens)
        keeper = KVOffloader(
            HostKV(scheduling.swap_bytes), lambda: self._runtime.kvs, lambda num: self._is_move_cheaper(num)
        )
        self._scheduler = make_scheduler(scheduling, config, self._pool, length_predictor, keeper)
        self._tables = RowTables(
            config.max_num_seqs, min(num_blocks, self._pool.blocks_for(self.max_model_len))
        )
        self._admission = Admission(
            model.vocab_size,
            self.max_model_len,
            num_blocks,
            config.block_size,
            config.seed,
            frozenset(eos_token_ids),
        )
        self._numbers = itertools.count()
        self._requests: dict[str, Request] = {}
        self._pending: list[Delta] = []
        self._flight: Flight | None = None  # the round that was launched and not read yet
        self._closed = self._draining = False
        counts = self._counts, self._draft_counts
        self._recorder = Recorder(config, name, scheduling.policy)
        sizes = config, self._scheduler, self._tables, self.max_model_len
        self._rounds = RoundRunner(
            *sizes,
            decoder,
            counts,
            is_static,
            graph_device,
            lambda route: self._recorder.control.failed(route),
        )
        self._choice = Choice()  # of the round in the air
        self._read_s = 0.0  # when the last round was read
        self._is_timed = True  # whether the round in the air has the device to itself
        self.set_speculative(speculative, exits=exits, draft_model=draft_model, plan=plan, latency=latency)
        if config.warm_up:
            self.warm_up()
        self.reset_stats()

    # ---- what users call ----

    def set_speculative(
        self,
        speculative: SpeculativeConfig | None,
        *,
        exits: Sequence[Exit] = (),
        draft_model: DecoderLike | None = None,
        plan: Plan | None = None,
        latency: LatencyModel | None = None,
    ) -> None:
        """Changes the plan between requests: plain decoding for None. Raises ConfigError while requests are
        unfinished.

        exits        the trained ones of this plan, or of those to choose from (`ee_models.exits.load_exits`);
                     others go through the model's head
        draft_model  the small model, if draft.kind is "model"
        plan         overrides the one that `speculative` gives
        latency      what stages cost, which control="goodput" needs (`hispec.measure`)
        """
        if self._requests:
            raise ConfigError(
                f"the plan cannot change while {len(self._requests)} requests are unfinished; drain() or"
                " abort them first"
            )
        self._flight = None  # the round in the air is of requests that are gone
        wanted = Wanted(speculative, exits, draft_model, plan, latency)
        new = self._plans.get(self._pool.num_blocks, wanted)
        control = self._recorder.known(wanted) or make_control(
            new.plan,
            [route for each in new.routes if (route := each.route) is not None],
            [owner for owner in new.owners if isinstance(owner, int)],
            speculative,
            latency,
            self._recorder.decided,
        )
        is_anew, is_cache_stale = self._plans.use(new, wanted, self._rounds.graphs is not None)
        # All buffers are there: nothing below can fail and leave one plan with another's buffers.
        if is_anew:
            self._rounds.forget_graphs()
        if is_cache_stale:
            self._pool.forget()  # what is cached lacks their KV
        self._recorder.use(control, wanted)
        if latency is not None:
            self._is_move_cheaper = cheaper_to_move(latency, self._config.max_prefill_tokens)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Captures the graphs of the plan's greedy rounds now, the largest first and at most max_graphs,
        instead of each on first use. Nothing where rounds are not captured. Raises ConfigError while requests
        are unfinished."""
        if self._requests:
            raise ConfigError(
                f"warm_up() cannot run while {len(self._requests)} requests are unfinished; drain() or abort"
                " them first"
            )
        self._rounds.warm_up(self._runtime, context_buckets(self.max_model_len))

    @property
    def plan(self) -> Plan:
        return self._runtime.plan

    @property
    def _runtime(self) -> PlanRuntime:
        return self._plans.runtime

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        text: TextStream | None = None,
    ) -> str:
        """Queues a request -> its id. Raises RequestError, naming all that is wrong with it; the engine goes
        on.

        `params.n` must be 1: a sequence is one request. `text` follows the output for stop strings and text.
        """
        number = next(self._numbers)
        request_id = request_id if request_id is not None else f"request-{number}"
        also = []
        if self._closed or self._draining:
            also.append(
                "the engine is closed"
                if self._closed
                else "the engine is draining and takes no more requests"
            )
        if request_id in self._requests or any(delta.request_id == request_id for delta in self._pending):
            also.append("a request of this id is unfinished; ids must be unique while they live")
        request = self._admission.request(number, request_id, prompt_token_ids, params, text, also)
        with self._scheduler.repaired(self._requests):
            self._scheduler.add(request)
            self._requests[request_id] = request
        return request_id

    @torch.inference_mode()
    def step(self) -> list[Delta]:
        """Computes one piece of prefill and one round -> what every request gained; [] only if none is ready
        yet."""
        for request in [request for request in self._scheduler.running if request.has_ended]:
            self._finish(request, [], "")  # an interrupt came between its last token and its end
        if self._flight is not None and all(
            request.finish_reason is not None for _, request in self._flight.rows.requests
        ):
            self._flight = None  # nobody in it is left
        try:
            if self._flight is None:
                self._start()
            if (flight := self._flight) is not None:
                started = time.perf_counter()
                self._flight = (
                    self._rounds.proceed(flight, self._stats) if not self._recorder.control.is_due else None
                )
                self._read(flight)
                self._stats.round_s += time.perf_counter() - started
        except BaseException:
            # What is in the air is lost: rounds begin again from what the host knows.
            self._flight = None
            self._rounds.forget()
            self._scheduler.repair(self._requests.values())
            raise
        # Deltas wait in `_pending` until here, so that none is lost if a step is interrupted.
        deltas, self._pending = self._pending, []
        return deltas

    def abort(self, request_ids: Iterable[str], *, notify: bool = True) -> None:
        """Ends requests at once; unknown and finished ids are passed over. With `notify` each gets a last
        Delta with the next step, and its id is free again after that; without, nothing more is said of
        them."""
        request_ids = dict.fromkeys(request_ids)
        with self._scheduler.repaired(self._requests):
            for request_id in request_ids:
                request = self._requests.get(request_id)
                if request is not None:
                    request.finish_reason = "abort"
                    self._finish(request, [], request.release_text_or_nothing())
        if not notify:
            self._pending = [delta for delta in self._pending if delta.request_id not in request_ids]

    def has_unfinished(self) -> bool:
        """Whether a step has anything to do or to say."""
        return bool(self._requests or self._pending)

    def drain(self) -> Iterator[Delta]:
        """Takes no more requests and yields Deltas until all are finished; afterwards the engine takes
        requests again."""
        self._draining = True
        try:
            while self.has_unfinished():
                yield from self.step()
        finally:
            self._draining = False

    def close(self) -> None:
        """Aborts what is unfinished and releases the KV memory. Idempotent."""
        self.abort(list(self._requests))
        self._pending.clear()
        self._closed = True
        self._flight = None
        self._rounds.forget_graphs()
        self._plans.release()
        self._recorder.close()

    def stats(self) -> dict[str, Any]:
        """Counts since the last reset, what is held now (see EngineStats), and under "control" what the
        controller counts, since it was made."""
        return {
            **self._stats.as_dict(),
            **vars(self._counts),
            "draft_model_layer_passes": (
                self._draft_counts.layer_passes - self._draft_counts.prefill_layer_passes
            ),
            "num_layers": self._decoder.config.num_layers,
            **self._rounds.stats(),
            "control": self._recorder.control.stats(),
            "cached_tokens": self._scheduler.num_cached_tokens,
            "preemptions": self._scheduler.num_preemptions,
            "kv_moved_out": self._scheduler.kv.num_kept,
            "kv_moved_in": self._scheduler.kv.num_restored,
            "kv_blocks_used": self._pool.num_held,
            "kv_blocks_total": self._pool.num_blocks,
            "running": len(self._scheduler.running),
            "waiting": len(self._scheduler.waiting),
        }

    def reset_stats(self) -> None:
        self._stats = EngineStats()
        self._counts.reset()
        self._draft_counts.reset()
        self._scheduler.num_preemptions = self._scheduler.num_cached_tokens = 0
        self._scheduler.kv.num_kept = self._scheduler.kv.num_restored = 0

    def memory(self) -> dict[str, int]:
        """Bytes allocated, by what they are for; on a GPU those of earlier plans too, up to eight, whose
        graphs are kept."""
        graphs = self._rounds.graphs
        return {**self._plans.memory(), **({"graph_bytes": graphs.num_bytes} if graphs is not None else {})}

    def check(self) -> None:
        """Asserts the integrity of blocks and rows; for tests, at any time between steps."""
        self._pool.check(self._scheduler.tables())
        live = {*self._scheduler.waiting, *self._scheduler.running}
        assert live == set(self._requests.values()), "a request is lost or leaked"
        assert [request.row for request in self._scheduler.running] == list(
            range(len(self._scheduler.running))
        )
        for request in self._scheduler.running:
            assert request.num_computed < len(request.token_ids)
            assert len(request.table.blocks) >= self._pool.blocks_for(request.num_computed)

    # ---- sizes ----

    def _shrink(self, requests: Sequence[Request], what: str, error: BaseException) -> None:
        """Memory was too little for these requests at once: fewer from now on. One that fails alone ends."""
        self._rounds.forget_graphs()
        if self._decoder.device.type == "cuda":
            torch.cuda.empty_cache()
        if what == "prefill" and (tokens := self._scheduler.max_prefill_tokens) > _LEAST_PREFILL:
            self._scheduler.max_prefill_tokens = max(_LEAST_PREFILL, tokens // 2)
            _log.warning(
                "out of memory (%s): prefill goes on with max_prefill_tokens=%d",
                error,
                self._scheduler.max_prefill_tokens,
            )
        elif len(self._scheduler.running) > 1:
            rows = len(self._scheduler.running) // 2
            self._scheduler.shrink(rows)
            _log.warning("out of memory (%s): goes on with max_num_seqs=%d", error, rows)
        else:
            for request in requests:
                request.finish_reason = "error"
                self._finish(
                    request,
                    [],
                    "",
                    f"out of memory, even alone: {error}; lower engine.num_kv_blocks or max_prefill_tokens",
                )

    # ---- one step ----

    def _start(self) -> None:
        """Computes a piece of waiting prompts, and launches a round for whom is ready."""
        step = self._scheduler.schedule(self._choice.plan.window, time.monotonic())
        if step.limits:
            ready = [self._scheduler.running[row] for row in step.limits]
            self._choice = self._recorder.control.choose(
                [request.number for request in ready], sum(len(request.token_ids) for request in ready)
            )
            self._scheduler.fit(step, self._choice.plan.window)
        self._tables.update([request.table.blocks for request in self._scheduler.running])
        started = time.perf_counter()
        # On a GPU prefill is only queued, and the round waits for it.
        self._is_timed = not step.chunks or self._decoder.device.type == "cpu"
        what, concerned = "prefill", [chunk.request for chunk in step.chunks]
        try:
            if step.chunks:
                self._prefill(step.chunks)
            prefilled = time.perf_counter()
            self._stats.prefill_s += prefilled - started
            what, concerned = "a round", [self._scheduler.running[row] for row in step.limits]
            if step.limits:
                self._flight = self._rounds.launch(self._runtime, self._choice, step.limits, self._stats)
            self._stats.round_s += time.perf_counter() - prefilled
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._rounds.forget()
            self._shrink(concerned, what, error)

    def _prefill(self, chunks: list[Chunk]) -> None:
        """Computes KV of prompt positions at every layer; several requests' chunks in one pass."""
        started = time.perf_counter()
        prefill(
            self._runtime,
            chunks,
            self._tables.tensor[: len(self._scheduler.running)],
            self._pool.block_size,
            self._stats,
        )
        seconds = time.perf_counter() - started
        for chunk in chunks:
            self._stats.prefill_tokens += chunk.end - chunk.start
            self._scheduler.commit(chunk.request, chunk.end, release=False)
            self._scheduler.served(
                chunk.request, Service(rounds=0, tokens=0, drafted=0, accepted=0, passes=1.0, seconds=seconds)
            )

    def _read(self, flight: Flight) -> None:
        """Commits what a round has committed on the device."""
        outcomes = flight.outcomes()
        began_s, self._read_s = max(flight.launched_s, self._read_s), time.perf_counter()
        self._stats.steps += 1
        # Others ended after the round was launched.
        rows = [
            (request, row, outcomes[row])
            for row, request in flight.rows.requests
            if request.finish_reason is None
        ]
        seconds = self._read_s - began_s
        self._recorder.round(
            flight, self._choice, rows, seconds if self._is_timed and flight.is_timed else math.nan
        )
        self._is_timed = True
        behind = self._runtime.all_owners - flight.owners
        passes = flight.layer_passes / self._decoder.config.num_layers
        for request, row, outcome in rows:
            fall_behind(request, behind)
            self._scheduler.served(request, outcome.service(passes, seconds))
            self._commit(request, row, outcome, flight.result)
        if self._flight is None:
            self._rounds.follow_up(flight)

    def _commit(self, request: Request, row: int, outcome: RowOutcome, result: RoundResult) -> None:
        """Commits a row's round: tokens up to the one that ends the request, KV below the last of them,
        counts of the same."""
        start = len(request.token_ids)
        error, text = None, ""
        try:
            taken = request.append(outcome.token_ids)
            text = request.release_text()
        except Exception as problem:  # a text hook is the caller's code: its request ends, the others go on
            request.finish_reason, error = "error", f"{type(problem).__name__}: {problem}"
            taken = len(request.token_ids) - start
        kept = outcome.token_ids[:taken]
        if request.params.logprobs is not None:
            request.logprobs += result.logprobs(row, kept, request.params.logprobs)
        for counts in (request.counts, self._stats.round):
            by_source = outcome.by_source(outcome.drafted), outcome.by_source(outcome.kept)
            counts.add(len(outcome.token_ids), taken, *by_source, outcome.tentative, outcome.accepted)
        # What the round in the air may need stays.
        self._scheduler.commit(request, len(request.token_ids) - 1, release=self._flight is None)
        if request.finish_reason is not None:
            self._finish(request, kept, text, error)
        else:
            self._pending.append(request.delta(kept, text, time.monotonic()))

    def _finish(self, request: Request, token_ids: list[int], text: str, error: str | None = None) -> None:
        if self._requests.pop(request.request_id, None) is not None:  # else an interrupt came after that
            self._stats.finished += 1
            delta = request.delta(token_ids, text, time.monotonic(), error)
            self._pending.append(delta)
            self._recorder.finished(request, delta.metrics)
        self._scheduler.remove(request)
        if request.finish_reason in ("stop", "length"):
            tell_of_end(self._runtime.drafters, request, self._stats)
