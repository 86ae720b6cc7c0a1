"""Pictures by matplotlib, which is optional."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from ee_models.errors import install_command

from ..errors import ConfigError
from .files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def has_matplotlib() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def check_matplotlib(flag: str) -> None:
    """Raises ConfigError, with what to install, if the pictures of option `flag` cannot be drawn here."""
    if not has_matplotlib():
        raise ConfigError(
            f"{flag} needs matplotlib, which is not installed: {install_command('plots')}, or leave {flag}"
            " out"
        )


def make_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches; without pyplot, so that no window opens and no setting of the user's
    changes."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height))


def save_figure(figure: Figure, path: Path, dpi: int = 150) -> None:
    """Writes a PNG file, whole or not at all. Raises OSError."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, bbox_inches="tight")
    write_atomically(path, buffer.getvalue())
