"""From settings to a policy."""

from __future__ import annotations

from cache.blocks import BlockPool

from ..config import EngineConfig, SchedulingConfig
from .aging import Ageing
from .laps import Laps
from .lengths import LengthPredictor, make_lengths
from .mlfq import MultiLevelFeedback, queue_bounds
from .policy import FirstComeFirstServed, Policy
from .scheduler import Scheduler
from .sjf import ShortestJobFirst
from .waiting import Keeper


def make_scheduler(
    config: SchedulingConfig,
    engine: EngineConfig,
    pool: BlockPool,
    length_predictor: LengthPredictor | None,
    keeper: Keeper | None,
) -> Scheduler:
    """length_predictor: the user's; None = the default. keeper: of KV whose blocks others need."""
    sizes = engine.max_num_seqs, engine.max_prefill_tokens, engine.enable_prefix_caching
    predictor = make_lengths(config.expected_tokens, length_predictor)
    return Scheduler(pool, make_policy(config), *sizes, predictor=predictor, keeper=keeper)


def make_policy(config: SchedulingConfig) -> Policy:
    """First come, first served needs no ageing: nobody is overtaken."""
    if config.policy == "fcfs":
        return FirstComeFirstServed()
    policy: Policy
    if config.policy == "sjf":
        policy = ShortestJobFirst()
    else:
        bounds = queue_bounds(config.num_queues, config.first_quantum, config.quantum_growth)
        if config.policy == "mlfq":
            policy = MultiLevelFeedback(bounds, config.review_rounds)
        else:
            policy = Laps(bounds, config.stability_window, config.stability_tolerance, config.review_rounds)
    return policy if config.max_slowdown is None else Ageing(policy, config.max_slowdown)
