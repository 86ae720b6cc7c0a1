"""The base class of all settings, and types of fields."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError

Item = TypeVar("Item")


class Settings(BaseModel):
    """Base of every settings class: frozen, no unknown keys, no silent conversions between types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def one_of(names: Collection[str]) -> BeforeValidator:
    """A string that is one of `names`, which may grow later: a Literal of what is registered."""

    def check(value: Any) -> Any:
        if value not in names:
            *others, last = map(repr, names)
            expected = f"{', '.join(others)} or {last}"
            raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})
        return value

    return BeforeValidator(check)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


Tuple = Annotated[tuple[Item, ...], BeforeValidator(_as_tuple)]  # as YAML and JSON give it: a list
