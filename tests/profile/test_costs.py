"""Costs: what is run when a stage is timed, and what is read between two widths."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cache.paged_kv import PagedKV
from cache.view import BatchView
from ee_models.checkpoint.exit_files import ExitInfo
from ee_models.checkpoint.loader import open_checkpoint
from ee_models.decoder import Decoder
from hispec.config import SpeculativeConfig
from hispec.decoding.draft_tree import DraftTree
from hispec.measure.stage_bench import Rig
from hispec.profile.candidates import Candidates
from hispec.profile.costs import Curve, grid, measure_costs
from hispec.profile.options import ProfileOptions
from hispec.profile.plans import Reach, all_plans, ngram_sizes
from hispec.profile.predict import Calibration, Predictor
from hispec.profile.record import look_up
from hispec.profile.recording import Answer, Recording, flat, said_of
from tests.helpers.adapters import loaded, make_exits

Pass = tuple[int, int, int]


def test_between_two_widths_costs_lie_on_a_line() -> None:
    curve = Curve((1, 2, 4, 8), (10.0, 12.0, 13.0, 21.0))
    assert [curve(width) for width in (1, 1.5, 2, 3, 4, 7, 8)] == [10.0, 11.0, 12.0, 12.5, 13.0, 19.0, 21.0]
    assert Curve((1,), (3.0,))(1) == 3.0
    assert curve.table.tolist() == [
        0.0,
        10.0,
        12.0,
        12.5,
        13.0,
        15.0,
        17.0,
        19.0,
        21.0,
    ], "nothing is run for nothing"


@pytest.mark.parametrize("width", [0.5, 8.1])
def test_no_cost_is_guessed_beyond_what_was_measured(width: float) -> None:
    with pytest.raises(ValueError, match=r"not measured; measured were 1 to 8"):
        Curve((1, 8), (1.0, 2.0))(width)


def test_the_grid_is_denser_where_widths_are_small() -> None:
    assert (
        grid(1) == [1]
        and grid(2) == [1, 2]
        and grid(9) == [1, 2, 3, 4, 6, 8, 9]
        and grid(33) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 33]
    )


@pytest.fixture
def passes(tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> list[Pass]:
    """(first layer, last + 1, positions) of every pass from now on."""
    seen: list[Pass] = []
    run_layers = Decoder.run_layers

    def watched(
        self: Decoder, hidden: torch.Tensor, lo: int, hi: int, kv: PagedKV, view: BatchView
    ) -> torch.Tensor:
        assert int(view.positions.min()) >= 29 and view.max_context_len <= 46, (
            "a stage runs right after the context"
        )
        seen.append((lo, hi, view.num_tokens))
        return run_layers(self, hidden, lo, hi, kv, view)

    monkeypatch.setattr(Decoder, "run_layers", lambda *args: run_layers(*args))
    rig_prefill = Rig._prefill

    def prefill(self: Rig, context: list[int]) -> None:
        rig_prefill(self, context)
        monkeypatch.setattr(Decoder, "run_layers", watched)

    monkeypatch.setattr(Rig, "_prefill", prefill)
    return seen


def test_a_stage_is_timed_over_its_own_layers_and_positions(
    tiny_decoder: Decoder, passes: list[Pass]
) -> None:
    rig = Rig(tiny_decoder, [], list(range(30)), 3, 17)
    for run, expected in (
        (rig.plain(2), (0, 9, 2)),
        (rig.draft(3, 1, 4), (0, 4, 3)),
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
        run()
        run()
        assert passes == [expected] * 2
    passes.clear()
    for run in (rig.choose(3, 1), rig.choose(3, 4), rig.probability(200), rig.lookup(2, 6)):
        run()
    assert not passes, "no layers are run to choose from logits, or to look up"


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
                torch.arange(3).unsqueeze(-1) == row,
            )
            said.append(
                rig._stages.logits(
                    rig._stages.run(rig._stages.embed(batch, span), 0, 9, batch, span), 9, span
                )
            )
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


def test_every_plan_within_the_limits_has_its_cost(
    tiny_path: Path, tiny_decoder: Decoder, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(tiny_path)
    exits = loaded(
        make_exits(tmp_path, checkpoint, [ExitInfo(layer=2), ExitInfo(layer=5, num_blocks=0)]),
        tiny_decoder,
        checkpoint,
    )
    options = ProfileOptions(max_drafts=3, max_checks=4, max_window=8)
    plans = all_plans(
        options, Candidates([2, 5], exits), SpeculativeConfig(draft={"kind": "model", "path": "itself"})
    )
    costs = measure_costs(
        tiny_decoder, [2, 5], exits, [1, 2, 3], batch_size=3, reach=Reach.of(plans), draft_model=tiny_decoder
    )
    assert (
        set(costs.draft) == set(costs.fill) == {2, 5}
        and set(costs.verify) == {0, 2, 5}
        and set(costs.check) == {(2, 5), (0, 2), (0, 5)}
    )
    assert costs.plain.widths == (1, 2, 3) and costs.draft[2].widths == (1, 2, 3, 6, 9, 12)
    assert costs.check[2, 5].widths == (1, 2, 3, 6, 9, 12, 18, 21) and costs.verify[5].widths == (
        1,
        2,
        3,
        6,
        9,
        12,
        18,
        24,
    )
    # Of the widest rounds that there can be: nothing is ever rejected.
    answers = [Answer([0], [1] * 40, 40, "all") for _ in range(4)]
    said = said_of(flat([[1] * 40] * 4))
    looked_up = {sizes: look_up(sizes, answers, 6, 3, tiny_decoder.device) for sizes in ngram_sizes(None)}
    recording = Recording(answers, {2: said, 5: said}, {}, looked_up, said)
    predictions = Predictor(
        recording, costs, Calibration(3, None, 1.0, 0.0, 0.0), 3, num_layers=9
    ).predict_all(plans)
    assert (
        len(predictions) == len(plans) and max(prediction.verify_positions for prediction in predictions) > 6
    )
    values = costs.as_dict()
    assert values["context_len"] == 3 and values["verify"][1] == {
        "from_layer": 2,
        "to_layer": None,
        "widths": list(costs.verify[2].widths),
        "ms": list(costs.verify[2].ms),
    }
    assert [
        len(values[name]) for name in ("ranks", "probability", "lookup", "draft_model", "fill_model")
    ] == [1] * 5


def test_only_what_plans_need_is_timed(tiny_decoder: Decoder) -> None:
    costs = measure_costs(
        tiny_decoder, [2, 5], [], [1, 2, 3], batch_size=1, reach=Reach(verify_all=3, lookup=2)
    )
    assert not costs.draft and not costs.fill and not costs.check and set(costs.verify) == {0, 2, 5}
    assert costs.lookup is not None and costs.ranks is None is costs.draft_model is costs.fill_model
