"""Exits: how the hidden state after a layer becomes logits.

    shared    the model's own final norm and head (LayerSkip checkpoints work as they are)
    adapter   a few trained blocks between the trunk and the frozen head, each RMSNorm -> attention with its
              own KV -> residual, then optionally RMSNorm -> gated MLP -> residual; a norm of its own last.
              Kangaroo's is one block without MLP [arXiv 2404.18911, section 3.1]

The trunk is not changed, so an adapter cannot change the full model's output. An adapter's KV lies in further
layers of the shared PagedKV: it is valid wherever the trunk's KV below it is, and rolled back with it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from cache.paged_kv import PagedKV
from cache.view import BatchView

from .checkpoint.exit_files import ExitInfo, ExitsFile
from .checkpoint.loader import Checkpoint
from .checkpoint.weights import EMBEDDING, HEAD
from .decoder import AttentionWeights, Decoder, LayerWeights, MlpWeights
from .linear import Linear
from .pass_steps import Kind, PassStep


class Exit(Protocol):
    """An exit after `layer` layers. Every pass over that layer calls one of the two methods with the hidden
    states that it computed; of an AdapterExit it may run the steps that these stand for instead.

    num_kv_layers: layers of KV of its own; methods are given the index of the first. vocabulary [n] int64:
    the tokens that it has logits of; None = all.
    """

    layer: int
    num_kv_layers: int
    num_bytes: int
    vocabulary: Tensor | None

    def logits(self, hidden: Tensor, kv: PagedKV, kv_layer: int, view: BatchView) -> Tensor:
        """hidden [tokens, hidden] after `layer` layers -> logits [tokens, n] of its vocabulary. Writes its
        KV; leaves `hidden` as it is."""

    def fill(self, hidden: Tensor, kv: PagedKV, kv_layer: int, view: BatchView) -> None:
        """Only writes its KV, at positions whose logits are not needed: prompts, and a draft's last token."""


class AdapterExit:
    """Trained blocks over a frozen trunk. Made by `load_exits`."""

    def __init__(
        self,
        decoder: Decoder,
        layer: int,
        blocks: list[LayerWeights],
        norm: Tensor,
        head: Linear | None,
        vocabulary: Tensor | None,
    ) -> None:
        """head: None = the model's own; vocabulary [reduced vocab] int64: the token of each of its outputs,
        None = all."""
        self.layer = layer
        self.num_kv_layers = len(blocks)
        self._decoder, self._blocks, self._norm = decoder, blocks, norm
        self._head = head or decoder.head
        self.vocabulary = vocabulary
        linears = [linear for block in blocks for linear in block.linears] + ([] if head is None else [head])
        self.num_bytes = norm.nbytes + sum(linear.num_bytes for linear in linears)

    def logits(self, hidden: Tensor, kv: PagedKV, kv_layer: int, view: BatchView) -> Tensor:
        decoder = self._decoder
        if self._blocks:
            hidden = decoder.run_weights(self._blocks, hidden.clone(), kv, kv_layer, view)
        return self._head(decoder.norm(hidden, self._norm))

    def fill(self, hidden: Tensor, kv: PagedKV, kv_layer: int, view: BatchView) -> None:
        if not self._blocks or self._blocks[-1].attention is None:
            return
        *first, last = self._blocks
        if first:
            hidden = self._decoder.run_weights(first, hidden.clone(), kv, kv_layer, view)
        assert last.attention is not None
        self._decoder.write_kv(last.attention, hidden, kv, kv_layer + len(first), view)

    def logit_steps(self, kv_layer: int) -> list[PassStep]:
        """`logits` as steps of a pass, the last of it."""
        blocks = [PassStep(Kind.LAYER, block, index) for index, block in enumerate(self._blocks, kv_layer)]
        branch = [PassStep(Kind.BRANCH)] if blocks else []
        return [
            *branch,
            *blocks,
            PassStep(Kind.HEAD, norm=self._norm, head=self._head, vocabulary=self.vocabulary),
        ]

    def fill_steps(self, kv_layer: int) -> list[PassStep]:
        """`fill` as steps of a pass."""
        if not self._blocks or self._blocks[-1].attention is None:
            return []
        *first, last = [
            PassStep(Kind.LAYER, block, index) for index, block in enumerate(self._blocks, kv_layer)
        ]
        last = replace(last, kind=Kind.FILL)
        return [PassStep(Kind.BRANCH), *first, last, PassStep(Kind.BACK)] if first else [last]


def load_exits(
    file: ExitsFile, layers: list[int], decoder: Decoder, checkpoint: Checkpoint
) -> list[AdapterExit]:
    """The exits at `layers` of `file`, on the decoder's device, in its dtype, quantized if it is.

    Raises ExitsError if the file belongs to another model, is damaged, or has no such exit.
    """
    file.check_model(checkpoint)
    return [_load(file, file.info(layer), decoder, checkpoint) for layer in layers]


def _load(file: ExitsFile, info: ExitInfo, decoder: Decoder, checkpoint: Checkpoint) -> AdapterExit:
    tensors = file.tensors(info, checkpoint.config)

    def read(name: str) -> Tensor:
        return tensors[name].to(decoder.device, decoder.weights_dtype).to(decoder.dtype)

    def linear(*names: str) -> Linear:
        return decoder.make_linear(torch.cat([read(name) for name in names]), None)

    blocks = []
    for index in range(info.num_blocks):
        at = f"blocks.{index}."
        attention = mlp = None
        if info.attention:
            qkv = linear(f"{at}q_proj", f"{at}k_proj", f"{at}v_proj")
            attention = AttentionWeights(read(f"{at}attention_norm"), qkv, linear(f"{at}o_proj"))
        if info.intermediate_size is not None:
            mlp = MlpWeights(
                read(f"{at}mlp_norm"), linear(f"{at}gate_proj", f"{at}up_proj"), linear(f"{at}down_proj")
            )
        blocks.append(LayerWeights(attention, mlp))
    head = vocabulary = None
    if info.vocabulary_size is not None:
        ids = tensors["vocabulary"].long()
        vocabulary = ids.to(decoder.device)
        weight = checkpoint.tensor(head_name(checkpoint))[ids]
        head = decoder.make_linear.head(weight.to(decoder.device, decoder.weights_dtype).to(decoder.dtype))
    return AdapterExit(decoder, info.layer, blocks, read("norm"), head, vocabulary)


def head_name(checkpoint: Checkpoint) -> str:
    """Name of the tensor [vocab, hidden] that turns hidden states into logits."""
    return EMBEDDING if checkpoint.config.tie_word_embeddings else HEAD
