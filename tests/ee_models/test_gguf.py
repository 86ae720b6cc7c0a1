"""GGUF: a file written as llama.cpp's converter writes it comes back as the model that it was made from."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from ee_models.checkpoint.loader import (
    CheckpointError,
    UnsupportedModelError,
    load_tokenizer,
    open_checkpoint,
)
from ee_models.checkpoint.weights import expected_tensors
from ee_models.config import ModelConfig
from tests.helpers.tiny_gguf import ARCHITECTURES, BYTE_LEVEL, write_gguf


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
        assert torch.equal(
            checkpoint.tensor(name), parameter.to(dtype) if parameter.ndim == 2 else parameter
        ), name


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0])
def test_quantised_tensors_unpack_to_the_numbers_they_stand_for(tmp_path: Path, kind: Kind) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", "qwen2", kind)
    checkpoint = open_checkpoint(tmp_path / "tiny.gguf")
    assert checkpoint.dtype == torch.float32
    weight = dict(model.named_parameters())["model.layers.1.mlp.up_proj.weight"].detach().numpy()
    unpacked = torch.from_numpy(gguf.dequantize(gguf.quantize(weight, kind), kind))
    assert torch.equal(checkpoint.tensor("model.layers.1.mlp.up_proj.weight"), unpacked)


def test_tokens_that_say_that_they_end_something_do_so(tmp_path: Path) -> None:
    """After those that the file names, which are one or two; a text that only looks like one is a text."""
    tokens = [*BYTE_LEVEL["tokenizer.ggml.tokens"]]
    kinds = [*BYTE_LEVEL["tokenizer.ggml.token_type"]]
    tokens[5], tokens[6], tokens[7] = "<|endoftext|>", "<|eom_id|>", "<|eot_id|>"
    kinds[5], kinds[6], kinds[7] = 3, 1, 3
    changed = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    for more, wanted in (({}, (9, 5, 7)), ({"tokenizer.ggml.eot_token_id": 7}, (9, 7, 5))):
        path = tmp_path / f"{len(more)}.gguf"
        write_gguf(path, "llama", tokenizer=BYTE_LEVEL | changed | {"tokenizer.ggml.eos_token_id": 9} | more)
        assert open_checkpoint(path).config.eos_token_ids == wanted


def test_a_folder_of_one_gguf_is_a_model_and_of_two_is_not(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", "llama")
    assert open_checkpoint(tmp_path).path == str(tmp_path / "a.gguf")
    (tmp_path / "b.gguf").hardlink_to(tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match=r"2 .gguf files \(a.gguf, b.gguf\); give the path of one"):
        open_checkpoint(tmp_path)


def test_a_file_without_tokenizer_has_none(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", "llama")
    assert load_tokenizer(open_checkpoint(tmp_path)) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architecture": "mamba"}, "general.architecture is 'mamba'; supported: llama, qwen2, qwen3"),
        ({"expert_count": 8}, "llama.expert_count is 8; supported: 0"),
        ({"split__count": 3}, "split.count is 3; supported: 1"),
        ({"attn_logit_softcapping": 50.0}, "llama.attn_logit_softcapping is 50.0; supported: 0"),
        ({"final_logit_softcapping": 30.0}, "llama.final_logit_softcapping is 30.0; supported: 0"),
        ({"attention__scale": 0.5}, "llama.attention.scale is 0.5; supported: 0"),
        ({"attention__clamp_kqv": 8.0}, "llama.attention.clamp_kqv is 8.0; supported: 0"),
        ({"attention__max_alibi_bias": 8.0}, "llama.attention.max_alibi_bias is 8.0; supported: 0"),
        ({"attention__causal": False}, "llama.attention.causal is False; supported: True"),
        ({"embedding_scale": 12.0}, "llama.embedding_scale is 12.0; supported: 0 or 1"),
        ({"residual_scale": 0.25}, "llama.residual_scale is 0.25; supported: 0 or 1"),
        ({"logit_scale": 8.0}, "llama.logit_scale is 8.0; supported: 0 or 1"),
        ({"rope__freq_base": "x"}, "rope theta is .x.; supported: a number above 0"),
        ({"rope__freq_base": 0.0}, "rope theta is 0.0; supported: a number above 0"),
        ({"rope__scaling__type": "yarn"}, "llama.rope.scaling.type is 'yarn'; supported: none, linear"),
        ({"rope__dimension_count": 8}, "llama.rope.dimension_count is 8; supported: the head dimension, 16"),
        ({"attention__head_count_kv": 3}, "num_kv_heads is 3; supported: a divisor of num_heads = 4"),
    ],
)
def test_what_the_decoder_does_not_implement_is_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    write_gguf(tmp_path / "tiny.gguf", "llama", **fields)
    with pytest.raises(UnsupportedModelError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [{"rope__freq_base": 1e4}, {"attention__key_length": 2**31}, {"attention__key_length": math.inf}],
)
def test_rotary_factors_of_another_kind_are_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Or of another number, however large a dimension a file claims."""
    write_gguf(tmp_path / "tiny.gguf", "llama3", **fields)
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs.weight is .*supported: none, or Llama 3's"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_count": None}, "llama.block_count is missing or holds no single number"),
        (
            {"attention__head_count": [4, 4]},
            "llama.attention.head_count is missing or holds no single number",
        ),
        (
            {"left_out": "blk.1.ffn_up.weight"},
            r"disagree in 1 tensor\(s\): model.layers.1.mlp.up_proj.weight is missing; take both",
        ),
    ],
)
def test_a_file_at_odds_with_itself_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    write_gguf(tmp_path / "tiny.gguf", "llama", **fields)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("tensor", "name"),
    [
        ("blk.1.ffn_gate_exps.weight", "model.layers.1.ffn_gate_exps.weight"),
        ("blk.0.attn_q_norm.weight", "model.layers.0.attn_q_norm.weight"),
        ("blk.0.attn_sinks.weight", "model.layers.0.attn_sinks.weight"),
        ("token_embd_norm.weight", "model.token_embd_norm.weight"),
        ("output.bias", "model.output.bias"),
    ],
)
def test_a_tensor_without_a_place_in_the_model_is_refused(tmp_path: Path, tensor: str, name: str) -> None:
    write_gguf(tmp_path / "tiny.gguf", "llama", added=tensor)
    with pytest.raises(CheckpointError, match=f"{name} has no place in LlamaForCausalLM"):
        open_checkpoint(tmp_path)


def test_more_layers_than_a_file_can_hold_are_refused_at_once(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", "llama", block_count=2**32 - 1)
    with pytest.raises(CheckpointError, match="num_hidden_layers is 4294967295; supported: at most 4096"):
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
