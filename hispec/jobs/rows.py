"""Input rows: read lazily, checked one by one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, cast

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from ..config import Settings
from ..errors import ConfigError, build, cut, nearest, shown
from ..prompts import Role, given_fields, join_parts
from ..sampling_params import SamplingParams, put_over, seed_of
from ..utils.files import parse_json
from .inputs import Extent, Record, find_files, read_records, take_columns
from .openai_batch import is_request, read_openai_line
from .schema import InputConfig, RunConfig, format_of

_PROMPTS = ("prompt", "prompt_token_ids", "messages")
_CONTENT = (*_PROMPTS, "sampling")
_MAX_MESSAGE_LEN = 1000  # characters: a message quotes what was given, and that may be a whole document
Prompt = str | list[int] | list[dict[str, Any]]


class Message(Settings):
    """One turn of a conversation, with what else a chat template may read of it. An assistant's may have
    `tool_calls` alone."""

    model_config = ConfigDict(extra="allow")

    role: Role
    content: Annotated[str | None, BeforeValidator(join_parts)]

    @model_validator(mode="before")
    @classmethod
    def _given(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        given = given_fields(values)
        return {"content": None, **given} if "tool_calls" in given else given


def _check_id(value: Any) -> Any:
    if value is not None and type(value) not in (str, int):
        raise ValueError(f"must be a string or an integer, got {shown(value)}")
    return value


class InputLine(Settings):
    """The fields of a line: exactly one of `prompt`, `prompt_token_ids` and `messages`, and optional ones.

    id        repeated in the output row
    sampling  fields put over the job's `sampling`
    metadata  any JSON; repeated in the output row
    """

    id: Annotated[str | int | None, BeforeValidator(_check_id)] = None
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    sampling: dict[str, Any] = Field(default_factory=dict)
    metadata: Any = None

    @model_validator(mode="after")
    def _one_prompt(self) -> InputLine:
        if len(self.prompt_fields) != 1:
            raise ValueError(
                "a row needs exactly one of prompt, prompt_token_ids and messages, got"
                f" {' and '.join(self.prompt_fields) or 'none'}"
            )
        return self

    @property
    def prompt_fields(self) -> list[str]:
        """Names of the given ones: exactly one in a valid line."""
        return [name for name in _PROMPTS if getattr(self, name) is not None]


@dataclass(frozen=True)
class Row:
    """A valid row. `index` counts rows from 0; `line` counts lines of its file from 1, blank ones too;
    `where` names the file too, where the input has several."""

    index: int
    line: int
    where: str
    content_hash: str
    input: InputLine
    sampling: SamplingParams

    @property
    def id(self) -> str | int | None:
        return self.input.id

    @property
    def request_id(self) -> str:
        return f"row-{self.index}"

    @property
    def is_chat(self) -> bool:
        return self.input.messages is not None

    @property
    def prompt(self) -> Prompt:
        """The engine's input: text, token ids or messages."""
        if self.input.messages is not None:
            return [message.model_dump() for message in self.input.messages]
        return getattr(self.input, self.input.prompt_fields[0])


@dataclass(frozen=True)
class BadRow:
    """An invalid line, and why it is."""

    index: int
    line: int
    where: str
    content_hash: str
    problem: str
    id: str | int | None = None

    @property
    def message(self) -> str:
        """Where it is, and its problem."""
        return cut(f"{self.where}: {self.problem}", _MAX_MESSAGE_LEN)

    @property
    def is_chat(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Identity:
    """What tells a row from others: its id, if it has one, and a hash of its prompt and its own sampling."""

    id: str | int | None
    content_hash: str


def count_rows(config: InputConfig) -> int:
    """Rows that a run will read. Raises ConfigError if a file can't be read or there are none."""
    num_rows = sum(1 for _ in read_records(config))
    check_not_empty(config, num_rows)
    return num_rows


def check_not_empty(config: InputConfig, num_rows: int) -> None:
    """Raises ConfigError if there are no rows."""
    if not num_rows:
        example = 'lines of JSON, such as {"prompt": "Hello"}, or a table with a row for each prompt'
        raise ConfigError(f"input.path: {config} has no rows; it needs {example}")


def read_rows(
    job: RunConfig, config: InputConfig, done: Sequence[int] | None = None, extent: Extent | None = None
) -> Iterator[Row | BadRow]:
    """The rows in order, invalid ones as BadRow; lazily, one line at a time. done: by index, whether a row is
    to be passed over; extent: as in `read_records`, so that no other row has come to a place of `done`."""
    config = find_format(config)
    for index, record in enumerate(read_records(config, extent)):
        if done is None or not done[index]:
            yield parse_row(job, config, index, record)


def find_format(config: InputConfig) -> InputConfig:
    """With the format of its lines in place of `auto`, if all files are of lines: the first line that is a
    JSON object decides for all, so that a request without a body is a bad request, and no row of another
    kind. Raises ConfigError."""
    if config.format != "auto" or config.columns is not None:
        return config
    if any(format_of(path) != "jsonl" for path in find_files(config)):
        return config
    for record in read_records(config):
        with suppress(ConfigError):
            found = "openai" if is_request(_decode(cast("bytes", record.content))) else "jsonl"
            return config.model_copy(update={"format": found})
    return config


def identify(config: InputConfig, record: Record) -> Identity:
    """The identity of a row, valid or not. Fast: a job that is resumed asks for it of all its rows."""
    values: Any = record.content
    if isinstance(values, ConfigError):
        return Identity(None, _digest(f" {record.line}: {values}".encode()))
    if isinstance(values, bytes):
        raw = values
        try:
            values = _DECODER.decode(raw.decode())
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            return Identity(None, _digest(raw))
    if config.columns is not None:
        values = {field: values.get(column) for field, column in config.columns.items()}
    if config.format == "openai":
        row_id, content = values.get("custom_id"), [values.get("url"), values.get("body")]
    else:
        row_id, content = values.get("id"), [values.get(name) for name in _CONTENT]
    text = _ENCODER.encode(content).encode("utf-8", "surrogatepass")
    return Identity(row_id if type(row_id) in (str, int) else None, _digest(text))


_DECODER = json.JSONDecoder()
_ENCODER = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":"), default=str)


def parse_row(job: RunConfig, config: InputConfig, index: int, record: Record) -> Row | BadRow:
    """The row of a record."""
    identity = identify(config, record)
    try:
        if isinstance(record.content, ConfigError):
            raise record.content
        values = record.content if isinstance(record.content, dict) else _decode(record.content)
        values = take_columns(config, record, values)
        if isinstance(record.content, dict):
            for name in ("messages", "metadata"):  # which are repeated in a line
                _check_json(name, values.get(name))
        if config.format == "openai":
            values = read_openai_line(values)
            if "messages" in values and "max_tokens" not in job.sampling.model_fields_set:
                values["sampling"] = {"max_tokens": None} | values["sampling"]  # as OpenAI has it
        content = _build_line(config, values)
        sampling = _row_sampling(job, index, content.sampling)
    except ConfigError as error:
        problem = cut(str(error), _MAX_MESSAGE_LEN)
        return BadRow(index, record.line, record.where, identity.content_hash, problem, identity.id)
    return Row(index, record.line, record.where, identity.content_hash, content, sampling)


def _build_line(config: InputConfig, values: dict[str, Any]) -> InputLine:
    """Raises ConfigError, which tells of `input.columns` where there are fields that no row has."""
    try:
        return build(InputLine, values)
    except ConfigError as error:
        known = InputLine.model_fields
        unknown = [name for name in values if name not in known]
        is_slip = any(nearest(name, known, 0.8) for name in unknown)
        if not unknown or is_slip or config.format == "openai":
            raise
        given = next((name for name in values if name in _PROMPTS), None)
        example = f"{{{given or 'prompt'}: {given or cut(unknown[0])}}}"
        hint = f"input.columns, such as {example}, says where a row's fields are, and passes over all others"
        raise ConfigError(f"{hint}; {error}") from None  # first, as messages are cut


def _row_sampling(job: RunConfig, index: int, overrides: dict[str, Any]) -> SamplingParams:
    """The job's sampling with the row's put over it, and a seed of the row's own.

    The engine would derive a seed from the order of arrival; from the row's index it is the same in a resumed
    run and in `compare_plain`.
    """
    values = put_over(job.sampling.model_dump(), overrides)
    if values["seed"] is None:
        values["seed"] = seed_of(job.engine.seed, index)
    return SamplingParams.of(values)


def _decode(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`. Raises ConfigError where strict UTF-8 or strict JSON is broken."""
    try:
        values = parse_json(raw.decode("utf-8"))
        _canonical(values)
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 (byte {error.start} of the line)") from None
    except UnicodeEncodeError:
        raise ConfigError("holds half of a surrogate pair, which is no character") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"not valid JSON: {error.msg}, at character {error.pos + 1}") from None
    except RecursionError:  # of _canonical, which goes less deep
        raise ConfigError("not valid JSON: nested too deeply") from None
    except ValueError as error:
        raise ConfigError(f"not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f'expected a JSON object, such as {{"prompt": "Hello"}}, got {type(values).__name__}'
        )
    return values


def _check_json(name: str, value: Any) -> None:
    """Raises ConfigError for what a table has and no line of JSON can hold."""
    try:
        _canonical(value)
    except UnicodeEncodeError:
        raise ConfigError(f"{name}: holds half of a surrogate pair, which is no character") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{name}: must be what JSON can hold, got {shown(value)} ({error}); make it a text"
        ) from None


def _canonical(values: Any) -> bytes:
    """One byte string for equal values. Raises ValueError for what strict JSON in UTF-8 cannot hold."""
    strict: dict[str, Any] = {"ensure_ascii": False, "allow_nan": False}
    return json.dumps(values, **strict, sort_keys=True, separators=(",", ":")).encode("utf-8")


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
