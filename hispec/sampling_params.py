"""SamplingParams: how one request's output is sampled. Names and meanings follow vLLM."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field, field_validator, model_validator

from .config import Settings
from .errors import build, shown


def _not_next_to_zero(value: float, way_out: str = "") -> float:
    if 0.0 < value < 1e-5:  # logits divided by it would overflow
        raise ValueError(f"too close to 0: use {way_out}at least 1e-5, got {value!r}")
    return value


# What logits are divided by; 0 = greedy.
Temperature = Annotated[
    float,
    Field(ge=0.0, le=100.0),
    AfterValidator(lambda value: _not_next_to_zero(value, "0 for greedy, or ")),
]


class SamplingParams(Settings):
    """How one request's tokens are chosen, and when it stops.

    n                    outputs per prompt; output i uses seed + i
    temperature          0 = greedy
    top_k, top_p, min_p  filters on the tempered distribution, in this order; 0, 1.0 and 0.0 switch them off
    repetition_penalty   divides (multiplies) positive (negative) logits of tokens in prompt or output
    presence_penalty, frequency_penalty   subtracted from logits of output tokens, once or per occurrence
    logit_bias           {token id: added to its logit}
    seed                 None = derived from the engine's seed and the request's number
    max_tokens           None = as many as max_model_len and the KV blocks leave
    min_tokens           no stop token before this many
    stop                 strings that end the output (left out of it)
    stop_token_ids       tokens that end the output, besides the model's EOS
    ignore_eos           go on after the model's EOS
    logprobs             log-probabilities of this many most likely tokens, and of the chosen one; from
                         unprocessed logits
    tiers                say of each output token which tier's choice it is: "draft" (the drafter's), "check"
                         (the check tier's own) or "verify" (the full model's own)
    speculative          False: this request is decoded plainly, whatever the batch does
    """

    n: Annotated[int, Field(ge=1, le=128)] = 1
    temperature: Temperature = 1.0
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0.0, le=100.0), AfterValidator(_not_next_to_zero)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    logit_bias: dict[int, Annotated[float, Field(ge=-100.0, le=100.0)]] = Field(default_factory=dict)
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = 16
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] = 0
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    ignore_eos: bool = False
    logprobs: Annotated[int, Field(ge=0, le=64)] | None = None
    tiers: bool = False
    speculative: bool = True

    @model_validator(mode="after")
    def _min_below_max(self) -> SamplingParams:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}")
        return self

    @field_validator("stop", mode="before")
    @classmethod
    def _one_string(cls, value: Any) -> Any:
        if not isinstance(value, str | list | tuple):
            raise ValueError(f"must be a string or a list of strings, got {shown(value)}")
        return [value] if isinstance(value, str) else list(value)

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _integer_keys(cls, value: Any) -> Any:
        # JSON and YAML users write token ids as strings.
        if isinstance(value, dict):
            return {
                int(key) if isinstance(key, str) and key.isdecimal() else key: item
                for key, item in value.items()
            }
        return {} if value is None else value

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @classmethod
    def of(cls, values: SamplingParams | dict[str, Any] | None, where: str = "sampling") -> SamplingParams:
        """SamplingParams from what a user gave; raises ConfigError with every problem in it."""
        return build(cls, {} if values is None else values, where)


def put_over(defaults: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of SamplingParams with a request's own put over them. Who asks for fewer tokens than others must
    have at least has not asked for so many."""
    values, asked = {**defaults, **own}, own.get("max_tokens")
    if "min_tokens" not in own and isinstance(asked, int) and 1 <= asked < (values.get("min_tokens") or 0):
        values["min_tokens"] = asked
    return values


def seed_of(seed: int, key: Any) -> int:
    """A seed of its own for what is known by `key`, from one for all."""
    digest = hashlib.blake2b(f"{seed}:{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2  # 62 bits: output i of n adds i
