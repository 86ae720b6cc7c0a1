"""Tensors by name: which ones a config calls for, and how they are read from safetensors files.

No file stays open or mapped between two reads, so a loader that converts tensor by tensor holds one copy of
the weights and one tensor.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Protocol

import torch
from torch import Tensor

from ..config import ModelConfig
from ..errors import CheckpointError, cut, reason, shown

_log = logging.getLogger(__name__)
INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_LISTED_PROBLEMS = 5
# Old versions of transformers saved it; the decoder computes it from the config.
_DERIVED_SUFFIX = ".rotary_emb.inv_freq"


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's shape and dtype as in the file's header; dtype by safetensors' names, e.g. "BF16"."""

    shape: tuple[int, ...]
    dtype: str


class TensorSource(Protocol):
    """Tensors by their Hugging Face names."""

    @property
    def index(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str) -> Tensor:
        """A tensor on the CPU that shares no memory with the file. Raises CheckpointError where the read
        fails."""


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors that the decoder reads. Linear weights are [out, in]."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    linears = (
        ("self_attn.q_proj", config.q_size, hidden, config.attention_bias),
        ("self_attn.k_proj", config.kv_size, hidden, config.attention_bias),
        ("self_attn.v_proj", config.kv_size, hidden, config.attention_bias),
        ("self_attn.o_proj", hidden, config.q_size, config.output_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    )
    norms = [("input_layernorm", hidden), ("post_attention_layernorm", hidden)]
    if config.qk_norm:
        norms += [("self_attn.q_norm", config.head_dim), ("self_attn.k_norm", config.head_dim)]
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        for name, size in norms:
            shapes[f"{prefix}.{name}.weight"] = (size,)
        for name, out_size, in_size, has_bias in linears:
            shapes[f"{prefix}.{name}.weight"] = (out_size, in_size)
            if has_bias:
                shapes[f"{prefix}.{name}.bias"] = (out_size,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    return shapes


def check_tensors(config: ModelConfig, index: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors of `index` that the decoder reads.

    Raises CheckpointError, with the first few problems and their number, where one is missing, has another
    shape than the config says or a dtype that cannot be read, or has no place in the config (an extra norm,
    an attention sink, a bias): leaving it out would change what the model computes.
    """
    num_layers = len({layer for layer in map(_layer_of, index) if layer is not None})
    if config.num_layers > num_layers:
        raise CheckpointError(
            f"num_layers is {config.num_layers} in the config, but the weights hold {num_layers} layers;"
            " fetch them again"
        )
    expected = expected_tensors(config)
    embedding = index.get(EMBEDDING)
    if embedding is not None and embedding.shape[:1] != (config.vocab_size,):
        raise CheckpointError(
            f"vocab_size is {config.vocab_size} in the config, but {EMBEDDING} has shape"
            f" {list(embedding.shape)}; set vocab_size to the number of its rows, or take the config it was"
            " saved with"
        )
    problems = [
        f"{name} is missing" + (" (tie_word_embeddings is false)" if name == HEAD else "")
        for name in expected
        if name not in index
    ]
    for name, info in index.items():
        if name not in expected:
            if _changes_output(name, config):
                problems.append(f"{name} has no place in {config.architecture} with this config")
        elif info.dtype not in DTYPES:
            problems.append(f"{name} has dtype {info.dtype}, which cannot be read ({', '.join(DTYPES)} can)")
        elif info.shape != expected[name]:
            problems.append(f"{name} has shape {list(info.shape)}, the config says {list(expected[name])}")
    if problems:
        more = len(problems) - _LISTED_PROBLEMS
        listed = "; ".join(cut(each, 200) for each in problems[:_LISTED_PROBLEMS]) + (
            f"; and {more} more" if more > 0 else ""
        )
        raise CheckpointError(
            f"weights and config disagree in {len(problems)} tensor(s): {listed}; take both from one place"
        )
    if num_layers > config.num_layers:  # of models that predict several tokens, for one; or of a wrong config
        _log.warning(
            "the config says %s layers, the weights hold %s: the last %s are left out",
            *(config.num_layers, num_layers, num_layers - config.num_layers),
        )
    return {name: index[name] for name in expected}


def _changes_output(name: str, config: ModelConfig) -> bool:
    """Whether leaving out the unexpected tensor `name` would change what the model computes: not so of layers
    past the config's last, of tables made from the config, and of the unread head of a tied checkpoint."""
    if name.endswith(_DERIVED_SUFFIX) or name == HEAD:
        return False
    layer = _layer_of(name)
    return name.startswith(("model.", "lm_head.")) and (layer is None or layer < config.num_layers)


def prevailing_dtype(index: Mapping[str, TensorInfo]) -> torch.dtype:
    """The dtype that most elements are stored in."""
    elements: Counter[str] = Counter()
    for info in index.values():
        elements[info.dtype] += torch.Size(info.shape).numel()
    return DTYPES[elements.most_common(1)[0][0]]


class SafetensorsSource:
    """The tensors of a folder's model.safetensors, or of the shards that its index names."""

    def __init__(self, folder: Path) -> None:
        """Reads the headers. Raises CheckpointError for shards that are missing, damaged or outside of the
        folder."""
        self._folder = folder
        if (folder / SINGLE_FILE).is_file():
            headers = {SINGLE_FILE: _read_header(folder / SINGLE_FILE)}
            self._files = dict.fromkeys(headers[SINGLE_FILE], SINGLE_FILE)
        else:
            self._files = _read_shard_index(folder / INDEX_FILE)
            headers = {file: _read_header(folder / file) for file in sorted(set(self._files.values()))}
        astray = [name for name, file in self._files.items() if name not in headers[file]]
        if astray:
            raise CheckpointError(
                f"{INDEX_FILE} places {shown(astray[0])} (and {len(astray) - 1} more) in"
                f" {shown(self._files[astray[0]])}, which does not hold it; the download is incomplete or"
                " mixes two checkpoints"
            )
        self.index = {name: headers[file][name] for name, file in self._files.items()}

    def read(self, name: str) -> Tensor:
        """See TensorSource."""
        from safetensors import SafetensorError, safe_open

        path = self._folder / self._files[name]
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                # What get_tensor returns is a view that would keep the whole file mapped.
                return file.get_tensor(name).clone()
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"cannot read {name} from {path}: {reason(error)}; fetch it again"
            ) from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path.name} as JSON: {reason(error)}; fetch it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path.name} holds a {type(content).__name__}; it must hold an object")
    return content


def _read_header(path: Path) -> dict[str, TensorInfo]:
    from safetensors import SafetensorError, safe_open

    if not os.path.isfile(path):  # which also knows names that no system takes
        raise CheckpointError(
            f"the shard {shown(path.name)} that {INDEX_FILE} names is missing; fetch the rest of the model"
        )
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            names = file.keys()
            parts = {name: file.get_slice(name) for name in names}
            return {name: TensorInfo(tuple(x.get_shape()), x.get_dtype()) for name, x in parts.items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path.name} ({path.stat().st_size} bytes) is no complete safetensors file: {reason(error)};"
            " fetch it again"
        ) from error


def _read_shard_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name. The index is untrusted: it may only name safetensors files beneath its
    folder."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path.name} has no weight_map; it must map tensor names to file names")
    for name, file in weight_map.items():
        # Checked as text, not resolved: a download cache keeps its files elsewhere, behind symbolic links.
        parts = (*PurePosixPath(str(file)).parts, *PureWindowsPath(str(file)).parts)
        rooted = PurePosixPath(str(file)).is_absolute() or PureWindowsPath(str(file)).anchor
        if not isinstance(file, str) or rooted or ".." in parts or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{path.name} places {shown(name)} in {shown(file)}; only .safetensors files within the"
                " model's folder are read"
            )
    return weight_map


def _layer_of(name: str) -> int | None:
    """3 for "model.layers.3.mlp.up_proj.weight"; None for a tensor of no layer."""
    match = re.match(r"model\.layers\.(\d{1,9})(\.|$)", name, re.ASCII)
    return int(match[1]) if match else None
