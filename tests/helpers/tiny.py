"""Tiny random checkpoints and a tiny real tokenizer, for tests that need a model but no particular one.

Ordinary initialisation makes a model that repeats one token, and all its exits agree on it: such a model
proves nothing. With matrices N(0, 0.35²) and embeddings and head N(0, 1), 9 layers of 48 write varied text,
and exits agree with the full depth on few tokens (layer 1) to most (layer 8).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<s>", "</s>", "<pad>", "<|role|>")
BOS_ID, EOS_ID, PAD_ID, ROLE_ID = range(256, 260)
TINY_VOCAB = 256 + len(SPECIAL_TOKENS)  # one token per byte
MATRIX_STD = 0.35

CHAT_TEMPLATE = (
    "{% for message in messages %}<|role|>{{ message['role'] }}\n{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|role|>assistant\n{% endif %}"
)

# What each family is tested for. Sizes follow `hidden`: 4 heads of hidden / 4 unless a family says otherwise.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"class": "Llama", "num_key_value_heads": 2},
    "llama2": {"class": "Llama", "num_key_value_heads": 4},
    "llama3": {
        "class": "Llama",
        "num_key_value_heads": 2,
        # An original length of 64 puts some of the few frequencies of a small head in each of the three
        # bands.
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "codellama": {
        "class": "Llama",
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "linear_rope": {
        "class": "Llama",
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    },
    "biased_llama": {"class": "Llama", "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    "smollm2": {
        "class": "Llama",
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
    },
    "mistral": {"class": "Mistral", "num_key_value_heads": 2, "sliding_window": 256},
    "qwen2": {"class": "Qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"class": "Qwen3", "num_key_value_heads": 2, "head_dim": 16},
}


def tiny_model(
    family: str = "llama",
    *,
    num_layers: int = 9,
    hidden: int = 48,
    vocab: int = TINY_VOCAB,
    seed: int = 0,
    matrix_std: float = MATRIX_STD,
    **overrides: Any,
) -> PreTrainedModel:
    """A transformers model of the family in float32, its weights told by `seed`; `overrides` are fields of
    its config.

    matrix_std: of matrices and biases. The lower, the less the model makes of a rounding error.
    """
    fields: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        **FAMILIES[family],
        **overrides,
    }
    name = fields.pop("class")
    config = getattr(transformers, f"{name}Config")(**fields)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in parameter_name:  # near 1 but not 1, or a norm left out would pass
                parameter.copy_(1 + 0.1 * noise)
            elif "embed_tokens" in parameter_name or "lm_head" in parameter_name:
                parameter.copy_(noise)
            else:
                parameter.copy_(matrix_std * noise)
    return model


def tiny_checkpoint(
    path: str | Path,
    family: str = "llama",
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str | int | None = None,
    tokenizer: bool = False,
    **model: Any,
) -> Path:
    """Saves a `tiny_model(family, **model)` as safetensors in the folder `path`, and returns that.

    max_shard_size: as save_pretrained has it, e.g. "100KB"; None for a single file. tokenizer: add a
    `tiny_tokenizer`.
    """
    folder = Path(path)
    shards = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    tiny_model(family, **model).to(dtype).save_pretrained(folder, **shards)
    if tokenizer:
        tiny_tokenizer(folder)
    return folder


def tiny_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """Saves, in the folder `path`, a byte-level BPE tokenizer without merges: a byte is a token, for any
    text.

    The id of a byte is its place in the sorted alphabet of byte-level BPE, not its value. BOS is not added.
    """
    vocab = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<|role|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(path)
    return tokenizer
