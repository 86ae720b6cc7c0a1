"""What can only run on a CPU that has products in bfloat16: its instructions end a process on any other."""

from __future__ import annotations

import pytest

from ee_models.kernels.numba_narrow import multiplies_bfloat16

needs_bfloat16 = pytest.mark.skipif(
    not multiplies_bfloat16(), reason="needs a CPU with AMX, and Linux, or AMD's with AVX512-BF16"
)
