"""What a round costs besides its passes: whole steps of an engine, less the pass in them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cache.paged_kv import PagedKV
from cache.view import BatchView

from ..config import EngineConfig
from ..decoding.stages import DecoderLike
from ..engine import Engine
from ..runner.cuda_graphs import GraphDevice
from ..sampling_params import SamplingParams
from .stage_bench import Rig
from .timing import sync_of

_PROMPT = [0] * 8
_BLOCKS, _STEPS = 7, 16  # blocks of so many steps each


class NoModel:
    """A model of one layer that computes nothing, so that what is around it can be timed."""

    def __init__(self, like: DecoderLike) -> None:
        self.max_positions = 1024
        self.config = replace(
            like.config, num_layers=1, max_position_embeddings=self.max_positions, sliding_window=None
        )
        self.dtype, self.kv_dtype, self.device = like.dtype, like.kv_dtype, like.device
        self._hidden = torch.zeros(1, self.config.hidden_size, dtype=self.dtype, device=self.device)
        self._logits = torch.zeros(1, self.config.vocab_size, dtype=self.dtype, device=self.device)

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._hidden.expand(token_ids.shape[0], -1).contiguous()

    def run_layers(self, hidden: Tensor, lo: int, hi: int, kv: PagedKV, view: BatchView) -> Tensor:
        return hidden

    def fill_layers(self, hidden: Tensor, lo: int, hi: int, kv: PagedKV, view: BatchView) -> None:
        pass

    def logits(self, hidden: Tensor, exit_layer: int) -> Tensor:
        return self._logits.expand(hidden.shape[0], -1).contiguous()


def overheads(
    decoder: DecoderLike, rows: Sequence[int], is_static: bool, graph_device: GraphDevice | None
) -> dict[int, float]:
    """{rows: milliseconds of a step of plain decoding, less those of its pass}, of an engine over a model
    that computes nothing: next to a real pass they would be lost in its noise. On a GPU the real model is
    taken, since the host's work is hidden behind the device's there.
    """
    model = decoder if decoder.device.type == "cuda" else NoModel(decoder)
    most = max(rows)
    steps = max(1, min(_STEPS, (model.max_positions - len(_PROMPT)) // (_BLOCKS + 2)))
    length = len(_PROMPT) + steps * (_BLOCKS + 2)
    config = EngineConfig(
        max_num_seqs=most,
        max_model_len=length,
        num_kv_blocks=most * -(-length // 16),
        max_prefill_tokens=most * len(_PROMPT),
        max_run_ms=0.0,
    )
    engine = Engine(model, config, is_static=is_static, graph_device=graph_device)
    rig = Rig(model, [], _PROMPT, most, 1, graph_device)
    try:
        return {num: max(0.0, _overhead(engine, rig, num, steps, sync_of(decoder.device))) for num in rows}
    finally:
        rig.close()
        engine.close()


def _overhead(engine: Engine, rig: Rig, rows: int, steps: int, sync: Callable[[], None]) -> float:
    """The median of blocks of steps, each less a block of passes."""
    params = SamplingParams(temperature=0.0, max_tokens=steps * (_BLOCKS + 2), ignore_eos=True)
    ids = [engine.add_request(_PROMPT, params) for _ in range(rows)]
    plain = rig.plain(rows)
    found = [_mean_ms(engine.step, steps, sync) - _mean_ms(plain, steps, sync) for _ in range(_BLOCKS)]
    assert engine.stats()["running"] == rows, "all of them took part all the time"
    engine.abort(ids, notify=False)
    return statistics.median(found)  # the first, with the prompts in it, is none of the middle ones


def _mean_ms(run: Callable[[], object], times: int, sync: Callable[[], None]) -> float:
    sync()
    started = time.perf_counter()
    for _ in range(times):
        run()
    sync()
    return 1e3 * (time.perf_counter() - started) / times
