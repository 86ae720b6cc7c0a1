"""Errors that users see, and the messages of failed validation."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar, get_origin

from pydantic import BaseModel, ValidationError

from ee_models.errors import CheckpointError as CheckpointError
from ee_models.errors import HiSpecError as HiSpecError
from ee_models.errors import TrainingError as TrainingError
from ee_models.errors import UnsupportedModelError as UnsupportedModelError

Model = TypeVar("Model", bound=BaseModel)
MOST_SHOWN = 100  # characters of a value that a message repeats: it may be a whole document
_MOST_PROBLEMS = 20  # problems that one message lists
# pydantic's types of problems, in words; others are put as pydantic does.
_WORDS = {
    "string_type": "must be a string",
    "string_unicode": "must be text without halves of surrogate pairs",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "none_required": "must be null",
    "invalid_key": "keys must be strings",
    "literal_error": "must be {expected}",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "string_too_short": "must not be empty",  # no setting has another least length
    "too_short": "must have at least {min_length}",
}


class ConfigError(HiSpecError, ValueError):
    """A setting is unknown, of the wrong type or out of range."""


class RequestError(HiSpecError, ValueError):
    """A request cannot be served; the engine and all other requests go on."""


class ClosedError(HiSpecError, RuntimeError):
    """An LLM or Engine was to compute something after its close()."""


class ProcessError(HiSpecError, RuntimeError):
    """An LLM or Engine was to compute something in a process that was forked from the one that made it."""


class BusyError(HiSpecError, RuntimeError):
    """There are as many unfinished requests as there may be; later there will be room again."""


class EngineDeadError(HiSpecError, RuntimeError):
    """The engine failed, with this error's cause, and serves nobody any more."""


class WorkerError(HiSpecError, RuntimeError):
    """A process of an LLM with several workers could not start, or ended and could not be replaced."""


def closed(call: str) -> ClosedError:
    """call: the class and the method."""
    name = call.partition(".")[0]
    return ClosedError(f"{call}(): this {name} was closed and its KV memory released; make a new {name}")


def check_process(call: str, pid: int) -> None:
    """Raises ProcessError in another process than `pid`, which made what is called: a fork has none of its
    threads, and would wait for them without end. call: as of closed."""
    if (own := os.getpid()) != pid:
        name = call.partition(".")[0]
        raise ProcessError(
            f"{call}(): this {name} was made in process {pid}, whose threads process {own}, a fork of it,"
            f" does not have; make a new {name} here, or have processes started by spawn"
        )


def nearest(name: str, known: Iterable[str], likeness: float = 0.5) -> str:
    """` (did you mean 'x'?)` for the known name closest to `name`, or an empty string. likeness: that it must
    have at least, of 1."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=likeness)
    return f" (did you mean {close[0]!r}?)" if close else ""


def cut(text: str, most: int = MOST_SHOWN) -> str:
    """`text`, or its beginning in at most `most` characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def shown(value: Any) -> str:
    """`value` as a message repeats it: its repr, in one line and cut."""
    try:
        return cut(repr(value).replace("\n", " "))
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deeply to be shown"


def described(value: Any) -> str:
    """As `shown`, with its type before it."""
    return f"{type(value).__name__} {shown(value)}"


def build(model: type[Model], values: Any, where: str = "") -> Model:
    """`model(**values)`. Raises one ConfigError that names every problem of `values`.

    `where` is the dotted path of `values` in the user's file, put before each field's name.
    """
    if isinstance(values, model):
        return values
    if not isinstance(values, dict):
        raise ConfigError(
            f"{where or model.__name__}: expected a mapping of settings, got {described(values)}"
        )
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise settings_error(model, error, where) from None


def settings_error(model: type[BaseModel], error: ValidationError, where: str) -> ConfigError:
    """What pydantic found wrong with values of `model`, in our words."""
    lines = list(islice(_lines(model, error, where), _MOST_PROBLEMS))
    if more := error.error_count() - len(lines):
        lines.append(f"... and {more} more problems")
    return ConfigError("\n".join(lines))


def _lines(model: type[BaseModel], error: ValidationError, where: str) -> Iterator[str]:
    for problem in error.errors(include_url=False):
        parts = [where] if where else []
        is_key = problem["loc"][-1:] == ("[key]",)  # which pydantic puts after the key itself
        path = ".".join(parts + [cut(str(part)) for part in problem["loc"][: -2 if is_key else None]])
        kind, limits = problem["type"], problem.get("ctx", {})
        if kind == "extra_forbidden":
            known, name = _fields_at(model, problem["loc"][:-1]), str(problem["loc"][-1])
            elsewhere = " or ".join(repr(".".join([*parts, *place])) for place in _places(model, name))
            hint = nearest(name, known, 0.8)  # a slip of the pen; else a setting in the wrong place
            hint = hint or (f" (did you mean {elsewhere}?)" if elsewhere else nearest(name, known))
            yield f"{path}: unknown setting{hint}; known here: {', '.join(known)}"
        elif kind == "missing":
            yield f"{path}: required, but not given"
        elif kind == "value_error":
            yield f"{path + ': ' if path else ''}{problem['msg'].removeprefix('Value error, ')}"
        else:
            words = _WORDS[kind].format(**_numbers(limits)) if kind in _WORDS else _lower(problem["msg"])
            yield f"{path}: {'each key ' if is_key else ''}{words}, got {shown(problem['input'])}"


def _numbers(limits: dict[str, Any]) -> dict[str, Any]:
    """`limits` with 1 for 1.0."""
    return {name: f"{limit:g}" if isinstance(limit, float) else limit for name, limit in limits.items()}


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


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


def _places(model: type[BaseModel], name: str, most: int = 3) -> list[list[str]]:
    """Where inside of `model` fields of this name are, those that lie higher first."""
    found: list[list[str]] = []
    waiting: list[tuple[list[str], type[BaseModel]]] = [([], model)]
    while waiting and len(found) < most:
        place, inner = waiting.pop(0)
        found += [[*place, name]] if name in inner.model_fields else []
        for field_name, field in inner.model_fields.items():
            nested = _nested_model(field.annotation, within=(dict, list, tuple, Mapping, Sequence))
            waiting += [] if nested is None else [([*place, field_name], nested)]
    return found[:most]


def _nested_model(annotation: Any, within: tuple[Any, ...] = ()) -> type[BaseModel] | None:
    """The pydantic model in an annotation such as `Model`, `Model | None` or `list[Model]`, but for kinds of
    collections that are not looked into: `within`."""
    if get_origin(annotation) in within:
        return None
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _nested_model(argument, within)
        if found is not None:
            return found
    return None
