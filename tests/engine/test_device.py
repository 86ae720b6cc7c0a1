"""An engine computes on its own device, whatever thread calls: Triton launches on CUDA's current one, which
is a thread's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ee_models.decoder import Decoder
from hispec.config import Plan
from hispec.engine import engine as module
from hispec.utils.devices import on_device
from tests.helpers.support import GREEDY, make_engine, run


def test_all_that_computes_is_within_the_device(
    tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside: list[torch.device] = []
    called: list[str] = []

    @contextmanager
    def entered(device: torch.device) -> Iterator[None]:
        inside.append(device)
        yield
        inside.pop()

    def watched(name: str, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            assert inside == [tiny_decoder.device]
            called.append(name)
            return method(*args, **kwargs)

        return call

    monkeypatch.setattr(module, "on_device", entered)
    monkeypatch.setattr(module.PlanCache, "get", watched("plan", module.PlanCache.get))
    monkeypatch.setattr(module.StepLoop, "step", watched("step", module.StepLoop.step))
    monkeypatch.setattr(module, "Scorer", watched("score", module.Scorer))
    engine = make_engine(tiny_decoder, Plan(3, 6, 2, 2))
    monkeypatch.setattr(engine._rounds, "warm_up", watched("warm up", engine._rounds.warm_up))
    monkeypatch.setattr(engine._rounds, "drop_graphs", watched("close", engine._rounds.drop_graphs))
    run(engine, [[3, 4, 5]], GREEDY)
    engine.score([([3, 4], [5])])
    engine.warm_up()
    engine.close()
    assert set(called) == {"plan", "step", "score", "warm up", "close"} and not inside


def test_a_gpu_is_the_current_device_within(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []

    @contextmanager
    def device(index: torch.device) -> Iterator[None]:
        entered.append(index)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    for name in ("cpu", "cuda:1"):
        with on_device(torch.device(name)):
            pass
    assert entered == [torch.device("cuda", 1)]
