"""The default number of KV blocks, and the longest sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from cache.paged_kv import PagedKV
from ee_models.exits import Exit

from ..config import EngineConfig
from ..decoding.stages import DecoderLike
from ..errors import ConfigError
from ..runner.block_tables import RowTables
from ..runner.plan_runtime import PlanRuntime
from ..runner.round_runner import RoundRunner
from ..utils.memory import free_bytes, free_memory_bytes, peak_bytes


def default_num_blocks(
    config: EngineConfig,
    decoder: DecoderLike,
    exits: Sequence[Exit],
    draft_model: DecoderLike | None,
    max_model_len: int,
    make: Callable[[], PlanRuntime],
) -> int:
    """Enough for max_num_seqs sequences of max_model_len, or as many as there is memory for. On a GPU the
    largest passes are tried first, with what `make` gives over a single block, to see what they need besides.
    Raises ConfigError if not one block fits.
    """
    bytes_per_block = kv_bytes_per_block(config, decoder, exits, draft_model)
    device = decoder.device
    if device.type != "cuda":
        return host_num_blocks(config, bytes_per_block, max_model_len)
    trial = make()
    peak = peak_bytes(device, lambda: try_largest_passes(config, decoder, max_model_len, trial))
    trial.release()
    return num_blocks_beside(config, free_bytes(device), peak, bytes_per_block, max_model_len)


@torch.inference_mode()
def try_largest_passes(
    config: EngineConfig, decoder: DecoderLike, max_model_len: int, trial: PlanRuntime
) -> None:
    """The most prefill at once, and rounds of all rows, eagerly. Nobody is in them: all positions lie in
    block 0, and nothing is written."""
    tables = RowTables(config.max_num_seqs, -(-max_model_len // config.block_size))
    rounds = RoundRunner(
        config.model_copy(update={"graphs": False}), None, tables, max_model_len, decoder, (), is_static=True
    )
    rounds.try_out(trial, min(config.max_prefill_tokens, max_model_len), max_model_len)


def max_model_len(config: EngineConfig, max_position_embeddings: int, sliding_window: int | None) -> int:
    """The longest sequence, in tokens. Raises ConfigError if the setting is beyond what the model can attend
    to."""
    limit = min(max_position_embeddings, sliding_window or max_position_embeddings)
    if config.max_model_len is not None and config.max_model_len > limit:
        what = "sliding_window" if limit == sliding_window else "max_position_embeddings"
        raise ConfigError(
            f"engine.max_model_len={config.max_model_len} is above the model's {what} of {limit}; choose at"
            " most that"
        )
    return config.max_model_len or limit


def kv_bytes_per_block(
    config: EngineConfig, decoder: DecoderLike, exits: Sequence[Exit], draft_model: DecoderLike | None
) -> int:
    """Bytes of one block at every layer of the model, of its trained exits, and of a separate draft model."""

    def of(model: DecoderLike, num_layers: int) -> int:
        return PagedKV.bytes_per_block(
            num_layers, config.block_size, model.config.num_kv_heads, model.config.head_dim, model.dtype
        )

    num_layers = decoder.config.num_layers + sum(exit_.num_kv_layers for exit_ in exits)
    return of(decoder, num_layers) + (
        of(draft_model, draft_model.config.num_layers) if draft_model is not None else 0
    )


def host_num_blocks(config: EngineConfig, bytes_per_block: int, model_len: int) -> int:
    """Blocks for max_num_seqs sequences of `model_len`, within half of the free memory. Raises ConfigError if
    not one fits."""
    wanted = config.max_num_seqs * -(-model_len // config.block_size)
    affordable = free_memory_bytes() // 2 // bytes_per_block
    if affordable < 1:
        raise ConfigError(
            f"one KV block takes {bytes_per_block} bytes, more than half of the free memory; choose a smaller"
            " engine.block_size"
        )
    return min(wanted, affordable)


def num_blocks_beside(
    config: EngineConfig, free: int, peak: int, bytes_per_block: int, max_model_len: int
) -> int:
    """KV blocks for max_num_seqs sequences of max_model_len, as far as they fit in `free` bytes beside what
    work takes at its `peak` and beside captured graphs. Raises ConfigError if not one does."""
    wanted = config.max_num_seqs * -(-max_model_len // config.block_size)
    for_graphs = config.max_graph_bytes if config.graphs else 0
    allowed = int(free * config.gpu_memory_utilization)
    left = allowed - peak - for_graphs
    if left < bytes_per_block:
        raise ConfigError(
            f"engine: of {_mb(free)} of free GPU memory,"
            f" gpu_memory_utilization={config.gpu_memory_utilization} allows {_mb(allowed)}; rounds of"
            f" max_num_seqs={config.max_num_seqs} and prefill of"
            f" max_prefill_tokens={config.max_prefill_tokens} take {_mb(peak)}, graphs {_mb(for_graphs)}"
            f" (max_graph_bytes), so that not one KV block of {_mb(bytes_per_block)} is left; lower one of"
            " these, or set num_kv_blocks"
        )
    return min(wanted, left // bytes_per_block)


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MB"
