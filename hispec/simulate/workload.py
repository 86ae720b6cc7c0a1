"""The requests of a run: the same for every system, so that only systems make a difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .config import RequestsSettings, RouteSettings, SimulationConfig
from .distributions import Distribution, Floats, Ints

DRAFT, EXIT, VERIFY, MATCH = range(4)  # of the last axis of Workload.shares


@dataclass(frozen=True)
class Recorded:
    """Rounds of recorded requests, one after the other.

    starts   [recorded + 1] first round of each
    rounds   [rounds, 4] route (-1 = plain decoding), tokens committed, first and last + 1 of its cycles
    cycles   [cycles, 2] drafted, kept
    """

    starts: Ints = field(default_factory=lambda: np.zeros(1, np.int64))
    rounds: Ints = field(default_factory=lambda: np.zeros((0, 4), np.int64))
    cycles: Ints = field(default_factory=lambda: np.zeros((0, 2), np.int64))


@dataclass(frozen=True)
class Workload:
    """Arrays over requests, in order of arrival.

    prompt_tokens   and those of them whose KV was found in a prefix cache: cached_tokens
    output_tokens   that it will output, which nobody but an oracle knows
    max_tokens      that it may output
    classes         index among `class_names`
    seeds           of what is drawn for it: the draft at a place of its output is right or wrong whoever
                    asks, and whenever
    shares          [routes, requests, 4] chances: of a draft, of a hybrid's exit's draft, at verify, of a
                    match
    recorded        which of `recorded` it repeats; -1 = none
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
    """`num` requests; of a recording, its own, over and over."""
    chance = np.random.default_rng([seed, 1])
    seeds = np.random.default_rng([seed, 2]).integers(0, 2**63, num, dtype=np.uint64)
    if recording is not None:
        at = np.arange(num) % len(recording)
        return Workload(
            recording.prompt_tokens[at],
            recording.cached_tokens[at],
            recording.output_tokens[at],
            recording.max_tokens[at],
            recording.classes[at],
            recording.class_names,
            recording.has_template,
            seeds,
            np.ascontiguousarray(recording.shares[:, at]),
            recording.replays[at],
            recording.recorded,
            recording.recorded_times,
        )
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
    """[routes, requests, 4] chances; routes 1 at least. own: of each class of `members`."""
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
