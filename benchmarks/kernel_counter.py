"""Counts the kernels that a round would launch on a GPU, by stage, without one: torch's operations are seen
by a dispatch mode, Triton's launches in its interpreter.

Triton's kernels of layers and heads are counted and not run: hidden states are zeros then, and how many
kernels a round has does not depend on them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ee_models.attention.triton_pages import TritonAttention
from ee_models.decoder import Decoder
from ee_models.exits import AdapterExit
from ee_models.kernels.gpu import TritonKernels
from hispec.decoding.round import Round
from hispec.drafters.autoregressive import ComputedDrafter
from hispec.drafters.hybrid import HybridDrafter
from hispec.drafters.lookup_torch import TensorLookup
from hispec.drafters.ngram import NgramDrafter
from hispec.runner.launchers import StaticLauncher
from hispec.sampling import noise

BETWEEN, ROUND = "between rounds", "rest of the round"
# Whose kernels are whose: the innermost of these that runs. What lies in none is between rounds.
_STAGES: list[tuple[type, str, str]] = [
    (StaticLauncher, "_run", ROUND),
    (Round, "decode", "decode"),
    (Round, "check", "check"),
    (Round, "verify", "verify"),
    (ComputedDrafter, "_step", "draft pass"),
    (HybridDrafter, "_feed", "feed"),
    (NgramDrafter, "propose", "look up"),
]
_MODEL: list[tuple[type, str]] = [
    (Decoder, "embed"),
    (Decoder, "run_layers"),
    (Decoder, "fill_layers"),
    (Decoder, "logits"),
    (AdapterExit, "logits"),
    (AdapterExit, "fill"),
]
# Where a GPU is asked for: Triton's kernels are to run on the CPU, numba's are not.
_ON_TRITON = (
    "sampling.sampler",
    "sampling.confidence",
    "decoding.acceptance",
    "decoding.batch",
    "decoding.stages",
    "drafters.lookup_torch",
    "runner.round_inputs",
)
# Operations that launch nothing, and those that launch more than one kernel on a GPU.
_NOTHING = {"detach", "alias", "lift_fresh", "set_", "resize_"} | {
    f"{name}{form}"
    for name in ("empty", "new_empty", "empty_strided", "new_empty_strided")
    for form in ("", "_like")
}
_SEVERAL = {"masked_fill": 2, "scatter": 2, "index_put": 2, "index_copy": 2, "constant_pad_nd": 2, "sort": 2}


class KernelCounter(TorchDispatchMode):
    """While it is on: kernels by (stage, whether it is the model's), and how often each stage ran."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[tuple[str, bool]] = Counter()
        self.names: Counter[tuple[str, str]] = Counter()  # of those that are not the model's, by stage
        self.runs: Counter[str] = Counter()
        self._stages, self._of_model, self._is_paused = [BETWEEN], 0, False

    def clear(self) -> None:
        """Forgets what was counted."""
        for counts in (self.kernels, self.names, self.runs):
            counts.clear()

    def add(self, name: str, num: int = 1) -> None:
        """A launch of kernel `name`, or `num` of them."""
        self.kernels[self._stages[-1], self._of_model > 0] += num
        if not self._of_model:
            self.names[self._stages[-1], name] += num

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        with self:  # without autograd an operation that is made of others comes whole
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        result = func(*args, **kwargs)
        name = func.name().split("::")[1].split(".")[0]
        touched = [each for each in tree_leaves((result, args)) if isinstance(each, Tensor)]
        if not (func.is_view or name in _NOTHING) and any(each.numel() for each in touched):
            self.add(name, _SEVERAL.get(name, 1))
        return result

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Counts what runs inside."""
        from triton.runtime import interpreter

        launch, empty = interpreter.GridExecutor.__call__, torch.empty

        def counted(executor: Any, *args: Any, **kwargs: Any) -> None:
            self.add(executor.fn.__name__)
            if not self._of_model:
                with self._paused():
                    launch(executor, *args, **kwargs)

        def blank(*args: Any, **kwargs: Any) -> Tensor:
            with self._paused():
                made = empty(*args, **kwargs)
                return made.zero_() if self._of_model else made

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(interpreter.GridExecutor, "__call__", counted))
            stack.enter_context(mock.patch.object(torch, "empty", blank))
            for owner, method, stage in _STAGES:
                stack.enter_context(self._patched(owner, method, stage))
            for owner, method in _MODEL:
                stack.enter_context(self._patched(owner, method, None))
            stack.enter_context(self)
            yield

    @contextmanager
    def _paused(self) -> Iterator[None]:
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def _patched(self, owner: type, method: str, stage: str | None) -> Any:
        run: Callable[..., Any] = getattr(owner, method)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if stage is None:
                self._of_model += 1
            else:
                self._stages.append(stage)
                self.runs[stage] += 1
            try:
                return run(*args, **kwargs)
            finally:
                if stage is None:
                    self._of_model -= 1
                else:
                    self._stages.pop()

        return mock.patch.object(owner, method, wrapped)


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """The code of a GPU on a CPU: Triton's kernels, by its interpreter, and nothing of numba."""

    def draw(logits: Tensor, key: Tensor) -> Tensor:
        return (logits + noise.gumbel(key, logits.shape[-1])).argmax(-1)

    with ExitStack() as stack:
        for name in _ON_TRITON:
            stack.enter_context(mock.patch(f"hispec.{name}.runs_triton", lambda device: True))
        for name in ("decoding.stages", "decoding.acceptance", "sampling.confidence"):
            stack.enter_context(mock.patch(f"hispec.{name}.runs_numba", lambda device: False))
        for name in ("sampling.sampler", "decoding.acceptance"):
            stack.enter_context(mock.patch(f"hispec.{name}.draw", draw))
        stack.enter_context(mock.patch("hispec.drafters.ngram.make_lookup", _make_lookup))
        yield


def on_triton(decoder: Decoder) -> Decoder:
    """The decoder with a GPU's attention and kernels."""
    decoder.attention, decoder.kernels = TritonAttention(), TritonKernels()
    return decoder


def _make_lookup(device: torch.device, *sizes: Any) -> TensorLookup:
    return TensorLookup(device, *sizes)
