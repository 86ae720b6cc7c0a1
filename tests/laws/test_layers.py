"""Laws 3, 4 and 7: spans of layers add up, nothing is computed twice, and full-depth exits agree always."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from cache.paged_kv import PagedKV
from cache.view import BatchView
from ee_models.decoder import Decoder
from hispec.config import Plan
from hispec.sampling_params import SamplingParams
from tests.helpers.scripted import ScriptedDecoder, one_hot_script, true_next
from tests.helpers.support import PLANS, make_engine, random_prompts, run


def whole_view(length: int) -> BatchView:
    positions = torch.arange(length)
    return BatchView(
        positions, positions, torch.arange(64).unsqueeze(0), torch.tensor([0, length]), length, length
    )


def make_kv(decoder: Decoder) -> PagedKV:
    config = decoder.config
    return PagedKV(
        config.num_layers, 64, 1, config.num_kv_heads, config.head_dim, torch.float32, torch.device("cpu")
    )


def test_every_split_of_the_layers_equals_one_call(tiny_decoder: Decoder) -> None:
    """Bit for bit: hidden states and KV."""
    tokens, view = torch.tensor(random_prompts([40])[0]), whole_view(40)
    whole_kv = make_kv(tiny_decoder)
    whole = tiny_decoder.run_layers(tiny_decoder.embed(tokens), 0, 9, whole_kv, view)
    for first in range(10):
        for second in range(first, 10):
            kv = make_kv(tiny_decoder)
            hidden = tiny_decoder.embed(tokens)
            for lo, hi in ((0, first), (first, second), (second, 9)):
                hidden = tiny_decoder.run_layers(hidden, lo, hi, kv, view)
            assert torch.equal(hidden, whole) and torch.equal(kv.data, whole_kv.data), (first, second)


def test_a_prompt_leaves_the_kv_that_all_layers_leave(tiny_decoder: Decoder) -> None:
    """Of its last layer nothing else is computed: nobody reads what comes after it."""
    tokens, view = torch.tensor(random_prompts([11])[0]), whole_view(11)
    whole_kv = make_kv(tiny_decoder)
    tiny_decoder.run_layers(tiny_decoder.embed(tokens), 0, 9, whole_kv, view)
    for lo in range(9):
        kv = make_kv(tiny_decoder)
        hidden = tiny_decoder.run_layers(tiny_decoder.embed(tokens), 0, lo, kv, view)
        tiny_decoder.fill_layers(hidden, lo, 9, kv, view)
        assert torch.equal(kv.data, whole_kv.data), lo


class CountingDecoder:
    """Passes everything on, and counts (request, layer, position) by the KV that stays."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.config, self.dtype, self.device = decoder.config, decoder.dtype, decoder.device
        self.max_positions, self.kv_dtype = decoder.max_positions, decoder.kv_dtype
        self.runs: Counter[tuple[int, int, int]] = Counter()
        self.layer_positions = 0
        self.forget = False

    def embed(self, token_ids: Tensor) -> Tensor:
        self._tokens = token_ids
        return self._decoder.embed(token_ids)

    def run_layers(self, hidden: Tensor, lo: int, hi: int, kv: PagedKV, view: BatchView) -> Tensor:
        self._count(lo, hi, view)
        return self._decoder.run_layers(hidden, lo, hi, kv, view)

    def fill_layers(self, hidden: Tensor, lo: int, hi: int, kv: PagedKV, view: BatchView) -> None:
        self._count(lo, hi, view)
        self._decoder.fill_layers(hidden, lo, hi, kv, view)

    def _count(self, lo: int, hi: int, view: BatchView) -> None:
        for layer in range(lo, hi):
            for slot in view.slots.tolist():
                self.runs[layer, slot, 0] += 1
        self.layer_positions += (hi - lo) * view.num_tokens

    def logits(self, hidden: Tensor, exit_layer: int) -> Tensor:
        return self._decoder.logits(hidden, exit_layer)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_each_surviving_layer_and_position_is_computed_once(tiny_decoder: Decoder, plan: Plan) -> None:
    """In a round a column is computed at layers [0, D) once per time that it is drafted, and higher only if
    it survived the tier below: so within any one round no (layer, slot) runs again unless the check rejected
    what stood there.
    """
    decoder = CountingDecoder(tiny_decoder)
    engine = make_engine(decoder, plan, max_num_seqs=1, num_kv_blocks=40, max_run_ms=0.0)
    for prompt in random_prompts((5, 11)):
        engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=40))
    check_layer = plan.check_layer or plan.draft_layer
    while engine.has_unfinished():
        before = engine.stats()
        decoder.runs.clear()
        engine.step()
        after = engine.stats()
        committed = after["committed"] - before["committed"]
        rejected_by_check = (after["drafted"] - before["drafted"]) - (
            after["draft_kept"] - before["draft_kept"]
        )
        by_layer = Counter[int]()
        for (layer, _, _), count in decoder.runs.items():
            by_layer[layer] += count
            if layer >= check_layer:
                assert count == 1, "verify ran a position twice"
            elif count > 1:
                assert plan.num_checks > 1 and rejected_by_check > 0, (
                    "a position ran again although nothing had been rejected"
                )
        assert after["layer_positions"] - before["layer_positions"] == sum(by_layer.values())
        if committed and not after["prefill_tokens"] - before["prefill_tokens"]:
            num_drafted = after["drafted"] - before["drafted"]
            is_checked = (
                plan.check_layer is not None and num_drafted
            )  # a request's last token alone is decoded plainly
            survivors = after["tentative"] - before["tentative"] if is_checked else num_drafted + 1
            assert by_layer[plan.top_layer if plan.top_layer < 9 else 8] >= committed
            assert all(by_layer[layer] == survivors for layer in range(check_layer, 9))
            assert committed <= survivors


@pytest.mark.parametrize("plan", [Plan(9, None, 3, 1), Plan(9, 9, 2, 1), Plan(9, 9, 2, 3)], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rejection", [False, True])
def test_full_depth_exits_are_always_accepted(
    tiny_decoder: Decoder, plan: Plan, temperature: float, rejection: bool
) -> None:
    engine = make_engine(tiny_decoder, plan, rejection=rejection, num_kv_blocks=512)
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=plan.window * 8)
    run(engine, random_prompts((4, 20, 9)), params)
    stats = engine.stats()
    assert stats["accepted"] == stats["tentative"] > 0 and stats["draft_kept"] == stats["drafted"]
    assert stats["accept_length_histogram"] == [0] * plan.window + [stats["rounds"]]


@pytest.mark.parametrize("plan", [Plan(), Plan(3, None, 4, 1), Plan(2, 5, 2, 2), Plan(2, 5, 3, 1)], ids=str)
def test_always_right_exits_take_the_layer_passes_that_the_plan_predicts(plan: Plan) -> None:
    decoder = ScriptedDecoder(one_hot_script(lambda exit_layer, position, token: true_next(position, token)))
    engine = make_engine(decoder, plan)
    num_rounds = 6
    run(engine, [[3]], SamplingParams(temperature=0.0, max_tokens=num_rounds * plan.window))
    d, c = plan.draft_layer, plan.check_layer or plan.draft_layer
    per_round = plan.num_checks * ((plan.num_draft_tokens + 1) * d + (c - d)) + (9 - c)
    stats = engine.stats()
    assert stats["rounds"] == num_rounds and stats["layer_passes"] == num_rounds * per_round
