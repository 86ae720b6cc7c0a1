"""The recipe `ee`: a model and its exits, trained together.

HiSpec takes for granted a target that was trained for early exits. Here the trunk learns by low-rank matrices
(LoRA) or with all weights, and trained exits read it on the way; their losses run on into the trunk, so that
early layers come to know what the last one will say. Two targets:

    labels   the last layer learns given answers: fine-tuning on one's own task, exits included
    self     the last layer stays what it was, by soft-label cross-entropy to the model without LoRA

Exits always learn the last layer's distribution of the moment, as those on a frozen trunk do (`adapters`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .adapters import AdapterModule, rotations
from .curriculum import dropout_rates
from .examples import Example, check_batch_size, check_examples, grouped_indices
from .loop import Metrics, ParameterGroup
from .losses import hard_label_loss, likeliest, soft_label_loss
from .settings import EarlyExitSettings
from .trunk import Batch, Learning, Trunk, collate, layers_kept, seeded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Rows of a micro-batch are padded to a multiple of so many tokens: a CPU's matrix kernels are generated anew
# for each shape.
_PAD_TO = 32


@dataclass(frozen=True)
class MicroBatch:
    """Some of a step's examples.

    share      its predicting positions over those of the process's step
    compared   [rows] bool: whose last layer is compared with the original, for the mean over all of its
               rows; the others have no gradient behind the deepest exit; None: all
    """

    batch: Batch
    share: float
    compared: Tensor | None = None


class ExitingModel(Trunk):
    """A trunk and trained exits over it. `forward` returns the recipe's loss."""

    def __init__(
        self,
        model: PreTrainedModel,
        adapters: Sequence[AdapterModule],
        inv_freq: Tensor,
        settings: EarlyExitSettings,
        weights: Sequence[float],
    ) -> None:
        """inv_freq [head_dim / 2]: of the rotary embedding; weights: of the exits' losses beside each other.
        Raises TrainingError for a model that is not built as Llama is."""
        super().__init__(model)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.adapters = nn.ModuleList(adapters)
        self._settings = settings
        self._last = model.config.num_hidden_layers - 1
        total = sum(weights) or 1.0
        self._into_trunk = [settings.exit_loss_scale * weight / total for weight in weights]

    def compile_layers(self) -> None:
        super().compile_layers()
        for adapter in self._adapters():
            adapter.compile_blocks()

    def forward(self, part: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """-> (this part's share of the step's loss: a scalar, the shares of {"last", "exit_<layer>"}, each
        loss in nats per position)."""
        batch, head = part.batch, self.head
        last, exits = self.states(batch, part.compared)
        if self._settings.target == "labels":
            of_last = hard_label_loss(last, batch.targets, head)
        elif part.compared is None:
            of_last = soft_label_loss(last, self.original(batch), head.detach())
        else:
            rows, here = rows_of(batch, part.compared)
            of_last = soft_label_loss(last[here], self.original(rows), head.detach())
        losses = {"last": of_last, **self.exit_losses(last, exits)}
        losses = {name: loss * part.share for name, loss in losses.items()}
        total = torch.stack(list(losses.values())).sum()
        return total, {name: loss.detach() for name, loss in losses.items()}

    def states(self, batch: Batch, chosen: Tensor | None = None) -> tuple[Tensor, dict[int, Tensor]]:
        """What the head reads at `batch.places`: [places, hidden] of the last layer, and by layer of the
        exits. Their gradient reaches the trunk in the recipe's share.

        chosen   [rows] bool: whose last layer has a gradient; None: all
        """
        layers = {adapter.info.layer - 1 for adapter in self._adapters()}
        learning = None if chosen is None else Learning.of(max(layers), chosen)
        found = self.hidden_after(layers | {self._last}, batch, learning)
        num_rows, q_len = batch.token_ids.shape
        positions = torch.arange(q_len, device=batch.token_ids.device).repeat(num_rows)
        rotation = rotations(positions, self.get_buffer("inv_freq"))
        exits = {}
        for adapter, share in zip(self._adapters(), self._into_trunk, strict=True):
            hidden = found[adapter.info.layer - 1]
            # The same values, but a share of the gradient.
            hidden = torch.lerp(hidden.detach(), hidden, share)
            exits[adapter.info.layer] = adapter(hidden, rotation, q_len, batch.places)
        return self.normed(found[self._last][batch.places]), exits

    def exit_losses(self, last: Tensor, exits: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """ "exit_<layer>" -> its loss in nats per position, of what `states` gave."""
        # The head is the last layer's: exits read it as it is.
        return {
            f"exit_{layer}": soft_label_loss(normed, last, self._head_of(layer))
            for layer, normed in exits.items()
        }

    @torch.no_grad()
    def original(self, batch: Batch) -> Tensor:
        """What the head read of the last layer before training, [places, hidden]."""
        with self.without_lora():
            found = self.hidden_after([self._last], replace(batch, keep=None))
        return self.normed(found[self._last][batch.places])

    def choices(self, last: Tensor, exits: Mapping[int, Tensor]) -> tuple[Tensor, dict[int, Tensor]]:
        """The likeliest tokens [places] of the last layer, and by layer of the exits, of what `states`
        gave."""
        return likeliest(last, self.head), {
            layer: likeliest(normed, self._head_of(layer), self._adapter(layer).vocabulary)
            for layer, normed in exits.items()
        }

    def _adapters(self) -> list[AdapterModule]:
        return [adapter for adapter in self.adapters if isinstance(adapter, AdapterModule)]

    def _adapter(self, layer: int) -> AdapterModule:
        return next(adapter for adapter in self._adapters() if adapter.info.layer == layer)

    def _head_of(self, layer: int) -> Tensor:
        vocabulary = self._adapter(layer).vocabulary
        head = self.head.detach()
        return head if vocabulary is None else head[vocabulary.to(head.device)]


class EarlyExitTask:
    """The recipe as a `loop.Task`."""

    def __init__(
        self,
        module: ExitingModel,
        examples: Sequence[Example],
        held_out: Sequence[Example],
        settings: EarlyExitSettings,
        *,
        batch_size: int,
        seed: int = 0,
    ) -> None:
        """module: taken over, and changed in place; batch_size: examples per step, of all processes together;
        seed: of all that is random. Raises TrainingError for examples or a model that cannot be trained."""
        self.module = module
        self._examples, self._held_out, self._settings, self._seed = examples, held_out, settings, seed
        self._batch_size = batch_size
        self._lengths = [len(example.token_ids) for example in examples]
        config = module.model.config
        check_examples(examples, held_out, config.vocab_size)
        check_batch_size(batch_size, len(examples))  # now, when nothing that this run replaces is gone
        # Rates do not change in a run: the model is trained already.
        self._dropout = dropout_rates(config.num_hidden_layers, settings.dropout_max, scale=1.0)
        module.make_trainable(settings.lora_rank, settings.lora_alpha, seed)
        module.train()

    def parameter_groups(self) -> list[ParameterGroup]:
        """The trunk's, then each exit's."""
        of_exits = [list(adapter.parameters()) for adapter in self.module.adapters]
        known = {id(each) for group in of_exits for each in group}
        trunk = [each for each in self.module.parameters() if each.requires_grad and id(each) not in known]
        return [ParameterGroup(trunk, self._settings.trunk_lr_scale), *map(ParameterGroup, of_exits)]

    def compile_layers(self) -> None:
        """See loop.Task."""
        self.module.compile_layers()

    def micro_batches(self, step: int, rank: int, num_ranks: int, device: torch.device) -> list[MicroBatch]:
        """See loop.Task: examples of similar length together. Raises TrainingError for more processes than
        examples in a batch."""
        size, step = self._batch_size, self._settings.skip_batches + step
        picked = grouped_indices(self._lengths, size, step, self._seed, rank, num_ranks)
        keep = layers_kept(self._dropout, len(picked), self._seed, step, rank)
        drawn = None
        if self._settings.target == "self" and self._settings.original_share < 1:
            drawn = torch.rand(len(picked), generator=seeded("originals", self._seed, step, rank))
        return self._split([self._examples[index] for index in picked], device, keep, drawn)

    def num_places(self, micro_batch: MicroBatch) -> int:
        return len(micro_batch.batch.targets)

    def num_tokens(self, micro_batch: MicroBatch) -> int:
        return int(micro_batch.batch.attention_mask.sum())

    @torch.no_grad()
    def evaluate(self, device: torch.device) -> Metrics:
        """Held-out figures per response token, without dropout; none without held-out examples.

        last_loss          cross entropy of the last layer on the responses, nats
        last_kl            target `self`: from the model before training to the last layer, nats
        last_same          target `self`: share of likeliest tokens that are that model's
        exit_<layer>_loss        soft-label cross entropy to the last layer, nats
        exit_<layer>_agreement   share of likeliest tokens that are the last layer's: greedy acceptance
        """
        module, totals, count = self.module, defaultdict[str, float](float), 0
        for part in self._split(self._held_out, device):
            batch, places = part.batch, len(part.batch.targets)
            count += places
            last, exits = module.states(batch)
            for name, value in module.exit_losses(last, exits).items():
                totals[f"{name}_loss"] += float(value) * places
            chosen, of_exits = module.choices(last, exits)
            for layer, choice in of_exits.items():
                totals[f"exit_{layer}_agreement"] += float((choice == chosen).sum())
            head = module.head
            totals["last_loss"] += float(hard_label_loss(last, batch.targets, head)) * places
            if self._settings.target == "self":
                original = module.original(batch)
                kl = soft_label_loss(last, original, head) - soft_label_loss(original, original, head)
                totals["last_kl"] += float(kl) * places
                totals["last_same"] += float((likeliest(original, head) == chosen).sum())
        return {name: total / count for name, total in totals.items()}

    def _split(
        self,
        examples: Sequence[Example],
        device: torch.device,
        keep: Tensor | None = None,
        drawn: Tensor | None = None,
    ) -> list[MicroBatch]:
        """Micro-batches of at most `max_pass_tokens`, padding included. keep [layers, examples]; drawn
        [examples]: the rows of the lowest are compared with the original; None: all."""
        order = sorted(range(len(examples)), key=lambda index: len(examples[index].token_ids), reverse=True)
        parts = []
        while order:
            longest = len(examples[order[0]].token_ids)
            fitting = max(1, self._settings.max_pass_tokens // (longest + -longest % _PAD_TO))
            num_rows = 1 << fitting.bit_length() - 1  # a power of two, for fewer different shapes
            parts.append(order[:num_rows])
            del order[:num_rows]
        batches = [
            collate(
                [examples[index] for index in part],
                device,
                None if keep is None else keep[:, part],
                pad_to=_PAD_TO,
                prompts_learn=self._settings.prompts_learn,
            )
            for part in parts
        ]
        total = sum(len(batch.targets) for batch in batches)
        compared = [None if drawn is None else self._lowest(drawn[part]) for part in parts]
        return [
            MicroBatch(batch, len(batch.targets) / total, None if rows is None else rows.to(device))
            for batch, rows in zip(batches, compared, strict=True)
        ]

    def _lowest(self, drawn: Tensor) -> Tensor | None:
        """Which of the rows are compared with the original, [rows] bool: those of the lowest numbers, at
        least one; None: all."""
        num_compared = max(1, round(self._settings.original_share * len(drawn)))
        return None if num_compared == len(drawn) else drawn.argsort().argsort() < num_compared


def rows_of(batch: Batch, chosen: Tensor) -> tuple[Batch, Tensor]:
    """The rows that are `chosen` [rows] bool, no layer skipped -> (their batch, [its places]: which of
    `batch.places` they are)."""
    q_len = batch.token_ids.shape[1]
    row, position = batch.places // q_len, batch.places % q_len
    here = chosen[row].nonzero().squeeze(-1)
    new_row = chosen.cumsum(0) - 1
    return replace(
        batch,
        token_ids=batch.token_ids[chosen],
        attention_mask=batch.attention_mask[chosen],
        places=(new_row[row] * q_len + position)[here],
        targets=batch.targets[here],
        keep=None,
    ), here
