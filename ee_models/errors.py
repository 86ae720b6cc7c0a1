"""What goes wrong with a checkpoint or in training. All are ValueErrors, and errors of HiSpec."""

from __future__ import annotations


class HiSpecError(Exception):
    """Base of all errors raised on purpose by HiSpec; here, where the lowest floor that raises one has it."""


class CheckpointError(HiSpecError, ValueError):
    """A checkpoint that cannot be read: not there, incomplete, damaged, or at odds with its own config."""


class UnsupportedModelError(CheckpointError):
    """A well-formed checkpoint of a model, or with a setting, that HiSpec does not implement."""


class TrainingError(HiSpecError, ValueError):
    """Training cannot start, go on or be saved; the message says why and what to do."""


def cut(text: str, most: int) -> str:
    """`text` in one line, or its beginning in at most `most` characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def shown(value: object) -> str:
    """`value` as a message repeats it: its repr, cut, since it may be a whole document."""
    return cut(repr(value), 100)


def reason(error: BaseException) -> str:
    """What another library says, in one line and cut."""
    return cut(str(error), 300)


def unsupported(field: str, value: object, supported: str) -> UnsupportedModelError:
    """The error for a setting that is not implemented: field, value, and what is supported."""
    return UnsupportedModelError(f"{field} is {shown(value)}; supported: {supported}")


def install_command(extra: str) -> str:
    """The command that installs the packages of an extra of setup.py. HiSpec is on no package index: it is
    installed from a checkout (README.md)."""
    return f"pip install '.[{extra}]' in a checkout of HiSpec"
