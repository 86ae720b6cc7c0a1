"""LLM: a model with an engine, for prompts as text, token ids or conversations."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from .config import EngineConfig, SchedulingConfig, SpeculativeConfig
from .config.ray_cluster import RayConfig
from .config.workers import Workers, check_workers
from .detokenizer import IncrementalText, TokenBytes, split_text
from .engine import Engine
from .engine.admission import list_ids
from .errors import ConfigError, RequestError, build, check_process, closed, described
from .outputs import ContinuationScore, Delta, GrowingOutput, PendingRequest, RequestOutput
from .prompts import Message, Prompt, encode_prompt, split_prompts
from .sampling_params import SamplingParams
from .scheduling.lengths import LengthPredictor
from .workers.pool import WorkerPool
from .workers.ray_cluster import RayCluster
from .workers.shares import Share, make_shares

if TYPE_CHECKING:
    from ee_models.decoder import Decoder

    from .latency.model import LatencyModel
    from .loading.draft_models import DraftModels
    from .loading.trained_exits import TrainedExits

_UNFINISHED = "a request of this id is unfinished; ids must be unique while they live"
_SCORED_AT_ONCE = 64  # pairs that an engine is given at once: progress shows between them
Params = SamplingParams | dict[str, Any] | Sequence[SamplingParams | dict[str, Any] | None] | None


class LLM:
    """A model with an engine. Loads once; generates for many prompts, in input order.

    model        a hub id, a folder, a .gguf file, or a name that `hispec fetch` knows
    speculative  a SpeculativeConfig or its fields; None is plain decoding
    scheduling   a SchedulingConfig or its fields: in which order requests are served; None = first come,
                 first served
    length_predictor   of output lengths, for policies that ask; None = learnt from ended requests
    skip_tokenizer_init   take and give token ids only
    workers      processes that serve requests, each with its share of the cores, or a GPU; all with one copy
                 of the weights on Linux's CPUs; "auto" = as many as `hispec profile --latency` has found
                 fastest here, else as there are cores or GPUs (docs/scaling.md). Of max_num_seqs and
                 num_kv_blocks each has its own
    ray          a RayConfig or its fields: workers on the machines of a Ray cluster, in place of `workers`
    engine       fields of EngineConfig: dtype, device, max_num_seqs, max_model_len, block_size,
                 num_kv_blocks, ...

    `generation_defaults` are the fields of SamplingParams that the model itself sets. `token_bytes(token)` is
    what a token is by itself: text in UTF-8, or a part of a character's bytes; its number if the model has no
    tokenizer.

    Raises ConfigError or CheckpointError (both ValueErrors; ExitsError is one of the latter) before anything
    is computed; WorkerError if a worker's process ends before it serves.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        speculative: SpeculativeConfig | dict[str, Any] | None = None,
        scheduling: SchedulingConfig | dict[str, Any] | None = None,
        length_predictor: LengthPredictor | None = None,
        skip_tokenizer_init: bool = False,
        revision: str | None = None,
        workers: Workers = 1,
        ray: RayConfig | dict[str, Any] | None = None,
        **engine: Any,
    ) -> None:
        try:
            check_workers(workers)
        except ValueError as error:
            raise ConfigError(f"workers: {error}") from None
        place = _place_of_workers(workers, ray, engine, model)
        self.num_workers = 1
        arguments: dict[str, Any] = {
            "speculative": speculative,
            "scheduling": scheduling,
            "length_predictor": length_predictor,
            "skip_tokenizer_init": skip_tokenizer_init,
            "revision": revision,
            **engine,
        }
        self.engine: Engine | WorkerPool
        if place is not None:
            try:
                self.engine = pool = WorkerPool(model, place, **arguments)
            except BaseException:
                if isinstance(place, RayCluster):
                    place.close()
                raise
            self.num_workers = pool.num_workers
            self.tokenizer, self.generation_defaults = pool.tokenizer, pool.generation_defaults
        else:
            self.engine = one = Engine.from_pretrained(model, measure_latency=_measure_latency, **arguments)
            self.tokenizer = one.pretrained.tokenizer
            self.generation_defaults = one.pretrained.checkpoint.generation_defaults
        self._pid = os.getpid()
        self.token_bytes = TokenBytes(self.tokenizer)
        self._pending: dict[str, PendingRequest] = {}
        self._of_sequence: dict[str, PendingRequest] = {}
        self._arrived: list[Delta] = []  # from the engine, not handed on yet
        self._streams: set[str] = set()  # ids of the requests of live streams
        self._finished: dict[str, RequestOutput] = {}  # outputs of other requests, for step()
        self._numbers = itertools.count()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Completes prompts: text, token ids, or {"prompt": ...} / {"prompt_token_ids": [...]} -> outputs in
        the order of the prompts.

        sampling_params   one for all prompts, or one each; None = the model's own generation defaults
        A prompt that cannot be served gets an output with `error` set; the others are served. Raises
        RequestError for what is no prompt, and ConfigError for wrong sampling_params, before anything runs.
        An output's request_id is its prompt's place in the call, such as "prompts[3]".
        """
        return self._run(prompts, sampling_params, use_tqdm, chat=False)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers one conversation, or a list of them, through the model's chat template; otherwise as
        `generate`."""
        return self._run(messages, sampling_params, use_tqdm, chat=True)

    def score(
        self,
        prompt_token_ids: Sequence[Sequence[int]],
        continuation_token_ids: Sequence[Sequence[int]],
        use_tqdm: bool = True,
    ) -> list[ContinuationScore]:
        """Log-probabilities of given continuations, one of each prompt, by the full model, which has the last
        word whatever the plan: on a CPU the bits that `SamplingParams.logprobs` gives for the same tokens.

        A pair for which the model's numbers overflow has an `error`; the others are scored. Raises
        RequestError for a pair that can never be scored, or while requests are unfinished, before anything is
        computed. The prefix cache is empty afterwards.
        """
        self._check_open("score")
        self._check_idle()
        for name, given in (("prompts", prompt_token_ids), ("continuations", continuation_token_ids)):
            if not isinstance(given, Sequence) or isinstance(given, str | bytes):
                raise RequestError(f"the {name} must be a list of lists of token ids, not {described(given)}")
        if len(prompt_token_ids) != len(continuation_token_ids):
            raise RequestError(
                f"{len(prompt_token_ids)} prompts and {len(continuation_token_ids)} continuations; give one"
                " continuation for each prompt"
            )
        pairs = list(zip(prompt_token_ids, continuation_token_ids, strict=True))
        self.engine.admission.check_pairs(pairs)
        # Neighbours share what they begin with.
        order = sorted(range(len(pairs)), key=lambda at: [*pairs[at][0], *pairs[at][1]])
        scores: dict[int, ContinuationScore] = {}
        size = _SCORED_AT_ONCE * self.num_workers
        with tqdm(total=len(pairs), desc="scores", disable=not use_tqdm, dynamic_ncols=True) as bar:
            for begin in range(0, len(pairs), size):
                group = order[begin : begin + size]
                scores.update(zip(group, self.engine.score([pairs[at] for at in group]), strict=True))
                bar.update(len(group))
        return [scores[at] for at in range(len(pairs))]

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | dict[str, Any] | None = None,
        chat: bool = False,
    ) -> Iterator[Delta]:
        """Yields one request's Deltas as they come. Leaving the loop early aborts it. Raises RequestError."""
        self._check_open("stream")
        return self._stream(prompt, sampling_params, chat)

    def _stream(
        self, prompt: Any, sampling_params: SamplingParams | dict[str, Any] | None, chat: bool
    ) -> Iterator[Delta]:
        self._check_open("stream")
        params = self._params(sampling_params)
        if params.n != 1:
            raise RequestError(f"n={params.n}: a stream has one output")
        names = (f"stream-{number}" for number in self._numbers)
        request_id = next(name for name in names if name not in self._pending and name not in self._finished)
        try:
            self._streams.add(request_id)
            self._queue(prompt, params, request_id, chat)
            deltas, given = self._pending[request_id].sequences[request_id].deltas, 0
            while True:
                self._check_open("stream")
                while given == len(deltas):
                    if request_id not in self._pending:  # it was aborted
                        return
                    self._advance()
                del deltas[
                    :given
                ]  # those that were yielded, but for a last one, which tells what comes twice
                delta, given = deltas[0], 1
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            self._streams.discard(request_id)
            self._abort([request_id])

    def add(
        self,
        prompt: Any,
        sampling_params: SamplingParams | dict[str, Any] | None,
        request_id: str,
        chat: bool = False,
        on_delta: Callable[[int, Delta], None] | None = None,
    ) -> None:
        """Queues one request of `n` outputs. Raises RequestError, with nothing queued, if it can never be
        served.

        on_delta   is called by `step` with each Delta as it comes, and which of the outputs it belongs to; it
                   must not call the LLM. After an interrupt one may come twice
        """
        self._check_open("add")
        try:
            self._queue(prompt, self._params(sampling_params), request_id, chat, on_delta)
        except RequestError as error:
            raise RequestError(f"{request_id}: {error}") from error.__cause__

    def step(self) -> list[RequestOutput]:
        """One engine step -> the requests that it finished, all their outputs included. After an interrupt
        the next step goes on, and nothing is lost."""
        self._check_open("step")
        self._advance()
        finished, outputs = self._finished, list(self._finished.values())
        try:
            self._finished = {}
            return outputs
        except BaseException:  # they did not reach the caller
            self._finished = finished
            raise

    def wake(self) -> None:
        """Has a `step` that waits for workers return, from another thread. One process never waits."""
        if isinstance(self.engine, WorkerPool):
            self.engine.wake()

    def has_unfinished(self) -> bool:
        return bool(self._pending or self._finished)

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """Ends requests at once, without an output; unknown and finished ids are passed over. Raises
        RequestError for what is no id."""
        self._check_open("abort")
        self._abort(list_ids(request_ids))

    def encode(self, prompt: Prompt | Sequence[Message], chat: bool = False) -> list[int]:
        """Token ids of a prompt, or of a conversation through the chat template. Raises RequestError."""
        return encode_prompt(self.tokenizer, prompt, chat)[1]

    def set_speculative(self, speculative: SpeculativeConfig | dict[str, Any] | None) -> None:
        """Changes the plan of the loaded model; plain decoding for None. Raises ConfigError while requests
        are unfinished, ExitsError for trained exits that cannot be used, and CheckpointError for a draft
        model that cannot be read."""
        self._check_open("set_speculative")
        self.engine.set_speculative(speculative)

    @property
    def failure(self) -> Exception | None:
        """Why nothing will come any more: of several workers none is left, and none can be started."""
        return self.engine.failure if isinstance(self.engine, WorkerPool) else None

    @property
    def row_invariant(self) -> bool:
        """Whether a token's logits have the same bits whatever else is in its pass; else equal up to
        rounding."""
        return (self.engine if isinstance(self.engine, WorkerPool) else self.decoder).row_invariant

    @property
    def decoder(self) -> Decoder:
        """The model. As those below, raises ConfigError with several workers, whose processes have it."""
        return self.engine.pretrained.decoder

    @property
    def trained_exits(self) -> TrainedExits:
        return self.engine.pretrained.trained_exits

    @property
    def draft_models(self) -> DraftModels:
        return self.engine.pretrained.draft_models

    def fingerprints(self, speculative: SpeculativeConfig | None = None) -> dict[str, str]:
        """Checksums of the model ("model"), and of the trained exits and n-grams that a plan names, by what
        names them; and what weights and KV are held in. Raises ExitsError or NgramsError."""
        return self.engine.fingerprints(speculative)

    def split_text(self, token_ids: Sequence[int], text: str, chat: bool) -> list[str] | None:
        """What each token added to the `text` of an output: pieces that are all of it together. chat: of a
        conversation. None if the model has no tokenizer."""
        return None if self.tokenizer is None else split_text(self.tokenizer, token_ids, text, not chat)

    def stats(self) -> dict[str, Any]:
        """As Engine.stats(); with several workers their sums, and "workers": each by itself."""
        return self.engine.stats()

    def reset_stats(self) -> None:
        self.engine.reset_stats()

    def set_tracing(self, on: bool) -> None:
        """Whether what comes is recorded in the trace of engine.trace, as it is at first. Raises ConfigError
        while requests are unfinished."""
        self.engine.set_tracing(on)

    def memory(self) -> dict[str, int]:
        """Bytes allocated, by purpose."""
        return self.engine.memory()

    def close(self) -> None:
        """Ends all requests and releases the KV memory. Idempotent. What computes raises ClosedError after
        that; stats() and memory() can still be read."""
        self.engine.close()
        for waiting in (self._pending, self._of_sequence, self._finished, self._arrived):
            waiting.clear()

    def __enter__(self) -> LLM:
        self._check_open("__enter__")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _queue(
        self,
        prompt: Any,
        params: SamplingParams,
        request_id: str,
        chat: bool,
        on_delta: Callable[[int, Delta], None] | None = None,
    ) -> None:
        """As `add`; the RequestError does not name the request."""
        if not isinstance(request_id, str):
            raise RequestError(f"request_id must be a string, not {described(request_id)}")
        if request_id in self._pending or request_id in self._finished:
            raise RequestError(_UNFINISHED)
        text, token_ids = encode_prompt(self.tokenizer, prompt, chat)
        pending = PendingRequest(
            request_id, text, token_ids, params.logprobs is not None, params.tiers, on_delta
        )
        is_stream = on_delta is not None or request_id in self._streams
        ids = [request_id] if params.n == 1 else [f"{request_id}/{index}" for index in range(params.n)]
        if any((other := self._of_sequence.get(one)) and other.request_id in self._pending for one in ids):
            raise RequestError(_UNFINISHED)
        try:
            # Known here before the engine has it, so that an interrupt leaves nothing there.
            self._pending[request_id] = pending
            for index, sequence_id in enumerate(ids):
                seed = None if params.seed is None else (params.seed + index) % 2**63
                one = params.model_copy(update={"n": 1, "seed": seed})
                stream = None
                if self.tokenizer is not None:
                    stream = IncrementalText(
                        self.tokenizer, params.stop, continues=not chat, at_end=not is_stream
                    )
                pending.sequences[sequence_id] = GrowingOutput(keeps_each=request_id in self._streams)
                self._of_sequence[sequence_id] = pending
                self.engine.add_request(token_ids, one, sequence_id, stream, is_stream=is_stream)
        except BaseException as error:
            self._abort(request_id)
            if isinstance(error, RequestError):
                raise RequestError(str(error).removeprefix(f"{sequence_id}: ")) from None
            raise

    def _run(self, prompts: Any, params: Params, use_tqdm: bool, chat: bool) -> list[RequestOutput]:
        self._check_open("chat" if chat else "generate")
        self._check_idle()
        named = split_prompts(prompts, chat)
        each = self._params_of_each(params, len(named))
        done: dict[str, RequestOutput] = {}
        try:
            for (request_id, prompt), own_params in zip(named.items(), each, strict=True):
                try:
                    self.add(prompt, own_params, request_id, chat=chat)
                except RequestError as error:
                    text = prompt if isinstance(prompt, str) else None
                    done[request_id] = RequestOutput(request_id, text, [], error=str(error))
            with tqdm(
                total=len(named),
                initial=len(done),
                desc="requests",
                disable=not use_tqdm,
                dynamic_ncols=True,
            ) as bar:
                while self._pending:
                    for output in self.step():
                        done[output.request_id] = output
                        bar.update()
        finally:
            self._abort(named)
            for request_id in named:  # made in a step that was interrupted before it returned
                self._finished.pop(request_id, None)
        return [done[request_id] for request_id in named]

    def _advance(self) -> None:
        """Runs one engine step and hands its Deltas on; or those that an interrupt has left."""
        if not self._arrived:
            self._arrived = self.engine.step()
        while self._arrived:
            self._take(self._arrived[0])
            del self._arrived[0]

    def _take(self, delta: Delta) -> None:
        """Adds a Delta to its output, and makes the request's outputs with the last one. Can be interrupted
        and called again."""
        pending = self._of_sequence.get(delta.request_id)
        if pending is None or pending.request_id not in self._pending:  # aborted, or taken before
            return
        if pending.on_delta is not None:
            pending.on_delta(list(pending.sequences).index(delta.request_id), delta)
        pending.sequences[delta.request_id].add(delta)
        if all(growing.last and growing.last.finish_reason for growing in pending.sequences.values()):
            if pending.request_id not in self._streams:
                self._finished[pending.request_id] = pending.make_output()
            self._drop(pending)

    def _abort(self, request_ids: str | Iterable[str]) -> None:
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            if (pending := self._pending.get(request_id)) is not None:
                if not self.engine.is_closed:
                    self.engine.abort(pending.sequences, notify=False)
                self._arrived = [one for one in self._arrived if one.request_id not in pending.sequences]
                self._drop(pending)

    def _drop(self, pending: PendingRequest) -> None:
        self._pending.pop(pending.request_id, None)
        for sequence_id in pending.sequences:
            self._of_sequence.pop(sequence_id, None)

    def _check_idle(self) -> None:
        if self.has_unfinished():
            finished = (
                f", and step() has not returned {len(self._finished)} that are" if self._finished else ""
            )
            raise RequestError(
                f"{len(self._pending)} requests are unfinished{finished}; step() until has_unfinished() is"
                " False, or abort them"
            )

    def _check_open(self, method: str) -> None:
        if self.engine.is_closed:
            raise closed(f"LLM.{method}")
        check_process(f"LLM.{method}", self._pid)

    def _params_of_each(self, params: Params, num_prompts: int) -> list[SamplingParams]:
        """One for each prompt. Raises ConfigError."""
        if not isinstance(params, Sequence) or isinstance(params, str):
            return [self._params(params)] * num_prompts
        if len(params) != num_prompts:
            raise ConfigError(
                f"{len(params)} sampling_params for {num_prompts} prompts; give one for all, or one each"
            )
        return [self._params(own, f"sampling_params[{at}]") for at, own in enumerate(params)]

    def _params(
        self, values: SamplingParams | dict[str, Any] | None, where: str = "sampling_params"
    ) -> SamplingParams:
        if values is None:
            values, where = self.generation_defaults, "generation_config.json"
        return SamplingParams.of(values, where)


def _place_of_workers(
    workers: Workers, ray: RayConfig | dict[str, Any] | None, engine: dict[str, Any], model: str | Path
) -> list[Share] | RayCluster | None:
    """Where workers are; None if this process needs none. Raises ConfigError."""
    if ray is not None:
        cluster = build(RayConfig, ray, "ray")
        if workers != 1:
            raise ConfigError(
                f"workers={workers} are of this machine, and `ray` has a number of its own: set ray.workers"
            )
        return RayCluster(cluster, build(EngineConfig, engine, "engine"))
    if workers == 1:
        return None
    shares = make_shares(workers, build(EngineConfig, engine, "engine"), model)
    return shares if len(shares) > 1 else None


def _measure_latency(*arguments: Any) -> LatencyModel:
    from .measure.latency import latency_for_control

    return latency_for_control(*arguments)
