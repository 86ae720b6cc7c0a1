"""BlockPool: which sequences hold which KV blocks. Integers only, no tensors."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

_ROOT = 0  # the prefix id of "nothing before this block"


@dataclass
class BlockTable:
    """The blocks of one sequence, in order of position.

    num_published   leading blocks whose tokens are in the prefix cache, in these blocks or in others
    prefix_id       identity of the tokens in those blocks
    """

    blocks: list[int] = field(default_factory=list)
    num_published: int = 0
    prefix_id: int = _ROOT


class BlockPool:
    """Hands out `num_blocks` blocks of `block_size` positions, and shares full blocks of equal prefixes.

    A block is *held* (one or more tables refer to it), *cached* (nobody refers to it, but its content is
    published and may be found again; evicted least recently used first) or *free*. Published content is found
    by (identity of everything before, the block's tokens), compared exactly: two prefixes are never confused.

    An interrupt (KeyboardInterrupt) anywhere in a method leaves tables that hold what they say, and nothing
    wrong to be found; but the pool may have lost count of blocks, until `repair` counts them anew.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks={num_blocks} and block_size={block_size} must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._num_refs = [0] * num_blocks
        self._key: list[tuple[int, tuple[int, ...]] | None] = [None] * num_blocks
        # (prefix id, tokens) -> (block, prefix id after it)
        self._published: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
        self._next_prefix_id = _ROOT + 1

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated: the free ones, and the cached ones, which are evicted for it."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_positions: int) -> int:
        return -(-num_positions // self.block_size)

    def held_alone(self, tables: Iterable[BlockTable]) -> set[int]:
        """Blocks that no tables but these hold: those that `free` of all of them makes available."""
        held = Counter(block for table in tables for block in table.blocks)
        return {block for block, count in held.items() if count == self._num_refs[block]}

    def find_held(self, token_ids: Sequence[int]) -> set[int]:
        """Blocks that `allocate` would find and that tables hold already. Changes nothing."""
        return {block for block, _ in self._find(token_ids, BlockTable()) if self._num_refs[block] > 0}

    def allocate(self, token_ids: Sequence[int]) -> tuple[BlockTable, int]:
        """A new table that holds the longest published prefix of `token_ids` in whole blocks -> (table,
        positions found)."""
        table = BlockTable()
        for block, prefix_id in self._find(token_ids, table):
            table.prefix_id = prefix_id
            self._acquire(block)
            table.blocks.append(block)
        table.num_published = len(table.blocks)
        return table, table.num_published * self.block_size

    def find_more(self, table: BlockTable, token_ids: Sequence[int]) -> tuple[BlockTable, int, list[int]]:
        """Looks for more of `token_ids` than is published of `table`, beyond which its blocks must hold
        nothing yet -> (a table to take its place, positions found in all, blocks of `table` that are not in
        it, which `give_back` takes)."""
        found = list(self._find(token_ids, table))
        if not found:
            return table, table.num_published * self.block_size, []
        begin, end = table.num_published, table.num_published + len(found)
        for block, _ in found:
            self._acquire(block)
        blocks = [*table.blocks[:begin], *(block for block, _ in found), *table.blocks[end:]]
        return BlockTable(blocks, end, found[-1][1]), end * self.block_size, table.blocks[begin:end]

    def give_back(self, blocks: list[int]) -> None:
        """Blocks that no table has any longer."""
        while blocks:
            self._release(blocks.pop())

    def extend(self, table: BlockTable, num_positions: int) -> bool:
        """Makes `table` cover `num_positions`. False, with nothing changed, if blocks do not suffice."""
        num_missing = -(-num_positions // self.block_size) - len(table.blocks)
        if num_missing <= 0:  # nearly always, and this runs for every row and round: without `blocks_for`
            return True
        if num_missing > self.num_available:
            return False
        for _ in range(num_missing):
            block = self._free.pop() if self._free else self._evict()
            self._num_refs[block] = 1
            table.blocks.append(block)
        return True

    def truncate(self, table: BlockTable, num_positions: int) -> None:
        """Gives back the blocks beyond `num_positions`. Raises ValueError if one of them is published, which
        none above a committed length is."""
        keep = self.blocks_for(num_positions)
        if keep < table.num_published:
            raise ValueError(
                f"truncate to {num_positions} positions would drop published blocks ({table.num_published} of"
                f" {self.block_size})"
            )
        while len(table.blocks) > keep:
            self._release(table.blocks.pop())

    def publish(self, table: BlockTable, token_ids: Sequence[int], num_positions: int) -> None:
        """Puts the full blocks below `num_positions`, which must be committed, into the prefix cache."""
        size = self.block_size
        while (table.num_published + 1) * size <= num_positions:
            start = table.num_published * size
            key = (table.prefix_id, tuple(token_ids[start : start + size]))
            found = self._published.get(key)
            if found is None:
                block = table.blocks[table.num_published]
                found = (block, self._next_prefix_id)
                self._next_prefix_id += 1  # before it is used: two prefixes never get the same
                self._key[block] = key
                self._published[key] = found
            table.prefix_id, table.num_published = found[1], table.num_published + 1

    def free(self, table: BlockTable) -> None:
        """Gives back all blocks of `table`; the deepest first, so that a prefix outlives its continuations in
        the cache."""
        blocks = table.blocks
        table.blocks, table.num_published, table.prefix_id = [], 0, _ROOT
        self.give_back(blocks)

    def retract(self, table: BlockTable) -> None:
        """Takes what `table` holds out of the prefix cache: what its blocks hold is not to be trusted. Tables
        that share them keep them."""
        for block in table.blocks:
            key, self._key[block] = self._key[block], None
            if key is not None:
                del self._published[key]

    def forget(self) -> None:
        """Empties the prefix cache, whose blocks no longer hold what they are published for. Raises
        ValueError while a table holds blocks."""
        if self.num_held:
            raise ValueError(f"{self.num_held} blocks are held; free their tables first")
        free = list(range(self.num_blocks - 1, -1, -1))
        self._key, self._published, self._cached, self._free = (
            [None] * self.num_blocks,
            {},
            OrderedDict(),
            free,
        )

    def repair(self, tables: Iterable[BlockTable]) -> None:
        """Counts anew what `tables`, which are all that live, hold, after a method was interrupted. Other
        blocks are cached if they are found by their content, else free. Can itself be interrupted and called
        again."""
        num_refs = self._count_refs(tables)
        key: list[tuple[int, tuple[int, ...]] | None] = [None] * self.num_blocks
        published = {}
        for content, found in self._published.items():
            if self._key[found[0]] == content:  # else interrupted while it was published or evicted
                key[found[0]], published[content] = content, found
        idle = [block for block, count in enumerate(num_refs) if count == 0]
        free = [block for block in reversed(idle) if key[block] is None]
        by_use = [block for block in self._cached if num_refs[block] == 0 and key[block] is not None]
        cached = OrderedDict.fromkeys(by_use + [block for block in idle if key[block] is not None])
        state = {
            "_num_refs": num_refs,
            "_key": key,
            "_published": published,
            "_free": free,
            "_cached": cached,
        }
        self.__dict__ |= state  # at once

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Asserts that held, cached and free blocks add up, and that no table but `tables` holds any."""
        num_refs = self._count_refs(tables)
        assert num_refs == self._num_refs, "reference counts differ from the tables that hold blocks"
        idle = [*self._free, *self._cached]
        assert len(set(idle)) == len(idle), "a block is free twice"
        assert sorted(idle) == [block for block, count in enumerate(num_refs) if count == 0], (
            "free + held != total"
        )
        for key, (block, _) in self._published.items():
            assert self._key[block] == key, f"block {block} is published under a key that is not its own"
        assert all(self._key[block] is not None for block in self._cached) and all(
            self._key[block] is None for block in self._free
        )

    def _find(self, token_ids: Sequence[int], table: BlockTable) -> Iterator[tuple[int, int]]:
        """(block, prefix id after it) of the longest published prefix of `token_ids` in whole blocks, those
        left out that are published of `table`."""
        prefix_id, size = table.prefix_id, self.block_size
        for start in range(table.num_published * size, len(token_ids) - size + 1, size):
            found = self._published.get((prefix_id, tuple(token_ids[start : start + size])))
            if found is None:
                return
            yield found
            prefix_id = found[1]

    def _count_refs(self, tables: Iterable[BlockTable]) -> list[int]:
        num_refs = [0] * self.num_blocks
        for table in tables:
            for block in table.blocks:
                num_refs[block] += 1
        return num_refs

    def _acquire(self, block: int) -> None:
        if self._num_refs[block] == 0:
            del self._cached[block]
        self._num_refs[block] += 1

    def _release(self, block: int) -> None:
        self._num_refs[block] -= 1
        if self._num_refs[block] > 0:
            return
        if self._key[block] is None:
            self._free.append(block)
        else:
            self._cached[block] = None

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        key = self._key[block]
        assert key is not None
        del self._published[key]
        self._key[block] = None
        return block
