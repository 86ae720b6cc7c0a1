"""Incremental text: characters whose bytes are split over tokens, stop strings, and what is held back until
it is certain."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from hispec.detokenizer import IncrementalText, TokenBytes, TokenPieces, split_text
from tests.helpers.tiny import EOS_ID, ROLE_ID, tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    """A token per byte, so that every other character takes several."""
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def stream(
    tokenizer: PreTrainedTokenizerFast, token_ids: Sequence[int], stop: Sequence[str] = ()
) -> tuple[list[str], str | None, int]:
    """Feeds tokens until a stop string is found -> (what each token released, the final release last; the
    stop string; tokens taken)."""
    text, released, found = IncrementalText(tokenizer, stop), [], None
    for token in token_ids:
        found = text.append(token)
        released.append(text.release(final=found is not None))
        if found is not None:
            break
    num_taken = len(released)
    released.append(text.release(final=True))
    return released, found, num_taken


def test_a_character_is_released_with_its_last_byte(tokenizer: PreTrainedTokenizerFast) -> None:
    released, _, _ = stream(tokenizer, ids_of(tokenizer, "aé漢😀b"))
    assert released == ["a", "", "é", "", "", "漢", "", "", "", "😀", "b", ""]


def test_text_without_stop_strings_is_released_at_once(tokenizer: PreTrainedTokenizerFast) -> None:
    assert stream(tokenizer, ids_of(tokenizer, " a\n\nb"))[0] == [" ", "a", "\n", "\n", "b", ""]


@pytest.mark.parametrize(
    ("text", "stop", "found", "out"),
    [
        ("one two three", ["two"], "two", "one "),
        ("one two three", ["four"], None, "one two three"),
        ("one two three", ["three", "two"], "two", "one "),
        ("aab", ["ab"], "ab", "a"),
        ("aaab", ["aab"], "aab", "a"),
        ("end", ["end"], "end", ""),
        ("x\n\ny", ["\n\n"], "\n\n", "x"),
        ("漢字。次", ["。"], "。", "漢字"),
        ("a😀b", ["😀b"], "😀b", "a"),
        ("xabcd", ["bc", "abcd"], "bc", "xa"),  # complete first
        ("xabcd", ["abcde", "cd"], "cd", "xab"),
        ("xaé", ["é", "aé"], "aé", "x"),  # complete with the same token: the one that begins first
        ("xaé", ["aé", "é", "xaé"], "xaé", ""),
    ],
)
def test_output_ends_before_the_stop_string_that_is_complete_first(
    tokenizer: PreTrainedTokenizerFast, text: str, stop: list[str], found: str | None, out: str
) -> None:
    released, got, _ = stream(tokenizer, ids_of(tokenizer, text), stop)
    assert got == found
    assert "".join(released) == out


def test_a_stop_string_is_found_with_the_token_that_completes_it(tokenizer: PreTrainedTokenizerFast) -> None:
    for text, stop, num_tokens in (("ab stop it", "stop", 7), ("a漢b", "漢", 4), ("a漢b", "漢b", 5)):
        _, found, num_taken = stream(tokenizer, ids_of(tokenizer, text), [stop])
        assert (found, num_taken) == (stop, num_tokens)


def test_text_that_may_begin_a_stop_string_is_held_back(tokenizer: PreTrainedTokenizerFast) -> None:
    released, found, _ = stream(tokenizer, ids_of(tokenizer, "1ab2abc"), ["abc", "z"])
    assert found == "abc"
    assert "".join(released) == "1ab2"
    so_far = ["".join(released[: i + 1]) for i in range(7)]
    assert all("1ab2"[: len(text)] == text for text in so_far), (
        "something was released that had to be taken back"
    )
    held = [i + 1 - len(text) for i, text in enumerate(so_far[:4])]
    assert held == [1, 2, 2, 2], "exactly as much is held back as the longest stop string needs"


def test_nothing_is_released_twice_or_after_the_stop_string(tokenizer: PreTrainedTokenizerFast) -> None:
    text = IncrementalText(tokenizer, ["!"])
    ids = ids_of(tokenizer, "ab!cd!")
    assert [text.append(token) for token in ids] == [None, None, "!", None, None, None]
    assert text.release(final=False) == "ab"
    assert text.release(final=True) == ""
    assert text.release(final=True) == ""


def test_special_tokens_have_no_text(tokenizer: PreTrainedTokenizerFast) -> None:
    a, b = ids_of(tokenizer, "a"), ids_of(tokenizer, "b")
    assert "".join(stream(tokenizer, [*a, ROLE_ID, *b, EOS_ID])[0]) == "ab"
    assert stream(tokenizer, [*a, ROLE_ID, *b], ["ab"])[1] == "ab"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain",
        " leading",
        "trailing ",
        "  two  spaces ",
        "é漢😀\u200d👩\n\t",
        "\ufffd",
        "a\ufffdb\ufffd",
        "e\u0301",
    ],
)
def test_all_releases_together_are_what_the_tokenizer_decodes(
    tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    ids = ids_of(tokenizer, text)
    for stop in ([], ["nowhere"]):
        assert (
            "".join(stream(tokenizer, ids, stop)[0])
            == tokenizer.decode(ids, skip_special_tokens=True)
            == text
        )


@pytest.mark.parametrize("stop", [[], ["nowhere"]])
@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_output_cut_inside_a_character_ends_as_the_tokenizer_decodes_it(
    tokenizer: PreTrainedTokenizerFast, num_bytes: int, stop: list[str]
) -> None:
    """max_tokens may cut anywhere; what is incomplete then reads as U+FFFD, as everywhere in transformers."""
    ids = ids_of(tokenizer, "a😀")[: 1 + num_bytes]
    assert "".join(stream(tokenizer, ids, stop)[0]) == tokenizer.decode(ids) == "a\ufffd"


def test_bytes_that_are_no_text_are_what_the_tokenizer_decodes(tokenizer: PreTrainedTokenizerFast) -> None:
    """A model may write any bytes: random ones, and the shuffled bytes of real characters."""
    generator = random.Random(0)
    for case in range(600):
        ids = [generator.randrange(260) for _ in range(12)]
        if case % 2:
            ids = ids_of(tokenizer, "".join(generator.choice("aé漢😀 ") for _ in range(5)))
            generator.shuffle(ids)
        assert "".join(stream(tokenizer, ids)[0]) == tokenizer.decode(ids, skip_special_tokens=True)


def test_taken_at_the_end_a_text_is_the_same(tokenizer: PreTrainedTokenizerFast) -> None:
    generator = random.Random(1)
    for case in range(400):
        ids = [generator.choice([*range(260), ROLE_ID, EOS_ID]) for _ in range(generator.randrange(12))]
        if case % 2:
            ids = ids_of(tokenizer, "".join(generator.choice("aé漢😀 ") for _ in range(5)))
        for continues in (False, True):
            text, streamed = IncrementalText(tokenizer, (), continues, at_end=True), []
            assert text.at_end
            in_turn = IncrementalText(tokenizer, (), continues)
            for token in ids:
                in_turn.append(token)
                streamed.append(in_turn.release(final=False))
            assert text.whole(ids) == text.whole(ids) == "".join([*streamed, in_turn.release(final=True)])
    assert not IncrementalText(tokenizer, ["stop"], at_end=True).at_end, "a stop string may end it before"


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    text=st.text("abé漢😀", max_size=12), stop=st.lists(st.text("abé漢", min_size=1, max_size=4), max_size=3)
)
def test_stop_strings_are_found_as_by_searching_the_whole_text_after_every_token(
    tokenizer: PreTrainedTokenizerFast, text: str, stop: list[str]
) -> None:
    ids = ids_of(tokenizer, text)
    expected_found, expected_text, expected_taken = None, text, len(ids)
    for num_tokens in range(1, len(ids) + 1):
        so_far = tokenizer.decode(ids[:num_tokens]).rstrip("\ufffd")
        found = [(so_far.find(string), string) for string in stop if string in so_far]
        if found:
            place, expected_found = min(found)
            expected_text, expected_taken = so_far[:place], num_tokens
            break
    released, got, num_taken = stream(tokenizer, ids, stop)
    assert (got, "".join(released), num_taken) == (expected_found, expected_text, expected_taken)


@pytest.mark.parametrize("stop", [(), ("b",), ("漢",)], ids=["whole", "stopped", "stopped by a character"])
def test_a_text_splits_by_its_tokens(tokenizer: PreTrainedTokenizerFast, stop: Sequence[str]) -> None:
    """Each piece with the token that completed it, as far as the text goes; cut bytes with the last one."""
    token_ids = [*ids_of(tokenizer, "aé漢"), EOS_ID, *ids_of(tokenizer, "b😀")[:-1]]
    released, _, num_taken = stream(tokenizer, token_ids, stop)
    text = "".join(released)
    pieces = split_text(tokenizer, token_ids[:num_taken], text, continues=False)
    assert "".join(pieces) == text and len(pieces) == num_taken
    wanted = ["a", "", "é", "", "", "漢", "", "b", "", "", "\N{REPLACEMENT CHARACTER}"]
    if stop:
        place = wanted.index(stop[0])
        wanted = [*wanted[:place], ""]
    assert pieces == wanted


def test_a_stop_string_that_was_plain_text_ends_nothing_later(tokenizer: PreTrainedTokenizerFast) -> None:
    """min_tokens let the short one pass; it still lies where the long one could begin."""
    text = IncrementalText(tokenizer, ["ab", "END OF ANSWER"])
    found = [text.append(token, may_stop=at > 2) for at, token in enumerate(ids_of(tokenizer, "xab yz ab"))]
    assert found == [None] * 8 + ["ab"] and text.release(final=True) == "xab yz "


def test_the_bytes_of_tokens_are_together_those_of_the_text(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    bytes_of, text = TokenBytes(tokenizer), "a b\n\u00e9 \U0001f642\u2581\x7f"
    each = [bytes_of(token) for token in ids_of(tokenizer, text)]
    assert b"".join(each) == text.encode() and max(map(len, each)) == 1
    assert bytes_of(EOS_ID) == tokenizer.convert_ids_to_tokens(EOS_ID).encode()
    assert bytes_of(10**6) == b""
    monkeypatch.setattr(tokenizer, "convert_ids_to_tokens", {7: "a b", 8: "\u6f22"}.get)
    assert [bytes_of(7), bytes_of(8)] == [b"a b", "\u6f22".encode()]  # of no byte-level alphabet


LLAMA = decoders.Sequence(
    [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


def sentencepiece(*pieces: str, decoder: decoders.Decoder = LLAMA) -> PreTrainedTokenizerFast:
    names = ["<unk>", *pieces, "</s>"]
    backend = Tokenizer(BPE({piece: at for at, piece in enumerate(names)}, [], unk_token="<unk>"))
    backend.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")


@pytest.mark.parametrize("decoder", [LLAMA, decoders.Metaspace()], ids=["Llama", "Metaspace"])
@pytest.mark.parametrize("output", [[2, 3, 2], [3, 2], [4, 2, 3], [5, 3], [5], [3, 5, 5]], ids=str)
def test_an_output_that_continues_its_prompt_keeps_the_space_that_begins_it(
    decoder: decoders.Decoder, output: list[int]
) -> None:
    """Together they are what all tokens give at once; by itself an answer has what its own tokens give."""
    tokenizer = sentencepiece("a", "\u2581b", "c", "\u2581", "\u2581\u2581", decoder=decoder)
    prompt = [2, 1]
    for before, continues in ((prompt, True), ([], False)):
        text, streamed = IncrementalText(tokenizer, (), continues), []
        for token in output:
            text.append(token)
            streamed.append(text.release(final=False))
        streamed.append(text.release(final=True))
        whole = tokenizer.decode([*before, *output]).removeprefix(tokenizer.decode(before))
        assert "".join(streamed) == whole
        assert not IncrementalText(tokenizer, (), continues, at_end=True).at_end, "its bytes may be wrong"
        pieces = split_text(tokenizer, output, whole, continues)
        assert "".join(pieces) == whole and len(pieces) == len(output)
        cutter = TokenPieces(tokenizer, continues)
        cut = [
            piece
            for at, (token, part) in enumerate(zip(output, streamed, strict=False), start=1)
            for piece in cutter.cut([token], [str(at)], part, is_last=at == len(output))
        ]
        assert "".join(piece for piece, _ in cut) == "".join(streamed[:-1])
        assert [(piece, label) for piece, label in cut if piece] == [
            (piece, str(at)) for at, piece in enumerate(streamed[:-1], start=1) if piece
        ]


def test_the_bytes_of_sentencepieces_tokens_have_their_spaces() -> None:
    llama = sentencepiece("\u2581river", "river", "<0xF0>", "<0x9F>")
    assert [TokenBytes(llama)(token) for token in range(1, 6)] == [
        b" river",
        b"river",
        b"\xf0",
        b"\x9f",
        b"</s>",
    ]


BYTES = {byte: f"<0x{byte:02X}>" for byte in range(256)}


@pytest.mark.parametrize(
    ("parts", "streamed"),
    [
        ((0xC3, 0xA9, 0xE4, "a"), ["é", "", "\ufffda"]),
        ((0x0A, 0xE2, "\u2581b"), ["\n", "", "\ufffd b"]),
        (
            ("a", 0xC3, 0xA9, 0xE6, 0xBC, "b", "\u2581b", 0xC3, 0xA9),
            ["a", "é", "", "\ufffd\ufffdb", " b", "é"],
        ),
        (("a", 0x0A, 0xE6, 0xBC, 0xA2, "b"), ["a", "\n", "漢", "b"]),
        ((0xC3, 0xA9, 0xE4), ["é", "\ufffd"]),
    ],
    ids=str,
)
def test_bytes_that_make_no_character_after_such_as_did_are_signs_and_no_error(
    parts: tuple[int | str, ...], streamed: list[str]
) -> None:
    """A decoder that falls back to bytes makes signs of the whole run; what was given as text stays."""
    pieces = ["a", "b", "\u2581b", *BYTES.values()]
    tokenizer = sentencepiece(*pieces)
    tokens = [1 + pieces.index(part if isinstance(part, str) else BYTES[part]) for part in parts]
    text = IncrementalText(tokenizer, ())
    found = []
    for token in tokens:
        text.append(token)
        found.append(text.release(final=False))
    found.append(text.release(final=True))
    assert [piece for piece in found if piece] == [piece for piece in streamed if piece]
    assert "".join(split_text(tokenizer, tokens, "".join(found), False)) == "".join(streamed)


def test_a_stop_string_is_found_after_bytes_that_make_no_character() -> None:
    pieces = ["a", "b", *BYTES.values()]
    text = IncrementalText(sentencepiece(*pieces), ["ab"])
    tokens = [1 + pieces.index(piece) for piece in (BYTES[0xC3], BYTES[0xA9], BYTES[0xE4], "a", "b")]
    assert [text.append(token) for token in tokens] == [None] * 4 + ["ab"]
    assert text.release(final=True) == "é\ufffd"
