"""How a tier judges the tokens proposed to it. Pure functions on tensors.

At both levels a row's places are the nodes of a tree, mostly a chain: the tier's own choice (or distribution) after a node
stands at its place, and is what the node's children are judged by. `num_accepted` counts the accepted drafts, which are one
path; `token` is the tier's own after the last of them: corrected if a proposal was rejected there, bonus if none stood there.
A proposal may come after the last place; where it is accepted there is no own token, and `token` is to be ignored.
"""
from __future__ import annotations

import torch
from torch import Tensor

from ee_models.kernels import runs_triton

from ..sampling.sampler import draw
from .draft_tree import DraftTree


def coupled(own: Tensor, proposed: Tensor, num_proposed: Tensor, tree: DraftTree, unsure: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Accepts what the tier would have chosen, along one path of the tree.

    own [rows, q_len]: the tier's choice after each node; proposed [rows, drafts]: the tokens of nodes 1, 2, ...; num_proposed [rows]:
    how many of these there are; unsure [rows, q_len] bool: where any proposal is accepted -> (num_accepted [rows], the last accepted
    node [rows], token [rows]). Of several paths the longest is taken, and of these the first.
    """
    if tree.num_drafts == 0:  # prompt lookup found nothing: such a round is to cost no more than a plain one
        nothing = torch.zeros_like(num_proposed)
        return nothing, nothing, own[:, 0]
    if tree.is_chain and runs_triton(own.device):
        from . import accept_triton

        num_accepted, token = accept_triton.coupled_chain(own, proposed, num_proposed, unsure)
        return num_accepted, num_accepted, token
    shape = tree.on(own.device)
    parents = shape.parents[1:]
    right = own[:, parents] == proposed
    if unsure is not None:
        right |= unsure[:, parents]
    right &= shape.nodes[1:] <= num_proposed.unsqueeze(-1)
    # A node is accepted if it and all drafts on the way to it are right. Node 0 always is.
    num_right = torch.nn.functional.pad(right.float(), (1, 0)) @ shape.ancestry.T
    score = torch.where(num_right == shape.depths, shape.depths * tree.num_nodes + tree.num_nodes - 1 - shape.nodes, 0)
    best = score.amax(-1)
    num_accepted, last = best // tree.num_nodes, tree.num_nodes - 1 - best % tree.num_nodes
    return num_accepted, last, _at(own, last)


def rejection(p: Tensor, q: Tensor, proposed: Tensor, num_proposed: Tensor, uniform: Tensor, token_keys: Tensor) -> tuple[Tensor, Tensor]:
    """Speculative sampling: accept x with min(1, p(x) / q(x)), else draw from norm(max(p - q, 0)) [Leviathan et al. 2023, alg. 1].

    p, q [rows, q_len, vocab]: the judging tier's and the proposing tier's distributions; proposed, uniform, token_keys
    [rows, q_len], a chain's; num_proposed [rows]. Every proposal must have been drawn from its q, and whether it is judged must not
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
