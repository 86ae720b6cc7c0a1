"""Cross-entropy through a head in pieces: values, gradients and their types."""

from __future__ import annotations

import pytest
import torch

import ee_models.training.losses as losses
from ee_models.training.losses import hard_label_loss, soft_label_loss


def test_the_loss_in_pieces_is_that_of_all_places_with_autograds_own_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For distributions and for single tokens to learn."""
    generator = torch.Generator().manual_seed(0)
    final = torch.randn(11, 6, generator=generator)
    head = torch.randn(40, 6, generator=generator, requires_grad=True)
    normed = torch.randn(11, 6, generator=generator, requires_grad=True)
    targets = torch.randint(40, (11,), generator=generator)
    logits = normed @ head.T
    of_soft = -((final @ head.T).detach().softmax(-1) * logits.log_softmax(-1)).sum(-1).mean() * 3
    of_hard = torch.nn.functional.cross_entropy(logits, targets) * 3
    expected = [
        (each, *torch.autograd.grad(each, (normed, head), retain_graph=True)) for each in (of_soft, of_hard)
    ]
    for places in (1, 4, 11, 512):
        monkeypatch.setattr(losses, "_LOGITS", places * head.shape[0])
        found = soft_label_loss(normed, final, head) * 3, hard_label_loss(normed, targets, head) * 3
        for loss, right in zip(found, expected, strict=True):
            torch.testing.assert_close((loss, *torch.autograd.grad(loss, (normed, head))), right)


def test_the_loss_of_no_places_is_zero_and_so_is_its_gradient() -> None:
    normed, head = torch.empty(0, 6, requires_grad=True), torch.ones(40, 6, requires_grad=True)
    for loss in (
        soft_label_loss(normed, torch.empty(0, 6), head),
        hard_label_loss(normed, torch.empty(0, dtype=torch.int64), head),
    ):
        of_normed, of_head = torch.autograd.grad(loss, (normed, head))
        assert float(loss.detach()) == 0 and of_normed.shape == (0, 6) and not of_head.any()


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_gradients_have_the_types_of_what_they_are_of(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(11, 6, generator=generator), torch.randn(40, 6, generator=generator)
    final = torch.randn(11, 6, generator=generator)
    normed, head = (value.to(dtype).requires_grad_() for value, dtype in zip(values, dtypes, strict=True))
    loss = soft_label_loss(normed, final, head)
    gradients = torch.autograd.grad(loss, (normed, head))
    assert tuple(each.dtype for each in gradients) == dtypes
    exact = [each.detach().float().requires_grad_() for each in (normed, head)]
    expected = torch.autograd.grad(soft_label_loss(exact[0], final, exact[1]), exact)
    for found, right in zip(gradients, expected, strict=True):
        torch.testing.assert_close(found.float(), right, rtol=0.05, atol=2e-3)


@pytest.mark.parametrize("at_once", [1, 3])
def test_likeliest_tokens_come_in_the_vocabularys_terms(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "_EVAL_PLACES", at_once)
    head, normed = torch.eye(3), torch.tensor([[0.1, 0.9, 0.2], [0.5, 0.1, 0.2]])
    assert losses.likeliest(normed, head).tolist() == [1, 0]
    assert losses.likeliest(normed, head, torch.tensor([7, 3, 5])).tolist() == [3, 7]
