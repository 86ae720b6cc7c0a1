"""The tokenizer in a GGUF file, built from the vocabulary and merges that stand there.

transformers builds one too, but what it makes of a file differs between its versions: digits stay together,
words are split as GPT-2 splits them, and special tokens come in that the file does not have, with ids that
the model has no embedding for. Here all that a file leaves to its reader is written down, as llama.cpp has
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..config import ModelConfig
from ..errors import CheckpointError, unsupported

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerBase

# What `transformers` and GGUF call the same token.
_NAMED_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}

_SPACE = "▁"  # SentencePiece writes a space so


@dataclass(frozen=True)
class _Split:
    """What the name of a pre-tokenizer stands for: how text is cut into words, within which byte-level BPE
    merges."""

    words: str | None = None  # a regular expression; None for that of GPT-2
    digits_apart: bool = False  # ahead of `words`
    nfc: bool = False  # composed Unicode, ahead of all else
    keeps_tokens: bool = False  # a word that is a token stays whole, whether or not merges lead to it
    adds_bos: bool = False  # where the file does not say


_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _Split(_QWEN2_WORDS.replace(r"\p{N}|", r"\p{N}{1,3}|"), keeps_tokens=True, adds_bos=True)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "gpt-2": _Split(),
    "smollm": _Split(digits_apart=True),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _Split(_QWEN2_WORDS, nfc=True),
    "deepseek-r1-qwen": _Split(_QWEN2_WORDS),
    "tekken": _Split(_TEKKEN_WORDS, keeps_tokens=True, adds_bos=True),
}


def read_tokenizer(reader: GGUFReader, config: ModelConfig) -> PreTrainedTokenizerBase | None:
    """The tokenizer in the file, its ids all within the model's vocabulary; None where there is none.

    Raises UnsupportedModelError for one of another kind, CheckpointError for one that lacks something, or
    does not fit the model.
    """
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    fields = {
        name: field.contents() for name, field in reader.fields.items() if name.startswith("tokenizer.")
    }
    if "tokenizer.ggml.tokens" not in fields:
        return None
    vocabulary = _read_vocabulary(fields, config.vocab_size)
    named = {f"{name}_token": _find_token(fields, key) for name, key in _NAMED_TOKENS.items()}
    kind = fields.get("tokenizer.ggml.model")
    if kind == "gpt2":
        split = _find_split(fields.get("tokenizer.ggml.pre"))
        backend, adds_bos = _build_byte_level(vocabulary, _require(fields, "merges"), split), split.adds_bos
    elif kind == "llama":
        space_prefix = fields.get("tokenizer.ggml.add_space_prefix", True)
        backend, adds_bos = (
            _build_sentencepiece(vocabulary, _require(fields, "scores"), named["unk_token"], space_prefix),
            True,
        )
    else:
        raise unsupported("tokenizer.ggml.model", kind, "gpt2, llama")
    # Control tokens are never merged from text; text is searched for the user's ahead of all merging.
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in vocabulary.control]
    )
    backend.add_tokens(
        [AddedToken(token, normalized=False, special=False) for token in vocabulary.user_defined]
    )
    backend.post_processor = _frame(
        backend,
        named["bos_token"] if fields.get("tokenizer.ggml.add_bos_token", adds_bos) else None,
        named["eos_token"] if fields.get("tokenizer.ggml.add_eos_token", False) else None,
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=fields.get("tokenizer.chat_template"),
        model_max_length=config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
        **named,
    )


@dataclass(frozen=True)
class _Vocabulary:
    """Token -> id for all tokens, and for those of a kind."""

    ids: dict[str, int]
    normal: dict[str, int]
    control: dict[str, int]
    user_defined: dict[str, int]


def _read_vocabulary(fields: Mapping[str, Any], limit: int) -> _Vocabulary:
    from gguf import TokenType

    tokens, kinds = _require(fields, "tokens"), _require(fields, "token_type")
    if len(kinds) != len(tokens):
        raise CheckpointError(
            f"the file lists {len(tokens)} tokens, but the types of {len(kinds)}; convert it anew"
        )
    if len(tokens) > limit:
        raise CheckpointError(
            f"the file lists {len(tokens)} tokens, but its model has embeddings for {limit}; convert it anew"
        )
    ids = {token: token_id for token_id, token in enumerate(tokens)}

    def of_kind(kind: int) -> dict[str, int]:
        return {token: token_id for token, token_id in ids.items() if kinds[token_id] == kind}

    return _Vocabulary(
        ids, of_kind(TokenType.NORMAL), of_kind(TokenType.CONTROL), of_kind(TokenType.USER_DEFINED)
    )


def _find_split(name: str | None) -> _Split:
    if name not in _SPLITS:
        raise unsupported("tokenizer.ggml.pre", name, ", ".join(_SPLITS))
    return _SPLITS[name]


def _build_byte_level(vocabulary: _Vocabulary, merges: Sequence[str], split: _Split) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE

    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    backend = Tokenizer(BPE(vocab=vocabulary.ids, merges=pairs, ignore_merges=split.keeps_tokens))
    steps: list[pre_tokenizers.PreTokenizer] = []
    if split.digits_apart:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.words is not None:
        steps.append(pre_tokenizers.Split(Regex(split.words), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.words is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    return backend


def _build_sentencepiece(
    vocabulary: _Vocabulary, scores: Sequence[float], unknown: str | None, space_prefix: bool
) -> Tokenizer:
    """SentencePiece's BPE, as Llama 2 has it: merges cross words, and characters without a token become
    bytes."""
    from tokenizers import Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    merges = _find_merges(vocabulary.normal, scores)
    backend = Tokenizer(
        BPE(vocab=vocabulary.ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if space_prefix else spaces
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if space_prefix else steps)
    return backend


def _find_merges(ids: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges of a vocabulary that lists none: SentencePiece joins those neighbours whose token scores
    highest."""
    merges: list[tuple[str, str]] = []
    for token in sorted(ids, key=lambda token: -scores[ids[token]]):
        halves = [(token[:place], token[place:]) for place in range(1, len(token))]
        known = [(left, right) for left, right in halves if left in ids and right in ids]
        merges += sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return merges


def _frame(backend: Tokenizer, first: str | None, last: str | None) -> TemplateProcessing:
    """Puts `first` ahead of a text and `last` behind it, where they are not None, when encoded with special
    tokens."""
    from tokenizers.processors import TemplateProcessing

    def around(text: str) -> list[str]:
        return [piece for piece in (first, text, last) if piece is not None]

    return TemplateProcessing(
        single=[f"{piece}:0" for piece in around("$A")],
        pair=[f"{piece}:0" for piece in around("$A")] + [f"{piece}:1" for piece in around("$B")],
        special_tokens=[(token, backend.token_to_id(token)) for token in {first, last} if token is not None],
    )


def _find_token(fields: Mapping[str, Any], name: str) -> str | None:
    """The token with a role, such as "eos". Raises CheckpointError if it is none of the file's."""
    token_id, tokens = fields.get(f"tokenizer.ggml.{name}_token_id"), _require(fields, "tokens")
    if token_id is None:
        return None
    if not 0 <= token_id < len(tokens):
        raise CheckpointError(
            f"tokenizer.ggml.{name}_token_id is {token_id}, but the file lists {len(tokens)} tokens; convert"
            " it anew"
        )
    return tokens[token_id]


def _require(fields: Mapping[str, Any], name: str) -> Any:
    """The value of tokenizer.ggml.`name`. Raises CheckpointError if the file has none."""
    value = fields.get(f"tokenizer.ggml.{name}")
    if value is None:
        raise CheckpointError(f"the file has no tokenizer.ggml.{name}; convert it anew")
    return value
