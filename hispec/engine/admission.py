"""Checks each request before the engine takes it."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import RequestError, described, shown
from ..sampling_params import SamplingParams
from ..scheduling.request import Request, TextStream, is_asked_at_end


@dataclass(frozen=True)
class Admission:
    """Checks and makes an engine's requests.

    max_model_len, num_blocks, block_size   the most tokens and KV blocks of a request
    has_most                                whether that is all that the model has positions for
    seed                                    base of the seeds of requests that bring none
    """

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    seed: int
    eos_token_ids: frozenset[int]
    has_most: bool = False

    def check(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        text: TextStream | None,
        problems: Iterable[str] = (),
    ) -> None:
        """Raises RequestError with all reasons why the request can never be served: those found here, and
        `problems`."""
        found = [*_wrong_types(request_id, prompt_token_ids, params, text)]
        if not found:
            found = [*self._problems(prompt_token_ids, params, text), *problems]
        if found:
            raise RequestError(f"{request_id}: " + "; ".join(found))

    def check_pairs(self, pairs: Sequence[tuple[object, object]]) -> None:
        """Raises RequestError, naming the first pair of a prompt and a continuation that can never be
        scored."""
        for at, pair in enumerate(pairs):
            if not isinstance(pair, Sequence) or isinstance(pair, str | bytes) or len(pair) != 2:
                raise RequestError(f"pairs[{at}]={shown(pair)} must be a prompt and a continuation")
            if (problem := _problem_of_pair(self, *pair)) is not None:
                raise RequestError(f"pairs[{at}]: {problem}")

    def make_request(
        self,
        number: int,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        text: TextStream | None,
        is_alone: bool = False,
    ) -> Request:
        """The request, of arguments that were checked. is_alone: its noise is no other's, even with the same
        seed."""
        prompt = list(prompt_token_ids)
        seed = params.seed if params.seed is not None else (self.seed + number) % 2**63
        if is_alone:
            digest = hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest()
            seed = int.from_bytes(digest, "big") >> 1
        return Request(
            request_id=request_id,
            number=number,
            prompt_token_ids=prompt,
            params=params,
            seed=seed,
            max_tokens=self.most_tokens(len(prompt), params),
            stop_ids=frozenset(params.stop_token_ids)
            | (frozenset() if params.ignore_eos else self.eos_token_ids),
            text=text,
            arrival_s=time.monotonic(),
        )

    def too_long(self, prompt_len: int) -> str | None:
        """Why a prompt of so many tokens can never be served; None where its length is no reason."""
        if prompt_len < self.max_model_len:
            return None
        return (
            f"the prompt has {prompt_len} tokens, but max_model_len={self.max_model_len} must hold it and one"
            f" token of output; shorten it{self.way_out}"
        )

    @property
    def way_out(self) -> str:
        """What else would do for what is too long."""
        return "" if self.has_most else " or raise max_model_len"

    def most_tokens(self, prompt_len: int, params: SamplingParams) -> int:
        """The most tokens of output that a request with a prompt of so many may have."""
        room = self._room(prompt_len, params)
        return min(params.max_tokens or room, room)

    def _room(self, prompt_len: int, params: SamplingParams) -> int:
        """The most tokens of output after a prompt of so many: without a number of their own as many as there
        are KV blocks for, too; the last token of the output is never processed."""
        longest = self.max_model_len
        if params.max_tokens is None:
            longest = min(longest, self.num_blocks * self.block_size + 1)
        return longest - prompt_len

    def _problems(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, text: TextStream | None
    ) -> Iterator[str]:
        vocab_size, num_blocks, block_size = self.vocab_size, self.num_blocks, self.block_size
        if params.n != 1:
            yield f"n={params.n}: the engine takes one sequence per request; LLM.generate makes n of them"
        if len(prompt_token_ids) == 0:
            yield "the prompt is empty: give at least one token"
            return
        if wrong := _wrong_tokens(prompt_token_ids, vocab_size):
            yield (
                f"prompt_token_ids must be integers from 0 to {vocab_size - 1}; {len(wrong)} are not, the"
                f" first is {described(wrong[0])}"
            )
        for field in ("logit_bias", "stop_token_ids"):
            outside = [token for token in getattr(params, field) if not 0 <= token < vocab_size]
            if outside:
                yield f"{field} names token {outside[0]}, but the vocabulary ends at {vocab_size - 1}"
        if params.logprobs is not None and params.logprobs > vocab_size:
            yield f"logprobs={params.logprobs} is more than the vocabulary of {vocab_size} tokens"
        if params.stop and text is not None and is_asked_at_end(text):
            yield (
                f"stop={shown(params.stop)}: stop strings are looked for as tokens come, and this text has"
                " at_end = True: it is asked for when the output has ended; pass"
                " text=IncrementalText(tokenizer, stop), or leave stop or at_end out"
            )
        if params.stop and text is None:
            yield (
                f"stop={shown(params.stop)}: stop strings are looked for in text, and this request has none;"
                " pass text=IncrementalText(tokenizer, stop) to Engine.add_request, load the LLM with its"
                " tokenizer, or use stop_token_ids"
            )
        length = len(prompt_token_ids)
        if problem := self.too_long(length):
            yield problem
            return
        total = length + max(1, self.most_tokens(length, params))
        needed = -(-(total - 1) // block_size)
        if needed > num_blocks:
            yield (
                f"prompt and output take up to {total} tokens = {needed} KV blocks of {block_size}, but there"
                f" are {num_blocks}; lower max_tokens to {num_blocks * block_size - length + 1} or raise"
                " num_kv_blocks"
                if num_blocks * block_size >= length
                else (
                    f"the prompt's {length} tokens take {-(-length // block_size)} KV blocks of {block_size},"
                    f" but there are {num_blocks}; raise num_kv_blocks"
                )
            )


def arrival_problem(arrival_s: Any) -> str | None:
    """Why a request cannot wait since then; None if it can, or where none is given."""
    is_number = isinstance(arrival_s, int | float) and not isinstance(arrival_s, bool)
    if arrival_s is None or (is_number and -sys.float_info.max <= arrival_s <= time.monotonic()):
        return None
    return (
        f"arrival_s={shown(arrival_s)} must be a time of time.monotonic(), not to come; leave it out where it"
        " is now"
    )


def _problem_of_pair(admission: Admission, prompt: object, continuation: object) -> str | None:
    """Why a continuation of a prompt can never be scored; None if it can."""
    for name, token_ids in (("prompt", prompt), ("continuation", continuation)):
        if not isinstance(token_ids, Sequence) or isinstance(token_ids, str | bytes):
            return f"the {name} must be a list of token ids, not {described(token_ids)}"
        if wrong := _wrong_tokens(token_ids, admission.vocab_size):
            return (
                f"token ids of the {name} must be integers from 0 to {admission.vocab_size - 1}, got"
                f" {described(wrong[0])}"
            )
    assert isinstance(prompt, Sequence) and isinstance(continuation, Sequence)
    if len(prompt) == 0:
        return "the prompt is empty: give at least one token, such as BOS, for the first one to follow"
    length = len(prompt) + len(continuation) - 1  # nothing follows the last token
    if length > admission.max_model_len:
        return (
            f"prompt and continuation have {length + 1} tokens, of which all but the last must fit into"
            f" max_model_len={admission.max_model_len}; leave out the prompt's"
            f" beginning{admission.way_out}"
        )
    needed = -(-length // admission.block_size)
    if needed > admission.num_blocks:
        return (
            f"prompt and continuation take {needed} KV blocks of {admission.block_size}, but there are"
            f" {admission.num_blocks}; raise num_kv_blocks"
        )
    return None


def _wrong_tokens(token_ids: Sequence[object], vocab_size: int) -> list[object]:
    return [
        token
        for token in token_ids
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size
    ]


def list_ids(request_ids: str | Iterable[str]) -> list[str]:
    """One id, or those of an iterable, as a list. Raises RequestError for what is none."""
    if isinstance(request_ids, str):
        return [request_ids]
    ids = list(request_ids) if isinstance(request_ids, Iterable) else [request_ids]
    for each in ids:
        if not isinstance(each, str):
            raise RequestError(f"request_ids must be a string or strings, not {described(each)}")
    return ids


def _wrong_types(request_id: object, prompt: object, params: object, text: object) -> Iterator[str]:
    if not isinstance(request_id, str):
        yield f"request_id must be a string, not {described(request_id)}"
    if not isinstance(prompt, Sequence) or isinstance(prompt, str | bytes):
        way = "; make a list of it: .tolist()" if hasattr(prompt, "tolist") else ""
        yield f"prompt_token_ids must be a list of token ids, not {described(prompt)}{way}"
    if not isinstance(params, SamplingParams):
        way = "; make one of it: SamplingParams.of(...)" if isinstance(params, dict) else ""
        yield f"params must be SamplingParams, not {described(params)}{way}"
    if text is not None and not all(callable(getattr(text, name, None)) for name in ("append", "release")):
        yield f"text must have the methods append and release of TextStream; {described(text)} has not"
