"""The base of all settings, and what fields are made of."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict

Item = TypeVar("Item")


class Settings(BaseModel):
    """Base of every settings class: frozen, no unknown keys, no silent conversions between types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


Tuple = Annotated[tuple[Item, ...], BeforeValidator(_as_tuple)]  # as YAML and JSON give it: a list
