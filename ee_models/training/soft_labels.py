"""Soft-label cross-entropy through a frozen head, without ever holding the logits of all places.

For a vocabulary of 49k a few thousand places take gigabytes of logits, several times over. Here a bounded
number of places is worked through at a time, forward and backward at once: the gradient of the loss by the
logits is simply q - p.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_PLACES = 512  # at a time: 17 MB of float32 for 8k tokens, which a CPU's cache still holds


def soft_label_loss(normed: Tensor, final: Tensor, head: Tensor) -> Tensor:
    """Mean over places of -sum_v p(v) log q(v), in nats; p = softmax(final · head), q = softmax(normed ·
    head).

    normed [places, hidden] gets a gradient; final [places, hidden] and head [vocab, hidden] are constants.
    """
    return _SoftLabelLoss.apply(normed, final, head)


class _SoftLabelLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, normed: Tensor, final: Tensor, head: Tensor) -> Tensor:
        num_places = normed.shape[0]
        total = torch.zeros((), device=normed.device)
        gradient = torch.empty_like(normed)
        for start in range(0, num_places, _PLACES):
            part = slice(start, start + _PLACES)
            p = F.linear(final[part].to(head.dtype), head).float().softmax(-1)
            logits = F.linear(normed[part].to(head.dtype), head).float()
            log_sum = logits.logsumexp(-1, keepdim=True)
            total += log_sum.sum() - torch.dot(p.view(-1), logits.view(-1))  # sum_v p(v) = 1
            if ctx.needs_input_grad[0]:
                difference = logits.sub_(log_sum).exp_().sub_(p)
                gradient[part] = difference.to(head.dtype) @ head
        ctx.save_for_backward(gradient.div_(max(num_places, 1)))
        return total / max(num_places, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad, None, None
