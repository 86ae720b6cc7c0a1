"""What a plan is made from: the models, the settings, and the sizes of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from cache.paged_kv import PagedKV
from ee_models.exits import Exit

from ..config import GoodputConfig, Plan, SpeculativeConfig
from ..decoding.stages import DecoderLike, PassCounts
from ..drafters.ngram_table import NgramTable
from ..latency.model import LatencyModel

_PROBE_ROUNDS = 4  # that a controller runs of a plan when it tries it again

Counters = tuple[PassCounts, PassCounts]  # passes of the model, and of a draft model


@dataclass(frozen=True)
class Models:
    """What rounds run: a decoder, its trained exits (others are read through the decoder's own head), a
    separate draft model, and the n-grams that are guessed from. Equal if they are the same objects."""

    decoder: DecoderLike
    exits: tuple[Exit, ...] = ()
    draft_model: DecoderLike | None = None
    tables: tuple[NgramTable, ...] = ()

    @property
    def with_kv(self) -> Models:
        """Those that keep KV: without n-grams."""
        return replace(self, tables=())

    @property
    def num_kv_layers(self) -> int:
        """Layers of KV of the decoder and its exits."""
        return self.decoder.config.num_layers + sum(exit_.num_kv_layers for exit_ in self.exits)

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Bytes of one block at every layer of the decoder, of the exits and of the draft model."""

        def of(model: DecoderLike, num_layers: int) -> int:
            shape = block_size, model.config.num_kv_heads, model.config.head_dim
            return PagedKV.bytes_per_block(num_layers, *shape, model.kv_dtype)

        model, draft_model = of(self.decoder, self.num_kv_layers), self.draft_model
        return model if draft_model is None else model + of(draft_model, draft_model.config.num_layers)

    def read_by(self, speculative: SpeculativeConfig) -> Models:
        """Those that a plan of `speculative` uses."""
        layers = speculative.trained_layers().values()
        return Models(
            self.decoder,
            tuple(exit_ for exit_ in self.exits if exit_.layer in layers),
            self.draft_model if speculative.draft.traits.has_model else None,
            tuple(table for table in self.tables if table.path in speculative.guess_paths),
        )


@dataclass(frozen=True)
class PlanSpec:
    """What `Engine.set_speculative` is asked for.

    speculative   None = plain decoding
    plan          overrides the one that `speculative` gives
    latency       what stages cost, for a controller
    """

    models: Models
    speculative: SpeculativeConfig | None = None
    plan: Plan | None = None
    latency: LatencyModel | None = field(default=None, hash=False)

    @property
    def keeps_outputs(self) -> bool:
        """Whether what it drafts depends on requests that have ended."""
        lookup = None if self.speculative is None else self.speculative.draft.lookup
        return lookup is not None and lookup.keeps_outputs

    @property
    def reuses_decisions(self) -> bool:
        """Whether `rejection` judges drafts that it decided itself in other requests. It is exact for drafts
        that do not depend on the noise which it judges them by: no two requests may have the same."""
        return (
            self.keeps_outputs and self.speculative is not None and self.speculative.acceptance == "rejection"
        )

    def always_writes(self, layer: int) -> bool:
        """Whether every round writes the KV of the exit at `layer`, rounds that do not read it included; else
        it is backfilled in one pass before it is read again. Chosen is what the profile says is cheaper
        between two probes of a plan that is not in use."""
        always, fill = f"along/{layer}", f"fill/{layer}"
        latency, plan = self.latency, self.speculative
        if latency is None or plan is None or plan.control != "goodput":
            return True
        probe_share = (plan.goodput or GoodputConfig()).probe_share
        if probe_share == 0.0:
            return True
        if always not in latency or fill not in latency:
            return True
        # Per row, with one token committed per round: more tokens make both cheaper alike.
        num_rounds = _PROBE_ROUNDS / probe_share
        return num_rounds * latency[always](1, 1, 0.0) <= latency[fill](1, num_rounds, num_rounds)


@dataclass(frozen=True)
class EngineSizes:
    """Sizes that a plan's buffers depend on: rows of a round, tokens of a sequence, KV blocks and their
    positions."""

    max_num_seqs: int
    max_model_len: int
    num_blocks: int
    block_size: int

    def make_kv(self, decoder: DecoderLike, num_layers: int) -> PagedKV:
        """KV of `num_layers` layers of this model's shape."""
        shape = self.num_blocks, self.block_size, decoder.config.num_kv_heads, decoder.config.head_dim
        return PagedKV(num_layers, *shape, decoder.kv_dtype, decoder.device)
