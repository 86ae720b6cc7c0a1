"""The Llama-family decoder: embed, run any span of layers, read any layer's hidden state as logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from cache import int8_kv
from cache.paged_kv import PagedKV
from cache.view import BatchView

from .attention import AttentionBackend, select_backend
from .checkpoint.loader import Checkpoint
from .checkpoint.weights import EMBEDDING, HEAD
from .config import ModelConfig
from .kernels import QkNorms, runs_numba, select_kernels
from .linear import Linear
from .linear_factory import LinearMaker
from .pass_steps import Kind, PassStep
from .quantized import Quantization

if TYPE_CHECKING:
    from .fused_pass import FusedPasses


@dataclass(frozen=True)
class AttentionWeights:
    """Input norm [hidden], fused query-key-value projection, output projection, and the norms of heads."""

    norm: Tensor
    qkv: Linear
    output: Linear
    qk_norms: QkNorms = None


@dataclass(frozen=True)
class MlpWeights:
    """Input norm [hidden], fused gate and up projections, and the down projection."""

    norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class LayerWeights:
    """A layer of the trunk has both halves; one of an adapter may lack either."""

    attention: AttentionWeights | None
    mlp: MlpWeights | None

    @property
    def linears(self) -> list[Linear]:
        attention = [] if self.attention is None else [self.attention.qkv, self.attention.output]
        return attention + ([] if self.mlp is None else [self.mlp.gate_up, self.mlp.down])


class Decoder:
    """A model's weights on one device, and the passes over them. Tokens of a pass are packed: hidden states
    are [tokens, hidden].

    Any layer can be an exit through the model's own final norm and `head` (LayerSkip checkpoints work as they
    are).
    """

    def __init__(
        self,
        config: ModelConfig,
        embedding: Tensor,
        layers: list[LayerWeights],
        final_norm: Tensor,
        head: Linear,
        attention: AttentionBackend,
        max_positions: int,
        make_linear: LinearMaker,
        weights_dtype: torch.dtype | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.config = config
        self.make_linear = make_linear
        self.dtype, self.device = embedding.dtype, embedding.device
        self.weights_dtype, self.kv_dtype = weights_dtype or self.dtype, kv_dtype or self.dtype
        self.attention = attention
        self.kernels = select_kernels(self.device, self.dtype)
        self._embedding, self._layers, self._final_norm, self.head = embedding, layers, final_norm, head
        self.max_positions = max_positions
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = torch.outer(positions, config.rope.inv_freq(config.head_dim))
        self._cos_sin = torch.stack((angles.cos(), angles.sin()), dim=1).to(self.device)
        self._fused = self._fuse()

    @staticmethod
    def rotary_bytes(config: ModelConfig, max_positions: int) -> int:
        """Memory that making the rotary table of so many positions takes at most: angles, their cosines and
        sines, and both together."""
        return max_positions * config.head_dim * 5 * torch.float32.itemsize // 2

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        attention: str = "auto",
        max_positions: int | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
        quantization: Quantization | None = None,
        exact: bool = False,
        weights_dtype: torch.dtype | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> Decoder:
        """Reads, fuses and packs the weights layer by layer, so that the model is never held twice.

        dtype: of hidden states, and what is computed in but for narrow numbers; weights_dtype: what weights
        are rounded to before, kv_dtype: what KV is kept in; None: dtype. max_positions: rows of the rotary
        table; None: the model's limit. `progress(layers done, layers)`. quantization, exact: see LinearMaker.
        On a CPU a tied head is held as a copy, whose bytes a token reads; the embedding stays as it is.
        Raises CheckpointError for tensors that are missing or unreadable, ValueError for a dtype,
        quantization or backend that cannot run on `device`, and for heads that kv_dtype has no place for.
        """
        config = checkpoint.config
        if kv_dtype == torch.int8:
            if not runs_numba(device):
                raise ValueError(f"kv_cache_dtype 'int8' is for CPUs, not for {device}; use 'auto'")
            int8_kv.check_head(config.head_dim)
        make_linear = LinearMaker(device, dtype, quantization, exact, weights_dtype)
        # Ahead of the weights: what cannot run is refused before they are read.
        backend = select_backend(attention, device, dtype, exact, make_linear.attends_in_bfloat16)

        def read(name: str) -> Tensor:
            return checkpoint.tensor(name).to(device, weights_dtype or dtype).to(dtype)

        def fuse(names: Sequence[str], kind: str) -> Tensor:
            parts = [read(f"{name}.{kind}") for name in names]
            return torch.cat(parts) if len(parts) > 1 else parts[0]

        def linear(*names: str) -> Linear:
            bias = fuse(names, "bias") if checkpoint.has(f"{names[0]}.bias") else None
            return make_linear(fuse(names, "weight"), bias)

        layers = []
        for index in range(config.num_layers):
            layer = f"model.layers.{index}"
            at, mlp = f"{layer}.self_attn", f"{layer}.mlp"
            attention_weights = AttentionWeights(
                norm=read(f"{layer}.input_layernorm.weight"),
                qkv=linear(f"{at}.q_proj", f"{at}.k_proj", f"{at}.v_proj"),
                output=linear(f"{at}.o_proj"),
                qk_norms=(read(f"{at}.q_norm.weight"), read(f"{at}.k_norm.weight"))
                if config.qk_norm
                else None,
            )
            mlp_weights = MlpWeights(
                norm=read(f"{layer}.post_attention_layernorm.weight"),
                gate_up=linear(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
                down=linear(f"{mlp}.down_proj"),
            )
            layers.append(LayerWeights(attention_weights, mlp_weights))
            progress(index + 1, config.num_layers)
        embedding = read(EMBEDDING)
        head = make_linear.head(embedding if config.tie_word_embeddings else read(HEAD))
        return cls(
            config,
            embedding,
            layers,
            read("model.norm.weight"),
            head,
            backend,
            max_positions or config.max_position_embeddings,
            make_linear,
            weights_dtype,
            kv_dtype,
        )

    def _fuse(self) -> FusedPasses | None:
        """What runs a pass in one call, where something does."""
        if not self.make_linear.makes_panels:
            return None
        from .fused_pass import FusedPasses

        if not FusedPasses.can_run(self.attention, self.make_linear.threads):
            return None
        config = self.config
        return FusedPasses(
            self.attention,
            self.make_linear.threads,
            self._cos_sin,
            config.rms_norm_eps,
            config.num_heads,
            config.num_kv_heads,
        )

    @property
    def passes(self) -> FusedPasses | None:
        """What runs a pass in one call; None where nothing does, or with another attention than its own."""
        fused = self._fused
        return fused if fused is not None and fused.attention is self.attention else None

    def layer_steps(self, lo: int, hi: int) -> list[PassStep]:
        """Layers [lo, hi) as steps of a pass."""
        return [PassStep(Kind.LAYER, self._layers[index], index) for index in range(lo, hi)]

    def head_step(self) -> PassStep:
        """`logits` as a step of a pass."""
        return PassStep(Kind.HEAD, norm=self._final_norm, head=self.head)

    @property
    def embedding(self) -> Tensor:
        """[vocab, hidden]; `embed` takes its rows."""
        return self._embedding

    @property
    def _linears(self) -> list[Linear]:
        return [self.head, *(linear for layer in self._layers for linear in layer.linears)]

    @property
    def row_invariant(self) -> bool:
        """Whether a token's logits have the same bits whatever else is in its pass."""
        return self.attention.row_invariant and all(linear.row_invariant for linear in self._linears)

    @property
    def num_bytes(self) -> int:
        """Size of all weights as they are held; a tied head that is no copy counts once."""
        num_bytes = sum(linear.num_bytes for linear in self._linears)
        if self.config.tie_word_embeddings and not self.head.holds_copy:
            return num_bytes
        return num_bytes + self._embedding.nbytes

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids [tokens] int64 -> [tokens, hidden], a new tensor."""
        return F.embedding(token_ids, self._embedding)

    def run_layers(self, hidden: Tensor, lo: int, hi: int, kv: PagedKV, view: BatchView) -> Tensor:
        """Runs layers [lo, hi) over hidden [tokens, hidden] at the places of `view`, and writes their KV.

        Works in place: returns `hidden`, which after layers [0, D) can go on through [D, C) bit for bit as in
        one call.
        """
        return self.run_weights(self._layers[lo:hi], hidden, kv, lo, view)

    def fill_layers(self, hidden: Tensor, lo: int, hi: int, kv: PagedKV, view: BatchView) -> None:
        """As `run_layers` of at least one layer, where nobody reads what comes after the last: of that no
        more is computed than queries, keys and values, and these two are kept. Overwrites hidden [tokens,
        hidden]."""
        *layers, last = self._layers[lo:hi]
        hidden = self.run_weights(layers, hidden, kv, lo, view)
        assert last.attention is not None
        self.write_kv(last.attention, hidden, kv, hi - 1, view)

    def run_weights(
        self, layers: Sequence[LayerWeights], hidden: Tensor, kv: PagedKV, kv_layer: int, view: BatchView
    ) -> Tensor:
        """As `run_layers`, with the given weights; their KV goes to the layers of `kv` from `kv_layer` on."""
        if not layers:
            return hidden
        if (passes := self.passes) is not None:
            passes.run_layers(layers, hidden, kv, kv_layer, view)
            return hidden
        prepared = self.attention.prepare(view, kv)
        delta: Tensor | None = None
        for index, layer in enumerate(layers, start=kv_layer):
            if layer.attention is not None:
                q = self.write_kv(layer.attention, hidden, kv, index, view, delta)
                delta = layer.attention.output(self.attention.attend(q, kv, index, prepared))
            if layer.mlp is not None:
                normed = self.norm(hidden, layer.mlp.norm, delta)
                delta = layer.mlp.down(self.kernels.silu_mul(layer.mlp.gate_up(normed)))
        assert delta is not None
        return hidden.add_(delta)

    def write_kv(
        self,
        attention: AttentionWeights,
        hidden: Tensor,
        kv: PagedKV,
        kv_layer: int,
        view: BatchView,
        delta: Tensor | None = None,
    ) -> Tensor:
        """Adds `delta` to hidden [tokens, hidden] in place, if given, and writes the KV of one attention
        over it to layer `kv_layer` of `kv` -> rotated queries [tokens, heads, head_dim]."""
        qkv = attention.qkv(self.norm(hidden, attention.norm, delta))
        eps = self.config.rms_norm_eps
        return self.kernels.rope_and_store(qkv, self._cos_sin, attention.qk_norms, eps, kv, kv_layer, view)

    def norm(self, hidden: Tensor, weight: Tensor, delta: Tensor | None = None) -> Tensor:
        """Adds `delta` to hidden [tokens, hidden] in place, if given -> its RMSNorm, a new tensor."""
        return self.kernels.add_rms_norm(hidden, delta, weight, self.config.rms_norm_eps)

    def normed(self, hidden: Tensor) -> Tensor:
        """The model's final norm of hidden [tokens, hidden], a new tensor: what the head reads."""
        return self.norm(hidden, self._final_norm)

    def logits(self, hidden: Tensor, exit_layer: int) -> Tensor:
        """hidden [tokens, hidden] after `exit_layer` layers -> logits [tokens, vocab], by the model's own
        final norm and head."""
        return self.head(self.normed(hidden))
