"""The schema of a training YAML (docs/training.md)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ee_models.checkpoint.exit_shape import ExitShape, check_distinct
from ee_models.checkpoint.ngram_file import MOST_TOKENS
from ee_models.training.settings import EarlyExitSettings, LayerSkipSettings, LoopSettings, RecipeSettings

from ..config import EngineConfig, Settings
from ..jobs.load import load_settings
from ..jobs.schema import Destination, FilePath
from ..sampling_params import Temperature


class PromptSource(Settings):
    """Where prompts come from: a file, or the model itself.

    path        a UTF-8 file of one JSON object per line, relative to the training file
    field       the string that is the prompt; rows with `messages` are conversations instead, and if the last
                message is the assistant's, it is taken as the response
    limit       use this many rows from the start; None = all
    answer      the string that is its response; None = the model answers
    outputs     the output of a job (`hispec run` with output.token_ids) whose one input was `path`: the first
                output of each row is its response, token for token; another training's work/answers.jsonl is
                such a file
    text        instead of a prompt, the string that is a text: every token of it is learnt, in pieces of
                data.max_length, without the chat template
    opening     the model writes the user's turn, which begins with this, as it stands ("" = with nothing)
    count, max_tokens   prompts to write, and how long they may become
    """

    path: FilePath | None = None
    field: Annotated[str, Field(min_length=1)] = "prompt"
    answer: Annotated[str, Field(min_length=1)] | None = None
    outputs: FilePath | None = None
    text: Annotated[str, Field(min_length=1)] | None = None
    limit: Annotated[int, Field(ge=1)] | None = None
    opening: str | None = None
    count: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] = 160

    @model_validator(mode="after")
    def _one_kind(self) -> PromptSource:
        if (self.path is None) == (self.opening is None):
            raise ValueError(
                "a source of prompts needs either `path` (a file) or `opening` (the model writes them)"
            )
        for name in ("answer", "outputs", "text"):
            if self.opening is not None and getattr(self, name) is not None:
                raise ValueError(f"`{name}` belongs to a file; the model answers an `opening` itself")
        idle = ("max_tokens",) if self.opening is None else ("field", "limit")
        if unused := [f"`{name}`" for name in idle if name in self.model_fields_set]:
            kind = "`path`" if self.opening is None else "`opening`"
            raise ValueError(f"{', '.join(unused)}: of no effect with {kind}; leave it out")
        if self.text is not None and (self.answer or self.outputs or "field" in self.model_fields_set):
            raise ValueError("`text` is learnt as it stands; leave out `field`, `answer` and `outputs`")
        if self.answer is not None and self.outputs is not None:
            raise ValueError(
                "responses are either a field of the file, `answer`, or `outputs` of a job; leave one out"
            )
        if (self.opening is None) != (self.count is None):
            raise ValueError("`count` says how many prompts of an `opening` are written; the two go together")
        return self


class DataConfig(Settings):
    """Training data: the target's own answers to prompts, as exits will see them in decoding.

    prompts              sources, taken together and shuffled
    writing_temperature  of prompts that the model writes
    temperatures         of answers, by turns
    max_tokens           of an answer
    max_length           tokens of prompt and answer together; longer prompts are bad rows
    held_out             examples, spread over all, that are never trained on
    on_bad_row           "skip": say which rows can't be used, go on without them; "stop": end at the first
    """

    prompts: Annotated[list[PromptSource], Field(min_length=1)]
    writing_temperature: Annotated[float, Field(ge=1e-5, le=100.0)] = 0.8
    temperatures: Annotated[list[Temperature], Field(min_length=1)] = Field(default_factory=lambda: [0.0])
    max_tokens: Annotated[int, Field(ge=2, lt=2**31)] = 200
    max_length: Annotated[int, Field(ge=8)] = 1024
    held_out: Annotated[int, Field(ge=1)] = 128
    on_bad_row: Literal["skip", "stop"] = "skip"


class ExitTraining(ExitShape, RecipeSettings):
    """An exit to train."""


def _check_distinct(config: Any) -> Any:
    try:
        check_distinct(config.exits)
    except ValueError as error:
        raise ValueError(f"{error}; train other shapes at a layer in a run of their own") from None
    return config


class AdaptersConfig(Settings):
    """The recipe `adapters`: exits on a frozen trunk.

    init            "trunk": blocks start as copies of the layers after the exit; "random": from small random
                    weights
    max_states_gb   what hidden states may take on disk
    """

    exits: Annotated[list[ExitTraining], Field(min_length=1)]
    init: Literal["trunk", "random"] = "trunk"
    max_states_gb: Annotated[float, Field(gt=0.0)] = 50.0

    _distinct = model_validator(mode="after")(_check_distinct)


class JointExitTraining(ExitTraining):
    """An exit to train with its trunk.

    init     "trunk" and "random" as with `adapters`; "trained": the blocks of an exit of this shape at this
             layer, from `init_path`; its vocabulary is chosen anew
    weight   share of its loss in what the trunk learns
    """

    init: Literal["trunk", "random", "trained"] = "trunk"
    weight: Annotated[float, Field(ge=0.0)] = 1.0


class EarlyExitConfig(EarlyExitSettings):
    """The recipe `ee`.

    init_path   a folder of trained exits to begin with, or an EE package, with whose low-rank matrices the
                trunk then begins, so that training goes on where another ended; None = the exits that come
                with the model or with HiSpec
    """

    exits: Annotated[list[JointExitTraining], Field(min_length=1)]
    init_path: FilePath | None = None

    _distinct = model_validator(mode="after")(_check_distinct)


class NgramsConfig(Settings):
    """The recipe `ngrams`: what follows the last few tokens in the model's own answers.

    max_size      tokens of the longest contexts
    least_count   contexts seen less often are left out
    """

    max_size: Annotated[int, Field(ge=1, le=MOST_TOKENS)] = 4
    least_count: Annotated[int, Field(ge=1)] = 3


class TrainOutput(Destination):
    """Where results go.

    path   a folder for the exits (with `layerskip` the model, with `ee` both, with `ngrams` these),
           checkpoints and a log
    work   a folder for prompts, answers and hidden states, which runs on the same data may share; None =
           path/work
    overwrite   train anew; what `work` holds is used where it fits
    resume      go on from the last checkpoint
    """

    work: FilePath | None = None


class TrainConfig(Settings):
    """One training run: prompts, answers by the target itself, hidden states, training, exits.

    model     a name that `hispec fetch` knows, a hub id, or a folder with a checkpoint
    engine    for writing prompts and answers
    loop      of all recipes but `ngrams`, which counts
    """

    model: Annotated[str, Field(min_length=1)]
    recipe: Literal["adapters", "ee", "layerskip", "ngrams"] = "adapters"
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    engine: EngineConfig = EngineConfig()
    data: DataConfig
    adapters: AdaptersConfig | None = None
    ee: EarlyExitConfig | None = None
    layerskip: LayerSkipSettings | None = None
    ngrams: NgramsConfig | None = None
    loop: LoopSettings | None = None
    output: TrainOutput

    @model_validator(mode="after")
    def _settings_of_the_recipe(self) -> TrainConfig:
        for other in ("adapters", "ee", "layerskip", "ngrams"):
            if other != self.recipe and getattr(self, other) is not None:
                raise ValueError(f"`{other}` has no effect with recipe: {self.recipe}; leave it out")
        if self.recipe in ("adapters", "ee") and getattr(self, self.recipe) is None:
            raise ValueError(f"recipe: {self.recipe} needs `{self.recipe}` with the exits to train")
        if self.recipe == "ngrams" and self.loop is not None:
            raise ValueError("`loop` has no effect with recipe: ngrams, which counts; leave it out")
        if self.recipe != "ngrams" and self.loop is None:
            raise ValueError(f"recipe: {self.recipe} needs `loop` with its num_steps")
        return self


def load_training(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The training file at `path`; files of prompts lie relative to it. Raises ConfigError with all that is
    wrong."""
    files = [("data", "prompts", "*", name) for name in ("path", "outputs")]
    return load_settings(TrainConfig, Path(path), overrides, files)
