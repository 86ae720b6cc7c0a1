"""Settings of the engine."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from ..utils.files import known_place
from .base import Settings


class EngineConfig(Settings):
    """How the engine runs. Sizes are in tokens unless named otherwise.

    dtype                   of weights; "auto" = the checkpoint's own on a GPU, and of bfloat16 on a CPU with
                            products in it (AMX; AVX512-BF16 of AMD), else float32. A CPU computes in float32,
                            whatever they are held in, but for bfloat16 where it has such products
    kv_cache_dtype          of keys and values; "auto" = dtype, and bfloat16 beside int8 and int4 on a CPU.
                            "int8" = little more than half of bfloat16's bytes, on a CPU: more rows fit, and
                            attention, which waits for them, takes less time. On a GPU no other than dtype
    device                  "auto" = a GPU if there is one
    quantization            "int8" or "int4" weights, those of exits and draft models included; the
                            output is that of the quantized model. None = as stored. On a GPU int4 needs
                            torchao
    max_num_seqs            requests that run together at most: rows of a round
    max_model_len           prompt + output of one request at most; None = the model's own limit
    block_size              positions per KV block; with kv_cache_dtype int8 a multiple of 16
    num_kv_blocks           None = enough for max_num_seqs requests of max_model_len, within half of the free
                            memory; on a GPU within what a trial run of the largest passes leaves free
    gpu_memory_utilization  share of a GPU's free memory that may be used, weights not counted
    max_prefill_tokens      prompt positions computed per step at most (chunked prefill); None = 512, and 2048
                            on a GPU
    max_run_ms              on a CPU, a step does up to eight rounds (in plain decoding, tokens of each row),
                            where nothing is to be decided between them, for about so long at most: whoever
                            reads a stream, and new requests, wait for them. 0 = one round a step, stage
                            by stage
    enable_prefix_caching   reuse KV blocks of equal prefixes
    attention               "auto", or a backend by name
    seed                    base of the seeds of requests that bring none
    graphs                  on a GPU, whether rounds, those of plain decoding included, and passes over
                            prompts are captured as CUDA graphs at all
    stage_graphs            on a GPU, whether each stage of a plan with draft_confidence or
                            check.continue_confidence is a graph of its own, between which the host leaves
                            out what no row needs any more, while the device waits; otherwise a round is one
                            graph, and rows that have stopped are computed along for nothing
    exact_verify            on a GPU, use slower kernels whose result for a token does not depend on what else
                            is in the pass, so that speculative and plain output agree bit for bit; on a CPU
                            they always do, with HiSpec's own attention
    max_graphs              graphs kept, one per plan, number of rows, length of context and way of sampling
                            (those of a round's stages count as one); the least recently used makes room. As
                            many are kept of passes over prompts
    max_graph_bytes         GPU memory reserved for graphs, a quarter of it for those of prompts
    trace                   file that decisions, rounds and requests are recorded in, one JSON object per
                            line, for `hispec report` and `hispec simulate`
    worker_timeout_s        with several workers: seconds without a sign of life, which a thread of each gives
                            however long a step is, after which another takes a worker's place
    warm_up                 capture all graphs of rounds when the engine starts, the largest first, instead of
                            each when it is first needed
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    device: str = "auto"
    quantization: Literal["int8", "int4"] | None = None
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] = 32
    max_model_len: Annotated[int, Field(ge=2)] | None = None
    block_size: Annotated[int, Field(ge=1, le=1024)] = 16
    num_kv_blocks: Annotated[int, Field(ge=1)] | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    max_prefill_tokens: Annotated[int, Field(ge=1)] | None = None
    max_run_ms: Annotated[float, Field(ge=0.0, le=10_000.0)] = 50.0
    enable_prefix_caching: bool = True
    attention: Literal["auto", "sdpa", "numba", "triton"] = "auto"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    graphs: bool = True
    stage_graphs: bool = False
    max_graphs: Annotated[int, Field(ge=1)] = 64
    max_graph_bytes: Annotated[int, Field(ge=0)] = 2 << 30
    trace: Annotated[str, Field(min_length=1), AfterValidator(lambda path: str(known_place(path)))] | None = (
        None
    )
    warm_up: bool = False
    exact_verify: bool = False
    worker_timeout_s: Annotated[float, Field(ge=0.1, le=86400.0)] = 600.0

    @model_validator(mode="after")
    def _blocks_have_whole_groups(self) -> Self:
        if self.kv_cache_dtype == "int8" and self.block_size % 16:
            raise ValueError(
                f"block_size={self.block_size} must be a multiple of 16 where kv_cache_dtype is 'int8';"
                " change one of them"
            )
        return self

    def prefill_tokens(self, device_type: str) -> int:
        """max_prefill_tokens on such a device."""
        return self.max_prefill_tokens or (2048 if device_type == "cuda" else 512)
