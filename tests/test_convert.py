"""GGUF conversion: a tiny Llama written as GGUF comes back as the checkpoint that it was made from."""
from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from hispec.convert import ConversionError, convert_gguf
from hispec.fetch import resolve_model

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL_TOKENS, *sorted(ByteLevel.alphabet()), "12", "Ġt"]
MERGES = ["1 2", "Ġ t"]
CHAT_TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
NUM_LAYERS, HIDDEN, HEADS, KV_HEADS = 2, 64, 4, 2


@dataclasses.dataclass
class Variant:
    """What a test changes in the file."""

    architecture: str = "llama"
    eos_token_id: int = 2
    chat_template: str | None = CHAT_TEMPLATE
    pre: str = "smollm"


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=NUM_LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def write_gguf(path: Path, model: LlamaForCausalLM, variant: Variant) -> Path:
    writer = gguf.GGUFWriter(path, variant.architecture)
    writer.add_block_count(NUM_LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(variant.pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in TOKENS])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(variant.eos_token_id)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    if variant.chat_template is not None:
        writer.add_chat_template(variant.chat_template)
    for name, value in gguf_tensors(model):
        kind = gguf.GGMLQuantizationType.Q8_0 if value.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(model: LlamaForCausalLM) -> Iterator[tuple[str, np.ndarray]]:
    """The model's tensors under GGUF's names, query and key rows interleaved as llama.cpp's own converter does it."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, NUM_LAYERS)
    for name, parameter in model.named_parameters():
        value = parameter.detach().numpy()
        for part, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
            if part in name:
                value = value.reshape(heads, 2, value.shape[0] // heads // 2, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        short = names.get_name(name, try_suffixes=(".weight",))
        assert short is not None
        yield short, value


def convert(tmp_path: Path, model: LlamaForCausalLM, **changes: object) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    source = write_gguf(tmp_path / "tiny.gguf", model, Variant(**changes))  # type: ignore[arg-type]
    convert_gguf(source, folder, turn_end="<|im_end|>", progress=False)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model: LlamaForCausalLM) -> Path:
    return convert(tmp_path_factory.mktemp("convert"), model)


def test_weights_are_the_originals_up_to_quantization(folder: Path, model: LlamaForCausalLM) -> None:
    weights = load_file(folder / "model.safetensors")
    expected = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    assert weights.keys() == expected.keys(), "a tied head is stored once"
    for name, value in expected.items():
        if value.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            value = gguf.dequantize(gguf.quantize(np.ascontiguousarray(value), kind), kind)
        assert weights[name].dtype == np.float32
        np.testing.assert_array_equal(weights[name], value, err_msg=name)


def test_folder_loads_as_a_plain_float32_checkpoint(folder: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == torch.float32
    assert not hasattr(loaded.config, "quantization_config")
    assert loaded.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False, eos_token_id=None).shape == (1, 6)


def test_turn_end_ends_generation(folder: Path) -> None:
    tokenizer, generation = AutoTokenizer.from_pretrained(folder), GenerationConfig.from_pretrained(folder)
    turn = tokenizer.apply_chat_template([{"role": "user", "content": "t"}], tokenize=False)
    assert tokenizer.encode(turn)[-1] == generation.eos_token_id == tokenizer.eos_token_id == 2
    assert (generation.bos_token_id, generation.pad_token_id, tokenizer.pad_token_id) == (1, 2, 2)


def test_smollm_splits_digits_and_text_survives(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("12 t") == ["1", "2", "Ġt"]
    assert tokenizer.decode(tokenizer.encode("naïve 漢字\n\t12")) == "naïve 漢字\n\t12"
    assert tokenizer.model_max_length == 128


def test_gpt2_keeps_runs_of_digits(tmp_path: Path, model: LlamaForCausalLM) -> None:
    assert AutoTokenizer.from_pretrained(convert(tmp_path, model, pre="gpt-2")).tokenize("12 t") == ["12", "Ġt"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "mamba"}, "general.architecture is 'mamba'; supported: llama"),
        ({"pre": "qwen2"}, "tokenizer.ggml.pre is 'qwen2'; supported: smollm, gpt-2"),
        ({"eos_token_id": 0}, r"turn ends with '<\|im_end\|>', but the file's end-of-sequence token is '<\|endoftext\|>'"),
        ({"chat_template": None}, "no tokenizer.chat_template"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, model: LlamaForCausalLM, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConversionError, match=message):
        convert(tmp_path, model, **changes)


@pytest.mark.slow
def test_fetched_smollm2_answers_and_ends_its_turn() -> None:
    folder = resolve_model("smollm2")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=32, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"
