"""LLM: a model with an engine, for prompts as text, token ids or conversations."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from ee_models.checkpoint.loader import load_tokenizer, open_checkpoint

from .config import EngineConfig, SchedulingConfig, SpeculativeConfig
from .detokenizer import IncrementalText
from .engine import Engine
from .engine.kv_sizing import max_model_len
from .errors import ConfigError, RequestError, build
from .loading.draft_models import DraftModels
from .loading.fetch import resolve_model
from .loading.target_model import load_decoder, select_device
from .loading.trained_exits import TrainedExits
from .outputs import Delta, GrowingOutput, PendingRequest, RequestOutput
from .prompts import Message, Prompt, encode_prompt
from .sampling_params import SamplingParams
from .scheduling.lengths import LengthPredictor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Params = SamplingParams | dict[str, Any] | Sequence[SamplingParams] | None


class LLM:
    """A model with an engine. Loads once; generates for many prompts, in input order.

    model        a hub id, a folder, a .gguf file, or a name that `hispec fetch` knows
    speculative  a SpeculativeConfig or its fields; None is plain decoding
    scheduling   a SchedulingConfig or its fields: in which order requests are served; None = first come,
                 first served
    length_predictor   of output lengths, for policies that ask; None = learnt from ended requests
    skip_tokenizer_init   take and give token ids only
    engine       fields of EngineConfig: dtype, device, max_num_seqs, max_model_len, block_size,
                 num_kv_blocks, ...

    Raises ConfigError or CheckpointError (both ValueErrors; ExitsError is one of the latter) before anything
    is computed.
    """

    def __init__(
        self,
        model: str,
        *,
        speculative: SpeculativeConfig | dict[str, Any] | None = None,
        scheduling: SchedulingConfig | dict[str, Any] | None = None,
        length_predictor: LengthPredictor | None = None,
        skip_tokenizer_init: bool = False,
        revision: str | None = None,
        **engine: Any,
    ) -> None:
        config = build(EngineConfig, engine, "engine")
        order = None if scheduling is None else build(SchedulingConfig, scheduling, "scheduling")
        device = select_device(config.device)
        checkpoint = open_checkpoint(resolve_model(model), revision)
        plan = None if speculative is None else build(SpeculativeConfig, speculative, "speculative")
        if plan is not None:
            plan.plan(checkpoint.config.num_layers)  # raises errors before minutes of loading
        self.trained_exits = TrainedExits(checkpoint)
        self.trained_exits.check(plan)
        self.draft_models = DraftModels(config.attention)
        self.draft_models.check(plan)
        length = max_model_len(
            config, checkpoint.config.max_position_embeddings, checkpoint.config.sliding_window
        )
        self.decoder = load_decoder(checkpoint, config, device, length)
        self.tokenizer: PreTrainedTokenizerBase | None = (
            None if skip_tokenizer_init else load_tokenizer(checkpoint)
        )
        self._max_num_seqs, self._max_model_len = config.max_num_seqs, length
        self.engine = Engine(
            self.decoder,
            config,
            plan,
            **self._load_for_plan(plan),
            scheduling=order,
            length_predictor=length_predictor,
            eos_token_ids=checkpoint.config.eos_token_ids,
            name=model,
        )
        self._defaults = checkpoint.generation_defaults
        self._pending: dict[str, PendingRequest] = {}
        self._of_sequence: dict[str, PendingRequest] = {}
        self._streams: dict[str, list[Delta]] = {}  # Deltas that live streams have not yielded yet
        self._finished: list[RequestOutput] = []  # outputs of other requests, for step()
        self._numbers = itertools.count()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Completes prompts: text, token ids, or {"prompt": ...} / {"prompt_token_ids": [...]} -> outputs in
        the order of the prompts.

        sampling_params   one for all prompts, or one each; None = the model's own generation defaults
        A prompt that cannot be served gets an output with `error` set; the others are served.
        """
        is_one = isinstance(prompts, (str, dict)) or (len(prompts) > 0 and isinstance(prompts[0], int))
        return self._run([prompts] if is_one else list(prompts), sampling_params, use_tqdm, chat=False)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers one conversation, or a list of them, through the model's chat template; otherwise as
        `generate`."""
        is_one = len(messages) > 0 and isinstance(messages[0], dict)
        return self._run([messages] if is_one else list(messages), sampling_params, use_tqdm, chat=True)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | dict[str, Any] | None = None,
        chat: bool = False,
    ) -> Iterator[Delta]:
        """Yields one request's Deltas as they come. Leaving the loop early aborts it. Raises RequestError."""
        params = self._params(sampling_params)
        if params.n != 1:
            raise RequestError(f"n={params.n}: a stream has one output")
        request_id = f"stream-{next(self._numbers)}"
        self.add(prompt, params, request_id, chat=chat)
        queue = self._streams[request_id] = []
        try:
            while True:
                while queue:
                    yield queue.pop(0)
                if request_id not in self._pending:
                    return
                self._advance()
        finally:
            del self._streams[request_id]
            self.abort([request_id])

    def add(
        self,
        prompt: Any,
        sampling_params: SamplingParams | dict[str, Any] | None,
        request_id: str,
        chat: bool = False,
    ) -> None:
        """Queues one request of `n` outputs. Raises RequestError, with nothing queued, if it can never be
        served."""
        if request_id in self._pending:
            raise RequestError(
                f"{request_id}: a request of this id is unfinished; ids must be unique while they live"
            )
        params = self._params(sampling_params)
        text, token_ids = encode_prompt(self.tokenizer, prompt, chat)
        pending = PendingRequest(request_id, text, token_ids, params.logprobs is not None)
        try:
            for index in range(params.n):
                seed = None if params.seed is None else (params.seed + index) % 2**63
                one = params.model_copy(update={"n": 1, "seed": seed})
                stream = IncrementalText(self.tokenizer, params.stop) if self.tokenizer is not None else None
                sequence_id = request_id if params.n == 1 else f"{request_id}/{index}"
                pending.sequences[self.engine.add_request(token_ids, one, sequence_id, stream)] = (
                    GrowingOutput()
                )
        except RequestError:
            self.engine.abort(pending.sequences, notify=False)
            raise
        self._pending[request_id] = pending
        self._of_sequence.update(dict.fromkeys(pending.sequences, pending))

    def step(self) -> list[RequestOutput]:
        """One engine step -> the requests that it finished, all their outputs included."""
        self._advance()
        finished, self._finished = self._finished, []
        return finished

    def has_unfinished(self) -> bool:
        return bool(self._pending or self._finished)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests at once, without an output; unknown and finished ids are passed over."""
        for request_id in request_ids:
            if (pending := self._pending.get(request_id)) is not None:
                self._drop(pending)
                self.engine.abort(pending.sequences, notify=False)

    def encode(self, prompt: Prompt | Sequence[Message], chat: bool = False) -> list[int]:
        """Token ids of a prompt, or of a conversation through the chat template. Raises RequestError."""
        return encode_prompt(self.tokenizer, prompt, chat)[1]

    def set_speculative(self, speculative: SpeculativeConfig | dict[str, Any] | None) -> None:
        """Changes the plan of the loaded model; plain decoding for None. Raises ConfigError while requests
        are unfinished, ExitsError for trained exits that cannot be used, and CheckpointError for a draft
        model that cannot be read."""
        config = None if speculative is None else build(SpeculativeConfig, speculative, "speculative")
        self.engine.set_speculative(config, **self._load_for_plan(config))

    @property
    def row_invariant(self) -> bool:
        """Whether a token's logits have the same bits whatever else is in its pass; else equal up to
        rounding."""
        return self.decoder.row_invariant

    def stats(self) -> dict[str, Any]:
        return self.engine.stats()

    def reset_stats(self) -> None:
        self.engine.reset_stats()

    def set_tracing(self, on: bool) -> None:
        """Whether what comes is recorded in the trace of engine.trace, as it is at first. Raises ConfigError
        while requests are unfinished."""
        self.engine.set_tracing(on)

    def memory(self) -> dict[str, int]:
        """Bytes allocated, by purpose."""
        return {
            "weights_bytes": self.decoder.num_bytes,
            "draft_model_bytes": self.draft_models.num_bytes,
            **self.engine.memory(),
        }

    def close(self) -> None:
        """Ends all requests and releases the KV memory. Idempotent."""
        self.abort(list(self._pending))
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _load_for_plan(self, config: SpeculativeConfig | None) -> dict[str, Any]:
        """What the engine needs for a plan, or for all plans that a controller may choose from: trained
        exits, a draft model, and what stages cost."""
        exits = self.trained_exits.load(config, self.decoder)
        draft_model = self.draft_models.load(config, self.decoder, self.tokenizer, self._max_model_len)
        latency = None
        if config is not None and config.control == "goodput":
            from .measure.latency import latency_for_control

            latency = latency_for_control(config, self.decoder, exits, draft_model, self._max_num_seqs)
        return {"exits": exits, "draft_model": draft_model, "latency": latency}

    def _run(self, prompts: list[Any], params: Params, use_tqdm: bool, chat: bool) -> list[RequestOutput]:
        if self.has_unfinished():
            raise RequestError(
                f"{len(self._pending)} requests are unfinished; step() until has_unfinished() is False, or"
                " abort them"
            )
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise ConfigError(
                f"{len(each)} sampling_params for {len(prompts)} prompts; give one for all, or one each"
            )
        done: dict[str, RequestOutput] = {}
        ids = [f"prompt-{next(self._numbers)}" for _ in prompts]
        try:
            for request_id, prompt, own_params in zip(ids, prompts, each, strict=True):
                try:
                    self.add(prompt, own_params, request_id, chat=chat)
                except RequestError as error:
                    text = prompt if isinstance(prompt, str) else None
                    done[request_id] = RequestOutput(request_id, text, [], error=str(error))
            with tqdm(
                total=len(prompts),
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
            self.abort(ids)
        return [done[request_id] for request_id in ids]

    def _advance(self) -> None:
        """Runs one engine step, hands its Deltas to streams, and keeps finished outputs for step()."""
        for delta in self.engine.step():
            pending = self._of_sequence.get(delta.request_id)
            if pending is None:  # aborted meanwhile
                continue
            pending.sequences[delta.request_id].add(delta)
            stream = self._streams.get(pending.request_id)
            if stream is not None:
                stream.append(delta)
            if all(growing.last and growing.last.finish_reason for growing in pending.sequences.values()):
                if stream is None:
                    self._finished.append(pending.make_output())
                self._drop(pending)

    def _drop(self, pending: PendingRequest) -> None:
        del self._pending[pending.request_id]
        for sequence_id in pending.sequences:
            del self._of_sequence[sequence_id]

    def _params(self, values: SamplingParams | dict[str, Any] | None) -> SamplingParams:
        return SamplingParams.of({**self._defaults} if values is None else values)
