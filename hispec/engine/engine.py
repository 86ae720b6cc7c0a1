"""Engine: continuous batching of rounds. Token ids in, Deltas out; no tokenizer here."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from cache.blocks import BlockPool
from cache.host_kv import HostKV
from ee_models.exits import Exit

from ..config import EngineConfig, Plan, SchedulingConfig, SpeculativeConfig
from ..control.make import make_control
from ..decoding.stages import DecoderLike, PassCounts
from ..errors import ConfigError
from ..latency.model import LatencyModel
from ..outputs import Delta
from ..runner.block_tables import RowTables
from ..runner.cuda_graphs import GraphDevice
from ..runner.plan_cache import PlanCache
from ..runner.plan_runtime import PlanRuntime
from ..runner.plan_spec import Models, PlanSpec
from ..runner.round_runner import RoundRunner
from ..sampling_params import SamplingParams
from ..scheduling.lengths import LengthPredictor
from ..scheduling.make import make_scheduler
from ..scheduling.request import TextStream
from ..stats import EngineStats
from .admission import Admission
from .kv_offload import KVOffloader, cheaper_to_move
from .kv_sizing import default_num_blocks, max_model_len
from .recorder import Recorder
from .step_loop import StepLoop


class Engine:
    """Serves many requests with one decoder. Not thread-safe: one thread calls it.

    A step computes a bounded chunk of waiting prompts, then one round for every request that is ready, and
    returns what each of them gained. Requests join and leave between steps.
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

        scheduling                in which order requests are served; None = first come, first served
        length_predictor          of output lengths, for policies that ask; None = learnt from ended requests
        name                      of the model, for the trace
        is_static, graph_device   whether rounds have static shapes, and where they are captured; None = as
                                  suits the decoder's device
        """
        model = decoder.config
        scheduling = scheduling or SchedulingConfig()
        self._decoder, self._config = decoder, config
        self.max_model_len = max_model_len(
            config, min(model.max_position_embeddings, decoder.max_positions), model.sliding_window
        )
        self._counters = PassCounts(), PassCounts()  # of the model, and of a draft model
        self._plans = PlanCache(config, self.max_model_len, self._counters)
        spec = PlanSpec(Models(decoder, tuple(exits), draft_model), speculative, plan, latency)
        num_blocks = config.num_kv_blocks or default_num_blocks(
            config, spec.models, self.max_model_len, lambda: self._plans.make(1, spec)
        )
        self._pool = BlockPool(num_blocks, config.block_size)
        is_cheaper = cheaper_to_move(latency, config.max_prefill_tokens)
        self._offloader = KVOffloader(HostKV(scheduling.swap_bytes), lambda: self._runtime.kvs, is_cheaper)
        self._scheduler = make_scheduler(scheduling, config, self._pool, length_predictor, self._offloader)
        max_blocks = min(num_blocks, self._pool.blocks_for(self.max_model_len))
        tables = RowTables(config.max_num_seqs, max_blocks)
        self._admission = Admission(
            model.vocab_size,
            self.max_model_len,
            num_blocks,
            config.block_size,
            config.seed,
            frozenset(eos_token_ids),
        )
        self._numbers = itertools.count()
        self._is_closed = self._is_draining = False
        self._recorder = Recorder(config, name, scheduling.policy)
        self._rounds = RoundRunner(
            config,
            self._scheduler,
            tables,
            self.max_model_len,
            decoder,
            self._counters,
            is_static,
            graph_device,
            self._recorder.report_failure,
        )
        self._loop = StepLoop(
            self._scheduler, tables, config.block_size, self._plans, self._rounds, self._recorder
        )
        self._use(spec)
        if config.warm_up:
            self.warm_up()
        self.reset_stats()

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

        exits        the trained exits of this plan, or of the plans to choose from
                     (`ee_models.exits.load_exits`); others are read through the model's head
        draft_model  the small model, if draft.kind is "model"
        plan         overrides the one that `speculative` gives
        latency      what stages cost, which control="goodput" needs (`hispec.measure`)
        """
        self._check_idle("the plan cannot change")
        self._use(PlanSpec(Models(self._decoder, tuple(exits), draft_model), speculative, plan, latency))

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Captures the graphs of the plan's greedy rounds now, the largest first and at most max_graphs,
        instead of each on first use; does nothing if rounds are not captured. Raises ConfigError while
        requests are unfinished."""
        self._check_idle("warm_up() cannot run")
        self._rounds.warm_up(self._runtime)

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
        number, requests = next(self._numbers), self._loop.requests
        request_id = request_id if request_id is not None else f"request-{number}"
        problems = []
        if self._is_closed:
            problems.append("the engine is closed")
        elif self._is_draining:
            problems.append("the engine is draining and takes no more requests")
        if request_id in requests or any(delta.request_id == request_id for delta in self._loop.deltas):
            problems.append("a request of this id is unfinished; ids must be unique while they live")
        request = self._admission.make_request(number, request_id, prompt_token_ids, params, text, problems)
        with self._scheduler.repaired(requests):
            self._scheduler.add(request)
            requests[request_id] = request
        return request_id

    @torch.inference_mode()
    def step(self) -> list[Delta]:
        """Computes one chunk of prefill and one round -> what every request gained; [] only if none is ready
        yet."""
        return self._loop.step()

    def abort(self, request_ids: Iterable[str], *, notify: bool = True) -> None:
        """Ends requests at once; unknown and finished ids are passed over. With `notify` each gets a last
        Delta with the next step, and its id is free again after that; without, no further Delta."""
        request_ids = dict.fromkeys(request_ids)
        with self._scheduler.repaired(self._loop.requests):
            for request_id in request_ids:
                request = self._loop.requests.get(request_id)
                if request is not None:
                    request.finish_reason = "abort"
                    self._loop.finish(request, text=request.release_text_or_nothing())
        if not notify:
            self._loop.deltas = [delta for delta in self._loop.deltas if delta.request_id not in request_ids]

    def has_unfinished(self) -> bool:
        """Whether a step has anything to compute or to return."""
        return bool(self._loop.requests or self._loop.deltas)

    def drain(self) -> Iterator[Delta]:
        """Takes no more requests and yields Deltas until all are finished; afterwards the engine takes
        requests again."""
        self._is_draining = True
        try:
            while self.has_unfinished():
                yield from self.step()
        finally:
            self._is_draining = False

    def close(self) -> None:
        """Aborts what is unfinished and releases the KV memory. Idempotent."""
        self.abort(list(self._loop.requests), notify=False)
        self._loop.deltas.clear()
        self._is_closed = True
        self._loop.flight = None
        self._rounds.drop_graphs()
        self._plans.release()
        self._recorder.close()

    def stats(self) -> dict[str, Any]:
        """Counts since the last reset and what is held now (see EngineStats); "control": what the controller
        has counted since it was made."""
        counts, draft_counts = self._counters
        return {
            **self._loop.stats.as_dict(),
            **vars(counts),
            "draft_model_layer_passes": draft_counts.layer_passes - draft_counts.prefill_layer_passes,
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
        """Counts from 0 again."""
        self._loop.stats = EngineStats()
        for counts in self._counters:
            counts.reset()
        self._scheduler.num_preemptions = self._scheduler.num_cached_tokens = 0
        self._scheduler.kv.num_kept = self._scheduler.kv.num_restored = 0

    def set_tracing(self, on: bool) -> None:
        """Leaves what comes out of the trace, or records it again; without engine.trace it does nothing.
        Raises ConfigError while requests are unfinished, which would be recorded in part."""
        self._check_idle("set_tracing() cannot be called")
        self._recorder.is_tracing = on

    def memory(self) -> dict[str, int]:
        """Bytes allocated, by purpose; on a GPU including those of up to eight earlier plans, whose graphs
        are kept."""
        graphs = self._rounds.graphs
        return {**self._plans.memory(), **({"graph_bytes": graphs.num_bytes} if graphs is not None else {})}

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

    def _check_idle(self, what: str) -> None:
        if self._loop.requests:
            raise ConfigError(
                f"{what} while {len(self._loop.requests)} requests are unfinished; drain() or abort them"
                " first"
            )

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
        drops_graphs, drops_cache = self._plans.use(new, spec, self._rounds.graphs is not None)
        # All buffers are allocated: nothing below can fail and leave one plan with another's buffers.
        if drops_graphs:
            self._rounds.drop_graphs()
        if drops_cache:
            self._pool.forget()
        self._recorder.use_controller(control, spec)
        if spec.latency is not None:
            self._offloader.is_cheaper = cheaper_to_move(spec.latency, self._config.max_prefill_tokens)
