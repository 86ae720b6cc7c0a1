"""What an output was made with: a file beside it, by which a job knows its own output again."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import ConfigError, shown
from ..utils.files import write_json
from ..version import __version__
from .schema import Job, auto_format, output_format

FORMAT = 1
_PRINT, _NOT_SET = "fingerprint.", object()


class AnotherJobsOutput(ConfigError):
    """The output holds rows that this job would not have made."""


class Manifest(BaseModel):
    """settings    those that decide what the rows are, by dotted name, and fingerprints of the model and of
                what its plan reads
    earlier     those of runs before, whose rows were kept with output.only_missing
    input       the files, with their sizes in bytes
    rows, done, errors   of the input; rows with errors are done
    counts      of `LLM.stats()`, summed over the runs that ended by themselves or by Ctrl-C
    started, updated, finished   UTC; finished: null while rows are missing
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    format: Annotated[int, Field(ge=FORMAT, le=FORMAT)] = FORMAT
    hispec: str = __version__
    settings: dict[str, Any]
    earlier: list[dict[str, Any]] = Field(default_factory=list)
    input: list[dict[str, Any]] = Field(default_factory=list)
    rows: int = 0
    done: int = 0
    errors: int = 0
    counts: dict[str, Any] = Field(default_factory=dict)
    started: str = ""
    updated: str = ""
    finished: str | None = None

    def write(self, output: Path, *, num_done: int, num_errors: int) -> None:
        """Writes it beside `output`, whole or not at all. Raises OSError."""
        self.done, self.errors, self.updated = num_done, num_errors, _now()
        self.started = self.started or self.updated
        self.finished = self.updated if self.done >= self.rows else None
        write_json(manifest_path(output), self.model_dump(), sync=True)


def manifest_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.manifest.json")


def read_manifest(output: Path) -> Manifest | None:
    """That of an output; None without one. Raises ConfigError if it can't be read."""
    try:
        return load_manifest(output)
    except ConfigError as error:
        raise ConfigError(
            f"output.path: {error}; set output.overwrite=true (--new) to start anew, or choose another path"
        ) from None


def load_manifest(output: Path) -> Manifest | None:
    """As `read_manifest`, for whoever is no job."""
    path = manifest_path(output)
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except ValidationError as error:
        (problem, *_) = error.errors(include_url=False)
        where = ".".join(map(str, problem["loc"])) or "its JSON"
        raise ConfigError(
            f"{path} is not a manifest that HiSpec {__version__} reads ({where}: {problem['msg']})"
        ) from None


def settings_that_matter(job: Job) -> dict[str, Any]:
    """The settings on which rows of the output depend, by dotted name, defaults left out. Plans do not
    matter, since outputs are plain decoding's with all of them, but with `rejection`. job: as
    `settle_format` gives it."""
    found: dict[str, Any] = {"model": job.model, "engine.seed": job.engine.seed}
    found |= _numbers(job)
    if job.engine.max_model_len is not None:
        found["engine.max_model_len"] = job.engine.max_model_len
    sampling = job.sampling.model_dump(mode="json", exclude_defaults=True)
    if job.input.format == "openai" and "max_tokens" in job.sampling.model_fields_set:
        sampling["max_tokens"] = job.sampling.max_tokens  # its default, too: rows have no limit else
    found |= {f"sampling.{name}": value for name, value in sampling.items() if name != "speculative"}
    if job.speculative is not None and job.speculative.acceptance == "rejection":
        found["speculative"] = job.speculative.model_dump(mode="json", exclude_defaults=True)
    if job.input.format == "openai":
        found["input.format"] = job.input.format
    if job.input.columns is not None:
        found["input.columns"] = {str(name): column for name, column in job.input.columns.items()}
    for name in ("echo_input", "token_ids"):
        if getattr(job.output, name) != type(job.output).model_fields[name].default:
            found[f"output.{name}"] = getattr(job.output, name)
    if (named := output_format(job)) != auto_format(job):
        found["output.format"] = named
    return json.loads(json.dumps(found))


def _numbers(job: Job) -> dict[str, str]:
    """What makes another model, with other outputs, of the job's, as far as the settings say: what `auto` is
    only the loaded model tells (`LLM.fingerprints`)."""
    engine, found = job.engine, dict[str, str]()
    kv_dtype = engine.kv_cache_dtype
    if engine.quantization is not None:
        found["engine.quantization"] = engine.quantization
        kv_dtype = "bfloat16" if kv_dtype == "auto" else kv_dtype
    if engine.dtype in ("bfloat16", "float16"):
        found["engine.dtype"] = engine.dtype
    if kv_dtype in ("bfloat16", "int8"):
        found["engine.kv_cache_dtype"] = kv_dtype
    return found


def make_manifest(job: Job, before: Manifest | None, fingerprints: dict[str, str]) -> Manifest:
    """The manifest of a run; before: that of the rows it keeps; fingerprints: of the model, and of the exits
    of its plan. Raises AnotherJobsOutput if the rows that are kept are of another model or other exits."""
    settings = settings_that_matter(job) | {_PRINT + name: value for name, value in fingerprints.items()}
    if before is None:
        return Manifest(settings=settings)
    prints = {name: value for name, value in settings.items() if name.startswith(_PRINT)}
    # Exits that one of the runs did without are no difference.
    of_both = {name: value for name, value in before.settings.items() if name in prints}
    if not job.output.only_missing:
        check_same(job.output.path, of_both, {name: prints[name] for name in of_both}, prints=True)
        settings = before.settings | settings
    earlier = before.earlier + ([before.settings] if before.settings != settings else [])
    return Manifest(settings=settings, earlier=earlier, counts=before.counts, started=before.started)


def check_same(output: Path, old: dict[str, Any], new: dict[str, Any], prints: bool = False) -> None:
    """Raises AnotherJobsOutput if rows of an output were made with other settings; with `prints` fingerprints
    are compared, else all others."""
    names = {name for name in {*old, *new} if name.startswith(_PRINT) is prints}
    differences = [
        f"{name} was {_shown(old, name)} and is {_shown(new, name)}"
        for name in sorted(names)
        if old.get(name, _NOT_SET) != new.get(name, _NOT_SET)  # null is a setting, too
    ]
    if differences:
        raise AnotherJobsOutput(
            f"output.path: {output} holds rows of other settings: {'; '.join(differences)}. Start anew with"
            " --new (output.overwrite=true), keep its rows and do only those that are missing with"
            " --only-missing (output.only_missing=true), or choose another output.path"
        )


def _shown(settings: dict[str, Any], name: str) -> str:
    return shown(settings[name]) if name in settings else "not set"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
