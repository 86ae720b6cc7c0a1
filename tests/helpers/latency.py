"""What tests of latency profiles share."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {"max_num_seqs": 2, "max_window": 3}  # of the profile that they measure
