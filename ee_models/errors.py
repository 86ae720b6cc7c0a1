"""What goes wrong with a checkpoint or in training. All are ValueErrors."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint that cannot be read: not there, incomplete, damaged, or at odds with its own config."""


class UnsupportedModelError(CheckpointError):
    """A well-formed checkpoint of a model, or with a setting, that HiSpec does not implement."""


class TrainingError(ValueError):
    """Training cannot start, go on or be saved; the message says why and what to do."""


def unsupported(field: str, value: object, supported: str) -> UnsupportedModelError:
    """The error for a setting that is not implemented: field, value, and what is supported."""
    return UnsupportedModelError(f"{field} is {value!r}; supported: {supported}")


def install_command(extra: str) -> str:
    """The command that installs the packages of an extra of setup.py. HiSpec is on no package index: it is
    installed from a checkout (README.md)."""
    return f"pip install '.[{extra}]' in a checkout of HiSpec"
