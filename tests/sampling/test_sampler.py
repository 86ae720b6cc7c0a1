"""The sampler against transformers' own logits processors, and against itself: rows of a batch do not touch
each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hispec.sampling import noise
from hispec.sampling import sampler as sampler_module
from hispec.sampling.inputs import RowSampling, SamplingInput
from hispec.sampling.sampler import Sampler
from hispec.sampling_params import SamplingParams

CPU = torch.device("cpu")
VOCAB = 300
PROMPT, OUTPUT, STOP_IDS = [5, 6, 7, 7, 250], [8, 9, 9, 5], frozenset({2, 9})


def random_logits(num: int, vocab: int = VOCAB, scale: float = 3.0, seed: int = 0) -> Tensor:
    return scale * torch.randn(num, vocab, generator=torch.Generator().manual_seed(seed))


def row(
    seed: int = 0,
    prompt: Sequence[int] = PROMPT,
    output: Sequence[int] = OUTPUT,
    stop_ids: frozenset[int] = STOP_IDS,
    **params: Any,
) -> RowSampling:
    return RowSampling(SamplingParams(**{"max_tokens": None, **params}), seed, prompt, output, stop_ids)


def make_input(
    rows: Sequence[int],
    num_rows: int,
    index: Sequence[int] | None = None,
    window_tokens: Tensor | None = None,
) -> SamplingInput:
    """Tokens of these rows, each at column `index` of its row's window (0 if None), after PROMPT and
    OUTPUT."""
    index_ = torch.tensor([0] * len(rows) if index is None else index)
    window = torch.tensor([[OUTPUT[-1], 0]]).expand(num_rows, -1) if window_tokens is None else window_tokens
    return SamplingInput(torch.tensor(rows), index_, len(PROMPT + OUTPUT) - 1 + index_, window)


def reference(
    logits: Tensor, params: SamplingParams, prompt: list[int], output: list[int], stop_ids: Sequence[int]
) -> Tensor:
    """The distribution [vocab] of one token, by transformers; presence and frequency penalties, which it
    lacks, by hand."""
    ids, scores = torch.tensor([prompt + output]), logits.clone().unsqueeze(0)
    if params.logit_bias:
        scores = SequenceBiasLogitsProcessor({(token,): bias for token, bias in params.logit_bias.items()})(
            ids, scores
        )
    if params.repetition_penalty != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    for token in set(output):
        scores[0, token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    warpers = LogitsProcessorList()
    if params.min_tokens:
        warpers.append(MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, list(stop_ids)))
    if params.temperature == 0.0:
        return torch.nn.functional.one_hot(warpers(ids, scores)[0].argmax(), logits.shape[0]).float()
    warpers.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers(ids, scores)[0].softmax(-1)


def equal_distributions(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-4)
    assert torch.equal(got > 0, expected > 0), "another set of tokens is left"


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"temperature": 0.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": VOCAB},
    {"top_k": 10 * VOCAB},
    {"top_p": 0.05},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"min_p": 0.01},
    {"min_p": 0.3},
    {"min_p": 1.0},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 1.5},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 0.8},
    {"frequency_penalty": -1.0, "temperature": 0.0},
    {"logit_bias": {3: 8.0, 9: -100.0, 299: 0.5}},
    {"logit_bias": {3: 30.0}, "temperature": 0.0},
    {"min_tokens": len(OUTPUT)},  # reached
    {"min_tokens": len(OUTPUT) + 1},
    {"min_tokens": len(OUTPUT) + 1, "temperature": 0.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1.8, "top_p": 0.8, "min_p": 0.2, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {
        "top_k": 5,
        "presence_penalty": 2.0,
        "logit_bias": {9: 6.0, 8: 6.0},
        "min_tokens": 30,
        "temperature": 1.1,
    },
    {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.4,
        "logit_bias": {5: 4.0},
        "temperature": 0.0,
    },
]


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_each_setting_gives_the_distribution_that_transformers_gives(params: dict[str, Any]) -> None:
    logits, one = random_logits(20), row(**params)
    got = Sampler([one], VOCAB, CPU).probabilities(logits, make_input([0] * 20, 1))
    for i in range(20):
        equal_distributions(got[i], reference(logits[i], one.params, PROMPT, OUTPUT, list(STOP_IDS)))


@pytest.mark.parametrize("stop_ids", [frozenset(), frozenset({4})])
def test_min_tokens_counts_tentative_tokens_and_forbids_stop_tokens_only(stop_ids: frozenset[int]) -> None:
    logits = random_logits(4)
    sampler = Sampler([row(min_tokens=len(OUTPUT) + 2, stop_ids=stop_ids)], VOCAB, CPU)
    got = sampler.probabilities(
        logits, make_input([0] * 4, 1, index=[0, 1, 2, 3], window_tokens=torch.full((1, 5), 11))
    )
    expected = logits.clone()
    expected[:2, list(stop_ids)] = -torch.inf
    equal_distributions(got, expected.softmax(-1))


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.6},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 0.9},
        {"frequency_penalty": 0.9, "temperature": 0.0},
    ],
    ids=str,
)
def test_penalties_count_the_rounds_tokens_up_to_the_place_and_no_further(params: dict[str, Any]) -> None:
    """The window's column 0 is the last committed token, so it is counted already; later columns are another
    tier's guess."""
    window = torch.tensor([[OUTPUT[-1], 40, 41, 40, 8, 99], [OUTPUT[-1], 50, 50, 50, 50, 50]])
    rows, index = [0, 0, 0, 0, 1, 0], [0, 1, 2, 3, 2, 4]
    logits = random_logits(6)
    logits[:, [40, 41, 50, 99]] = 9.0
    one = row(**params)
    got = Sampler([one, one], VOCAB, CPU).probabilities(logits, make_input(rows, 2, index, window))
    for i in range(6):
        so_far = OUTPUT + window[rows[i], 1 : index[i] + 1].tolist()
        equal_distributions(got[i], reference(logits[i], one.params, PROMPT, so_far, []))


def test_committed_tokens_count_as_if_the_sampler_were_built_anew() -> None:
    logits, params = random_logits(3), {"frequency_penalty": 0.7, "repetition_penalty": 1.4}
    committed = [30, 30, 31, 5]
    grown = Sampler([row(temperature=0.0), row(**params), row(presence_penalty=1.0)], VOCAB, CPU)
    # Column 0 is the last committed token; row 0 has no penalties, and row 2 commits nothing.
    grown.advance(torch.tensor([[5, 1, 0, 0, 0], [5, 30, 9, 9, 9], [5, 7, 7, 7, 7]]), torch.tensor([1, 1, 0]))
    grown.advance(
        torch.tensor([[5, 1, 0, 0, 0], [30, *committed[1:], 9], [5, 7, 7, 7, 7]]), torch.tensor([1, 3, 0])
    )
    anew = Sampler(
        [row(temperature=0.0), row(**params, output=OUTPUT + committed), row(presence_penalty=1.0)],
        VOCAB,
        CPU,
    )
    at = make_input([0, 1, 2], 3)
    assert torch.equal(grown.probabilities(logits, at), anew.probabilities(logits, at))


def mixed_rows() -> list[RowSampling]:
    return [
        row(seed=number, prompt=[*PROMPT, 20 + number], output=[*OUTPUT, number, number], **params)
        for number, params in enumerate(SETTINGS)
    ]


def test_rows_of_a_batch_do_not_touch_each_other() -> None:
    """Two tokens of each row, in any order, among empty seats: bit for bit what the row gives alone."""
    rows = mixed_rows()
    seats: list[RowSampling | None] = [None, *rows, None]
    order = torch.randperm(2 * len(seats), generator=torch.Generator().manual_seed(0)) % len(seats)
    logits, window = (
        random_logits(len(order)),
        torch.tensor([[9, 60, 61]]).repeat(len(seats), 1) + torch.arange(len(seats)).unsqueeze(1),
    )
    index = [i % 3 for i in range(len(order))]
    together = Sampler(seats, VOCAB, CPU)
    at = make_input(order.tolist(), len(seats), index, window)
    chosen, probabilities = together.choose(logits, at), together.probabilities(logits, at)
    for i, seat in enumerate(order.tolist()):
        alone = Sampler([seats[seat]], VOCAB, CPU)
        own = make_input([0], 1, index[i : i + 1], window[seat : seat + 1])
        assert torch.equal(alone.probabilities(logits[i : i + 1], own)[0], probabilities[i]), (
            f"row {seats[seat]}"
        )
        assert alone.choose(logits[i : i + 1], own)[0] == chosen[i], f"row {seats[seat]}"


def test_an_empty_seat_is_greedy() -> None:
    logits = random_logits(3)
    sampler = Sampler([None, row(temperature=1.5)], VOCAB, CPU)
    assert torch.equal(sampler.choose(logits, make_input([0, 0, 0], 2)), logits.argmax(-1))


def test_the_choice_is_the_argmax_of_the_distribution_with_the_positions_noise() -> None:
    rows = mixed_rows()
    num = 4 * len(rows)
    at = make_input(
        [i % len(rows) for i in range(num)],
        len(rows),
        index=[i // len(rows) for i in range(num)],
        window_tokens=torch.full((len(rows), 5), 70),
    )
    sampler, logits = Sampler(rows, VOCAB, CPU), random_logits(num)
    chosen, log_p = sampler.choose(logits, at), sampler.probabilities(logits, at).log()
    key = noise.keys(
        torch.tensor([rows[i % len(rows)].seed for i in range(num)]), at.positions, noise.Stream.CHOICE
    )
    noisy = log_p + noise.gumbel(key, VOCAB)  # one-hot for greedy rows, so that noise changes nothing there
    assert torch.equal(chosen, noisy.argmax(-1))
    assert (chosen != log_p.argmax(-1)).float().mean() > 0.3, (
        "noise decides too few of these choices for the test to mean anything"
    )
    assert torch.equal(sampler.keys(at.rows, at.positions, noise.Stream.CHOICE), key)


def test_choices_follow_their_distribution_over_positions() -> None:
    num, params = 20_000, {"temperature": 0.8, "top_k": 6, "top_p": 0.97}
    logits = random_logits(1, vocab=30, scale=1.0).expand(num, -1)
    sampler = Sampler([row(seed=3, prompt=[1], output=[], stop_ids=frozenset(), **params)], 30, CPU)
    at = SamplingInput(
        torch.zeros(num, dtype=torch.int64),
        torch.zeros(num, dtype=torch.int64),
        torch.arange(num),
        torch.zeros(1, 2, dtype=torch.int64),
    )
    counts = torch.bincount(sampler.choose(logits, at), minlength=30).double()
    expected = num * sampler.probabilities(logits[:1], make_input([0], 1))[0].double()
    left = expected > 0
    assert counts[~left].sum() == 0
    assert 4 <= left.sum() <= 6
    assert ((counts - expected)[left] ** 2 / expected[left]).sum() < 20.5  # 5 degrees of freedom, 0.1 %


def test_greedy_batches_draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "draw", None)
    monkeypatch.setattr(noise, "keys", None)
    logits = random_logits(5)
    sampler = Sampler([row(temperature=0.0), row(temperature=0.0, top_k=3, top_p=0.5, min_p=0.5)], VOCAB, CPU)
    at = make_input([0, 1, 0, 1, 1], 2)
    assert torch.equal(sampler.choose(logits, at), logits.argmax(-1))
    assert torch.equal(
        sampler.probabilities(logits, at), torch.nn.functional.one_hot(logits.argmax(-1), VOCAB).float()
    )
    biased = Sampler([row(temperature=0.0, logit_bias={17: 100.0})], VOCAB, CPU)
    assert biased.choose(logits, make_input([0] * 5, 1)).eq(17).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_handed_in_are_left_as_they_are(dtype: torch.dtype) -> None:
    rows = mixed_rows()
    logits = random_logits(len(rows)).to(dtype)
    before, at = logits.clone(), make_input(range(len(rows)), len(rows))
    sampler = Sampler(rows, VOCAB, CPU)
    sampler.choose(logits, at)
    sampler.probabilities(logits, at)
    assert torch.equal(logits, before)


def test_bfloat16_logits_are_processed_in_float32() -> None:
    logits = random_logits(5).bfloat16()
    sampler, at = (
        Sampler([row(temperature=0.7, top_p=0.9, repetition_penalty=1.2)], VOCAB, CPU),
        make_input([0] * 5, 1),
    )
    assert torch.equal(sampler.probabilities(logits, at), sampler.probabilities(logits.float(), at))
    assert torch.equal(sampler.choose(logits, at), sampler.choose(logits.float(), at))


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
@pytest.mark.parametrize("first", [1, 8, 512, 2000])
def test_a_nucleus_found_by_a_partial_sort_is_that_of_a_full_sort(
    top_p: float, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flat distributions, whose nuclei go beyond the partial sort, in one batch with peaked ones."""
    logits = torch.cat([random_logits(3, 2000, scale=scale, seed=1) for scale in (0.1, 1.0, 6.0)])
    monkeypatch.setattr(sampler_module, "_NUCLEUS_FIRST", first)
    got = Sampler([row(top_p=top_p)], 2000, CPU).probabilities(logits, make_input([0] * 9, 1))
    kept = (got > 0).sum(-1)
    assert kept.max() > 512
    for i in range(9):
        descending, order = logits[i].double().softmax(-1).sort(descending=True)
        num = int((descending.cumsum(0) < top_p).sum()) + 1
        assert set(order[:num].tolist()) == set(got[i].nonzero().flatten().tolist())
        torch.testing.assert_close(
            got[i, order[:num]].double(), descending[:num] / descending[:num].sum(), atol=1e-6, rtol=1e-4
        )


def test_filters_always_leave_the_likeliest_token() -> None:
    logits = random_logits(10)
    for params in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        got = Sampler([row(temperature=1.3, **params)], VOCAB, CPU).probabilities(
            logits, make_input([0] * 10, 1)
        )
        assert torch.equal(got, torch.nn.functional.one_hot(logits.argmax(-1), VOCAB).float())
