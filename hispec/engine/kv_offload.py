"""KV of preempted requests: to host memory, or to be computed again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cache.host_kv import HostKV
from cache.paged_kv import PagedKV

from ..latency.model import LatencyModel
from ..scheduling.request import Request
from ..utils.memory import is_out_of_memory


class KVOffloader:
    """The engine's KVOffload (scheduling/kv_blocks.py).

    host         where it goes
    kvs          all tensors that a request's blocks lie in now
    is_cheaper   whether so many positions are cheaper to move out and in than to compute again
    """

    def __init__(
        self, host: HostKV, kvs: Callable[[], Sequence[PagedKV]], is_cheaper: Callable[[int], bool]
    ) -> None:
        self._host, self._kvs, self._is_cheaper = host, kvs, is_cheaper

    def save(self, request: Request) -> bool:
        if not self._is_cheaper(request.num_computed):
            return False
        try:
            return self._host.save(request.number, self._kvs(), request.table.blocks, request.num_computed)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False

    def restore(self, request: Request) -> bool:
        """False also where the plan has other tensors than when it was saved, and where an interrupt came
        between."""
        try:
            if request.number in self._host and self._host.restore(
                request.number, self._kvs(), request.table.blocks
            ):
                return True
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        self._host.drop(request.number)
        return False

    def drop(self, request: Request) -> None:
        self._host.drop(request.number)


def cheaper_to_move(latency: LatencyModel | None, max_prefill_tokens: int) -> Callable[[int], bool]:
    """For KVOffloader: whether moving so many positions out and in costs less than prefill of them, in chunks
    of max_prefill_tokens, by the profile.

    Without a profile, or without these stages in it: always. Of SmolLM2-135M in float32 a position's KV goes
    out and in within 0.1 ms on a CPU, and takes 0.9 ms to compute; the larger the model, the more layers'
    products there are for each byte of KV.
    """
    if latency is None or "swap" not in latency or "prefill" not in latency:
        return lambda num_positions: True
    swap, prefill = latency["swap"], latency["prefill"]

    def is_cheaper(num_positions: int) -> bool:
        ends = [*range(max_prefill_tokens, num_positions, max_prefill_tokens), num_positions]
        starts = [0, *ends[:-1]]
        again_ms = sum(prefill(1, end - start, end) for start, end in zip(starts, ends, strict=True))
        return swap(1, num_positions, num_positions) < again_ms

    return is_cheaper
