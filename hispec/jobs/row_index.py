"""Which rows of the input an output has already: on disk, since there may be more than memory holds."""

from __future__ import annotations

import hashlib
import sqlite3
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from ..errors import ConfigError
from .rows import Identity

_CHUNK = 10_000  # rows that are handed to the database at once
_CACHE_KIB = 64 << 10
_TABLES = """
PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA temp_store = FILE; PRAGMA cache_size = -{cache};
CREATE TABLE done (number INTEGER, key BLOB, content BLOB, failed INTEGER);
CREATE TABLE row (number INTEGER PRIMARY KEY, key BLOB, content BLOB);
"""


@dataclass(frozen=True)
class Repeated:
    """An id that the input has more than once. first, second: the numbers of two rows that have it; count:
    rows too many, of all ids."""

    first: int
    second: int
    count: int


class RowIndex:
    """Rows by their key: the id, or for rows without one their content. The k-th row of a key is done if the
    output has k of them, those in their old places first, so rows may come in another order than before, and
    more or fewer of them. A context
    manager; what it writes is a temporary file. Where there is no room for that it raises ConfigError."""

    def __init__(self) -> None:
        try:
            self._folder = tempfile.TemporaryDirectory(prefix="hispec-rows-")
            self._database = sqlite3.connect(Path(self._folder.name) / "rows.sqlite", isolation_level=None)
            self._database.executescript(_TABLES.format(cache=_CACHE_KIB))
            self._database.execute("BEGIN")
        except (OSError, sqlite3.Error) as error:
            raise _no_room(error) from error
        self._done: list[tuple[int, bytes, bytes, bool]] = []
        self._rows: list[tuple[int, bytes, bytes]] = []
        self.has_done = self._has_ids = False
        self._num_done = 0

    def __enter__(self) -> RowIndex:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._database.close()
        self._folder.cleanup()
        if isinstance(error, sqlite3.Error):
            raise _no_room(error) from error

    def add_done(self, number: int, identity: Identity, failed: bool = False) -> None:
        """Takes a row of the output, with its number in the input of then, and whether it has an error."""
        self.has_done = True
        self._num_done += 1
        self._done.append((number, _key(identity), bytes.fromhex(identity.content_hash), failed))
        if len(self._done) == _CHUNK:
            self._flush()

    def add_row(self, number: int, identity: Identity) -> None:
        """Takes row `number` of the input."""
        self._has_ids |= identity.id is not None
        if self.has_done or identity.id is not None:  # else nothing will be asked of it
            content = bytes.fromhex(identity.content_hash)
            self._rows.append((number, _key(identity), content))
            if len(self._rows) == _CHUNK:
                self._flush()

    def _flush(self) -> None:
        self._database.executemany("INSERT INTO done VALUES (?, ?, ?, ?)", self._done)
        self._database.executemany("INSERT INTO row VALUES (?, ?, ?)", self._rows)
        self._done, self._rows = [], []

    def find_repeated_id(self) -> Repeated | None:
        """The first id of the input that another row has too."""
        self._flush()
        if not self._has_ids:
            return None
        found = self._database.execute(
            "SELECT key, min(number), count(*) FROM row WHERE substr(key, 1, 1) = x'01'"
            " GROUP BY key HAVING count(*) > 1 ORDER BY min(number)"
        ).fetchall()
        if not found:
            return None
        (first,), (second,) = self._database.execute(
            "SELECT number FROM row WHERE key = ? ORDER BY number LIMIT 2", found[0][:1]
        ).fetchall()
        return Repeated(first, second, sum(count - 1 for _, _, count in found))

    def done_rows(self) -> Iterator[tuple[int, bool, bool]]:
        """(number, whether the output has it with the same content, and with an error) of the rows of the
        input that are done, in no order."""
        self._flush()
        if not self.has_done:
            return
        # First those in their old places: of equal rows without ids these are done and no others, since a
        # row's seed follows from its number.
        same = "row.number = done.number AND row.key = done.key"
        num_found = 0
        for found in self._database.execute(
            "SELECT row.number, max(row.content = done.content), max(done.failed)"
            f" FROM done JOIN row ON {same} GROUP BY 1"
        ):
            num_found += 1
            yield found
        if num_found == self._num_done:
            return
        self._database.execute("CREATE INDEX done_number ON done (number)")
        nth = "SELECT *, row_number() OVER (PARTITION BY key ORDER BY {}) AS nth FROM {} WHERE NOT EXISTS"
        rows = f"{nth.format('number', 'row')} (SELECT 1 FROM done WHERE {same})"
        done = f"{nth.format('rowid', 'done')} (SELECT 1 FROM row WHERE {same})"
        yield from self._database.execute(
            "SELECT row.number, row.content = done.content, done.failed"
            f" FROM ({rows}) AS row JOIN ({done}) AS done USING (key, nth)"
        )


def _no_room(error: Exception) -> ConfigError:
    folder = tempfile.tempdir or "of this machine"
    return ConfigError(
        f"cannot keep an index of rows in the temporary folder {folder}: {error}; free some space there, or"
        " set TMPDIR to a folder with more"
    )


def _key(identity: Identity) -> bytes:
    if identity.id is None:
        return b"\0" + bytes.fromhex(identity.content_hash)
    text = f"{identity.id}".encode("utf-8", "surrogatepass")
    kind = b"\1s" if isinstance(identity.id, str) else b"\1i"
    return kind + (text if len(text) <= 32 else hashlib.blake2b(text, digest_size=33).digest())
