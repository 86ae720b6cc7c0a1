"""The requests of a run, the same for every system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from .config import RequestsSettings, RouteSettings, SimulationConfig
from .distributions import Distribution, Floats, Ints

DRAFT, EXIT, VERIFY, MATCH = range(4)  # of the last axis of Workload.shares
GATE = 4  # a further stream of hashes


@dataclass(frozen=True)
class Recorded:
    """Rounds of recorded requests, concatenated.

    starts   [requests + 1] first round of each
    routes   [routes] the number by which `rounds` name each: that of the first with the same tiers
    rounds   [rounds, 4] route (-1 = plain decoding; -2 = none whose rounds are repeated), tokens committed,
             first and last + 1 of its cycles
    cycles   [cycles, 2] drafted, kept by the tier above
    """

    starts: Ints = field(default_factory=lambda: np.zeros(1, np.int64))
    routes: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    rounds: Ints = field(default_factory=lambda: np.zeros((0, 4), np.int64))
    cycles: Ints = field(default_factory=lambda: np.zeros((0, 2), np.int64))


@dataclass(frozen=True)
class Workload:
    """Arrays over requests, in order of arrival.

    prompt_tokens   lengths of prompts
    cached_tokens   prompt tokens whose KV is in a prefix cache
    output_tokens   true lengths of outputs, known only to oracles
    max_tokens      most tokens that each may output
    classes         indices among `class_names`
    seeds           of the hashes that decide whether the draft at a position is right, under every plan
    shares          [routes, requests, 4] acceptance rates of drafts, of a hybrid's exit's drafts, and at
                    verify; share of cycles in which prompt lookup finds a match
    replays         index of the recorded request that it repeats; -1 = none
    """

    prompt_tokens: Ints
    cached_tokens: Ints
    output_tokens: Ints
    max_tokens: Ints
    classes: Ints
    class_names: tuple[str, ...]
    has_template: tuple[bool, ...]
    seeds: NDArray[np.uint64]
    shares: Floats
    replays: Ints
    recorded: Recorded = Recorded()
    recorded_times: Floats | None = None

    def __len__(self) -> int:
        return len(self.prompt_tokens)


def make_workload(
    config: SimulationConfig, num: int, seed: int, recording: Workload | None = None
) -> Workload:
    """Draws `num` requests, or repeats those of a recording."""
    chance = np.random.default_rng([seed, 1])
    seeds = np.random.default_rng([seed, 2]).integers(0, 2**63, num, dtype=np.uint64)
    if recording is not None:
        at = np.arange(num) % len(recording)
        names = "prompt_tokens", "cached_tokens", "output_tokens", "max_tokens", "classes", "replays"
        arrays = {name: getattr(recording, name)[at] for name in names}
        # One for each recorded request, as often as it is repeated.
        every = np.arange(len(recording))
        drawn = shares_of(config.routes, [{}], [every], len(every), np.random.default_rng([seed, 4]))
        return replace(recording, seeds=seeds, shares=np.ascontiguousarray(drawn[:, at]), **arrays)
    requests = config.requests
    classes, members = _classes(requests, num, chance)
    prompts, outputs = np.zeros(num, np.int64), np.zeros(num, np.int64)
    settings = list(requests.classes.values())
    for index, who in enumerate(members):
        own = settings[index] if settings else None
        prompts[who] = ((own and own.prompt_tokens) or requests.prompt_tokens).tokens(len(who), chance)
        outputs[who] = ((own and own.output_tokens) or requests.output_tokens).tokens(len(who), chance)
    return Workload(
        prompts,
        np.zeros(num, np.int64),
        np.minimum(outputs, requests.max_tokens),
        np.full(num, requests.max_tokens, np.int64),
        classes,
        tuple(requests.classes) or ("all",),
        tuple(each.has_template for each in settings) or (False,),
        seeds,
        shares_of(config.routes, [each.acceptance for each in settings] or [{}], members, num, chance),
        np.full(num, -1, np.int64),
    )


def _classes(requests: RequestsSettings, num: int, chance: np.random.Generator) -> tuple[Ints, list[Ints]]:
    weights = np.array([each.weight for each in requests.classes.values()] or [1.0])
    classes = chance.choice(len(weights), num, p=weights / weights.sum()).astype(np.int64)
    return classes, [np.flatnonzero(classes == index) for index in range(len(weights))]


def shares_of(
    routes: Mapping[str, RouteSettings],
    own: Sequence[Mapping[str, Distribution]],
    members: Sequence[Ints],
    num: int,
    chance: np.random.Generator,
) -> Floats:
    """Draws Workload.shares, for at least one route. own: by class of `members`, what replaces a route's
    acceptance.share."""
    shares = np.ones((max(1, len(routes)), num, 4))
    for who, acceptance in zip(members, own, strict=True):
        ranks = np.argsort(np.argsort(chance.random(len(who))))
        for index, (name, route) in enumerate(routes.items()):
            draws = [
                (DRAFT, acceptance.get(name, route.acceptance.share)),
                (EXIT, route.exit_acceptance.share if route.exit_acceptance else None),
                (VERIFY, route.verify_acceptance.share if route.verify_acceptance else None),
                (MATCH, route.match),
            ]
            for which, distribution in draws:
                if distribution is not None:
                    shares[index, who, which] = distribution.shares(ranks, chance)
    return shares
