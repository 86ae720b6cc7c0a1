"""Cross-entropy through a head, without ever holding the logits of all places.

For a vocabulary of 49k a few thousand places take gigabytes of logits, several times over. Here a bounded
number of places is worked through at a time, forward and backward at once: the gradient of the loss by the
logits is simply q - p, where q is the softmax of the logits and p the distribution to be learnt.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_LOGITS = 2**22  # at a time: 17 MB in float32, which a CPU's cache still holds


def soft_label_loss(normed: Tensor, final: Tensor, head: Tensor) -> Tensor:
    """Mean over places of -sum_v p(v) log q(v), in nats; p = softmax(final · head), q = softmax(normed ·
    head).

    normed [places, hidden] and head [vocab, hidden] get gradients, as far as they need them; those of the
    head are of q alone. final [places, hidden] is constant. Without places the loss is 0.
    """
    return _CrossEntropy.apply(normed, head, final.detach())


def hard_label_loss(normed: Tensor, targets: Tensor, head: Tensor) -> Tensor:
    """Mean over places of -log q(target), in nats; q = softmax(normed · head).

    normed [places, hidden] and head [vocab, hidden] get gradients, as far as they need them; targets [places]
    int64. Without places the loss is 0.
    """
    return _CrossEntropy.apply(normed, head, targets)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, normed: Tensor, head: Tensor, labels: Tensor) -> Tensor:
        """labels: [places] int64 targets, or [places, hidden] states whose logits say what to learn."""
        num_places, at_once = normed.shape[0], max(1, _LOGITS // head.shape[0])
        total = torch.zeros((), device=normed.device)
        of_normed = torch.empty_like(normed) if ctx.needs_input_grad[0] else None
        of_head = torch.zeros_like(head, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for start in range(0, num_places, at_once):
            part = slice(start, start + at_once)
            x, label = normed[part].to(head.dtype), labels[part]
            logits = F.linear(x, head).float()
            log_sum = logits.logsumexp(-1, keepdim=True)
            if label.dtype == torch.int64:
                total += (log_sum - logits.gather(1, label[:, None])).sum()
                difference = logits.sub_(log_sum).exp_()
                difference.scatter_add_(1, label[:, None], torch.full_like(log_sum, -1.0))
            else:
                p = F.linear(label.to(head.dtype), head).float().softmax(-1)
                # sum_v p(v) = 1
                total += log_sum.sum() - torch.dot(p.view(-1), logits.view(-1))
                difference = logits.sub_(log_sum).exp_().sub_(p)
            difference = difference.to(head.dtype)
            if of_normed is not None:
                of_normed[part] = difference @ head
            if of_head is not None:
                of_head += (difference.T @ x).float()
        ctx.save_for_backward(of_normed, of_head)
        ctx.num_places, ctx.head_dtype = max(num_places, 1), head.dtype
        return total / max(num_places, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        of_normed, of_head = ctx.saved_tensors
        scale = grad / ctx.num_places
        return (
            None if of_normed is None else of_normed * scale,
            None if of_head is None else (of_head * scale).to(ctx.head_dtype),
            None,
        )
