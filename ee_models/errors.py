"""What goes wrong with a checkpoint. Both are ValueErrors: the caller named a model that cannot be had."""
from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint that cannot be read: not there, incomplete, damaged, or at odds with its own config."""


class UnsupportedModelError(CheckpointError):
    """A well-formed checkpoint of a model, or with a setting, that HiSpec does not implement."""


def unsupported(field: str, value: object, supported: str) -> UnsupportedModelError:
    """The error for a setting that is not implemented: field, value, and what is supported."""
    return UnsupportedModelError(f"{field} is {value!r}; supported: {supported}")
