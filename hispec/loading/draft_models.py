"""Finds and loads separate draft models, each once, and checks that their tokens are the target's."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ee_models.checkpoint.loader import Checkpoint, CheckpointError, load_tokenizer
from ee_models.decoder import Decoder

from ..config import SpeculativeConfig
from ..errors import ConfigError
from .target_model import open_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WHERE = "speculative.draft.path"
_log = logging.getLogger(__name__)


class DraftModels:
    """The draft models of one LLM, by their path."""

    def __init__(self, attention: str) -> None:
        self._attention = attention
        self._loaded: dict[str, Decoder] = {}

    def check(self, speculative: SpeculativeConfig | None) -> None:
        """Raises CheckpointError or ConfigError if the model that `speculative` names cannot be read. Loads
        nothing."""
        path = _path(speculative)
        if path is not None and path not in self._loaded:
            self._open(path)

    def load(
        self,
        speculative: SpeculativeConfig | None,
        target: Decoder,
        tokenizer: PreTrainedTokenizerBase | None,
        max_model_len: int,
    ) -> Decoder | None:
        """The draft model of `speculative`, on the target's device, in its dtype, quantized if it is; None if
        it names none.

        tokenizer   the target's; None = token ids only, then the vocabularies must be of one size
        Raises CheckpointError if it cannot be read, ConfigError if its tokens are not the target's, or if it
        cannot be held as the target is.
        """
        path = _path(speculative)
        if path is None:
            return None
        if path not in self._loaded:
            checkpoint = self._open(path)
            _check_tokens(path, checkpoint, target, tokenizer)
            config = checkpoint.config
            length = min(
                max_model_len, config.max_position_embeddings, config.sliding_window or max_model_len
            )
            try:
                self._loaded[path] = Decoder.load(
                    checkpoint,
                    target.dtype,
                    target.device,
                    self._attention,
                    max_positions=length,
                    quantization=target.make_linear.quantization,
                    exact=target.make_linear.exact,
                    weights_dtype=target.weights_dtype,
                    kv_dtype=target.kv_dtype,
                )
            except CheckpointError:
                raise
            except ValueError as error:
                raise ConfigError(f"{_WHERE}: {error}") from error
        return self._loaded[path]

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights of all loaded draft models."""
        return sum(decoder.num_bytes for decoder in self._loaded.values())

    @staticmethod
    def _open(path: str) -> Checkpoint:
        try:
            return open_model(path)
        except CheckpointError as error:
            raise CheckpointError(f"{_WHERE}: {error}") from error
        except ConfigError as error:
            raise ConfigError(f"{_WHERE}: {error}") from error


def _path(speculative: SpeculativeConfig | None) -> str | None:
    return speculative.draft.path if speculative is not None and speculative.draft.traits.has_model else None


def _check_tokens(
    path: str, checkpoint: Checkpoint, target: Decoder, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Raises ConfigError, naming the first token that differs, unless both models have the same vocabulary.
    Where only what ends a text differs, as in a base model and one made of it, drafts are merely wrong there;
    that is logged."""
    own, others = checkpoint.config, target.config
    if tokenizer is None:
        if own.vocab_size != others.vocab_size:
            raise ConfigError(
                f"{_WHERE}={path!r}: the draft model has {own.vocab_size} tokens, the target"
                f" {others.vocab_size}; without tokenizers to compare they must be equal;"
                " choose another draft model"
            )
        return
    draft_tokenizer = load_tokenizer(checkpoint)
    if draft_tokenizer is None:
        raise ConfigError(
            f"{_WHERE}={path!r}: the draft model has no tokenizer to compare with the target's; choose one"
            " that has"
        )
    ours, theirs = tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    if ours != theirs:
        differing = (token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
        token = min(
            differing,
            key=lambda token: min(vocabulary[token] for vocabulary in (ours, theirs) if token in vocabulary),
        )
        raise ConfigError(
            f"{_WHERE}={path!r}: the draft model's vocabulary is not the target's ({len(theirs)} and"
            f" {len(ours)} tokens): {token!r} is token {theirs.get(token, 'none')} of the draft model and"
            f" {ours.get(token, 'none')} of the target; choose a model with the same tokenizer"
        )
    for name, special in tokenizer.special_tokens_map.items():
        if name in ("bos_token", "eos_token") and draft_tokenizer.special_tokens_map.get(name) != special:
            _log.warning(
                "%s=%r: %s is %r in the draft model and %r in the target; outputs are the target's, but its"
                " drafts may be wrong more often",
                *(_WHERE, path, name, draft_tokenizer.special_tokens_map.get(name), special),
            )
    if own.vocab_size < len(ours):
        raise ConfigError(
            f"{_WHERE}={path!r}: the draft model embeds {own.vocab_size} tokens, but its tokenizer has"
            f" {len(ours)}; choose another draft model"
        )
