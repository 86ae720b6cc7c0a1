"""An output that is also kept elsewhere, in parts while a job runs, so that it can go on on another machine.

Beside the object of output.upload, say s3://bucket/out.jsonl, lie: parts of its rows while they come;
out.jsonl.manifest.json, as on a disk; and out.jsonl.upload.json, which lists the parts and is replaced at
once (but on HDFS), so that what counts is always whole. At the end the object itself takes the place of the
parts.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from ..errors import ConfigError, shown
from ..utils.files import replace_file, write_atomically
from .inputs import pattern_of
from .manifest import manifest_path
from .output import rows_path
from .schema import InputConfig, Job
from .uris import is_of_one_host, open_store, reason_of, takes
from .writer import OutputError, hold

_log = logging.getLogger(__name__)
_PIECE = 1 << 20  # bytes in memory at once, of what is not a part
_LARGEST_PART = 64 << 20  # bytes
_HAVE_FOLDERS = ("local", "hdfs")  # file systems; object stores have none


def _in_folder(name: str) -> str:
    """A part's name, which is to be deleted in time: of its folder alone."""
    if name in (".", "..") or any(mark in name for mark in "/\\\n"):
        raise ValueError("is no name of a part")
    return name


class Part(BaseModel):
    """An object with rows: its first `size` bytes, whose blake2b is `digest`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: Annotated[str, AfterValidator(_in_folder)]
    size: int = Field(ge=0)
    digest: str


class Ledger(BaseModel):
    """The parts of an output, in order. is_complete: they are the output itself, with nothing to come."""

    model_config = ConfigDict(extra="forbid", strict=True)

    parts: list[Part] = Field(default_factory=list)
    is_complete: bool = False

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)


class Upload:
    """The rows of a job that are elsewhere.

    As a context manager it has a thread that uploads what was written every `output.upload_s` seconds. An
    OSError is tried again the next time; the rows are on the disk. Any other error ends the thread: `check`,
    and the end of the context, raise an OutputError of it.
    """

    def __init__(self, job: Job) -> None:
        """Raises ConfigError if the place cannot be opened, or is the input's."""
        assert job.output.upload is not None
        self._output, self._uri, self._rows = job.output, job.output.upload, rows_path(job)
        self._store, self._path = open_store("output.upload", self._uri)
        self._folder, _, self._name = self._path.rpartition("/")
        self._ledger, self._counts = Ledger(), Ledger()  # what there will be; what there is
        self._run, self._number = secrets.token_hex(4), 0  # no two runs give a part the same name
        self._failure: Exception | None = None  # that it makes no sense to try again after
        self._check_input(job.input)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_up, name="hispec-upload", daemon=True)

    def _check_input(self, config: InputConfig) -> None:
        """Raises ConfigError if what is uploaded would be, or become, a file of the input."""
        rows = self._name + self._rows.name.removeprefix(self._output.path.name)
        names = [self._name, rows, self._manifest_name, self._ledger_name, f"{self._name}.part-0-000000"]
        for source in config.paths:
            if isinstance(source, str):
                store, path = open_store("input.path", source)
                is_there = (
                    store.type_name == self._store.type_name
                    and is_of_one_host(self._uri, source)
                    and any(takes(source, path, self._at(name)) for name in names)
                )
            elif self._store.type_name == "local":
                files = [Path(self._at(name)).resolve() for name in names]
                is_there = source.resolve() in files or any(pattern_of(config, file) for file in files)
            else:
                continue
            if is_there:
                raise ConfigError(
                    f"output.upload: what {self._uri} is made of would be of the input {source}, too; choose"
                    " another place, such as one in another folder"
                )

    def restore(self) -> None:
        """Takes over what is there, before the output on the disk is read. Raises ConfigError if the two are
        not of one job."""
        try:
            try:
                there = self._read_ledger()
            except ValidationError:
                if not self._output.overwrite:
                    raise
                there = None  # nobody needs what it says
            if there is None:
                if not self._output.overwrite and self._exists(self._name):
                    raise ConfigError(
                        f"output.upload: {self._uri} exists, but {self._ledger_name}, by which a job"
                        " knows its own output again, does not; start anew with --new"
                        " (output.overwrite=true), or choose another place"
                    )
                return
            self._counts = there
            if self._output.overwrite:
                return
            if not self._is_replaced(there):
                self._ledger = there.model_copy(deep=True)
                self._match()
        except (OSError, ValidationError) as error:
            way_out = "; start anew with --new (output.overwrite=true)" * isinstance(error, ValidationError)
            raise ConfigError(
                f"output.upload: cannot read {shown(self._uri)}: {reason_of(error)}{way_out}"
            ) from None

    def restart(self) -> None:
        """The rows on the disk are about to be changed, or dropped, and will take the place of those that are
        there; also if this process is killed before. Raises OSError."""
        self._note.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._note, self._counts.model_dump_json().encode(), sync=True)
        self._ledger = Ledger()

    @property
    def _note(self) -> Path:
        """A file beside the rows on the disk with the ledger that they replace."""
        return self._rows.with_name(f".{self._rows.name}.replaces")

    def _is_replaced(self, there: Ledger) -> bool:
        try:
            return self._rows.exists() and self._note.read_bytes() == there.model_dump_json().encode()
        except FileNotFoundError:
            return False

    def __enter__(self) -> Upload:
        if self._output.overwrite and self._counts.parts:
            self._try(self._commit)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._try(self._advance)
        if kind is None:  # else that is what is told
            self.check()

    def check(self) -> None:
        """Raises OutputError if nothing more will be uploaded."""
        if self._failure is not None:
            raise self._failed(self._failure) from self._failure

    def finish(self) -> None:
        """Puts the whole output there, in place of the parts. Raises OutputError."""
        size, path = self._rows.stat().st_size, self._output.path
        if self._ledger == self._counts and self._counts.is_complete and self._counts.size == size:
            return
        name = self._name + self._rows.name.removeprefix(path.name)
        try:
            if any(part.name == name for part in self._counts.parts):
                # Of a job that has got more rows: cut short, the new object would be neither.
                self._ledger = Ledger()
                self._advance()
            digest = self._put(name, self._rows)
            if self._rows != path:
                self._put(self._name, path)
            self._ledger = Ledger(parts=[Part(name=name, size=size, digest=digest)], is_complete=True)
            self._commit()
        except Exception as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> OutputError:
        kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
        return OutputError(
            f"cannot upload to {self._uri} ({kind}{reason_of(error)}); all rows that are done are in"
            f" {self._rows}; {self._output.way_on}"
        )

    def _match(self) -> None:
        """Makes sure that the rows on the disk begin with those that are there. Raises ConfigError if they
        are others, OSError."""
        if self._size_here() < self._ledger.size and self._download():
            return
        if self._ledger.size:
            with self._rows.open("rb") as file:
                if any(_digest(_pieces(file, part.size)) != part.digest for part in self._ledger.parts):
                    raise self._others()

    def _others(self) -> ConfigError:
        return ConfigError(
            f"output.upload: {self._uri} and {self._rows} have different rows: another machine went on with"
            " it; delete that file to go on from there, or start anew with --new (output.overwrite=true)"
        )

    def _size_here(self) -> int:
        """Bytes on the disk, up to what a power failure has left zeros of: no row has such a byte."""
        if not self._rows.exists():
            return 0
        with self._rows.open("rb") as file:
            size = 0
            for piece in _pieces(file, self._rows.stat().st_size):
                if (zero := piece.find(b"\0")) >= 0:
                    return _line_begin(file, size + zero)
                size += len(piece)
        return size

    def _download(self) -> bool:
        """Puts what is there in place of the rows on the disk, of another machine, or of a disk that has lost
        what came last, if it begins with them -> whether it did: another process may have, meanwhile. Raises
        ConfigError if another is about it."""
        draft = self._rows.with_name(f".{self._rows.name}.download")
        held, is_done = hold(draft), False
        try:
            if (size := self._size_here()) >= self._ledger.size:
                return False
            with draft.open("wb") as target:
                for part in self._ledger.parts:
                    with self._reading(part.name) as source:
                        copied = _digest(_copied(_pieces(source, part.size), target))
                    if copied != part.digest:
                        raise OSError(f"{part.name} is not what was uploaded")
            if size:
                with draft.open("rb") as there, self._rows.open("rb") as here:
                    if _digest(_pieces(there, size)) != _digest(_pieces(here, size)):
                        raise self._others()
            with self._reading(self._manifest_name) as source:
                write_atomically(manifest_path(self._output.path), source.read(), sync=True)
            replace_file(draft, self._rows, sync=True)
            is_done = True
            return True
        finally:
            if not is_done:  # else another process may have a draft of its own by now
                with suppress(OSError):
                    draft.unlink()
            held.close()

    def _keep_up(self) -> None:
        while self._failure is None and not self._stop.wait(self._output.upload_s):
            self._try(self._advance)

    def _try(self, what: Callable[[], None]) -> None:
        if self._failure is not None:
            return
        try:
            what()
        except OSError as error:
            _log.warning("uploading to %s failed, and will be tried again: %s", self._uri, reason_of(error))
        except Exception as error:
            self._failure = error

    def _advance(self) -> None:
        """Uploads the whole lines that are not there yet. Raises OSError."""
        with self._rows.open("rb") as file:
            while content := _whole_lines(file, self._ledger.size):
                name = f"{self._name}.part-{self._run}-{self._number:06d}"
                self._number += 1
                self._write(name, content)
                part = Part(name=name, size=len(content), digest=_digest([content]))
                self._ledger = Ledger(parts=[*self._ledger.parts, part])
        if self._ledger != self._counts:
            self._commit()

    def _commit(self) -> None:
        """Makes what was uploaded count, and deletes what no longer does. Raises OSError."""
        with suppress(FileNotFoundError):
            self._write(self._manifest_name, manifest_path(self._output.path).read_bytes())
        self._write(self._ledger_name, self._ledger.model_dump_json().encode())
        before, self._counts = self._counts, self._ledger.model_copy(deep=True)
        with suppress(OSError):
            self._note.unlink(missing_ok=True)
        for name in {part.name for part in before.parts} - {part.name for part in self._counts.parts}:
            with suppress(OSError):  # it costs space, no more
                self._store.delete_file(self._at(name))

    def _read_ledger(self) -> Ledger | None:
        if not self._exists(self._ledger_name):
            return None
        with self._reading(self._ledger_name) as file:
            return Ledger.model_validate_json(file.read())

    @property
    def _ledger_name(self) -> str:
        return f"{self._name}.upload.json"

    @property
    def _manifest_name(self) -> str:
        return manifest_path(Path(self._name)).name

    def _at(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def _exists(self, name: str) -> bool:
        from pyarrow import fs

        return bool(self._store.get_file_info(self._at(name)).type == fs.FileType.File)

    def _reading(self, name: str) -> Any:
        return self._store.open_input_stream(self._at(name), compression=None)

    def _writing(self, name: str) -> Any:
        if self._store.type_name in _HAVE_FOLDERS:
            self._store.create_dir(self._folder, recursive=True)
        return self._store.open_output_stream(self._at(name), compression=None)

    def _write(self, name: str, content: bytes) -> None:
        """At once, where the store does not do so by itself and can."""
        draft = f".{name}.{self._run}" if self._store.type_name == "local" else name
        with self._writing(draft) as target:
            target.write(content)
        if draft != name:
            self._store.move(self._at(draft), self._at(name))

    def _put(self, name: str, file: Path) -> str:
        """Uploads a file -> its digest."""
        with file.open("rb") as source, self._writing(name) as target:
            return _digest(_copied(_pieces(source, file.stat().st_size), target))


def _whole_lines(file: IO[bytes], begin: int) -> bytes:
    """The next lines from there, as many as make a part, or one that is longer."""
    file.seek(begin)
    content = file.read(_LARGEST_PART)
    if b"\n" not in content:
        content += file.readline()
    return content[: content.rfind(b"\n") + 1]


def _line_begin(file: IO[bytes], at: int) -> int:
    """Where the line that the byte there is in begins."""
    while at:
        begin = max(0, at - _PIECE)
        file.seek(begin)
        if (end := file.read(at - begin).rfind(b"\n")) >= 0:
            return begin + end + 1
        at = begin
    return 0


def _pieces(file: Any, size: int) -> Iterator[bytes]:
    """The next `size` bytes; less where the file ends."""
    while size and (piece := file.read(min(size, _PIECE))):
        size -= len(piece)
        yield piece


def _copied(pieces: Iterator[bytes], target: Any) -> Iterator[bytes]:
    for piece in pieces:
        target.write(piece)
        yield piece


def _digest(pieces: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
