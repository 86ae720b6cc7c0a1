"""Distillation into exits on a frozen trunk [Kangaroo, arXiv 2404.18911, section 3.1].

Each exit learns the full model's distribution: soft-label cross-entropy on the positions that predict a
response. Only the exits' own weights are trained; trunk, final norm and head never change, and neither do the
full model's logits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoint.exit_files import ExitInfo, ExitsError, ExitsFile
from ..checkpoint.loader import Checkpoint
from ..config import ModelConfig
from .attention import causal_attention
from .compiling import compile_methods
from .examples import Example, step_indices
from .hidden_states import FINAL, StateStore
from .loop import Metrics, ParameterGroup
from .losses import likeliest, soft_label_loss

_INIT_STD = 0.02
_EVAL_EXAMPLES = 16  # held-out examples per pass
# A batch has a multiple of so many tokens: a CPU's matrix kernels are generated anew for each shape.
_PAD_TO = 512
_PAD_PLACES_TO = 64  # likewise, predicting positions
_ROWS_PER_GROUP = 4  # examples that share a rectangle in attention


# Of a group of examples in a packed batch: the index of each token, its row in the group, its position.
Group = tuple[Tensor, Tensor, Tensor]
# Of a batch: its groups; or the length of its rows, where all are padded to it and lie one after the other.
Rows = Sequence[Group] | int


@dataclass
class StatesBatch:
    """Examples packed one after the other, then padding.

    states      "layer<l>" and "final", each [tokens, hidden] bfloat16
    positions   [tokens], in the example
    predicts    [tokens] bool: whether the position predicts a token of the response
    groups      examples of similar length
    """

    states: dict[str, Tensor]
    positions: Tensor
    predicts: Tensor
    groups: list[Group]


class AdapterBlock(nn.Module):
    """One block; its parameters carry the names of exits.safetensors (matrices [out, in])."""

    attention_norm: nn.Parameter
    q_proj: nn.Parameter
    k_proj: nn.Parameter
    v_proj: nn.Parameter
    o_proj: nn.Parameter
    mlp_norm: nn.Parameter
    gate_proj: nn.Parameter
    up_proj: nn.Parameter
    down_proj: nn.Parameter

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], model: ModelConfig) -> None:
        super().__init__()
        self._model = model
        for name, shape in shapes.items():
            start = torch.ones(shape) if name.endswith("norm") else _INIT_STD * torch.randn(shape)
            self.register_parameter(name, nn.Parameter(start))

    def forward(
        self,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        rows: Rows,
        places: Tensor | None = None,
    ) -> Tensor:
        """hidden [tokens, hidden] float32 -> the same shape, or of the tokens at `places` alone [places,
        hidden]; rotation: cosines and sines, each [tokens, 1, head_dim / 2]."""
        attended = None
        if hasattr(self, "q_proj"):
            q, k, v = self.project(hidden, rotation)
            if isinstance(rows, int):
                attended = self.attend(*(part.unflatten(0, (-1, rows)) for part in (q, k, v))).flatten(0, 1)
            else:
                attended = torch.zeros_like(q)
                for in_group, *places_of in rows:
                    of_group = self._attend_rows(q[in_group], k[in_group], v[in_group], *places_of)
                    attended = attended.index_copy(0, in_group, of_group)
        if places is not None:  # nobody reads the others, but for their keys and values
            hidden = hidden.index_select(0, places)
            attended = attended if attended is None else attended.index_select(0, places)
        return self.finish(hidden, attended)

    def project(self, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Up to attention: -> queries, keys and values [tokens, heads or kv_heads, head_dim]."""
        x = F.rms_norm(hidden, hidden.shape[-1:], self.attention_norm, self._model.rms_norm_eps)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (F.linear(x, weight).unflatten(-1, (-1, self._model.head_dim)) for weight in projections)
        return _rotate(q, rotation).to(v.dtype), _rotate(k, rotation).to(v.dtype), v

    def finish(self, hidden: Tensor, attended: Tensor | None) -> Tensor:
        """From attention on; attended [tokens, heads, head_dim]."""
        if attended is not None:
            hidden = hidden + F.linear(attended.flatten(1), self.o_proj)
        if hasattr(self, "gate_proj"):
            x = F.rms_norm(hidden, hidden.shape[-1:], self.mlp_norm, self._model.rms_norm_eps)
            inner = F.silu(F.linear(x, self.gate_proj)) * F.linear(x, self.up_proj)
            hidden = hidden + F.linear(inner, self.down_proj)
        return hidden

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention in each row; all [rows, length, heads or kv_heads, head_dim]."""
        return causal_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))

    def _attend_rows(self, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """Causal attention within each example; all [places, heads or kv_heads, head_dim]."""
        num_rows, length = int(rows.max()) + 1, int(positions.max()) + 1

        def rectangle(packed: Tensor) -> Tensor:
            """[rows, length, heads, head_dim]; zeros past an example's end, which causal attention hides."""
            out = packed.new_zeros(num_rows, length, *packed.shape[1:])
            return out.index_put((rows, positions), packed)

        return self.attend(*map(rectangle, (q, k, v)))[rows, positions]


class AdapterModule(nn.Module):
    """The trained part of one exit: blocks and a norm."""

    def __init__(self, info: ExitInfo, model: ModelConfig, vocabulary: Tensor | None) -> None:
        super().__init__()
        self.info, self.vocabulary, self._model = info, vocabulary, model
        shapes = info.shapes(model)
        of_block = [
            {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}
            for prefix in (f"blocks.{index}." for index in range(info.num_blocks))
        ]
        self.blocks = nn.ModuleList(AdapterBlock(shapes, model) for shapes in of_block)
        self.norm = nn.Parameter(torch.ones(model.hidden_size))

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], rows: Rows, places: Tensor) -> Tensor:
        """hidden [tokens, hidden] -> what the head reads at `places`, indices of tokens: [places, hidden]."""
        hidden = hidden.float()
        wanted = F.pad(places, (0, -len(places) % _PAD_PLACES_TO))  # with token 0
        for index, block in enumerate(self.blocks, start=1):
            hidden = block(hidden, rotation, rows, wanted if index == len(self.blocks) else None)
        if not self.blocks:
            hidden = hidden.index_select(0, wanted)
        return F.rms_norm(hidden, hidden.shape[-1:], self.norm, self._model.rms_norm_eps)[: len(places)]

    def compile_blocks(self) -> None:
        """Raises TrainingError, see `compile_methods`."""
        compile_methods(self.blocks, "project", "attend", "finish")

    def load(self, file: ExitsFile) -> None:
        """Takes the weights of the exit of this layer in `file`. Raises ExitsError if it has another shape, a
        vocabulary aside."""
        check_shape(self.info, file)
        tensors = file.tensors(file.info(self.info.layer), self._model)
        tensors.pop("vocabulary", None)
        self.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})

    def export(self) -> dict[str, Tensor]:
        """The tensors of exits.safetensors, on the CPU: weights in bfloat16, the vocabulary in int32."""
        state = self.state_dict()
        tensors = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in state.items()}
        if self.vocabulary is not None:
            tensors["vocabulary"] = self.vocabulary.to("cpu", torch.int32)
        return tensors


def check_shape(wanted: ExitInfo, file: ExitsFile) -> None:
    """Raises ExitsError if `file` has no exit of this layer and shape, a vocabulary aside."""
    info = file.info(wanted.layer)
    for name in ("num_blocks", "attention", "intermediate_size"):
        its, own = getattr(info, name), getattr(wanted, name)
        if its != own:
            raise ExitsError(
                f"the exit at layer {info.layer} in {file.folder} has {name}={its}, the one to train {own};"
                " give it the same shape, or another init"
            )


class Exits(nn.Module):
    """All exits that are trained in one pass, over one frozen head. Their losses share no weights."""

    def __init__(self, adapters: Sequence[AdapterModule], head: Tensor, inv_freq: Tensor) -> None:
        """head [vocab, hidden]; inv_freq [head_dim / 2]."""
        super().__init__()
        self.by_name = {f"layer{adapter.info.layer}": adapter for adapter in adapters}
        self.adapters = nn.ModuleDict(self.by_name)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("head", head, persistent=False)
        for size, adapter in {adapter.info.vocabulary_size: adapter for adapter in adapters}.items():
            # Vocabularies are prefixes of one list, so their size tells them apart.
            if adapter.vocabulary is not None:
                self.register_buffer(f"head{size}", head[adapter.vocabulary], persistent=False)

    def forward(self, batch: StatesBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of the exits' losses in nats per position, and each exit's own."""
        final = batch.states[FINAL][batch.predicts]
        outputs = self.outputs(batch).items()
        losses = {name: soft_label_loss(normed, final, self._head_of(name)) for name, normed in outputs}
        total = torch.stack(list(losses.values())).sum()
        return total, {name: loss.detach() for name, loss in losses.items()}

    def _head_of(self, name: str) -> Tensor:
        size = self.by_name[name].info.vocabulary_size
        return self.get_buffer("head" if size is None else f"head{size}")

    def outputs(self, batch: StatesBatch) -> dict[str, Tensor]:
        """The head's inputs [predicting positions, hidden], by exit."""
        rotation = rotations(batch.positions, self.get_buffer("inv_freq"))
        places = batch.predicts.nonzero()[:, 0]
        return {
            name: adapter(batch.states[name], rotation, batch.groups, places)
            for name, adapter in self.by_name.items()
        }

    def agreements(self, batch: StatesBatch) -> dict[str, Tensor]:
        """By exit: whether its likeliest token is the full model's, [predicting positions] bool."""
        expected = likeliest(batch.states[FINAL][batch.predicts], self.get_buffer("head"))
        return {
            name: likeliest(normed, self._head_of(name), self.by_name[name].vocabulary) == expected
            for name, normed in self.outputs(batch).items()
        }


class AdaptersTask:
    """The task of `loop.train`: exits, and the states of training and held-out examples."""

    def __init__(
        self,
        exits: Exits,
        store: StateStore,
        examples: Sequence[Example],
        held_out: range,
        batch_size: int,
        seed: int,
    ) -> None:
        """store: the states of `examples`; held_out: indices of the examples that are not trained on, the
        last ones."""
        self.module = exits
        self._store, self._examples, self._held_out = store, examples, held_out
        self._batch_size, self._seed = batch_size, seed

    def parameter_groups(self) -> list[ParameterGroup]:
        return [ParameterGroup(list(adapter.parameters())) for adapter in self.module.by_name.values()]

    def compile_layers(self) -> None:
        """See loop.Task."""
        for adapter in self.module.by_name.values():
            adapter.compile_blocks()

    def micro_batches(self, step: int, rank: int, num_ranks: int, device: torch.device) -> list[StatesBatch]:
        """See loop.Task: one."""
        return [self.batch(step, rank, num_ranks, device)]

    def batch(self, step: int, rank: int, num_ranks: int, device: torch.device) -> StatesBatch:
        """All examples of a step. Raises TrainingError for more processes than examples in a batch."""
        indices = step_indices(self._held_out.start, self._batch_size, step, self._seed, rank, num_ranks)
        return self._gather(indices, device)

    def num_places(self, micro_batch: StatesBatch) -> int:
        return int(micro_batch.predicts.sum())

    def num_tokens(self, micro_batch: StatesBatch) -> int:
        return sum(len(places) for places, _, _ in micro_batch.groups)

    def evaluate(self, device: torch.device) -> Metrics:
        """Each exit's means over held-out positions: `<exit>_loss` in nats, and `<exit>_agreement` with the
        full model's likeliest token. None without held-out examples."""
        totals, count = defaultdict[str, float](float), 0
        for start in range(self._held_out.start, self._held_out.stop, _EVAL_EXAMPLES):
            batch = self._gather(range(start, min(start + _EVAL_EXAMPLES, self._held_out.stop)), device)
            num_places = int(batch.predicts.sum())
            count += num_places
            losses, agreements = self.module(batch)[1], self.module.agreements(batch)
            for name in losses:
                totals[f"{name}_loss"] += float(losses[name]) * num_places
                totals[f"{name}_agreement"] += int(agreements[name].sum())
        return {name: total / count for name, total in totals.items()}

    def _gather(self, indices: Sequence[int], device: torch.device) -> StatesBatch:
        indices = sorted(indices, key=lambda index: len(self._examples[index].token_ids))
        parts = [self._store.read(index) for index in indices]
        lengths = torch.tensor([len(self._examples[index].token_ids) for index in indices])
        padding = -int(lengths.sum()) % _PAD_TO
        states = {
            name: F.pad(torch.cat([part[name] for part in parts]), (0, 0, 0, padding)).to(device)
            for name in parts[0]
        }
        rows = torch.repeat_interleave(torch.arange(len(indices)), lengths)
        starts = lengths.cumsum(0) - lengths
        positions = torch.arange(len(rows)) - starts[rows]
        first = torch.tensor([self._examples[index].prompt_len - 1 for index in indices])
        # The last token predicts nothing that is part of the example.
        predicts = (positions >= first[rows]) & (positions < lengths[rows] - 1)
        groups = []
        for row in range(0, len(indices), _ROWS_PER_GROUP):
            places = ((rows >= row) & (rows < row + _ROWS_PER_GROUP)).nonzero().squeeze(-1)
            groups.append((places.to(device), (rows[places] - row).to(device), positions[places].to(device)))
        positions, predicts = (F.pad(packed, (0, padding)).to(device) for packed in (positions, predicts))
        return StatesBatch(states, positions, predicts, groups)


def frequent_tokens(examples: Sequence[Example], vocab_size: int, ends: Sequence[int] = ()) -> Tensor:
    """All tokens [vocab], those most frequent in responses first; a reduced vocabulary is a prefix of it.

    ends: the tokens that end an answer come before all others, since answers may be cut, and an exit that
    does not know them never drafts the end.
    """
    learnt = [token for example in examples for token in example.token_ids[example.prompt_len :]]
    counts = torch.bincount(torch.tensor(learnt, dtype=torch.int64), minlength=vocab_size)
    counts[[end for end in ends if end < vocab_size]] += counts.sum() + 1  # a config may name others
    return counts.argsort(descending=True, stable=True)


def init_from_trunk(adapter: AdapterModule, checkpoint: Checkpoint) -> None:
    """Copies the layers that follow the exit into its blocks, where shapes agree, and the model's final norm.
    The exit then starts as a model without the layers between, and learns in half the steps."""
    attention, mlp = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
    sources = {name: f"self_attn.{name}" for name in attention} | {name: f"mlp.{name}" for name in mlp}
    sources |= {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    with torch.no_grad():
        adapter.norm.copy_(checkpoint.tensor("model.norm.weight"))
        for index, block in enumerate(adapter.blocks):
            layer = f"model.layers.{min(adapter.info.layer + index, checkpoint.config.num_layers - 1)}"
            for name, parameter in block.named_parameters():
                source = checkpoint.tensor(f"{layer}.{sources[name]}.weight")
                if source.shape == parameter.shape:
                    parameter.copy_(source)


def rotations(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding, each [tokens, 1, head_dim / 2]; positions [tokens]."""
    angles = torch.outer(positions.float(), inv_freq)
    return angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """x [tokens, heads, head_dim] turned by the rotary embedding, in float32."""
    cos, sin = rotation
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
