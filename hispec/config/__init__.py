"""Frozen, validated settings: how the engine runs, how it speculates, and in which order it serves."""

from .base import Settings
from .draft_kinds import KINDS, TRAITS, DraftKind, DraftKindTraits
from .engine import EngineConfig
from .plan import PLAIN, Plan
from .scheduling import SchedulingConfig
from .speculative import ACCEPTANCES, CheckConfig, DraftConfig, GoodputConfig, NgramConfig, SpeculativeConfig

__all__ = [
    "ACCEPTANCES",
    "KINDS",
    "PLAIN",
    "TRAITS",
    "CheckConfig",
    "DraftConfig",
    "DraftKind",
    "DraftKindTraits",
    "EngineConfig",
    "GoodputConfig",
    "NgramConfig",
    "Plan",
    "SchedulingConfig",
    "Settings",
    "SpeculativeConfig",
]
