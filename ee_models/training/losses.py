"""Cross-entropy and likeliest tokens through a head, without ever holding the logits of all places.

For a vocabulary of 49k a few thousand places take gigabytes of logits, several times over. Here a bounded
number of places is worked through at a time, forward and backward at once: the gradient of the loss by the
logits is simply q - p, where q is the softmax of the logits and p the distribution to be learnt.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Worked through at a time: enough places to fill matrix kernels, and logits of 67 MB in float32 at most, of
# which there are two, and one in the head's dtype; on a GPU, which waits for each kernel's launch, of 1 GB.
_PLACES, _LOGITS = 256, 2**24
_GPU_PLACES, _GPU_LOGITS = 8192, 2**28
_EVAL_PLACES = 1024  # of which the likeliest tokens are told at a time


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
        (num_places, _), vocab = normed.shape, head.shape[0]
        places, logits = (_GPU_PLACES, _GPU_LOGITS) if normed.is_cuda else (_PLACES, _LOGITS)
        at_once = max(1, min(places, logits // vocab, num_places))
        total = torch.zeros((), device=normed.device)
        of_normed = torch.empty_like(normed, dtype=head.dtype) if ctx.needs_input_grad[0] else None
        of_head = torch.zeros_like(head, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        # One piece of memory for all parts: on a CPU, that of each new tensor of this size would first have
        # to be had from the system, which takes longer than what is done with it.
        products = torch.empty(at_once, vocab, dtype=head.dtype, device=normed.device)
        all_q, all_p = torch.empty(2, at_once, vocab, device=normed.device)
        for start in range(0, num_places, at_once):
            x, label = normed[start : start + at_once].to(head.dtype), labels[start : start + at_once]
            product, q, p = (each[: len(x)] for each in (products, all_q, all_p))
            q.copy_(torch.mm(x, head.T, out=product))
            if label.dtype == torch.int64:
                total -= q.gather(1, label[:, None]).sum()
            else:
                p.copy_(torch.mm(label.to(head.dtype), head.T, out=product))
                _softmax_(p)
                total -= torch.dot(p.view(-1), q.view(-1))
            total += _softmax_(q).sum()  # as sum_v p(v) = 1
            if label.dtype == torch.int64:
                q.scatter_add_(1, label[:, None], q.new_full((len(x), 1), -1.0))
            else:
                q.sub_(p)
            product.copy_(q)
            if of_normed is not None:
                torch.mm(product, head, out=of_normed[start : start + at_once])
            if of_head is not None:
                of_head += (product.T @ x).float()
        ctx.save_for_backward(of_normed, of_head)
        ctx.num_places, ctx.dtypes = max(num_places, 1), (normed.dtype, head.dtype)
        return total / max(num_places, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        of_normed, of_head = ctx.saved_tensors
        scale = grad / ctx.num_places
        of_normed, of_head = (
            None if each is None else (each * scale).to(dtype)
            for each, dtype in zip((of_normed, of_head), ctx.dtypes, strict=True)
        )
        return of_normed, of_head, None


def likeliest(normed: Tensor, head: Tensor, vocabulary: Tensor | None = None) -> Tensor:
    """The token [places] with the greatest logit; those of `head` are the tokens of `vocabulary`."""
    parts = normed.to(head.dtype).split(_EVAL_PLACES)
    best = torch.cat([F.linear(part, head).argmax(-1) for part in parts])
    return best if vocabulary is None else vocabulary.to(best.device)[best]


def _softmax_(logits: Tensor) -> Tensor:
    """logits [places, vocab] become their softmax -> log sum_v exp(logits) [places, 1]."""
    largest = logits.amax(-1, keepdim=True)
    total = logits.sub_(largest).exp_().sum(-1, keepdim=True)
    logits.div_(total)
    return largest + total.log()
