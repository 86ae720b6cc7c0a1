"""Whether a plan fits the models and sizes of an engine."""

from __future__ import annotations

from ..config import NgramConfig, Plan, SpeculativeConfig
from ..decoding.stages import DecoderLike
from ..errors import ConfigError
from .plan_spec import EngineSizes, Models


def check_plan(plan: Plan, speculative: SpeculativeConfig | None, models: Models, sizes: EngineSizes) -> None:
    """Raises ConfigError for what does not fit together."""
    num_layers = models.decoder.config.num_layers
    if plan.top_layer > num_layers:
        raise ConfigError(f"{plan} has an exit at layer {plan.top_layer} of a model of {num_layers}")
    trained = {exit_.layer for exit_ in models.exits}
    read = set() if plan.is_plain else {plan.draft_layer, plan.check_layer} - {num_layers}
    if stray := sorted(trained - read):
        raise ConfigError(
            f"{plan} does not read trained exits at layers {stray}; pass only those that it reads, below"
            f" layer {num_layers}"
        )
    for name, layer in speculative.trained_layers().items() if speculative else ():
        if layer not in trained:
            raise ConfigError(
                f"speculative.{name} is an adapter, but none for layer {layer} was given; pass it in `exits`,"
                " or use LLM, which loads it"
            )
    if plan.window > sizes.max_model_len:
        raise ConfigError(
            f"a round of num_draft_tokens={plan.num_draft_tokens}, num_checks={plan.num_checks} and"
            f" num_branches={plan.num_branches} takes {plan.window} places, more than"
            f" max_model_len={sizes.max_model_len}; lower one of them, or raise max_model_len"
        )
    if speculative is not None and not plan.is_plain:
        _check_shape(plan, speculative)
    if speculative is not None and (lookup := speculative.draft.lookup) is not None and lookup.guesses:
        _check_table(lookup, models)
    needs_model = speculative is not None and speculative.draft.traits.has_model
    if needs_model != (models.draft_model is not None):
        raise ConfigError(
            "draft.kind='model' needs `draft_model`"
            if needs_model
            else "`draft_model` is given, but draft.kind is not 'model'"
        )
    if models.draft_model is not None:
        _check_draft_model(models.decoder, models.draft_model, sizes.max_model_len)


def _check_table(lookup: NgramConfig, models: Models) -> None:
    """The n-grams that a plan guesses from must be there, on the model's device, and of its tokens."""
    tables, path, decoder = {table.path: table for table in models.tables}, lookup.guess_path, models.decoder
    if path not in tables:
        if not lookup.needs_table:
            return
        raise ConfigError(
            f"speculative.draft.ngram.guess_path={path!r}: `tables` has n-grams of {list(tables)} alone; pass"
            " these, too, or use LLM, which loads them"
        )
    table = tables[path]
    if table.keys.device != decoder.device or table.vocab_size > decoder.config.vocab_size:
        raise ConfigError(
            f"speculative.draft.ngram.guess_path={path!r}: the n-grams are on {table.keys.device}, of"
            f" {table.vocab_size} tokens, and the model on {decoder.device}, of {decoder.config.vocab_size};"
            " make the table there, of n-grams counted in this model's answers"
        )


def _check_shape(plan: Plan, speculative: SpeculativeConfig) -> None:
    """A plan that overrides the settings' own must be one that their drafter can draft for."""
    draft = speculative.draft
    if plan.draft_layer and not draft.traits.in_trunk:
        raise ConfigError(
            f"{plan} resumes at layer {plan.draft_layer}, but draft.kind={draft.kind!r} leaves nothing there;"
            " its draft_layer must be 0"
        )
    if plan.num_branches > 1 and (
        not draft.traits.may_branch
        or speculative.acceptance == "rejection"
        or speculative.draft_confidence is not None
    ):
        raise ConfigError(
            f"{plan} has branches, which need draft.kind exit, adapter or model, acceptance='coupled' and no"
            " draft_confidence"
        )


def _check_draft_model(target: DecoderLike, draft_model: DecoderLike, max_model_len: int) -> None:
    """Raises ConfigError if the model cannot draft for the target, or is larger than it."""
    if draft_model.max_positions < max_model_len:
        raise ConfigError(
            f"speculative.draft.path: the draft model attends to {draft_model.max_positions} positions, but"
            f" engine.max_model_len is {max_model_len}; lower it to {draft_model.max_positions}"
        )
    if draft_model.device != target.device:
        raise ConfigError(
            f"speculative.draft.path: the draft model is on {draft_model.device}, the target on"
            f" {target.device}"
        )
    sizes = [_num_parameters(decoder) for decoder in (draft_model, target)]
    if sizes[0] > sizes[1]:
        raise ConfigError(
            f"speculative.draft.path: the draft model is larger than the target ({sizes[0] / 1e6:.0f} M and"
            f" {sizes[1] / 1e6:.0f} M parameters); choose a smaller one"
        )


def _num_parameters(decoder: DecoderLike) -> int:
    """Weights that a pass reads, by the sizes of the model; norms and biases are left out."""
    config = decoder.config
    attention = config.hidden_size * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
    return (
        config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)
        + config.vocab_size * config.hidden_size
    )
