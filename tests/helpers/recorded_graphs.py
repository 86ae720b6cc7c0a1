"""A GPU's graphs, played on a CPU: a capture records operations with the tensors that they read and write, a
replay does these again.

It is as strict as a GPU. While it captures nothing is computed for the host: whoever reads a value, or makes
a tensor from a list, is refused. A replay knows no Python: it reads and writes where the capture did,
whatever the code would do by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ee_models.attention.sdpa import SdpaAttention
from ee_models.decoder import Decoder, LayerWeights
from ee_models.kernels.reference import ReferenceKernels
from ee_models.linear import Linear, PlainLinear
from ee_models.linear_factory import LinearMaker
from ee_models.panel_linear import PanelLinear

# What makes the host wait for a GPU, or copies from the host's memory.
FORBIDDEN = {
    "_local_scalar_dense",
    "item",
    "nonzero",
    "masked_select",
    "lift_fresh",
    "lift_fresh_copy",
    "is_nonzero",
    "equal",
    "unique",
}


class NotCapturable(BaseException):
    """What a GPU could not capture. No Exception: an engine would go on eagerly, and the test that should see
    it would not."""


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        if name in FORBIDDEN:
            raise NotCapturable(f"{func.name()} in a capture: a GPU would have to wait for the host")
        if name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        ):
            raise NotCapturable("a boolean index in a capture: its size is a value")
        kwargs = kwargs or {}
        # As on a GPU nothing is computed yet: what the code holds until the replay is garbage.
        result = func(*args, **kwargs)
        self.operations.append((func, args, kwargs, result))
        return result


def _that_compute(
    operations: list[tuple[Any, Any, Any, Any]],
) -> Iterator[tuple[Any, Any, Any, list[Tensor]]]:
    """All but views, which are there already, with the tensors that they make: none in place."""
    for func, args, kwargs, result in operations:
        held = _tensors(result)
        read = {each.untyped_storage().data_ptr() for each in _tensors((args, kwargs))}
        if any(each.untyped_storage().data_ptr() not in read for each in held):
            yield func, args, kwargs, held
        elif func._schema.is_mutable or not held:
            yield func, args, kwargs, []


def _tensors(tree: Any) -> list[Tensor]:
    """What torch's tree_leaves finds, in a fifth of its time, which was half of a replay's."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return []
    return [tensor for each in tree for tensor in _tensors(each)]


class RecordedGraphs:
    """A GraphDevice."""

    def __init__(self) -> None:
        self.num_tried = self.num_captured = self.num_renewed = 0
        self.others: list[RecordedGraphs] = []
        self.bytes_of_a_graph = 0
        self.failure: Callable[[], BaseException] | None = None  # what the next captures raise

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self.num_tried += 1
        recorder = _Recorder()
        with recorder:
            result = run()
        if self.failure is not None:
            raise self.failure()
        self.num_captured += 1

        operations: list[tuple[Any, Any, Any, list[Tensor]]] | None = None

        def replay() -> None:
            nonlocal operations
            if operations is None:
                operations = list(_that_compute(recorder.operations))
            for func, args, kwargs, held in operations:
                made = func(*args, **kwargs)
                if held:
                    for old, new in zip(held, _tensors(made), strict=True):
                        if old is not new:
                            old.copy_(new)

        return replay, result

    def renew(self) -> None:
        self.num_renewed += 1

    def num_bytes(self) -> int:
        return self.num_captured * self.bytes_of_a_graph

    def another(self) -> RecordedGraphs:
        """Counted by itself; made by each engine, in `others`."""
        self.others.append(other := RecordedGraphs())
        other.bytes_of_a_graph = self.bytes_of_a_graph
        return other


class _TorchLinears(LinearMaker):
    makes_panels = False


def recordable(decoder: Decoder) -> Decoder:
    """The decoder by torch operations alone: a recorder does not see what numba does."""
    decoder.attention, decoder.kernels = SdpaAttention(), ReferenceKernels()
    decoder.make_linear = _TorchLinears(decoder.device, decoder.dtype)
    decoder.head = _plain(decoder.head)
    decoder._layers = [
        LayerWeights(
            None if a is None else replace(a, qkv=_plain(a.qkv), output=_plain(a.output)),
            None if m is None else replace(m, gate_up=_plain(m.gate_up), down=_plain(m.down)),
        )
        for a, m in ((layer.attention, layer.mlp) for layer in decoder._layers)
    ]
    return decoder


def _plain(linear: Linear) -> PlainLinear:
    assert isinstance(linear, PanelLinear)
    weight = linear.panels.transpose(1, 2).reshape(-1, linear.num_inputs)[: linear.num_outputs]
    return PlainLinear(weight.contiguous(), linear.bias[: linear.num_outputs])
