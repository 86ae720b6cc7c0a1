"""How a tier judges the tokens proposed to it. Pure functions: tensors in, (num_accepted, token) out.

At both levels q_len places per row are judged: own choice (or distribution) j stands at the place that proposal j wants.
A row proposes `num_proposed` tokens, the first of them at place 0. `num_accepted` counts leading accepted proposals;
`token` is the tier's own at place num_accepted: corrected if a proposal was rejected there, bonus if none stood there.
Where all of a row's places were proposed for and accepted, there is no own token, and `token` is to be ignored.
"""
from __future__ import annotations

import torch
from torch import Tensor

from .sampling import draw


def coupled(own: Tensor, proposed: Tensor, num_proposed: Tensor) -> tuple[Tensor, Tensor]:
    """own [rows, q_len], proposed [rows, q_len], num_proposed [rows] -> ([rows], [rows]). Accepts what the tier would have chosen."""
    places = torch.arange(own.shape[1], device=own.device)
    num_accepted = _leading((own == proposed) & (places < num_proposed.unsqueeze(-1)))
    return num_accepted, _at(own, num_accepted)


def rejection(p: Tensor, q: Tensor, proposed: Tensor, num_proposed: Tensor, uniform: Tensor, token_keys: Tensor) -> tuple[Tensor, Tensor]:
    """Speculative sampling: accept x with min(1, p(x) / q(x)), else draw from norm(max(p - q, 0)) [Leviathan et al. 2023, alg. 1].

    p, q [rows, q_len, vocab]: the judging tier's and the proposing tier's distributions; proposed, uniform, token_keys
    [rows, q_len]; num_proposed [rows]. Every proposal must have been drawn from its q, and whether it is judged must not
    depend on its value: then accepted and own tokens are distributed as p.
    """
    places = torch.arange(proposed.shape[1], device=p.device)
    is_proposed = places < num_proposed.unsqueeze(-1)
    p_of, q_of = (x.gather(-1, proposed.unsqueeze(-1)).squeeze(-1) for x in (p, q))
    num_accepted = _leading((uniform * q_of < p_of) & is_proposed)
    rows, last = torch.arange(p.shape[0], device=p.device), num_accepted.clamp(max=p.shape[1] - 1)
    target = p[rows, last]
    rejected = (num_accepted < num_proposed).unsqueeze(-1)
    residual = (target - q[rows, last]).clamp_(min=0.0)
    # p == q up to rounding leaves no residual; then a rejection has probability 0, and p itself is as good.
    usable = rejected & (residual.sum(-1, keepdim=True) > 0)
    return num_accepted, draw(torch.where(usable, residual, target).log(), _at(token_keys, num_accepted))


def _leading(accepted: Tensor) -> Tensor:
    """Number of leading True per row: [rows, n] bool -> [rows] int64."""
    return accepted.long().cumprod(-1).sum(-1)


def _at(values: Tensor, place: Tensor) -> Tensor:
    """values [rows, n] at place [rows]; the last one where place is n."""
    return values.gather(1, place.clamp(max=values.shape[1] - 1).unsqueeze(-1)).squeeze(-1)
