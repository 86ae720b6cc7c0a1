"""Passes for tests of Triton's attention, with what the sdpa twin and a softmax in float64 say of them.

In every pass all slots that no token sees hold NaN, and so does all memory that the backend allocates.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from cache.paged_kv import PagedKV
from cache.view import BatchView, slots_of
from ee_models.attention import AttentionBackend, triton_pages
from ee_models.attention.sdpa import SdpaAttention
from tests.helpers.token_trees import random_parents as ordered_parents
from tests.helpers.token_trees import shuffled

DEVICE = (
    torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
)
LAYER = 1
LONGEST = 300
Heads = tuple[int, int, int]  # heads, kv_heads, head_dim
HEADS = (2, 1, 16)


@dataclass(frozen=True)
class Row:
    """A sequence of `context_len` tokens, of which a pass attends with the last `q_len`; or with a tree of
    q_len nodes on the others: parents[i] is the parent of node i, -1 for one that has only the context.
    `early`: paths begin so many positions below the context's end.
    """

    context_len: int
    q_len: int
    seed: int = 0
    parents: tuple[int, ...] | None = None
    early: int = 0

    @classmethod
    def tree(cls, context_len: int, parents: Sequence[int], seed: int = 0, early: int = 0) -> Row:
        return cls(context_len + len(parents), len(parents), seed, tuple(parents), early)

    def data(self, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values, queries [LONGEST, heads, head_dim]: of each position, then of each node; a token's do
        not depend on what it is attended with."""
        generator = torch.Generator().manual_seed(self.seed)
        keys, values, queries = (
            torch.randn(LONGEST, count, heads[2], generator=generator)
            for count in (heads[1], heads[1], heads[0])
        )
        return keys, values, queries

    def path(self, node: int) -> list[int]:
        """Its ancestors, the oldest first, and the node."""
        assert self.parents is not None
        return [*(self.path(self.parents[node]) if self.parents[node] >= 0 else []), node]


@dataclass(frozen=True)
class Pass:
    queries: Tensor
    kv: PagedKV
    view: BatchView

    @classmethod
    def of(
        cls,
        rows: Sequence[Row],
        heads: Heads = HEADS,
        block_size: int = 8,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        bucket: int = 0,
    ) -> Pass:
        """Lays rows on scattered blocks, each node on a slot of its own. `bucket`: a max_context_len larger
        than it need be."""
        generator = torch.Generator().manual_seed(seed)
        max_blocks = max(-(-row.context_len // block_size) for row in rows)
        num_blocks = len(rows) * max_blocks + 2
        tables = torch.randperm(num_blocks, generator=generator)[: len(rows) * max_blocks].view(
            len(rows), max_blocks
        )
        kv = PagedKV(LAYER + 1, num_blocks, block_size, heads[1], heads[2], dtype, DEVICE)
        kv.data.fill_(float("nan"))
        has_trees = any(row.parents is not None for row in rows)
        queries, positions, slots, starts, paths = [], [], [], [], []
        for row, table in zip(rows, tables, strict=True):
            # In a tree, place n + i of the row's own slots is node i's: a slot, not a position.
            own_slots = slots_of(table.unsqueeze(0), torch.arange(row.context_len).unsqueeze(0), block_size)[
                0
            ]
            keys, values, row_queries = row.data(heads)
            for target, source in ((kv.keys(LAYER), keys), (kv.values(LAYER), values)):
                target[own_slots.to(DEVICE)] = source[: row.context_len].to(DEVICE, dtype)
            n = row.context_len - row.q_len
            queries.append(row_queries[n : row.context_len])
            slots.append(own_slots[n:])
            for i in range(row.q_len):
                if row.parents is None:
                    positions.append(n + i)
                    starts.append(n + i + 1)
                    paths.append([])
                else:
                    start, path = max(0, n - row.early), row.path(i)
                    positions.append(n + len(path) - 1)
                    starts.append(start)
                    paths.append(own_slots[start:n].tolist() + own_slots[[n + j for j in path]].tolist())
        depth = max((len(path) for path in paths), default=0)
        q_lens = torch.tensor([0, *(row.q_len for row in rows)])
        view = BatchView(
            positions=torch.tensor(positions, dtype=torch.int64, device=DEVICE),
            slots=torch.cat(slots).to(DEVICE),
            block_tables=tables.to(DEVICE),
            cu_q_lens=q_lens.cumsum(0).to(DEVICE),
            max_q_len=int(q_lens.max()),
            max_context_len=max(bucket, *(row.context_len for row in rows)),
            paths=(
                torch.tensor([path + [-1] * (depth - len(path)) for path in paths], device=DEVICE)
                if has_trees
                else None
            ),
            path_starts=torch.tensor(starts, device=DEVICE) if has_trees else None,
        )
        return cls(torch.cat(queries).to(DEVICE, dtype), kv, view)

    def attend(self, backend: AttentionBackend) -> Tensor:
        """With NaN in whatever the backend allocates."""

        def poisoned(*args: Any, **kwargs: Any) -> Tensor:
            return torch.full(*args, float("nan"), **kwargs)

        with mock.patch.object(triton_pages.torch, "empty", poisoned):
            return backend.attend(self.queries, self.kv, LAYER, backend.prepare(self.view, self.kv))

    def exact(self) -> Tensor:
        """[tokens, heads * head_dim] in float64: softmax over the slots of each token, one by one."""
        view, out = self.view, []
        keys, values = self.kv.keys(LAYER).cpu().double(), self.kv.values(LAYER).cpu().double()
        tables, positions, queries = (
            view.block_tables.cpu(),
            view.positions.tolist(),
            self.queries.cpu().double(),
        )
        for token, row in enumerate(view.row_ids().tolist()):
            seen = torch.arange(positions[token] + 1).unsqueeze(0)
            start = (
                positions[token] + 1
                if view.path_starts is None
                else min(positions[token] + 1, int(view.path_starts[token]))
            )
            slots = slots_of(tables[row : row + 1], seen[:, :start], self.kv.block_size)[0]
            if view.paths is not None:
                slots = torch.cat((slots, view.paths[token, : positions[token] + 1 - start].cpu()))
            group = queries.shape[1] // keys.shape[1]
            own_keys, own_values = (x[slots].repeat_interleave(group, dim=1) for x in (keys, values))
            weights = (
                torch.einsum("hd,shd->hs", queries[token], own_keys).mul(queries.shape[2] ** -0.5).softmax(-1)
            )
            out.append(torch.einsum("hs,shd->hd", weights, own_values).flatten())
        return torch.stack(out)


def random_parents(num_nodes: int, generator: random.Random) -> list[int]:
    """A random tree, its nodes in any order."""
    return shuffled(ordered_parents(num_nodes, generator), generator)


def forest(seed: int) -> list[Row]:
    """Trees, a chain, siblings without a root, a single node and a row of nothing, on contexts at and around
    the edges of tiles."""
    generator = random.Random(seed)
    shapes: list[Sequence[int]] = [
        random_parents(8, generator),
        [-1, 0, 1],
        random_parents(5, generator),
        [-1] * 2,
        [-1],
    ]
    generator.shuffle(shapes)
    contexts = (0, 29, 61, 64, 130)
    trees = [
        Row.tree(context_len, shape, seed, generator.choice((0, 3)))
        for context_len, shape in zip(contexts, shapes, strict=True)
    ]
    return [*trees[:2], Row(50, 0), *trees[2:]]


def assert_close(found: Tensor, batch: Pass) -> None:
    """Against the twin, within what float32 rounds."""
    torch.testing.assert_close(found, batch.attend(SdpaAttention()), atol=5e-6, rtol=0)


def relative_error(found: Tensor, batch: Pass) -> float:
    expected = batch.exact()
    return float((found.cpu().double() - expected).norm() / expected.norm())
