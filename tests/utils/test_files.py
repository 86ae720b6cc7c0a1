"""Files are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hispec.errors import ConfigError
from hispec.utils.files import check_targets, write_atomically, write_json


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


def test_what_an_option_writes_replaces_nothing_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "out"
    others = (b'{"id": "1", "outputs": []}\n', b"id,text\n", b"<!DOCTYPE", b"\x00")
    for flag in ("--json", "--latency", "--html", "-o"):
        for content in others:
            path.write_bytes(content)
            with pytest.raises(ConfigError, match=f"{flag}: .*out exists and is no .* would be lost"):
                check_targets({flag: path})
            assert path.read_bytes() == content
        path.write_bytes(b"")
        check_targets({flag: path})
        path.unlink()
        check_targets({flag: path})
    for flag, content in (("--html", b"<!DOCTYPE html>\n<html>"), ("-o", b"\x89PNG\r\n\x1a\n")):
        path.write_bytes(content)
        check_targets({flag: path})
    write_json(path, {"a": 1})
    check_targets({"--json": path})
    named = path.with_suffix(".json")
    named.write_text('{"a": 1}')
    check_targets({"--json": named})
    with pytest.raises(ConfigError, match=r"--html: .*out.json exists and is no page"):
        check_targets({"--html": named})
