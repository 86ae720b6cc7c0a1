"""Bodies of OpenAI's requests to prompts and sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConfigError, cut, nearest, shown

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MOST_PROMPTS = 128  # of one request
MOST_STOPS = 64  # strings of one request: each is looked for with every token
SAME = (  # of SamplingParams, under the same name
    *("temperature", "top_p", "n", "seed", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids"),
)
IGNORED = ("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
_READ = ("max_tokens", "max_completion_tokens", "stop", "logprobs", "top_logprobs", "stream")
# Values of settings that HiSpec lacks with which they ask for nothing.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "stream_options": (),
    "functions": ([],),
    "reasoning_effort": (),
}


def read_body(url: str, body: Any) -> dict[str, Any]:
    """{"messages" | "prompt" | "prompt_token_ids": ..., "sampling": fields of SamplingParams that the body
    sets}. Null is as if it were not given; `model` is not looked at. Raises ConfigError that names the
    parameter."""
    sampling = read_sampling(url, body)
    if body.get("stream"):
        raise ConfigError("stream=true: a batch has no streams; leave it out")
    prompts = read_prompts(url, body)
    if len(prompts) > 1:
        raise ConfigError(
            f"prompt: must be one string or one list of token ids, got {shown(body['prompt'])}; one a request"
        )
    return {"sampling": sampling, **prompts[0]}


def read_sampling(url: str, body: Any) -> dict[str, Any]:
    """Fields of SamplingParams that a body sets. Raises ConfigError, also for a parameter that is unknown."""
    if not isinstance(body, Mapping):
        raise ConfigError(f"body: expected a JSON object, got {shown(body)}")
    given = {name: value for name, value in body.items() if value is not None}
    known = (_prompt_name(url), *SAME, *IGNORED, *_READ, *_HARMLESS)
    for name, value in given.items():
        if name not in known:
            hint = nearest(name, (_prompt_name(url), *SAME, *_READ), 0.7)  # what would do something
            raise ConfigError(f"{cut(name)}: unknown parameter{hint}; leave it out")
        if name in _HARMLESS and value not in _HARMLESS[name]:
            raise ConfigError(f"{name}={shown(value)} is not supported; leave it out")
    return _read_sampling(given, url == CHAT)


def read_prompts(url: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """{"messages" | "prompt" | "prompt_token_ids": ...} for each prompt of a body; a chat has one. Raises
    ConfigError."""
    name = _prompt_name(url)
    prompt = body.get(name)
    if prompt is None:
        raise ConfigError(f"{name}: required, but not given")
    if url == CHAT:
        return [{"messages": _plain_roles(prompt)}]
    is_several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    prompts = prompt if is_several else [prompt]
    if len(prompts) > MOST_PROMPTS:
        raise ConfigError(
            f"prompt: {len(prompts)} prompts in a request, at most {MOST_PROMPTS}; send several"
        )
    return [_read_prompt(each, name_of_prompt(at, prompts)) for at, each in enumerate(prompts)]


def _read_prompt(prompt: Any, name: str) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return {"prompt_token_ids": prompt}
    raise ConfigError(f"{name}: must be a string or a list of token ids, got {shown(prompt)}")


def name_of_prompt(at: int, prompts: Sequence[Any]) -> str:
    """A prompt of a request, for a message."""
    return f"prompt[{at}]" if len(prompts) > 1 else "prompt"


def _prompt_name(url: str) -> str:
    return "messages" if url == CHAT else "prompt"


def _read_sampling(given: Mapping[str, Any], is_chat: bool) -> dict[str, Any]:
    sampling = {name: given[name] for name in SAME if name in given}
    if _is_int(sampling.get("seed")) and sampling["seed"] < 0:
        sampling["seed"] %= 2**63  # OpenAI's have a sign
    if sampling.get("top_p") == 0 and not isinstance(sampling["top_p"], bool):
        sampling |= {"top_p": 1.0, "top_k": 1}  # what is left of all tokens then is the likeliest
    limits = {given[name] for name in ("max_tokens", "max_completion_tokens") if _is_int(given.get(name))}
    if len(limits) > 1:
        raise ConfigError(
            f"max_tokens={given['max_tokens']} and max_completion_tokens={given['max_completion_tokens']}"
            " contradict each other; keep one of them"
        )
    for name in ("max_tokens", "max_completion_tokens"):
        if name in given:
            sampling["max_tokens"] = given[name]
    if "stop" in given:
        stop = [given["stop"]] if isinstance(given["stop"], str) else given["stop"]
        if isinstance(stop, list) and len(stop) > MOST_STOPS:
            raise ConfigError(f"stop: {len(stop)} strings in a request, at most {MOST_STOPS}; leave some out")
        sampling["stop"] = stop
    wanted = given.get("logprobs")
    if is_chat:
        if wanted is not None and not isinstance(wanted, bool):
            raise ConfigError(f"logprobs: must be true or false, got {shown(wanted)}")
        if "top_logprobs" in given and not wanted:
            raise ConfigError("top_logprobs needs logprobs=true")
        if wanted:
            sampling["logprobs"] = given.get("top_logprobs", 0)
    elif "top_logprobs" in given:
        raise ConfigError(
            f"top_logprobs={shown(given['top_logprobs'])} is for chats; here `logprobs` is that number"
        )
    elif wanted is not None:
        sampling["logprobs"] = wanted
    return sampling


def _plain_roles(messages: Any) -> Any:
    """A conversation in the roles that chat templates have: OpenAI has renamed `system` to `developer`."""
    if not isinstance(messages, list):
        return messages
    return [
        {**message, "role": "system"}
        if isinstance(message, Mapping) and message.get("role") == "developer"
        else message
        for message in messages
    ]


def _is_int(value: Any) -> bool:
    return type(value) is int
