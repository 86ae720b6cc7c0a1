"""From a hub id, a folder or a GGUF file to a checked checkpoint, whose tensors are then read one by one.

Nothing is unpickled and no code of a checkpoint is run: weights come from safetensors or GGUF, classes from
the installed transformers.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..config import ModelConfig, make_transformers_config
from ..errors import CheckpointError, UnsupportedModelError, reason, shown, unsupported
from .gguf_file import GgufSource
from .weights import (
    EMBEDDING,
    HEAD,
    INDEX_FILE,
    SINGLE_FILE,
    SafetensorsSource,
    TensorInfo,
    TensorSource,
    check_tensors,
    prevailing_dtype,
    read_json,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Checkpoint", "CheckpointError", "UnsupportedModelError", "load_tokenizer", "open_checkpoint"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_WEIGHT_SUFFIXES = (".gguf", ".safetensors", ".bin", ".pt", ".pth")
_PICKLES = ("*.bin", "*.pt", "*.pth")
_CONFIG_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]  # configs, chat templates, vocabularies
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p")


@dataclass(frozen=True)
class Checkpoint:
    """A model's config, and its tensors by name. Every tensor the config calls for is known to be there.

    path                 a folder, or a .gguf file
    dtype                of most elements as stored; float32 for quantised GGUF, which is dequantised to it
    generation_defaults  temperature, top_p, top_k, min_p and repetition_penalty, those that the model sets
    tensors              the tensors that the model reads, and no others
    """

    path: str
    config: ModelConfig
    dtype: torch.dtype
    generation_defaults: dict[str, Any]
    tensors: Mapping[str, TensorInfo] = field(repr=False)
    source: TensorSource = field(repr=False)

    def has(self, name: str) -> bool:
        """Whether the model has this tensor: by its config, so not the unread head of a tied checkpoint."""
        return name in self.tensors

    def tensor(self, name: str) -> Tensor:
        """The tensor of a Hugging Face name, e.g. "model.norm.weight", on the CPU, in its stored dtype.

        Each call reads anew and the caller owns the result. Raises CheckpointError where there is no such
        tensor.
        """
        if not self.has(name):
            raise CheckpointError(f"{self.path} has no tensor {name!r} that {self.config.architecture} uses")
        return self.source.read(name)

    @cached_property
    def fingerprint(self) -> str:
        """A checksum that tells a model from others of its sizes by a small part of its weights; float32 and
        bfloat16 copies have the same.

        It covers the norms of all layers' inputs, and queries, values and MLP output of the first, middle and
        last layer, rounded to bfloat16: full fine-tuning changes the norms, low-rank adapters nearly always
        queries and values.
        A float16 copy, which rounds small weights, counts as another model.
        """
        depth = self.config.num_layers
        norms = ("input_layernorm", "post_attention_layernorm")
        linears = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
        parts = [f"{index}.{norm}" for index in range(depth) for norm in norms]
        parts += [f"{index}.{linear}" for index in sorted({0, depth // 2, depth - 1}) for linear in linears]
        digest = hashlib.blake2b(digest_size=16)
        for name in ("model.norm", *(f"model.layers.{part}" for part in parts)):
            weight = self.tensor(f"{name}.weight").to(torch.bfloat16).contiguous()
            digest.update(weight.view(torch.int16).numpy().tobytes())
        return digest.hexdigest()


def open_checkpoint(model: str | Path, revision: str | None = None) -> Checkpoint:
    """Finds `model`, reads its config and checks all tensors against it; weights are not read yet.

    model: a folder with config.json and safetensors, or with a single .gguf; a .gguf file; or a hub id,
    fetched unless a local path has that name. `revision` is a hub branch, tag or commit. Raises
    UnsupportedModelError for a model that the decoder cannot run, CheckpointError for any other fault.
    """
    try:
        path = Path(os.path.expanduser(model))
        if not path.exists():
            path = _fetch(model, revision)
        elif revision is not None:
            raise CheckpointError(f"revision {revision!r} has no meaning for a local path; leave it out")
        return _open_gguf(path) if path.is_file() else _open_folder(path)
    except CheckpointError as error:
        raise type(error)(f"cannot load model {str(model)!r}: {error}") from error


def load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase | None:
    """The checkpoint's tokenizer, or None where it has none. Raises CheckpointError where it cannot be
    loaded."""
    try:
        if isinstance(checkpoint.source, GgufSource):
            return checkpoint.source.load_tokenizer()
        if not any((Path(checkpoint.path) / name).is_file() for name in _TOKENIZER_FILES):
            return None
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(checkpoint.path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers, tokenizers and sentencepiece share no base class
        if "trust_remote_code" in str(error):  # what transformers advises, and we do not
            raise CheckpointError(
                f"the tokenizer of {checkpoint.path} is code of the checkpoint (auto_map in"
                " tokenizer_config.json), and HiSpec never runs that; give it a standard one (a"
                " tokenizer.json, and no auto_map), choose another model, or do without (skip_tokenizer_init)"
                " and pass token ids"
            ) from None
        raise CheckpointError(
            f"cannot load the tokenizer of {checkpoint.path}: {type(error).__name__}: {reason(error)}; mend"
            " its files, or do without (skip_tokenizer_init) and pass token ids"
        ) from error


def _open_folder(folder: Path) -> Checkpoint:
    if not any((folder / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)):
        return _open_gguf(_find_gguf(folder))
    config = _read_folder_config(folder)
    return _make_checkpoint(folder, config, SafetensorsSource(folder), _read_generation(folder))


def _open_gguf(path: Path) -> Checkpoint:
    if path.suffix.lower() != ".gguf":
        raise CheckpointError(
            f"{path.name} is no .gguf file; give the folder that holds config.json and the weights"
        )
    source = GgufSource(path)
    return _make_checkpoint(path, source.config, source, {})


def _make_checkpoint(
    path: Path, config: ModelConfig, source: TensorSource, generation: Mapping[str, Any]
) -> Checkpoint:
    tensors = check_tensors(config, source.index)
    # Some programs save a shared tensor twice. A head that was trained apart makes another model.
    is_said_twice = config.tie_word_embeddings and HEAD in source.index
    if is_said_twice and not torch.equal(source.read(HEAD), source.read(EMBEDDING)):
        raise CheckpointError(
            f"tie_word_embeddings is true in the config, but {HEAD} differs from {EMBEDDING}; set it to false"
            f" if the model has a head of its own, else delete {HEAD} from the weights"
        )
    dtype, defaults = prevailing_dtype(tensors), _read_defaults(generation)
    return Checkpoint(str(path), config, dtype, defaults, tensors, source)


def _find_gguf(folder: Path) -> Path:
    """The folder's one GGUF file. Raises CheckpointError, with what the folder holds instead."""
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files[:5])
        raise CheckpointError(f"the folder holds {len(files)} .gguf files ({names}); give the path of one")
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"its weights are pickles ({', '.join(pickles[:3])}), which can run code when read and so never"
            " are; convert them where you trust them: AutoModelForCausalLM.from_pretrained(...), then"
            " save_pretrained(...)"
        )
    others = sorted(file.name for file in folder.glob("*.safetensors"))
    found = f"it holds {', '.join(others[:3])}" if others else "nor weights of any other kind that is read"
    raise CheckpointError(
        f"{folder} has no {SINGLE_FILE}, {INDEX_FILE} or .gguf file; {found}. Save the model with"
        " save_pretrained(...), or name another; pickled weights are neither read nor fetched"
    )


def _read_folder_config(folder: Path) -> ModelConfig:
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json; fetch it from where the weights came from")
    fields = read_json(folder / "config.json")
    for key in ("quantization_config", "compression_config"):
        if fields.get(key):
            quantised = fields[key] if isinstance(fields[key], dict) else {}
            method = quantised.get("quant_method", quantised.get("format", "unknown"))
            raise unsupported(f"{key}.quant_method", method, "unquantised safetensors, or a GGUF file")
    return ModelConfig.from_transformers(make_transformers_config(fields), _read_generation(folder))


def _read_generation(folder: Path) -> dict[str, Any]:
    path = folder / "generation_config.json"
    return read_json(path) if path.is_file() else {}


def _read_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling settings of generation_config.json. `do_sample: false` is greedy, whatever else it sets,
    as in transformers."""
    given = {name: generation.get(name) for name in _SAMPLING_FIELDS}
    if generation.get("do_sample") is False:
        given = {"temperature": 0.0}
    given["repetition_penalty"] = generation.get("repetition_penalty")
    defaults = {name: value for name, value in given.items() if value is not None}
    for name, value in defaults.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(
                f"generation_config.json sets {name} to {shown(value)}; it must be a number; mend it, or"
                " take it out"
            )
    return defaults


def _fetch(model: str | Path, revision: str | None) -> Path:
    """The local snapshot of a hub repository, downloaded where it is not cached. Raises CheckpointError."""
    if isinstance(model, Path) or not _HUB_ID.fullmatch(model) or model.endswith(_WEIGHT_SUFFIXES):
        raise CheckpointError(
            "there is no such file or folder; give an existing one, or a hub id like 'owner/name'"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    # Subfolders, and Mistral's consolidated.safetensors, hold the same weights in other formats.
    options: dict[str, Any] = {"revision": revision, "ignore_patterns": ["*/*", "consolidated*"]}
    try:
        folder = Path(snapshot_download(model, allow_patterns=_CONFIG_FILES, **options))
        if not (folder / "config.json").is_file():
            raise CheckpointError(
                "the hub repository has no config.json; name one with config.json and safetensors, or fetch"
                " one of its .gguf files and give its path"
            )
        _read_folder_config(folder)  # a model that cannot be run is refused before its weights are fetched
        return Path(snapshot_download(model, allow_patterns=[*_CONFIG_FILES, "*.safetensors"], **options))
    except CheckpointError:
        raise
    except GatedRepoError as error:
        raise CheckpointError(
            "the hub asks for its licence to be accepted; accept it there, then `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            "there is no such local path, and the hub has no such repository open to you; mind the"
            " spelling, or `hf auth login` if it is private"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(
            f"the hub repository has no revision {revision!r}; name one of its branches, tags or commits"
        ) from error
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            "there is no such local path, it is not in the download cache, and the hub cannot be reached; go"
            " online, or give the path of a folder that holds the model"
        ) from error
    except Exception as error:  # of disks, of proxies, and of the hub's transports, which share no base class
        raise CheckpointError(
            f"the download from the hub failed: {type(error).__name__}: {reason(error)}"
        ) from error
