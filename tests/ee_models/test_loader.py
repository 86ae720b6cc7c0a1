"""Checkpoints: what is read is bit for bit what was saved, and what is wrong is refused by name."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ee_models.checkpoint.loader import (
    Checkpoint,
    CheckpointError,
    UnsupportedModelError,
    load_tokenizer,
    open_checkpoint,
)
from ee_models.checkpoint.weights import EMBEDDING, HEAD, expected_tensors
from ee_models.config import ModelConfig, RopeConfig
from ee_models.families import SUPPORTED_SETTINGS
from tests.helpers.tiny import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    ROLE_ID,
    TINY_VOCAB,
    tiny_checkpoint,
    tiny_model,
    tiny_tokenizer,
)

Fields = dict[str, Any]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("original"), num_layers=2)


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy that the test may damage."""
    return Path(shutil.copytree(original, tmp_path / "model"))


def edit_json(path: Path, **changes: Any) -> None:
    """Sets fields of a JSON file; None takes one out."""
    fields = {**json.loads(path.read_text()), **changes} if path.exists() else changes
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def assert_holds(checkpoint: Checkpoint, weights: dict[str, torch.Tensor]) -> None:
    for name, shape in expected_tensors(checkpoint.config).items():
        tensor = checkpoint.tensor(name)
        assert checkpoint.has(name)
        assert tuple(tensor.shape) == shape
        assert tensor.dtype == weights[name].dtype
        assert torch.equal(tensor, weights[name]), name


def test_tensors_are_bit_for_bit_what_was_saved(original: Path) -> None:
    checkpoint = open_checkpoint(original)
    assert_holds(checkpoint, dict(tiny_model(num_layers=2).named_parameters()))
    assert checkpoint.path == str(original)
    assert open_checkpoint(str(original)).config == checkpoint.config


def test_shards_hold_what_a_single_file_holds(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, num_layers=2, max_shard_size="50KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    assert_holds(open_checkpoint(folder), dict(tiny_model(num_layers=2).named_parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_keep_their_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint(tmp_path, num_layers=1, dtype=dtype))
    assert checkpoint.dtype == dtype
    assert_holds(checkpoint, dict(tiny_model(num_layers=1).to(dtype).named_parameters()))


def test_dtype_is_that_of_most_elements(folder: Path) -> None:
    edit_weights(
        folder,
        lambda weights: weights.update({name: x.bfloat16() for name, x in weights.items() if x.ndim == 2}),
    )
    checkpoint = open_checkpoint(folder)
    assert checkpoint.dtype == torch.bfloat16
    assert checkpoint.tensor("model.norm.weight").dtype == torch.float32


def test_a_tensor_does_not_keep_the_file_mapped(original: Path) -> None:
    checkpoint = open_checkpoint(original)
    tensor = checkpoint.tensor("model.norm.weight")
    assert tensor.untyped_storage().nbytes() == tensor.nbytes
    maps = Path("/proc/self/maps")  # on Linux
    assert not maps.exists() or str(original) not in maps.read_text()


def test_config_says_what_the_decoder_needs(original: Path) -> None:
    assert open_checkpoint(original).config == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=TINY_VOCAB,
        hidden_size=48,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=12,
        rms_norm_eps=1e-6,
        max_position_embeddings=512,
        rope=RopeConfig(),
        eos_token_ids=(EOS_ID,),
        bos_token_id=BOS_ID,
        pad_token_id=PAD_ID,
    )


def test_a_tied_checkpoint_has_no_head(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "smollm2", num_layers=1)
    assert not open_checkpoint(folder).has("lm_head.weight")
    edit_weights(folder, lambda weights: weights.update({HEAD: weights[EMBEDDING].clone()}))
    checkpoint = open_checkpoint(folder)
    assert not checkpoint.has(HEAD)
    with pytest.raises(CheckpointError, match=r"no tensor 'lm_head.weight' that LlamaForCausalLM uses"):
        checkpoint.tensor(HEAD)


def test_a_head_that_is_said_to_be_tied_and_is_not_is_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "smollm2", num_layers=1)
    edit_weights(folder, lambda weights: weights.update({HEAD: 2 * weights[EMBEDDING]}))
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings is true .* but lm_head.weight differs"):
        open_checkpoint(folder)
    edit_json(folder / "config.json", tie_word_embeddings=False)
    assert open_checkpoint(folder).has(HEAD)


def test_rotary_buffers_of_old_checkpoints_are_left_out(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_weights(folder, lambda weights: weights.update({name: torch.zeros(6)}))
    assert not open_checkpoint(folder).has(name)


def test_generation_config_goes_before_config(folder: Path) -> None:
    generation = {"eos_token_id": [7, ROLE_ID, 7], "bos_token_id": 5, "pad_token_id": -1}
    edit_json(
        folder / "generation_config.json",
        do_sample=True,
        temperature=0.6,
        top_p=0.9,
        top_k=None,
        **generation,
    )
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config
    assert (config.eos_token_ids, config.bos_token_id, config.pad_token_id) == ((7, ROLE_ID), 5, None)
    assert checkpoint.generation_defaults == {"temperature": 0.6, "top_p": 0.9}


def test_a_model_that_does_not_sample_is_greedy_whatever_else_it_sets(folder: Path) -> None:
    edit_json(folder / "generation_config.json", do_sample=False, temperature=0.6, top_p=0.5)
    assert open_checkpoint(folder).generation_defaults == {"temperature": 0.0}
    edit_json(folder / "generation_config.json", do_sample=False, repetition_penalty=1.1)
    assert open_checkpoint(folder).generation_defaults == {"temperature": 0.0, "repetition_penalty": 1.1}


def test_a_checkpoint_needs_no_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    checkpoint = open_checkpoint(folder)
    assert checkpoint.generation_defaults == {}
    assert checkpoint.config.eos_token_ids == (EOS_ID,)


def test_tokenizer_reads_text_and_chats(folder: Path) -> None:
    assert load_tokenizer(open_checkpoint(folder)) is None
    tiny_tokenizer(folder)
    tokenizer = load_tokenizer(open_checkpoint(folder))
    assert tokenizer is not None
    assert len(tokenizer) == TINY_VOCAB
    text = "naïve 漢字,\n\t 12"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert max(ids) < 256
    assert tokenizer.decode(ids) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert tokenizer.encode(chat)[0] == ROLE_ID
    assert tokenizer.encode(chat).count(EOS_ID) == 1


def test_a_tokenizer_that_is_code_is_refused_for_our_own_reason(folder: Path) -> None:
    tiny_tokenizer(folder)
    standard = (folder / "tokenizer_config.json").read_text()
    code = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(code))
    (folder / "own.py").write_text("raise SystemExit('this code ran')")
    with pytest.raises(CheckpointError, match=r"auto_map .* HiSpec never runs that; give it a") as caught:
        load_tokenizer(open_checkpoint(folder))
    assert "trust_remote_code" not in str(caught.value)
    (folder / "tokenizer_config.json").write_text(standard)
    assert load_tokenizer(open_checkpoint(folder)) is not None


def test_a_damaged_tokenizer_is_refused(folder: Path) -> None:
    tiny_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"cannot load the tokenizer of .*skip_tokenizer_init"):
        load_tokenizer(open_checkpoint(folder))


# What stands in config.json, and what the refusal says.
UNSUPPORTED: list[tuple[Fields, str]] = [
    (
        {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"},
        r"architectures is 'MixtralForCausalLM'; supported: LlamaForCausalLM, ",
    ),
    (
        {"architectures": ["LlamaForSequenceClassification"]},
        "architectures is 'LlamaForSequenceClassification'",
    ),
    (
        {"architectures": None, "model_type": "gpt2"},
        "model_type is 'gpt2'; supported: llama, mistral, qwen2, qwen3",
    ),
    (
        {"model_type": "my_llama", "auto_map": {"AutoConfig": "evil.Config"}},
        "model_type is 'my_llama'; supported: 'llama'",
    ),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu'"),
    (
        {"hidden_activation": "gelu_pytorch_tanh"},
        "hidden_activation is 'gelu_pytorch_tanh'; supported: 'silu'",
    ),
    ({"num_experts": 64}, "num_experts is 64; supported: 0"),
    ({"num_local_experts": 8}, "num_local_experts is 8; supported: 0"),
    ({"n_routed_experts": 256}, "n_routed_experts is 256; supported: 0"),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; supported: 0"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0; supported: 0"),
    ({"query_pre_attn_scalar": 256}, "query_pre_attn_scalar is 256; supported: unset"),
    ({"attention_multiplier": 0.0078125}, "attention_multiplier is 0.0078125; supported: unset"),
    ({"embedding_multiplier": 12.0}, "embedding_multiplier is 12.0; supported: 1"),
    ({"residual_multiplier": 0.22}, "residual_multiplier is 0.22; supported: 1"),
    ({"logits_scaling": 8.0}, "logits_scaling is 8.0; supported: 1"),
    ({"logit_scale": 0.0625}, "logit_scale is 0.0625; supported: 1"),
    ({"clip_qkv": 8.0}, "clip_qkv is 8.0; supported: unset"),
    ({"use_qk_norm": True}, "use_qk_norm is True; supported: False"),
    ({"no_rope_layers": [1, 0]}, r"no_rope_layers is \[1, 0\]; supported: \[\]"),
    ({"alibi": True}, "alibi is True; supported: False"),
    ({"use_parallel_residual": True}, "use_parallel_residual is True; supported: False"),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True; supported: False"),
    ({"is_causal": False}, "is_causal is False; supported: True"),
    ({"num_key_value_heads": 3}, "num_kv_heads is 3; supported: a divisor of num_heads = 4"),
    ({"head_dim": 3}, "head_dim is 3; supported: an even number"),
    ({"vocab_size": 0}, "vocab_size is 0; supported: an integer of at least 1"),
    (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        "rope_type is 'dynamic'; supported: default, linear, llama3",
    ),
    ({"rope_parameters": None, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'"),
    ({"rope_parameters": {"rope_type": ["default"]}}, r"rope_type is \['default'\]; supported"),
    (
        {"rope_parameters": {"rope_type": "linear", "factor": 0.0}},
        "rope factor is 0.0; supported: a number above 0",
    ),
    (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "partial_rotary_factor is 0.5; supported: 1.0",
    ),
    (
        {"quantization_config": {"quant_method": "awq"}},
        "quantization_config.quant_method is 'awq'; supported: unquantised",
    ),
    ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "'bitsandbytes'"),
    ({"quantization_config": {"quant_method": "fp8"}}, "'fp8'"),
    (
        {"compression_config": {"format": "int-quantized"}},
        "compression_config.quant_method is 'int-quantized'",
    ),
]


def test_every_setting_that_is_told_apart_is_refused_once() -> None:
    fields = [field for changes, _ in UNSUPPORTED for field in changes]
    assert all(fields.count(field) == 1 for field in SUPPORTED_SETTINGS)


@pytest.mark.parametrize("field", SUPPORTED_SETTINGS)
def test_a_setting_that_changes_nothing_is_accepted(folder: Path, field: str) -> None:
    expected = open_checkpoint(folder).config
    for value in SUPPORTED_SETTINGS[field]:
        edit_json(folder / "config.json", **{field: value})
        assert open_checkpoint(folder).config == expected


@pytest.mark.parametrize(("changes", "message"), UNSUPPORTED, ids=[message for _, message in UNSUPPORTED])
def test_what_the_decoder_does_not_implement_is_refused(folder: Path, changes: Fields, message: str) -> None:
    edit_json(folder / "config.json", **changes)
    with pytest.raises(UnsupportedModelError, match=f"cannot load model '{folder}'.*{message}"):
        open_checkpoint(folder)


CONTRADICTIONS: list[tuple[Fields, str]] = [
    (
        {"vocab_size": 300},
        r"vocab_size is 300 in the config, but model.embed_tokens.weight has shape \[260, 48\]",
    ),
    ({"hidden_size": "many"}, "LlamaConfig refuses the config: .*hidden_size"),
    ({"eos_token_id": "</s>"}, "eos_token_id"),
    ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
    (
        {"intermediate_size": 64},
        r"disagree in 6 tensor\(s\): .*gate_proj.weight has shape \[96, 48\],"
        r" the config says \[64, 48\].*; and 1 more",
    ),
    *(
        ({"rms_norm_eps": eps}, "rms_norm_eps is .*a number of at least 0")
        for eps in (math.nan, -math.inf, -1.0)
    ),
    ({"num_hidden_layers": 3}, "num_layers is 3 in the config, but the weights hold 2 layers"),
    # transformers would make a list of as many, for some models.
    ({"num_hidden_layers": 10**10}, "num_hidden_layers is 10000000000; supported: at most 4096"),
    (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
        "rope theta is 0; supported: a number above",
    ),
    ({"attention_bias": True}, r"disagree in 8 tensor\(s\): model.layers.0.self_attn.q_proj.bias is missing"),
]


@pytest.mark.parametrize(
    ("changes", "message"), CONTRADICTIONS, ids=[message for _, message in CONTRADICTIONS]
)
def test_a_config_at_odds_with_the_weights_or_itself_is_refused(
    folder: Path, changes: Fields, message: str
) -> None:
    (folder / "generation_config.json").unlink()
    edit_json(folder / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


def test_layers_that_the_config_does_not_count_are_left_out_and_that_is_said(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_checkpoint(folder)
    assert not caplog.records
    edit_json(folder / "config.json", num_hidden_layers=1)
    assert open_checkpoint(folder).config.num_layers == 1
    assert "the config says 1 layers, the weights hold 2: the last 1 are left out" in caplog.text


def test_layers_are_counted_and_not_their_numbers(folder: Path) -> None:
    """Or a name would have names made for as many."""
    edit_weights(folder, lambda weights: weights.update({"model.layers.999999999.x": torch.ones(1)}))
    edit_json(folder / "config.json", num_hidden_layers=4)
    with pytest.raises(CheckpointError, match="num_layers is 4 in the config, but the weights hold 3 layers"):
        open_checkpoint(folder)


WRONG_WEIGHTS: list[tuple[str, Callable[[dict[str, torch.Tensor]], Any], str]] = [
    (
        "no head",
        lambda weights: weights.pop("lm_head.weight"),
        r"lm_head.weight is missing \(tie_word_embeddings is false\)",
    ),
    (
        "int8",
        lambda weights: weights.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}),
        r"model.norm.weight has dtype I8, .*F32, F16, BF16",
    ),
    (
        "float64",
        lambda weights: weights.update({"model.norm.weight": torch.ones(48).double()}),
        "model.norm.weight has dtype F64",
    ),
    (
        "bias",
        lambda weights: weights.update({"model.layers.1.mlp.up_proj.bias": torch.ones(96)}),
        "up_proj.bias has no place in LlamaForCausalLM",
    ),
    (
        "norm per head",
        lambda weights: weights.update({"model.layers.1.self_attn.q_norm.weight": torch.ones(12)}),
        "self_attn.q_norm.weight has no place in LlamaForCausalLM",
    ),
    (
        "sandwich norm",
        lambda weights: weights.update({"model.layers.0.post_feedforward_layernorm.weight": torch.ones(48)}),
        "post_feedforward_layernorm.weight has no place in LlamaForCausalLM",
    ),
    (
        "attention sinks",
        lambda weights: weights.update({"model.layers.0.self_attn.sinks": torch.ones(4)}),
        "model.layers.0.self_attn.sinks has no place in LlamaForCausalLM",
    ),
    (
        "experts",
        lambda weights: weights.update({"model.layers.0.mlp.experts.0.up_proj.weight": torch.ones(96, 48)}),
        "mlp.experts.0.up_proj.weight has no place in LlamaForCausalLM",
    ),
    (
        "bias of the head",
        lambda weights: weights.update({"lm_head.bias": torch.ones(TINY_VOCAB)}),
        "lm_head.bias has no place in LlamaForCausalLM",
    ),
    (
        "layer of 5000 digits",
        lambda weights: weights.update({f"model.layers.{'9' * 5000}.x": torch.ones(1)}),
        r"disagree in 1 tensor\(s\): model.layers.9999",
    ),
    (
        "bias of the final norm",
        lambda weights: weights.update({"model.norm.bias": torch.ones(48)}),
        "model.norm.bias has no place in LlamaForCausalLM",
    ),
]


@pytest.mark.parametrize(
    ("change", "message"), [case[1:] for case in WRONG_WEIGHTS], ids=[case[0] for case in WRONG_WEIGHTS]
)
def test_weights_at_odds_with_the_config_are_refused(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], Any], message: str
) -> None:
    edit_weights(folder, change)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize("kept_bytes", [0, 5, 100, -1])
def test_a_truncated_file_is_refused(folder: Path, kept_bytes: int) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept_bytes])
    with pytest.raises(
        CheckpointError,
        match=r"model.safetensors \(\d+ bytes\) is no complete safetensors file.*fetch it again",
    ):
        open_checkpoint(folder)


def test_a_file_damaged_after_opening_is_reported(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"cannot read model.norm.weight from"):
        checkpoint.tensor("model.norm.weight")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "as JSON: .*; fetch it again"),
        ("[]", "holds a list; it must hold an object"),
        ("\xff", "as JSON"),
    ],
)
def test_malformed_json_is_refused(folder: Path, name: str, content: str, message: str) -> None:
    (folder / name).write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError, match=f"{name} .*{message}|{name} {message}"):
        open_checkpoint(folder)


def test_a_sampling_default_that_is_no_number_is_refused(folder: Path) -> None:
    edit_json(folder / "generation_config.json", temperature="hot")
    with pytest.raises(
        CheckpointError, match="sets temperature to 'hot'; it must be a number; mend it, or take it out"
    ):
        open_checkpoint(folder)
