"""Which rows of the input an output has already: on disk, since there may be more than memory holds."""

from __future__ import annotations

import hashlib
import sqlite3
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from .rows import Identity

_CHUNK = 10_000  # rows that are handed to the database at once
_CACHE_KIB = 64 << 10
_TABLES = """
PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA temp_store = FILE; PRAGMA cache_size = -{cache};
CREATE TABLE done (key BLOB, content BLOB);
CREATE TABLE row (number INTEGER PRIMARY KEY, key BLOB, content BLOB, line INTEGER);
"""


@dataclass(frozen=True)
class Clash:
    """Two rows that one key has, or a done row and one of the input whose contents differ."""

    number: int
    line: int
    other_line: int | None
    count: int


class RowIndex:
    """Rows by their key: the id, or for rows without one their content. The k-th row of a key is done if the
    output has k of them, so rows may come in another order than before, and more or fewer of them. A context
    manager; what it writes is a temporary file."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="hispec-rows-")
        self._database = sqlite3.connect(Path(self._folder.name) / "rows.sqlite", isolation_level=None)
        self._database.executescript(_TABLES.format(cache=_CACHE_KIB))
        self._database.execute("BEGIN")
        self._done: list[tuple[bytes, bytes]] = []
        self._rows: list[tuple[int, bytes, bytes, int]] = []
        self.has_done = False

    def __enter__(self) -> RowIndex:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._database.close()
        self._folder.cleanup()

    def add_done(self, identity: Identity) -> None:
        """Takes a row of the output."""
        self.has_done = True
        self._done.append((_key(identity), bytes.fromhex(identity.content_hash)))
        if len(self._done) == _CHUNK:
            self._flush()

    def add_row(self, number: int, line: int, identity: Identity) -> None:
        """Takes row `number` of the input."""
        if self.has_done or identity.id is not None:  # else nothing will be asked of it
            content = bytes.fromhex(identity.content_hash)
            self._rows.append((number, _key(identity), content, line))
            if len(self._rows) == _CHUNK:
                self._flush()

    def _flush(self) -> None:
        self._database.executemany("INSERT INTO done VALUES (?, ?)", self._done)
        self._database.executemany("INSERT INTO row VALUES (?, ?, ?, ?)", self._rows)
        self._done, self._rows = [], []

    def find_repeated_id(self) -> Clash | None:
        """The first id that the input has twice. count: rows too many, of all ids."""
        self._flush()
        first_byte = "substr(key, 1, 1) = x'01'"
        repeated = self._database.execute(
            f"SELECT key, min(number), count(*) FROM row WHERE {first_byte} GROUP BY key HAVING count(*) > 1"
        ).fetchall()
        if not repeated:
            return None
        key, _, _ = min(repeated, key=lambda found: found[1])
        (_, first), (number, second) = self._database.execute(
            "SELECT number, line FROM row WHERE key = ? ORDER BY number LIMIT 2", (key,)
        ).fetchall()
        return Clash(number, second, first, sum(count - 1 for _, _, count in repeated))

    def find_changed(self) -> Clash | None:
        """The first row of the input whose id is done with another content. count: all of them."""
        self._flush()
        changed = self._database.execute(
            "SELECT min(row.number), count(*) FROM row JOIN done USING (key)"
            " WHERE row.content != done.content"
        ).fetchone()
        if not changed or changed[0] is None:
            return None
        (line,) = self._database.execute("SELECT line FROM row WHERE number = ?", changed[:1]).fetchone()
        return Clash(changed[0], line, None, changed[1])

    def done_rows(self) -> Iterator[int]:
        """The numbers of the rows of the input that are done."""
        self._flush()
        numbered = "key, row_number() OVER (PARTITION BY key ORDER BY {}) AS nth"
        for (number,) in self._database.execute(
            f"SELECT number FROM (SELECT number, {numbered.format('number')} FROM row)"
            f" JOIN (SELECT {numbered.format('rowid')} FROM done) USING (key, nth)"
        ):
            yield number


def _key(identity: Identity) -> bytes:
    if identity.id is None:
        return b"\0" + bytes.fromhex(identity.content_hash)
    text = f"{type(identity.id).__name__} {identity.id}".encode("utf-8", "surrogatepass")
    return b"\1" + hashlib.blake2b(text, digest_size=16).digest()
