"""The probabilities that confidence is measured by, on a GPU against torch; in Triton's interpreter where
there is no GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from hispec.sampling import confidence
from hispec.sampling.confidence_triton import log_sum_exp

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
