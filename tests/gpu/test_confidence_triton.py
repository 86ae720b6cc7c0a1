"""The probabilities that confidence is measured by, on a GPU against torch; in Triton's interpreter where
there is no GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from hispec.sampling import confidence
from hispec.sampling.confidence_triton import log_sum_exp
from hispec.sampling.logits import Logits
from hispec.sampling.noise_triton import argmax_and_sum

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 7, 260, 4096, 9001])
def test_log_sum_exp_is_torchs(vocab: int, dtype: torch.dtype) -> None:
    logits = (8 * torch.randn(5, vocab, generator=torch.Generator().manual_seed(vocab))).to(DEVICE, dtype)
    logits[1, 1:] = -torch.inf
    logits[2] = 90.0
    logits[3, : vocab // 2] = -torch.inf
    torch.testing.assert_close(
        log_sum_exp(logits), logits.double().logsumexp(-1).float(), atol=2e-6, rtol=2e-6
    )


def test_rows_may_lie_apart() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    assert torch.equal(log_sum_exp(logits[::2, :33]), log_sum_exp(logits[::2, :33].contiguous()))


def test_probabilities_are_those_of_a_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = (4 * torch.randn(6, 300, generator=torch.Generator().manual_seed(1))).to(DEVICE)
    tokens = torch.randint(0, 300, (6, 2), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    monkeypatch.setattr(confidence, "runs_triton", lambda device: False)
    twins = confidence.max_probability(logits), confidence.probability_of(logits, tokens)
    monkeypatch.setattr(confidence, "runs_triton", lambda device: True)
    torch.testing.assert_close(
        (confidence.max_probability(logits), confidence.probability_of(logits, tokens)),
        twins,
        atol=1e-6,
        rtol=1e-5,
    )
    torch.testing.assert_close(twins[0], logits.softmax(-1).amax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 7, 1024, 3001])
def test_the_sum_that_comes_with_the_likeliest_is_one_over_its_probability(
    vocab: int, dtype: torch.dtype
) -> None:
    logits = (8 * torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab))).to(DEVICE, dtype)
    logits[1, 1:] = -torch.inf
    logits[2] = 90.0
    logits[3, : vocab // 2] = -torch.inf  # whole blocks of them
    logits[4] = -torch.inf
    best, sums = argmax_and_sum(logits)
    assert torch.equal(best[:4], logits[:4].float().argmax(-1)) and sums[4].isnan()
    taken = [0, 1, 2, 3, 5]
    torch.testing.assert_close(
        sums[taken].reciprocal(), logits[taken].float().softmax(-1).amax(-1), atol=1e-6, rtol=1e-5
    )


@pytest.mark.parametrize("has_vocabulary", [False, True])
def test_logits_that_will_be_asked_for_probabilities_find_them_with_the_likeliest(
    monkeypatch: pytest.MonkeyPatch, has_vocabulary: bool
) -> None:
    values = (4 * torch.randn(5, 40, generator=torch.Generator().manual_seed(3))).to(DEVICE)
    vocabulary = torch.arange(100, 60, -1, device=DEVICE) if has_vocabulary else None
    monkeypatch.setattr(confidence, "runs_triton", lambda device: False)
    twin = Logits(values, 120 if has_vocabulary else 40, vocabulary, asks_probability=True)
    rows = torch.tensor([4, 1], device=DEVICE)
    own = twin.likeliest()
    expected = own, twin.max_probability(), twin.max_probability(rows), twin.probability_of(own)
    monkeypatch.setattr(confidence, "runs_triton", lambda device: True)
    asked = Logits(values, 120 if has_vocabulary else 40, vocabulary, asks_probability=True)
    own = asked.likeliest()

    def fail(*_: object) -> None:
        raise AssertionError("probabilities are there already")

    monkeypatch.setattr(confidence, "probability_of", fail)
    monkeypatch.setattr(confidence, "max_probability", fail)
    found = own, asked.max_probability(), asked.max_probability(rows), asked.probability_of(own.view(-1))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
