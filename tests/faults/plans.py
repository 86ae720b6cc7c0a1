"""Plans of every kind, for engines that something goes wrong in."""

from __future__ import annotations

from typing import Any

from ee_models.decoder import Decoder
from hispec.config import Plan
from hispec.engine import Engine
from tests.helpers.drafters import ALL, drafter_engine
from tests.helpers.support import make_engine

_BY_SETTINGS = ("ngram", "ngram checks", "hybrid", "model", "exit gated", "tree", "tree checks")
PLANS: dict[str, dict[str, Any] | Plan] = {
    "plain": Plan(),
    "exit": Plan(3, None, 3, 1),
    "three tiers": Plan(3, 6, 2, 2),
    **{name: ALL[name] for name in _BY_SETTINGS},
}


def make(decoder: Decoder, plan: str, **options: Any) -> Engine:
    """A small engine of PLANS[plan]; its draft model is the model itself."""
    values = PLANS[plan]
    options = {"max_num_seqs": 3, "block_size": 4, "num_kv_blocks": 60, **options}
    if isinstance(values, Plan):
        return make_engine(decoder, values, **options)
    return drafter_engine(decoder, values, decoder, **options)
