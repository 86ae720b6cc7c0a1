"""DraftTree: the static shape of a draft cycle. A chain is the tree of one branch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the scheduler reads plans, and runs without torch
    import torch
    from torch import Tensor

    from ..config import Plan


@dataclass(frozen=True)
class DraftTree:
    """Node 0 is the last token before the cycle, nodes 1, 2, ... are drafts; each follows its parent in the
    text.

    parents   [node]: its parent, a lower number; -1 for node 0. The first `depth` drafts are the likeliest
              chain, so that any prefix of the nodes is a tree too: what a row has no room for is cut off at
              the end
    """

    parents: tuple[int, ...]

    @classmethod
    @lru_cache(maxsize=1024)
    def branches(cls, length: int, num_branches: int = 1) -> DraftTree:
        """`num_branches` chains of `length` drafts, all after node 0."""
        return cls(
            (
                -1,
                *(
                    0 if step == 0 else branch * length + step
                    for branch in range(num_branches)
                    for step in range(length)
                ),
            )
        )

    @classmethod
    def of(cls, plan: Plan) -> DraftTree:
        """A draft cycle of the plan: B chains of K drafts after its first token."""
        return cls.branches(plan.num_draft_tokens, plan.num_branches)

    @classmethod
    def chain(cls, length: int) -> DraftTree:
        """`length` drafts, each after the one before."""
        return cls.branches(length)

    @lru_cache(maxsize=1024)  # noqa: B019 - trees are few, and shared
    def prefix(self, num_drafts: int) -> DraftTree:
        """The tree of the first drafts alone."""
        return self if num_drafts >= self.num_drafts else DraftTree(self.parents[: num_drafts + 1])

    @property
    def num_nodes(self) -> int:
        return len(self.parents)

    @property
    def num_drafts(self) -> int:
        return self.num_nodes - 1

    @cached_property
    def is_chain(self) -> bool:
        """Whether every node follows the one before it."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """[node]: number of drafts on the way from node 0 to it, itself included."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        return max(self.depths)

    def level(self, depth: int) -> tuple[int, ...]:
        """The nodes at this depth, in order."""
        return tuple(node for node, at in enumerate(self.depths) if at == depth)

    def num_children(self, depth: int) -> int:
        """Children that every node at this depth has: the r-th takes the r-th likeliest token."""
        counts = {self.parents.count(node) for node in self.level(depth)}
        assert len(counts) == 1, "nodes at one depth must have as many children each"
        return counts.pop()

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """[node][depth]: the nodes on the way from node 0 to it; from its own depth on, itself."""
        paths: list[list[int]] = []
        for node, parent in enumerate(self.parents):
            way = [] if parent < 0 else paths[parent][: self.depths[node]]
            paths.append(way + [node] * (self.depth + 1 - len(way)))
        return tuple(map(tuple, paths))

    def on(self, device: torch.device) -> TreeTensors:
        """The tree as tensors on a device, made once."""
        return _tensors(self, device)


@dataclass(frozen=True)
class TreeTensors:
    """A tree on a device: nodes [node]: 0, 1, ...; depths, parents [node] (0 for node 0); paths [node, depth
    + 1]; children [node, most], 0 = none; all int64.

    levels    nodes at each depth
    ancestry  [node, node] float32: 1 where the second is a draft on the way to the first, itself included
    """

    nodes: Tensor
    depths: Tensor
    parents: Tensor
    paths: Tensor
    children: Tensor
    ancestry: Tensor
    levels: tuple[Tensor, ...]


@cache  # never dropped: captured graphs read them at their addresses
def _tensors(tree: DraftTree, device: torch.device) -> TreeTensors:
    import torch

    with torch.inference_mode(False):
        ancestry = torch.zeros(tree.num_nodes, tree.num_nodes, dtype=torch.float32)
        for node, way in enumerate(tree.paths):
            ancestry[node, list(way)] = 1.0
        ancestry[:, 0] = 0.0
        of_node = [
            [child for child, parent in enumerate(tree.parents) if parent == node]
            for node in range(tree.num_nodes)
        ]
        most = max(map(len, of_node))
        children = torch.tensor([nodes + [0] * (most - len(nodes)) for nodes in of_node], dtype=torch.int64)
        depths, parents = torch.tensor(tree.depths), torch.tensor(tree.parents).clamp(min=0)
        return TreeTensors(
            nodes=torch.arange(tree.num_nodes, device=device),
            depths=depths.to(device),
            parents=parents.to(device),
            paths=torch.tensor(tree.paths, device=device),
            children=children.to(device),
            ancestry=ancestry.to(device),
            levels=tuple(torch.tensor(tree.level(depth), device=device) for depth in range(tree.depth + 1)),
        )
