"""From settings to a policy."""
from __future__ import annotations

from ..config.scheduling import SchedulingConfig
from .ageing import Ageing
from .laps import Laps
from .policy import FirstComeFirstServed, Policy
from .queues import MultiLevelFeedback, queue_bounds
from .shortest import ShortestJobFirst


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
