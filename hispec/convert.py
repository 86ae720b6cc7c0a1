"""A Llama GGUF file as a plain float32 `transformers` folder.

Weights and config come through `ee_models`' own GGUF reader, the tokenizer is built here. `transformers` can read GGUF
too, but what it makes of a file differs between versions (an untied head, another tokenizer class, digits not split),
and its model counts as quantised and refuses to be saved.
"""
from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from .errors import HiSpecError

if TYPE_CHECKING:
    from gguf import GGUFReader
    from torch import Tensor
    from transformers import LlamaConfig, PreTrainedTokenizerBase

    from ee_models.loader import Checkpoint

ROUNDTRIP_TEXT = "In 2024, naïve 漢字 cost 1,234.50:\n\tx += 1  # twice"

# What `transformers` and GGUF call the same token.
NAMED_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
# The pre-tokenizers that differ in one thing only: SmolLM was trained on single digits, GPT-2 on any run of them.
SPLITS_DIGITS = {"smollm": True, "gpt-2": False}


class ConversionError(HiSpecError):
    """A GGUF file is not what this converter can read, or its parts contradict each other."""


def convert_gguf(gguf: Path, folder: Path, *, turn_end: str, progress: bool = True) -> None:
    """Writes weights (safetensors), config, generation config and tokenizer of `gguf` into the empty `folder`.

    `turn_end` is the token that ends a chat turn; it must be the file's end-of-sequence token.
    Raises ConversionError if the file is of another kind, lacks something, or contradicts itself.
    """
    # Imported here: these take seconds, and `hispec.fetch` is also imported just to look a name up.
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    from ee_models.errors import CheckpointError
    from ee_models.loader import open_checkpoint

    try:
        checkpoint = open_checkpoint(gguf)
        config = _config(checkpoint)
        tokenizer = _tokenizer(GGUFReader(gguf), config.max_position_embeddings)
        _check_tokenizer(tokenizer, turn_end)
        weights = _weights(checkpoint, progress)
    except CheckpointError as error:
        raise ConversionError(str(error)) from error

    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    tokens = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**tokens).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # safetensors makes its file private to the user; a model in a shared cache is for all who may read its config.
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)


def _config(checkpoint: Checkpoint) -> LlamaConfig:
    """The file's config in the words of `transformers`. Raises ConversionError for what this does not write down."""
    from transformers import LlamaConfig

    source = checkpoint.config
    if source.architecture != "LlamaForCausalLM" or source.rope.kind != "default" or source.sliding_window is not None:
        raise ConversionError(f"only a Llama with unscaled rotary embeddings and no window can be converted, got {source}")
    if len(source.eos_token_ids) != 1:
        raise ConversionError(f"the file has {len(source.eos_token_ids)} end-of-sequence tokens, {source.eos_token_ids}; supported: one")
    return LlamaConfig(
        architectures=[source.architecture],
        dtype="float32",
        vocab_size=source.vocab_size,
        hidden_size=source.hidden_size,
        intermediate_size=source.intermediate_size,
        num_hidden_layers=source.num_layers,
        num_attention_heads=source.num_heads,
        num_key_value_heads=source.num_kv_heads,
        head_dim=source.head_dim,
        rms_norm_eps=source.rms_norm_eps,
        max_position_embeddings=source.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": source.rope.theta},
        tie_word_embeddings=source.tie_word_embeddings,
        attention_bias=source.attention_bias,
        mlp_bias=source.mlp_bias,
        bos_token_id=source.bos_token_id,
        eos_token_id=source.eos_token_ids[0],
        pad_token_id=source.pad_token_id,
    )


def _weights(checkpoint: Checkpoint, progress: bool) -> dict[str, Tensor]:
    """All tensors of the model by their `transformers` names, in float32; a tied head is not among them."""
    names = tqdm(checkpoint.tensors, desc="convert", unit=" tensors", leave=False, file=sys.stderr, disable=None if progress else True)
    return {name: checkpoint.tensor(name).float().contiguous() for name in names}


def _tokenizer(reader: GGUFReader, context_len: int) -> PreTrainedTokenizerBase:
    """The byte-level BPE tokenizer in the file, with its special tokens and chat template."""
    from gguf import TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    _require(reader, "tokenizer.ggml.model", ["gpt2"])
    _require(reader, "tokenizer.ggml.pre", list(SPLITS_DIGITS))
    tokens = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    backend = Tokenizer(BPE(vocab={token: token_id for token_id, token in enumerate(tokens)}, merges=merges))
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, words]) if SPLITS_DIGITS[_field(reader, "tokenizer.ggml.pre")] else words
    backend.decoder = decoders.ByteLevel()
    kinds = _field(reader, "tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    named = {f"{name}_token": tokens[_field(reader, f"tokenizer.ggml.{key}_token_id")] for name, key in NAMED_TOKENS.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=_field(reader, "tokenizer.chat_template"),
        model_max_length=context_len,
        clean_up_tokenization_spaces=False,
        **named,
    )


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase, turn_end: str) -> None:
    """Raises ConversionError if text does not survive the tokenizer, or a chat turn would not end generation."""
    text = tokenizer.decode(tokenizer.encode(ROUNDTRIP_TEXT, add_special_tokens=False))
    if text != ROUNDTRIP_TEXT:
        raise ConversionError(f"the tokenizer turns {ROUNDTRIP_TEXT!r} into {text!r}")
    if tokenizer.eos_token != turn_end:
        raise ConversionError(f"a chat turn ends with {turn_end!r}, but the file's end-of-sequence token is {tokenizer.eos_token!r}")


def _field(reader: GGUFReader, key: str) -> Any:
    """The value of metadata `key`. Raises ConversionError if the file has none."""
    field = reader.get_field(key)
    if field is None:
        raise ConversionError(f"the file has no {key}")
    return field.contents()


def _require(reader: GGUFReader, key: str, supported: list[str]) -> None:
    """Raises ConversionError unless the value of `key` is one of `supported`."""
    value = _field(reader, key)
    if value not in supported:
        raise ConversionError(f"{key} is {value!r}; supported: {', '.join(supported)}")
