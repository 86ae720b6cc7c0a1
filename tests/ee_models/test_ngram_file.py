"""N-grams on disk: what is written is read again, and what cannot be used is refused with the reason and the
way out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ee_models.checkpoint.described import sha256
from ee_models.checkpoint.ngram_file import INFO, TENSORS, Ngrams, NgramsError, NgramsFile, save_ngrams

NGRAMS = {
    1: Ngrams(np.array([[3], [259]]), np.array([4, 0]), np.array([255, 1], np.uint8)),
    3: Ngrams(np.array([[1, 2, 3]]), np.array([259]), np.array([128], np.uint8)),
}


def write(folder: Path, vocab_size: int = 260) -> NgramsFile:
    about: dict[str, Any] = {"recipe": {"max_size": 3}, "data": {"tokens": 9}, "held_out": {"right": 0.5}}
    return save_ngrams(folder, "tiny", vocab_size, NGRAMS, **about)


@pytest.mark.parametrize(("vocab_size", "kind"), [(260, np.uint16), (1 << 16, np.uint16), (70_000, np.int32)])
def test_what_is_written_is_read_again(tmp_path: Path, vocab_size: int, kind: Any) -> None:
    write(tmp_path / "new" / "folder", vocab_size)
    file = NgramsFile(tmp_path / "new" / "folder")
    assert file.about.sizes == {1: 2, 3: 1} and file.about.vocab_size == vocab_size
    assert (file.about.model, file.about.held_out) == ("tiny", {"right": 0.5})
    read = file.read()
    assert read.keys() == NGRAMS.keys()
    for size, expected in NGRAMS.items():
        assert all(np.array_equal(*pair) for pair in zip(read[size], expected, strict=True))
        assert (read[size].contexts.dtype, read[size].shares.dtype) == (kind, np.uint8)
    assert sorted(path.name for path in file.folder.iterdir()) == [INFO, TENSORS], "and nothing else is left"


def test_they_belong_to_a_vocabulary(tmp_path: Path) -> None:
    file = write(tmp_path)
    file.check_vocabulary(260, "another")
    with pytest.raises(NgramsError, match="of tiny, whose vocabulary has 260 tokens; another has 261: count"):
        file.check_vocabulary(261, "another")


def rewritten(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """The tensors after `change`, with a checksum that is right."""
    tensors = load_file(folder / TENSORS)
    change(tensors)
    save_file(tensors, folder / TENSORS)
    about = json.loads((folder / INFO).read_text())
    (folder / INFO).write_text(json.dumps(about | {"tensors_sha256": sha256(folder / TENSORS)}))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "nothing there": (lambda folder: (folder / INFO).unlink(), "holds no n-grams: cannot read ngrams.json"),
    "no JSON": (lambda folder: (folder / INFO).write_text("{"), "is not a description of n-grams"),
    "an unknown field": (
        lambda folder: (folder / INFO).write_text(
            json.dumps(json.loads((folder / INFO).read_text()) | {"more": 1})
        ),
        "more: Extra inputs",
    ),
    "no tensors": (lambda folder: (folder / TENSORS).unlink(), "ngrams.safetensors cannot be read"),
    "half of the tensors": (
        lambda folder: (folder / TENSORS).write_bytes((folder / TENSORS).read_bytes()[:90]),
        "is damaged: its checksum is not the one in ngrams.json; copy it again",
    ),
    "no tensors at all": (
        lambda folder: (
            (folder / TENSORS).write_bytes(b"x"),
            (folder / INFO).write_text(
                json.dumps(
                    json.loads((folder / INFO).read_text()) | {"tensors_sha256": sha256(folder / TENSORS)}
                )
            ),
        ),
        "cannot be read: ",
    ),
    "one missing": (
        lambda folder: rewritten(folder, lambda tensors: tensors.pop("tokens.3")),
        r"tokens.3 must be \[1\] integer",
    ),
    "another shape": (
        lambda folder: rewritten(
            folder, lambda tensors: tensors.update({"contexts.3": tensors["contexts.1"]})
        ),
        r"contexts.3 must be \[1, 3\] integer",
    ),
    "fractions": (
        lambda folder: rewritten(
            folder, lambda tensors: tensors.update({"shares.1": np.ones(2, np.float32)})
        ),
        r"shares.1 must be \[2\] uint8",
    ),
    "a token that there is not": (
        lambda folder: rewritten(
            folder, lambda tensors: tensors.update({"tokens.1": np.array([4, 260], np.uint16)})
        ),
        "tokens.1 has tokens outside of 0 to 259",
    ),
    "a context twice": (
        lambda folder: rewritten(
            folder, lambda tensors: tensors.update({"contexts.1": np.array([[3], [3]], np.uint16)})
        ),
        "contexts.1 has a context twice",
    ),
    "a negative token": (
        lambda folder: rewritten(
            folder, lambda tensors: tensors.update({"contexts.1": np.array([[-1], [2]], np.int32)})
        ),
        "contexts.1 has tokens outside of 0 to 259",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_what_cannot_be_used_is_refused(tmp_path: Path, what: str) -> None:
    damage, words = DAMAGE[what]
    write(tmp_path / "good")
    shutil.copytree(tmp_path / "good", tmp_path / "bad")
    damage(tmp_path / "bad")
    with pytest.raises(NgramsError, match=words):
        NgramsFile(tmp_path / "bad").read()
    NgramsFile(tmp_path / "good").read()


def test_a_folder_that_cannot_be_written_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("ee_models.checkpoint.ngram_file.save_file", fail)
    with pytest.raises(OSError, match="no space left"):
        write(tmp_path, 300)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
