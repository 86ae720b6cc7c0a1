"""Reads a YAML file and `--set key.path=value` overrides into validated settings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import yaml
from pydantic import BaseModel

from ..config import TRAITS, SpeculativeConfig
from ..errors import ConfigError, Model, build, cut, shown
from ..utils.files import expanded
from .schema import COMPRESSED, STANDARD, Job, RunConfig
from .uris import is_uri

_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+(_[0-9]+)*")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_DRAFT = ("speculative", "draft")
_PLAN_PATHS = (
    (*_DRAFT, "path"),
    (*_DRAFT, "ngram", "guess_path"),
    ("speculative", "check", "path"),
    ("speculative", "goodput", "latency"),
)
_NULL = re.compile(r"~|null|Null|NULL|")
# What only files for one command have at the top, and that command.
_COMMANDS = {"input": "run", "data": "train", "systems": "simulate"}
_ROWS = (".jsonl", ".csv", ".parquet", *COMPRESSED)
_MOST_VALUES = 10_000  # that the aliases of a file may stand for: far above any job's, and read at once


def _refuse(problem: str, at: Any) -> NoReturn:
    """Raises `problem` of the node or event `at`."""
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars, no repeated keys, no tags, and no aliases that stand for very much or for
    themselves.

    PyYAML's YAML 1.1 reads `1e-3` as a string, `017` as 15 and `12:30` as 750, and lets the last of two equal
    keys win.
    """

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - as declared by PyYAML

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._num_values = self._num_aliased = 0  # so far, with aliases written out; those of aliases
        self._sizes: dict[str, int] = {}  # number of values of each anchor that is complete

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Counts what aliases stand for before anything is made of them."""
        event: Any = self.peek_event()
        before, tag = self._num_values, getattr(event, "tag", None)
        if tag is not None and tag != "!":  # "!" is a quoted scalar's
            name = cut(str(tag).replace("tag:yaml.org,2002:", "!!"))
            _refuse(f"tags such as {name} are not read; write the plain value", event)
        node = super().compose_node(parent, index)
        if not isinstance(event, yaml.AliasEvent):
            self._num_values += 1
            if event.anchor is not None:
                self._sizes[event.anchor] = self._num_values - before
            return node
        name = f"*{cut(str(event.anchor))}"
        if event.anchor not in self._sizes:
            _refuse(f"{name} stands inside of what it names; write the value out", event)
        self._num_values += self._sizes[event.anchor]
        self._num_aliased += self._sizes[event.anchor]
        if self._num_aliased > _MOST_VALUES:
            _refuse(
                f"{name}: the aliases up to here stand for more than {_MOST_VALUES:,} values; use fewer",
                event,
            )
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Keys are kept as they are written, so that a key such as `on` or `1` is reported under that
        name."""
        seen: dict[str, yaml.Mark] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                _refuse("a key must be a plain name", key)
            if key.value in seen:
                _refuse(
                    f"key {shown(key.value)} is given twice, first in line {seen[key.value].line + 1}", key
                )
            seen[key.value] = key.start_mark
        self.flatten_mapping(node)
        return {key.value: self.construct_object(value, deep=deep) for key, value in node.value}

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        return int(node.value)


for _tag, _pattern, _first in (
    ("bool", _BOOL, "tTfF"),
    ("int", _INT, "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
    ("null", _NULL, ["~", "n", "N", ""]),
    ("merge", re.compile("<<"), "<"),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern.pattern})$"), list(_first)
    )
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_integer)


def load_job(path: str | Path, overrides: Sequence[str] = (), preset: str | Path | None = None) -> Job:
    """The job in the file at `path`, with the sections of a preset and then `key.path=value` overrides put
    over it.

    Raises ConfigError with every problem of the file and the overrides, and when the file can't be read.
    """
    sections = {} if preset is None else load_preset(preset).model_dump(exclude_unset=True)
    return load_settings(Job, Path(path), overrides, [("input", "path"), *_PLAN_PATHS], sections)


def load_preset(path: str | Path) -> RunConfig:
    """The preset in the file at `path`: a job without input and output, whose `make_llm()` gives an LLM of
    its model, engine, plan and scheduling, and whose `sampling` are SamplingParams. Raises ConfigError."""
    return load_settings(RunConfig, Path(path), (), _PLAN_PATHS)


def best_plans(path: Path) -> dict[str, SpeculativeConfig]:
    """{name: the best plan of each drafter, two-tier and three-tier} in a file of `hispec profile --json`.
    Raises ConfigError."""
    try:
        plans = json.loads(path.read_bytes())["best_of_kind"]
        return {
            name: build(SpeculativeConfig, plan["speculative"], f"{path}: best_of_kind.{name}.speculative")
            for name, plan in plans.items()
        }
    except OSError as error:
        raise ConfigError(f"--profile: cannot read {path}: {error.strerror}") from None
    except ConfigError as error:
        raise ConfigError(
            f"{error}; if another version of HiSpec wrote the file, make it anew with `hispec profile --json`"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--profile: {path} is not what `hispec profile --json` writes ({type(error).__name__}: {error});"
            " make it anew"
        ) from None


def load_settings(
    model: type[Model],
    path: Path,
    overrides: Sequence[str],
    files: Sequence[tuple[str, ...]],
    sections: Mapping[str, Any] = MappingProxyType({}),
) -> Model:
    """The settings in the file at `path`, as a `model`. Raises ConfigError with all that is wrong.

    files     where the settings name files that lie beside this one, with "*" for every item of a list
    sections  replace those of the file
    """
    values = read_yaml(path, model)
    for place in files:
        # Before overrides: those are typed in the working directory, and stay relative to it.
        _make_beside(path, values, place)
    values.update(sections)
    apply_overrides(values, overrides)
    try:
        return build(model, values)
    except ConfigError as error:
        if model is RunConfig and {"input", "output"} & values.keys():
            raise ConfigError(
                f"{path}: has input or output, so it is a job (hispec run {path}), where a preset is needed:"
                " a file without them"
            ) from None
        if (command := _other_command(model, values)) is not None:
            raise ConfigError(
                f"{path}: these are settings for another command: hispec {command} {path}"
            ) from None
        lines = [line + _culprits(line, overrides) for line in str(error).split("\n")]
        if {"input", "output"} <= model.model_fields.keys() - values.keys():
            lines.append(f"a file without both is a preset, put over a job's by --preset {path}")
        raise ConfigError("\n".join([f"{path}:", *lines])) from None


def _other_command(model: type[BaseModel], values: Mapping[str, Any]) -> str | None:
    """The command that these settings are for, which are not those of a `model`; None if they may be."""
    unknown = values.keys() - model.model_fields.keys()
    commands = [command for key, command in _COMMANDS.items() if key in unknown]
    return commands[0] if commands and len(unknown) > 1 else None


def _culprits(problem: str, overrides: Sequence[str]) -> str:
    """The `overrides` that have to do with a line of an error, which begins with a setting's name, to be put
    behind it."""
    field = problem.partition(": ")[0]
    given = {override.partition("=")[0].strip(): override for override in overrides}  # the last of a key wins
    found = [
        f"--set {cut(override)}"
        for key, override in given.items()
        if f"{field}.".startswith(f"{key}.") or key.startswith(f"{field}.") or f"{key}=" in problem
    ]
    return f" ({', '.join(found)})" if found else ""


def _make_beside(path: Path, values: Any, place: Sequence[str]) -> None:
    """Makes the file name at `place` of nested `values` relative to the folder of `path`; what is not there,
    or of a wrong type, is left for the schema to report."""
    first, *rest = place
    if first == "*":
        for item in values if isinstance(values, list) else ():
            _make_beside(path, item, rest)
    elif isinstance(values, dict) and first in values:
        if rest:
            _make_beside(path, values[first], rest)
        elif isinstance(names := values[first], list):
            values[first] = [str(_beside(path, name)) if _names_a_file(name) else name for name in names]
        elif _names_a_file(values[first]):
            beside = _beside(path, values[first])
            # A draft model may be a folder beside this file, or a name as `model` takes it.
            is_draft_model = any(
                traits.has_model and values.get("kind") == kind for kind, traits in TRAITS.items()
            )
            if not is_draft_model or beside.exists():
                values[first] = str(beside)


def _beside(path: Path, name: str) -> Path:
    own = expanded(name)
    return own if str(own).startswith("~") else path.parent / own  # of nobody: the schema refuses it


def _names_a_file(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip()) and value != str(STANDARD) and not is_uri(value)


def apply_overrides(values: dict[str, Any], overrides: Iterable[str]) -> None:
    """Puts `key.path=value` strings into nested `values`, in order; a value is read as YAML, of a file also
    as it stands: `-`, `*.jsonl`. Raises ConfigError."""
    for override in overrides:
        key, equals, text = override.partition("=")
        parts, where = key.strip().split("."), f"--set {shown(override)}"
        if not equals or not all(parts):
            raise ConfigError(f"{where}: expected key.path=value, such as sampling.max_tokens=64")
        place = values
        for depth, part in enumerate(parts[:-1], start=1):
            inner = place.get(part)
            if inner is None:
                inner = place[part] = {}
            if not isinstance(inner, dict):
                raise ConfigError(
                    f"{where}: {'.'.join(parts[:depth])} is {shown(inner)}, which has no settings inside"
                )
            place = inner
        names_a_file = (
            parts[-1] in ("path", "guess_path", "init_path", "upload", "work") or tuple(parts) in _PLAN_PATHS
        )
        place[parts[-1]] = _parse_name(text, where) if names_a_file else _parse(text, where)


def read_yaml(path: Path, model: type[BaseModel]) -> dict[str, Any]:
    """The mapping in the file at `path`, of settings that are not checked yet. Raises ConfigError."""
    if path.suffix.lower() in _ROWS:
        raise ConfigError(
            f"{path}: a file of rows, not of settings; a job names it, such as `hispec run"
            f" configs/quickstart.yaml --set input.path={path}`"
        )
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 (byte {error.start}); save the file as UTF-8") from None
    values = _parse(text, str(path))
    if not isinstance(values, dict):
        given = "nothing" if values is None else f"a {type(values).__name__}"
        raise ConfigError(
            f"{path}: expected a mapping with {', '.join(model.model_fields)} at the top, got {given}"
        )
    return values


def _parse_name(text: str, where: str) -> Any:
    """The name of a file: the text as it stands, unless it is quoted, a list, or null."""
    text = text.strip()
    is_yaml = text[:1] in ("'", '"') or (text.startswith("[") and text.endswith("]")) or _NULL.fullmatch(text)
    return _parse(text, where) if is_yaml else text


def _parse(text: str, where: str) -> Any:
    try:
        return _written_out(yaml.load(text, _Loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = ", ".join(str(part) for part in (error.context, error.problem) if part)
        line = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{where}{line}: {cut(problem, 200)}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not readable as YAML: {cut(str(error), 200)}") from None


def _written_out(value: Any) -> Any:
    """`value` with a copy for each alias, so that changing one place changes no other."""
    if isinstance(value, dict):
        return {key: _written_out(item) for key, item in value.items()}
    return [_written_out(item) for item in value] if isinstance(value, list) else value
