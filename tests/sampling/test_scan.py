"""Scans of logits: torch's argmax and softmax, also where much of the vocabulary is -inf."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hispec.sampling import confidence, scan_numba


def logits_of(rows: int, vocab: int, live: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(vocab)
    logits = 5 * torch.randn(rows, vocab, generator=generator)
    if live is not None:
        for row in logits:
            row[torch.randperm(vocab, generator=generator)[live:]] = -torch.inf
    return logits


# Vocabularies below, at and past a vector, a block, and blocks that end within one.
@pytest.mark.parametrize("vocab", [1, 3, 15, 64, 65, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("live", [None, 1, 40])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_scans_are_torchs(rows: int, vocab: int, live: int | None) -> None:
    logits = logits_of(rows, vocab, live)
    best = logits.argmax(-1)
    assert torch.equal(scan_numba.argmax(logits), best)
    assert torch.equal(scan_numba.argmax(logits.T.contiguous().T), best)
    probabilities = logits.softmax(-1)
    for tokens in (best.unsqueeze(1), torch.arange(min(vocab, 7)).expand(rows, -1)):
        expected = probabilities.gather(1, tokens)
        torch.testing.assert_close(confidence.probability_of(logits, tokens), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(confidence.max_probability(logits), probabilities.amax(-1))
    for chosen in (torch.arange(rows).flip(0), torch.arange(rows)[:1].repeat(3), torch.arange(0)):
        found = confidence.max_probability(logits, chosen)
        torch.testing.assert_close(found, probabilities.amax(-1)[chosen])
        assert torch.equal(found, confidence.max_probability(logits[chosen]))


@pytest.mark.parametrize("places", [(0, 1), (15, 16), (700, 1024), (63, 4999), (1023, 1024, 1025)])
def test_of_equal_logits_the_lowest_token_is_chosen(places: tuple[int, ...]) -> None:
    logits = logits_of(2, 5000)
    logits[1, list(places)] = 100.0
    assert scan_numba.argmax(logits)[1] == places[0]


def test_a_row_of_nothing_but_nan_gives_a_token() -> None:
    assert scan_numba.argmax(torch.full((1, 3000), torch.nan)).tolist() == [0]


def test_a_row_without_any_likelihood_has_no_probability() -> None:
    assert confidence.max_probability(torch.full((1, 3000), -torch.inf)).isnan().all()
