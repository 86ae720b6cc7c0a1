"""Errors that users see, and the messages of failed validation."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

Model = TypeVar("Model", bound=BaseModel)


class HiSpecError(Exception):
    """Base of all errors raised on purpose by this package."""


class ConfigError(HiSpecError, ValueError):
    """A setting is unknown, of the wrong type or out of range."""


class RequestError(HiSpecError, ValueError):
    """A request cannot be served; the engine and all other requests go on."""


def shown(value: object, most: int = 100) -> str:
    """The repr of a value that a message quotes, cut where it is long."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}…"


class ClosedError(HiSpecError, RuntimeError):
    """An LLM or Engine was to compute something after its close()."""


def closed(call: str) -> ClosedError:
    """call: the class and the method."""
    name = call.partition(".")[0]
    return ClosedError(f"{call}(): this {name} was closed and its KV memory released; make a new {name}")


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the known name closest to `name`, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def build(model: type[Model], values: Any, where: str = "") -> Model:
    """`model(**values)`. Raises one ConfigError that names every problem of `values`.

    `where` is the dotted path of `values` in the user's file, put before each field's name.
    """
    if isinstance(values, model):
        return values
    if not isinstance(values, dict):
        raise ConfigError(
            f"{where or model.__name__}: expected a mapping of settings, got {type(values).__name__}"
            f" {shown(values)}"
        )
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise settings_error(model, error, where) from None


def settings_error(model: type[BaseModel], error: ValidationError, where: str) -> ConfigError:
    """What pydantic found wrong with values of `model`, in our words."""
    return ConfigError("\n".join(_lines(model, error, where)))


def _lines(model: type[BaseModel], error: ValidationError, where: str) -> Iterator[str]:
    for problem in error.errors():
        path = ".".join(str(part) for part in ([where] if where else []) + list(problem["loc"]))
        if problem["type"] == "extra_forbidden":
            known = _fields_at(model, problem["loc"][:-1])
            yield (
                f"{path}: unknown setting{nearest(str(problem['loc'][-1]), known)}; known here:"
                f" {', '.join(known)}"
            )
        elif problem["type"] == "missing":
            yield f"{path}: required, but not given"
        elif problem["type"] == "value_error":
            yield f"{path + ': ' if path else ''}{problem['msg'].removeprefix('Value error, ')}"
        else:
            yield f"{path}: {problem['msg'][:1].lower()}{problem['msg'][1:]}, got {shown(problem['input'])}"


def _fields_at(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Names of the fields of the (nested) model at `location`."""
    for part in location:
        field = model.model_fields.get(str(part))
        if field is None:
            break
        nested = _nested_model(field.annotation)
        if nested is None:
            break
        model = nested
    return list(model.model_fields)


def _nested_model(annotation: Any) -> type[BaseModel] | None:
    """The pydantic model in an annotation such as `Model` or `Model | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _nested_model(argument)
        if found is not None:
            return found
    return None
