"""What can only run on a CPU that has matrix tiles: its instructions end a process on any other."""

from __future__ import annotations

import pytest

from ee_models.kernels.numba_narrow import multiplies_bfloat16
from ee_models.kernels.numba_tiles import can_multiply

needs_tiles = pytest.mark.skipif(not can_multiply(), reason="needs a CPU with AMX, and Linux")
needs_bfloat16 = pytest.mark.skipif(
    not multiplies_bfloat16(), reason="needs a CPU with AMX, and Linux, or AMD's with AVX512-BF16"
)
