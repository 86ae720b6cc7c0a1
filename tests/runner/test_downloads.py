"""Results of rounds on their way to the host."""

from __future__ import annotations

import pytest
import torch

from ee_models.decoder import Decoder
from hispec.config import Plan
from hispec.runner.downloads import make_downloads
from tests.helpers.recorded_graphs import RecordedGraphs
from tests.helpers.support import make_engine, random_prompts, run

DEVICES = [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]
devices = pytest.mark.parametrize("device", DEVICES, ids=str)


@devices
def test_a_copy_is_of_what_was_there_before_the_next_round(device: torch.device) -> None:
    """Of other sizes from time to time, and read one round late."""
    downloads, before = make_downloads(device), None
    results = {size: torch.zeros(size, 3, dtype=torch.int64, device=device) for size in (2, 4, 1)}
    for number, size in enumerate((2, 4, 2, 2, 1, 4, 4)):
        downloads.settle()
        packed = results[size].fill_(number)  # as a replay does: where it was the last time
        wait = downloads.begin(packed)
        if before is not None:
            wait_before, expected = before
            assert wait_before().tolist() == expected
        before = wait, [[number] * 3] * size
    assert before is not None
    results[4].add_(0)
    assert before[0]().tolist() == before[1] and before[0]().tolist() == before[1], "as often as one asks"


def test_a_copy_on_a_cpu_is_as_late_as_may_be() -> None:
    """So that tests of rounds notice where nobody waits for it."""
    downloads, results = make_downloads(torch.device("cpu")), torch.zeros(2, dtype=torch.int64)
    wait = downloads.begin(results)
    results.fill_(1)
    assert wait().tolist() == [1, 1]
    downloads.settle()
    results.fill_(2)
    assert wait().tolist() == [1, 1]


def test_a_replay_does_not_overtake_the_copy_of_the_round_before(
    torch_decoder: Decoder, no_numba: None, tiny_decoder: Decoder
) -> None:
    prompts = random_prompts((3, 9))
    engine = make_engine(torch_decoder, Plan(1, 3, 2, 2), is_static=True, graph_device=RecordedGraphs())
    assert run(engine, prompts) == run(make_engine(tiny_decoder), prompts)
    stats = engine.stats()
    assert stats["graph_replays"] > 2 and stats["rounds_ahead"] > 2
