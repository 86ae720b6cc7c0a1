"""The schema of a YAML job. The names are those of the Python API, nested."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from ..config import EngineConfig, SchedulingConfig, Settings, SpeculativeConfig
from ..config.workers import Workers
from ..errors import shown
from ..sampling_params import SamplingParams

if TYPE_CHECKING:
    from ..llm import LLM


_MOST_NAME = 255  # bytes of the name of a file or folder


def _as_path(value: Any) -> Any:
    if isinstance(value, Path):
        return value
    is_name = isinstance(value, str) and value.strip() and "\0" not in value
    if not is_name or max(len(name.encode("utf-8", "replace")) for name in value.split("/")) > _MOST_NAME:
        raise ValueError(f"must name a file, got {shown(value)}")
    return Path(value).expanduser()


FilePath = Annotated[Path, BeforeValidator(_as_path)]


class InputConfig(Settings):
    """Where the prompts are: a UTF-8 file of one JSON object per line.

    path   relative to the job file (on the command line: to the working directory)
    limit  use this many rows from the start; None = all
    """

    path: FilePath
    limit: Annotated[int, Field(ge=1)] | None = None


class Destination(Settings):
    """Where results go, and what becomes of those that are there."""

    path: FilePath
    overwrite: bool = False
    resume: bool = False

    @model_validator(mode="after")
    def _one_intention(self) -> Self:
        if self.overwrite and self.resume:
            raise ValueError("overwrite=true and resume=true contradict each other; keep one of them")
        return self

    @property
    def way_on(self) -> str:
        """How an interrupted command goes on, for its last words."""
        if self.resume:
            return "the same command goes on from there"
        unset = " output.overwrite=false" if self.overwrite else ""
        return f"the same command with --set output.resume=true{unset} goes on from there"


class OutputConfig(Destination):
    """Where the results go: one JSON object per input row, in input order.

    path           relative to the working directory; missing folders are created
    overwrite      replace an existing file
    resume         go on where an interrupted run of the same job stopped
    compare_plain  run the same prompts through plain decoding too, and report speed and identity; turns
                   prefix caching off in both runs, so that neither is served from the other's cache
    echo_input     repeat the prompt in its output row
    token_ids      add the token ids of each output
    """

    compare_plain: bool = False
    echo_input: bool = True
    token_ids: bool = False


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
             there are cores or GPUs (docs/scaling.md)
    """

    workers: Workers = 1
    input: InputConfig
    output: OutputConfig

    def make_llm(self, **engine: Any) -> LLM:
        return super().make_llm(workers=self.workers, **engine)

    @model_validator(mode="after")
    def _comparable(self) -> Job:
        if self.output.compare_plain and self.speculative is None:
            raise ValueError(
                "output.compare_plain=true has nothing to compare: `speculative` is not set, so the job"
                " already decodes plainly"
            )
        return self
