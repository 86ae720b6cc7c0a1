"""GGUF conversion: a tiny Llama written as GGUF comes back as the checkpoint that it was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from ee_models.checkpoint.loader import load_tokenizer, open_checkpoint
from hispec.loading.fetch import resolve_model
from hispec.loading.gguf_to_hf import ROUNDTRIP_TEXT, ConversionError, convert_gguf
from tests.helpers.tiny import BOS_ID, EOS_ID, PAD_ID
from tests.helpers.tiny_gguf import BYTE_LEVEL, SENTENCEPIECE, VOCAB, write_gguf

TEXTS = [
    "",
    "12 t",
    ROUNDTRIP_TEXT,
    "  a  b \r\n\n c ",
    "It's IT'LL, ½ ٣ 1231231 e\u0301 🙂",
    "\x00\x7f\xa0\u200d",
    "<s>12</s><|role|> <think>t <|endoftext|><unk> the",
]


def convert(tmp_path: Path, tokenizer: dict[str, Any] = BYTE_LEVEL, **fields: Any) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    write_gguf(tmp_path / "tiny.gguf", "smollm2", Kind.Q8_0, tokenizer=tokenizer, **fields)
    convert_gguf(tmp_path / "tiny.gguf", folder, turn_end="</s>", progress=False)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(tmp_path_factory.mktemp("convert"))


def test_weights_are_the_originals_up_to_quantization(tmp_path: Path, folder: Path) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", "smollm2")
    weights = load_file(folder / "model.safetensors")
    expected = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    assert weights.keys() == expected.keys(), "a tied head is stored once"
    for name, value in expected.items():
        if value.ndim == 2:
            value = gguf.dequantize(gguf.quantize(np.ascontiguousarray(value), Kind.Q8_0), Kind.Q8_0)
        assert weights[name].dtype == np.float32
        np.testing.assert_array_equal(weights[name], value, err_msg=name)


def test_folder_loads_as_a_plain_float32_checkpoint(folder: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == torch.float32
    assert not hasattr(loaded.config, "quantization_config")
    assert loaded.generate(
        torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False, eos_token_id=None
    ).shape == (1, 6)


def test_turn_end_ends_generation(folder: Path) -> None:
    tokenizer, generation = AutoTokenizer.from_pretrained(folder), GenerationConfig.from_pretrained(folder)
    turn = tokenizer.apply_chat_template([{"role": "user", "content": "t"}], tokenize=False)
    assert tokenizer.encode(turn)[-1] == generation.eos_token_id == tokenizer.eos_token_id == EOS_ID
    assert (generation.bos_token_id, generation.pad_token_id, tokenizer.pad_token_id) == (
        BOS_ID,
        PAD_ID,
        PAD_ID,
    )


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2", "tekken", "sentencepiece"])
def test_tokenizer_is_that_of_the_gguf(tmp_path: Path, pre: str) -> None:
    folder = convert(
        tmp_path, SENTENCEPIECE if pre == "sentencepiece" else {**BYTE_LEVEL, "tokenizer.ggml.pre": pre}
    )
    ours = [load_tokenizer(open_checkpoint(path)) for path in (tmp_path / "tiny.gguf", folder)]
    direct, converted, plain = (*ours, AutoTokenizer.from_pretrained(folder))
    assert direct is not None
    turns = [{"role": "user", "content": "t 12"}, {"role": "assistant", "content": "the"}]
    chat = direct.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    for other in (converted, plain):
        assert other is not None
        assert other.get_vocab() == direct.get_vocab()
        assert other.special_tokens_map == direct.special_tokens_map
        assert other.all_special_ids == direct.all_special_ids
        assert other.model_max_length == direct.model_max_length
        assert other.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == chat
        for text in (*TEXTS, chat):
            for special in (False, True):
                ids = direct.encode(text, add_special_tokens=special)
                assert other.encode(text, add_special_tokens=special) == ids
                assert other.decode(ids, skip_special_tokens=special) == direct.decode(
                    ids, skip_special_tokens=special
                )
                assert max(ids, default=0) < VOCAB


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architecture": "mamba"}, "general.architecture is 'mamba'; supported: llama"),
        ({"tokenizer__ggml__pre": "falcon"}, "tokenizer.ggml.pre is 'falcon'; supported: gpt-2, smollm, "),
        (
            {"tokenizer__ggml__eos_token_id": PAD_ID},
            "turn ends with '</s>', but the file's end-of-sequence token is '<pad>'",
        ),
        ({"tokenizer__chat_template": None}, "the file has no chat template"),
        ({"tokenizer": {}}, "the file has no tokenizer"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConversionError, match=message):
        convert(tmp_path, **fields)


@pytest.mark.slow
def test_fetched_smollm2_answers_and_ends_its_turn() -> None:
    folder = resolve_model("smollm2")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=32, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"
