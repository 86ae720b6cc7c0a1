"""The code of docs/embedding.md and its example run as they stand, and give plain decoding's output."""

from __future__ import annotations

import asyncio
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from hispec import LLM, ConfigError, Engine, SamplingParams
from tests.helpers.support import make_engine

ROOT = Path(__file__).parent.parent
SMALL: dict[str, Any] = {"max_model_len": 128, "num_kv_blocks": 64}


def snippets() -> list[str]:
    """The code blocks of the page."""
    page = (ROOT / "docs" / "embedding.md").read_text(encoding="utf-8")
    blocks = re.findall(r"(?:^    .*\n|^\n(?=    ))+", page, re.MULTILINE)
    return ["\n".join(line[4:] for line in block.splitlines()) for block in blocks]


def plain(path: Path, prompt: list[int] | str, params: SamplingParams) -> list[int]:
    with LLM(str(path), **SMALL) as llm:
        return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids


def test_the_code_of_the_page_runs(tiny_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = plain(tiny_path, [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=16))
    short, of_asyncio, by_hand = snippets()
    assert max(len(code.splitlines()) for code in (short, of_asyncio, by_hand)) <= 20
    exec(short.replace('"smollm2"', repr(str(tiny_path))), {})
    printed = capsys.readouterr().out
    lists = "+".join(re.findall(r"\[.*?\]", printed))
    assert eval(lists) == wanted and printed.split()[-1] in ("length", "stop")
    exec(of_asyncio.replace('"smollm2"', repr(str(tiny_path))), {})
    assert capsys.readouterr().out
    exec(by_hand.replace('"path/to/model"', repr(str(tiny_path))), {})
    assert capsys.readouterr().out.startswith(str(wanted))


def test_the_example_runs(tiny_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(ROOT / "examples" / "embed_engine.py"))["main"]
    texts, tokens, stats = main(str(tiny_path), **SMALL)
    params = SamplingParams(temperature=0.0, max_tokens=24, stop=["\n\n"])
    for name, prompt in (("one", "one two three one two"), ("two", "a b c a b")):
        assert tokens[name] == plain(tiny_path, prompt, params)
    assert (tokens["left"], texts["left"], stats["finished"]) == ([], "", 3)
    assert "left: abort" in capsys.readouterr().out


def test_the_asyncio_example_runs(tiny_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(ROOT / "examples" / "embed_async.py"))["main"]
    texts = asyncio.run(main(str(tiny_path), **SMALL))
    with LLM(str(tiny_path), **SMALL) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=24, stop=["\n\n"])
        outputs = llm.generate(["one two three one two", "a b c a b"], params, use_tqdm=False)
    assert texts == [output.outputs[0].text for output in outputs]
    assert "'one two three one two': " in capsys.readouterr().out


def test_an_engine_loads_what_the_plans_of_its_model_need(tiny_path: Path, tiny_decoder: Any) -> None:
    with Engine.from_pretrained(str(tiny_path), skip_tokenizer_init=True, **SMALL) as engine:
        assert engine.pretrained.tokenizer is None
        engine.set_speculative({"draft": {"kind": "model", "path": str(tiny_path)}, "num_draft_tokens": 2})
        engine.add_request([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
        assert sum(len(delta.token_ids) for delta in engine.drain()) == 9
        assert engine.stats()["draft_kept"] == engine.stats()["drafted"] > 0
        with pytest.raises(ConfigError, match=r"measure_latency=hispec\.measure\.latency\."):
            engine.set_speculative({"draft": {"layer": 3}, "control": "goodput"})
    with pytest.raises(ConfigError, match="did you mean 'max_num_seqs'"):
        Engine.from_pretrained(str(tiny_path), max_num_seq=3)
    with pytest.raises(ConfigError, match=r"Engine\.from_pretrained loads more"):
        _ = make_engine(tiny_decoder).pretrained
