"""A GGUF file's tokenizer: it splits and merges as the file's names mean, and knows no token but the
file's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType
from transformers import PreTrainedTokenizerBase

from ee_models.checkpoint.loader import CheckpointError, load_tokenizer, open_checkpoint
from tests.helpers.tiny import BOS_ID, EOS_ID, PAD_ID, ROLE_ID
from tests.helpers.tiny_gguf import BYTE_LEVEL, BYTE_TOKENS, SENTENCEPIECE, VOCAB, write_gguf


def read(tmp_path: Path, tokenizer: dict[str, Any], **fields: Any) -> PreTrainedTokenizerBase:
    write_gguf(tmp_path / "tiny.gguf", tokenizer=tokenizer, **fields)
    found = load_tokenizer(open_checkpoint(tmp_path))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["1", "2", "3", "1", "Ġt", "Ġ", "1", "2"]),
        ("gpt-2", ["123", "1", "Ġt", "Ġ", "12"]),
        ("llama-bpe", ["123", "1", "Ġt", "Ġ", "12"]),
        ("qwen2", ["1", "2", "3", "1", "Ġt", "Ġ", "1", "2"]),
        ("deepseek-r1-qwen", ["1", "2", "3", "1", "Ġt", "Ġ", "1", "2"]),
        ("tekken", ["1", "2", "3", "1", "Ġt", "Ġ", "1", "2"]),
    ],
)
def test_digits_and_words_are_split_as_the_file_says(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    tokenizer = read(tmp_path, BYTE_LEVEL, tokenizer__ggml__pre=pre)
    assert tokenizer.tokenize("1231 t 12") == pieces
    for text in ("naïve 漢字\n\t12", "It's  IT'LL e\u0301\r\n\n½ <think>12</think> "):
        expected = text.replace("e\u0301", "é") if pre == "qwen2" else text
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == expected
    assert tokenizer.model_max_length == 16384


@pytest.mark.parametrize(
    ("fields", "ends"),
    [
        ({}, ([], [])),
        ({"pre": "llama-bpe"}, ([BOS_ID], [])),
        ({"pre": "llama-bpe", "add_bos_token": False}, ([], [])),
        ({"add_bos_token": True, "add_eos_token": True}, ([BOS_ID], [EOS_ID])),
        ({"add_bos_token": True, "bos_token_id": None}, ([], [])),
    ],
)
def test_bos_and_eos_are_added_where_the_file_says(
    tmp_path: Path, fields: dict[str, Any], ends: tuple[list[int], list[int]]
) -> None:
    tokenizer = read(
        tmp_path, BYTE_LEVEL, **{f"tokenizer__ggml__{name}": value for name, value in fields.items()}
    )
    inner = tokenizer.encode("t", add_special_tokens=False)
    assert inner == [BYTE_TOKENS.index("t")]
    assert tokenizer.encode("t") == [*ends[0], *inner, *ends[1]]


def test_special_tokens_are_the_file_s_and_found_whole(tmp_path: Path) -> None:
    tokenizer = read(tmp_path, BYTE_LEVEL)
    assert tokenizer.get_vocab() == {token: token_id for token_id, token in enumerate(BYTE_TOKENS)}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token) == (
        BOS_ID,
        EOS_ID,
        PAD_ID,
        None,
    )
    ids = tokenizer.encode("<|role|><think></s>")
    assert ids == [ROLE_ID, BYTE_TOKENS.index("<think>"), EOS_ID]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>"
    assert max(tokenizer.encode("<|endoftext|><s><unk>")) < len(BYTE_TOKENS)


def test_what_a_converter_has_padded_a_vocabulary_with_is_no_token(tmp_path: Path) -> None:
    """A name of another place, or of another kind, is a token like any."""
    num, unused, normal = len(BYTE_TOKENS), int(TokenType.UNUSED), int(TokenType.NORMAL)
    padded = [*BYTE_TOKENS, f"[PAD{num}]", "[PAD7]", f"[PAD{num + 2}]", f"[PAD{num + 3}]"]
    kinds = [*BYTE_LEVEL["tokenizer.ggml.token_type"], unused, unused, normal, unused]
    fields = {"tokenizer.ggml.tokens": padded, "tokenizer.ggml.token_type": kinds}
    tokenizer = read(tmp_path, BYTE_LEVEL | fields)
    kept = {token: at for at, token in enumerate(padded) if at not in (num, num + 3)}
    assert tokenizer.get_vocab() == kept and tokenizer.decode([BYTE_TOKENS.index("t"), num]) == "t"


def test_sentencepiece_joins_the_best_token_and_falls_back_on_bytes(tmp_path: Path) -> None:
    tokenizer = read(tmp_path, SENTENCEPIECE)
    assert tokenizer.tokenize("the th 1th\n12é") == [
        "▁the",
        "▁t",
        "h",
        "▁",
        "1",
        "th",
        "<0x0A>",
        "1",
        "2",
        "<0xC3>",
        "<0xA9>",
    ]
    assert tokenizer.encode("the") == [1, tokenizer.convert_tokens_to_ids("▁the")]
    assert tokenizer.get_vocab() == {
        token: token_id for token_id, token in enumerate(SENTENCEPIECE["tokenizer.ggml.tokens"])
    }
    for text in ("the 漢字\n\t12", " 12  t "):
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    assert read(tmp_path, SENTENCEPIECE, tokenizer__ggml__add_space_prefix=False).tokenize("t t") == [
        "t",
        "▁t",
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'; supported: gpt2, llama"),
        ({"pre": "falcon"}, "tokenizer.ggml.pre is 'falcon'; supported: gpt-2, smollm, llama-bpe, "),
        ({"pre": None}, "tokenizer.ggml.pre is None; supported: gpt-2, smollm, "),
        ({"merges": None}, "the file has no tokenizer.ggml.merges"),
        ({"token_type": [1, 1]}, r"lists 264 tokens, but the types of 2"),
        ({"padding_token_id": 264}, "tokenizer.ggml.padding_token_id is 264, but the file lists 264 tokens"),
        (
            {
                "tokens": [*BYTE_TOKENS, *map(str, range(VOCAB))],
                "token_type": [1] * (len(BYTE_TOKENS) + VOCAB),
            },
            "the file lists 536 tokens, but its model has embeddings for 272",
        ),
    ],
)
def test_a_tokenizer_that_cannot_be_built_is_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(
        CheckpointError, match=rf"cannot load the tokenizer of .*{message}.*skip_tokenizer_init"
    ):
        read(tmp_path, BYTE_LEVEL, **{f"tokenizer__ggml__{name}": value for name, value in fields.items()})
