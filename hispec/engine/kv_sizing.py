"""The default number of KV blocks, and the longest sequence."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..config import EngineConfig
from ..decoding.stages import DecoderLike
from ..errors import ConfigError
from ..runner.block_tables import RowTables
from ..runner.buckets import prompt_bucket
from ..runner.plan_runtime import PlanRuntime
from ..runner.plan_spec import Models
from ..runner.round_runner import RoundRunner
from ..utils.memory import free_bytes, free_memory_bytes, mb, or_too_large, peak_bytes


def default_num_blocks(
    config: EngineConfig,
    models: Models,
    max_model_len: int,
    make: Callable[[], PlanRuntime],
    sharers: int = 1,
) -> int:
    """Enough KV blocks for max_num_seqs sequences of max_model_len, or as many as there is memory for. On a
    GPU the largest passes are run first, by what `make` gives over a single block, to see what memory they
    need besides. sharers: as in `check_num_blocks`. Raises ConfigError if not one block fits.
    """
    bytes_per_block, device = models.kv_bytes_per_block(config.block_size), models.decoder.device
    if device.type != "cuda":
        return host_num_blocks(config, bytes_per_block, max_model_len, sharers)
    trial = make()
    with or_too_large(
        f"engine.max_num_seqs={config.max_num_seqs}, max_prefill_tokens={config.prefill_tokens(device.type)}"
    ):
        peak = peak_bytes(device, lambda: try_largest_passes(config, models.decoder, max_model_len, trial))
    trial.release()
    return num_blocks_beside(config, free_bytes(device), peak, bytes_per_block, max_model_len)


def check_num_blocks(config: EngineConfig, models: Models, sharers: int = 1) -> None:
    """Raises ConfigError if num_kv_blocks are more than there is memory for. sharers: engines that share a
    host's memory, each with as many blocks."""
    per_block, device = models.kv_bytes_per_block(config.block_size), models.decoder.device
    free = free_bytes(device) if device.type == "cuda" else free_memory_bytes() // sharers
    num_blocks, of_each = config.num_kv_blocks or 0, f" for each of {sharers} workers" if sharers > 1 else ""
    if num_blocks * per_block > free:
        raise ConfigError(
            f"engine.num_kv_blocks={num_blocks} take {mb(num_blocks * per_block)}, but {mb(free)} of memory"
            f" are free{of_each}; choose at most {free // per_block}, or leave it out"
        )


@torch.inference_mode()
def try_largest_passes(
    config: EngineConfig, decoder: DecoderLike, max_model_len: int, trial: PlanRuntime
) -> None:
    """Runs the largest prefill and rounds of all rows, eagerly, without requests: all positions lie in block
    0, and nothing is written."""
    tables = RowTables(config.max_num_seqs, -(-max_model_len // config.block_size))
    rounds = RoundRunner(
        config.model_copy(update={"graphs": False}), None, tables, max_model_len, decoder, (), is_static=True
    )
    prefill = min(config.prefill_tokens(decoder.device.type), config.max_num_seqs * max_model_len)
    rounds.try_largest_passes(trial, prompt_bucket(prefill))


def most_model_len(max_position_embeddings: int, sliding_window: int | None) -> int:
    """The longest sequence in tokens that a model takes."""
    return min(max_position_embeddings, sliding_window or max_position_embeddings)


def max_model_len(config: EngineConfig, max_position_embeddings: int, sliding_window: int | None) -> int:
    """The longest sequence in tokens: as configured, or the model's own limit. Raises ConfigError if the
    setting is above that limit."""
    limit = most_model_len(max_position_embeddings, sliding_window)
    if config.max_model_len is not None and config.max_model_len > limit:
        what = "sliding_window" if limit == sliding_window else "max_position_embeddings"
        raise ConfigError(
            f"engine.max_model_len={config.max_model_len} is above the model's {what} of {limit}; choose at"
            " most that"
        )
    return config.max_model_len or limit


def host_num_blocks(config: EngineConfig, bytes_per_block: int, max_model_len: int, sharers: int = 1) -> int:
    """KV blocks for max_num_seqs sequences of max_model_len, within half of the free memory, of which
    `sharers` have equal parts. Raises ConfigError if not one fits."""
    wanted = config.max_num_seqs * -(-max_model_len // config.block_size)
    affordable = free_memory_bytes() // 2 // sharers // bytes_per_block
    if affordable < 1:
        raise ConfigError(
            f"one KV block takes {bytes_per_block} bytes, more than half of the free memory; choose a smaller"
            " engine.block_size"
        )
    return min(wanted, affordable)


def num_blocks_beside(
    config: EngineConfig, free: int, peak: int, bytes_per_block: int, max_model_len: int
) -> int:
    """KV blocks for max_num_seqs sequences of max_model_len, or as many as fit into `free` bytes beside the
    `peak` of passes and beside captured graphs. Raises ConfigError if not one fits."""
    wanted = config.max_num_seqs * -(-max_model_len // config.block_size)
    for_graphs = config.max_graph_bytes if config.graphs else 0
    allowed = int(free * config.gpu_memory_utilization)
    left = allowed - peak - for_graphs
    if left < bytes_per_block:
        raise ConfigError(
            f"engine: of {mb(free)} of free GPU memory,"
            f" gpu_memory_utilization={config.gpu_memory_utilization} allows {mb(allowed)}; rounds of"
            f" max_num_seqs={config.max_num_seqs} and prefill of"
            f" max_prefill_tokens={config.prefill_tokens('cuda')} take {mb(peak)}, graphs {mb(for_graphs)}"
            f" (max_graph_bytes), so that not one KV block of {mb(bytes_per_block)} is left; lower one of"
            " these, or set num_kv_blocks"
        )
    return min(wanted, left // bytes_per_block)
