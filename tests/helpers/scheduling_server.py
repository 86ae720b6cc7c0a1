"""A server without a model: the real scheduler over a real block pool, with requests whose lengths and
acceptances are known."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cache.blocks import BlockPool
from hispec.sampling_params import SamplingParams
from hispec.scheduling.kv_blocks import KVOffload
from hispec.scheduling.lengths import LengthPredictor
from hispec.scheduling.policy import Policy, Service
from hispec.scheduling.request import Request
from hispec.scheduling.scheduler import Scheduler

DRAFTS = 4
AMPLE = 500  # blocks of four positions, for up to 20 requests of 60 tokens


def make_request(number: int, num_prompt: int = 3, max_tokens: int = 100, arrival_s: float = 0.0) -> Request:
    prompt = [(number * 7 + place) % 50 for place in range(num_prompt)]
    return Request(
        f"r{number}", number, prompt, SamplingParams(), 0, max_tokens, frozenset(), None, arrival_s
    )


@dataclass(frozen=True)
class Task:
    """A request to come: after so many rounds, with so long an output, of which a share `acceptance` of
    drafts is right."""

    arrival: int
    length: int
    acceptance: float
    max_tokens: int = 100
    num_prompt: int = 3


class Server:
    """One round a second over `rows` rows; each round is one pass for whoever is in it.

    Integrity is checked after every round: nobody is in two places, tokens grow by one at least in a row and
    not at all elsewhere, blocks add up, and no row is free while somebody waits, as long as `is_ample`.
    """

    def __init__(
        self,
        policy: Policy,
        tasks: Sequence[Task],
        rows: int = 2,
        *,
        num_blocks: int = AMPLE,
        block_size: int = 4,
        caches: bool = False,
        predictor: LengthPredictor | None = None,
        offload: Callable[[BlockPool], KVOffload] | None = None,
        seed: int = 0,
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.policy, self.rows, self.tasks = policy, rows, list(tasks)
        self.scheduler = Scheduler(
            self.pool,
            policy,
            rows,
            1000,
            caches,
            predictor=predictor,
            offload=offload(self.pool) if offload else None,
        )
        self.requests = [
            make_request(i, task.num_prompt, task.max_tokens, float(task.arrival))
            for i, task in enumerate(self.tasks)
        ]
        self.live: set[Request] = set()
        self.admitted: list[int] = []  # numbers, in the order in which they first got a row
        self.finished: list[int] = []
        self.finished_at: dict[int, int] = {}
        self.now = 0
        self.is_ample = num_blocks >= AMPLE
        self._random = random.Random(seed)
        self._coming = sorted(self.requests, key=lambda request: (request.arrival_s, request.number))

    def run(self, watch: Callable[[Server], None] | None = None, most_rounds: int = 20_000) -> None:
        """Until all are finished. `watch` sees each round after it was scheduled and before it is run."""
        while self._coming or self.live:
            self.round(watch)
            assert self.now < most_rounds, "somebody is starved"
        assert sorted(self.finished) == list(range(len(self.tasks))), "lost, or served twice"
        assert self.pool.num_held == 0

    def round(self, watch: Callable[[Server], None] | None = None) -> None:
        while self._coming and self._coming[0].arrival_s <= self.now:
            request = self._coming.pop(0)
            self.scheduler.add(request)
            self.live.add(request)
        step = self.scheduler.schedule(DRAFTS + 1, float(self.now))
        self._check()
        self.admitted += [
            request.number for request in self.scheduler.running if request.number not in self.admitted
        ]
        if watch is not None:
            watch(self)
        for chunk in step.chunks:
            assert chunk.start == chunk.request.num_computed
            self.scheduler.commit(chunk.request, chunk.end, release=False)
        for request, limit in [(self.scheduler.running[row], limit) for row, limit in step.limits.items()]:
            self._serve(request, limit)
        self.now += 1

    def mean_latency(self) -> float:
        return sum(self.finished_at[i] - task.arrival for i, task in enumerate(self.tasks)) / len(self.tasks)

    def _serve(self, request: Request, limit: int) -> None:
        task = self.tasks[request.number]
        assert request.is_ready and request.finish_reason is None
        accepted = 0
        while accepted < DRAFTS and self._random.random() < task.acceptance:
            accepted += 1
        num_tokens = min(accepted + 1, limit, task.length - request.num_output)
        request.append([self._random.randrange(50) for _ in range(num_tokens)])
        self.scheduler.commit(request, len(request.token_ids) - 1, release=True)
        self.scheduler.served(request, Service(1, num_tokens, DRAFTS, accepted, 1.0, 1.0))
        if request.num_output == task.length:
            request.finish_reason = "stop"
            self.scheduler.remove(request)
            self.live.remove(request)
            self.finished.append(request.number)
            self.finished_at[request.number] = self.now + 1

    def _check(self) -> None:
        scheduler = self.scheduler
        assert len(scheduler.running) <= self.rows and [request.row for request in scheduler.running] == list(
            range(len(scheduler.running))
        )
        assert {*scheduler.running, *scheduler.waiting} == self.live and len(scheduler.running) + len(
            scheduler.waiting
        ) == len(self.live)
        assert scheduler.running or not self.live, "nobody runs"
        assert not (self.is_ample and scheduler.waiting and len(scheduler.running) < self.rows), (
            "a row is free while somebody waits"
        )
        self.pool.check(scheduler.tables())
