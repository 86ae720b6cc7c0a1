"""Law 6: EOS, stop strings and max_tokens are honoured at every offset of an accepted run, and everything
ends at one token."""

from __future__ import annotations

import pytest

from hispec.config import Plan
from hispec.engine import Engine
from hispec.outputs import Delta
from hispec.sampling_params import SamplingParams
from tests.helpers.scripted import ScriptedDecoder, one_hot_script, true_next
from tests.helpers.support import make_engine

PROMPT = [3, 11]
PLANS = [Plan(), Plan(2, None, 4, 1), Plan(2, 5, 4, 1), Plan(2, 5, 1, 3)]


def truth(length: int) -> list[int]:
    tokens = list(PROMPT)
    while len(tokens) < len(PROMPT) + length:
        tokens.append(true_next(len(tokens) - 1, tokens[-1]))
    return tokens[len(PROMPT) :]


TRUTH = truth(20)


class SpellOut:
    """Text of a token: its number and a comma. Stops where told, and holds back what may begin a stop, as the
    real one does."""

    def __init__(self, stop: str | None = None) -> None:
        self.text, self.released, self.stop, self.end = "", 0, stop, None

    def append(self, token_id: int, may_stop: bool) -> str | None:
        self.text += f"{token_id},"
        if self.stop and self.end is None and self.stop in self.text:
            self.end = self.text.index(self.stop)
            return self.stop
        return None

    def release(self, final: bool) -> str:
        held = len(self.stop) - 1 if self.stop and not final else 0
        end = self.end if self.end is not None else max(self.released, len(self.text) - held)
        piece, self.released = self.text[self.released : end], end
        return piece


def scripted_engine(plan: Plan, eos: tuple[int, ...] = ()) -> Engine:
    """Exits are always right, so that every round commits a full window."""
    return make_engine(
        ScriptedDecoder(one_hot_script(lambda exit_layer, position, token: true_next(position, token))),
        plan,
        eos=eos,
    )


def finish(
    engine: Engine, params: SamplingParams, text: SpellOut | None = None
) -> tuple[list[int], str, list[Delta]]:
    engine.add_request(PROMPT, params, text=text)
    deltas: list[Delta] = []
    while engine.has_unfinished():
        deltas += engine.step()
        engine.check()
    tokens = [token for delta in deltas for token in delta.token_ids]
    last = deltas[-1]
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert (
        last.metrics is not None and last.metrics.num_output_tokens == len(tokens) == engine.stats()["tokens"]
    )
    logprobs = [entry for delta in deltas for entry in delta.logprobs or []]
    assert [entry.token_id for entry in logprobs] == tokens, "logprobs end elsewhere"
    tiers = [tier for delta in deltas for tier in delta.tiers or []]
    assert len(tiers) == (len(tokens) if params.tiers else 0), "tiers end elsewhere"
    assert engine.stats()["kv_blocks_used"] == 0
    return tokens, "".join(delta.text for delta in deltas), deltas


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("offset", range(12))
def test_eos_at_every_offset(plan: Plan, offset: int) -> None:
    eos = TRUTH[offset]
    end = TRUTH.index(eos) + 1
    engine = scripted_engine(plan, eos=(eos,))
    tokens, text, deltas = finish(
        engine, SamplingParams(temperature=0.0, max_tokens=20, logprobs=1, tiers=True), SpellOut()
    )
    assert tokens == TRUTH[:end] and text == "".join(f"{token}," for token in tokens)
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", eos)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("offset", range(1, 12))
def test_max_tokens_at_every_offset(plan: Plan, offset: int) -> None:
    tokens, text, deltas = finish(
        scripted_engine(plan),
        SamplingParams(temperature=0.0, max_tokens=offset, logprobs=0, tiers=True),
        SpellOut(),
    )
    assert tokens == TRUTH[:offset] and text == "".join(f"{token}," for token in tokens)
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("length", None)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("offset", range(12))
def test_stop_string_at_every_offset(plan: Plan, offset: int) -> None:
    stop = f",{TRUTH[offset]}," if offset else f"{TRUTH[0]},"
    whole = "".join(f"{token}," for token in TRUTH)
    tokens, text, deltas = finish(
        scripted_engine(plan),
        SamplingParams(temperature=0.0, max_tokens=20, stop=[stop], logprobs=0, tiers=True),
        SpellOut(stop),
    )
    assert text == whole[: whole.index(stop)]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop)
    assert tokens == TRUTH[: len(tokens)] and "".join(f"{token}," for token in tokens).endswith(stop)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_stop_on_the_last_allowed_token_is_a_stop(plan: Plan) -> None:
    for offset in range(8):
        eos = TRUTH[offset]
        if TRUTH.index(eos) < offset:
            continue
        _, _, deltas = finish(
            scripted_engine(plan, eos=(eos,)),
            SamplingParams(temperature=0.0, max_tokens=offset + 1, logprobs=0),
        )
        assert deltas[-1].finish_reason == "stop"


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_stop_token_ids_min_tokens_and_ignore_eos(plan: Plan) -> None:
    stop, eos = TRUTH[6], TRUTH[2]
    params = SamplingParams(
        temperature=0.0, max_tokens=20, stop_token_ids=[stop], ignore_eos=True, logprobs=0
    )
    tokens, _, deltas = finish(scripted_engine(plan, eos=(eos,)), params)
    assert tokens == TRUTH[:7] and deltas[-1].stop_reason == stop
    # With min_tokens the stop token itself is forbidden until then: the output goes another way, and is long
    # enough.
    params = SamplingParams(temperature=0.0, max_tokens=20, min_tokens=5, logprobs=0)
    tokens, _, _ = finish(scripted_engine(plan, eos=(eos,)), params)
    assert tokens[:2] == TRUTH[:2] and eos not in tokens[:5] and len(tokens) >= 5


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_max_model_len_ends_a_request_without_max_tokens(plan: Plan) -> None:
    engine = make_engine(
        ScriptedDecoder(one_hot_script(lambda _, position, token: true_next(position, token))),
        plan,
        max_model_len=12,
    )
    tokens, _, deltas = finish(engine, SamplingParams(temperature=0.0, max_tokens=None, logprobs=0))
    assert tokens == TRUTH[:10] and deltas[-1].finish_reason == "length"


def test_logprobs_are_the_full_models(tiny_decoder: object, tiny_reference: object) -> None:
    import torch

    engine = make_engine(tiny_decoder, Plan(3, 8, 2, 2))
    engine.add_request([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=16, logprobs=3))
    deltas = [delta for _ in range(40) for delta in (engine.step() if engine.has_unfinished() else [])]
    entries = [entry for delta in deltas for entry in delta.logprobs or []]
    tokens = [entry.token_id for entry in entries]
    with torch.inference_mode():
        logits = tiny_reference(torch.tensor([[5, 6, 7, *tokens]])).logits[0, 2:-1]
    wanted = logits.log_softmax(-1)
    assert len(entries) == 16
    for place, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(float(wanted[place, entry.token_id]), abs=2e-3)
        assert (
            list(entry.top) == wanted[place].topk(3).indices.tolist()
            and next(iter(entry.top)) == entry.token_id
        )


def test_a_failing_text_hook_ends_its_request_and_no_other() -> None:
    class Broken(SpellOut):
        def append(self, token_id: int, may_stop: bool) -> str | None:
            raise RuntimeError("no such character")

    engine = scripted_engine(Plan(2, 5, 1, 3))
    bad = engine.add_request(PROMPT, SamplingParams(temperature=0.0, max_tokens=8), text=Broken())
    good = engine.add_request(PROMPT, SamplingParams(temperature=0.0, max_tokens=8), text=SpellOut())
    deltas = [delta for _ in range(20) if engine.has_unfinished() for delta in engine.step()]
    engine.check()
    ends = {delta.request_id: delta for delta in deltas if delta.finish_reason}
    assert ends[bad].finish_reason == "error" and "no such character" in (ends[bad].error or "")
    assert ends[good].finish_reason == "length"
