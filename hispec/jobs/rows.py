"""Input rows: one JSON object per line, read lazily, checked one by one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from ..config import EngineConfig, Settings
from ..errors import ConfigError, build, cut, shown
from ..prompts import Role, join_parts
from ..sampling_params import SamplingParams
from ..utils.files import parse_json
from .schema import InputConfig, RunConfig

_BOM = b"\xef\xbb\xbf"
_MAX_MESSAGE_LEN = 1000  # characters: a message quotes what was given, and that may be a whole document
Prompt = str | list[int] | list[dict[str, str]]


class Message(Settings):
    """One turn of a conversation."""

    role: Role
    content: Annotated[str, BeforeValidator(join_parts)]


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
        return [
            name for name in ("prompt", "prompt_token_ids", "messages") if getattr(self, name) is not None
        ]


@dataclass(frozen=True)
class Row:
    """A valid row. `index` counts rows from 0; `line` counts lines from 1, blank ones too."""

    index: int
    line: int
    content_hash: str
    input: InputLine
    sampling: SamplingParams

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
    content_hash: str
    message: str
    id: str | int | None = None


def count_rows(config: InputConfig) -> int:
    """Rows that a run will read. Raises ConfigError if the file can't be read or has none."""
    path = config.path
    if path.exists() and not path.is_file():
        raise ConfigError(f"input.path: {path} is not a regular file")
    try:
        num_rows = sum(1 for _ in islice(_lines(path), config.limit))
    except OSError as error:
        raise ConfigError(f"input.path: cannot read {path}: {error.strerror}") from None
    if not num_rows:
        example = 'it needs one JSON object per line, such as {"prompt": "Hello"}'
        raise ConfigError(f"input.path: {path} has no rows; {example}")
    return num_rows


def read_rows(job: RunConfig, config: InputConfig) -> Iterator[Row | BadRow]:
    """The rows in order, invalid ones as BadRow; lazily, one line at a time."""
    for index, (line, raw) in enumerate(islice(_lines(config.path), config.limit)):
        yield parse_row(job, index, line, raw)


def parse_row(job: RunConfig, index: int, line: int, raw: bytes) -> Row | BadRow:
    """The row in the bytes of line number `line`."""
    row_id = None
    try:
        values = _decode(raw)
        row_id = values.get("id") if type(values.get("id")) in (str, int) else None
        content = build(InputLine, values)
        sampling = _row_sampling(job, index, content.sampling)
    except ConfigError as error:
        return BadRow(index, line, _digest(raw), cut(f"line {line}: {error}", _MAX_MESSAGE_LEN), row_id)
    prompt = [content.prompt, content.prompt_token_ids, content.model_dump()["messages"]]
    identity = [job.model, *prompt, sampling.model_dump()]
    identity += _numbers(job.engine)
    return Row(index, line, _digest(_canonical(identity)), content, sampling)


def _numbers(engine: EngineConfig) -> list[str]:
    """What makes another model, with other outputs, of the job's: not float32, which a CPU takes anyway."""
    kv_dtype = engine.kv_cache_dtype
    if engine.quantization is not None and kv_dtype == "auto":
        kv_dtype = "bfloat16"
    found: list[str] = [] if engine.quantization is None else [engine.quantization]
    found += [f"dtype={engine.dtype}"] if engine.dtype in ("bfloat16", "float16") else []
    return found + (["kv_cache_dtype=bfloat16"] if kv_dtype == "bfloat16" else [])


def _row_sampling(job: RunConfig, index: int, overrides: dict[str, Any]) -> SamplingParams:
    """The job's sampling with the row's put over it, and a seed of the row's own.

    The engine would derive a seed from the order of arrival; from the row's index it is the same in a resumed
    run and in `compare_plain`.
    """
    values = {**job.sampling.model_dump(), **overrides}
    if values["seed"] is None:
        digest = hashlib.blake2b(f"{job.engine.seed}:{index}".encode(), digest_size=8).digest()
        values["seed"] = int.from_bytes(digest, "big") >> 2  # 62 bits: output i of n adds i
    return SamplingParams.of(values)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(line number, bytes) of the lines that are not blank, stripped."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            raw = (raw.removeprefix(_BOM) if number == 1 else raw).strip()
            if raw:
                yield number, raw


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


def _canonical(values: Any) -> bytes:
    """One byte string for equal values. Raises ValueError for what strict JSON in UTF-8 cannot hold."""
    strict: dict[str, Any] = {"ensure_ascii": False, "allow_nan": False}
    return json.dumps(values, **strict, sort_keys=True, separators=(",", ":")).encode("utf-8")


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
