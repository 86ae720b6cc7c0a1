"""The setting `workers`: how many processes serve an LLM's requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from ..errors import shown

MOST_WORKERS = 1024


def check_workers(value: Any) -> Any:
    """Raises ValueError unless it is a number of workers, or "auto"."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if value != "auto" and not (is_number and 1 <= value <= MOST_WORKERS):
        raise ValueError(f"must be auto, or an integer from 1 to {MOST_WORKERS}, got {shown(value)}")
    return value


Workers = Annotated[int | Literal["auto"], BeforeValidator(check_workers)]
