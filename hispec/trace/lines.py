"""The file of a trace: lines are buffered and written whole, numbers as JSON has them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..utils.files import finite

FLUSH_S = 1.0
_START = b'{"type": "trace",'  # of every trace, however it ended

_log = logging.getLogger(__name__)


def check_replaced(path: Path) -> None:
    """Raises ConfigError for what is there and no trace; OSError where it cannot be read."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"engine.trace: {path} is not a regular file; choose another path")
    if path.exists() and not is_ours(path):
        raise ConfigError(
            f"engine.trace: {path} exists and is no trace of HiSpec; move it away, or choose another path"
        )


class Lines:
    """A file of JSON lines, flushed about once a second. If writing fails it warns once, and stops."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        """Replaces an earlier trace. Raises ConfigError for another file, and for what can't be written."""
        try:
            check_replaced(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"engine.trace: cannot write {path}: {error.strerror or error}; choose another path"
            ) from None
        self._path, self._clock = path, clock
        self._waiting: list[bytes] = []
        self._flushed_s = clock()

    def add(self, record: Mapping[str, Any], now: bool = False) -> None:
        if self._file.closed:
            return
        self._waiting.append(_encode(record))
        if now or self._clock() - self._flushed_s >= FLUSH_S:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._file.close()

    def _flush(self) -> None:
        content, self._waiting = b"".join(self._waiting), []
        self._flushed_s = self._clock()
        try:
            while content:
                content = content[self._file.write(content) :]
        except (OSError, ValueError) as error:  # ValueError: closed already
            if not self._file.closed:
                _log.warning(
                    "the trace ends here: cannot write %s any more: %s",
                    self._path,
                    getattr(error, "strerror", None) or error,
                )
                self._file.close()


def is_ours(path: Path) -> bool:
    """Whether the file is a trace, or empty. Raises OSError."""
    with path.open("rb") as file:
        start = file.read(len(_START))
    return not start or start == _START


def _encode(record: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(record, allow_nan=False, default=_plain)
    except ValueError:  # nan or infinity somewhere
        text = json.dumps(finite(json.loads(json.dumps(record, default=_plain))), allow_nan=False)
    return text.encode("ascii") + b"\n"


def _plain(value: Any) -> Any:
    """numpy's numbers and arrays as Python's."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else str(value)
