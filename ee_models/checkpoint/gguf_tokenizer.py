"""The tokenizer in a GGUF file, built from its vocabulary and merges as llama.cpp reads them.

transformers builds one too (`AutoTokenizer.from_pretrained(..., gguf_file=...)`), but not the same: as of
5.23 it adds special tokens that the file does not have, with ids that the model has no embedding for, leaves
digits together in SmolLM's files, and takes GPT-2's splitting for a pre-tokenizer that it does not know.
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

# Special tokens by the names of transformers and of GGUF.
_NAMED_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}

_SPACE = "▁"  # SentencePiece writes a space so


@dataclass(frozen=True)
class _Split:
    """A pre-tokenizer: how text is split into words, within which byte-level BPE merges.

    words          a regular expression of words; None: GPT-2's
    digits_apart   each digit is a word, before `words` applies
    nfc            text is normalized to composed Unicode first
    keeps_tokens   a word that is a token stays whole, whether or not merges lead to it
    adds_bos       BOS is put ahead of a text, unless the file says otherwise
    """

    words: str | None = None
    digits_apart: bool = False
    nfc: bool = False
    keeps_tokens: bool = False
    adds_bos: bool = False


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
    kind, pre = (fields.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    adds_bos = True
    if kind == "gpt2":
        if pre not in _SPLITS:
            raise unsupported("tokenizer.ggml.pre", pre, ", ".join(_SPLITS))
        adds_bos = _SPLITS[pre].adds_bos
        backend = _build_byte_level(vocabulary, _require(fields, "merges"), _SPLITS[pre])
    elif kind == "llama":
        space_prefix = fields.get("tokenizer.ggml.add_space_prefix", True)
        scores = _require(fields, "scores")
        backend = _build_sentencepiece(vocabulary, scores, named["unk_token"], space_prefix)
    else:
        raise unsupported("tokenizer.ggml.model", kind, "gpt2, llama")
    # Control tokens are never merged from text; user-defined ones are found in it ahead of all merging.
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in vocabulary.control])
    backend.add_tokens([AddedToken(token, normalized=False) for token in vocabulary.user_defined])
    backend.post_processor = _make_template(
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
    """Token -> id: of all tokens, and of those of each kind."""

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
    # Converters fill a vocabulary that is padded with tokens that are none: other sizes of a model, and its
    # own tokenizer, lack them.
    ids = {
        token: token_id
        for token_id, token in enumerate(tokens)
        if not (kinds[token_id] == TokenType.UNUSED and token == f"[PAD{token_id}]")
    }

    def of_kind(kind: int) -> dict[str, int]:
        return {token: token_id for token, token_id in ids.items() if kinds[token_id] == kind}

    kinds_kept = (TokenType.NORMAL, TokenType.CONTROL, TokenType.USER_DEFINED)
    return _Vocabulary(ids, *map(of_kind, kinds_kept))


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
    spaces: normalizers.Normalizer = normalizers.Replace(" ", _SPACE)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_prefix:
        spaces = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    backend.normalizer, backend.decoder = spaces, decoders.Sequence(steps)
    return backend


def _find_merges(ids: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges that the scores of SentencePiece tokens imply: it joins the neighbours whose token scores
    highest."""
    merges: list[tuple[str, str]] = []
    for token in sorted(ids, key=lambda token: -scores[ids[token]]):
        halves = [(token[:place], token[place:]) for place in range(1, len(token))]
        known = [(left, right) for left, right in halves if left in ids and right in ids]
        merges += sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return merges


def _make_template(backend: Tokenizer, first: str | None, last: str | None) -> TemplateProcessing:
    """Puts `first` ahead of a text and `last` behind it, unless None, when special tokens are asked for."""
    from tokenizers.processors import TemplateProcessing

    def enclose(text: str, type_id: int) -> list[str]:
        return [f"{piece}:{type_id}" for piece in (first, text, last) if piece is not None]

    ids = [(token, backend.token_to_id(token)) for token in {first, last} if token is not None]
    pair = enclose("$A", 0) + enclose("$B", 1)
    return TemplateProcessing(single=enclose("$A", 0), pair=pair, special_tokens=ids)


def _find_token(fields: Mapping[str, Any], name: str) -> str | None:
    """The special token `name`, such as "eos"; None if the file has none. Raises CheckpointError for an id
    past the vocabulary."""
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
