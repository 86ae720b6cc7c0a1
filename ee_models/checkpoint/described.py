"""Tensors in a folder, and a JSON file beside them that says what they are and has their checksum."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError

from ..errors import CheckpointError

_Info = TypeVar("_Info", bound="FileInfo")


class FileInfo(BaseModel):
    """A description that lies beside tensors: unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def read_info(
    path: Path, kind: type[_Info], what: str, made_by: str, remedy: str, error: type[CheckpointError]
) -> _Info:
    """The description at `path`, of `what`. made_by: what writes such a folder; remedy: the way out of a
    damaged one. Raises `error` if it is not there, or cannot be read."""
    try:
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as cause:
        why = getattr(cause, "strerror", None) or cause  # the system's word, without its number and the path
        raise error(
            f"{path.parent} holds no {what}: cannot read {path.name}: {why}; give the folder that {made_by}"
        ) from cause
    except ValidationError as cause:
        first = cause.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise error(f"{path} is not a description of {what}: {where}: {first['msg']}; {remedy}") from cause


def write_described(
    folder: Path,
    tensors_name: str,
    info_name: str,
    save: Callable[[Path], None],
    describe: Callable[[str], FileInfo],
) -> None:
    """Writes what `save` puts into a file, and then what `describe` says of its checksum. If only one of the
    files could be replaced, the checksum in the description does not match the tensors. Raises OSError if the
    folder cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    drafts = [folder / f".{name}.{os.getpid()}" for name in (tensors_name, info_name)]
    try:
        try:
            save(drafts[0])
        except SafetensorError as error:
            raise OSError(str(error)) from error
        text = json.dumps(describe(sha256(drafts[0])).model_dump(), indent=2, ensure_ascii=False)
        drafts[1].write_text(f"{text}\n", encoding="utf-8")
        # safetensors makes its files private; tensors are for all who may read their description.
        drafts[0].chmod(drafts[1].stat().st_mode)
        for draft, name in zip(drafts, (tensors_name, info_name), strict=True):
            os.replace(draft, folder / name)
    finally:
        for draft in drafts:
            with suppress(OSError):
                draft.unlink()


def sha256(path: Path) -> str:
    """The checksum of a file. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_files(folder: Path) -> None:
    """Has the disk write what the files of a folder hold. Before its name is there: a power failure must not
    leave names without what they name. Raises OSError."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as written:
                os.fsync(written.fileno())
