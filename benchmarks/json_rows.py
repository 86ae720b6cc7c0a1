"""Files of data sets: a JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hispec.errors import ConfigError, shown
from hispec.utils.files import parse_json


def rows_of(
    path: Path, fields: Sequence[str], limit: int | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row) of the first `limit` rows, which have these fields. Raises ConfigError for what cannot be
    read."""
    try:
        lines = path.read_bytes().splitlines()  # of text, these would be cut at U+2028 too
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; mend the path") from None
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise ConfigError(f"{path} has no rows; it needs one JSON object with {' and '.join(fields)} a line")
    for number, line in numbered[:limit]:
        where = f"{path}, line {number}"
        try:
            row = parse_json(line)
            json.dumps(row, ensure_ascii=False).encode()  # half a surrogate pair is no character
        except ValueError as error:
            raise ConfigError(f"{where}: not valid JSON: {error}; mend the row") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: must be a JSON object, got {shown(row)}; mend the row")
        for field in fields:
            if field not in row:
                raise ConfigError(f"{where}: has no field {field!r}, only {', '.join(row)}; mend the row")
        yield where, row


def text_in(where: str, row: dict[str, Any], field: str) -> str:
    """Raises ConfigError unless the field is a text that is not empty."""
    text = row[field]
    if not (isinstance(text, str) and text.strip()):
        raise ConfigError(f"{where}: {field!r} must be a non-empty string, got {shown(text)}; mend the row")
    return text
