"""How many kernels a round has on a GPU, by benchmarks/kernel_counts.py."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.kernel_counter import BETWEEN, ROUND, KernelCounter
from benchmarks.kernel_counts import SAMPLED, count, plans
from hispec.sampling.noise_triton import argmax_with_noise
from tests.helpers.sweeps import sweep

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="counts what the interpreter runs")


def test_operations_count_unless_they_only_look_or_allocate() -> None:
    counter, x = KernelCounter(), torch.arange(6.0)
    with torch.inference_mode(), counter.watching():
        x.view(2, 3).t()[0].unsqueeze(-1).expand(2, 5)
        torch.empty(3)
        torch.empty(0).fill_(1)
        assert not counter.kernels
        x.add_(1)
        torch.outer(x, x)  # a product of views
        x.masked_fill(x > 1, 0)
    counts = {"add_": 1, "mul": 1, "gt": 1, "masked_fill": 2}
    assert counter.names == {(BETWEEN, name): num for name, num in counts.items()}
    with torch.inference_mode():
        x.add_(1)
    assert counter.names[BETWEEN, "add_"] == 1, "counted after its end"


def test_launches_of_triton_count_and_what_their_interpreter_does_does_not() -> None:
    counter, logits = KernelCounter(), torch.randn(3, 50)
    with torch.inference_mode(), counter.watching():
        chosen = argmax_with_noise(logits, None)
    assert torch.equal(chosen, logits.argmax(-1))
    assert dict(counter.names) == {(BETWEEN, "_best_of_block"): 1, (BETWEEN, "_best_of_row"): 1}


# Kernels of one run of a stage, besides those of layers and heads. Four of a choice's six are top_p's.
MOST = {"decode": 8, "draft pass": 7, "look up": 3, "feed": 5, "check": 10, "verify": 10}
MOST |= {ROUND: 13, BETWEEN: 2}


@sweep("plan", plans(3), lambda plan: plan.startswith("plain"))
def test_a_stage_has_few_kernels_besides_the_models(plan: str) -> None:
    """All runs of a stage together have at most 15 % of the kernels of a plain round of SmolLM2, 283."""
    counts = count(plans(3)[plan], 3, SAMPLED, 2)
    for stage, num in counts.beside.items():
        assert num / counts.runs.get(stage, 1.0) <= MOST[stage], (stage, counts.names[stage])
        assert num <= 42, (stage, counts.names[stage])
    assert counts.model > 20 and counts.beside[BETWEEN] <= 2
