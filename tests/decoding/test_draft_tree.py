"""Trees of drafts: their shape, which path is accepted, what a node's history is, and tokens by rank."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from hispec.config import Plan
from hispec.decoding import acceptance
from hispec.decoding.draft_tree import DraftTree
from hispec.sampling.inputs import RowSampling, SamplingInput
from hispec.sampling.sampler import Sampler
from hispec.sampling_params import SamplingParams

SHAPES = [
    DraftTree.chain(0),
    DraftTree.chain(1),
    DraftTree.chain(4),
    DraftTree.branches(1, 5),
    DraftTree.branches(3, 2),
    DraftTree.branches(2, 4),
]


def ancestors(tree: DraftTree, node: int) -> list[int]:
    """The drafts on the way to a node, itself last."""
    way: list[int] = []
    while node > 0:
        way.insert(0, node)
        node = tree.parents[node]
    return way


def test_branches_are_chains_after_one_node() -> None:
    tree = DraftTree.branches(3, 2)
    assert tree.parents == (-1, 0, 1, 2, 0, 4, 5) and tree.depths == (0, 1, 2, 3, 1, 2, 3)
    assert (tree.level(0), tree.level(1), tree.level(3)) == ((0,), (1, 4), (3, 6))
    assert (tree.num_children(0), tree.num_children(1), tree.num_children(3)) == (2, 1, 0)
    assert [tree.is_chain for tree in SHAPES] == [True, True, True, False, False, False]
    assert Plan(3, 6, 2, 2, 3).window == 14 and DraftTree.of(Plan(3, 6, 2, 2)) == DraftTree.chain(2)


@pytest.mark.parametrize("tree", SHAPES, ids=str)
def test_any_prefix_is_a_tree(tree: DraftTree) -> None:
    for num_drafts in range(tree.num_drafts + 2):
        prefix = tree.prefix(num_drafts)
        assert prefix.parents == tree.parents[: num_drafts + 1]
        assert all(parent < node for node, parent in enumerate(prefix.parents))


@pytest.mark.parametrize("tree", SHAPES, ids=str)
def test_tensors_say_what_the_shape_says(tree: DraftTree) -> None:
    tensors = tree.on(torch.device("cpu"))
    assert tensors.nodes.tolist() == list(range(tree.num_nodes)) and tensors.depths.tolist() == list(
        tree.depths
    )
    for node in range(tree.num_nodes):
        way = ancestors(tree, node)
        assert tensors.ancestry[node].nonzero().flatten().tolist() == way
        assert tensors.paths[node].tolist() == [0, *way] + [node] * (tree.depth - len(way))
        assert [child for child in tensors.children[node].tolist() if child] == [
            child for child, parent in enumerate(tree.parents) if parent == node
        ]
    assert sorted(node for level in tensors.levels for node in level.tolist()) == list(range(tree.num_nodes))


@pytest.mark.parametrize("tree", SHAPES, ids=str)
def test_one_path_is_accepted_the_longest_of_those_that_are_right(tree: DraftTree) -> None:
    draw = random.Random(0)
    rows = 300
    own = torch.tensor([[draw.randrange(2) for _ in range(tree.num_nodes)] for _ in range(rows)])
    proposed = torch.tensor([[draw.randrange(2) for _ in range(tree.num_drafts)] for _ in range(rows)]).view(
        rows, tree.num_drafts
    )
    counts = torch.tensor([draw.randrange(tree.num_nodes) for _ in range(rows)])
    unsure = torch.rand(rows, tree.num_nodes, generator=torch.Generator().manual_seed(0)) < 0.2
    for given in (None, unsure):
        num_accepted, last, token = acceptance.coupled(own, proposed, counts, tree, given)
        taken = torch.zeros_like(unsure) if given is None else given
        for row in range(rows):

            def right(node: int, row: int = row, taken: torch.Tensor = taken) -> bool:
                parent = tree.parents[node]
                return node <= int(counts[row]) and bool(
                    proposed[row, node - 1] == own[row, parent] or taken[row, parent]
                )

            accepted = [node for node in range(tree.num_nodes) if all(map(right, ancestors(tree, node)))]
            best = min(accepted, key=lambda node: (-tree.depths[node], node))
            assert (int(last[row]), int(num_accepted[row])) == (best, tree.depths[best])
            assert int(token[row]) == int(own[row, best])


def test_a_nodes_history_is_its_path_alone() -> None:
    """Columns 0 to 2 are a chain, then a tree of two branches of two begins at column 2."""
    tree = DraftTree.branches(2, 2).on(torch.device("cpu"))
    nodes, first = torch.arange(5), torch.full((5,), 2)
    given = SamplingInput(
        torch.zeros(5, dtype=torch.int64),
        first + nodes,
        torch.zeros(5),
        torch.zeros(1, 8, dtype=torch.int64),
        first,
        2 + tree.paths[:, 1:],
    )
    assert [row.nonzero().flatten().tolist() for row in given.tentative()] == [
        [1, 2],
        [1, 2, 3],
        [1, 2, 3, 4],
        [1, 2, 5],
        [1, 2, 5, 6],
    ]
    begins = SamplingInput(
        given.rows,
        nodes,
        given.positions,
        given.window_tokens,
        torch.zeros(5, dtype=torch.int64),
        tree.paths[:, 1:],
    )
    assert [row.nonzero().flatten().tolist() for row in begins.tentative()] == [
        [],
        [1],
        [1, 2],
        [3],
        [3, 4],
    ], "the committed token counts already"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_by_rank_begin_with_the_choice(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=12 if temperature else 0)
    sampler = Sampler([RowSampling(params, 3, [1], [], frozenset())], 40, torch.device("cpu"))
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(1)) * 3
    logits[:10] = 0.0  # all tied
    at = SamplingInput(
        torch.zeros(50, dtype=torch.int64),
        torch.zeros(50, dtype=torch.int64),
        torch.arange(50),
        torch.ones(1, 2, dtype=torch.int64),
    )
    best = sampler.choose_top(logits, at, 5)
    assert torch.equal(best[:, 0], sampler.choose(logits, at)) and torch.equal(
        best[:, :1], sampler.choose_top(logits, at, 1)
    )
    assert all(len(set(row)) == 5 for row in best.tolist())
    if temperature == 0.0:
        for row, tokens in enumerate(best[10:].tolist(), start=10):
            assert all(
                float(logits[row, one]) >= float(logits[row, other]) for one, other in pairwise(tokens)
            )
    else:
        assert not torch.equal(
            best,
            sampler.choose_top(
                logits, SamplingInput(at.rows, at.columns, at.positions + 50, at.window_tokens), 5
            ),
        ), "noise is by position"
