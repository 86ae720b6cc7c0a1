"""What a recipe can be told, checked where it is given: training files (hispec/training/schema.py) have these
sections as they stand. No torch: a file with a slip is refused at once."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from . import curriculum
from .curriculum import Curriculum, DropoutSchedule


class RecipeSettings(BaseModel):
    """As hispec.config's Settings: frozen, no unknown keys, no silent conversions between types; a value
    outside its range is pydantic's ValidationError, a ValueError."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class LoopSettings(RecipeSettings):
    """Steps and speed; `num_steps` are optimizer steps over `batch_size` examples (all processes together).

    warmup            share of the steps in which the learning rate rises from 0; afterwards it falls along a
                      cosine to `final_lr` of its peak
    max_grad_norm     of each parameter group's gradient
    eval_every, checkpoint_every   in steps; the last step always does both
    mixed_precision   "bf16": matrix products in bfloat16, weights and their sums in float32, as are logits
                      where all weights learn; "no": all in float32
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

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of step `step`, counted from 0."""
        num_warmup = max(1, round(self.warmup * self.num_steps))
        if step < num_warmup:
            return self.learning_rate * (step + 1) / num_warmup
        done = (step - num_warmup) / max(1, self.num_steps - num_warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * done))
        return self.learning_rate * (self.final_lr + (1 - self.final_lr) * cosine)


class EarlyExitSettings(RecipeSettings):
    """The recipe `ee`: the model and its exits, trained together.

    target            "labels": the last layer learns the answers; "self": it stays what it was
    lora_rank         the trunk learns by low-rank matrices of this rank, scaled by lora_alpha / lora_rank;
                      None: with all weights
    exit_loss_scale   weight of all exits together in what the trunk learns; the last layer's is 1. 0: exits
                      read a trunk that takes no notice of them
    trunk_lr_scale    the trunk's learning rate over loop.learning_rate
    original_share    share of a micro-batch's rows, at least one, on which target `self` compares with the
                      model as it was, drawn for each step; that costs as much as a pass of the model's own
    dropout_max       layer dropout as with `layerskip`; 0 = none
    prompts_learn     whether gradients run back into the trunk through prompts, too; false: as far as those
                      of a pass reach together, they pass forward only, which takes less time
    max_pass_tokens   tokens that pass through the model at once, padding included; a longer example passes
                      alone
    skip_batches      of the seed's order of examples: those that the training of `init_path` has seen
    """

    target: Literal["labels", "self"]
    lora_rank: Annotated[int, Field(ge=1)] | None = 16
    lora_alpha: Annotated[int, Field(ge=1)] = 32
    exit_loss_scale: Annotated[float, Field(ge=0.0)] = 1.0
    trunk_lr_scale: Annotated[float, Field(gt=0.0)] = 1.0
    original_share: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    dropout_max: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    prompts_learn: bool = True
    max_pass_tokens: Annotated[int, Field(ge=1)] = 4096
    skip_batches: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _possible(self) -> EarlyExitSettings:
        if self.target == "self" and self.lora_rank is None:
            raise ValueError(
                "target: self compares with the model as it was, which is the one without LoRA; give"
                " lora_rank"
            )
        if self.target == "labels" and self.original_share < 1:
            raise ValueError("`original_share` has no effect with target: labels; leave it out")
        return self


class LayerSkipSettings(RecipeSettings):
    """The recipe `layerskip`: layer dropout and early-exit loss [arXiv 2404.16710], which change the model
    itself. The defaults are the paper's for continued training of Llama 3 8B.

    dropout_max        p_max, the last layer's rate of being left out
    dropout_schedule   "constant" for continued training, "exponential", rising from 0, from scratch
    exit_loss_scale    e_scale: weight of early exits beside the last layer; 0 leaves them out
    curriculum         which layers' losses are on: "rotational", "gradual" or "all" (`curriculum.layers_on`)
    rotation           R: with "rotational", every R-th layer
    lora_rank          train low-rank adapters of this rank, scaled by lora_alpha / lora_rank and merged at
                       the end; None = all weights
    """

    dropout_max: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    dropout_schedule: DropoutSchedule = "constant"
    exit_loss_scale: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1
    curriculum: Curriculum = "rotational"
    rotation: Annotated[int, Field(ge=1)] = 8
    lora_rank: Annotated[int, Field(ge=1)] | None = None
    lora_alpha: Annotated[int, Field(ge=1)] = 16

    def dropout_rates(self, num_layers: int, step: int, num_steps: int) -> list[float]:
        """Each layer's dropout rate in this step."""
        scale = curriculum.dropout_scale(self.dropout_schedule, step, num_steps)
        return curriculum.dropout_rates(num_layers, self.dropout_max, scale)

    def exit_weights(self, num_layers: int, step: int, num_steps: int) -> dict[int, float]:
        """layer -> weight of its exit's loss in this step; the last layer is always among them."""
        on = curriculum.layers_on(self.curriculum, num_layers, self.rotation, step, num_steps)
        return curriculum.exit_weights(curriculum.exit_loss_scales(num_layers, self.exit_loss_scale), on)
