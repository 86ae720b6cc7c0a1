"""The plan that an engine runs, and a few earlier ones, whose graphs can be replayed again."""

from __future__ import annotations

from dataclasses import replace

from ..config import EngineConfig
from ..errors import ConfigError
from ..utils.memory import free_bytes, free_memory_bytes, mb, or_too_large
from .plan_runtime import PlanRuntime, make_plan_runtime, memory_of
from .plan_spec import Counters, EngineSizes, PlanSpec

MOST_KEPT = 16


class PlanCache:
    """Makes the PlanRuntimes of an engine over one KV, and keeps the last ones.

    runtime   the one in use, once `use` was called
    """

    runtime: PlanRuntime

    def __init__(
        self, config: EngineConfig, max_model_len: int, counters: Counters, sharers: int = 1
    ) -> None:
        """sharers: engines that share a host's memory."""
        self._config, self._max_model_len, self._counters = config, max_model_len, counters
        self._sharers = sharers
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
            replaces = kv.num_layers < spec.models.num_kv_layers
            missing, device = own * replaces + of_draft * (draft_kv is None), kv.data.device
            if device.type == "cuda":
                free = free_bytes(device)
            else:  # of the new no page is written, and so taken, before the old is given back
                free = free_memory_bytes() // self._sharers + kv.num_bytes * replaces
            _check_room(num_blocks, missing, free)
        plan = spec.speculative
        of_plan = f", num_draft_tokens={plan.num_draft_tokens}, num_checks={plan.num_checks}" if plan else ""
        with or_too_large(
            f"engine.max_num_seqs={config.max_num_seqs}, max_model_len={self._max_model_len}{of_plan}"
        ):
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
        """`memory_of` all plans that are kept."""
        return memory_of(self.kept)

    def release(self) -> None:
        """Gives the KV memory back."""
        for runtime in self.kept:
            runtime.release()


def _check_room(num_blocks: int, bytes_per_block: int, free: int) -> None:
    """Raises ConfigError where there is no memory for what a plan needs of KV besides what there is."""
    if num_blocks * bytes_per_block > free:
        most = free // bytes_per_block
        fewer = f", or with engine.num_kv_blocks of at most {most}" if most else ""
        raise ConfigError(
            f"speculative: for engine.num_kv_blocks={num_blocks} this plan needs"
            f" {mb(num_blocks * bytes_per_block)} of KV that the plan in use has not, and"
            f" {mb(free)} of memory are free; make an LLM with this plan{fewer}"
        )
