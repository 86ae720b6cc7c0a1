"""Makes the scheduler and its policy from settings."""

from __future__ import annotations

from cache.blocks import BlockPool

from ..config import EngineConfig, SchedulingConfig
from .aging import Aging
from .kv_blocks import KVOffload
from .laps import Laps
from .lengths import LengthPredictor, make_lengths
from .mlfq import MultiLevelFeedback, queue_bounds
from .policy import FirstComeFirstServed, Policy
from .scheduler import Scheduler
from .sjf import ShortestJobFirst


def make_scheduler(
    config: SchedulingConfig,
    engine: EngineConfig,
    pool: BlockPool,
    length_predictor: LengthPredictor | None,
    offload: KVOffload | None,
    device_type: str,
) -> Scheduler:
    """length_predictor: the user's; None = the default. offload: None = KV that loses its blocks is computed
    again."""
    sizes = engine.max_num_seqs, engine.prefill_tokens(device_type), engine.enable_prefix_caching
    predictor = make_lengths(config.expected_tokens, length_predictor)
    return Scheduler(pool, make_policy(config), *sizes, predictor=predictor, offload=offload)


def make_policy(config: SchedulingConfig) -> Policy:
    """First come, first served needs no aging, since no request overtakes another."""
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
    return policy if config.max_slowdown is None else Aging(policy, config.max_slowdown)
