"""The schema of a YAML job. The names are those of the Python API, nested."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from ..config import EngineConfig, SchedulingConfig, Settings, SpeculativeConfig
from ..config.ray_cluster import RayConfig
from ..config.workers import Workers
from ..errors import shown
from ..sampling_params import SamplingParams
from ..utils.files import cache_dir, known_place
from .uris import is_uri, name_in

if TYPE_CHECKING:
    from ..llm import LLM


_MOST_NAME = 255  # bytes of the name of a file or folder
_MOST_OUTPUT_NAME = 225  # of an output: its manifest and drafts of that have longer names


def _as_path(value: Any) -> Any:
    if isinstance(value, Path):
        return value
    if is_uri(value):
        raise ValueError(f"must name a file of this machine, got {shown(value)}")
    is_name = isinstance(value, str) and value.strip() and "\0" not in value
    if not is_name or max(len(name.encode("utf-8", "replace")) for name in value.split("/")) > _MOST_NAME:
        raise ValueError(f"must name a file, got {shown(value)}")
    return known_place(value)


def _as_output(value: Any) -> Any:
    path, text = _as_path(value), os.fspath(value)
    name = PurePath(text).name
    if text.endswith(("/", os.sep)) or name in ("", ".."):
        raise ValueError(f"must name a file, not a folder, got {shown(text)}")
    if (num_bytes := len(name.encode("utf-8", "replace"))) > _MOST_OUTPUT_NAME:
        raise ValueError(
            f"must have a name of at most {_MOST_OUTPUT_NAME} bytes, which leaves files beside it theirs, got"
            f" one of {num_bytes}"
        )
    return path


def _as_place(value: Any) -> Any:
    return value if is_uri(value) else _as_path(value)


def _as_places(value: Any) -> Any:
    if not isinstance(value, list):
        return _as_place(value)
    if not value:
        raise ValueError("must name at least one file")
    return [_as_place(one) for one in value]


def _as_uri(value: Any) -> Any:
    if value is not None and not is_uri(value):
        raise ValueError(f"must be a URI, such as s3://bucket/out.jsonl, got {shown(value)}")
    if value is not None and not name_in(value):
        raise ValueError(f"must name a file, not a folder, got {shown(value)}")
    return value


FilePath = Annotated[Path, BeforeValidator(_as_path)]
OutputPath = Annotated[Path, BeforeValidator(_as_output)]
Places = Annotated[Path | str | list[Path | str], BeforeValidator(_as_places)]
Uri = Annotated[str | None, BeforeValidator(_as_uri)]


STANDARD = Path("-")  # standard input or output
COMPRESSED = (".gz", ".zst")
Format = Literal["auto", "jsonl", "openai", "parquet", "csv"]
RowField = Literal["id", "prompt", "prompt_token_ids", "messages", "sampling", "metadata"]


def format_of(path: Path) -> str:
    """The format that a file's name tells: jsonl where it tells nothing."""
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in COMPRESSED]
    return suffixes[-1][1:] if suffixes and suffixes[-1] in (".parquet", ".csv") else "jsonl"


def auto_format(job: Job) -> str:
    """What `output.format: auto` is: jsonl or openai for lines, parquet or csv. job: as
    `output.settle_format` gives it."""
    named = format_of(job.output.path)
    return "openai" if named == "jsonl" and job.input.format == "openai" else named


def output_format(job: Job) -> str:
    """As `auto_format`, or what is set."""
    return auto_format(job) if job.output.format == "auto" else job.output.format


class InputConfig(Settings):
    """Where the prompts are.

    path     a file, a pattern such as `shard-*.jsonl`, "-" for standard input, a URI such as
             `s3://bucket/shard-*.jsonl`, or a list of these; relative to the job file (on the command line:
             to the working directory)
    format   auto: by the name's ending, and of JSON lines by the first that is a JSON object
    columns  {field of a row: key or column that has it}; all others are passed over. None = as rows name them
    limit    use this many rows from the start; None = all
    """

    path: Places
    format: Format = "auto"
    columns: Annotated[dict[RowField, Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    limit: Annotated[int, Field(ge=1)] | None = None

    @property
    def paths(self) -> list[Path | str]:
        """As given: patterns are not resolved; texts are URIs."""
        return self.path if isinstance(self.path, list) else [self.path]

    def __str__(self) -> str:
        return ", ".join(map(str, self.paths))


class Destination(Settings):
    """Where results go, and what becomes of those that are there."""

    _keeping: ClassVar[tuple[str, ...]] = ("resume",)  # settings by which results that are there are kept

    path: FilePath
    overwrite: bool = False
    resume: bool = False

    @model_validator(mode="after")
    def _one_intention(self) -> Self:
        for name in self._keeping if self.overwrite else ():
            if name in self.model_fields_set and getattr(self, name):
                raise ValueError(f"overwrite=true and {name}=true contradict each other; keep one of them")
        return self

    @property
    def keeps(self) -> bool:
        """Whether what is there is kept."""
        return self.resume and not self.overwrite

    @property
    def way_on(self) -> str:
        """How an interrupted command goes on, for its last words."""
        if self.keeps:
            return "the same command goes on from there"
        unset = " output.overwrite=false" if self.overwrite else ""
        return f"the same command with --set output.resume=true{unset} goes on from there"


class OutputConfig(Destination):
    """Where the results go: one row per input row.

    path           relative to the working directory; missing folders are created; "-" for standard output; a
                   URI is short for `upload` and a file in the folder of what HiSpec keeps
    upload         a URI such as s3://bucket/out.jsonl where the output is kept, too, from which a job goes on
                   on another machine
    upload_s       seconds between two uploads while the job runs
    overwrite      start anew, in place of an existing file
    resume         go on where an interrupted run stopped
    only_missing   keep the rows of an existing file although other settings made them, and do the others
    retry_failed   do those rows of an existing file again that have an error
    order          input: rows are written in the order of the input; finished: as soon as they end
    sync_s         seconds that rows may wait for being put on the disk itself; 0 = each at once, None = as
                   the operating system likes. What is written survives a crash of the program in any case
    format         auto: by the name's ending, and that of the input where it is openai
    compare_plain  run the same prompts through plain decoding too, and report speed and identity; turns
                   prefix caching off in both runs, so that neither is served from the other's cache
    echo_input     repeat the prompt in its output row
    token_ids      add the token ids of each output
    """

    _keeping: ClassVar[tuple[str, ...]] = ("resume", "only_missing", "retry_failed")

    path: OutputPath
    resume: bool = True
    only_missing: bool = False
    retry_failed: bool = False
    order: Literal["input", "finished"] = "input"
    sync_s: Annotated[float, Field(ge=0.0, le=3600.0)] | None = 1.0
    upload: Uri = None
    upload_s: Annotated[float, Field(ge=0.1, le=86400.0)] = 60.0
    format: Format = "auto"
    compare_plain: bool = False
    echo_input: bool = True
    token_ids: bool = False

    @model_validator(mode="before")
    @classmethod
    def _of_uri(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not is_uri(uri := values.get("path")):
            return values
        if values.get("upload") is not None:
            raise ValueError(
                f"path={shown(uri)} is short for upload; name a file of this machine, or leave it"
            )
        uri = str(_as_uri(uri))
        folder = hashlib.blake2b(uri.encode(), digest_size=8).hexdigest()
        return {**values, "path": cache_dir() / "jobs" / folder / name_in(uri), "upload": uri}

    @property
    def way_on(self) -> str:
        if self.path == STANDARD:  # what was written is not there to be read
            return "the same command starts again from the first row"
        return super().way_on


class RunConfig(Settings):
    """A model and how to run it: the part of a job that needs no files.

    model        a name that `hispec fetch` knows, a hub id, or a folder with a checkpoint
    speculative  None = plain decoding
    scheduling   the policy by which requests are served; None = first come, first served
    sampling     of every row; a row may override single fields
    """

    model: Annotated[str, Field(min_length=1)]
    engine: EngineConfig = EngineConfig()
    speculative: SpeculativeConfig | None = None
    scheduling: SchedulingConfig | None = None
    sampling: SamplingParams = SamplingParams()

    def make_llm(self, **engine: Any) -> LLM:
        """The LLM with these settings; engine: overrides single engine settings, or adds arguments of LLM."""
        from ..llm import LLM

        settings = {**self.engine.model_dump(), **engine}
        return LLM(self.model, speculative=self.speculative, scheduling=self.scheduling, **settings)


class Job(RunConfig):
    """One offline job: every prompt of `input` through the model, results to `output`.

    workers  processes that share the work, each with its part of the cores, or a GPU; "auto" = as many as
             `hispec profile --latency` has found fastest here, else as there are cores or GPUs
             (docs/scaling.md)
    ray      workers on the machines of a Ray cluster instead; None = none
    """

    workers: Workers = 1
    ray: RayConfig | None = None
    input: InputConfig
    output: OutputConfig

    def make_llm(self, **engine: Any) -> LLM:
        return super().make_llm(workers=self.workers, ray=self.ray, **engine)

    @model_validator(mode="after")
    def _comparable(self) -> Job:
        if self.output.compare_plain and self.speculative is None:
            raise ValueError(
                "output.compare_plain=true has nothing to compare: `speculative` is not set, so the job"
                " already decodes plainly"
            )
        return self
