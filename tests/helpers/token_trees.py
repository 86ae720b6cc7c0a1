"""Random shapes of token trees."""

from __future__ import annotations

import random


def random_parents(num_nodes: int, generator: random.Random) -> list[int]:
    """One root, at most eight levels; now and then many siblings, now and then a long branch."""
    parents, levels = [-1], [1]
    for node in range(1, num_nodes):
        parent = generator.choice([node - 1, generator.randrange(node), 0])
        parent = parent if levels[parent] < 8 else 0
        parents.append(parent)
        levels.append(levels[parent] + 1)
    return parents


def shuffled(parents: list[int], generator: random.Random) -> list[int]:
    """The same tree, its nodes in any order, children before parents too."""
    order = generator.sample(range(len(parents)), len(parents))
    return [parents[old] if parents[old] < 0 else order.index(parents[old]) for old in order]
