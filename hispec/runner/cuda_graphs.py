"""CUDA graphs: the launches of a round on a GPU, recorded once and replayed by one launch.

A pass of a small model ends before Python has launched the next one, so that launches decide the speed. A
graph holds all launches of a round (or of one stage, if the host decides between stages) with the addresses
that they read and write: whatever changes from round to round must be written to the same address.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..decoding.stages import PassCounts
from ..utils.memory import is_due_to_memory

_log = logging.getLogger(__name__)

_streams: dict[int, torch.cuda.Stream] = {}  # by index of the device
_capturing = threading.Lock()  # of the process: one thread's work would break another's capture


def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream in which all engines of this process capture on a device. One for all, since cuBLAS keeps a
    workspace of 32 MiB for every stream that it has seen."""
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in _streams:
        _streams[index] = torch.cuda.Stream(torch.device("cuda", index))
    return _streams[index]


class GraphDevice(Protocol):
    """Captures graphs: on a GPU, or in tests by recording operations on the CPU."""

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Records what `run` does without doing it -> a function that does it, and run's result, whose
        tensors each replay writes anew."""

    def renew(self) -> None:
        """Called when all graphs were dropped: later ones take memory of their own."""

    def num_bytes(self) -> int:
        """Memory held by the graphs that were captured since `renew`."""

    def another(self) -> GraphDevice:
        """One whose graphs share no memory with these: they may run before results of these are read."""


class CudaGraphs:
    """CUDA graphs in one memory pool: only one of them runs at a time, so all share what they compute in."""

    def __init__(self, device: torch.device) -> None:
        self.renew()
        self._stream = capture_stream(device)

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._stream.device)
        # thread_local: what other threads of the program do on the GPU meanwhile fails neither them nor this.
        captured = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        with _capturing:
            try:
                with captured:
                    result = run()
            except BaseException:
                # Where ending the capture fails too, torch leaves its stream as the current one, and, before
                # 2.13, all allocations bound for the pool.
                if torch.cuda.current_stream(self._stream.device) == self._stream:
                    torch.cuda.set_stream(stream)
                    with suppress(RuntimeError):
                        torch._C._cuda_endAllocateToPool(self._stream.device.index, self._pool)
                raise
        return graph.replay, result

    def renew(self) -> None:
        # A pool whose last graph is gone cannot be captured into again, while a tensor of its lives.
        self._pool = torch.cuda.graph_pool_handle()

    def num_bytes(self) -> int:
        segments = torch.cuda.memory_snapshot()
        return sum(
            segment["total_size"]
            for segment in segments
            if tuple(segment["segment_pool_id"]) == tuple(self._pool)
        )

    def another(self) -> CudaGraphs:
        return CudaGraphs(self._stream.device)


@dataclass
class _Graph:
    """inputs: the tensors that a replay reads; counts: the passes of one replay, by counter."""

    replay: Callable[[], None]
    inputs: tuple[Tensor, ...]
    result: Any
    counts: tuple[PassCounts, ...]


class GraphCache:
    """Graphs by key, captured on first use; where a round is several graphs, those of all its stages have one
    key. Beyond max_graphs keys the least recently used one's are dropped; beyond max_bytes all are, since a
    pool of memory is given back as a whole.

    A graph is captured after its work was done eagerly once: then libraries have set up what they set up on
    their first call, and the round has its result. Work that cannot be captured, whatever the reason, goes on
    eagerly, and is not tried again: after a lack of memory until graphs were dropped, else until `forget`.
    """

    def __init__(
        self, device: GraphDevice, counters: Sequence[PassCounts], max_graphs: int, max_bytes: int
    ) -> None:
        """counters: where runs count passes; a replay adds what its capture counted."""
        self._device, self._counters = device, tuple(counters)
        self.max_graphs, self._max_bytes = max_graphs, max_bytes
        self._graphs: OrderedDict[Hashable, dict[Hashable, _Graph]] = OrderedDict()  # by key, then stage
        self._lacked_memory: set[Hashable] = set()  # keys and stages
        self._failed: set[Hashable] = set()
        self.num_captures = self.num_failures = self.num_replays = self.num_evictions = 0
        self.num_bytes = 0  # that graphs held after the latest capture: asking the allocator takes long

    def __len__(self) -> int:
        return sum(map(len, self._graphs.values()))

    @property
    def replays(self) -> list[Callable[[], None]]:
        """What replays each graph, to time it; those of the key that was used last come last."""
        return [graph.replay for stages in self._graphs.values() for graph in stages.values()]

    def run(
        self, key: Hashable, run: Callable[..., Any], *inputs: Tensor, stage: Hashable | None = None
    ) -> Any:
        """run(*inputs), by a replay if it was run before under this key and stage. The result may be
        overwritten by the next run of any, since graphs share memory.

        Under one key and stage `run` must do the same operations each time, on tensors at the same addresses,
        apart from `inputs`; and doing it twice must have the same effect as doing it once.
        """
        graph = self._graphs.get(key, {}).get(stage)
        if graph is None:
            result = run(*inputs)
            if (key, stage) not in self._lacked_memory | self._failed:
                self._capture(key, stage, run, inputs)
            return result
        self._graphs.move_to_end(key)
        for held, value in zip(graph.inputs, inputs, strict=True):
            held.copy_(value)
        graph.replay()
        for counter, counts in zip(self._counters, graph.counts, strict=True):
            counter.add(counts)
        self.num_replays += 1
        return graph.result

    def clear(self) -> None:
        """Drops all graphs; they are captured again when needed."""
        self.num_evictions += len(self)
        self._graphs.clear()
        self._lacked_memory.clear()
        self.num_bytes = 0

    def forget(self) -> None:
        """Drops all graphs, and what is known of work that cannot be captured: its plans are gone."""
        self.clear()
        self._failed.clear()

    def _capture(
        self, key: Hashable, stage: Hashable | None, run: Callable[..., Any], inputs: Sequence[Tensor]
    ) -> None:
        while key not in self._graphs and len(self._graphs) >= self.max_graphs:
            self.num_evictions += len(self._graphs.popitem(last=False)[1])
        if not self._graphs:
            self._device.renew()
        held = tuple(value.clone() for value in inputs)
        before = [counter.copy() for counter in self._counters]
        try:
            replay, result = self._device.capture(lambda: run(*held))
        except Exception as error:
            self.num_failures += 1
            self._refuse((key, stage), error)
            return
        finally:
            counts = tuple(
                counter.since(earlier) for counter, earlier in zip(self._counters, before, strict=True)
            )
            for counter, earlier in zip(self._counters, before, strict=True):
                counter.set(earlier)
        self._graphs.setdefault(key, {})[stage] = _Graph(replay, held, result, counts)
        self._graphs.move_to_end(key)
        self.num_captures += 1
        self.num_bytes = num_bytes = self._device.num_bytes()
        if num_bytes > self._max_bytes:
            # What is too large by itself stays: capturing it in each round would cost more.
            _log.warning(
                "captured graphs take %d MB, more than engine.max_graph_bytes=%d; raise it",
                num_bytes >> 20,
                self._max_bytes,
            )
            if len(self._graphs) > 1:
                self.clear()

    def _refuse(self, key: Hashable, error: Exception) -> None:
        """The round has its tokens already, from the eager run: a failed capture costs speed alone."""
        if is_due_to_memory(error):
            self._lacked_memory.add(key)
            _log.warning(
                "no memory to capture a graph of %s: it runs eagerly; lower engine.num_kv_blocks or"
                " engine.max_graphs",
                key,
            )
            return
        self._failed.add(key)
        self.clear()  # the pool may be fit for no further capture: those to come have another
        _log.warning(
            "a graph of %s could not be captured: it runs eagerly from now on, with the same tokens, but"
            " slower; engine.graphs=false captures none",
            key,
            exc_info=error,
        )
