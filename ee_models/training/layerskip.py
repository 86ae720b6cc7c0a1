"""The LayerSkip recipe [arXiv 2404.16710, section 4.1]: one model whose every layer can be read through its
own final norm and head.

Layer dropout skips layers at random, later ones more often, and early-exit losses train the hidden states
after some of the layers, other ones each step, to predict the next token. The result is a plain checkpoint of
the same architecture.

Layers are indexed l = 0 .. L-1, as in the paper; arguments and metrics count as the decoder does: exit n
reads the hidden state after n layers.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint as recomputed

from ..checkpoint.loader import open_checkpoint
from ..errors import TrainingError
from ..families import FAMILIES
from .curriculum import LayerSkipSettings as LayerSkipSettings
from .examples import Example, step_indices
from .loop import Metrics

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Tokens whose logits are in memory together: 1 GB in float32 for a vocabulary of 128k.
TOKENS_AT_ONCE = 2048


@dataclass(frozen=True)
class Batch:
    """The batch of one process in one step.

    token_ids, attention_mask   [rows, q_len], padded on the right
    places, targets             [tokens]: index in the flattened rows of each position that predicts a
                                response token, and that token
    keep                        [layers, rows]: False where a row skips a layer; None: no row skips any
    weights                     layer -> weight of the loss of its exit
    """

    token_ids: Tensor
    attention_mask: Tensor
    places: Tensor
    targets: Tensor
    keep: Tensor | None
    weights: dict[int, float]


class ExitLoss(nn.Module):
    """Wraps a causal language model of transformers; `forward` returns the recipe's loss."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises TrainingError for a model that has no `layers` and `norm` under an output embedding."""
        super().__init__()
        self.model: Any = model
        if not (
            hasattr(model.base_model, "layers")
            and hasattr(model.base_model, "norm")
            and model.get_output_embeddings() is not None
        ):
            raise TrainingError(
                f"{type(model).__name__} is not built as Llama is (layers, norm, lm_head); train one of"
                f" {', '.join(family.architecture for family in FAMILIES)}"
            )

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """-> (loss: a scalar, {"loss", "last_loss", "exits_loss"}: the last is the plain mean over early
        exits, if any are on)."""
        hidden = self.hidden_after(batch.weights, batch)
        losses = {layer: self._exit_loss(hidden[layer], batch.targets) for layer in batch.weights}
        loss = torch.stack([weight * losses[layer] for layer, weight in batch.weights.items()]).sum()
        *early, last = (losses[layer].detach() for layer in sorted(losses))
        values = {"loss": loss.detach(), "last_loss": last}
        if early:
            values["exits_loss"] = torch.stack(early).mean()
        return loss, values

    def hidden_after(self, layers: Collection[int], batch: Batch) -> dict[int, Tensor]:
        """layer -> its output [tokens, hidden] at `batch.places`, ahead of the final norm."""
        with _watched(self.model.base_model.layers, batch.keep, layers) as found:
            self.model.base_model(
                input_ids=batch.token_ids, attention_mask=batch.attention_mask, use_cache=False
            )
        return {layer: hidden.flatten(0, 1)[batch.places] for layer, hidden in found.items()}

    def logits(self, hidden: Tensor) -> Tensor:
        """[tokens, hidden], not normed -> float32 [tokens, vocab]."""
        return self.model.get_output_embeddings()(self.model.base_model.norm(hidden)).float()

    def _exit_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy. Logits are computed a few at a time, and again in the backward pass, so that no
        two exits' are in memory together."""

        def compute_sum(hidden: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(self.logits(hidden), targets, reduction="sum")

        parts = zip(hidden.split(TOKENS_AT_ONCE), targets.split(TOKENS_AT_ONCE), strict=True)
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        return torch.stack([recomputed(compute_sum, *part, **options) for part in parts]).sum() / len(targets)


@contextmanager
def _watched(
    layers: nn.ModuleList, keep: Tensor | None, wanted: Collection[int]
) -> Iterator[dict[int, Tensor]]:
    """In its context, rows skip layers as `keep` says, and a forward pass puts the hidden states after the
    `wanted` layers into the dict."""
    found: dict[int, Tensor] = {}

    def watch(layer: int) -> Callable[..., Any]:
        def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            # Decoder layers return a tensor, or, in older transformers, a tuple that begins with it.
            hidden, *others = output if isinstance(output, tuple) else (output,)
            if keep is not None:
                before = args[0] if args else kwargs["hidden_states"]
                hidden = torch.where(keep[layer][:, None, None], hidden, before)
            if layer in wanted:
                found[layer] = hidden
            return (hidden, *others) if isinstance(output, tuple) else hidden

        return after

    with ExitStack() as hooks:
        for layer, module in enumerate(layers):
            hooks.callback(module.register_forward_hook(watch(layer), with_kwargs=True).remove)
        yield found


class LayerSkipTask:
    """The recipe as a `loop.Task`."""

    def __init__(
        self,
        model: PreTrainedModel,
        examples: Sequence[Example],
        held_out: Sequence[Example],
        settings: LayerSkipSettings,
        *,
        num_steps: int,
        seed: int = 0,
        eval_exits: Sequence[int] | None = None,
    ) -> None:
        """model: taken over, and changed in place. num_steps: of the whole run, which schedules are shares
        of; seed: of all that is random.

        eval_exits: early exits to evaluate, from 1 to L - 1; None for those at a quarter, half and three
        quarters of the depth. Raises TrainingError for examples, a model or exits that cannot be trained or
        evaluated.
        """
        self.module = ExitLoss(model)
        self._examples, self._held_out, self._settings = examples, held_out, settings
        self._num_steps, self._seed = num_steps, seed
        self._num_layers = model.config.num_hidden_layers
        early = range(1, self._num_layers)
        if eval_exits is None:
            eval_exits = [layer for q in (1, 2, 3) if (layer := round(self._num_layers * q / 4)) in early]
        self._eval_exits = sorted(set(eval_exits))
        if not set(self._eval_exits) <= set(early):
            raise TrainingError(
                f"eval_exits is {self._eval_exits}; early exits of this model are 1 to {self._num_layers - 1}"
            )
        _check_examples(examples, held_out, model.config.vocab_size)
        for module in model.modules():
            # Dropout would draw from the global generator, and a resumed run would differ.
            if getattr(module, "attention_dropout", 0.0):
                setattr(module, "attention_dropout", 0.0)  # noqa: B010, mypy takes it for a submodule
        if settings.lora_rank is not None:
            _add_lora(model, settings.lora_rank, settings.lora_alpha, seed)
        elif any(parameter.dtype != torch.float32 for parameter in model.parameters()):
            raise TrainingError(
                "training all weights takes them in float32, or small steps round away; mixed_precision=bf16"
                " still multiplies in bfloat16"
            )
        else:
            model.requires_grad_(True)
        self.module.train()

    def parameter_groups(self) -> list[list[nn.Parameter]]:
        return [[parameter for parameter in self.module.parameters() if parameter.requires_grad]]

    def batch(self, step: int, rank: int, num_ranks: int, device: torch.device) -> Batch:
        """See loop.Task. Raises TrainingError for more processes than examples in a batch."""
        settings = self._settings
        picked = step_indices(len(self._examples), settings.batch_size, step, self._seed, rank, num_ranks)
        rates = settings.dropout_rates(self._num_layers, step, self._num_steps)
        keep = None
        if any(rates):
            key = hashlib.blake2b(f"layer dropout {self._seed} {step} {rank}".encode(), digest_size=7)
            generator = torch.Generator().manual_seed(int.from_bytes(key.digest()))
            drawn = torch.rand(self._num_layers, len(picked), generator=generator)
            keep = drawn >= torch.tensor(rates)[:, None]
        weights = settings.exit_weights(self._num_layers, step, self._num_steps)
        return collate([self._examples[index] for index in picked], device, keep, weights)

    @torch.no_grad()
    def evaluate(self, device: torch.device) -> Metrics:
        """Held-out figures, per response token and without dropout; none without held-out examples.

        last_loss, exit_<n>_loss   cross entropy in nats
        exit_<n>_agreement         share of tokens for which the exit's likeliest token is the last layer's:
                                   greedy acceptance
        """
        last, totals, num_tokens = self._num_layers - 1, defaultdict[str, float](float), 0
        for start in range(0, len(self._held_out), self._settings.batch_size):
            batch = collate(self._held_out[start : start + self._settings.batch_size], device)
            hidden = self.module.hidden_after([last, *(exit - 1 for exit in self._eval_exits)], batch)
            num_tokens += len(batch.targets)
            for at in range(0, len(batch.targets), TOKENS_AT_ONCE):
                part = slice(at, at + TOKENS_AT_ONCE)
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

        def write(draft: Path) -> None:
            model.save_pretrained(draft, state_dict=_merged(model, stored))
            path = draft / "config.json"
            config = json.loads(path.read_text(encoding="utf-8"))
            config["dtype"] = str(stored).removeprefix("torch.")
            config.pop("quantization_config", None)  # what was unpacked for training is stored unpacked
            path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            # safetensors makes its files private, but a model is for all who may read its config.
            for weights in draft.glob("*.safetensors"):
                weights.chmod(path.stat().st_mode)
            if tokenizer is not None:
                tokenizer.save_pretrained(draft)

        _replace_folder(folder, write)


def load_trainable(path: str | Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The transformers model of a hub id or folder, on the CPU.

    Raises CheckpointError for what the decoder could not run afterwards, and TrainingError for a GGUF file.
    """
    from transformers import AutoModelForCausalLM

    folder = Path(open_checkpoint(path).path)
    if not folder.is_dir():
        raise TrainingError(
            f"{folder} is a GGUF file, whose weights are rounded; train the safetensors checkpoint that it"
            " was made from"
        )
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, use_safetensors=True, trust_remote_code=False, local_files_only=True
    )


def collate(
    examples: Sequence[Example],
    device: torch.device,
    keep: Tensor | None = None,
    weights: dict[int, float] | None = None,
) -> Batch:
    """Rows padded on the right to the longest, on `device`; only response tokens are targets."""
    # Padded with token 0, which attention_mask hides.
    token_ids = pad_sequence([torch.tensor(example.token_ids) for example in examples], batch_first=True)
    position = torch.arange(token_ids.shape[1])
    ends = torch.tensor([len(example.token_ids) for example in examples])[:, None]
    # The first token is predicted by none, even where it belongs to the response.
    starts = torch.tensor([max(1, example.prompt_len) for example in examples])[:, None]
    predicts = (position >= starts - 1) & (position < ends - 1)
    targets = token_ids.roll(-1, dims=1)[predicts]
    places = predicts.flatten().nonzero()[:, 0]
    mask = (position < ends).long()
    token_ids, mask, places, targets = (x.to(device) for x in (token_ids, mask, places, targets))
    keep = None if keep is None else keep.to(device)
    return Batch(token_ids, mask, places, targets, keep, weights or {})


def _check_examples(examples: Sequence[Example], held_out: Sequence[Example], vocab_size: int) -> None:
    if not examples:
        raise TrainingError("there are no examples to train on; give more data, or hold out less of it")
    for kind, group in (("training", examples), ("held-out", held_out)):
        for index, example in enumerate(group):
            if (size := len(example.token_ids)) <= max(1, example.prompt_len):
                raise TrainingError(
                    f"{kind} example {index} has {size} tokens, {example.prompt_len} of them prompt: none is"
                    " left to predict; leave it out"
                )
            if not 0 <= min(example.token_ids) <= max(example.token_ids) < vocab_size:
                raise TrainingError(
                    f"{kind} example {index} has tokens outside 0 to {vocab_size - 1}; it was made with"
                    " another model's tokenizer"
                )


def _add_lora(model: PreTrainedModel, rank: int, alpha: int, seed: int) -> None:
    """Puts trainable low-rank matrices beside every projection of the layers, and freezes all else."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise TrainingError(
            f"lora_rank is {rank}, which needs peft: install it, or set lora_rank to None to train all"
            " weights"
        ) from error
    head = model.get_output_embeddings()
    names = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    with torch.random.fork_rng(devices=[]):  # peft draws from the global generator
        torch.manual_seed(seed)
        inject_adapter_in_model(
            LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=sorted(names)), model
        )
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()  # whatever the frozen weights are stored in


def _merged(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """All weights by their names in a plain checkpoint, on the CPU; tied ones once. Does not change the
    model."""
    modules: dict[str, Any] = dict(model.named_modules())
    lora = {f"{name}.weight": each for name, each in modules.items() if hasattr(each, "get_delta_weight")}
    state = {}
    for name, parameter in model.named_parameters():
        name = name.replace(".base_layer.", ".")
        if ".lora_" not in name:
            weight = parameter + lora[name].get_delta_weight("default") if name in lora else parameter
            state[name] = weight.detach().to("cpu", dtype)
    return state


def _replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Calls `write` with an empty folder beside `folder`, then puts it in the place of `folder`. Raises
    TrainingError if that is neither empty nor a checkpoint, or cannot be written; then it is as it was."""
    is_empty = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not is_empty and not (folder / "config.json").is_file():
        raise TrainingError(f"{folder} exists and is no checkpoint; choose another folder, or remove it")
    draft, former = (folder.with_name(f".{folder.name}.{kind}.{os.getpid()}") for kind in ("draft", "former"))
    try:
        draft.mkdir(parents=True, exist_ok=True)
        write(draft)
        if folder.exists():
            os.replace(folder, former)
        os.replace(draft, folder)
    except (OSError, SafetensorError) as error:
        raise TrainingError(
            f"cannot write {folder}: {error}; free some space, or choose another folder"
        ) from error
    finally:
        if former.exists() and not folder.exists():
            os.replace(former, folder)
        for leftover in (draft, former):
            shutil.rmtree(leftover, ignore_errors=True)
