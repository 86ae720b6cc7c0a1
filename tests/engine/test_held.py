"""Requests whose Deltas nobody wants before they have ended."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from ee_models.decoder import Decoder
from hispec.engine import Engine
from hispec.errors import RequestError
from hispec.outputs import Delta
from hispec.sampling_params import SamplingParams
from tests.helpers.support import make_engine

PARAMS = SamplingParams(temperature=0.0, max_tokens=8)


def deltas_of(engine: Engine) -> dict[str, list[Delta]]:
    found: dict[str, list[Delta]] = {}
    for _ in range(100):
        for delta in engine.step():
            found.setdefault(delta.request_id, []).append(delta)
        engine.check()
        if not engine.has_unfinished():
            return found
    raise AssertionError("what has ended was not told")


@pytest.mark.parametrize("is_static", [False, True])
def test_they_come_as_one_and_those_of_streams_as_they_come(tiny_decoder: Decoder, is_static: bool) -> None:
    engine = make_engine(tiny_decoder, is_static=is_static, max_run_ms=0.0)
    for name in ("stream", "held", "held with logprobs", "held with tiers"):
        more = {"logprobs": 1} if "logprobs" in name else {"tiers": True} if "tiers" in name else {}
        params = PARAMS.model_copy(update=more)
        engine.add_request([5, 6, 7], params, name, is_stream=not name.startswith("held"))
    found = deltas_of(engine)
    tokens = {name: [token for delta in each for token in delta.token_ids] for name, each in found.items()}
    assert len(set(map(tuple, tokens.values()))) == 1 and len(tokens["held"]) == 8
    assert len(found["held"]) == 1 < min(len(found[name]) for name in found if name != "held")
    (held,) = found["held"]
    assert held.finish_reason == "length" and held.metrics is not None
    assert held.metrics.num_output_tokens == 8
    assert len([entry for each in found["held with logprobs"] for entry in each.logprobs or []]) == 8


def test_one_that_is_aborted_gives_what_it_had_or_nothing(tiny_decoder: Decoder) -> None:
    engine = make_engine(tiny_decoder, max_run_ms=0.0)
    for name in ("told", "silent"):
        engine.add_request([5, 6, 7], PARAMS, name, is_stream=False)
    for _ in range(4):
        assert engine.step() == []
    engine.abort(["told"])
    engine.abort(["silent"], notify=False)
    (delta,) = engine.step()
    assert (delta.request_id, delta.finish_reason) == ("told", "abort") and 0 < len(delta.token_ids) < 8
    assert not engine.has_unfinished()
    engine.add_request([5, 6, 7], PARAMS, "told", is_stream=False)
    assert len(deltas_of(engine)["told"][0].token_ids) == 8


def test_drained_and_closed_engines_leave_none_behind(tiny_decoder: Decoder) -> None:
    engine = make_engine(tiny_decoder, max_run_ms=0.0)
    for name in ("one", "two"):
        engine.add_request([5, 6, 7], PARAMS, name, is_stream=False)
    engine.step()
    drained = [token for delta in engine.drain() if delta.request_id == "one" for token in delta.token_ids]
    assert len(drained) == 8 and not engine.has_unfinished()
    engine.add_request([5, 6, 7], PARAMS, "three", is_stream=False)
    engine.step()
    engine.close()
    assert not engine.has_unfinished()


@pytest.mark.parametrize("twice", [False, True])
def test_an_abort_that_was_interrupted_is_completed_by_the_next_step(
    tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch, twice: bool
) -> None:
    """Within the abort; and then within the repair after it."""
    engine = make_engine(tiny_decoder, max_run_ms=0.0)
    for name in ("aborted", "other"):
        engine.add_request([5, 6, 7], PARAMS, name, is_stream=False)
    for _ in range(3):
        engine.step()
    loop = engine._loop

    def interrupted(request: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loop, "finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.abort(["aborted"])
    if twice:  # as if the second one had come before anything was noted
        loop._is_torn = loop._is_whole = True
    assert [delta.finish_reason for delta in engine.step()] == ["abort"]
    assert list(deltas_of(engine)) == ["other"]


class Whole:
    """A text hook that is asked at the end alone."""

    at_end = True

    def append(self, token_id: int, may_stop: bool) -> str | None:
        raise AssertionError

    def release(self, final: bool) -> str:
        raise AssertionError

    def whole(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(65 + token) for token in token_ids)


def test_what_ends_with_an_error_has_its_text(tiny_decoder: Decoder) -> None:
    engine = make_engine(tiny_decoder, max_run_ms=0.0)
    engine.add_request([5, 6, 7], PARAMS, "held", text=Whole(), is_stream=False)
    for _ in range(4):
        engine.step()
    request = engine._loop.requests["held"]
    request.is_suspect = True
    engine._loop._give_up_numbers(request, math.nan)
    (delta,) = engine.step()
    assert delta.finish_reason == "error" and delta.error is not None
    assert 0 < len(delta.token_ids) == len(delta.text)


class HeldBack:
    """A text hook that holds the last token back, as that of a stop string does, until the output ends."""

    def __init__(self) -> None:
        self._text = ""

    def append(self, token_id: int, may_stop: bool) -> str | None:
        self._text += chr(65 + token_id)
        return None

    def release(self, final: bool) -> str:
        num = len(self._text) if final else len(self._text) - 1
        piece, self._text = self._text[:num], self._text[num:]
        return piece


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_ends_with_an_error_has_the_text_that_was_held_back(
    tiny_decoder: Decoder, is_stream: bool
) -> None:
    engine = make_engine(tiny_decoder, max_run_ms=0.0)
    engine.add_request([5, 6, 7], PARAMS, "held", text=HeldBack(), is_stream=is_stream)
    deltas = [delta for _ in range(4) for delta in engine.step()]
    request = engine._loop.requests["held"]
    request.is_suspect = True
    engine._loop._give_up_numbers(request, math.nan)
    deltas += engine.step()
    tokens = [token for delta in deltas for token in delta.token_ids]
    assert deltas[-1].finish_reason == "error" and (len(deltas) > 1) == is_stream
    assert tokens and "".join(delta.text for delta in deltas) == "".join(chr(65 + token) for token in tokens)


def test_stop_strings_are_refused_by_a_text_that_would_find_none(tiny_decoder: Decoder) -> None:
    engine = make_engine(tiny_decoder)
    stop = PARAMS.model_copy(update={"stop": ("x",)})
    with pytest.raises(RequestError, match=r"stop=.*this text has at_end = True.*; pass text=Incremental"):
        engine.add_request([5, 6, 7], stop, "held", text=Whole(), is_stream=False)
    engine.add_request([5, 6, 7], PARAMS, "held", text=Whole(), is_stream=False)
    assert deltas_of(engine)["held"][-1].finish_reason == "length"
