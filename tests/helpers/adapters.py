"""Trained exits for tests: random ones of any shape, ones that are always right, and a scripted one that
notices a gap in its KV."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cache.paged_kv import PagedKV
from cache.view import BatchView
from ee_models.checkpoint.exit_files import BaseModelInfo, ExitInfo, ExitsFile, save_exits
from ee_models.checkpoint.loader import Checkpoint
from ee_models.config import ModelConfig
from ee_models.decoder import Decoder
from ee_models.exits import AdapterExit, Exit, load_exits
from ee_models.training.adapters import AdapterModule, init_from_trunk
from hispec.config import EngineConfig, Plan, SpeculativeConfig
from hispec.decoding.stages import DecoderLike
from hispec.engine import Engine
from tests.helpers.scripted import Script
from tests.helpers.tiny import MATRIX_STD

TINY_MLP = 96  # intermediate_size of the tiny models


def make_module(
    info: ExitInfo, model: ModelConfig, trunk: Checkpoint | None = None, seed: int = 0
) -> AdapterModule:
    """Random weights of the size that the tiny models' have, and a shuffled vocabulary; with `trunk`, copies
    of its layers."""
    generator = torch.Generator().manual_seed(seed + info.layer)
    vocabulary = None
    if info.vocabulary_size is not None:
        vocabulary = torch.randperm(model.vocab_size, generator=generator)[: info.vocabulary_size]
    module = AdapterModule(info, model, vocabulary)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else MATRIX_STD * noise)
    if trunk is not None:
        init_from_trunk(module, trunk)
    return module


def tensors_of(module: AdapterModule) -> dict[str, Tensor]:
    """As `export`, but in float32, so that a copy of the trunk is one bit for bit."""
    tensors = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    return (
        tensors if module.vocabulary is None else {**tensors, "vocabulary": module.vocabulary.to(torch.int32)}
    )


def make_exits(
    folder: Path,
    checkpoint: Checkpoint,
    infos: Sequence[ExitInfo],
    *,
    from_trunk: bool = False,
    seed: int = 0,
) -> ExitsFile:
    """Exits of these shapes for `checkpoint`, in float32, in `folder`."""
    modules = [
        make_module(info, checkpoint.config, checkpoint if from_trunk else None, seed) for info in infos
    ]
    exits = {module.info.layer: (module.info, tensors_of(module)) for module in modules}
    return save_exits(
        folder, BaseModelInfo.of("tiny", checkpoint), exits, {"name": "random"}, {"examples": 0}
    )


def whole_trunk(layer: int, num_layers: int = 9) -> ExitInfo:
    """The shape of an exit that, made `from_trunk`, is all the rest of the trunk: what it says is what the
    full model says."""
    return ExitInfo(layer=layer, num_blocks=num_layers - layer, intermediate_size=TINY_MLP)


def loaded(
    file: ExitsFile, decoder: Decoder, checkpoint: Checkpoint, layers: Sequence[int] | None = None
) -> list[AdapterExit]:
    return load_exits(file, list(file.layers if layers is None else layers), decoder, checkpoint)


def adapter_engine(
    decoder: DecoderLike,
    plan: Plan,
    exits: Sequence[Exit],
    *,
    rejection: bool = False,
    confidence: float | None = None,
    **config: Any,
) -> Engine:
    """As `support.make_engine`, with trained exits."""
    fields: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_model_len": 256,
        "block_size": 8,
        "num_kv_blocks": 256,
        "max_prefill_tokens": 32,
        **config,
    }
    # Its plan is overridden; acceptance and confidence are what it is for.
    speculative = SpeculativeConfig(
        draft={"layer": 1}, acceptance="rejection" if rejection else "coupled", draft_confidence=confidence
    )
    return Engine(decoder, EngineConfig(**fields), speculative, exits=exits, plan=plan)


class HistoryExit:
    """For a ScriptedDecoder. Its KV at a slot is (token, position), in each of its layers; whenever it is
    read, it asserts that the KV of exactly the right history is there. `says` [vocab] bool: tokens that it
    can say, None = all."""

    num_bytes = 0
    vocabulary = None

    def __init__(
        self, layer: int, script: Script, num_kv_layers: int = 1, says: Tensor | None = None
    ) -> None:
        self.layer, self.num_kv_layers = layer, num_kv_layers
        self._script, self._says = script, says
        self.num_read = 0

    def logits(self, hidden: Tensor, kv: PagedKV, kv_layer: int, view: BatchView) -> Tensor:
        self.fill(hidden, kv, kv_layer, view)
        self.num_read += view.num_tokens
        for row, position in zip(view.row_ids().tolist(), view.positions.tolist(), strict=True):
            history = torch.arange(position + 1)
            slots = view.block_tables[row, history // kv.block_size] * kv.block_size + history % kv.block_size
            for layer in range(kv_layer, kv_layer + self.num_kv_layers):
                tokens, positions = kv.keys(layer)[slots, 0].unbind(-1)
                assert torch.equal(positions.long(), history), (
                    "an adapter's KV is missing below a token, or is another position's"
                )
                assert torch.equal(tokens, kv.keys(0)[slots, 0, 0]), "an adapter's KV is another token's"
        logits = torch.stack(
            [self._script(self.layer, int(position), int(token)) for token, position, _ in hidden.tolist()]
        )
        return logits if self._says is None else logits.masked_fill(~self._says, -torch.inf)

    def fill(self, hidden: Tensor, kv: PagedKV, kv_layer: int, view: BatchView) -> None:
        assert bool((hidden[:, 2] == self.layer).all()), "an exit was given another layer's hidden states"
        assert bool((hidden[:, 1] == view.positions).all()), (
            "an exit was given hidden states of other positions"
        )
        for layer in range(kv_layer, kv_layer + self.num_kv_layers):
            kv.write(layer, view.slots, hidden[:, None, :2], hidden[:, None, :2])
