"""The base class of all settings, and types of fields."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

from ..errors import settings_error

Item = TypeVar("Item")


class Settings(BaseModel):
    """Base of settings, but for ee_models' own (`ee_models.training.settings`): frozen, no unknown keys, no
    silent conversions between types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    if not TYPE_CHECKING:  # type checkers make a signature of the fields

        def __init__(self, **values: Any) -> None:
            """Raises ConfigError with every problem of `values`, as `hispec.errors.build` does."""
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise settings_error(type(self), error, type(self).__name__) from None

        # Or pydantic would call it for nested settings too, and their problems would lose their place.
        __init__.__pydantic_base_init__ = True


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


# As YAML and JSON give them: lists.
Tuple = Annotated[tuple[Item, ...], BeforeValidator(_as_tuple)]
Pair = Annotated[tuple[Item, Item], BeforeValidator(_as_tuple)]
