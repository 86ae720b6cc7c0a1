"""Files are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hispec.utils.files import write_atomically


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "preset.yaml"
    write_atomically(path, b"old")

    def fail(self: Path, content: bytes) -> None:
        with self.open("wb") as file:
            file.write(content[:1])
        raise error

    for error in (KeyboardInterrupt(), OSError(28, "No space left on device")):
        for place, name, broken in (
            (Path, "write_bytes", fail),
            (os, "replace", lambda draft, path: fail(draft, b"n")),
        ):
            with monkeypatch.context() as patch, pytest.raises(type(error)):
                patch.setattr(place, name, broken)
                write_atomically(path, b"new")
        assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_link_stays_one(tmp_path: Path) -> None:
    place, path = tmp_path / "elsewhere" / "place.json", tmp_path / "link.json"
    place.parent.mkdir()
    path.symlink_to(place)
    for content in (b"new", b"newer"):  # the first at a link to nothing yet
        write_atomically(path, content)
        assert path.is_symlink() and place.read_bytes() == content
    assert list(place.parent.iterdir()) == [place]
