"""Tiny GGUF files, written as llama.cpp's converter writes them, with the models and tokenizers of
tests.helpers.tiny."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType, TokenType
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedModel

from tests.helpers.tiny import BOS_ID, CHAT_TEMPLATE, EOS_ID, PAD_ID, SPECIAL_TOKENS, tiny_model

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ARCHITECTURES = {
    "llama": "llama",
    "llama3": "llama",
    "smollm2": "llama",
    "biased_llama": "llama",
    "linear_rope": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
HIDDEN = 64  # whole blocks of 32 in every row, as the quantised formats need
VOCAB = 272

BYTES = sorted(ByteLevel.alphabet())  # 256, so that ids from BOS_ID on are those of SPECIAL_TOKENS
BYTE_TOKENS = [*BYTES, *SPECIAL_TOKENS, "12", "123", "Ġt", "<think>"]
BYTE_LEVEL: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": BYTE_TOKENS,
    "tokenizer.ggml.token_type": [
        int(
            {"<think>": TokenType.USER_DEFINED}.get(
                token, TokenType.CONTROL if token in SPECIAL_TOKENS else TokenType.NORMAL
            )
        )
        for token in BYTE_TOKENS
    ],
    "tokenizer.ggml.merges": ["1 2", "12 3", "Ġ t"],
    "tokenizer.ggml.padding_token_id": PAD_ID,
    "tokenizer.chat_template": CHAT_TEMPLATE,
}
PIECES = {
    "▁": -9.0,
    "t": -9.0,
    "h": -9.0,
    "e": -9.0,
    "1": -9.0,
    "2": -9.0,
    "th": -4.0,
    "▁t": -1.0,
    "he": -2.0,
    "▁the": -3.0,
}  # and their scores
SENTENCEPIECE: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *PIECES,
        "<|role|>",
    ],
    "tokenizer.ggml.scores": [*[0.0] * 259, *PIECES.values(), 0.0],
    "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(PIECES), 4],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.chat_template": CHAT_TEMPLATE,
}


def write_gguf(
    path: Path,
    family: str = "llama",
    kind: Kind = Kind.F32,
    left_out: str = "",
    added: str = "",
    tokenizer: Mapping[str, Any] | None = None,
    **fields: Any,
) -> PreTrainedModel:
    """Writes a tiny model of the family, and returns it; matrices in `kind`, without the tensor `left_out`
    and with one of 32 ones named `added`.

    tokenizer: BYTE_LEVEL, SENTENCEPIECE or alike. `fields` replace metadata, where None leaves it out: of the
    architecture, unless their names say otherwise, with `__` for a dot.
    """
    model, architecture = _make_model(family), ARCHITECTURES[family]
    own = {name.replace("__", "."): value for name, value in fields.items()}
    writer = gguf.GGUFWriter(path, str(own.pop("architecture", architecture)))
    metadata = {
        **_metadata(model, family),
        "tokenizer.ggml.bos_token_id": BOS_ID,
        "tokenizer.ggml.eos_token_id": EOS_ID,
        **(tokenizer or {}),
    }
    metadata |= {
        name if name.startswith(("split.", "tokenizer.")) else f"{architecture}.{name}": value
        for name, value in own.items()
    }
    value_types = {
        bool: GGUFValueType.BOOL,
        int: GGUFValueType.UINT32,
        float: GGUFValueType.FLOAT32,
        str: GGUFValueType.STRING,
    }
    for name, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        elif value is not None:
            writer.add_key_value(name, value, value_types[type(value)])
    for name, tensor in _tensors(model, architecture):
        stored_as = kind if tensor.ndim == 2 else Kind.F32
        if name != left_out:
            writer.add_tensor(
                name, gguf.quantize(np.ascontiguousarray(tensor), stored_as), raw_dtype=stored_as
            )
    if added:
        writer.add_tensor(added, np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _make_model(family: str) -> PreTrainedModel:
    changes: dict[str, Any] = {
        "num_layers": 2,
        "hidden": HIDDEN,
        "vocab": VOCAB,
        "pad_token_id": None,
        "max_position_embeddings": 16384,
    }
    if family == "llama3":  # the lengths that all Llama 3 models have; a file does not say them
        rope = {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        changes["rope_parameters"] = {"rope_type": "llama3", "rope_theta": 5e5, **rope}
    if family == "smollm2":
        changes["num_attention_heads"] = 4
    return tiny_model(family, **changes)


def _metadata(model: PreTrainedModel, family: str) -> dict[str, Any]:
    config = model.config
    metadata: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }
    if family == "qwen3":
        metadata |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if config.rope_parameters["rope_type"] == "linear":
        metadata |= {"rope.scaling.type": "linear", "rope.scaling.factor": config.rope_parameters["factor"]}
    return {f"{ARCHITECTURES[family]}.{name}": value for name, value in metadata.items()}


def _tensors(model: PreTrainedModel, architecture: str) -> Iterator[tuple[str, np.ndarray]]:
    heads = {
        "self_attn.q_proj": model.config.num_attention_heads,
        "self_attn.k_proj": model.config.num_key_value_heads,
    }
    for name, parameter in model.named_parameters():
        part, _, kind = name.rpartition(".")
        value = parameter.detach()
        prefix = ""
        if part.startswith("model.layers."):
            layer, _, part = part.removeprefix("model.layers.").partition(".")
            prefix = f"blk.{layer}."
        if architecture == "llama" and part in heads:
            value = value.unflatten(0, (heads[part], 2, -1)).transpose(1, 2).reshape(value.shape)
        yield f"{prefix}{NAMES[part]}.{kind}", value.numpy()
    rope = model.config.rope_parameters
    if rope["rope_type"] == "llama3":
        plain = 1 / rope["rope_theta"] ** (np.arange(0, HIDDEN // 4, 2, dtype=np.float32) / (HIDDEN // 4))
        yield "rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
