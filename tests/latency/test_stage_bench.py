"""What is run when a stage is timed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from cache import host_kv
from cache.paged_kv import PagedKV
from cache.view import BatchView
from ee_models.decoder import Decoder
from ee_models.exits import AdapterExit
from ee_models.fused_pass import FusedPasses, PassProgram
from ee_models.pass_steps import Kind, TokenPlaces
from hispec.decoding.batch import RoundBatch, Span
from hispec.decoding.draft_tree import DraftTree
from hispec.decoding.stages import Pass, Stages
from hispec.drafters.lookup_numba import LookupIndex
from hispec.measure.stage_bench import Rig
from hispec.sampling.logits import Logits

followers: list[list[tuple[int, int]]] = []  # of the whole model, in every call of linked passes: layers


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """(first layer, last + 1, positions) of every pass from now on."""
    seen: list[tuple[int, int, int]] = []
    followers.clear()
    ran: list[tuple[list[int], int]] = []  # layers and positions of every call
    run_program = FusedPasses.run

    def run(
        self: FusedPasses, program: PassProgram, source: Any, kv: PagedKV, view: BatchView, *rest: Any
    ) -> Any:
        layers = [step.kv_layer for step in program.steps if step.kind is Kind.LAYER]
        ran.append((layers, view.num_tokens))
        return run_program(self, program, source, kv, view, *rest)

    for name in ("compute", "advance"):
        monkeypatch.setattr(Stages, name, watched(getattr(Stages, name), seen, ran))
    run_linked = Stages.run_linked

    def linked(self: Stages, passes: dict[int, Pass], linked: Any, batch: Any, places: Any, link: Any) -> Any:
        assert int(places.positions.min()) >= 29 and int(places.positions.max()) < 46
        assert places.cu_q_lens[-1] == len(places.positions) == len(set(places.slots.tolist()))
        counts = run_linked(self, passes, linked, batch, places, link)
        assert passes[0] == Pass(0, 9), "the whole model comes first"
        for count in counts.values():
            assert (count.passes, count.tokens) == (1, len(places.positions))
        for number, over in passes.items():
            steps = linked[number].program.steps
            layers = [step.kv_layer for step in steps if step.kind is Kind.LAYER]
            assert layers == list(range(over.lo, over.hi))
        followers.append([(over.lo, over.hi) for number, over in passes.items() if number])
        seen.append((*followers[-1][-1], len(places.positions)))
        return counts

    monkeypatch.setattr(Stages, "run_linked", linked)
    prefill = Rig._prefill

    def prefill_first(self: Rig, context: list[int]) -> None:
        prefill(self, context)
        monkeypatch.setattr(FusedPasses, "run", run)

    monkeypatch.setattr(Rig, "_prefill", prefill_first)
    return seen


def watched(
    run: Callable[..., Any], seen: list[tuple[int, int, int]], ran: list[tuple[list[int], int]]
) -> Callable[..., Any]:
    def wrapper(self: Stages, batch: RoundBatch, span: Span, over: Pass) -> Any:
        view, before = span.view, self.counts.copy()
        assert int(view.positions.min()) >= 29 and view.max_context_len <= 46, (
            "a stage runs right after the context"
        )
        out = run(self, batch, span, over)
        layers = over.hi - over.lo
        assert ran.pop() == (list(range(over.lo, over.hi)), view.num_tokens) and not ran
        ran_now = self.counts.since(before)
        assert (ran_now.layer_passes, ran_now.layer_positions) == (layers, layers * view.num_tokens)
        seen.append((over.lo, over.hi, view.num_tokens))
        return out

    return wrapper


def test_a_stage_is_timed_over_its_own_layers_and_positions(
    tiny_decoder: Decoder, passes: list[tuple[int, int, int]]
) -> None:
    rig = Rig(tiny_decoder, [], list(range(30)), 3, 17)
    for run, expected in (
        (rig.plain(2), (0, 9, 2)),
        (rig.draft(3, 1, 4), (0, 4, 3)),
        (rig.first(3, 4), (0, 4, 3)),
        (rig.draft(2, 8, 4), (0, 4, 16)),
        (rig.draft(2, 1, None), (0, 9, 2)),
        (rig.fill(1, 1, 4), (0, 4, 1)),
        (rig.fill(3, 5, 4), (0, 4, 15)),
        (rig.check(3, 5, 2, 6), (2, 6, 15)),
        (rig.check(2, 1, 2, 6), (2, 6, 2)),
        (rig.check(2, 4, 0, 6), (0, 6, 8)),
        (rig.verify(3, 16, 6), (6, 9, 48)),
        (rig.verify(1, 1, 6), (6, 9, 1)),
        (rig.verify(2, 3, 0), (0, 9, 6)),
    ):
        passes.clear()
        assert run is not None
        run()
        run()
        assert passes == [expected] * 2
    passes.clear()
    for run in (rig.lookup(2, 6), rig.shadow(3, 4, 2)):
        run()
    assert not passes, "no layers are run to look up, or to read hidden states that are there"


def test_passes_are_timed_after_what_a_round_has_before_them(
    tiny_decoder: Decoder, passes: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that caches hold what they hold there. Each pass has its number as its time here."""
    rig, linked = Rig(tiny_decoder, [], list(range(30)), 3, 17), Stages.run_linked

    def numbered(*call: Any) -> Any:
        counts = linked(*call)
        return {number: replace(count, seconds=1e-3 * number) for number, count in counts.items()}

    monkeypatch.setattr(Stages, "run_linked", numbered)
    first, again = rig.first(3, 4), (rig.draft(3, 1, 4), rig.fill(3, 5, 4))
    whole, later = (rig.plain(2), rig.verify(2, 3, 0)), (rig.check(2, 4, 4, 6), rig.verify(2, 3, 4))
    assert first is not None and first() == pytest.approx(1.0) and followers == [[(0, 4)]]
    assert [run() for run in again] == [pytest.approx(2.5)] * 2 and followers[1:] == [3 * [(0, 4)]] * 2
    assert rig.check(2, 4, 0, 6)() == pytest.approx(2.5) and followers.pop() == 3 * [(0, 6)]
    assert [run() for run in whole] == [pytest.approx(1.0)] * 2 and followers[3:] == [[(0, 9)]] * 2
    assert [run() for run in later] == [pytest.approx(2.0)] * 2
    assert followers[5:] == [[(0, 4), (4, 6)], [(0, 4), (4, 9)]]


def test_every_row_of_a_rig_has_the_context(tiny_decoder: Decoder) -> None:
    """So that a draft pass of any row says what the model's exit says after this very context."""
    context = [7, 3, 200, 41, 5, 99, 12, 64] * 4
    rig = Rig(tiny_decoder, [], context, 3, 4)
    batch, chain = rig._batch(3, 4), DraftTree.chain(0)
    said = []
    with torch.inference_mode():
        for row in range(3):
            span = rig._stages.select(
                batch,
                chain,
                torch.zeros(3, dtype=torch.int64),
                torch.zeros(1, dtype=torch.int64),
                (torch.arange(3) == row).long(),
            )
            said.append(rig._stages.compute(batch, span, Pass(0, 9)).wide())
    kv = PagedKV(
        9,
        4,
        8,
        tiny_decoder.config.num_kv_heads,
        tiny_decoder.config.head_dim,
        tiny_decoder.dtype,
        tiny_decoder.device,
    )
    table, positions = torch.arange(4).unsqueeze(0), torch.arange(32)
    view = BatchView(positions, positions, table, torch.tensor([0, 32]), 32, 32)
    with torch.inference_mode():
        expected = tiny_decoder.logits(
            tiny_decoder.run_layers(tiny_decoder.embed(torch.tensor(context)), 0, 9, kv, view)[-1:], 9
        )
    assert all(torch.equal(logits, expected) for logits in said)


def test_what_a_timed_lookup_reads_stays_until_it_is_gone(tiny_decoder: Decoder) -> None:
    """It goes by address: the index has no other owner than what times it."""
    rig = Rig(tiny_decoder, [], list(range(30)), 3, 17)
    kept: list[weakref.ref[LookupIndex]] = []
    compiled = LookupIndex.compiled

    def watched(self: LookupIndex, rows: torch.Tensor) -> Any:
        kept.append(weakref.ref(self))
        return compiled(self, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LookupIndex, "compiled", watched)
        run = rig.lookup(2, 6)
    gc.collect()
    (index,) = kept
    assert index() is not None and run() is not None
    del run
    gc.collect()
    assert index() is None


def test_along_writes_the_exits_kv_and_shadow_says_what_the_exit_says(
    tiny_decoder: Decoder, exits: list[AdapterExit]
) -> None:
    rig = Rig(tiny_decoder, exits, [1, 2, 3, 4] * 5, 2, 4, written=())
    of_exit = rig._kv.data[9]
    places = [row * 32 + 19 + column for row in range(2) for column in range(3)]
    of_exit.zero_()
    rig.along(2, 3, 2)()
    assert sorted(set(of_exit[0].flatten(1).any(-1).nonzero().flatten().tolist())) == places
    before = of_exit.clone()
    of_exit.zero_()
    rig.shadow(2, 3, 2)()
    assert torch.equal(of_exit, before), "an exit that is read keeps what it would have kept anyway"


def test_a_pass_that_is_timed_writes_no_kv_of_exits_on_its_way(
    tiny_decoder: Decoder, exits: list[AdapterExit]
) -> None:
    for written, expected in (((), False), (None, True)):
        rig = Rig(tiny_decoder, exits, [1, 2, 3, 4] * 5, 2, 4, written=written)
        rig._kv.data[9].zero_()
        rig.verify(2, 2, 0)()
        assert bool(rig._kv.data[9].any()) == expected


@pytest.mark.parametrize("rows", [1, 2])
def test_a_rig_swaps_all_that_it_has_though_pinned_memory_comes_in_powers_of_two(
    tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    held = host_kv._bytes_held
    monkeypatch.setattr(host_kv, "_bytes_held", lambda kv, num: 1 << (held(kv, num) - 1).bit_length())
    rig = Rig(tiny_decoder, [], [1, 2, 3] * 43, rows, 4)
    before = rig._kv.data.clone()
    rig.swap(128)()
    assert torch.equal(rig._kv.data, before)


def test_prefill_and_swap_leave_what_was_there(tiny_decoder: Decoder, exits: list[AdapterExit]) -> None:
    rig = Rig(tiny_decoder, exits, [1, 2, 3, 4] * 5, 2, 4)
    before = rig._kv.data.clone()
    rig.swap(18)()
    assert torch.equal(rig._kv.data, before)
    rig._kv.data[:, :, 12:19] = 0.0
    rig.prefill(7)()
    torch.testing.assert_close(rig._kv.data, before)


def test_the_memory_of_a_rig_is_laid_out_for_other_contexts(
    tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tiny_decoder, [], list(range(40)), 4, 8)
    seen: list[tuple[int, int, int]] = []
    compute, run_linked = Stages.compute, Stages.run_linked

    def see(view: BatchView | TokenPlaces) -> None:
        seen.append((int(view.positions.min()), len(set(view.slots.tolist())), len(view.positions)))

    def watched(self: Stages, batch: RoundBatch, span: Span, over: Pass) -> Logits:
        see(span.view)
        return compute(self, batch, span, over)

    def linked(self: Stages, passes: Any, linked: Any, batch: Any, places: TokenPlaces, link: Any) -> Any:
        see(places)
        return run_linked(self, passes, linked, batch, places, link)

    monkeypatch.setattr(Stages, "compute", watched)
    monkeypatch.setattr(Stages, "run_linked", linked)
    for is_linked in (True, False):
        if not is_linked:
            monkeypatch.setattr(Stages, "link", lambda *_: None)
        rig.laid_out(10, 4).verify(4, 2, 0)()
        rig.laid_out(80, 2).verify(2, 8, 0)()
        rig.verify(1, 1, 0)()
    assert seen == [(9, 8, 8), (79, 16, 16), (39, 1, 1)] * 2
    with pytest.raises(
        ValueError, match="1 rows of 200 positions and a window of 8 do not fit into 12 blocks"
    ):
        rig.laid_out(200, 1)
    with pytest.raises(ValueError, match="3 rows of 80 positions"):
        rig.laid_out(80, 3)
    with pytest.raises(ValueError, match="5 rows of 10 positions"):
        rig.laid_out(10, 5)
