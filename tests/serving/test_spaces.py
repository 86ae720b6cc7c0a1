"""Texts of tokenizers that take a space from where a text begins: completions keep it, chats do not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders

from hispec import LLM, SamplingParams
from tests.helpers.sweeps import sweep
from tests.serving.support import SMALL, Running, serving

THREE = {"temperature": 0.0, "max_tokens": 3}


@pytest.fixture(scope="module")
def stripping_path(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, whose tokenizer leaves out the space that begins a text."""
    folder = tmp_path_factory.mktemp("stripping") / "model"
    shutil.copytree(tiny_path, folder)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def spaces(stripping_path: Path) -> dict[str, float]:
    """A bias after which all is spaces."""
    backend = Tokenizer.from_file(str(stripping_path / "tokenizer.json"))
    (space,) = backend.encode(" ", add_special_tokens=False).ids
    return {str(space): 100.0}


@sweep("workers", [1, 2], (1).__eq__)
def test_a_completion_begins_with_its_space(
    stripping_path: Path, spaces: dict[str, float], workers: int
) -> None:
    bias = {int(token): value for token, value in spaces.items()}
    params = SamplingParams(**THREE, logit_bias=bias)
    with LLM(str(stripping_path), workers=workers, **SMALL) as llm:
        (continued,) = llm.generate("one", params, use_tqdm=False)
        (answer,) = llm.chat([{"role": "user", "content": "one"}], params, use_tqdm=False)
        assert [continued.outputs[0].text, answer.outputs[0].text] == [" " * 3, " " * 2]
        assert "".join(delta.text for delta in llm.stream("one", params)) == " " * 3
        token_ids = continued.outputs[0].token_ids
        assert llm.split_text(token_ids, " " * 3, chat=False) == [" ", " ", " "]
        assert llm.split_text(token_ids, " " * 2, chat=True) == ["", " ", " "]


@pytest.fixture(scope="module")
def server(stripping_path: Path) -> Iterator[Running]:
    with serving(stripping_path) as running:
        yield running


@pytest.mark.parametrize("is_chat", [False, True])
def test_the_server_tells_it_and_its_tier(server: Running, spaces: dict[str, float], is_chat: bool) -> None:
    given: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]} if is_chat else {"prompt": "x"}
    path = f"/v1/{'chat/completions' if is_chat else 'completions'}"
    body = {**given, **THREE, "logit_bias": spaces, "tiers": True}
    (choice,) = server.http.post(path, json=body).json()["choices"]
    wanted = " " * (2 if is_chat else 3)
    assert (choice["message"]["content"] if is_chat else choice["text"]) == wanted
    assert [piece["text"] for piece in choice["tiers"]] == ["" if is_chat else " ", " ", " "]
    lines = server.http.post(path, json={**body, "stream": True}).text.splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    tiers = [piece["text"] for chunk in chunks for piece in chunk["choices"][0].get("tiers", [])]
    assert "".join(tiers) == wanted


def test_offsets_and_stop_strings_are_those_of_the_text(server: Running, spaces: dict[str, float]) -> None:
    body = {"prompt": "one", **THREE, "logit_bias": spaces}
    (choice,) = server.http.post("/v1/completions", json={**body, "logprobs": 1}).json()["choices"]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"] == " " * 3
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    (choice,) = server.http.post("/v1/completions", json={**body, "stop": ["  "]}).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop"), "the space that begins it counts"
