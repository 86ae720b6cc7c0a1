"""What is cheaper for the KV of a preempted request: moving it, or computing it again."""

from __future__ import annotations

from hispec.latency.model import LatencyModel, Linear
from hispec.latency.moving import cheaper_to_move


def test_moving_is_weighed_against_prefill_by_the_profile() -> None:
    """Swap 10 ms and 1 ms a position; prefill 1 ms a position and 4 ms a chunk of at most 8."""
    stages = {
        "swap": Linear(constant_ms=10.0, token_ms=1.0),
        "prefill": Linear(constant_ms=4.0, token_ms=1.0),
    }
    is_cheaper = cheaper_to_move(LatencyModel(stages), 8)
    assert [is_cheaper(num_positions) for num_positions in (1, 16, 17, 40)] == [False, False, True, True]
    for latency in (None, LatencyModel({}), LatencyModel({"prefill": Linear()})):
        assert cheaper_to_move(latency, 8)(1)
