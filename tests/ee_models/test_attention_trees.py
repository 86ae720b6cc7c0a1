"""Passes over token trees: a node sees the committed positions, its ancestors and itself, with the bits of a
chain of just these."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from cache.paged_kv import PagedKV
from cache.view import BatchView, slots_of
from ee_models.attention import AttentionBackend, numba_pages, select_backend
from ee_models.attention.numba_pages import NumbaAttention
from ee_models.attention.sdpa import SdpaAttention
from ee_models.decoder import Decoder
from tests.ee_models.test_attention import CPU, INVARIANT_HEADS, LAYER, Pass, Row, use_threads
from tests.helpers.support import random_prompts
from tests.helpers.token_trees import random_parents, shuffled

HEADS = (6, 2, 16)
BLOCK_SIZES = [1, 5, 16]
# Trees of up to eight levels on these begin, end and lie around the edges of tiles of 64.
CONTEXTS = [0, 1, 7, 57, 61, 63, 64, 65, 120, 127, 128, 200]


@dataclass(frozen=True)
class Tree:
    """Nodes on `context_len` committed positions; parents[i] is the parent of node i, -1 for a node that has
    only the context.

    committed, nodes   the context's, and each node's, (keys, values, queries) [n, heads, head_dim]
    """

    context_len: int
    parents: list[int]
    committed: tuple[Tensor, Tensor, Tensor]
    nodes: tuple[Tensor, Tensor, Tensor]

    @classmethod
    def random(
        cls, context_len: int, parents: list[int], heads: tuple[int, int, int] = HEADS, seed: int = 0
    ) -> Tree:
        num_heads, num_kv_heads, head_dim = heads
        generator = torch.Generator().manual_seed(seed * 1009 + context_len)
        context, nodes = (
            tuple(
                torch.randn(n, count, head_dim, generator=generator)
                for count in (num_kv_heads, num_kv_heads, num_heads)
            )
            for n in (context_len, len(parents))
        )
        return cls(context_len, parents, context, nodes)

    def path(self, node: int) -> list[int]:
        """Its ancestors, the oldest first, and the node."""
        above = self.path(self.parents[node]) if self.parents[node] >= 0 else []
        return [*above, node]

    def chain(self, node: int) -> Row:
        """The node's path as a row of its own, of which a pass attends with all nodes."""
        path = self.path(node)
        keys, values, queries = (
            torch.cat((context, nodes[path]))
            for context, nodes in zip(self.committed, self.nodes, strict=True)
        )
        return Row(keys, values, queries, self.context_len + len(path), len(path))


def random_forest(seed: int, heads: tuple[int, int, int] = HEADS) -> list[Tree]:
    """Rows at all CONTEXTS: trees of many sizes and orders, chains, single tokens, and siblings without a
    root."""
    generator = random.Random(seed)
    shapes = [
        lambda: random_parents(generator.randint(2, 20), generator),
        lambda: shuffled(random_parents(generator.randint(8, 36), generator), generator),
        lambda: list(range(-1, generator.randint(1, 7))),
        lambda: [-1],
        lambda: [-1] * generator.randint(2, 6),
    ]
    return [
        Tree.random(context_len, shapes[(i + seed) % len(shapes)](), heads, seed)
        for i, context_len in enumerate(CONTEXTS)
    ]


def tree_pass(
    trees: Sequence[Tree], block_size: int = 16, seed: int = 0, early: int = 3, past_own: int | None = None
) -> Pass:
    """Lays contexts on scattered blocks and nodes on scattered slots. All other slots hold large numbers,
    which nothing must read with any weight, and the block tables end with the longest context.

    early: paths begin up to so many positions below the context's end. past_own: what paths hold past a
    token's own position; if None, slots of the large numbers.
    """
    generator, choose = torch.Generator().manual_seed(seed), random.Random(seed)
    num_kv_heads, head_dim = trees[0].nodes[0].shape[1:]
    max_blocks = max(1, max(-(-tree.context_len // block_size) for tree in trees))
    num_nodes = sum(len(tree.parents) for tree in trees)
    num_table_blocks = len(trees) * max_blocks
    num_blocks = num_table_blocks + -(-2 * num_nodes // block_size)
    order = torch.randperm(num_blocks, generator=generator)
    tables = order[:num_table_blocks].view(len(trees), max_blocks)
    others = slots_of(
        order[num_table_blocks:].view(1, -1),
        torch.arange((num_blocks - num_table_blocks) * block_size).unsqueeze(0),
        block_size,
    )[0]
    others = others[torch.randperm(len(others), generator=generator)]
    slots, unused = others[:num_nodes], others[num_nodes:]
    kv = PagedKV(LAYER + 1, num_blocks, block_size, num_kv_heads, head_dim, torch.float32, CPU)
    kv.data.fill_(1e4)
    positions, starts, paths, first = [], [], [], 0
    depth = early + max(len(tree.path(node)) for tree in trees for node in range(len(tree.parents)))
    for tree, table in zip(trees, tables, strict=True):
        row_slots = slots[first : first + len(tree.parents)].tolist()
        context_slots = slots_of(table.unsqueeze(0), torch.arange(tree.context_len).unsqueeze(0), block_size)[
            0
        ]
        for at, data in ((context_slots, tree.committed), (torch.tensor(row_slots), tree.nodes)):
            kv.keys(LAYER)[at], kv.values(LAYER)[at] = data[0], data[1]
        for node in range(len(tree.parents)):
            path = tree.path(node)
            start = max(0, tree.context_len - choose.randint(0, early))
            seen = [*context_slots[start:].tolist(), *(row_slots[i] for i in path)]
            filling = [choose.choice(unused.tolist()) if past_own is None else past_own] * (depth - len(seen))
            paths.append(seen + filling)
            starts.append(start)
            positions.append(tree.context_len + len(path) - 1)
        first += len(tree.parents)
    q_lens = torch.tensor([0, *(len(tree.parents) for tree in trees)])
    view = BatchView(
        positions=torch.tensor(positions),
        slots=slots,
        block_tables=tables.contiguous(),
        cu_q_lens=q_lens.cumsum(0),
        max_q_len=int(q_lens.max()),
        max_context_len=max(positions) + 1,
        paths=torch.tensor(paths),
        path_starts=torch.tensor(starts),
    )
    return Pass(torch.cat([tree.nodes[2] for tree in trees]), kv, view)


def by_chains(
    trees: Sequence[Tree], backend: AttentionBackend, kv_dtype: torch.dtype = torch.float32
) -> Tensor:
    """[tokens, heads * head_dim]: each node's output at the end of a chain pass over its path."""
    chains = [Pass.of([tree.chain(node)]) for tree in trees for node in range(len(tree.parents))]
    return torch.stack([chain.over(kv_dtype).attend(backend)[-1] for chain in chains])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_a_nodes_output_is_that_of_its_path_as_a_chain(block_size: int, seed: int) -> None:
    trees = random_forest(seed)
    batch = tree_pass(trees, block_size, seed)
    by_numba, by_sdpa = batch.attend(NumbaAttention()), batch.attend(SdpaAttention())
    assert torch.equal(by_numba, by_chains(trees, NumbaAttention()))
    torch.testing.assert_close(by_sdpa, by_chains(trees, SdpaAttention()), atol=1e-5, rtol=0)
    torch.testing.assert_close(by_numba, by_sdpa, atol=1e-5, rtol=0)


@pytest.mark.parametrize("heads", INVARIANT_HEADS)
def test_a_nodes_bits_are_those_of_a_chain_for_all_groups_and_head_sizes(heads: tuple[int, int, int]) -> None:
    trees = random_forest(1, heads)
    assert torch.equal(tree_pass(trees).attend(NumbaAttention()), by_chains(trees, NumbaAttention()))


@pytest.mark.parametrize("context_len", [*range(54, 66), 126, 128])
def test_a_nodes_bits_are_those_of_a_chain_wherever_its_path_crosses_a_tile(context_len: int) -> None:
    """Three branches of ten, which part at once: each has its own keys on both sides of the edge."""
    tree = Tree.random(context_len, [-1, *(node - 3 if node > 3 else 0 for node in range(1, 31))])
    assert torch.equal(
        tree_pass([tree], early=0).attend(NumbaAttention()), by_chains([tree], NumbaAttention())
    )


def test_a_nodes_bits_do_not_depend_on_slots_units_or_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    trees = random_forest(2)
    expected = tree_pass(trees).attend(NumbaAttention())
    for num_threads, tokens_per_unit, block_size in ((1, 1, 16), (2, 3, 1), (3, 16, 5), (5, 64, 64)):
        use_threads(num_threads, monkeypatch)
        monkeypatch.setattr(numba_pages, "_TOKENS_PER_UNIT", tokens_per_unit)
        monkeypatch.setattr(numba_pages, "_UNITS_PER_THREAD", 1)
        found = tree_pass(trees, block_size, seed=block_size, early=num_threads).attend(NumbaAttention())
        assert torch.equal(found, expected), f"{tokens_per_unit} tokens in a unit, blocks of {block_size}"


@pytest.mark.parametrize("name", ["numba", "sdpa"])
@pytest.mark.parametrize("context_len", [0, 5, 62, 64])
def test_a_node_sees_its_ancestors_and_itself_and_nothing_else_of_the_tree(
    name: str, context_len: int
) -> None:
    backend, tree = (
        select_backend(name, CPU, torch.float32),
        Tree.random(context_len, random_parents(12, random.Random(4))),
    )
    batch = tree_pass([tree])
    before = batch.attend(backend)
    for other in range(12):
        slot = batch.view.slots[other]
        old = batch.kv.data[LAYER, :, slot].clone()
        batch.kv.data[LAYER, :, slot] = batch.kv.data[LAYER, :, slot].neg() + 1
        after = batch.attend(backend)
        changed = [node for node in range(12) if not torch.equal(before[node], after[node])]
        assert changed == [node for node in range(12) if other in tree.path(node)], f"node {other}"
        batch.kv.data[LAYER, :, slot] = old


def test_trees_over_kv_in_bfloat16_give_the_bits_of_its_numbers_in_float32() -> None:
    batch = tree_pass(random_forest(3))
    small, whole = batch.over(torch.bfloat16), batch.rounded(torch.bfloat16)
    assert torch.equal(small.attend(NumbaAttention()), whole.attend(NumbaAttention()))


@pytest.mark.parametrize("name", ["numba", "sdpa"])
def test_what_stands_in_a_path_past_the_tokens_own_position_is_not_read(name: str) -> None:
    backend, trees = select_backend(name, CPU, torch.float32), random_forest(3)
    batch, other = tree_pass(trees), tree_pass(trees, past_own=-1)
    assert not torch.equal(batch.view.paths, other.view.paths)
    assert torch.equal(batch.attend(backend), other.attend(backend))


@pytest.mark.parametrize("name", ["numba", "sdpa"])
def test_a_chain_may_be_told_by_paths_or_by_its_table_alone(name: str) -> None:
    """A row without a tree in a pass over trees: its path_starts lie past its own positions, and its paths
    hold nothing."""
    backend = select_backend(name, CPU, torch.float32)
    batch = Pass.of(
        [
            Row.random(context_len, q_len, HEADS)
            for context_len, q_len in ((70, 5), (64, 1), (130, 20), (9, 9))
        ],
        block_size=5,
    )
    expected = batch.attend(backend)
    without = replace(
        batch.view, paths=torch.full((batch.view.num_tokens, 4), -1), path_starts=batch.view.positions + 1
    )
    by_table = Pass(batch.queries, batch.kv, without).attend(backend)
    starts = (batch.view.positions - 2).clamp(min=0)
    last_three = torch.minimum(starts.unsqueeze(1) + torch.arange(3), batch.view.positions.unsqueeze(1))
    all_slots = slots_of(batch.view.block_tables[batch.view.row_ids()], last_three, 5)
    by_paths = Pass(batch.queries, batch.kv, replace(batch.view, paths=all_slots, path_starts=starts)).attend(
        backend
    )
    for found in (by_table, by_paths):
        assert torch.equal(found, expected) if name == "numba" else torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["numba", "sdpa"])
@pytest.mark.parametrize("starts", [(200, 70), (70, 200), (199, 0), (64, 130), (130, 128)])
def test_a_rows_tokens_may_part_anywhere(name: str, starts: tuple[int, int]) -> None:
    """Two tokens of one row, whose paths hold other keys and values than the table does, from different
    positions on."""
    backend, ours, others = (
        select_backend(name, CPU, torch.float32),
        Row.random(200, 2, HEADS),
        Row.random(200, 2, HEADS, seed=1),
    )
    batch = Pass.of([ours, others], block_size=5)
    by_table, by_path = slots_of(batch.view.block_tables, torch.arange(200).expand(2, -1), 5)
    view = replace(
        batch.view,
        positions=torch.tensor([198, 199]),
        slots=by_table[198:],
        block_tables=batch.view.block_tables[:1],
        cu_q_lens=torch.tensor([0, 2]),
        paths=torch.stack([torch.cat((by_path[start:], torch.full((start,), -1))) for start in starts]),
        path_starts=torch.tensor(starts),
    )
    found, expected = Pass(batch.queries[:2], batch.kv, view).attend(backend), []
    for start, position in zip(starts, (198, 199), strict=True):
        keys, values = (
            torch.cat((a[:start], b[start:]))
            for a, b in ((ours.keys, others.keys), (ours.values, others.values))
        )
        expected.append(Pass.of([Row(keys, values, ours.queries, position + 1, 1)]).attend(backend)[0])
    assert (
        torch.equal(found, torch.stack(expected))
        if name == "numba"
        else torch.allclose(found, torch.stack(expected), atol=1e-5)
    )


PROMPT_LENGTHS = (60, 3, 17)
# Of each row: a tree whose nodes stand level by level, a chain, and siblings that stand before their parent.
PARENTS = ([-1, 0, 0, 0, 1, 1, 3, 4, 6, 7, 7], [-1, 0, 1], [2, 2, -1, 0])


class TreeRunner:
    """A decoder's passes over rows of PROMPT_LENGTHS committed tokens with trees of PARENTS on them, in
    blocks of 5."""

    def __init__(self, decoder: Decoder) -> None:
        config = decoder.config
        self.decoder, self.num_layers = decoder, config.num_layers
        self.tables = torch.randperm(3 * 16, generator=torch.Generator().manual_seed(0)).view(3, 16)
        self.kv = PagedKV(
            self.num_layers, 3 * 16 + 8, 5, config.num_kv_heads, config.head_dim, torch.float32, CPU
        )
        self.trees = [
            Tree.random(length, parents) for length, parents in zip(PROMPT_LENGTHS, PARENTS, strict=True)
        ]
        self.tokens = random_prompts([len(parents) for parents in PARENTS], seed=5)
        for row, prompt in enumerate(random_prompts(PROMPT_LENGTHS, seed=6)):
            self.run_chain(row, 0, prompt)

    def run(self, tokens: Tensor, view: BatchView) -> Tensor:
        """Logits after all layers, run as two spans as a round does."""
        hidden = self.decoder.embed(tokens)
        for lo, hi in ((0, 4), (4, self.num_layers)):
            hidden = self.decoder.run_layers(hidden, lo, hi, self.kv, view)
        return self.decoder.logits(hidden, self.num_layers)

    def run_chain(self, row: int, start: int, tokens: list[int]) -> Tensor:
        """Logits of `tokens` at the positions from `start` on, through the block table."""
        positions = torch.arange(start, start + len(tokens))
        slots = slots_of(self.tables[row : row + 1], positions.unsqueeze(0), 5)[0]
        end = start + len(tokens)
        view = BatchView(
            positions, slots, self.tables[row : row + 1], torch.tensor([0, len(tokens)]), len(tokens), end
        )
        return self.run(torch.tensor(tokens), view)

    def run_trees(self) -> tuple[Tensor, Tensor]:
        """Logits and slots of all nodes, which lie in blocks that no table names."""
        num_nodes = [len(parents) for parents in PARENTS]
        slots = (
            3 * 16 * 5 + torch.randperm(8 * 5, generator=torch.Generator().manual_seed(1))[: sum(num_nodes)]
        )
        positions, paths, starts = [], [], []
        for tree, own in zip(self.trees, slots.split(num_nodes), strict=True):
            for node in range(len(tree.parents)):
                path = own[tree.path(node)].tolist()
                positions.append(tree.context_len + len(path) - 1)
                paths.append(path + [-1] * (6 - len(path)))
                starts.append(tree.context_len)
        ends = torch.tensor([0, *num_nodes]).cumsum(0)
        view = BatchView(
            torch.tensor(positions),
            slots,
            self.tables,
            ends,
            max(num_nodes),
            max(positions) + 1,
            torch.tensor(paths),
            torch.tensor(starts),
        )
        return self.run(torch.tensor([token for tokens in self.tokens for token in tokens]), view), slots


def assert_same(found: Tensor, expected: Tensor, decoder: Decoder) -> None:
    if decoder.row_invariant:
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


def test_logits_over_a_tree_are_those_of_each_path_as_a_chain(tiny_decoder: Decoder) -> None:
    """And once an accepted path has been moved to the row's own slots, decoding goes on as if the tree had
    never been."""
    assert isinstance(tiny_decoder.attention, NumbaAttention)
    runner = TreeRunner(tiny_decoder)
    logits, slots = runner.run_trees()
    with_trees, first = runner.kv.data.clone(), 0
    for row, tree in enumerate(runner.trees):
        for node in range(len(tree.parents)):
            path, n = tree.path(node), tree.context_len
            runner.kv.data.copy_(with_trees)
            chain_logits = runner.run_chain(row, n, [runner.tokens[row][i] for i in path])
            assert_same(logits[first:][path], chain_logits, tiny_decoder)
            targets = slots_of(runner.tables[row : row + 1], torch.arange(n, n + len(path)).unsqueeze(0), 5)[
                0
            ]
            by_chain, next_by_chain = (
                runner.kv.data[:, :, targets],
                runner.run_chain(row, n + len(path), [65]),
            )
            runner.kv.data.copy_(with_trees)
            runner.kv.move(0, runner.num_layers, slots[first:][path], targets)
            assert_same(runner.kv.data[:, :, targets], by_chain, tiny_decoder)
            assert_same(runner.run_chain(row, n + len(path), [65]), next_by_chain, tiny_decoder)
        first += len(tree.parents)
