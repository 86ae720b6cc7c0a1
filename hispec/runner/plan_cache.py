"""The plans of an engine: the one in use, and a few that were, whose graphs serve again."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from ee_models.exits import Exit

from ..config import EngineConfig, Plan, SpeculativeConfig
from ..decoding.stages import DecoderLike, PassCounts
from ..latency.model import LatencyModel
from .plan_runtime import Limits, PlanRuntime, make_plan_runtime, total_memory

_MOST_KEPT = 8
_PROBE_ROUNDS = 4  # of a plan that is tried again


@dataclass(frozen=True, eq=False)
class Wanted:
    """What `Engine.set_speculative` is asked for. Equal if it is the same: of models and exits, the same
    objects."""

    speculative: SpeculativeConfig | None = None
    exits: Sequence[Exit] = ()
    draft_model: DecoderLike | None = None
    plan: Plan | None = None
    latency: LatencyModel | None = None

    @property
    def _key(self) -> Hashable:
        return self.speculative, self.plan, tuple(map(id, self.exits)), id(self.draft_model), self.latency

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Wanted) and self._key == other._key

    def __hash__(self) -> int:
        return hash((self.speculative, self.plan))


class PlanCache:
    """Makes them, over one KV."""

    def __init__(
        self,
        decoder: DecoderLike,
        config: EngineConfig,
        max_model_len: int,
        counts: PassCounts,
        draft_counts: PassCounts,
    ) -> None:
        self._decoder, self._config, self._max_model_len = decoder, config, max_model_len
        self._counts, self._draft_counts = counts, draft_counts
        self._kept: dict[Wanted, PlanRuntime] = {}
        self._now: PlanRuntime | None = None

    @property
    def runtime(self) -> PlanRuntime:
        assert self._now is not None
        return self._now

    @runtime.setter
    def runtime(self, speculation: PlanRuntime) -> None:
        self._now = speculation

    def make(self, num_blocks: int, wanted: Wanted) -> PlanRuntime:
        """Raises ConfigError for what does not fit the model or memory."""
        limits = Limits(self._config.max_num_seqs, self._max_model_len, num_blocks, self._config.block_size)
        kv = self._now.kv if self._now is not None else None
        draft_kv = next(
            (each.draft_kv for each in self._kept.values() if each.draft_model is wanted.draft_model), None
        )
        along = None if wanted.latency is None else AlongOrLater(wanted.latency, wanted.speculative)
        return make_plan_runtime(
            self._decoder,
            limits,
            wanted.speculative,
            wanted.plan,
            wanted.exits,
            wanted.draft_model,
            self._counts,
            self._draft_counts,
            kv,
            draft_kv,
            along,
        )

    def get(self, num_blocks: int, wanted: Wanted) -> PlanRuntime:
        """What there is already, or `make`."""
        return self._kept.get(wanted) or self.make(num_blocks, wanted)

    def use(self, new: PlanRuntime, wanted: Wanted, keeps_graphs: bool) -> tuple[bool, bool]:
        """Makes it the one in use -> whether graphs of the others are of no use any more, and whether what
        blocks hold is."""
        before = self._now
        is_anew = (
            before is None
            or new.kv is not before.kv
            or not keeps_graphs
            or (wanted not in self._kept and len(self._kept) >= _MOST_KEPT)
        )
        if is_anew:
            self._kept.clear()  # of use for their graphs alone, and none with another KV
        self._kept[wanted] = self._now = new
        return is_anew, before is not None and new.kv_owners != before.kv_owners

    @property
    def kept(self) -> list[PlanRuntime]:
        return list(self._kept.values())

    def memory(self) -> dict[str, int]:
        return total_memory(self._kept.values())

    def release(self) -> None:
        for speculation in self._kept.values():
            speculation.release()


class AlongOrLater:
    """Whether the KV of an exit that a plan does not use is written along in every round, or made up for in
    one pass when a plan needs it again: whichever is measured cheaper, between two probes of the plans that
    are not in use. Of a draft model it is always the latter: there, each round along would cost a pass of its
    own."""

    def __init__(self, latency: LatencyModel, speculative: SpeculativeConfig | None) -> None:
        goodput = speculative.goodput if speculative is not None else None
        self._latency, self._probe_share = latency, goodput.probe_share if goodput is not None else 0.0

    def __call__(self, layer: int) -> bool:
        along, fill = f"along/{layer}", f"fill/{layer}"
        if along not in self._latency or fill not in self._latency or self._probe_share == 0.0:
            return True
        # Per row, with one token committed per round: more of them are cheaper along and later alike.
        num_rounds = _PROBE_ROUNDS / self._probe_share
        return num_rounds * self._latency[along](1, 1, 0.0) <= self._latency[fill](1, num_rounds, num_rounds)
