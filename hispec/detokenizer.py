"""Turns output tokens into text one by one, and finds stop strings."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def _any_text(backend: Tokenizer) -> Sequence[int]:
    """Tokens that stand for a prompt, of which only matters that it is there; none where a vocabulary has no
    letter of its own, and no way to say so."""
    try:
        encoding = backend.encode("a", add_special_tokens=False)
    except Exception:  # tokenizers raise no class of their own
        return ()
    return [token for token, is_text in zip(encoding.ids, encoding.attention_mask, strict=True) if is_text]


def _is_byte_level(backend: Tokenizer) -> bool:
    return backend.decoder is not None and b"ByteLevel" in backend.decoder.__getstate__()


class IncrementalText:
    """Detokenises one output as it grows. Characters whose bytes are incomplete are held back, and so is text
    that may be the beginning of a stop string.

    continues   the output goes on a text, its prompt: a space with which it begins is part of it. Tokenizers
                of SentencePiece's kind put a space before the first word of every text, and leave it out
                again: a chat's answer, a text of its own, lacks it.
    at_end      nobody reads the text before the output has ended. Without stop strings it is then made at
                once, by `whole`, in a fraction of the time, where the tokenizer's pieces are bytes: a decoder
                that falls back to bytes gives up a whole run of them where one is wrong
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str],
        continues: bool = False,
        at_end: bool = False,
    ) -> None:
        self._backend, self.continues = tokenizer.backend_tokenizer, continues
        self.at_end = at_end and not stop and _is_byte_level(self._backend)
        # Of these only matters that they are there.
        self._before = list(_any_text(self._backend)) if continues else []
        self._stream = DecodeStream(skip_special_tokens=True)
        for token in self._before:
            self._stream.step(self._backend, token)
        self._stop = tuple(stop)
        self._held = max((len(string) for string in stop), default=1) - 1
        self._pending: list[int] = []  # tokens that have given no text yet
        self._text = ""
        self._released = 0
        self._end: int | None = None

    def whole(self, token_ids: Sequence[int]) -> str:
        """The text of an output of these tokens, whatever was appended."""
        before, text = (
            self._backend.decode([*self._before, *tokens], skip_special_tokens=True)
            for tokens in ((), token_ids)
        )
        return text.removeprefix(before)

    def append(self, token_id: int, may_stop: bool = True) -> str | None:
        """Takes one token -> the stop string that it completed, if any; of several, the one that begins
        first."""
        self._pending.append(token_id)
        try:
            piece = self._stream.step(self._backend, token_id)
        except Exception:  # tokenizers raise no class of their own
            piece = self._begin_again()
        if not piece or self._end is not None:
            return None
        self._pending.clear()
        before = len(self._text)
        self._text += piece
        if not may_stop:
            return None
        # Each only where this token can have completed it: what lies before was plain text, by min_tokens.
        places = ((self._text.find(each, max(0, before - len(each) + 1)), each) for each in self._stop)
        found = [(place, string) for place, string in places if place >= 0]
        if not found:
            return None
        self._end, string = min(found)
        return string

    def _begin_again(self) -> str:
        """The text of the tokens that have given none yet, in a stream that goes on from the last of them.

        A decoder that falls back to bytes reads a run of them as a whole: an incomplete character makes signs
        of no character of those before it, too, which have been given as text, so that a stream finds no way
        on.
        """
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stream.step(self._backend, self._pending[-1])
        return self._backend.decode(self._pending, skip_special_tokens=True)

    def release(self, final: bool) -> str:
        """Returns text that is certain and was not returned before; with `final`, all text up to the stop
        string."""
        if final and self._end is None:
            self._text += self._backend.decode(
                self._pending, skip_special_tokens=True
            )  # bytes that no later token can complete
            self._pending.clear()
        end = self._end if self._end is not None else len(self._text) - (0 if final else self._held)
        piece = self._text[self._released : max(end, self._released)]
        self._released += len(piece)
        return piece


def split_text(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], text: str, continues: bool
) -> list[str]:
    """What each token added to the text of an output of these tokens: together all of `text`, which a stop
    string may have cut. A character of several tokens counts to the last of them. continues: as of the
    IncrementalText that made it."""
    whole, pieces, left = IncrementalText(tokenizer, (), continues), [], len(text)
    for place, token in enumerate(token_ids, start=1):
        whole.append(token)
        pieces.append(whole.release(final=place == len(token_ids))[:left])
        left -= len(pieces[-1])
    return pieces


class TokenBytes:
    """The bytes of single tokens: those of a word with the space before it, and of a character's part that
    part alone, which no text can hold. Without a tokenizer their numbers.

    special   tokens that are no part of a text, though they have a name
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        added = {} if tokenizer is None else tokenizer.added_tokens_decoder
        self._tokenizer, self._added = tokenizer, frozenset(added)
        self.special = frozenset(token for token, about in added.items() if about.special)
        self._is_byte_level = tokenizer is not None and _is_byte_level(tokenizer.backend_tokenizer)

    def __call__(self, token_id: int) -> bytes:
        """None of a token that the vocabulary does not have, as models have whose embedding is padded."""
        if self._tokenizer is None:
            return str(token_id).encode()
        piece: Any = self._tokenizer.convert_ids_to_tokens(token_id)
        if piece is None:
            return b""
        if token_id in self._added:
            return str(piece).encode()
        if self._is_byte_level and not set(piece) - _BYTE_OF.keys():  # else it is none of that alphabet
            return bytes(_BYTE_OF[character] for character in piece)
        if byte := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        return str(piece).replace("\u2581", " ").encode()  # SentencePiece's sign for a space


def _byte_level_alphabet() -> dict[str, int]:
    """{character: byte} of the vocabularies of GPT-2's kind: printable bytes stand for themselves, others for
    the characters from 256 on, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenPieces:
    """A stream's text, cut into what each token added to it, with the token's label. continues: as of the
    IncrementalText that makes it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, continues: bool) -> None:
        self._text = IncrementalText(tokenizer, (), continues)
        self._waiting: deque[tuple[str, str]] = deque()  # (text, label) that no Delta has released yet

    def cut(
        self, token_ids: Sequence[int], labels: Sequence[str], text: str, is_last: bool
    ) -> list[tuple[str, str]]:
        """(text, label) pieces of a Delta's text. Some of it may be of tokens that came before: what could
        have been the beginning of a stop string, or of a character."""
        for place, (token, label) in enumerate(zip(token_ids, labels, strict=True), start=1):
            self._text.append(token)
            self._waiting.append((self._text.release(is_last and place == len(token_ids)), label))
        pieces, left = [], len(text)
        while left and self._waiting:
            piece, label = self._waiting.popleft()
            if len(piece) > left:
                self._waiting.appendleft((piece[left:], label))
            pieces.append((piece[:left], label))
            left -= len(pieces[-1][0])
        if left:  # of a last Delta without tokens: bytes that no token has completed
            pieces.append((text[-left:], pieces[-1][1] if pieces else ""))
        return pieces
