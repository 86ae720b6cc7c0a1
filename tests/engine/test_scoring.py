"""LLM.score: the bits that generating gives, however pairs share prompts, passes, blocks and workers."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hispec import LLM, ConfigError, Engine, RequestError, SamplingParams
from hispec.engine.scoring import Scorer
from hispec.errors import ClosedError
from tests.helpers.tiny import EOS_ID, TINY_VOCAB

SMALL: dict[str, Any] = {"max_model_len": 128, "num_kv_blocks": 64, "max_num_seqs": 4, "block_size": 8}
THREE_TIERS = {
    "draft": {"kind": "exit", "layer": 3},
    "check": {"layer": 6},
    "num_draft_tokens": 2,
    "num_checks": 2,
}
STEM = [(7 * i + 3) % 256 for i in range(37)]
PROMPTS = [STEM, STEM[:20], [*STEM[:30], 5, 6], [9], STEM, [*STEM, *STEM]]


@pytest.fixture(scope="module")
def llm(tiny_path: Path) -> Iterator[LLM]:
    with LLM(str(tiny_path), **SMALL) as made:
        yield made


def generated(llm: LLM, **params: Any) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens of the outputs of PROMPTS, and their log-probabilities as generating gives them."""
    sampling = SamplingParams(max_tokens=14, ignore_eos=True, logprobs=0, **params)
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, sampling, use_tqdm=False)]
    assert all(output.logprobs is not None for output in outputs)
    return (
        [output.token_ids for output in outputs],
        [[entry.logprob for entry in output.logprobs or []] for output in outputs],
    )


@pytest.mark.parametrize("speculative", [None, THREE_TIERS], ids=["plain", "three tiers"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scores_have_the_bits_of_generated_tokens(
    llm: LLM, speculative: dict[str, Any] | None, temperature: float
) -> None:
    llm.set_speculative(speculative)
    token_ids, logprobs = generated(llm, temperature=temperature, seed=3)
    scores = llm.score(PROMPTS, token_ids, use_tqdm=False)
    assert [score.logprobs for score in scores] == logprobs
    if temperature == 0.0:
        assert all(score.is_greedy for score in scores)
    else:
        assert not any(score.is_greedy for score in scores)


@pytest.mark.parametrize(
    "engine",
    [
        {"max_prefill_tokens": 5},
        {"max_prefill_tokens": 50, "enable_prefix_caching": False},
        {"num_kv_blocks": 12},  # the longest pair alone takes 11
        {"max_num_seqs": 1},
        {"block_size": 1, "num_kv_blocks": 512},
    ],
    ids=str,
)
def test_scores_do_not_depend_on_passes_or_blocks(llm: LLM, tiny_path: Path, engine: dict[str, Any]) -> None:
    llm.set_speculative(None)
    token_ids, logprobs = generated(llm, temperature=0.0)
    with LLM(str(tiny_path), **{**SMALL, **engine}) as other:
        assert [score.logprobs for score in other.score(PROMPTS, token_ids, use_tqdm=False)] == logprobs


def test_scores_are_those_of_the_reference(llm: LLM, tiny_reference: PreTrainedModel) -> None:
    continuations = [[1], [2, 3], [200] * 20, [0, EOS_ID, 8], [], [77, 78, 79]]
    scores = llm.score(PROMPTS, continuations, use_tqdm=False)
    for prompt, continuation, score in zip(PROMPTS, continuations, scores, strict=True):
        with torch.inference_mode():
            logits = tiny_reference(torch.tensor([[*prompt, *continuation]])).logits[0, len(prompt) - 1 : -1]
        wanted = logits.log_softmax(-1)[range(len(continuation)), continuation]
        torch.testing.assert_close(torch.tensor(score.logprobs), wanted, atol=1e-3, rtol=1e-4)
        assert score.is_greedy == (logits.argmax(-1).tolist() == continuation)


def test_pairs_that_begin_alike_compute_what_they_share_once(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []
    run_layers = llm.decoder.run_layers

    def counted(hidden: torch.Tensor, *arguments: Any) -> torch.Tensor:
        computed.append(hidden.shape[0])
        return run_layers(hidden, *arguments)

    monkeypatch.setattr(llm.decoder, "run_layers", counted)
    choices = [[1, 2], [3, 4], [5, 6], [7, 8]]
    scores = llm.score([STEM] * 4, choices, use_tqdm=False)
    # All of the first; of the others what lies behind the four full blocks before the stem's last token.
    assert sum(computed) == 38 + 3 * (38 - 32)
    alone = [llm.score([STEM], [choice], use_tqdm=False)[0] for choice in choices]
    assert scores == alone


def test_outputs_after_scores_are_those_before(llm: LLM) -> None:
    """Prompts of the prefix cache, whose blocks scores write over."""
    llm.set_speculative(THREE_TIERS)
    before = generated(llm, temperature=0.0)
    llm.score([[1] * 100] * 9, [[token] * 20 for token in range(9)], use_tqdm=False)
    assert generated(llm, temperature=0.0) == before
    assert isinstance(llm.engine, Engine)
    llm.engine.check()


def test_what_is_no_list_of_pairs_is_refused(llm: LLM) -> None:
    for pair in (5, [[1]], [[1], [2], [3]], "ab"):
        with pytest.raises(RequestError, match=r"^pairs\[1\]=.* must be a prompt and a continuation"):
            llm.engine.score([([1], [2]), pair])
    wrong: list[tuple[Any, Any, str]] = [
        ((each for each in [[1]]), [[2]], "prompts"),
        ([[1]], 5, "continuations"),
    ]
    for prompts, continuations, name in wrong:
        with pytest.raises(RequestError, match=f"the {name} must be a list of lists of token ids, not "):
            llm.score(prompts, continuations, use_tqdm=False)


@pytest.mark.parametrize(
    ("prompt", "continuation", "words"),
    [
        ([], [1], r"^pairs\[1\]: the prompt is empty"),
        ("text", [1], r"^pairs\[1\]: the prompt must be a list of token ids, not str 'text'"),
        ([1], 5, r"^pairs\[1\]: the continuation must be a list of token ids, not int 5"),
        ([1], [TINY_VOCAB], r"^pairs\[1\]: token ids of the continuation must be integers from 0 to 259"),
        ([1], [True], r"^pairs\[1\]: token ids of the continuation .*got bool True"),
        ([1] * 100, [1] * 30, r"^pairs\[1\]: prompt and continuation have 130 tokens, .*max_model_len=128"),
    ],
    ids=["empty", "text", "number", "vocabulary", "bool", "long"],
)
def test_a_pair_that_cannot_be_scored_is_named(
    llm: LLM, prompt: Any, continuation: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.engine, "score", lambda pairs: pytest.fail("computed before all was checked"))
    with pytest.raises(RequestError, match=words):
        llm.score([[1], prompt], [[2], continuation], use_tqdm=False)


def test_the_longest_pair_fills_the_model_but_for_its_last_token(llm: LLM) -> None:
    assert len(llm.score([[1] * 100], [[2] * 29], use_tqdm=False)[0].logprobs) == 29
    with pytest.raises(RequestError, match=r"1 prompts and 2 continuations; give one"):
        llm.score([[1]], [[1], [2]])


def test_blocks_that_do_not_suffice_are_named(tiny_path: Path) -> None:
    with (
        LLM(str(tiny_path), **{**SMALL, "num_kv_blocks": 3}) as small,
        pytest.raises(RequestError, match=r"take 5 KV blocks of 8, but there are 3; raise num_kv_blocks"),
    ):
        small.score([STEM], [[1]], use_tqdm=False)


def test_scores_wait_for_requests_to_end(llm: LLM) -> None:
    llm.add([1, 2], {"max_tokens": 2}, "one")
    with pytest.raises(RequestError, match="1 requests are unfinished"):
        llm.score([[1]], [[2]])
    assert isinstance(llm.engine, Engine)
    with pytest.raises(ConfigError, match=r"score\(\) cannot run while 1 requests are unfinished"):
        llm.engine.score([([1], [2])])
    llm.abort("one")
    assert llm.score([[1]], [[2]], use_tqdm=False)


@pytest.mark.parametrize("number", [torch.inf, torch.nan])
def test_numbers_that_overflow_are_told_of_their_pair_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, number: float
) -> None:
    """Of one of their tokens."""
    pairs = [STEM, [1, 2], [9]], [[3], [4, 5], [6]]
    wanted = llm.score(*pairs, use_tqdm=False)
    read = Scorer._read

    def broken(self: Scorer, hidden: torch.Tensor, read_here: Any) -> None:
        places = [at for at, (_, row, target) in enumerate(read_here) if target == 5 and row.first == 1]
        logits = llm.decoder.logits
        with monkeypatch.context() as patch:
            patch.setattr(
                self._decoder, "logits", lambda *arguments: spoilt(logits(*arguments), places, number)
            )
            read(self, hidden, read_here)

    monkeypatch.setattr(Scorer, "_read", broken)
    first, bad, last = llm.score(*pairs, use_tqdm=False)
    assert (first, last) == (wanted[0], wanted[2]) and first.error is None
    assert (
        bad.error is not None and "no numbers for a prompt of 2 tokens with a continuation of 2" in bad.error
    )
    assert bad.logprobs[0] == wanted[1].logprobs[0] and math.isnan(bad.logprobs[1]) and not bad.is_greedy


def spoilt(logits: torch.Tensor, rows: list[int], number: float) -> torch.Tensor:
    logits = logits.clone()
    logits[rows, 5] = number
    return logits


def test_a_closed_engine_scores_nothing(tiny_path: Path) -> None:
    closed = LLM(str(tiny_path), **SMALL)
    closed.close()
    with pytest.raises(ClosedError, match=r"^LLM\.score\(\)"):
        closed.score([[1]], [[2]])


def test_engine_score_is_public_and_takes_pairs(llm: LLM) -> None:
    assert isinstance(llm.engine, Engine) and llm.engine.admission.num_blocks == 64
    assert llm.engine.score([([1, 2], [3])]) == llm.score([[1, 2]], [[3]], use_tqdm=False)
    assert llm.engine.score([]) == []


@pytest.mark.slow
def test_workers_give_the_same_scores_and_those_that_die_are_replaced(llm: LLM, tiny_path: Path) -> None:
    pairs = [[*STEM, token] for token in range(150)], [[token, 3, 4] for token in range(150)]
    wanted = llm.score(*pairs, use_tqdm=False)
    with LLM(str(tiny_path), workers=2, **SMALL) as two:
        assert two.score(*pairs, use_tqdm=False) == wanted
        pids = two.engine.pids()  # type: ignore[union-attr]
        os.kill(pids["worker 1"], signal.SIGKILL)
        assert two.score(*pairs, use_tqdm=False) == wanted
        with pytest.raises(RequestError, match=r"^pairs\[0\]: the prompt is empty"):
            two.score([[]], [[1]])
        assert two.score([], [], use_tqdm=False) == []
