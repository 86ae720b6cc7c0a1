"""The schema of a training YAML (docs/training.md)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ee_models.checkpoint.ngram_file import MOST_TOKENS

from ..config import EngineConfig, Settings
from ..jobs.load import load_settings
from ..jobs.schema import Destination, FilePath


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
    max_tokens: Annotated[int, Field(ge=1)] = 160

    @model_validator(mode="after")
    def _one_kind(self) -> PromptSource:
        if (self.path is None) == (self.opening is None):
            raise ValueError(
                "a source of prompts needs either `path` (a file) or `opening` (the model writes them)"
            )
        for name in ("answer", "outputs", "text"):
            if self.opening is not None and getattr(self, name) is not None:
                raise ValueError(f"`{name}` belongs to a file; the model answers an `opening` itself")
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
    writing_temperature: Annotated[float, Field(gt=0.0)] = 0.8
    temperatures: Annotated[list[Annotated[float, Field(ge=0.0)]], Field(min_length=1)] = Field(
        default_factory=lambda: [0.0]
    )
    max_tokens: Annotated[int, Field(ge=2)] = 200
    max_length: Annotated[int, Field(ge=8)] = 1024
    held_out: Annotated[int, Field(ge=1)] = 128
    on_bad_row: Literal["skip", "stop"] = "skip"


class ExitTraining(Settings):
    """An exit to train; the fields are those of exits.json (`ee_models.checkpoint.exit_files.ExitInfo`).

    intermediate_size  of the blocks' gated MLP; "model" = the trunk's own, None = no MLP (Kangaroo)
    vocabulary_size    the most frequent tokens of the training answers; None = all
    """

    layer: Annotated[int, Field(ge=1)]
    num_blocks: Annotated[int, Field(ge=0, le=8)] = 1
    attention: bool = True
    intermediate_size: Annotated[int, Field(ge=1)] | Literal["model"] | None = "model"
    vocabulary_size: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _not_empty(self) -> ExitTraining:
        if self.num_blocks and not self.attention and self.intermediate_size is None:
            raise ValueError(
                "a block needs attention: true, an intermediate_size, or both; num_blocks: 0 leaves"
                " blocks out"
            )
        return self


def _check_distinct(config: Any) -> Any:
    layers = [exit_.layer for exit_ in config.exits]
    if len(set(layers)) != len(layers):
        raise ValueError(
            f"exits must be at different layers, got {layers}; train other shapes at a layer in a run of"
            " their own"
        )
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


class EarlyExitConfig(Settings):
    """The recipe `ee`: the model and its exits, trained together.

    target            "labels": the last layer learns the answers; "self": it stays what it was
    init_path         a folder of trained exits to begin with, or an EE package, with whose low-rank matrices
                      the trunk then begins, so that training goes on where another ended; None = the exits
                      that come with HiSpec
    lora_rank         the trunk learns by low-rank matrices of this rank, scaled by lora_alpha / lora_rank;
                      None: with all weights
    exit_loss_scale   weight of all exits together in what the trunk learns; the last layer's is 1
    trunk_lr_scale    the trunk's learning rate over loop.learning_rate
    original_share    share of a micro-batch's rows, at least one, on which target `self` compares with the
                      model as it was; that costs as much as a pass of the model's own
    dropout_max       layer dropout as with `layerskip`; 0 = none
    prompts_learn     whether gradients run back into the trunk through prompts, too; false: as far as those
                      of a pass reach together, they pass forward only, which takes less time
    max_pass_tokens   tokens that pass through the model at once, padding included
    skip_batches      of the seed's order of examples: those that the training of `init_path` has seen
    """

    exits: Annotated[list[JointExitTraining], Field(min_length=1)]
    target: Literal["labels", "self"]
    init_path: FilePath | None = None
    lora_rank: Annotated[int, Field(ge=1)] | None = 16
    lora_alpha: Annotated[int, Field(ge=1)] = 32
    exit_loss_scale: Annotated[float, Field(ge=0.0)] = 1.0
    trunk_lr_scale: Annotated[float, Field(gt=0.0)] = 1.0
    original_share: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    dropout_max: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    prompts_learn: bool = True
    max_pass_tokens: Annotated[int, Field(ge=1)] = 4096
    skip_batches: Annotated[int, Field(ge=0)] = 0

    _distinct = model_validator(mode="after")(_check_distinct)

    @model_validator(mode="after")
    def _possible(self) -> EarlyExitConfig:
        if self.target == "self" and self.lora_rank is None:
            raise ValueError(
                "target: self compares with the model as it was, which is the one without LoRA; give"
                " lora_rank"
            )
        if self.target == "labels" and self.original_share < 1:
            raise ValueError("`original_share` has no effect with target: labels; leave it out")
        return self


class LayerSkipConfig(Settings):
    """The recipe `layerskip`: layer dropout and early-exit loss [arXiv 2404.16710], which change the model
    itself.

    dropout_max        p_max, the last layer's rate of being left out
    dropout_schedule   "constant" for continued training, "exponential" from scratch
    exit_loss_scale    e_scale
    curriculum         which layers' losses are on: "rotational", "gradual" or "all"
    rotation           R: with "rotational", every R-th layer
    lora_rank          train low-rank adapters of this rank, scaled by lora_alpha / lora_rank and merged at
                       the end; None = all weights
    """

    dropout_max: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    dropout_schedule: Literal["constant", "exponential"] = "constant"
    exit_loss_scale: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1
    curriculum: Literal["rotational", "gradual", "all"] = "rotational"
    rotation: Annotated[int, Field(ge=1)] = 8
    lora_rank: Annotated[int, Field(ge=1)] | None = None
    lora_alpha: Annotated[int, Field(ge=1)] = 16


class NgramsConfig(Settings):
    """The recipe `ngrams`: what follows the last few tokens in the model's own answers.

    max_size      tokens of the longest contexts
    least_count   contexts seen less often are left out
    """

    max_size: Annotated[int, Field(ge=1, le=MOST_TOKENS)] = 4
    least_count: Annotated[int, Field(ge=1)] = 3


class LoopConfig(Settings):
    """Steps and speed; `num_steps` are optimizer steps over `batch_size` examples (all processes together).

    warmup            share of the steps in which the learning rate rises; afterwards it falls along a cosine
                      to `final_lr` of its peak
    mixed_precision   "bf16": matrix products in bfloat16; "no": float32
    compile           torch.compile of the layers: the first steps take a minute more, the others less time
    """

    num_steps: Annotated[int, Field(ge=1)]
    batch_size: Annotated[int, Field(ge=1)] = 16
    learning_rate: Annotated[float, Field(gt=0.0)] = 1e-3
    warmup: Annotated[float, Field(ge=0.0, le=1.0)] = 0.03
    final_lr: Annotated[float, Field(ge=0.0, le=1.0)] = 0.05
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0.0)] = 1.0
    eval_every: Annotated[int, Field(ge=1)] = 250
    checkpoint_every: Annotated[int, Field(ge=1)] = 250
    mixed_precision: Literal["no", "bf16"] = "no"
    compile: bool = False


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
    layerskip: LayerSkipConfig | None = None
    ngrams: NgramsConfig | None = None
    loop: LoopConfig | None = None
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
