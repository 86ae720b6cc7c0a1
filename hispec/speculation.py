"""What a plan needs besides the model: its exits and drafter, a judge, and buffers. Checked, then made all at once."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cache.hidden import HiddenBuffer
from cache.paged_kv import PagedKV
from ee_models.exits import Exit

from .config import PLAIN, DraftConfig, NgramConfig, Plan, SpeculativeConfig
from .drafters.computed import ComputedDrafter, ExitSpeaker
from .drafters.drafter import Drafter
from .drafters.hybrid import HybridDrafter
from .drafters.model import ModelDrafter, ModelSpeaker
from .drafters.ngram import NgramDrafter
from .errors import ConfigError
from .judges import CoupledJudge, Judge, RejectionJudge
from .stages import DecoderLike, PassCounts, Stages, Tier
from .tree import DraftTree


@dataclass(frozen=True)
class Limits:
    """Sizes of an engine that a plan's buffers depend on: rows of a round, tokens of a sequence, KV blocks and their positions."""

    max_num_seqs: int
    max_model_len: int
    num_blocks: int
    block_size: int


@dataclass(frozen=True, eq=False, repr=False)
class Speculation:
    """A plan, ready to run. `drafter` is None for plain decoding; `draft_kv` is a draft model's.

    stops_early   whether the host decides in the middle of a round how far drafting goes
    captures      whether its rounds may be captured as graphs
    """

    plan: Plan
    exits: tuple[Exit, ...]
    draft_model: DecoderLike | None
    stages: Stages
    judge: Judge
    drafter: Drafter | None
    kv: PagedKV
    draft_kv: PagedKV | None
    hidden: HiddenBuffer
    stops_early: bool
    captures: bool

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.plan})"

    @property
    def kv_owners(self) -> tuple[object, ...]:
        """Whose KV the blocks hold besides the model's own: what is cached is of no use to others."""
        return *self.exits, self.draft_model

    def release(self) -> None:
        """Gives the KV memory back."""
        self.kv.release()
        if self.draft_kv is not None:
            self.draft_kv.release()

    def memory(self) -> dict[str, int]:
        """Bytes allocated, once, by what they are for."""
        return {
            "kv_bytes": self.kv.num_bytes,
            "hidden_bytes": self.hidden.num_bytes,
            "exit_bytes": sum(exit_.num_bytes for exit_ in self.exits),
            "drafter_bytes": self.drafter.num_bytes if self.drafter is not None else 0,
            "probability_bytes": self.judge.num_bytes if isinstance(self.judge, RejectionJudge) else 0,
        }


def total_memory(speculations: Iterable[Speculation]) -> dict[str, int]:
    """Speculation.memory() of several that share KV."""
    each, total = list(speculations), Counter[str]()
    for speculation in each:
        total.update(speculation.memory())
    total["kv_bytes"] = max(speculation.kv.num_bytes for speculation in each)
    return dict(total)


def make_speculation(
    decoder: DecoderLike,
    limits: Limits,
    speculative: SpeculativeConfig | None,
    plan: Plan | None,
    exits: Sequence[Exit],
    draft_model: DecoderLike | None,
    counts: PassCounts,
    draft_counts: PassCounts,
    kv: PagedKV | None,
    draft_kv: PagedKV | None,
) -> Speculation:
    """Raises ConfigError for what does not fit together, before anything is allocated.

    counts, draft_counts   where passes of the model, and of a draft model, are counted
    kv, draft_kv           what there is already: it is taken over where it serves
    """
    model = decoder.config
    plan = plan or (speculative.plan(model.num_layers) if speculative else PLAIN)
    _check(plan, speculative, exits, decoder, draft_model, limits)
    num_kv_layers = model.num_layers + sum(exit_.num_kv_layers for exit_ in exits)
    kv = kv if kv is not None and kv.num_layers >= num_kv_layers else _make_kv(decoder, num_kv_layers, limits)
    if draft_model is not None:
        draft_kv = draft_kv or _make_kv(draft_model, draft_model.config.num_layers, limits)
    hidden = HiddenBuffer(len(Tier), limits.max_num_seqs, plan.window, model.hidden_size, decoder.dtype, decoder.device)
    judge: Judge = CoupledJudge(speculative.check.confidence if speculative and speculative.check else None)
    if speculative and speculative.acceptance == "rejection":
        judge = RejectionJudge(limits.max_num_seqs, plan.window, model.vocab_size, decoder.device, plan.check_layer is not None)
    stages = Stages(decoder, model.num_layers, kv, hidden, counts, exits)
    drafter = None
    if not plan.is_plain:
        draft = speculative.draft if speculative else DraftConfig(layer=max(1, plan.draft_layer))
        confidence = speculative.draft_confidence if speculative else None
        drafter = _drafter(draft, plan, confidence, stages, judge, limits, draft_model, draft_kv, draft_counts)
    stops_early, captures = (speculative.draft_confidence is not None, speculative.graphs) if speculative else (False, True)
    return Speculation(plan, tuple(exits), draft_model, stages, judge, drafter, kv, draft_kv, hidden, stops_early, captures)


def _make_kv(decoder: DecoderLike, num_layers: int, limits: Limits) -> PagedKV:
    model = decoder.config
    return PagedKV(num_layers, limits.num_blocks, limits.block_size, model.num_kv_heads, model.head_dim, decoder.dtype, decoder.device)


def _check(
    plan: Plan, speculative: SpeculativeConfig | None, exits: Sequence[Exit], decoder: DecoderLike, draft_model: DecoderLike | None, limits: Limits
) -> None:
    num_layers = decoder.config.num_layers
    if plan.top_layer > num_layers:
        raise ConfigError(f"{plan} has an exit at layer {plan.top_layer} of a model of {num_layers}")
    read = set() if plan.is_plain else {plan.draft_layer, plan.check_layer} - {num_layers}
    if stray := [exit_.layer for exit_ in exits if exit_.layer not in read]:
        raise ConfigError(f"{plan} does not read trained exits at layers {stray}; pass only those that it reads, below layer {num_layers}")
    trained = {exit_.layer for exit_ in exits}
    for name, layer in speculative.trained_layers().items() if speculative else ():
        if layer not in trained:
            raise ConfigError(f"speculative.{name} is an adapter, but none for layer {layer} was given; pass it in `exits`, or use LLM, which loads it")
    if plan.window > limits.max_model_len:
        raise ConfigError(
            f"a round of {plan} takes {plan.window} places, more than max_model_len={limits.max_model_len}; lower num_draft_tokens, num_checks or num_branches"
        )
    if speculative is not None and not plan.is_plain:
        _check_shape(plan, speculative)
    wants_model = speculative is not None and speculative.draft.kind == "model"
    if wants_model != (draft_model is not None):
        raise ConfigError("draft.kind='model' needs `draft_model`" if wants_model else "`draft_model` is given, but draft.kind is not 'model'")
    if draft_model is not None:
        check_draft_model(decoder, draft_model, limits.max_model_len)


def _check_shape(plan: Plan, speculative: SpeculativeConfig) -> None:
    """A plan of the caller's must be one that the drafter can draft for; those that SpeculativeConfig gives are."""
    kind = speculative.draft.kind
    if plan.draft_layer and kind in ("ngram", "model"):
        raise ConfigError(f"{plan} resumes at layer {plan.draft_layer}, but draft.kind={kind!r} leaves nothing there; its draft_layer must be 0")
    if plan.num_branches > 1 and (kind in ("ngram", "hybrid") or speculative.acceptance == "rejection" or speculative.draft_confidence is not None):
        raise ConfigError(f"{plan} has branches, which need draft.kind exit, adapter or model, acceptance='coupled' and no draft_confidence")


def check_draft_model(target: DecoderLike, draft_model: DecoderLike, max_model_len: int) -> None:
    """Raises ConfigError if the model cannot draft for the target, or cannot be of use."""
    if draft_model.max_positions < max_model_len:
        raise ConfigError(
            f"speculative.draft.path: the draft model attends to {draft_model.max_positions} positions, but engine.max_model_len is {max_model_len};"
            f" lower it to {draft_model.max_positions}"
        )
    if draft_model.device != target.device:
        raise ConfigError(f"speculative.draft.path: the draft model is on {draft_model.device}, the target on {target.device}")
    sizes = [_num_parameters(decoder) for decoder in (draft_model, target)]
    if sizes[0] > sizes[1]:
        raise ConfigError(
            f"speculative.draft.path: the draft model is larger than the target ({sizes[0] / 1e6:.0f} M and {sizes[1] / 1e6:.0f} M parameters);"
            " choose a smaller one"
        )


def _num_parameters(decoder: DecoderLike) -> int:
    """Weights that a pass reads, by the sizes of the model; norms and biases are left out."""
    config = decoder.config
    attention = config.hidden_size * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
    return config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size) + config.vocab_size * config.hidden_size


def _drafter(
    draft: DraftConfig,
    plan: Plan,
    confidence: float | None,
    stages: Stages,
    judge: Judge,
    limits: Limits,
    draft_model: DecoderLike | None,
    draft_kv: PagedKV | None,
    draft_counts: PassCounts,
) -> Drafter:
    """The drafter of `draft`, in the shape of `plan`."""
    if draft.kind == "model":
        assert draft_model is not None and draft_kv is not None
        speaker = ModelSpeaker(draft_model, draft_kv, stages.vocab_size, draft_counts)
        return ModelDrafter(speaker, judge, plan.tree, confidence)
    exit_speaker = ExitSpeaker(stages, plan.draft_layer)
    if draft.kind in ("exit", "adapter"):
        return ComputedDrafter(exit_speaker, judge, plan.tree, confidence)
    ngram = NgramDrafter(draft.ngram or NgramConfig(), judge, plan.num_draft_tokens, limits.max_num_seqs, limits.max_model_len, stages.device)
    if draft.kind == "ngram":
        return ngram
    computed = ComputedDrafter(exit_speaker, judge, DraftTree.chain(min(draft.num_exit_tokens or plan.num_draft_tokens, plan.num_draft_tokens)), confidence)
    return HybridDrafter(ngram, computed, exit_speaker)
