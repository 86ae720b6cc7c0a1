"""A whole model in training: transformers' own, watched and low-rank where a recipe wants it, and saved as a
plain checkpoint. Both recipes that train more than exits stand on it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import pad_sequence

from ..checkpoint.described import sync_files
from ..checkpoint.loader import open_checkpoint
from ..checkpoint.low_rank import LowRank
from ..errors import TrainingError
from ..families import FAMILIES
from . import attention
from .compiling import compile_methods
from .examples import Example
from .prompt_kv import PromptKV

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Batch:
    """The batch of one process in one step.

    token_ids, attention_mask   [rows, q_len], padded on the right
    places, targets             [tokens]: index in the flattened rows of each position that predicts a
                                response token, and that token
    keep                        [layers, rows]: False where a row skips a layer; None: no row skips any
    weights                     layer -> weight of the loss of its exit
    forward_only                positions of every row, from its first, that have no gradient: they are of
                                its prompt, and only what follows learns
    """

    token_ids: Tensor
    attention_mask: Tensor
    places: Tensor
    targets: Tensor
    keep: Tensor | None
    weights: dict[int, float]
    forward_only: int = 0


@dataclass(frozen=True)
class Learning:
    """Which rows have a gradient behind a layer. The others pass the deeper ones without: going back through
    a layer takes as long as going forward.

    until    the last layer that all rows learn from
    rows     [some] their indices
    others   [the others]
    back     [all rows]: where each is in rows, then others
    """

    until: int
    rows: Tensor
    others: Tensor
    back: Tensor

    @classmethod
    def of(cls, until: int, chosen: Tensor) -> Learning:
        """chosen [rows] bool"""
        rows, others = chosen.nonzero().squeeze(-1), (~chosen).nonzero().squeeze(-1)
        return cls(until, rows, others, torch.cat((rows, others)).argsort())


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
    attention.register()
    return AutoModelForCausalLM.from_pretrained(
        folder,
        attn_implementation=attention.NAME,
        dtype=dtype,
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
    )


class Trunk(nn.Module):
    """A causal language model of transformers whose layers can be watched and skipped."""

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

    @property
    def head(self) -> Tensor:
        """[vocab, hidden]"""
        return self.model.get_output_embeddings().weight

    def hidden_after(
        self, layers: Collection[int], batch: Batch, learning: Learning | None = None
    ) -> dict[int, Tensor]:
        """layer -> its output [rows * q_len, hidden], ahead of the final norm; learning: which rows have a
        gradient there, None = all."""
        weights = self._merged_weights() if _merges_lora(batch) else {}
        with ExitStack() as merged:
            if weights:
                merged.enter_context(self.without_lora())
            found = self._found_after(layers, batch, learning, weights)
        return {layer: hidden.flatten(0, 1) for layer, hidden in found.items()}

    def _found_after(
        self,
        layers: Collection[int],
        batch: Batch,
        learning: Learning | None,
        weights: dict[str, Tensor],
    ) -> dict[int, Tensor]:
        """As hidden_after, [rows, q_len, hidden]; weights: to take in place of the model's own."""
        first = batch.forward_only if torch.is_grad_enabled() else 0
        watched = partial(_watched, self.model.base_model.layers, batch.keep, layers)
        if not first:
            with watched(learning) as found:
                self._pass(batch.token_ids, 0, weights)
            return found
        kv = [PromptKV() for _ in self.model.base_model.layers]
        with torch.no_grad(), watched(None, kv) as of_prompt:
            self._pass(batch.token_ids[:, :first], 0, weights)
        # Older versions of torch would give the pass that learns weights that were cast without a gradient.
        torch.clear_autocast_cache()
        with watched(learning, kv) as found:
            self._pass(batch.token_ids[:, first:], first, weights)
        return {layer: torch.cat((of_prompt[layer], hidden), dim=1) for layer, hidden in found.items()}

    def _pass(self, token_ids: Tensor, first: int, weights: dict[str, Tensor]) -> None:
        """Has tokens [rows, positions], the first of them at position `first`, pass through all layers."""
        positions = torch.arange(first, first + token_ids.shape[1], device=token_ids.device)[None]
        inputs = {"input_ids": token_ids, "position_ids": positions, "use_cache": False}
        functional_call(self.model.base_model, weights, (), inputs)

    def _merged_weights(self) -> dict[str, Tensor]:
        """By their names: the weights with what LoRA adds to them now, from which gradients reach it; none
        where it is off. In mixed precision they are rounded to bfloat16, as in a checkpoint of that."""
        return {
            f"{name}.base_layer.weight": torch.addmm(
                module.base_layer.weight,
                module.lora_B["default"].weight * module.scaling["default"],
                module.lora_A["default"].weight,
            )
            for name, module in self.model.base_model.named_modules()
            if hasattr(module, "get_delta_weight") and not module.disable_adapters
        }

    def normed(self, hidden: Tensor) -> Tensor:
        """[tokens, hidden] -> the same through the final norm: what the head reads."""
        return self.model.base_model.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """[tokens, hidden], not normed -> float32 [tokens, vocab]."""
        return self.model.get_output_embeddings()(self.normed(hidden)).float()

    def make_trainable(self, lora_rank: int | None, lora_alpha: int, seed: int) -> None:
        """Sets free what is to be trained: low-rank matrices beside every projection of the layers, or with
        None all weights. Raises TrainingError for weights too coarse to train, or without peft."""
        for module in self.model.modules():
            # Dropout would draw from the global generator, and a resumed run would differ.
            if getattr(module, "attention_dropout", 0.0):
                setattr(module, "attention_dropout", 0.0)  # noqa: B010, mypy takes it for a submodule
        if lora_rank is not None:
            _add_lora(self.model, lora_rank, lora_alpha, seed)
        elif any(parameter.dtype != torch.float32 for parameter in self.model.parameters()):
            raise TrainingError(
                "training all weights takes them in float32, or small steps round away; mixed_precision=bf16"
                " still multiplies in bfloat16"
            )
        else:
            self.model.requires_grad_(True)

    def compile_layers(self) -> None:
        """Raises TrainingError, see `compile_methods`."""
        compile_methods(self.model.base_model.layers, "forward")

    @contextmanager
    def without_lora(self) -> Iterator[None]:
        """In its context, the model is the one that training began with."""
        lora = self._lora().values()
        for module in lora:
            module.enable_adapters(False)
        try:
            yield
        finally:
            for module in lora:
                module.enable_adapters(True)

    def low_rank(self) -> dict[str, LowRank]:
        """By the name of the weight that it changes: what LoRA adds to it, on the CPU."""
        return {
            name: LowRank(
                module.lora_A["default"].weight.detach().cpu(),
                module.lora_B["default"].weight.detach().cpu(),
                float(module.scaling["default"]),
            )
            for name, module in self._lora().items()
        }

    @torch.no_grad()
    def begin_as(self, low_rank: Mapping[str, LowRank]) -> None:
        """Has LoRA begin as `low_rank`, of its own rank and scale. Raises TrainingError for changes of other
        weights."""
        lora = self._lora()
        if lora.keys() != low_rank.keys():
            (name, *_) = sorted(lora.keys() ^ low_rank.keys())
            raise TrainingError(
                f"cannot begin with the given low-rank changes: {name} is changed by these or by this"
                " training, not by both; train without them"
            )
        for name, module in lora.items():
            given = low_rank[name]
            module.lora_A["default"].weight.copy_(given.a)
            module.lora_B["default"].weight.copy_(given.b)

    def _lora(self) -> dict[str, Any]:
        modules: dict[str, Any] = dict(self.model.named_modules())
        return {f"{name}.weight": each for name, each in modules.items() if hasattr(each, "get_delta_weight")}

    def merged(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """All weights by their names in a plain checkpoint, on the CPU; tied ones once. Changes nothing."""
        low_rank = self.low_rank()
        state = {}
        for name, parameter in self.model.named_parameters():
            name = name.replace(".base_layer.", ".")
            if ".lora_" not in name:
                weight = parameter.detach().cpu()
                state[name] = low_rank[name].added_to(weight, dtype) if name in low_rank else weight.to(dtype)
        return state


@contextmanager
def _watched(
    layers: nn.ModuleList,
    keep: Tensor | None,
    wanted: Collection[int],
    learning: Learning | None = None,
    kv: Sequence[PromptKV] | None = None,
) -> Iterator[dict[int, Tensor]]:
    """In its context, rows skip layers as `keep` says, those that are not `learning` pass deep layers without
    a gradient, attention takes the `kv` of its layer along, and a forward pass puts the hidden states after
    the `wanted` layers into the dict."""
    found: dict[int, Tensor] = {}
    apart: list[Tensor] = []  # of the rows that do not learn, where the others have left them

    def kept(layer: int, rows: Tensor | None, hidden: Tensor, before: Tensor) -> Tensor:
        if keep is None:
            return hidden
        kept = keep[layer] if rows is None else keep[layer][rows]
        return torch.where(kept[:, None, None], hidden, before)

    def is_deep(layer: int) -> bool:
        return learning is not None and layer > learning.until

    def with_kv(layer: int) -> Callable[..., Any]:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            assert kv is not None
            of_layer = kv[layer]
            if learning is not None and is_deep(layer):
                of_layer = of_layer.of(learning.rows)
            return args, kwargs | {"past_key_values": of_layer, attention.AHEAD: of_layer.num_positions}

        return before

    def watch(layer: int) -> Callable[..., Any]:
        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            # Decoder layers return a tensor, or, in older transformers, a tuple that begins with it.
            hidden, *others = output if isinstance(output, tuple) else (output,)
            before, *rest = args or (kwargs["hidden_states"],)
            deep = learning if is_deep(layer) else None
            complete = hidden = kept(layer, None if deep is None else deep.rows, hidden, before)
            if deep is not None:
                # The other rows follow, through the layer itself: a call would come here again.
                named = {name: value for name, value in kwargs.items() if name != "hidden_states"}
                if kv is not None:
                    named["past_key_values"] = kv[layer].of(deep.others)
                with torch.no_grad():
                    of_others = module.forward(apart[0], *rest, **named)
                    of_others = of_others[0] if isinstance(of_others, tuple) else of_others
                    apart[0] = kept(layer, deep.others, of_others, apart[0])
                if layer in wanted:
                    complete = torch.cat((hidden, apart[0]))[deep.back]
            elif learning is not None and layer == learning.until:
                apart[:] = [hidden.detach()[learning.others]]
                hidden = hidden[learning.rows]
            if layer in wanted:
                found[layer] = complete
            return (hidden, *others) if isinstance(output, tuple) else hidden

        return after

    with ExitStack() as hooks:
        for layer, module in enumerate(layers):
            if kv is not None:
                hooks.callback(module.register_forward_pre_hook(with_kv(layer), with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(watch(layer), with_kwargs=True).remove)
        yield found


def _merges_lora(batch: Batch) -> bool:
    """Whether LoRA is added to the weights, once a pass, not to each product. That takes a gradient of whole
    weights, half as many products again: worth it on a GPU, which spends most of its time between products,
    and not on a CPU."""
    return batch.token_ids.is_cuda


def layers_kept(rates: list[float], num_rows: int, seed: int, step: int, rank: int) -> Tensor | None:
    """[layers, rows] bool: which layers each row passes through, drawn by their rates of dropout as a
    function of (seed, step, rank); None: all."""
    if not any(rates):
        return None
    drawn = torch.rand(len(rates), num_rows, generator=seeded("layer dropout", seed, step, rank))
    return drawn >= torch.tensor(rates)[:, None]


def seeded(purpose: str, seed: int, step: int, rank: int) -> torch.Generator:
    """A generator on the CPU, for what is drawn for `purpose` in one step of one process."""
    key = hashlib.blake2b(f"{purpose} {seed} {step} {rank}".encode(), digest_size=7)
    return torch.Generator().manual_seed(int.from_bytes(key.digest()))


def collate(
    examples: Sequence[Example],
    device: torch.device,
    keep: Tensor | None = None,
    weights: dict[int, float] | None = None,
    pad_to: int = 1,
    prompts_learn: bool = True,
) -> Batch:
    """Rows padded on the right to the longest, and on to a multiple of `pad_to`, on `device`; only response
    tokens are targets. prompts_learn: False = what lies in the prompts of all rows, ahead of the places that
    predict, has no gradient, down to a multiple of `pad_to`."""
    # Padded with token 0, which nothing real attends to.
    token_ids = pad_sequence([torch.tensor(example.token_ids) for example in examples], batch_first=True)
    token_ids = F.pad(token_ids, (0, -token_ids.shape[1] % pad_to))
    position = torch.arange(token_ids.shape[1])
    ends = torch.tensor([len(example.token_ids) for example in examples])[:, None]
    # The first token is predicted by none, even where it belongs to the response.
    starts = torch.tensor([max(1, example.prompt_len) for example in examples])[:, None]
    predicts = (position >= starts - 1) & (position < ends - 1)
    targets = token_ids.roll(-1, dims=1)[predicts]
    places = predicts.flatten().nonzero()[:, 0]
    mask = (position < ends).long()
    forward_only = 0 if prompts_learn else int(starts.min()) - 1
    forward_only -= forward_only % pad_to
    token_ids, mask, places, targets = (x.to(device) for x in (token_ids, mask, places, targets))
    keep = None if keep is None else keep.to(device)
    return Batch(token_ids, mask, places, targets, keep, weights or {}, forward_only)


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


def save_checkpoint(
    folder: Path,
    model: PreTrainedModel,
    state: dict[str, Tensor],
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerBase | None,
    write_more: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Writes `state` as a plain checkpoint of `model`'s architecture, as a whole or not at all; `write_more`
    adds what belongs to it.

    A checkpoint that is at `folder` is replaced. Raises TrainingError if `folder` holds something else, or
    cannot be written.
    """

    def write(draft: Path) -> None:
        defaults = model.generation_config
        if defaults is not None:  # such as models come with, some versions of transformers refuse to write
            model.generation_config = type(defaults)()
        try:
            model.save_pretrained(draft, state_dict=state)
        finally:
            model.generation_config = defaults
        if defaults is not None:
            defaults.to_json_file(draft / "generation_config.json")
        path = draft / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        config["dtype"] = str(dtype).removeprefix("torch.")
        config.pop("quantization_config", None)  # what was unpacked for training is stored unpacked
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        # safetensors makes its files private, but a model is for all who may read its config.
        for weights in draft.glob("*.safetensors"):
            weights.chmod(path.stat().st_mode)
        if tokenizer is not None:
            tokenizer.save_pretrained(draft)
        write_more(draft)

    replace_folder(folder, "checkpoint", "config.json", write)


def replace_folder(folder: Path, kind: str, marker: str, write: Callable[[Path], None]) -> None:
    """Calls `write` with an empty folder beside `folder`, then puts it in the place of `folder`. Raises
    TrainingError if that is neither empty nor a `kind`, told by its file `marker`, or cannot be written; then
    it is as it was."""
    draft, former = (folder.with_name(f".{folder.name}.{which}") for which in ("draft", "former"))
    try:
        if former.exists() and not folder.exists():  # a process was killed between the two renames below
            os.replace(former, folder)
    except OSError as error:
        raise TrainingError(f"cannot move {former} back to {folder}: {error}; move it yourself") from error
    is_empty = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not is_empty and not (folder / marker).is_file():
        raise TrainingError(f"{folder} exists and is no {kind}; choose another folder, or remove it")
    for leftover in (draft, former):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        write(draft)
        sync_files(draft)
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
