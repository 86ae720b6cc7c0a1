"""A server's limits, and the defaults of the preset that it serves with."""

from __future__ import annotations

from typing import Any

import pytest

from hispec.errors import ConfigError
from hispec.openai.requests import CHAT, COMPLETIONS
from hispec.serving.completions import CompletionRequest
from hispec.serving.server_config import ServerConfig


def limits(url: str, defaults: dict[str, Any], most: int | None, **body: Any) -> tuple[int | None, int]:
    content = {"messages": [{"role": "user", "content": "a"}]} if url == CHAT else {"prompt": "a"}
    config = ServerConfig(name="m", max_tokens=most)
    sampling = CompletionRequest.of(url, content | body, config, defaults).sampling
    return sampling.max_tokens, sampling.min_tokens


def test_defaults_beyond_a_limit_are_cut_and_bodies_refused() -> None:
    defaults = {"max_tokens": 100, "min_tokens": 30}
    assert limits(COMPLETIONS, defaults, 20) == limits(CHAT, defaults, 20) == (20, 20)
    assert limits(COMPLETIONS, defaults, 50) == (50, 30)
    assert limits(COMPLETIONS, {}, 8) == (8, 0) and limits(COMPLETIONS, {}, 50) == (16, 0)
    assert limits(CHAT, {}, 50) == (50, 0) and limits(CHAT, {}, None) == (None, 0)
    assert limits(COMPLETIONS, defaults, None) == limits(CHAT, defaults, None) == (100, 30)
    assert limits(CHAT, defaults, None, max_tokens=200) == (200, 30)
    assert limits(CHAT, defaults, None, max_tokens=None) == (100, 30)
    assert limits(CHAT, {"max_tokens": None}, None) == (None, 0)
    assert limits(COMPLETIONS, {}, 50, max_tokens=None) == (16, 0)  # null is as if left out
    assert limits(COMPLETIONS, defaults, 50, max_tokens=40) == (40, 30)
    assert limits(COMPLETIONS, defaults, None, max_tokens=10) == (10, 10)  # of min_tokens it knows nothing
    assert limits(CHAT, defaults, 20, max_tokens=10) == (10, 10)
    with pytest.raises(ConfigError, match="min_tokens=11 is above max_tokens=10"):
        limits(COMPLETIONS, defaults, None, max_tokens=10, min_tokens=11)
    with pytest.raises(ConfigError, match="max_tokens"):
        limits(COMPLETIONS, defaults, None, max_tokens=0)
    with pytest.raises(ConfigError, match="max_tokens: must be at most 50 on this server, got 51"):
        limits(COMPLETIONS, {}, 50, max_tokens=51)
    with pytest.raises(ConfigError, match="min_tokens: must be at most 50 on this server, got 51"):
        limits(COMPLETIONS, defaults, 50, min_tokens=51)


def test_prompts_share_their_sampling() -> None:
    body = {"logit_bias": {"3": 1.0}, "prompt": ["a", "b", [4, 5]], "top_k": 7, "n": 2, "user": None}
    request = CompletionRequest.of(COMPLETIONS, body, ServerConfig(name="m"), {})
    assert request.prompts == [{"prompt": "a"}, {"prompt": "b"}, {"prompt_token_ids": [4, 5]}]
    assert request.sampling.logit_bias == {3: 1.0} and request.sampling.n == 2
