"""The LayerSkip recipe [arXiv 2404.16710, section 4.1]: one model whose every layer can be read through its
own final norm and head.

Layer dropout skips layers at random, later ones more often, and early-exit losses train the hidden states
after some of the layers, other ones each step, to predict the next token. The result is a plain checkpoint of
the same architecture.

Layers are indexed l = 0 .. L-1, as in the paper; arguments and metrics count as the decoder does: exit n
reads the hidden state after n layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import TrainingError
from .examples import Example, check_examples, step_indices
from .loop import Metrics, ParameterGroup
from .losses import hard_label_loss
from .settings import LayerSkipSettings
from .trunk import Batch, Trunk, collate, layers_kept, save_checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_EVAL_TOKENS = 2048  # whose logits are in memory together: 1 GB in float32 for a vocabulary of 128k


class ExitLoss(Trunk):
    """A causal language model of transformers whose `forward` returns the recipe's loss."""

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """-> (loss: a scalar, {"loss", "last_loss", "exits_loss"}: the last is the plain mean over early
        exits, if any are on)."""
        hidden = self.hidden_at_places(batch.weights, batch)
        losses = {layer: self._exit_loss(hidden[layer], batch.targets) for layer in batch.weights}
        loss = torch.stack([weight * losses[layer] for layer, weight in batch.weights.items()]).sum()
        *early, last = (losses[layer].detach() for layer in sorted(losses))
        values = {"loss": loss.detach(), "last_loss": last}
        if early:
            values["exits_loss"] = torch.stack(early).mean()
        return loss, values

    def hidden_at_places(self, layers: Collection[int], batch: Batch) -> dict[int, Tensor]:
        """layer -> its output [tokens, hidden] at `batch.places`, ahead of the final norm."""
        found = self.hidden_after(layers, batch)
        return {layer: hidden[batch.places] for layer, hidden in found.items()}

    def _exit_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return hard_label_loss(self.normed(hidden), targets, self.head)


class LayerSkipTask:
    """The recipe as a `loop.Task`."""

    def __init__(
        self,
        model: PreTrainedModel,
        examples: Sequence[Example],
        held_out: Sequence[Example],
        settings: LayerSkipSettings,
        *,
        batch_size: int,
        num_steps: int,
        seed: int = 0,
        eval_exits: Sequence[int] | None = None,
    ) -> None:
        """model: taken over, and changed in place. batch_size: examples per step, of all processes together;
        num_steps: of the whole run, which schedules are shares of; seed: of all that is random.

        eval_exits: early exits to evaluate, from 1 to L - 1; None for those at a quarter, half and three
        quarters of the depth. Raises TrainingError for examples, a model or exits that cannot be trained or
        evaluated.
        """
        self.module = ExitLoss(model)
        self._examples, self._held_out, self._settings = examples, held_out, settings
        self._batch_size, self._num_steps, self._seed = batch_size, num_steps, seed
        self._num_layers = model.config.num_hidden_layers
        early = range(1, self._num_layers)
        if eval_exits is None:
            eval_exits = [layer for q in (1, 2, 3) if (layer := round(self._num_layers * q / 4)) in early]
        self._eval_exits = sorted(set(eval_exits))
        if not set(self._eval_exits) <= set(early):
            raise TrainingError(
                f"eval_exits is {self._eval_exits}; early exits of this model are 1 to {self._num_layers - 1}"
            )
        check_examples(examples, held_out, model.config.vocab_size)
        self.module.make_trainable(settings.lora_rank, settings.lora_alpha, seed)
        self.module.train()

    def parameter_groups(self) -> list[ParameterGroup]:
        return [ParameterGroup([each for each in self.module.parameters() if each.requires_grad])]

    def compile_layers(self) -> None:
        """See loop.Task."""
        self.module.compile_layers()

    def micro_batches(self, step: int, rank: int, num_ranks: int, device: torch.device) -> list[Batch]:
        """See loop.Task: one."""
        return [self.batch(step, rank, num_ranks, device)]

    def batch(self, step: int, rank: int, num_ranks: int, device: torch.device) -> Batch:
        """All examples of a step. Raises TrainingError for more processes than examples in a batch."""
        settings = self._settings
        picked = step_indices(len(self._examples), self._batch_size, step, self._seed, rank, num_ranks)
        rates = settings.dropout_rates(self._num_layers, step, self._num_steps)
        keep = layers_kept(rates, len(picked), self._seed, step, rank)
        weights = settings.exit_weights(self._num_layers, step, self._num_steps)
        return collate([self._examples[index] for index in picked], device, keep, weights)

    def num_places(self, micro_batch: Batch) -> int:
        return len(micro_batch.targets)

    def num_tokens(self, micro_batch: Batch) -> int:
        return int(micro_batch.attention_mask.sum())

    @torch.no_grad()
    def evaluate(self, device: torch.device) -> Metrics:
        """Held-out figures, per response token and without dropout; none without held-out examples.

        last_loss, exit_<n>_loss   cross entropy in nats
        exit_<n>_agreement         share of tokens for which the exit's likeliest token is the last layer's:
                                   greedy acceptance
        """
        last, totals, num_tokens = self._num_layers - 1, defaultdict[str, float](float), 0
        for start in range(0, len(self._held_out), self._batch_size):
            batch = collate(self._held_out[start : start + self._batch_size], device)
            hidden = self.module.hidden_at_places([last, *(exit - 1 for exit in self._eval_exits)], batch)
            num_tokens += len(batch.targets)
            for at in range(0, len(batch.targets), _EVAL_TOKENS):
                part = slice(at, at + _EVAL_TOKENS)
                logits = self.module.logits(hidden[last][part])
                choice = logits.argmax(-1)
                targets = batch.targets[part]
                totals["last_loss"] += float(F.cross_entropy(logits, targets, reduction="sum"))
                for exit_layer in self._eval_exits:
                    logits = self.module.logits(hidden[exit_layer - 1][part])
                    loss = F.cross_entropy(logits, targets, reduction="sum")
                    totals[f"exit_{exit_layer}_loss"] += float(loss)
                    totals[f"exit_{exit_layer}_agreement"] += float((logits.argmax(-1) == choice).sum())
        return {name: total / num_tokens for name, total in totals.items()}

    def save(
        self,
        folder: Path,
        *,
        dtype: torch.dtype | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """Writes a plain checkpoint to `folder`, LoRA merged, as a whole or not at all; training can go on
        afterwards.

        dtype: to store in; None for that of training. A checkpoint that is at `folder` is replaced.
        Raises TrainingError if `folder` holds something else, or cannot be written.
        """
        model, stored = self.module.model, dtype or next(self.module.parameters()).dtype
        save_checkpoint(folder, model, self.module.merged(stored), stored, tokenizer)
