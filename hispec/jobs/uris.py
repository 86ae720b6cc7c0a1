"""Files that are elsewhere: s3://, gs://, abfs://, hdfs:// and what else pyarrow opens."""

from __future__ import annotations

import atexit
import fnmatch
import glob
import re
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import ConfigError, shown

_URI = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)  # a drive of Windows has one letter
_COPIED: dict[Path, str] = {}


def is_uri(text: Any) -> bool:
    return isinstance(text, str) and _URI.match(text) is not None


def name_in(uri: str) -> str:
    """What a URI names in its folder; "" for a folder. A query says how to get there."""
    return uri.partition("?")[0].partition("://")[2].rpartition("/")[2]


def open_store(field: str, uri: str) -> tuple[Any, str]:
    """pyarrow's file system of a URI, and the path there. Raises ConfigError; field: who asks."""
    if ":" in uri.partition("://")[2].partition("/")[0].rpartition("@")[0]:
        raise ConfigError(
            f"{field}: the URI has a password before its @, which the job's manifest and messages would show;"
            " leave it out, and set it as the store wants it, such as AWS_ACCESS_KEY_ID and"
            " AWS_SECRET_ACCESS_KEY in the environment"
        )
    try:
        from pyarrow import fs
    except ImportError:
        raise ConfigError(f"{field}: {shown(uri)} needs pyarrow: pip install '.[data]'") from None
    try:
        store, path = fs.FileSystem.from_uri(uri)
    except (OSError, ValueError, NotImplementedError) as error:  # pyarrow's are such
        raise ConfigError(f"{field}: cannot open {shown(uri)}: {reason_of(error)}") from None
    return store, path


def reason_of(error: Exception) -> str:
    """The first line of pyarrow's words, without a full stop."""
    return (str(error).strip().split("\n")[0] or type(error).__name__).rstrip(".")


@cache
def fetch(uri: str) -> tuple[Path, ...]:
    """Temporary copies of the files that a URI names: one, all that a pattern fits, or with a / at the end
    all in a folder; in the order of their names. Raises ConfigError."""
    field = "input.path"
    store, path = open_store(field, uri)
    from pyarrow import fs

    try:
        if not name_in(uri):
            names = _list(store, path.rstrip("/"), "*")
        elif glob.has_magic(path):
            names = _list(store, path.rpartition("/")[0], path.rpartition("/")[2])
        else:
            names = [path] if store.get_file_info(path).type == fs.FileType.File else []
        if not names:
            raise ConfigError(f"input.path: no file is named like {uri}")
        folder = Path(tempfile.mkdtemp(prefix="hispec-input-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return tuple(_copy(store, name, folder / str(at), uri) for at, name in enumerate(names))
    except OSError as error:
        raise ConfigError(f"{field}: cannot read {shown(uri)}: {reason_of(error)}") from None


def takes(uri: str, path: str, place: str) -> bool:
    """Whether `fetch` of a URI, which is at `path` of its store, takes a file at `place` there."""
    folder, _, name = path.rpartition("/")
    if not name_in(uri):
        folder, name = path.rstrip("/"), "*"
    elif not glob.has_magic(path):
        return path == place
    own_folder, _, own_name = place.rpartition("/")
    return own_folder == folder and fnmatch.fnmatchcase(own_name, name)


def is_of_one_host(*uris: str) -> bool:
    """Whether what URIs of one scheme name before their paths is the same: a bucket, or a machine."""
    return len({uri.partition("://")[2].partition("/")[0].rpartition("@")[2] for uri in uris}) == 1


def _list(store: Any, folder: str, pattern: str) -> list[str]:
    from pyarrow import fs

    if glob.has_magic(folder):
        raise ConfigError(f"input.path: a pattern is for names of files, not of folders: {folder}/{pattern}")
    found = store.get_file_info(fs.FileSelector(folder, allow_not_found=True))
    return sorted(
        each.path for each in found if each.is_file and fnmatch.fnmatchcase(each.base_name, pattern)
    )


def _copy(store: Any, name: str, folder: Path, uri: str) -> Path:
    folder.mkdir()
    copy = folder / name.rpartition("/")[2]
    with store.open_input_stream(name, compression=None) as source, copy.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    _COPIED[copy] = f"{uri.partition('://')[0]}://{name}"
    return copy


def name_of(path: Path) -> str:
    """The URI of what a file is a copy of; else its path."""
    return _COPIED.get(path, str(path))
