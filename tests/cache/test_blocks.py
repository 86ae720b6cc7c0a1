"""BlockPool against a naive model: what is held, cached and free; what a prefix finds; what is evicted, and
in which order."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from cache.blocks import BlockPool, BlockTable
from tests.helpers.interrupts import Interrupts

NUM_BLOCKS = 8


@dataclass(eq=False)
class Node:
    """One published block in the naive model, where the tree of prefixes is walked by linear search."""

    parent: Node | None
    tokens: list[int]
    block: int


@dataclass(eq=False)
class Sequence:
    """What the naive model knows of one table. `node`: the last of its leading blocks that are published."""

    table: BlockTable
    tokens: list[int]
    blocks: list[int]
    node: Node | None
    num_published: int


@dataclass
class Model:
    free: set[int]
    cached: list[int] = field(
        default_factory=list
    )  # in the order in which they fell idle: the first is evicted first
    nodes: list[Node] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)

    def find(self, parent: Node | None, tokens: list[int]) -> Node | None:
        return next((node for node in self.nodes if node.parent is parent and node.tokens == tokens), None)

    def drop(self, sequence: Sequence, keep: int) -> None:
        """Blocks from `keep` on, the deepest first, are given back."""
        while len(sequence.blocks) > keep:
            block = sequence.blocks.pop()
            if any(block in other.blocks for other in self.sequences):
                continue
            if any(node.block == block for node in self.nodes):
                self.cached.append(block)
            else:
                self.free.add(block)


token_lists = st.lists(st.integers(0, 1), max_size=13)


class PoolMachine(RuleBasedStateMachine):
    sequences = Bundle("sequences")

    @initialize(block_size=st.integers(1, 4))
    def start(self, block_size: int) -> None:
        self.size = block_size
        self.pool = BlockPool(NUM_BLOCKS, block_size)
        self.model = Model(free=set(range(NUM_BLOCKS)))
        self.content: dict[
            int, tuple[int, ...]
        ] = {}  # block -> all tokens up to its end, as whoever published it wrote them

    @rule(target=sequences, tokens=token_lists)
    def allocate(self, tokens: list[int]) -> Sequence:
        before = copy.deepcopy(self.pool.__dict__)
        held = self.pool.find_held(tokens)
        assert self.pool.__dict__ == before, "a look changed something"
        table, num_found = self.pool.allocate(tokens)
        model, node, blocks = self.model, None, []
        for start in range(0, len(tokens) - self.size + 1, self.size):
            found = model.find(node, tokens[start : start + self.size])
            if found is None:
                break
            node = found
            blocks.append(found.block)
        model.cached = [block for block in model.cached if block not in blocks]
        assert table.blocks == blocks
        assert held == set(blocks) & {block for other in model.sequences for block in other.blocks}
        assert num_found == len(blocks) * self.size
        for i, block in enumerate(blocks):
            assert self.content[block] == tuple(tokens[: (i + 1) * self.size]), (
                "a block was found by another prefix than it was published under"
            )
        sequence = Sequence(table, list(tokens), blocks, node, len(blocks))
        model.sequences.append(sequence)
        return sequence

    @rule(sequence=sequences, tokens=token_lists)
    def extend(self, sequence: Sequence, tokens: list[int]) -> None:
        model = self.model
        length = len(sequence.tokens) + len(tokens)
        missing = max(0, -(-length // self.size) - len(sequence.blocks))
        before = copy.deepcopy((self.pool.__dict__, sequence.table))
        if not self.pool.extend(sequence.table, length):
            assert missing > len(model.free) + len(model.cached), (
                "extend refused although there were blocks enough"
            )
            assert (self.pool.__dict__, sequence.table) == before, "a refused extend changed something"
            return
        new = sequence.table.blocks[len(sequence.blocks) :]
        assert sequence.table.blocks[: len(sequence.blocks)] == sequence.blocks
        assert len(new) == missing
        num_evicted = max(0, missing - len(model.free))
        assert set(new[: missing - num_evicted]) <= model.free, "a block was evicted while another was free"
        assert new[missing - num_evicted :] == model.cached[:num_evicted], (
            "eviction is not in the order of falling idle"
        )
        model.free -= set(new)
        model.cached = model.cached[num_evicted:]
        model.nodes = [node for node in model.nodes if node.block not in new]
        sequence.blocks += new
        sequence.tokens += tokens

    @rule(sequence=sequences, data=st.data())
    def publish(self, sequence: Sequence, data: st.DataObject) -> None:
        num_positions = data.draw(st.integers(0, min(len(sequence.tokens), len(sequence.blocks) * self.size)))
        self.pool.publish(sequence.table, sequence.tokens, num_positions)
        for i in range(sequence.num_published, num_positions // self.size):
            tokens = sequence.tokens[i * self.size : (i + 1) * self.size]
            node = self.model.find(sequence.node, tokens)
            if node is None:
                node = Node(sequence.node, tokens, sequence.blocks[i])
                self.model.nodes.append(node)
                self.content[node.block] = tuple(sequence.tokens[: (i + 1) * self.size])
            sequence.node, sequence.num_published = node, i + 1

    @rule(sequence=sequences, data=st.data())
    def truncate(self, sequence: Sequence, data: st.DataObject) -> None:
        num_positions = data.draw(st.integers(0, len(sequence.tokens)))
        keep = -(-num_positions // self.size)
        if keep < sequence.num_published:
            before = copy.deepcopy((self.pool.__dict__, sequence.table))
            with pytest.raises(ValueError, match=f"truncate to {num_positions} positions"):
                self.pool.truncate(sequence.table, num_positions)
            assert (self.pool.__dict__, sequence.table) == before, "a refused truncate changed something"
            return
        self.pool.truncate(sequence.table, num_positions)
        self.model.drop(sequence, keep)
        sequence.tokens = sequence.tokens[:num_positions]

    @rule(sequence=consumes(sequences))
    def free(self, sequence: Sequence) -> None:
        self.pool.free(sequence.table)
        self.model.drop(sequence, 0)
        self.model.sequences.remove(sequence)
        assert sequence.table == BlockTable()

    @invariant()
    def pool_is_as_the_model_says(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check(sequence.table for sequence in self.model.sequences)
        for sequence in self.model.sequences:
            assert sequence.table.blocks == sequence.blocks
            assert sequence.table.num_published == sequence.num_published
        held = {block for sequence in self.model.sequences for block in sequence.blocks}
        assert self.pool.num_held == len(held)
        assert (
            self.pool.num_available == NUM_BLOCKS - len(held) == len(self.model.free) + len(self.model.cached)
        )


PoolMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
TestPoolAgainstNaiveModel = PoolMachine.TestCase


def published(pool: BlockPool, tokens: list[int]) -> BlockTable:
    """A live table over `tokens`, all of its full blocks published."""
    table, _ = pool.allocate(tokens)
    assert pool.extend(table, len(tokens))
    pool.publish(table, tokens, len(tokens))
    return table


def test_equal_prefixes_share_blocks_and_free_returns_them_all() -> None:
    pool = BlockPool(6, 2)
    first = published(pool, [1, 2, 3, 4, 5])
    second, num_found = pool.allocate([1, 2, 3, 4, 9, 9])
    assert (num_found, second.blocks) == (4, first.blocks[:2])
    assert pool.num_held == 3
    alone = [pool.held_alone(tables) for tables in ([first], [second], [first, second])]
    assert alone == [{first.blocks[2]}, set(), set(first.blocks)]
    pool.free(first)
    assert pool.num_held == 2
    pool.free(second)
    pool.check([])
    assert (pool.num_held, pool.num_available) == (0, 6)


@pytest.mark.parametrize(
    ("prompt", "num_found"),
    [
        ([7, 7, 3, 4], 0),  # the same second block after another first one
        ([-2, 0, 3, 4], 0),  # hash(-2) == hash(-1)
        ([3, 4, -1, 0], 0),  # the same blocks in another order
        ([-1, 0, 4, 3], 2),
        ([-1, 0, 3], 2),  # only whole blocks
        ([-1, 0, 3, 4, 5], 4),
        ([-1], 0),
        ([], 0),
    ],
)
def test_a_prefix_finds_its_own_blocks_and_no_others(prompt: list[int], num_found: int) -> None:
    pool = BlockPool(8, 2)
    pool.free(published(pool, [-1, 0, 3, 4]))
    assert pool.allocate(prompt)[1] == num_found


def test_equal_tokens_published_by_two_are_found_once_and_both_go_on() -> None:
    pool = BlockPool(6, 2)
    tables = [BlockTable(), BlockTable()]
    for table, tokens in zip(tables, ([1, 2, 3, 4], [1, 2, 5, 6]), strict=True):
        assert pool.extend(table, 4)
        pool.publish(table, tokens, 4)
    assert pool.allocate([1, 2, 3, 4])[0].blocks == tables[0].blocks
    assert pool.allocate([1, 2, 5, 6])[0].blocks == [tables[0].blocks[0], tables[1].blocks[1]]


def test_a_republished_prefix_does_not_find_continuations_of_its_evicted_twin() -> None:
    pool = BlockPool(3, 1)
    first, duplicate = BlockTable(), BlockTable()
    for table in (first, duplicate):
        assert pool.extend(table, 1)
        pool.publish(table, [1], 1)
    pool.free(first)  # block of [1], as published, idle
    assert pool.extend(duplicate, 2)
    assert pool.extend(duplicate, 3)  # evicts it
    pool.publish(duplicate, [1, 2], 2)  # published after a prefix that is gone: reached by nobody
    table, num_found = pool.allocate([1, 2])
    assert (table.blocks, num_found) == ([], 0)


@pytest.mark.parametrize("num_evicted", [0, 1, 2, 3, 4])
def test_the_deepest_blocks_are_evicted_first(num_evicted: int) -> None:
    pool = BlockPool(4, 1)
    pool.free(published(pool, [1, 2, 3, 4]))
    assert pool.extend(BlockTable(), num_evicted)
    assert pool.allocate([1, 2, 3, 4])[1] == 4 - num_evicted


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    pool = BlockPool(3, 1)
    for token in (1, 2, 3):
        pool.free(published(pool, [token]))
    pool.free(pool.allocate([1])[0])  # used again, so 2 is now the oldest
    assert pool.extend(BlockTable(), 1)
    assert [pool.allocate([token])[1] for token in (1, 2, 3)] == [1, 0, 1]


def test_unpublished_blocks_are_used_up_before_any_published_one_is_evicted() -> None:
    pool = BlockPool(4, 1)
    pool.free(published(pool, [1, 2]))
    assert pool.extend(BlockTable(), 2)
    assert pool.allocate([1, 2])[1] == 2


def test_check_finds_a_table_that_is_missing_or_unknown() -> None:
    pool = BlockPool(4, 2)
    table = published(pool, [1, 2, 3])
    pool.check([table])
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check([])
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check([table, BlockTable(blocks=[3])])


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0), (-1, 4)])
def test_a_pool_without_room_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(
        ValueError, match=f"num_blocks={num_blocks} and block_size={block_size} must be at least 1"
    ):
        BlockPool(num_blocks, block_size)


def test_blocks_for_rounds_up() -> None:
    pool = BlockPool(4, 16)
    assert [pool.blocks_for(n) for n in (0, 1, 15, 16, 17, 32, 33)] == [0, 1, 1, 1, 2, 2, 3]


def prefixes(pool: BlockPool) -> dict[tuple[int, ...], int]:
    """The block that each published prefix finds, all of them walked from the root."""
    found: dict[tuple[int, ...], int] = {}
    todo: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    for prefix_id, prefix in todo:
        for (parent, tokens), (block, own_id) in pool._published.items():
            if parent == prefix_id:
                found[(*prefix, *tokens)] = block
                todo.append((own_id, (*prefix, *tokens)))
    ids = [own_id for _, own_id in pool._published.values()]
    assert len(set(ids)) == len(ids), "two prefixes have one id"
    return found


@pytest.mark.parametrize("at", [1, 2, 3])
def test_after_an_interrupt_at_any_line_blocks_add_up_and_prefixes_find_their_own(at: int) -> None:
    pool, interrupts = BlockPool(7, 2), Interrupts("cache/blocks.py", at=at)
    texts = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9, 9, 9], [8, 8, 8, 8, 8]]
    content: dict[int, tuple[int, ...]] = {}  # what is written in a block, and all before it
    count, quiet = 0, 0
    while quiet < 3:
        count, tables = len(interrupts.lines), [BlockTable() for _ in texts]
        for step in range(20):
            which = step % 3
            table, text = tables[which], texts[which]
            try:
                with interrupts.armed():
                    if step < 3:
                        tables[which], _ = pool.allocate(text)
                    elif step < 9 and pool.extend(table, len(text)):
                        for at_block, block in enumerate(table.blocks):
                            content[block] = tuple(text[: 2 * at_block + 2])
                        pool.publish(table, text, len(text))
                    elif step < 12:
                        pool.truncate(table, table.num_published * 2)
                    elif step < 15 + which:
                        pool.free(table)
                    elif step == 19 and quiet == 1:
                        pool.forget()
            except KeyboardInterrupt:
                pool.repair(tables)
            pool.check(tables)
            for prefix, block in prefixes(pool).items():
                assert content[block] == prefix, "a prefix finds what another has written"
        for table in tables:
            pool.free(table)
        pool.check([])
        quiet = quiet + 1 if len(interrupts.lines) == count else 0
    assert count > 50
    pool.forget()
    assert not prefixes(pool) and pool.num_available == 7
