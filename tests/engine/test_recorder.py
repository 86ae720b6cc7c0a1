"""Which controllers an engine keeps for when a plan comes back."""

from __future__ import annotations

from unittest.mock import MagicMock

from ee_models.decoder import Decoder
from hispec.config import Plan
from tests.helpers.support import make_engine


def test_those_that_learn_nothing_are_not_kept(tiny_decoder: Decoder) -> None:
    """Their keys hold models."""
    engine = make_engine(tiny_decoder, Plan(3, None, 2, 1))
    for layer in (2, 3, 4):
        engine.set_speculative({"draft": {"layer": layer}})
    assert not engine._recorder._controls
    learning = MagicMock(routes=[])
    engine._recorder.use_controller(learning, "its plan")
    assert engine._recorder.cached_controller("its plan") is learning
