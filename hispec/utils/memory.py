"""Memory: how many KV blocks fit beside what rounds and prefill need, and what an allocation failure looks like."""
from __future__ import annotations

from collections.abc import Callable

import torch

from ..config import EngineConfig
from ..errors import ConfigError


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed. torch has a class for it on a GPU; on a CPU, and where a library on the GPU was who failed, only words."""
    if isinstance(error.__cause__, RuntimeError) and is_out_of_memory(error.__cause__):  # of a drafter, for example
        return True
    words = "can't allocate memory", "out of memory", "ALLOC_FAILED"
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (isinstance(error, RuntimeError) and any(each in str(error) for each in words))


def free_bytes(device: torch.device) -> int:
    """That can still be allocated on a GPU: what the system has, and what torch holds for itself without using it."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def peak_bytes(device: torch.device, run: Callable[[], object]) -> int:
    """GPU memory that `run` needs at its peak, besides what is there before."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def num_blocks_beside(config: EngineConfig, free: int, peak: int, bytes_per_block: int, max_model_len: int) -> int:
    """KV blocks for max_num_seqs sequences of max_model_len, as far as they fit in `free` bytes beside what work takes at its `peak` and
    beside captured graphs. Raises ConfigError if not one does."""
    wanted = config.max_num_seqs * -(-max_model_len // config.block_size)
    for_graphs = config.max_graph_bytes if config.graphs else 0
    allowed = int(free * config.gpu_memory_utilization)
    left = allowed - peak - for_graphs
    if left < bytes_per_block:
        raise ConfigError(
            f"engine: of {_mb(free)} of free GPU memory, gpu_memory_utilization={config.gpu_memory_utilization} allows {_mb(allowed)};"
            f" rounds of max_num_seqs={config.max_num_seqs} and prefill of max_prefill_tokens={config.max_prefill_tokens} take {_mb(peak)}, graphs"
            f" {_mb(for_graphs)} (max_graph_bytes), so that not one KV block of {_mb(bytes_per_block)} is left; lower one of these, or set num_kv_blocks"
        )
    return min(wanted, left // bytes_per_block)


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MB"
