"""The plan that an engine runs, and a few earlier ones, whose graphs can be replayed again."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch

from ..config import EngineConfig
from ..errors import ConfigError
from ..utils.memory import free_bytes, free_memory_bytes
from .plan_runtime import PlanRuntime, make_plan_runtime
from .plan_spec import Counters, EngineSizes, PlanSpec

MOST_KEPT = 16


class PlanCache:
    """Makes the PlanRuntimes of an engine over one KV, and keeps the last ones.

    runtime   the one in use, once `use` was called
    """

    runtime: PlanRuntime

    def __init__(self, config: EngineConfig, max_model_len: int, counters: Counters) -> None:
        self._config, self._max_model_len, self._counters = config, max_model_len, counters
        self._kept: dict[PlanSpec, PlanRuntime] = {}

    def make(self, num_blocks: int, spec: PlanSpec) -> PlanRuntime:
        """Raises ConfigError for what does not fit the model or memory."""
        config, draft_model = self._config, spec.models.draft_model
        sizes = EngineSizes(config.max_num_seqs, self._max_model_len, num_blocks, config.block_size)
        draft_kvs = (each.draft_kv for each in self.kept if each.models.draft_model is draft_model)
        kv, draft_kv = self.runtime.kv if self._kept else None, next(draft_kvs, None)
        if kv is not None:
            own = replace(spec.models, draft_model=None).kv_bytes_per_block(config.block_size)
            of_draft = spec.models.kv_bytes_per_block(config.block_size) - own
            missing = own * (kv.num_layers < spec.models.num_kv_layers) + of_draft * (draft_kv is None)
            _check_room(num_blocks, missing, kv.data.device)
        return make_plan_runtime(spec, sizes, self._counters, kv, draft_kv)

    def get(self, num_blocks: int, spec: PlanSpec) -> PlanRuntime:
        """The one that is kept, or a new one, which `use` keeps: always for a plan whose drafter keeps
        outputs, which begins with none. Raises ConfigError."""
        return (None if spec.keeps_outputs else self._kept.get(spec)) or self.make(num_blocks, spec)

    def use(self, new: PlanRuntime, spec: PlanSpec, keeps_graphs: bool) -> tuple[bool, bool]:
        """Makes `new` the one in use -> whether graphs of earlier plans are to be dropped, and whether cached
        blocks are, which lack KV of `new`'s exits or draft model."""
        before = self.runtime if self._kept else None
        drops_graphs = (
            before is None
            or new.kv is not before.kv
            or not keeps_graphs
            or self._kept.get(spec, new) is not new
            or (spec not in self._kept and len(self._kept) >= MOST_KEPT)
        )
        kept = {} if drops_graphs else self._kept  # plans are kept for their graphs alone
        self._kept, self.runtime = {**kept, spec: new}, new
        return drops_graphs, before is not None and new.models.with_kv != before.models.with_kv

    @property
    def kept(self) -> list[PlanRuntime]:
        return list(self._kept.values())

    def memory(self) -> dict[str, int]:
        """PlanRuntime.memory() of all plans that are kept, which share KV."""
        total = Counter[str]()
        for runtime in self.kept:
            total.update(runtime.memory())
        return {**total, "kv_bytes": self.runtime.kv.num_bytes}

    def release(self) -> None:
        """Gives the KV memory back."""
        for runtime in self.kept:
            runtime.release()


def _check_room(num_blocks: int, bytes_per_block: int, device: torch.device) -> None:
    """Raises ConfigError where there is no memory for what a plan needs of KV besides what there is."""
    free = free_bytes(device) if device.type == "cuda" else free_memory_bytes()
    if num_blocks * bytes_per_block > free:
        raise ConfigError(
            f"speculative: for engine.num_kv_blocks={num_blocks} this plan needs"
            f" {num_blocks * bytes_per_block / 1e6:,.0f} MB of KV besides that of the plan in use, and"
            f" {free / 1e6:,.0f} MB of memory are free; make an LLM with this plan, or with at most"
            f" {max(1, free // bytes_per_block)} blocks"
        )
