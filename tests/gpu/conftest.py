"""All kernels of this folder sum in the order that is in their code."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _sums_in_our_order(request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("interpreter")
