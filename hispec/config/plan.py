"""The plan of a round."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError


@dataclass(frozen=True)
class Plan:
    """What one round does. `PLAIN` is plain decoding: the same round without draft and check tier.

    draft_layer        D: the draft tier runs layers [0, D); 0 = the drafter is outside of the trunk, and the
                       next tier begins at the embedding
    check_layer        C: the check tier runs layers [D, C); None = no check tier
    num_draft_tokens   K: tokens drafted per draft cycle, one after the other
    num_checks         R: draft cycles, each ended by a check, before one verify (1 without a check tier)
    num_branches       B: chains of K drafts per cycle, that begin with the drafter's B likeliest tokens; 1 =
                       one chain
    """

    draft_layer: int = 0
    check_layer: int | None = None
    num_draft_tokens: int = 0
    num_checks: int = 1
    num_branches: int = 1

    def __post_init__(self) -> None:
        if self.check_layer is not None and self.num_draft_tokens < 1:
            raise ConfigError(
                "a check tier needs num_draft_tokens >= 1; leave `check` out for plain decoding"
            )
        if self.num_draft_tokens == 0 and self.draft_layer != 0:
            raise ConfigError(
                f"draft_layer={self.draft_layer} needs num_draft_tokens >= 1; plain decoding has"
                " draft_layer=0"
            )
        if self.check_layer is not None and self.check_layer < self.draft_layer:
            raise ConfigError(f"check_layer={self.check_layer} lies below draft_layer={self.draft_layer}")
        if self.check_layer is None and self.num_checks != 1:
            raise ConfigError(f"num_checks={self.num_checks} needs a check tier; without one it must be 1")
        if self.num_branches != 1 and self.num_draft_tokens < 1:
            raise ConfigError(
                f"num_branches={self.num_branches} needs num_draft_tokens >= 1; plain decoding has one branch"
            )

    @property
    def window(self) -> int:
        """Places that one round can process in a row: R * (B * K + 1)."""
        return self.num_checks * (self.num_branches * self.num_draft_tokens + 1)

    @property
    def top_layer(self) -> int:
        """The layer at which verify resumes."""
        return self.draft_layer if self.check_layer is None else self.check_layer

    @property
    def is_plain(self) -> bool:
        return self.num_draft_tokens == 0


PLAIN = Plan()
