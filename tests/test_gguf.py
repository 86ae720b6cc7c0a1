"""GGUF: a file written as llama.cpp's converter writes it comes back as the model that it was made from."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedModel

from ee_models.config import ModelConfig
from ee_models.loader import CheckpointError, UnsupportedModelError, load_tokenizer, open_checkpoint
from ee_models.weights import expected_tensors
from tests.tiny import BOS_ID, EOS_ID, SPECIAL_TOKENS, tiny_model

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
ARCHITECTURES = {"llama": "llama", "llama3": "llama", "smollm2": "llama", "biased_llama": "llama", "linear_rope": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
HIDDEN = 64  # whole blocks of 32 in every row, as the quantised formats need


def make_model(family: str) -> PreTrainedModel:
    changes: dict[str, Any] = {"num_layers": 2, "hidden": HIDDEN, "pad_token_id": None, "max_position_embeddings": 16384}
    if family == "llama3":  # the lengths that all Llama 3 models have; a file does not say them
        rope = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        changes["rope_parameters"] = {"rope_type": "llama3", "rope_theta": 5e5, **rope}
    if family == "smollm2":
        changes["num_attention_heads"] = 4
    return tiny_model(family, **changes)


def gguf_tensors(model: PreTrainedModel, architecture: str) -> Iterator[tuple[str, np.ndarray]]:
    heads = {"self_attn.q_proj": model.config.num_attention_heads, "self_attn.k_proj": model.config.num_key_value_heads}
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


def write_gguf(path: Path, family: str, kind: Kind = Kind.F32, left_out: str = "", tokenizer: str | None = None, **fields: Any) -> PreTrainedModel:
    """Writes a tiny model of the family; matrices in `kind`. `fields` replace metadata, where None leaves it out."""
    model, architecture = make_model(family), ARCHITECTURES[family]
    config = model.config
    metadata: dict[str, Any] = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size, "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads, "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }  # fmt: skip
    if family == "qwen3":
        metadata |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if config.rope_parameters["rope_type"] == "linear":
        metadata |= {"rope.scaling.type": "linear", "rope.scaling.factor": config.rope_parameters["factor"]}
    metadata |= {name.replace("__", "."): value for name, value in fields.items()}
    writer = gguf.GGUFWriter(path, str(metadata.pop("architecture", architecture)))
    for name, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(f"{architecture}.{name}", value)
        elif value is not None:
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
            add(name if name.startswith("split.") else f"{architecture}.{name}", value)
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    if tokenizer is not None:
        tokens = [*sorted(ByteLevel.alphabet()), *SPECIAL_TOKENS]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(tokenizer)
        writer.add_token_list([*tokens[:-1], "12"])
        writer.add_token_types([3 if token in SPECIAL_TOKENS[:-1] else 1 for token in tokens])
        writer.add_token_merges(["1 2"])
    for name, value in gguf_tensors(model, architecture):
        stored_as = kind if value.ndim == 2 else Kind.F32
        if name != left_out:
            writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(value), stored_as), raw_dtype=stored_as)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_config_and_tensors_are_those_of_the_model(tmp_path: Path, family: str) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", family)
    checkpoint = open_checkpoint(tmp_path / "tiny.gguf")
    expected = ModelConfig.from_transformers(model.config)
    assert checkpoint.config.rms_norm_eps == pytest.approx(expected.rms_norm_eps)
    assert {**vars(checkpoint.config), "rms_norm_eps": 0} == {**vars(expected), "rms_norm_eps": 0}
    assert checkpoint.dtype == torch.float32
    weights = dict(model.named_parameters())
    for name in expected_tensors(expected):
        assert torch.equal(checkpoint.tensor(name), weights[name]), name
    assert set(checkpoint.tensors) == set(weights)


@pytest.mark.parametrize(("kind", "dtype"), [(Kind.F16, torch.float16), (Kind.BF16, torch.bfloat16)])
def test_half_precision_stays_as_it_is_stored(tmp_path: Path, kind: Kind, dtype: torch.dtype) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", "llama", kind)
    checkpoint = open_checkpoint(tmp_path / "tiny.gguf")
    assert checkpoint.dtype == dtype
    for name, parameter in model.named_parameters():
        assert torch.equal(checkpoint.tensor(name), parameter.to(dtype) if parameter.ndim == 2 else parameter), name


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0])
def test_quantised_tensors_unpack_to_the_numbers_they_stand_for(tmp_path: Path, kind: Kind) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", "qwen2", kind)
    checkpoint = open_checkpoint(tmp_path / "tiny.gguf")
    assert checkpoint.dtype == torch.float32
    weight = dict(model.named_parameters())["model.layers.1.mlp.up_proj.weight"].detach().numpy()
    unpacked = torch.from_numpy(gguf.dequantize(gguf.quantize(weight, kind), kind))
    assert torch.equal(checkpoint.tensor("model.layers.1.mlp.up_proj.weight"), unpacked)


def test_a_folder_of_one_gguf_is_a_model_and_of_two_is_not(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", "llama")
    assert open_checkpoint(tmp_path).path == str(tmp_path / "a.gguf")
    (tmp_path / "b.gguf").hardlink_to(tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match=r"2 .gguf files \(a.gguf, b.gguf\); give the path of one"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(("pre", "pieces"), [("gpt-2", 1), ("smollm", 2)])
def test_the_tokenizer_splits_digits_as_the_file_says(tmp_path: Path, pre: str, pieces: int) -> None:
    write_gguf(tmp_path / "tiny.gguf", "llama", tokenizer=pre)
    tokenizer = load_tokenizer(open_checkpoint(tmp_path))
    assert tokenizer is not None
    assert len(tokenizer.encode("12")) == pieces
    assert tokenizer.decode(tokenizer.encode("naïve 漢字\n\t12")) == "naïve 漢字\n\t12"
    assert tokenizer.eos_token_id == EOS_ID


def test_a_file_without_tokenizer_has_none(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", "llama")
    assert load_tokenizer(open_checkpoint(tmp_path)) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architecture": "mamba"}, "general.architecture is 'mamba'; supported: llama, qwen2, qwen3"),
        ({"expert_count": 8}, "llama.expert_count is 8; supported: 0"),
        ({"split__count": 3}, "split.count is 3; supported: 1"),
        ({"rope__scaling__type": "yarn"}, "llama.rope.scaling.type is 'yarn'; supported: none, linear"),
        ({"rope__dimension_count": 8}, "llama.rope.dimension_count is 8; supported: the head dimension, 16"),
        ({"attention__head_count_kv": 3}, "num_kv_heads is 3; supported: a divisor of num_heads = 4"),
    ],
)
def test_what_the_decoder_does_not_implement_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    write_gguf(tmp_path / "tiny.gguf", "llama", **fields)
    with pytest.raises(UnsupportedModelError, match=message):
        open_checkpoint(tmp_path)


def test_rotary_factors_of_another_kind_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", "llama3", rope__freq_base=1e4)
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs.weight is .*supported: none, or Llama 3's"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_count": None}, "llama.block_count is missing or holds no single number"),
        ({"attention__head_count": [4, 4]}, "llama.attention.head_count is missing or holds no single number"),
        ({"left_out": "blk.1.ffn_up.weight"}, r"disagree in 1 tensor\(s\): model.layers.1.mlp.up_proj.weight is missing"),
    ],
)
def test_a_file_at_odds_with_itself_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    write_gguf(tmp_path / "tiny.gguf", "llama", **fields)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("kept", [0.0, 0.0001, 0.01, 0.5, 0.999])
def test_a_truncated_file_is_refused(tmp_path: Path, kept: float) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama")
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(CheckpointError, match=r"tiny.gguf \(\d+ bytes\) is no complete GGUF file"):
        open_checkpoint(path)


def test_a_file_truncated_after_opening_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama")
    checkpoint = open_checkpoint(path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match="ends within a tensor"):
        checkpoint.tensor("model.layers.1.mlp.up_proj.weight")
