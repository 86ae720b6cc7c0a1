"""The steps of an engine: prefill, rounds, and what requests gain from them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from ..control.choice import Choice
from ..decoding.batch import RoundResult
from ..runner.backfill import record_gaps
from ..runner.block_tables import RowTables
from ..runner.drafter_failures import finish_drafting
from ..runner.launchers import Flight
from ..runner.plan_cache import PlanCache
from ..runner.prefill import prefill
from ..runner.round_output import RowOutcome
from ..runner.round_runner import RoundRunner
from ..scheduling.policy import Service
from ..scheduling.request import Gain, Request
from ..scheduling.scheduler import Chunk, Scheduler
from ..stats import EngineStats, RoundTally
from ..utils.clock import seconds_since
from ..utils.memory import is_out_of_memory
from .recorder import Recorder

_log = logging.getLogger(__name__)
# Of a round's time: the share that may be the caller's pause, and what the host waits at least where the
# device was at work for all of it.
_MOST_PAUSE, _LEAST_WAIT = 0.8, 0.02
_LEAST_PREFILL = 16  # positions; fewer would not help a prefill that lacks memory
_LEAST_PATIENCE, _MOST_PATIENCE = 256, 1 << 16  # steps after which more memory is asked for again


class StepLoop:
    """Runs steps over the requests of an engine. A step launches the next round before it reads the one in
    flight, if it can; else it starts from what the host knows.

    requests   the unfinished ones, by id
    gained     by id, what requests have gained that no step of the engine has returned yet
    stats      counts since the last reset
    flight     the round that was launched and not read yet
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tables: RowTables,
        plans: PlanCache,
        rounds: RoundRunner,
        recorder: Recorder,
    ) -> None:
        self.requests: dict[str, Request] = {}
        self.gained: dict[str, Gain] = {}
        self.stats = EngineStats()
        self.flight: Flight | None = None
        self._scheduler, self._tables = scheduler, tables
        self._plans, self._rounds, self._recorder = plans, rounds, recorder
        # Steps since memory ran out, and how many of them are to pass before more is tried.
        self._calm_steps, self._patience = 0, _LEAST_PATIENCE
        self._choice = Choice()  # of the round in flight
        self._read_s = 0.0  # when the last round was read
        self._is_timed = True  # whether the round in flight was read as soon as it was done
        self._ended_s = self._pause_s = 0.0  # when the last step ended; the caller's time until this one
        self._has_queued = False  # whether prompts were computed since the last round was launched
        self._is_torn = False  # whether an interrupt came that is not repaired; within a body of `repaired`
        self._is_whole = True  # whether all that is in `gained` is what its request has

    def step(self) -> None:
        """Computes one chunk of prefill and one round, or rounds that run together; what requests have
        gained is in `gained`.

        An interrupt anywhere in here loses rounds in flight, and nothing that was committed: `gained` holds
        it for the next step, which goes on from there.
        """
        is_whole, self._is_whole = self._is_whole and not self._is_torn, False
        self._pause_s = 0.0 if self.flight is None else seconds_since(self._ended_s)
        with self.repaired():
            for gain in () if is_whole else list(self.gained.values()):
                if gain.request.request_id in self.requests:  # the last step was interrupted
                    self._take(gain)
                    if gain.request.finish_reason is not None:
                        self.finish(gain.request)
            if self.flight is not None and all(
                request.finish_reason is not None for _, request in self.flight.rows.requests
            ):
                self.flight = None  # all its requests were aborted
            if self.flight is None:
                self._start()
            if (flight := self.flight) is not None:
                started = time.perf_counter()
                prefill_s = self.stats.prefill_s
                num_captures = self._rounds.num_captures
                self.flight = self._launch_ahead(flight)
                if self._rounds.num_captures > num_captures:
                    self._is_timed = False  # the round in flight was done long before it could be read
                try:
                    self.read(flight)
                except Exception as error:  # of logprobs, for one
                    if not is_out_of_memory(error):
                        raise
                    self._repair()
                    live = [request for _, request in flight.rows.requests if request.finish_reason is None]
                    self._reduce_capacity(live, "a round", error)
                prefill_s = self.stats.prefill_s - prefill_s
                self.stats.round_s += max(0.0, seconds_since(started) - prefill_s)
            if self._scheduler.is_reduced:
                self._try_more()
        self._is_whole = True
        self._ended_s = time.perf_counter()

    @contextmanager
    def repaired(self) -> Iterator[None]:
        """For whatever changes requests, rows or blocks: after an exception in the body they fit together
        again. If a second interrupt comes while they are repaired, they do once the next body begins."""
        if self._is_torn:
            self._is_whole = False
            self._repair()
        self._is_torn = True
        try:
            yield
        except BaseException:
            self._is_whole = False
            self._repair()
            raise
        self._is_torn = False

    def _repair(self) -> None:
        # The rounds in flight are lost: the next one starts from what the host knows.
        self.flight = None
        self._rounds.reset_sampler()
        self._scheduler.repair(self.requests.values())
        self._is_torn = False

    @property
    def _queues_prompts(self) -> bool:
        """Whether prefill returns before it is done."""
        return self._plans.runtime.models.decoder.device.type != "cpu"

    def abort(self, request: Request) -> None:
        """Ends a request at once."""
        gain = self._gain(request)
        request.finish_reason = "abort"
        self._take(gain)
        self.finish(request)

    def finish(self, request: Request) -> None:
        """Removes a request that has its finish_reason."""
        gain = self._gain(request)  # its last Delta is due, from here on
        if request.finish_reason == "error":
            with suppress(Exception):  # of a hook, which may be what ended it
                self._add_text(gain)
        self._note_times(request, time.monotonic())
        if self.requests.pop(request.request_id, None) is not None:
            metrics = request.metrics()
            self.stats.finished += 1
            self.stats.finished_by_reason[request.finish_reason or "abort"] += 1
            if request.finish_reason in ("stop", "length") and metrics.e2e_s is not None:
                self.stats.latencies.finished(metrics.e2e_s, metrics.tpot_s)
            self._recorder.record_request(request, metrics)
        self._scheduler.remove(request)
        if request.finish_reason in ("stop", "length"):
            finish_drafting(self._plans.runtime.drafters, request, self.stats)

    def read(self, flight: Flight) -> None:
        """Waits for a round, and commits what it has committed on the device."""
        asked_s = time.perf_counter()
        outcomes = flight.outcomes()
        began_s, self._read_s = max(flight.launched_s, self._read_s), time.perf_counter()
        seconds = self._read_s - began_s
        is_timed, self._is_timed = self._is_timed and flight.is_timed, True
        waited_s = max(0.0, self._read_s - asked_s)
        was_done = self._pause_s > _MOST_PAUSE * seconds and waited_s < _LEAST_WAIT * seconds
        # Nobody knows how long it took if the clock has gone back, or if it was done while the caller paused.
        if not is_timed or seconds < 0.0 or was_done:
            seconds = math.nan
        self.stats.steps += 1
        live = [
            (request, row, outcomes[row])
            for row, request in flight.rows.requests
            if request.finish_reason is None  # else it ended after the round was launched
        ]
        rows = [each for each in live if math.isfinite(each[2].evidence)]
        assert all(outcome.token_ids for _, _, outcome in rows), "a round that commits nothing never ends"
        if len(rows) < len(live):
            self.flight = None  # it goes on from what was not committed
        of_rounds = math.nan if flight.waits_for_prompts else seconds
        self._recorder.record_round(flight, self._choice, rows, of_rounds)
        runtime = self._plans.runtime
        not_written = runtime.all_extra_kv - flight.extra_kv
        self.stats.row_layer_passes += flight.layer_passes * len(rows)
        self.stats.row_draft_model_layer_passes += flight.draft_model_layer_passes * len(rows)
        passes = flight.layer_passes / runtime.models.decoder.config.num_layers
        now_s, tally = time.monotonic(), RoundTally()
        try:
            for request, row, outcome in rows:
                if not_written:
                    record_gaps(request, not_written)
                if self._scheduler.counts_service:
                    self._scheduler.served(request, outcome.make_service(passes, seconds))
                self._commit(request, row, outcome, flight.result, now_s, tally)
        finally:
            tally.add_to(self.stats.round)
        if self.flight is None:
            self._rounds.advance_sampler(flight)
        for request, _, outcome in live:
            if not math.isfinite(outcome.evidence):
                self._give_up_numbers(request, outcome.evidence)

    def _start(self) -> None:
        """Computes a chunk of waiting prompts, and launches a round for the requests that are ready."""
        scheduler = self._scheduler
        step = scheduler.schedule(self._choice.plan.window, time.monotonic())
        ready, num_together = [scheduler.running[row] for row in step.limits], 0
        if ready:
            self._choice = self._recorder.control.choose(
                [request.number for request in ready], sum(len(request.token_ids) for request in ready)
            )
            num_together = min(
                self._rounds.num_together(self._plans.runtime, self._choice, scheduler.running),
                self._recorder.control.rounds_left,
                scheduler.rounds_until_review,
            )
            if len(ready) < len(scheduler.running):  # prompts are to be computed between rounds
                num_together = min(num_together, 1)
            scheduler.fit(step, self._choice.plan.window, max(1, num_together))
        self._tables.update([request.table.blocks for request in scheduler.running])
        started = time.perf_counter()
        runtime = self._plans.runtime
        self._is_timed, self._pause_s = True, 0.0
        what, concerned = "prefill", [chunk.request for chunk in step.chunks]
        try:
            if step.chunks:
                self._prefill(step.chunks)
            prefilled = time.perf_counter()
            self.stats.prefill_s += max(0.0, prefilled - started)
            what, concerned = "a round", ready
            if ready:
                self.flight = self._rounds.launch(
                    runtime, self._choice, step.limits, self.stats, num_together
                )
                self.flight.waits_for_prompts = self._has_queued and self._queues_prompts
                self._has_queued = False
            self.stats.round_s += seconds_since(prefilled)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._rounds.reset_sampler()
            self._reduce_capacity(concerned, what, error)

    def _launch_ahead(self, flight: Flight) -> Flight | None:
        """Launches the round after `flight` before the host reads that, if it can: with the requests that are
        left, and with those that wait for a row and may have one. Their prompts are computed before it."""
        scheduler, control = self._scheduler, self._recorder.control
        left = flight.left
        if control.is_due or (context_len := self._rounds.reserve_next(flight, left)) is None:
            return None
        chunks: list[Chunk] | None = []
        joining: list[Request] = []
        if scheduler.may_admit or len(scheduler.running) > len(left):
            if (chunks := scheduler.schedule_ahead(self._choice.plan.window, time.monotonic())) is None:
                return None
            if chunks and not self._prefill_ahead(chunks):
                return None
            taking_part = {request for _, request in left}
            joining = [each for each in scheduler.running if each.is_ready and each not in taking_part]
        num_rows = len(left) + len(joining)
        if num_rows != len(flight.rows.requests) and not control.holds_for(num_rows):
            return None
        ahead = self._rounds.launch_next(flight, left, context_len, joining, self._choice, self.stats)
        if ahead is not None:
            self.stats.rounds_ahead += 1
            ahead.waits_for_prompts, self._has_queued = self._has_queued, False
        return ahead

    def _prefill_ahead(self, chunks: Sequence[Chunk]) -> bool:
        """Whether memory sufficed; else the next step tries again, with no round in flight."""
        started = time.perf_counter()
        self._tables.update([request.table.blocks for request in self._scheduler.running])
        try:
            self._prefill(chunks)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False
        self.stats.prefill_s += seconds_since(started)
        return True

    def _prefill(self, chunks: Sequence[Chunk]) -> None:
        self._has_queued = True
        started, tables = time.perf_counter(), self._tables.tensor[: len(self._scheduler.running)]
        prefill(self._plans.runtime, chunks, tables, self._rounds.prompts, self.stats)
        seconds = seconds_since(started)
        for chunk in chunks:
            self.stats.prefill_tokens += chunk.end - chunk.start
            is_new = chunk.end > chunk.request.most_computed
            self._scheduler.commit(chunk.request, chunk.end, release=False)
            if is_new:  # else it had this before it lost its blocks, and would have it once alone
                self._scheduler.served(
                    chunk.request,
                    Service(rounds=0, tokens=0, drafted=0, accepted=0, passes=1.0, seconds=seconds),
                )

    def _commit(
        self,
        request: Request,
        row: int,
        outcome: RowOutcome,
        result: RoundResult,
        now_s: float,
        tally: RoundTally,
    ) -> None:
        """Commits a row's round: its tokens up to the one that ends the request, the KV below the last of
        them, and its counts, those of all requests to `tally`. now_s: when the round was read."""
        before = request.num_output
        gain = self._gain(request, before)
        if request.params.logprobs is not None:  # before the tokens, so that no interrupt leaves one without
            found = result.logprobs(row, outcome.token_ids, request.params.logprobs)
            gain.logprobs = (gain.logprobs or [])[: before - gain.start] + found
        if request.params.tiers:  # likewise
            gain.tiers = (gain.tiers or [])[: before - gain.start] + outcome.tiers()
        self._take(gain, outcome.token_ids)
        self._note_times(request, now_s)
        num_taken = request.num_output - before
        for counted in (request.rounds, tally):
            counted.count(outcome.rounds, num_taken)
        # Blocks that the round in flight may write stay.
        self._scheduler.commit(request, len(request.token_ids) - 1, release=self.flight is None)
        if request.finish_reason is not None:
            self.finish(request)

    def _note_times(self, request: Request, now_s: float) -> None:
        """Notes that it has got its tokens now; those before an interrupt are noted with the next ones."""
        before_s = request.last_token_s
        num_new = request.note_times(now_s)
        if num_new and (last_s := request.last_token_s) is not None:
            if before_s is not None:
                self.stats.latencies.later_tokens(num_new, last_s - before_s)
            else:
                admitted_s = request.arrival_s if request.admitted_s is None else request.admitted_s
                self.stats.latencies.first_tokens(num_new, request.arrival_s, admitted_s, last_s)

    def _gain(self, request: Request, num_output: int | None = None) -> Gain:
        """What the request has gained since its last Delta; it is there before the request gains anything.
        num_output: its output tokens, where that is known."""
        gain = self.gained.get(request.request_id)
        if gain is None:
            start = request.num_output if num_output is None else num_output
            gain = self.gained[request.request_id] = Gain(request, start)
        return gain

    def _take(self, gain: Gain, token_ids: Sequence[int] = ()) -> None:
        """Appends committed tokens to the request, and their text to `gain`; without any, finishes what an
        interrupt left of the last ones."""
        request = gain.request
        try:
            if token_ids:
                request.append(token_ids)
            else:
                request.has_ended()
            self._add_text(gain)
        except Exception as problem:  # a text hook is the caller's code: its request ends, the others go on
            if request.finish_reason != "abort":
                self.stats.errors["text"] += request.finish_reason != "error"
                request.finish_reason, gain.error = "error", f"{type(problem).__name__}: {problem}"

    def _add_text(self, gain: Gain) -> None:
        """Adds to `gain` what text is certain by now, all of it where the request has ended."""
        request = gain.request
        if request.reads_each:
            # In one statement: an interrupt between two would lose the text that was released.
            gain.text += request.release_text()
        elif request.finish_reason is not None:
            gain.text = request.whole_text()

    def _give_up_numbers(self, request: Request, seen: float) -> None:
        """For a request whose round gave logits that are no numbers, and was not committed.

        It may have them from drafts, since attention multiplies what a token does not see by 0, or from
        another request, by the prefix cache. So it starts over by itself, with plain decoding and without the
        cache; if that ends in the same way, the request ends.
        """
        self._rounds.reset_sampler()
        if not request.is_suspect:
            _log.warning(
                "the model's logits are %s for %s: it starts over, plainly", seen, request.request_id
            )
            self._scheduler.start_over(request)
            return
        self._gain(request).error = (
            f"the model's logits are {seen} after {request.num_output} output tokens (position"
            f" {len(request.token_ids)}), so that no token can be chosen: its numbers overflow in this dtype,"
            " or its weights are damaged; try engine.dtype=float32, or fetch the model again"
        )
        request.finish_reason = "error"
        self.stats.errors["not_finite"] += 1
        self.finish(request)

    def _try_more(self) -> None:
        """After many steps in which memory sufficed: what took it may have been another program, for a
        moment. Each lack that follows doubles how long it is waited."""
        self._calm_steps += 1
        if self._calm_steps >= self._patience:
            self._calm_steps = 0
            self._scheduler.regain()

    def _reduce_capacity(self, requests: Sequence[Request], what: str, error: BaseException) -> None:
        """After memory ran out for these requests at once: smaller chunks of prefill, or fewer rows, for a
        while (`_try_more`). A request that fails alone ends, and the others go on as at first: it was too
        large."""
        scheduler = self._scheduler
        self._calm_steps, self._patience = 0, min(2 * self._patience, _MOST_PATIENCE)
        self._rounds.drop_graphs()
        if self._plans.runtime.models.decoder.device.type == "cuda":
            torch.cuda.empty_cache()
        if what == "prefill" and scheduler.max_prefill_tokens > _LEAST_PREFILL:
            scheduler.max_prefill_tokens = max(_LEAST_PREFILL, scheduler.max_prefill_tokens // 2)
            tokens = scheduler.max_prefill_tokens
            _log.warning("out of memory (%s): prefill goes on with max_prefill_tokens=%d", error, tokens)
        elif (rows := len(scheduler.running) // 2) > 0:
            scheduler.shrink(rows)
            _log.warning("out of memory (%s): goes on with max_num_seqs=%d", error, rows)
        else:
            what_to_do = "lower engine.num_kv_blocks or max_prefill_tokens"
            for request in requests:
                self._gain(request).error = f"out of memory, even alone: {error}; {what_to_do}"
                request.finish_reason = "error"
                self.stats.errors["out_of_memory"] += 1
                self.finish(request)
            scheduler.widen()
