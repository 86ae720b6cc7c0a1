"""Where `environment` used to be."""
from __future__ import annotations

from ..environment import BUSY_SHARE, environment, hardware_text, is_busy, peak_memory_bytes

__all__ = ["BUSY_SHARE", "environment", "hardware_text", "is_busy", "peak_memory_bytes"]
