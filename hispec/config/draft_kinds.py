"""The kinds of drafters and their traits, which all other code reads instead of comparing kinds by name.

Another kind is added by `hispec.drafters.make.register_drafter` (docs/extending.md), which completes both
tables here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from .base import one_of

# The kinds that come with HiSpec; registered ones follow.
KINDS: list[str] = ["exit", "adapter", "ngram", "hybrid", "model"]
OWN_KINDS = tuple(KINDS)  # before any is registered
DraftKind = Annotated[str, one_of(KINDS)]


@dataclass(frozen=True)
class DraftKindTraits:
    """What is true of all drafters of a kind.

    fields       fields of DraftConfig that it takes, besides `kind`
    required     those of them that must be given
    in_trunk     it runs layers [0, D) of the model, and the next tier resumes from its hidden states; the
                 others leave nothing, and the next tier begins at the embedding (D = 0)
    looks_up     it proposes what it finds in texts
    computes     a model or an exit computes drafts, one after the other, and their probabilities
    has_model    it has a model of its own, named by `path`, with KV of its own
    is_trained   its exit is a trained one, unless `exit` says otherwise
    has_costs    latency profiles tell what its drafts cost, so that control='goodput' can choose it
    """

    fields: frozenset[str]
    required: frozenset[str] = frozenset()
    in_trunk: bool = False
    looks_up: bool = False
    computes: bool = True
    has_model: bool = False
    is_trained: bool = False
    has_costs: bool = True

    @property
    def is_mixed(self) -> bool:
        """Whether some of its drafts are looked up and others computed."""
        return self.looks_up and self.computes

    @property
    def may_branch(self) -> bool:
        """Whether it can draft a tree, for which it must rank tokens."""
        return self.computes and not self.looks_up


_LAYER, _PATH = frozenset({"layer"}), frozenset({"path"})
TRAITS: dict[str, DraftKindTraits] = {
    "ngram": DraftKindTraits(frozenset({"ngram"}), looks_up=True, computes=False),
    "exit": DraftKindTraits(_LAYER, required=_LAYER, in_trunk=True),
    "adapter": DraftKindTraits(_LAYER | _PATH, required=_LAYER, in_trunk=True, is_trained=True),
    "hybrid": DraftKindTraits(
        _LAYER | _PATH | {"ngram", "exit", "num_exit_tokens"},
        required=_LAYER,
        in_trunk=True,
        looks_up=True,
        is_trained=True,
    ),
    "model": DraftKindTraits(_PATH, required=_PATH, has_model=True),
}
