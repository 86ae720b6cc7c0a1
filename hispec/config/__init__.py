"""Frozen, validated settings: how the engine runs, how it speculates, and in which order it serves."""

from .base import Settings
from .engine import EngineConfig
from .plan import PLAIN, Plan
from .scheduling import SchedulingConfig
from .speculative import CheckConfig, DraftConfig, DraftKind, GoodputConfig, NgramConfig, SpeculativeConfig

__all__ = [
    "PLAIN",
    "CheckConfig",
    "DraftConfig",
    "DraftKind",
    "EngineConfig",
    "GoodputConfig",
    "NgramConfig",
    "Plan",
    "SchedulingConfig",
    "Settings",
    "SpeculativeConfig",
]
