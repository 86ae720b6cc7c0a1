"""Offloads the KV of preempted requests to host memory where that is cheaper than computing it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cache.host_kv import HostKV
from cache.paged_kv import PagedKV

from ..scheduling.request import Request
from ..utils.memory import is_out_of_memory


class KVOffloader:
    """The engine's KVOffload (scheduling/kv_blocks.py).

    host         where KV is offloaded to
    kvs          gives all tensors that a request's blocks lie in now
    is_cheaper   whether so many positions are cheaper to move out and in than to compute again; may be
                 replaced
    """

    def __init__(
        self, host: HostKV, kvs: Callable[[], Sequence[PagedKV]], is_cheaper: Callable[[int], bool]
    ) -> None:
        self._host, self._kvs, self.is_cheaper = host, kvs, is_cheaper

    def save(self, request: Request) -> bool:
        """Copies the request's KV to host memory -> whether it did: not if computing it again is cheaper, or
        if memory lacks."""
        if not self.is_cheaper(request.num_computed):
            return False
        try:
            return self._host.save(request.number, self._kvs(), request.table.blocks, request.num_computed)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False

    def restore(self, request: Request) -> bool:
        """Copies the request's KV back into its blocks -> whether it could: not if nothing complete was
        saved, the plan has other tensors since, or memory lacks."""
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
