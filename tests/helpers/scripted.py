"""A decoder without weights: what each exit says is a script, and it notices when a round misuses it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cache.paged_kv import PagedKV
from cache.view import BatchView
from ee_models.config import ModelConfig, RopeConfig

# (exit layer, position of the token that was fed, that token) -> logits [vocab]
Script = Callable[[int, int, int], Tensor]


def tiny_config(num_layers: int, vocab_size: int) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        hidden_size=3,
        intermediate_size=4,
        num_layers=num_layers,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        rms_norm_eps=1e-5,
        max_position_embeddings=512,
        rope=RopeConfig(),
    )


class ScriptedDecoder:
    """Hidden states are (token, position, layers run so far). KV at a slot is (token, position).

    run_layers asserts that a span resumes where the last one stopped, at the right position, with the KV of
    exactly the right history below: a stale hidden row, a wrong slot or an uncommitted block cannot pass.
    """

    def __init__(self, script: Script, num_layers: int = 9, vocab_size: int = 50) -> None:
        self.config = tiny_config(num_layers, vocab_size)
        self.dtype, self.kv_dtype, self.device = torch.float32, torch.float32, torch.device("cpu")
        self._script = script
        self.max_positions = self.config.max_position_embeddings
        self.computed: list[tuple[int, int, int]] = []  # (layer, slot, token) in order of computation

    def embed(self, token_ids: Tensor) -> Tensor:
        return torch.stack(
            (token_ids.float(), torch.full_like(token_ids, -1).float(), torch.zeros_like(token_ids).float()),
            dim=1,
        )

    def run_layers(self, hidden: Tensor, lo: int, hi: int, kv: PagedKV, view: BatchView) -> Tensor:
        if lo == hi:
            return hidden
        assert bool((hidden[:, 2] == lo).all()), (
            f"layers [{lo}, {hi}) got hidden states of layer {hidden[:, 2].tolist()}"
        )
        if lo > 0:
            assert bool((hidden[:, 1] == view.positions).all()), "a hidden state of another position"
        hidden[:, 1], hidden[:, 2] = view.positions.float(), hi
        rows = view.row_ids()
        written = list(zip(view.slots.tolist(), map(int, hidden[:, 0].tolist()), strict=True))
        for layer in range(lo, hi):
            kv.write(layer, view.slots, hidden[:, None, :2], hidden[:, None, :2])
            self.computed += [(layer, slot, token) for slot, token in written]
        for row, position in zip(rows.tolist(), view.positions.tolist(), strict=True):
            history = torch.arange(position + 1)
            slots = view.block_tables[row, history // kv.block_size] * kv.block_size + history % kv.block_size
            tokens, positions = kv.keys(hi - 1)[slots, 0].unbind(-1)
            assert torch.equal(positions.long(), history), "KV of another position below a token"
            assert torch.equal(tokens, kv.keys(0)[slots, 0, 0]), "KV of another token at a higher layer"
        return hidden

    def fill_layers(self, hidden: Tensor, lo: int, hi: int, kv: PagedKV, view: BatchView) -> None:
        self.run_layers(hidden, lo, hi, kv, view)

    def logits(self, hidden: Tensor, exit_layer: int) -> Tensor:
        assert bool((hidden[:, 2] == exit_layer).all()), "an exit was read at another layer's hidden state"
        return torch.stack(
            [self._script(exit_layer, int(position), int(token)) for token, position, _ in hidden.tolist()]
        )


def one_hot_script(next_token: Callable[[int, int, int], int], vocab_size: int = 50) -> Script:
    """Each exit is sure of next_token(exit layer, position, token)."""

    def script(exit_layer: int, position: int, token: int) -> Tensor:
        return (
            torch.nn.functional.one_hot(
                torch.tensor(next_token(exit_layer, position, token)), vocab_size
            ).float()
            * 20.0
        )

    return script


def true_next(position: int, token: int, vocab_size: int = 50) -> int:
    """What the full model of the scripts says: depends on both, so that no mistake goes unseen."""
    return (token * 7 + position * 3 + 1) % vocab_size
