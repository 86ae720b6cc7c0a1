"""Log-probabilities as OpenAI's API has them: texts, bytes and offsets of tokens that are parts of
characters."""

from __future__ import annotations

import math
from typing import Any

from hispec.openai.chunks import Chunks
from hispec.openai.responses import Offsets, chat_logprobs, completion_logprobs
from hispec.outputs import Delta, TokenLogprobs

BYTES = {1: b"a", 2: "\u00e9".encode()[:1], 3: "\u00e9".encode()[1:], 4: b" b", 5: b" b"}


class Tokens:
    """As TokenBytes."""

    special = frozenset({6})

    def __call__(self, token_id: int) -> bytes:
        return (BYTES | {6: b"<|end|>"})[token_id]


OTHERS = {5: -1.0, 4: -2.0, 2: -math.inf}
ENTRIES = [
    TokenLogprobs(token, -0.5, {token: -0.5, **{each: OTHERS[each] for each in OTHERS if each != token}})
    for token in (1, 2, 3, 4)
]


def test_a_completion_has_texts_that_are_told_apart_and_offsets_in_characters() -> None:
    found = completion_logprobs(ENTRIES, Tokens(), Offsets())
    assert found["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", " b"]
    assert found["text_offset"] == [0, 1, 1, 2]  # in "a\u00e9 b"
    assert found["top_logprobs"][0] == {"a": -0.5, " b": -1.0, "bytes:\\xc3": -9999.0}  # the likelier " b"
    assert found["top_logprobs"][3] == {" b": -0.5, "bytes:\\xc3": -9999.0}
    unlikely = completion_logprobs([TokenLogprobs(3, -7.0, {1: -0.5})], Tokens(), Offsets())
    assert unlikely["top_logprobs"] == [{"a": -0.5, "bytes:\\xa9": -7.0}]  # the chosen one always


def test_what_is_no_part_of_the_text_moves_nothing_in_it() -> None:
    """A special token has a name, which a text lacks."""
    end = TokenLogprobs(6, -0.5, {6: -0.5})
    found = completion_logprobs([ENTRIES[0], end, *ENTRIES[1:], end], Tokens(), Offsets())
    assert found["tokens"][1] == "<|end|>" and found["text_offset"] == [0, 1, 1, 1, 2, 4]


def test_the_bytes_of_a_chats_tokens_are_together_those_of_its_text() -> None:
    content = chat_logprobs(ENTRIES, Tokens())["content"]
    assert bytes(byte for each in content for byte in each["bytes"]).decode() == "a\u00e9 b"
    assert [each["token"] for each in content][0::3] == ["a", " b"]


def test_a_stream_goes_on_where_its_last_token_ended() -> None:
    chunks = Chunks(False, "m", 0, "id", Tokens())
    offsets: list[Any] = []
    for part in (ENTRIES[:2], ENTRIES[2:]):
        delta = Delta("r", [entry.token_id for entry in part], "", part, None, None)
        for chunk in chunks.of_delta(0, 0, delta):
            offsets += chunk["choices"][0]["logprobs"]["text_offset"]
    assert offsets == [0, 1, 1, 2]
