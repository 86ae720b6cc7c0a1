"""Logits of an exit: what a pass has found out is what would be looked for, over all tokens or some."""

from __future__ import annotations

import pytest
import torch

from hispec.sampling.logits import Logits

VOCAB = 50


@pytest.mark.parametrize("size", [VOCAB, 12])
@pytest.mark.parametrize("is_known", [False, True])
def test_the_likeliest_and_its_probability_are_those_of_all_tokens(size: int, is_known: bool) -> None:
    generator = torch.Generator().manual_seed(size)
    values = 3 * torch.randn(5, size, generator=generator)
    vocabulary = None if size == VOCAB else torch.randperm(VOCAB, generator=generator)[:size]
    wide = torch.full((5, VOCAB), -torch.inf)
    wide[:, torch.arange(VOCAB) if vocabulary is None else vocabulary] = values
    known = ()
    if is_known:
        known = wide.argmax(-1), (values - values.amax(-1, keepdim=True)).exp().sum(-1)
    logits, softmax = Logits(values, VOCAB, vocabulary, *known), wide.softmax(-1)
    assert torch.equal(logits.wide(), wide)
    likeliest = logits.likeliest()
    assert torch.equal(likeliest, wide.argmax(-1))
    rows = torch.tensor([4, 0, 0])
    torch.testing.assert_close(logits.max_probability(), softmax.amax(-1))
    torch.testing.assert_close(logits.max_probability(rows), softmax.amax(-1)[rows])
    others = wide.topk(2).indices[:, 1]
    # The last of these begins where the likeliest do.
    for tokens in (likeliest, likeliest.clone(), others, likeliest.unsqueeze(-1).squeeze(-1)):
        expected = softmax.gather(1, tokens.unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(logits.probability_of(tokens), expected, atol=1e-6, rtol=1e-5)
