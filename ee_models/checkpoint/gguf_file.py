"""GGUF files: their metadata as a ModelConfig, and their tensors by Hugging Face names, dequantised one at a
time.

transformers reads GGUF too, but it dequantises the whole model at once and drops the factors of Llama 3's
rotary frequencies, so the file is read here, with the `gguf` package for its container, names and formats.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..config import ModelConfig, make_transformers_config
from ..errors import CheckpointError, reason, unsupported
from ..families import SUPPORTED_GGUF_SETTINGS, Family, check_settings, find_gguf_family
from ..rope import RopeConfig
from .gguf_tokenizer import read_tokenizer
from .weights import TensorInfo, expected_tensors

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFReader
    from transformers import PreTrainedTokenizerBase

# A divisor for each rotary frequency, where they are stretched as in Llama 3.
_ROPE_FACTORS = "rope_freqs.weight"
_CONTROL = 3  # tokenizer.ggml.token_type of a token that stands for no text
# Texts of tokens that end a turn, or all that is written, in one family or another.
_ENDS = frozenset(
    f"<{name}>".encode()
    for name in (
        *("|endoftext|", "|end_of_text|", "|eot_id|", "|eom_id|", "|im_end|", "|end|", "EOT"),
        *("end_of_turn", "|return|", "|call|"),
    )
)


@dataclass(frozen=True)
class _Place:
    """A tensor's bytes in the file. `num_heads`: number of heads whose rotated pairs of rows are neighbours,
    and must be taken apart; 0 where rows stay as they are."""

    offset: int
    num_bytes: int
    stored_shape: tuple[int, ...]  # of bytes if quantised, of numbers otherwise
    stored_type: GGMLQuantizationType
    num_heads: int = 0


class GgufSource:
    """A GGUF file: `config`, and the tensors by their Hugging Face names (a `weights.TensorSource`)."""

    def __init__(self, path: Path) -> None:
        """Reads the header. Raises CheckpointError for a damaged file, UnsupportedModelError for a model that
        the decoder cannot run."""
        reader = _open_reader(path)
        self._path = path
        places, shapes = {}, {}
        for tensor in reader.tensors:
            stored = (tensor.data_offset, tensor.n_bytes, tensor.data.shape, tensor.tensor_type)
            places[tensor.name] = _Place(*stored)
            shapes[tensor.name] = tuple(int(size) for size in reversed(tensor.shape))
        _check_types({place.stored_type for place in places.values()})
        metadata = _read_metadata(reader)
        rope_factors = _read_tensor(path, places[_ROPE_FACTORS]).float() if _ROPE_FACTORS in places else None
        family = find_gguf_family(metadata.get("general.architecture"))
        self.config = _read_config(family, metadata, shapes, rope_factors, _ends_by_text(reader))
        heads = {"q_proj": self.config.num_heads, "k_proj": self.config.num_kv_heads}
        self._places: dict[str, _Place] = {}
        self.index: dict[str, TensorInfo] = {}
        for name, hf_name in _hf_names(places, family, self.config).items():
            num_heads = heads.get(hf_name.split(".")[-2], 0) if family.gguf_interleaved else 0
            self._places[hf_name] = replace(places[name], num_heads=num_heads)
            self.index[hf_name] = TensorInfo(shapes[name], _unpacked_dtype(places[name].stored_type))

    def read(self, name: str) -> Tensor:
        """See weights.TensorSource. Quantised tensors are returned in float32."""
        place = self._places[name]
        tensor = _read_tensor(self._path, place)
        if not place.num_heads:
            return tensor
        # llama.cpp rotates neighbouring dimensions, [pair, 2]; transformers the halves of a head, [2, pair].
        pairs = tensor.unflatten(0, (place.num_heads, -1, 2))
        return pairs.transpose(1, 2).reshape(tensor.shape)

    def load_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """See gguf_tokenizer.read_tokenizer."""
        return read_tokenizer(_open_reader(self._path), self.config)


def _open_reader(path: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise CheckpointError(
            "GGUF files need the `gguf` package, which is not installed; pip install gguf"
        ) from error
    try:
        reader = GGUFReader(path)
    except (OSError, ValueError, LookupError, OverflowError, TypeError) as error:
        raise CheckpointError(
            f"{path.name} ({path.stat().st_size} bytes) is no complete GGUF file: {reason(error)}; fetch it"
            " again"
        ) from error
    if reader.byte_order != "I":
        raise CheckpointError(
            f"{path.name} was written for machines of the other byte order; convert it anew"
        )
    return reader


def _check_types(stored_types: set[GGMLQuantizationType]) -> None:
    """Raises UnsupportedModelError for a format that cannot be dequantised, found out by trying a block of
    zeros."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES, dequantize

    for stored_type in sorted(stored_types):
        if _unpacked_dtype(stored_type) != "F32" or stored_type.name == "F32":
            continue
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[stored_type][1]), dtype=np.uint8), stored_type)
        except (NotImplementedError, ValueError, LookupError) as error:
            raise unsupported(
                "tensor type", stored_type.name, "what the gguf package can dequantise"
            ) from error


def _read_metadata(reader: GGUFReader) -> dict[str, Any]:
    """The fields that hold one value; arrays, above all the vocabulary, are not read."""
    from gguf import GGUFValueType

    fields = reader.fields.items()
    try:
        return {name: field.contents() for name, field in fields if field.types[:1] != [GGUFValueType.ARRAY]}
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"the GGUF metadata holds text that is not UTF-8: {reason(error)}; convert the file anew"
        ) from error


def _ends_by_text(reader: GGUFReader) -> list[int]:
    """Control tokens of which the text says that they end something: a file has room for one such, where
    models have several."""
    from gguf import GGUFValueType

    tokens, kinds = (reader.fields.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    if tokens is None or kinds is None or tokens.types != [GGUFValueType.ARRAY, GGUFValueType.STRING]:
        return []
    if kinds.types[:1] != [GGUFValueType.ARRAY]:
        return []
    texts = (bytes(tokens.parts[place]) for place in tokens.data)
    pairs = enumerate(zip(texts, kinds.contents(), strict=False))
    return [number for number, (text, kind) in pairs if kind == _CONTROL and text in _ENDS]


def _read_config(
    family: Family,
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_factors: Tensor | None,
    ends: Sequence[int],
) -> ModelConfig:
    """The config in a file's metadata; biases and a tied head are told by its tensors' names. ends: tokens
    that end a text besides those that it names, which come first."""
    architecture = family.gguf_name
    check_settings(metadata.get, SUPPORTED_GGUF_SETTINGS, f"{architecture}.")
    check_settings(metadata.get, {"split.count": (1, 0)})

    def read(name: str, default: float | None = None) -> Any:
        value = metadata.get(f"{architecture}.{name}", default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(
                f"the GGUF field {architecture}.{name} is missing or holds no single number; convert the file"
                " anew"
            )
        return value

    heads = read("attention.head_count")
    head_dim = read("attention.key_length", read("embedding_length") // max(heads, 1))
    for name in ("attention.value_length", "rope.dimension_count"):
        if read(name, head_dim) != head_dim:
            raise unsupported(f"{architecture}.{name}", read(name), f"the head dimension, {head_dim}")
    names = "eos", "eot", "eom", "bos", "padding"
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names}
    named = [ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None]
    fields = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": (shapes.get("token_embd.weight") or (0,))[0],
        "hidden_size": read("embedding_length"),
        "intermediate_size": read("feed_forward_length"),
        "num_hidden_layers": read("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": read("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": read("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": read("context_length"),
        "rope_parameters": _read_rope(metadata, f"{architecture}.rope.", head_dim, rope_factors),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
        "eos_token_id": list(dict.fromkeys([*named, *ends])),
        "bos_token_id": ids["bos"],
        "pad_token_id": ids["padding"],
    }
    config = ModelConfig.from_transformers(make_transformers_config(fields))
    # Mistral's files come as "llama", whose transformers config knows no window.
    return replace(config, sliding_window=read("attention.sliding_window", 0) or None)


def _read_rope(
    metadata: Mapping[str, Any], prefix: str, head_dim: int, factors: Tensor | None
) -> dict[str, Any]:
    """`rope_parameters` as transformers has them, from the fields whose names begin with `prefix`.

    factors: [head_dim / 2], the divisors of the frequencies. A file holds these where a Llama 3 config holds
    four numbers; the numbers are found again, or the file refused.
    """
    theta = metadata.get(f"{prefix}freq_base", RopeConfig.theta)
    factor = metadata.get(f"{prefix}scaling.factor", metadata.get(f"{prefix}scale_linear"))
    kind = metadata.get(f"{prefix}scaling.type", "none" if factor in (None, 0, 1) else "linear")
    if kind not in ("none", "linear"):
        raise unsupported(f"{prefix}scaling.type", kind, "none, linear")
    plain = {"rope_type": "default", "rope_theta": theta}
    if factors is None or torch.all(factors == 1):
        return {**plain, "rope_type": "linear", "factor": factor} if kind == "linear" else plain
    stretched = RopeConfig(theta, "llama3", round(float(factors.max()), 3))
    # First their number: a damaged file may claim any head dimension.
    if (
        kind == "linear"
        or 2 * factors.numel() != head_dim
        or not torch.allclose(
            factors, RopeConfig(theta).inv_freq(head_dim) / stretched.inv_freq(head_dim), rtol=1e-3
        )
    ):
        raise unsupported(
            _ROPE_FACTORS, [round(float(value), 3) for value in factors[:8]], "none, or Llama 3's"
        )
    numbers = {field: value for field, value in vars(stretched).items() if field not in ("theta", "kind")}
    return {**plain, "rope_type": "llama3", **numbers}


def _hf_names(names: Iterable[str], family: Family, config: ModelConfig) -> dict[str, str]:
    """The Hugging Face name of each tensor of the file, by the gguf package's own table; the rotary factors
    are none.

    A tensor that the config has no place for, such as blk.3.ffn_gate_exps.weight, is named so that
    `weights.check_tensors` finds it in its layer.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    architecture = next(key for key, name in MODEL_ARCH_NAMES.items() if name == family.gguf_name)
    names = [name for name in names if name != _ROPE_FACTORS]
    num_layers = min(config.num_layers, len(names))  # a damaged file may claim any number
    table = get_tensor_name_map(architecture, num_layers)
    known = {
        table.get_name(name, (".weight", ".bias")): name
        for name in expected_tensors(replace(config, num_layers=num_layers))
    }
    return {name: known.get(name, f"model.{name.replace('blk.', 'layers.', 1)}") for name in names}


def _unpacked_dtype(stored_type: GGMLQuantizationType) -> str:
    return stored_type.name if stored_type.name in ("F16", "BF16") else "F32"


def _read_tensor(path: Path, place: _Place) -> Tensor:
    """The dequantised tensor, its rows in the order of the file. Raises CheckpointError."""
    import numpy as np
    from gguf import dequantize

    try:
        stored = np.fromfile(path, dtype=np.uint8, count=place.num_bytes, offset=place.offset)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if stored.size != place.num_bytes:
        raise CheckpointError(
            f"{path.name} ends within a tensor, at byte {place.offset + stored.size}; fetch it again"
        )
    plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}.get(place.stored_type.name)
    if plain is None:
        return torch.from_numpy(dequantize(stored.reshape(place.stored_shape), place.stored_type))
    # BF16 is handed out as bytes, two for each number of its last dimension.
    return torch.from_numpy(stored).view(plain).reshape(*place.stored_shape[:-1], -1)
