"""How many KV blocks an engine takes where nobody says."""
from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ee_models.exits import Exit

from ..config import EngineConfig
from ..decoding.stages import DecoderLike
from ..runner.block_tables import RowTables
from ..runner.plan_runtime import Speculation
from ..runner.round_runner import Rounds
from ..utils.memory import free_bytes, num_blocks_beside, peak_bytes
from .admission import host_num_blocks, kv_bytes_per_block


def default_num_blocks(
    config: EngineConfig, decoder: DecoderLike, exits: Sequence[Exit], draft_model: DecoderLike | None, max_model_len: int, make: Callable[[], Speculation]
) -> int:
    """Enough for max_num_seqs sequences of max_model_len, or as many as there is memory for. On a GPU the largest passes are tried first, with
    what `make` gives over a single block, to see what they need besides. Raises ConfigError if not one block fits."""
    bytes_per_block = kv_bytes_per_block(config, decoder, exits, draft_model)
    device = decoder.device
    if device.type != "cuda":
        return host_num_blocks(config, bytes_per_block, max_model_len)
    trial = make()
    peak = peak_bytes(device, lambda: try_largest_passes(config, decoder, max_model_len, trial))
    trial.release()
    return num_blocks_beside(config, free_bytes(device), peak, bytes_per_block, max_model_len)


@torch.inference_mode()
def try_largest_passes(config: EngineConfig, decoder: DecoderLike, max_model_len: int, trial: Speculation) -> None:
    """The most prefill at once, and rounds of all rows, eagerly. Nobody is in them: all positions lie in block 0, and nothing is written."""
    tables = RowTables(config.max_num_seqs, -(-max_model_len // config.block_size))
    rounds = Rounds(config.model_copy(update={"graphs": False}), None, tables, max_model_len, decoder, (), is_static=True)
    rounds.try_out(trial, min(config.max_prefill_tokens, max_model_len), max_model_len)
