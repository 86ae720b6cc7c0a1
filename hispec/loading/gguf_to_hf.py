"""A Llama GGUF file as a plain float32 `transformers` folder.

`ee_models` reads the file; here its parts are checked and written down. `transformers` can read GGUF too, but
what it makes of a file differs between versions (an untied head, another tokenizer class, digits not split),
and its model counts as quantised and refuses to be saved.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from ..errors import HiSpecError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LlamaConfig, PreTrainedTokenizerBase

    from ee_models.checkpoint.loader import Checkpoint

# Settings with the same name in `ee_models` and `transformers`.
_SAME_NAME = (
    *(
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "head_dim",
        "rms_norm_eps",
        "max_position_embeddings",
    ),
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "bos_token_id", "pad_token_id"),
)
ROUNDTRIP_TEXT = "In 2024, naïve 漢字 cost 1,234.50:\n\tx += 1  # twice"


class ConversionError(HiSpecError):
    """A GGUF file is not what this converter can read, or its parts contradict each other."""


def convert_gguf(gguf: Path, folder: Path, *, turn_end: str, progress: bool = True) -> None:
    """Writes weights (safetensors), config, generation config and tokenizer of `gguf` into the empty
    `folder`.

    `turn_end` is the token that ends a chat turn; it must be the file's end-of-sequence token.
    Raises ConversionError if the file is of another kind, lacks something, or contradicts itself.
    """
    # Imported here: these take seconds, and `hispec.loading.fetch` is also imported just to look a name up.
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    from ee_models.checkpoint.loader import open_checkpoint
    from ee_models.errors import CheckpointError

    try:
        checkpoint = open_checkpoint(gguf)
        config = _config(checkpoint)
        tokenizer = _load_tokenizer(checkpoint, turn_end)
        weights = _weights(checkpoint, progress)
    except CheckpointError as error:
        raise ConversionError(str(error)) from error

    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    tokens = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**tokens).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # safetensors makes its file private to the user; a model in a shared cache is for all who may read its
    # config.
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)


def _config(checkpoint: Checkpoint) -> LlamaConfig:
    """The file's config in the words of `transformers`. Raises ConversionError for what this does not write
    down."""
    from transformers import LlamaConfig

    source = checkpoint.config
    kind = source.architecture, source.rope.kind, source.sliding_window
    if kind != ("LlamaForCausalLM", "default", None):
        raise ConversionError(
            f"only a Llama with unscaled rotary embeddings and no window can be converted, got {source}"
        )
    if not source.eos_token_ids:
        raise ConversionError("the file names no end-of-sequence token")
    return LlamaConfig(
        architectures=[source.architecture],
        dtype="float32",
        num_hidden_layers=source.num_layers,
        num_attention_heads=source.num_heads,
        num_key_value_heads=source.num_kv_heads,
        rope_parameters={"rope_type": "default", "rope_theta": source.rope.theta},
        eos_token_id=source.eos_token_ids[0],  # the file's own
        **{name: getattr(source, name) for name in _SAME_NAME},
    )


def _weights(checkpoint: Checkpoint, progress: bool) -> dict[str, Tensor]:
    """All tensors of the model by their `transformers` names, in float32; a tied head is not among them."""
    shown = {"leave": False, "file": sys.stderr, "disable": None if progress else True}
    names = tqdm(checkpoint.tensors, desc="convert", unit=" tensors", **shown)
    return {name: checkpoint.tensor(name).float().contiguous() for name in names}


def _load_tokenizer(checkpoint: Checkpoint, turn_end: str) -> PreTrainedTokenizerBase:
    """The tokenizer in the file. Raises ConversionError if it cannot chat, loses text, or a turn would not
    end generation."""
    from ee_models.checkpoint.loader import load_tokenizer

    tokenizer = load_tokenizer(checkpoint)
    if tokenizer is None:
        raise ConversionError("the file has no tokenizer")
    if tokenizer.chat_template is None:
        raise ConversionError("the file has no chat template")
    text = tokenizer.decode(tokenizer.encode(ROUNDTRIP_TEXT, add_special_tokens=False))
    if text != ROUNDTRIP_TEXT:
        raise ConversionError(f"the tokenizer turns {ROUNDTRIP_TEXT!r} into {text!r}")
    if tokenizer.eos_token != turn_end:
        raise ConversionError(
            f"a chat turn ends with {turn_end!r}, but the file's end-of-sequence token is"
            f" {tokenizer.eos_token!r}"
        )
    return tokenizer
