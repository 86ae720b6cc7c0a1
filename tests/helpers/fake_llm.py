"""A stand-in for `hispec.llm.LLM`: characters are tokens, and the answer to a prompt is a function of it
alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from typing import Any, ClassVar

from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE

from hispec.errors import RequestError
from hispec.outputs import CompletionOutput, Delta, RequestOutput, TokenTier
from hispec.sampling_params import SamplingParams
from hispec.stats import RoundCounts

NUM_LAYERS = 10


def answer(prompt_ids: list[int], sampling: SamplingParams, at: int = 0) -> list[int]:
    """Token ids of output number `at`: letters picked by prompt and (if not greedy) seed."""
    key = str(
        (prompt_ids, sampling.seed if sampling.temperature else None, at if sampling.temperature else 0)
    )
    length = min(sampling.max_tokens or 64, 3 + sum(prompt_ids) % 60)
    return [97 + byte % 26 for byte in hashlib.shake_128(key.encode()).digest(length)]


class Bytes:
    """A tokenizer of a token per byte, as far as IncrementalText asks it."""

    def __init__(self) -> None:
        self.backend_tokenizer = Tokenizer(BPE({chr(byte): byte for byte in range(128)}, []))
        self.backend_tokenizer.decoder = Fuse()


class FakeLLM:
    """Serves `max_num_seqs` requests at a time, one token each per step, so short ones overtake long ones."""

    instances: ClassVar[list[FakeLLM]] = []
    row_invariant: ClassVar[bool] = True
    weights: ClassVar[str] = "some"
    num_workers: ClassVar[int] = 1
    times_passes: ClassVar[bool] = False
    on_step: ClassVar[Callable[[int], None] | None] = None  # called with the number of the step, before it
    wrong_when_speculative: ClassVar[bool] = (
        False  # speculative output differs from plain: what a broken round does
    )

    def __init__(self, model: str, *, speculative: Any = None, workers: Any = 1, **engine: Any) -> None:
        self.model, self.speculative, self.engine = model, speculative, engine
        self.workers = workers
        self.requests: list[list[Any]] = []
        self.num_steps = self.num_added = self.most_unfinished = 0
        self.added: list[str] = []
        self.traced: list[int] = []  # places in `added` of those that a trace would have
        self.is_tracing = True
        self.closed = False
        self.reset_stats()
        FakeLLM.instances.append(self)

    def encode(self, prompt: Any, chat: bool = False) -> list[int]:
        if chat:
            prompt = "".join(f"<{message['role']}>{message['content']}" for message in prompt)
        return [ord(letter) for letter in prompt] if isinstance(prompt, str) else list(prompt)

    tokenizer: ClassVar[Any] = Bytes()

    @staticmethod
    def split_text(token_ids: list[int], text: str, chat: bool) -> list[str]:
        return [text[at : at + 1] for at in range(len(token_ids))]

    def add(self, prompt: Any, sampling_params: SamplingParams, request_id: str, chat: bool = False) -> None:
        ids = self.encode(prompt, chat)
        if not ids:
            raise RequestError(f"{request_id}: the prompt is empty: give at least one token")
        if any(token < 0 for token in ids):
            raise RequestError(
                f"{request_id}: prompt_token_ids must be 0 or more; the first that is not is {min(ids)}"
            )
        tokens = [answer(ids, sampling_params, at) for at in range(sampling_params.n)]
        if self.wrong_when_speculative and self.speculative is not None:
            tokens = [[*output[:-1], 48] for output in tokens]
        self.requests.append([request_id, ids, tokens, 0])
        self.traced += [len(self.added)] * self.is_tracing
        self.added.append(request_id)
        self.most_unfinished = max(self.most_unfinished, len(self.requests))

    def step(self) -> list[RequestOutput]:
        assert self.requests, "step() without requests"
        self.num_steps += 1
        if FakeLLM.on_step is not None:
            FakeLLM.on_step(self.num_steps)
        done = []
        batch = self.requests[: self.engine["max_num_seqs"]]
        for request in batch:
            request[3] += 1
            self._count(len(request[2]))
            if request[3] >= max(map(len, request[2])):
                done.append(request)
        self.requests = [request for request in self.requests if request not in done]
        return [self._result(request) for request in reversed(done)]

    def fingerprints(self, speculative: Any = None) -> dict[str, str]:
        return {"model": self.weights}

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()

    def abort(self, request_ids: str | Iterable[str]) -> None:
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        self.requests = [request for request in self.requests if request[0] not in ids]

    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def generate(
        self,
        prompts: list[Any],
        sampling_params: SamplingParams | list[SamplingParams],
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        each = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(prompts)
        for number, (prompt, params) in enumerate(zip(prompts, each, strict=True)):
            self.add(prompt, params, str(number))
        results = []
        while self.requests:
            results += self.step()
        return sorted(results, key=lambda result: int(result.request_id))

    def stream(self, prompt: Any, sampling_params: SamplingParams, chat: bool = False) -> Iterator[Delta]:
        ids = self.encode(prompt, chat)
        if not ids:
            raise RequestError("the prompt is empty: give at least one token")
        names: list[TokenTier] = ["draft", "check", "verify"]
        for place, token in enumerate(answer(ids, sampling_params)):
            self._count(1)
            tiers = [names[place % 3]] if sampling_params.tiers else None
            yield Delta("0", [token], chr(token), None, None, None, tiers=tiers)
        yield Delta("0", [], "", None, "length", None)

    def stats(self) -> dict[str, Any]:
        return dict(self._stats)

    def reset_stats(self) -> None:
        names = [each.name for each in fields(RoundCounts)]
        names += ["row_layer_passes", "row_draft_model_layer_passes", "preemptions", "round_s"]
        names += ["draft_pass_s", "check_pass_s", "verify_pass_s"]
        self._stats: dict[str, Any] = dict.fromkeys(names, 0) | {
            "accept_length_histogram": [0, 0],
            "num_layers": NUM_LAYERS,
        }

    def set_speculative(self, speculative: Any) -> None:
        assert not self.requests, "set_speculative() with unfinished requests"
        self.speculative = speculative

    def set_tracing(self, on: bool) -> None:
        assert not self.requests, "set_tracing() with unfinished requests"
        self.is_tracing = on

    def memory(self) -> dict[str, int]:
        return {"weights_bytes": 1000, "kv_bytes": 100, "hidden_bytes": 10}

    def close(self) -> None:
        self.closed = True

    def _count(self, num_tokens: int) -> None:
        drafted = 0 if self.speculative is None else num_tokens
        counts: dict[str, float] = {
            "round_s": num_tokens / 128,
            "verify_pass_s": num_tokens / 256 if self.times_passes else 0,
            "tokens": num_tokens,
            "committed": num_tokens,
            "rounds": num_tokens,
        }
        counts["row_layer_passes"] = NUM_LAYERS * num_tokens
        counts |= {
            "drafted": drafted * 4,
            "draft_kept": drafted * 2,
            "tentative": drafted * 2,
            "accepted": drafted,
        }
        for name, count in counts.items():
            self._stats[name] += count
        self._stats["accept_length_histogram"][1] += num_tokens

    @staticmethod
    def _result(request: list[Any]) -> RequestOutput:
        request_id, ids, tokens, _ = request
        outputs = [
            CompletionOutput(at, "".join(map(chr, output)), output, None, "length", None)
            for at, output in enumerate(tokens)
        ]
        return RequestOutput(request_id, None, ids, outputs)
