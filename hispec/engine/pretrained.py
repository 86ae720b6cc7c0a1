"""A model loaded by its name, with all that its plans need besides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ee_models.checkpoint.loader import Checkpoint, load_tokenizer
from ee_models.decoder import Decoder
from ee_models.exits import AdapterExit

from ..config import EngineConfig, SpeculativeConfig
from ..latency.model import LatencyModel
from ..loading.draft_models import DraftModels
from ..loading.ngram_tables import NgramTables
from ..loading.target_model import load_decoder, open_model, select_device
from ..loading.trained_exits import TrainedExits
from .kv_sizing import max_model_len

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MeasureLatency = Callable[
    [SpeculativeConfig, Decoder, Sequence[AdapterExit], Decoder | None, int], LatencyModel
]


class Opened(NamedTuple):
    """The files of a model that another process of this machine has opened: to read its config and its
    tokenizer takes seconds, most of them for importing what reads them."""

    checkpoint: Checkpoint
    tokenizer: PreTrainedTokenizerBase | None


class Pretrained:
    """What `Engine.from_pretrained` has loaded: the decoder, the tokenizer if there is one, and for each plan
    its trained exits and draft model, each once."""

    def __init__(
        self,
        model: str | Path,
        config: EngineConfig,
        speculative: SpeculativeConfig | None,
        revision: str | None,
        skip_tokenizer_init: bool,
        measure_latency: MeasureLatency | None,
        opened: Opened | None = None,
    ) -> None:
        """Arguments as those of `Engine.from_pretrained`; opened: `model`, where somebody has done so. Raises
        ConfigError or CheckpointError, before anything large is read wherever that is possible."""
        device = select_device(config.device)
        self.checkpoint = open_model(model, revision) if opened is None else opened.checkpoint
        model_config = self.checkpoint.config
        if speculative is not None:
            speculative.plan(model_config.num_layers)  # raises errors before minutes of loading
        self.trained_exits = TrainedExits(self.checkpoint)
        self.trained_exits.check(speculative)
        self.ngram_tables = NgramTables(self.trained_exits)
        self.ngram_tables.check(speculative)
        self.draft_models = DraftModels(config.attention)
        self.draft_models.check(speculative)
        self._max_num_seqs, self.measure_latency = config.max_num_seqs, measure_latency
        self._max_model_len = max_model_len(
            config, model_config.max_position_embeddings, model_config.sliding_window
        )
        self.decoder = load_decoder(self.checkpoint, config, device, self._max_model_len)
        self.tokenizer: PreTrainedTokenizerBase | None = None
        if not skip_tokenizer_init:
            self.tokenizer = load_tokenizer(self.checkpoint) if opened is None else opened.tokenizer

    def fingerprints(self, speculative: SpeculativeConfig | None) -> dict[str, str]:
        """As `LLM.fingerprints`."""
        # What `dtype: auto` is differs between machines.
        held = (
            str(each).removeprefix("torch.") for each in (self.decoder.weights_dtype, self.decoder.kv_dtype)
        )
        return {
            "model": self.checkpoint.fingerprint,
            "weights and KV": " and ".join(held),
            **self.trained_exits.fingerprints(speculative),
            **self.ngram_tables.fingerprints(speculative),
        }

    def for_plan(self, speculative: SpeculativeConfig | None) -> dict[str, Any]:
        """What an engine needs for a plan, or for all plans that a controller may choose from, as arguments
        of `Engine`: trained exits, a draft model, n-grams, and what stages cost. Raises ConfigError,
        ExitsError, NgramsError or CheckpointError."""
        exits = self.trained_exits.load(speculative, self.decoder)
        draft_model = self.draft_models.load(speculative, self.decoder, self.tokenizer, self._max_model_len)
        tables = self.ngram_tables.load(speculative, self.decoder.device)
        latency = None
        if speculative is not None and speculative.control == "goodput" and self.measure_latency:
            latency = self.measure_latency(speculative, self.decoder, exits, draft_model, self._max_num_seqs)
        return {"exits": exits, "draft_model": draft_model, "tables": tables, "latency": latency}

    def memory(self) -> dict[str, int]:
        """Bytes of weights; those of exits belong to plans."""
        return {"weights_bytes": self.decoder.num_bytes, "draft_model_bytes": self.draft_models.num_bytes}
