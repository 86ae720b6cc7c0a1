"""Engine: continuous batching of rounds. Token ids in, Deltas out; no tokenizer here."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from cache.blocks import BlockPool
from cache.host_kv import HostKV
from ee_models.exits import Exit

from ..config import EngineConfig, Plan, SchedulingConfig, SpeculativeConfig
from ..control.make import make_control
from ..decoding.stages import DecoderLike, PassCounts
from ..drafters.ngram_table import NgramTable
from ..errors import ConfigError, RequestError, build, check_process, closed
from ..latency.model import LatencyModel
from ..latency.moving import cheaper_to_move
from ..outputs import ContinuationScore, Delta
from ..runner.block_tables import RowTables
from ..runner.cuda_graphs import GraphDevice
from ..runner.plan_cache import PlanCache
from ..runner.plan_runtime import PlanRuntime
from ..runner.plan_spec import Models, PlanSpec
from ..runner.round_runner import RoundRunner
from ..sampling_params import SamplingParams
from ..scheduling.lengths import LengthPredictor, check_predictor
from ..scheduling.make import make_scheduler
from ..scheduling.request import TextStream
from ..stats import EngineStats
from ..utils.devices import on_device
from .admission import Admission, arrival_problem, list_ids
from .kv_offload import KVOffloader
from .kv_sizing import check_num_blocks, default_num_blocks, max_model_len, most_model_len
from .pretrained import MeasureLatency, Pretrained
from .recorder import Recorder
from .scoring import Pair, Scorer
from .step_loop import StepLoop

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _on_its_device(
    method: Callable[Concatenate[Engine, _Arguments], _Result],
) -> Callable[Concatenate[Engine, _Arguments], _Result]:
    """A method that computes: on the engine's GPU, whatever thread calls it."""

    @functools.wraps(method)
    def call(self: Engine, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with on_device(self._decoder.device):
            return method(self, *args, **kwargs)

    return call


class Engine:
    """Serves many requests with one decoder. Not thread-safe: one thread calls it.

    A step computes a bounded chunk of waiting prompts, then one round for every request that is ready (on a
    CPU several, see EngineConfig.max_run_ms), and returns what each of them gained. Requests join and leave
    between steps.
    """

    def __init__(
        self,
        decoder: DecoderLike,
        config: EngineConfig,
        speculative: SpeculativeConfig | None = None,
        *,
        exits: Sequence[Exit] = (),
        draft_model: DecoderLike | None = None,
        tables: Sequence[NgramTable] = (),
        plan: Plan | None = None,
        latency: LatencyModel | None = None,
        scheduling: SchedulingConfig | None = None,
        length_predictor: LengthPredictor | None = None,
        eos_token_ids: Sequence[int] = (),
        name: str = "",
        sharers: int = 1,
        is_static: bool | None = None,
        graph_device: GraphDevice | None = None,
    ) -> None:
        """An engine of a decoder at hand; `from_pretrained` loads one.

        As `set_speculative` for `speculative`, `exits`, `draft_model`, `tables`, `plan` and `latency`. Raises
        ConfigError for what does not fit the model or memory.

        scheduling                in which order requests are served; None = first come, first served
        length_predictor          of output lengths, for policies that ask; None = learnt from ended requests
        name                      of the model, for the trace
        sharers                   engines that share the memory for KV, this one among them
        is_static, graph_device   whether rounds have static shapes, and where they are captured; None = as
                                  suits the decoder's device
        """
        self._pretrained: Pretrained | None = None
        model = decoder.config
        scheduling = scheduling or SchedulingConfig()
        self._decoder, self._config = decoder, config
        limits = min(model.max_position_embeddings, decoder.max_positions), model.sliding_window
        self.max_model_len = max_model_len(config, *limits)
        self._counters = PassCounts(), PassCounts()  # of the model, and of a draft model
        self._plans = PlanCache(config, self.max_model_len, self._counters, sharers)
        spec = PlanSpec(Models(decoder, tuple(exits), draft_model, tuple(tables)), speculative, plan, latency)
        check_num_blocks(config, spec.models, sharers)
        with on_device(decoder.device):
            num_blocks = config.num_kv_blocks or default_num_blocks(
                config, spec.models, self.max_model_len, lambda: self._plans.make(1, spec), sharers
            )
        self._pool = BlockPool(num_blocks, config.block_size)
        is_cheaper = cheaper_to_move(latency, config.prefill_tokens(decoder.device.type))
        self._offloader = KVOffloader(HostKV(scheduling.swap_bytes), lambda: self._runtime.kvs, is_cheaper)
        self._scheduler = make_scheduler(
            scheduling, config, self._pool, length_predictor, self._offloader, decoder.device.type
        )
        max_blocks = min(num_blocks, self._pool.blocks_for(self.max_model_len))
        row_tables = RowTables(config.max_num_seqs, max_blocks)
        self.admission = Admission(
            model.vocab_size,
            self.max_model_len,
            num_blocks,
            config.block_size,
            config.seed,
            frozenset(token for token in eos_token_ids if 0 <= token < model.vocab_size),
            has_most=self.max_model_len == most_model_len(*limits),
        )
        self._names, self._numbers = itertools.count(), itertools.count()
        self.is_closed = self._is_draining = False
        self._pid = os.getpid()
        self._switching_to: PlanSpec | None = None  # the plan that `_use` has begun to put in place
        self._recorder = Recorder(config, name, scheduling.policy, decoder.device)
        self._rounds = RoundRunner(
            config,
            self._scheduler,
            row_tables,
            self.max_model_len,
            decoder,
            self._counters,
            is_static,
            graph_device,
            self._recorder.report_failure,
        )
        self._loop = StepLoop(self._scheduler, row_tables, self._plans, self._rounds, self._recorder)
        self._use(spec)
        if config.warm_up:
            self.warm_up()
        self.reset_stats()

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        speculative: SpeculativeConfig | dict[str, Any] | None = None,
        scheduling: SchedulingConfig | dict[str, Any] | None = None,
        length_predictor: LengthPredictor | None = None,
        skip_tokenizer_init: bool = False,
        revision: str | None = None,
        measure_latency: MeasureLatency | None = None,
        **engine: Any,
    ) -> Engine:
        """Loads a model, and what its plan needs, and makes their engine; `pretrained` has the tokenizer.

        Arguments as those of LLM, which is made by this. measure_latency: says what stages cost, for
        control="goodput" (`hispec.measure.latency.latency_for_control`). Raises ConfigError or
        CheckpointError.
        """
        config = build(EngineConfig, engine, "engine")
        order = None if scheduling is None else build(SchedulingConfig, scheduling, "scheduling")
        plan = None if speculative is None else build(SpeculativeConfig, speculative, "speculative")
        if length_predictor is not None:
            check_predictor(length_predictor)
        loaded = Pretrained(model, config, plan, revision, skip_tokenizer_init, measure_latency)
        return cls.of_pretrained(loaded, config, plan, order, length_predictor, name=str(model))

    @classmethod
    def of_pretrained(
        cls,
        loaded: Pretrained,
        config: EngineConfig,
        speculative: SpeculativeConfig | None,
        scheduling: SchedulingConfig | None,
        length_predictor: LengthPredictor | None,
        **more: Any,
    ) -> Engine:
        """The engine of what was loaded before, with this very config but for sizes, seed and trace; `more`
        are arguments of Engine. Raises ConfigError, ExitsError or CheckpointError."""
        made = cls(
            loaded.decoder,
            config,
            speculative,
            **loaded.for_plan(speculative),
            scheduling=scheduling,
            length_predictor=length_predictor,
            eos_token_ids=loaded.checkpoint.config.eos_token_ids,
            **more,
        )
        made._pretrained = loaded
        return made

    def set_speculative(
        self,
        speculative: SpeculativeConfig | dict[str, Any] | None,
        *,
        exits: Sequence[Exit] = (),
        draft_model: DecoderLike | None = None,
        tables: Sequence[NgramTable] = (),
        plan: Plan | None = None,
        latency: LatencyModel | None = None,
    ) -> None:
        """Changes the plan between requests: plain decoding for None. Raises ConfigError while requests are
        unfinished. An engine of `from_pretrained` loads exits, draft model, tables and latency by itself,
        unless one of them is given: ExitsError for exits that cannot be used, NgramsError for n-grams,
        CheckpointError for a draft model that cannot be read.

        exits        the trained exits of this plan, or of the plans to choose from
                     (`ee_models.exits.load_exits`); others are read through the model's head
        draft_model  the small model, if draft.kind is "model"
        tables       of n-grams, if draft.ngram has a guess_confidence (`hispec.drafters.ngram_table`); may be
                     left out where it has learn_tokens
        plan         overrides the one that `speculative` gives
        latency      what stages cost, which control="goodput" needs (`hispec.measure`)
        """
        self._check_open("set_speculative")
        config = None if speculative is None else build(SpeculativeConfig, speculative, "speculative")
        self._check_idle("the plan cannot change")
        if self._pretrained is not None and not (exits or draft_model or tables or latency):
            needs = self._pretrained.for_plan(config)
            exits, draft_model, tables = needs["exits"], needs["draft_model"], needs["tables"]
            latency = needs["latency"]
        models = Models(self._decoder, tuple(exits), draft_model, tuple(tables))
        self._use(PlanSpec(models, config, plan, latency))

    @torch.inference_mode()
    @_on_its_device
    def warm_up(self) -> None:
        """Captures the graphs of the plan's greedy rounds now, the largest first and at most max_graphs,
        instead of each on first use; does nothing if rounds are not captured. Raises ConfigError while
        requests are unfinished."""
        self._check_open("warm_up")
        self._check_idle("warm_up() cannot run")
        self._finish_switching()
        self._rounds.warm_up(self._runtime)

    @contextmanager
    def running_together(self, max_run_ms: float) -> Iterator[None]:
        """Within it rounds run together for so long, for whoever times steps; 0: they go stage by stage."""
        before, self._rounds.max_run_ms = self._rounds.max_run_ms, max_run_ms
        try:
            yield
        finally:
            self._rounds.max_run_ms = before

    @property
    def max_run_ms(self) -> float:
        """As EngineConfig; 0.0 where rounds do not run together, as on a GPU."""
        return self._rounds.max_run_ms

    @property
    def max_prefill_tokens(self) -> int:
        """Positions of prompts that a step computes at most."""
        return self._config.prefill_tokens(self._decoder.device.type)

    @property
    def pretrained(self) -> Pretrained:
        """What `from_pretrained` has loaded: tokenizer, decoder, checkpoint. Raises ConfigError for an engine
        of a decoder at hand."""
        if self._pretrained is None:
            raise ConfigError("this Engine was made of a decoder at hand; Engine.from_pretrained loads more")
        return self._pretrained

    def fingerprints(self, speculative: SpeculativeConfig | None) -> dict[str, str]:
        """Checksums of the model ("model"), and of the trained exits that a plan names, by what names them.
        Raises ExitsError, and ConfigError as `pretrained` does."""
        return self.pretrained.fingerprints(speculative)

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
        arrival_s: float | None = None,
        is_stream: bool = True,
    ) -> str:
        """Queues a request -> its id. Raises RequestError, naming all that is wrong with it; the engine goes
        on.

        `params.n` must be 1: a sequence is one request. `text` follows the output for stop strings and text.
        `arrival_s`: since when it waits, on the clock of `time.monotonic`; None = it comes now. `is_stream`:
        its Deltas are wanted as they come; else `step` returns one, when it has ended (with logprobs or
        tiers, and from `drain`, as they come).
        """
        self._check_open("add_request")
        self._finish_switching()
        requests, gained, problems = self._loop.requests, self._loop.gained, []
        if request_id is None:
            names = (f"request-{number}" for number in self._names)
            request_id = next(name for name in names if name not in requests and name not in gained)
        elif isinstance(request_id, str) and (request_id in requests or request_id in gained):
            problems.append("a request of this id is unfinished; ids must be unique while they live")
        if self._is_draining:
            problems.append("the engine is draining and takes no more requests")
        if (problem := arrival_problem(arrival_s)) is not None:
            problems.append(problem)
        admission = self.admission
        try:
            admission.check(request_id, prompt_token_ids, params, text, problems)
        except RequestError:
            self._loop.stats.errors["refused"] += 1
            raise
        # Only now: a request that is refused must not change the seeds of those after it.
        request = admission.make_request(
            next(self._numbers), request_id, prompt_token_ids, params, text, self._spec.reuses_decisions
        )
        request.arrival_s = request.arrival_s if arrival_s is None else arrival_s
        request.is_stream = is_stream or params.logprobs is not None or params.tiers
        with self._loop.repaired():
            self._scheduler.add(request)
            requests[request_id] = request
        return request_id

    def step(self) -> list[Delta]:
        """Computes one chunk of prefill and one round, or several that run together -> what every stream
        gained, and all of other requests that have ended; [] if no request is ready yet, or none that is a
        stream and none has ended.

        After an exception, an interrupt included, the engine goes on: no request or KV block is lost, and
        tokens that were committed come with the next step, each once. An interrupted round is run again.
        """
        self._check_open("step")
        self._compute()
        gained = self._loop.gained
        held = {name: gain for name, gain in gained.items() if gain.is_held}
        deltas = [gain.make_delta() for name, gain in gained.items() if name not in held]
        try:
            self._loop.gained = held
            return deltas
        except BaseException:  # they did not reach the caller
            self._loop.gained = gained
            raise

    @torch.inference_mode()
    @_on_its_device
    def score(self, pairs: Sequence[Pair]) -> list[ContinuationScore]:
        """What the full model, which verifies every plan's tokens, makes of (prompt, continuation), both
        token ids, for each pair. Between requests; it empties the prefix cache, and nothing is counted.
        Raises RequestError for a pair that cannot be scored, before anything is computed, and ConfigError
        while requests are unfinished."""
        self._check_open("score")
        self._check_idle("score() cannot run")
        self._finish_switching()
        self.admission.check_pairs(pairs)
        with self._loop.repaired():
            self._pool.forget()  # its blocks are written over
        return Scorer(self._decoder, self._runtime.kv, self._config).score(pairs)

    def abort(self, request_ids: str | Iterable[str], *, notify: bool = True) -> None:
        """Ends requests at once; unknown and finished ids are passed over. With `notify` each gets a last
        Delta with the next step, and its id is free again after that; without, no further Delta. Raises
        RequestError for what is no id."""
        self._check_open("abort")
        self._abort(list_ids(request_ids), notify)

    def _abort(self, request_ids: Sequence[str], notify: bool) -> None:
        with self._loop.repaired():
            for request_id in request_ids:
                request = self._loop.requests.get(request_id)
                if request is not None:
                    self._loop.abort(request)
                if not notify:
                    self._loop.gained.pop(request_id, None)

    def has_unfinished(self) -> bool:
        """Whether a step has anything to compute or to return."""
        return bool(self._loop.requests or self._loop.gained)

    def drain(self) -> Iterator[Delta]:
        """Takes no more requests and yields Deltas until all are finished; afterwards, or once left, the
        engine takes requests again. What it has not yielded then comes with the next step."""
        self._check_open("drain")
        self._is_draining = True
        try:
            while self.has_unfinished():
                self._compute()
                while gained := self._loop.gained:
                    request_id = next(iter(gained))
                    delta = gained[request_id].make_delta()
                    is_last = len(gained) == 1 and not self._loop.requests
                    # No call in between, at which an interrupt could come and lose the Delta.
                    del gained[request_id]
                    yield delta
                    if not is_last:
                        self._check_open("drain")
        finally:
            self._is_draining = False

    @_on_its_device
    def close(self) -> None:
        """Aborts what is unfinished and releases the KV memory. Idempotent. What computes or takes requests
        raises ClosedError after that; counts and sizes can still be read."""
        self.is_closed = True
        if os.getpid() != self._pid:  # of a process that this one is a fork of, whose trace is no other's
            return
        self._abort(list(self._loop.requests), notify=False)
        self._loop.gained.clear()
        self._loop.flight = None
        self._rounds.drop_graphs(are_plans_gone=True)
        self._plans.release()
        self._recorder.close()

    def stats(self) -> dict[str, Any]:
        """Metrics of docs/metrics.md: counts since the last reset and what is held now (see EngineStats);
        "control": what the controller has counted since it was made."""
        return {**self.counts(), "control": self._recorder.control.stats()}

    def counts(self) -> dict[str, Any]:
        """As `stats`, but for "control", which takes longer than all else."""
        counts, draft_counts = self._counters
        return {
            **self._loop.stats.as_dict(),
            **vars(counts),
            "draft_pass_s": counts.draft_pass_s + draft_counts.pass_s,
            "draft_model_layer_passes": draft_counts.layer_passes - draft_counts.prefill_layer_passes,
            "num_layers": self._decoder.config.num_layers,
            **self._rounds.stats(),
            "cached_tokens": self._scheduler.num_cached_tokens,
            "cache_queried_tokens": self._scheduler.num_queried_tokens,
            "preemptions": self._scheduler.num_preemptions,
            "kv_moved_out": self._scheduler.kv.num_kept,
            "kv_moved_in": self._scheduler.kv.num_restored,
            "kv_blocks_used": self._pool.num_held,
            "kv_blocks_cached": self._pool.num_cached,
            "kv_blocks_free": self._pool.num_free,
            "kv_blocks": self._pool.num_blocks,
            "running": len(self._scheduler.running),
            "waiting": len(self._scheduler.waiting),
        }

    def reset_stats(self) -> None:
        """Counts from 0 again."""
        self._loop.stats = EngineStats()
        for counts in self._counters:
            counts.reset()
        scheduler = self._scheduler
        scheduler.num_preemptions = scheduler.num_cached_tokens = scheduler.num_queried_tokens = 0
        self._scheduler.kv.num_kept = self._scheduler.kv.num_restored = 0

    def set_tracing(self, on: bool) -> None:
        """Leaves what comes out of the trace, or records it again; without engine.trace it does nothing.
        Raises ConfigError while requests are unfinished, which would be recorded in part."""
        self._check_idle("set_tracing() cannot be called")
        self._recorder.is_tracing = on

    def memory(self) -> dict[str, int]:
        """Bytes allocated, by purpose; those of weights if this engine has loaded them; on a GPU including
        those of up to 15 earlier plans, whose graphs are kept."""
        loaded, graph_bytes = self._pretrained, self._rounds.graph_bytes
        return {
            **({} if loaded is None else loaded.memory()),
            **self._plans.memory(),
            **({} if graph_bytes is None else {"graph_bytes": graph_bytes}),
        }

    def check(self) -> None:
        """Asserts the integrity of blocks and rows; for tests, at any time between steps."""
        self._pool.check(self._scheduler.tables())
        running = self._scheduler.running
        live = {*self._scheduler.waiting, *running}
        assert live == set(self._loop.requests.values()), "a request is lost or leaked"
        assert [request.row for request in running] == list(range(len(running)))
        for request in running:
            assert request.num_computed < len(request.token_ids)
            assert len(request.table.blocks) >= self._pool.blocks_for(request.num_computed)

    def __enter__(self) -> Engine:
        self._check_open("__enter__")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self, method: str) -> None:
        if self.is_closed:
            raise closed(f"Engine.{method}")
        check_process(f"Engine.{method}", self._pid)

    @_on_its_device
    def _compute(self) -> None:
        with torch.inference_mode():
            self._loop.step()

    def _check_idle(self, what: str) -> None:
        if self._loop.requests:
            raise ConfigError(
                f"{what} while {len(self._loop.requests)} requests are unfinished; drain() or abort them"
                " first"
            )

    @_on_its_device
    def _use(self, spec: PlanSpec) -> None:
        """Makes the plan of `spec` the one in use."""
        self._loop.flight = None  # all its requests were aborted
        new = self._plans.get(self._pool.num_blocks, spec)
        control = self._recorder.cached_controller(spec) or make_control(
            new.plan,
            [route for each in new.routes if (route := each.route) is not None],
            [layer for layer in new.extra_kv if isinstance(layer, int)],
            spec.speculative,
            spec.latency,
            self._recorder.record_decision,
        )
        # All buffers are allocated: nothing below can fail and leave one plan with another's buffers. After
        # an interrupt in between, what comes next does it all again, as if nothing had been done.
        is_torn, self._switching_to = self._switching_to is not None, spec
        drops_graphs, drops_cache = self._plans.use(new, spec, self._rounds.graphs is not None)
        if drops_graphs or is_torn:
            self._rounds.drop_graphs(are_plans_gone=True)
        if drops_cache or is_torn:
            self._pool.forget()
        self._recorder.use_controller(control, spec)
        self._spec = spec
        if spec.latency is not None:
            prefill = self._config.prefill_tokens(self._decoder.device.type)
            self._offloader.is_cheaper = cheaper_to_move(spec.latency, prefill)
        self._switching_to = None

    def _finish_switching(self) -> None:
        """Completes a change of the plan that an interrupt has broken off: before whatever needs a plan while
        there is no request."""
        if self._switching_to is not None:
            self._use(self._switching_to)
