"""The class for Dataset.map_batches, called as Ray calls it: batches that overlap, in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hispec import LLM, ConfigError, SamplingParams
from hispec.integrations.ray_data import COUNTERS, RESULTS, Generate

SMALL: dict[str, Any] = {"max_model_len": 128, "num_kv_blocks": 64, "max_num_seqs": 4}
QUESTIONS = [f"What is {number} + {number}?" for number in range(10)]


@pytest.fixture(scope="module")
def udf(tiny_path: Path) -> Iterator[Generate]:
    made = Generate(
        str(tiny_path),
        sampling={"max_tokens": 8, "temperature": 0.0},
        columns={"prompt": "question"},
        speculative={"draft": {"layer": 3}},
        engine=SMALL,
    )
    yield made
    made.close()


def call(udf: Generate, *batches: Any) -> list[Any]:
    async def together() -> list[Any]:
        return list(await asyncio.gather(*map(udf, batches)))

    return asyncio.run(together())


def plain(path: Path, **sampling: Any) -> list[str]:
    params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **sampling})
    with LLM(str(path), **SMALL) as llm:
        return [output.outputs[0].text for output in llm.generate(QUESTIONS, params, use_tqdm=False)]


def test_batches_that_overlap_get_plain_decodings_texts(udf: Generate, tiny_path: Path) -> None:
    table = pa.table({"question": QUESTIONS, "n": range(10)})
    first, second = call(udf, table.slice(0, 6), table.slice(6))
    assert first.column_names == ["question", "n", *RESULTS]
    done = pa.concat_tables([first, second]).to_pylist()
    assert [row["text"] for row in done] == plain(tiny_path)
    assert [row["n"] for row in done] == list(range(10))
    assert all(row["error"] is None and row["texts"] == [row["text"]] for row in done)
    assert {row["finish_reason"] for row in done} <= {"stop", "length"}
    assert all(0 < row["completion_tokens"] <= 8 and row["prompt_tokens"] for row in done)


def test_a_column_of_prompts_that_is_named_goes_before_others(udf: Generate, tiny_path: Path) -> None:
    table = pa.table({"question": QUESTIONS, "messages": ["not of any use"] * len(QUESTIONS)})
    (done,) = call(udf, table)
    assert done.column("text").to_pylist() == plain(tiny_path)


@pytest.mark.parametrize("name", ["text", "error"])
def test_a_column_of_the_name_of_a_results_is_not_written_over(udf: Generate, name: str) -> None:
    for batch in (pa.table({"question": ["x"], name: ["mine"]}), {"question": ["x"], name: ["mine"]}):
        with pytest.raises(ConfigError, match=f"has a column '{name}' already"):
            call(udf, batch)


def test_a_batch_of_numpys_comes_back_as_one(udf: Generate, tiny_path: Path) -> None:
    (done,) = call(udf, {"question": np.array(QUESTIONS, object), "n": np.arange(10)})
    assert list(done["text"]) == plain(tiny_path) and done["n"].tolist() == list(range(10))


def test_counts_of_numpys_are_whole_numbers_beside_a_row_that_failed(udf: Generate) -> None:
    (done,) = call(udf, {"question": np.array([QUESTIONS[0], None], object)})
    for name in ("prompt_tokens", "completion_tokens"):
        served, failed = done[name]
        assert type(served) is int and served > 0 and failed is None
        assert pa.array(done[name]).type == pa.int64(), "as of a batch in which none failed"


def test_numpys_within_mappings_and_its_nulls_are_what_they_stand_for(udf: Generate, tiny_path: Path) -> None:
    question = np.array(QUESTIONS[:2], object)
    some = np.array([{"stop": np.array(["x"])}, {"max_tokens": np.int64(2)}], object)
    none = np.array([np.nan, np.nan])  # what Ray makes of a column of nulls
    (first, second) = call(
        udf, {"question": question, "sampling": some}, {"question": question, "sampling": none}
    )
    assert [*first["error"], *second["error"]] == [None] * 4
    assert first["completion_tokens"][1] == 2 and list(second["text"]) == plain(tiny_path)[:2]


def test_a_row_that_cannot_be_served_harms_no_other(udf: Generate) -> None:
    rows = [
        {"question": "a" * 500, "sampling": None},
        {"question": "b", "sampling": '{"max_tokens": 3}'},
        {"question": "c", "sampling": '{"max_tokns": 3}'},
        {"question": "d", "sampling": "{"},
        {"question": "e", "sampling": "3"},
        {"question": None, "sampling": None},
        {"question": "f", "sampling": "[" * 100_000},
    ]
    (done,) = call(udf, pa.Table.from_pylist(rows))
    errors = [row["error"] for row in done.to_pylist()]
    assert errors[1] is None and done["completion_tokens"][1].as_py() <= 3
    assert "max_model_len" in errors[0] and "did you mean 'max_tokens'" in errors[2]
    assert "JSON" in errors[3] and "mapping" in errors[4] and "prompt" in errors[5] and "JSON" in errors[6]
    assert [text is None for text in done["text"].to_pylist()] == [error is not None for error in errors]


def test_rows_override_sampling_by_mappings_too(udf: Generate) -> None:
    rows = [{"question": "a", "sampling": {"max_tokens": 2}}, {"question": "a", "sampling": {"top_k": 1}}]
    (done,) = call(udf, pa.Table.from_pylist(rows))  # Arrow makes {max_tokens: 2, top_k: null} of the first
    assert [row["error"] for row in done.to_pylist()] == [None, None]
    assert done["completion_tokens"].to_pylist()[0] <= 2


def test_nulls_that_arrow_puts_into_mappings_are_left_out(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    udf = Generate(str(tiny_path), sampling={"max_tokens": 4, "temperature": 0.0}, engine=SMALL)
    rows: list[dict[str, Any]] = [
        {"prompt": "a", "sampling": {"logit_bias": {"5": 100.0}}},
        {"prompt": "a", "sampling": {"logit_bias": {"7": 100.0}}},
    ]
    (done,) = call(udf, pa.Table.from_pylist(rows))
    assert done["error"].to_pylist() == [None, None] and len(set(done["text"].to_pylist())) == 2
    called, generate = [], udf._engine.generate

    def watched(prompt: Any, *arguments: Any, **options: Any) -> Any:
        called.append(prompt)
        return generate(prompt, *arguments, **options)

    monkeypatch.setattr(udf._engine, "generate", watched)
    calls = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
    chats = [
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": calls}],
        [{"role": "user", "content": "Ho"}],
    ]
    call(udf, pa.table({"messages": chats}))
    udf.close()
    assert sorted(called, key=len, reverse=True) == chats


def test_sampled_rows_with_ids_are_the_same_wherever_they_run(tiny_path: Path) -> None:
    rows = [{"id": f"row {at}", "prompt": "Hello", "messages_": 1} for at in range(6)]
    texts = []
    for order in (rows, rows[::-1]):
        udf = Generate(str(tiny_path), sampling={"max_tokens": 12, "temperature": 1.0}, seed=3, engine=SMALL)
        (done,) = call(udf, pa.Table.from_pylist(order))
        udf.close()
        texts.append({row["id"]: row["text"] for row in done.to_pylist()})
    assert texts[0] == texts[1] and len(set(texts[0].values())) > 1


def test_conversations_and_token_ids_are_prompts(tiny_path: Path) -> None:
    udf = Generate(str(tiny_path), sampling={"max_tokens": 4}, engine=SMALL)
    messages = [[{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Ho"}]]
    (chats,) = call(udf, pa.table({"messages": messages}))
    ids = np.empty(2, object)
    ids[:] = [np.array([1, 2, 3]), np.array([4, 5])]
    (tokens,) = call(udf, {"prompt_token_ids": ids})
    udf.close()
    assert chats["error"].to_pylist() == [None, None]
    assert list(tokens["error"]) == [None, None] and list(tokens["prompt_tokens"]) == [3, 2]


def test_columns_that_are_not_there_are_named(udf: Generate, tiny_path: Path) -> None:
    with pytest.raises(ConfigError, match="no column 'question', it has text"):
        call(udf, pa.table({"text": ["a"]}))
    with pytest.raises(ConfigError, match=r"unknown field 'promt' \(did you mean 'prompt'"):
        Generate(str(tiny_path), columns={"promt": "question"})
    with pytest.raises(ConfigError, match="speculative"):
        Generate(str(tiny_path), speculative={"draft": {"layer": 99}})


def test_what_is_done_is_counted(udf: Generate, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = dict.fromkeys(COUNTERS, 0)

    def counter(name: str) -> Any:
        return SimpleNamespace(inc=lambda by: counted.update({name: counted[name] + by}))

    monkeypatch.setattr(udf, "_counters", {name: counter(name) for name in COUNTERS})
    (done,) = call(udf, pa.table({"question": ["a", None, "b"]}))
    rows, errors, prompt, new = counted.values()
    assert (rows, errors) == (2, 1)
    assert prompt == sum(filter(None, done["prompt_tokens"].to_pylist())) > 0
    assert new == sum(filter(None, done["completion_tokens"].to_pylist())) > 0
