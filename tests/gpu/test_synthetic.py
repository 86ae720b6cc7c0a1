"""What the GPU benchmark measures with: synthetic acceptance at given rates, and the profile's rig from
captured graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.gpu_parts import shapes as gpu_shapes
from benchmarks.gpu_parts.engines import decode, make_engine
from benchmarks.gpu_parts.synthetic import Agreement, agreement_of_shares, expected, forced, use
from ee_models.checkpoint.loader import open_checkpoint
from ee_models.decoder import Decoder
from hispec.config import CheckConfig, DraftConfig, SpeculativeConfig
from hispec.measure.stage_bench import Rig
from hispec.stats import rate
from tests.helpers.recorded_graphs import RecordedGraphs, recordable
from tests.helpers.support import random_prompts
from tests.helpers.sweeps import sweep

CPU = torch.device("cpu")
CHECKED = SpeculativeConfig(
    draft=DraftConfig(layer=2), check=CheckConfig(layer=5), num_draft_tokens=2, num_checks=2
)
TWO_TIER = SpeculativeConfig(draft=DraftConfig(layer=2), num_draft_tokens=3)


@sweep(
    "plan, agreement",
    [(CHECKED, Agreement(0.52, 0.79)), (CHECKED, Agreement(0.397, 0.581)), (TWO_TIER, Agreement(0.0, 0.6))],
    2,
)
def test_forced_tiers_agree_at_the_given_rates(
    tiny_decoder: Decoder, plan: SpeculativeConfig, agreement: Agreement
) -> None:
    engine = make_engine(tiny_decoder, plan, rows=16, length=256)
    use(engine, forced(engine, agreement))
    for first_seed in (0, 500):
        decode(engine, [[7, 8, 9]] * 16, 160, first_seed=first_seed)
    counts = engine.stats()
    wanted = expected(agreement, plan.num_draft_tokens, plan.num_checks if plan.check else 0)
    assert rate(counts["draft_kept"], counts["drafted"]) == pytest.approx(wanted.draft_share, abs=0.03)
    assert rate(counts["accepted"], counts["tentative"]) == pytest.approx(wanted.tentative_share, abs=0.03)
    assert rate(counts["committed"], counts["rounds"]) == pytest.approx(wanted.tokens, rel=0.04)


def test_draws_are_the_requests_own_whatever_the_batch(tiny_decoder: Decoder) -> None:
    engine = make_engine(tiny_decoder, CHECKED, rows=4, length=128)
    use(engine, forced(engine, Agreement(0.5, 0.7)))
    together = decode(engine, [[7, 8, 9]] * 4, 60).outputs
    assert together == decode(engine, [[7, 8, 9]] * 4, 60).outputs
    alone = [decode(engine, [[7, 8, 9]], 60, first_seed=seed).outputs[0] for seed in range(4)]
    assert alone == together and len({tuple(output) for output in together}) == 4


def test_plain_decoding_and_certain_agreement_go_through_the_judge_unchanged(tiny_decoder: Decoder) -> None:
    prompts = random_prompts((4, 9, 17))
    plain = make_engine(tiny_decoder, rows=3, length=128)
    before = decode(plain, prompts, 30).outputs
    use(plain, forced(plain, Agreement(0.5, 0.5)))
    assert decode(plain, prompts, 30).outputs == before
    never = make_engine(tiny_decoder, CHECKED, rows=3, length=128)
    use(never, forced(never, Agreement(0.5, 0.0)))  # verify takes nothing, so every token is its own
    assert decode(never, prompts, 30).outputs == before


def test_the_judge_can_be_captured(no_numba: None, tiny_path: Path) -> None:
    decoder = recordable(Decoder.load(open_checkpoint(tiny_path), torch.float32, CPU))
    outputs = []
    for graphs in (True, False):
        engine = make_engine(
            decoder, CHECKED, rows=2, length=128, graphs=graphs, captured_on=RecordedGraphs()
        )
        use(engine, forced(engine, Agreement(0.5, 0.7)))
        outputs.append(decode(engine, [[3, 4, 5]] * 2, 40).outputs)
    assert outputs[0] == outputs[1] and "graph_replays" not in engine.stats()


def test_shares_give_the_agreement_that_gives_them() -> None:
    agreement = agreement_of_shares(0.397, 0.581, 2, 2)
    found = expected(agreement, 2, 2)
    assert (found.draft_share, found.tentative_share) == (pytest.approx(0.397), pytest.approx(0.581))
    assert agreement.check == pytest.approx(0.5218, abs=1e-4) and agreement.verify == pytest.approx(
        0.79, abs=1e-3
    )
    certain = expected(Agreement(1.0, 1.0), 2, 2)
    assert (certain.tentative, certain.tokens) == (
        6.0,
        6.0,
    ), "a round commits no more places than it processed"
    assert expected(Agreement(0.0, 1.0), 3, 0).tokens == 4.0
    assert set(gpu_shapes.readings(TWO_TIER)["shares"].__dict__.values()) == {0.0, agreement.check}


# ---- the rig on a GPU, played on a CPU ----


def test_a_rigs_stages_do_from_graphs_what_they_do_eagerly(no_numba: None, tiny_path: Path) -> None:
    decoder = recordable(Decoder.load(open_checkpoint(tiny_path), torch.float32, CPU))
    graphs = RecordedGraphs()
    rig = Rig(decoder, [], [1, 2, 3, 4, 1, 2, 3] * 4, 3, 8, graphs)
    stages = {
        "plain": rig.plain(3),
        "draft": rig.draft(3, 1, 4),
        "level": rig.draft(2, 4, 4),
        "fill": rig.fill(3, 1, 4),
        "check": rig.check(3, 3, 2, 6),
        "verify": rig.verify(3, 6, 5),
        "lookup": rig.lookup(2, 3),
    }
    for name, run in stages.items():
        rig._kv.data[:, :, 27::40] = 0.0
        run()
        kv, hidden = (
            rig._kv.data.clone(),
            (rig._stages._hidden.data.clone() if rig._stages._hidden is not None else None),
        )
        rig._kv.data[:, :, 27::40] = 0.0
        run()
        assert torch.equal(rig._kv.data, kv), name
        assert hidden is None or torch.equal(rig._stages._hidden.data, hidden), name
    assert graphs.num_captured == len(stages)
    assert Rig(decoder, [], [1, 2, 3], 1, 2)._graphs is None, "on a CPU nothing is captured"
