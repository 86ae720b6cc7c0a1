"""Measuring what stages cost: every stage is there, from the round's own code, and the profile is kept and
found again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from cache import host_kv
from cache.view import BatchView
from ee_models.checkpoint.exit_files import ExitInfo
from ee_models.checkpoint.loader import open_checkpoint
from ee_models.decoder import Decoder
from ee_models.exits import AdapterExit
from ee_models.pass_steps import TokenPlaces
from hispec.cli import main
from hispec.decoding.batch import RoundBatch, Span
from hispec.decoding.stages import Pass, Stages
from hispec.errors import ConfigError
from hispec.latency.model import Linear
from hispec.latency.profile_file import LatencyProfile, kept_path, load, save
from hispec.measure import latency as measuring
from hispec.measure.latency import Grid, latency_for, measure_latency, subject_of
from hispec.measure.round_overhead import NoModel, overheads
from hispec.measure.stage_bench import Rig
from hispec.sampling.logits import Logits
from tests.helpers.adapters import loaded, make_exits
from tests.helpers.recorded_graphs import RecordedGraphs, recordable

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"max_num_seqs": 2, "max_window": 3}


@pytest.fixture(scope="module")
def exits(
    tiny_path: Path, tiny_decoder: Decoder, tmp_path_factory: pytest.TempPathFactory
) -> list[AdapterExit]:
    """At layers 2 and 5; the second keeps no KV."""
    checkpoint = open_checkpoint(tiny_path)
    return loaded(
        make_exits(
            tmp_path_factory.mktemp("exits"), checkpoint, [ExitInfo(layer=2), ExitInfo(layer=5, num_blocks=0)]
        ),
        tiny_decoder,
        checkpoint,
    )


@pytest.fixture(scope="module")
def measured(tiny_decoder: Decoder, exits: list[AdapterExit]) -> LatencyProfile:
    patch = pytest.MonkeyPatch()
    patch.setattr(measuring, "_SAMPLES", 3)
    profile = measure_latency(tiny_decoder, [2, 5, 7], exits, **SIZES, draft_model=tiny_decoder)
    patch.undo()
    return profile


# ---- the rig's stages ----


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


class _Asked(Exception):
    """All passes were made."""


@pytest.mark.parametrize("max_num_seqs", [1, 7, 25, 31, 54, 113])
def test_there_is_memory_for_all_passes_that_are_timed(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, max_num_seqs: int
) -> None:
    decoder = Decoder.load(open_checkpoint(tiny_path), torch.float32, CPU, max_positions=1024)

    def made(passes: Any, *_: Any, **__: Any) -> Any:  # `laid_out` has refused none of them
        raise _Asked(len(passes))

    monkeypatch.setattr(measuring, "quiet_times", made)
    for max_window in (6, 15):
        with pytest.raises(_Asked):
            measure_latency(decoder, [5], max_num_seqs=max_num_seqs, max_window=max_window)


def test_stages_of_static_rounds_are_captured(
    no_numba: None, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, played on a CPU: rows are buckets, and what a graph cannot hold is run eagerly."""
    monkeypatch.setattr(measuring, "_SAMPLES", 1)
    decoder, graphs = (
        recordable(Decoder.load(open_checkpoint(tiny_path), torch.float32, CPU)),
        RecordedGraphs(),
    )
    profile = measure_latency(decoder, [5], max_num_seqs=3, max_window=2, graph_device=graphs)
    assert profile.is_static and profile.row_buckets == (1, 2, 3) and profile.model().rows(3) == 3
    eager = sum(point.stage in ("prefill", "swap", "round") for point in profile.points)
    assert graphs.num_captured >= len(profile.points) - eager > 0


# ---- what is measured ----


def test_every_stage_is_measured_at_its_own_sizes(measured: LatencyProfile) -> None:
    cold = [f"cold/{layer}" for layer in (2, 5, 7)]
    assert list(measured.stages) == [*measured.subject.stage_names, *cold]
    assert {point.stage for point in measured.points} >= {"first/2", "first/5", "first/7"}
    for name in cold:
        assert measured.stages[name].cost == Linear(constant_ms=measured.stages[name].constant_ms)
    assert {
        "draft_model",
        "along/2",
        "along/5",
        "check/0-7",
        "check/2-5",
        "verify/7",
        "shadow/7",
    } <= measured.stages.keys()
    assert (
        all(stage.num_points >= 2 for stage in measured.stages.values())
        and not measured.is_static
        and measured.row_buckets == ()
    )
    for point in measured.points:
        assert point.rows <= 2 and point.tokens <= (2 * 3 if point.stage not in ("prefill", "swap") else 256)
        if point.stage in ("plain", "draft/2", "first/2", "lookup", "round", "draft_model"):
            assert point.tokens == point.rows
    wide = {
        (point.rows, point.tokens // point.rows) for point in measured.points if point.stage == "verify/2"
    }
    assert {(1, 1), (1, 2), (1, 3), (2, 3)} <= wide
    assert {point.context_tokens // point.rows for point in measured.points if point.stage == "verify/2"} == {
        63,
        509,
    }


def test_longer_stages_cost_more(measured: LatencyProfile) -> None:
    model = measured.model()
    assert model["verify/0"](1, 3, 300) > model["verify/7"](1, 3, 300) and model["draft/7"](
        1, 1, 300
    ) > model["along/5"](1, 1, 300)
    assert model["prefill"](1, 256, 500) > model["prefill"](1, 1, 500)
    assert 0 < model["round"](1, 1, 300) < 100


def test_the_overhead_of_a_round_is_told_without_a_model(tiny_decoder: Decoder) -> None:
    found = overheads(tiny_decoder, [1, 3], False, None)
    assert set(found) == {1, 3} and 0 <= found[1] < 50 and 0 <= found[3] < 50
    model = NoModel(tiny_decoder)
    assert model.config.num_layers == 1 and model.logits(model.embed(torch.tensor([1, 2])), 1).shape == (
        2,
        tiny_decoder.config.vocab_size,
    )


@pytest.mark.parametrize("max_num_seqs", [1, 2, 7, 32, 256])
@pytest.mark.parametrize("max_window", [1, 5, 528])
@pytest.mark.parametrize("is_cuda", [True, False])
def test_the_grid_keeps_within_its_limits(max_num_seqs: int, max_window: int, is_cuda: bool) -> None:
    grid = Grid.of(max_num_seqs, max_window, 1024, is_cuda=is_cuda, is_static=is_cuda)
    wide, narrow = list(grid.wide()), list(grid.narrow())
    assert len(set(wide)) == len(wide) <= 50 and len(set(narrow)) == len(narrow) <= 20
    assert {1, max_num_seqs} <= {rows for rows, _ in narrow}
    assert max(q_len for _, q_len, _ in wide) == min(max_window, grid.most_tokens)
    for rows, q_len, context in wide:
        assert q_len == 1 or rows * q_len <= grid.most_tokens
        assert rows * context <= grid.most_kv and 2 <= context <= 1024 - q_len


@pytest.mark.parametrize("is_static", [True, False])
def test_a_cpu_is_asked_what_each_of_few_positions_costs(is_static: bool) -> None:
    """Its kernels compute in tiles, where a static round takes its rectangle, whatever is in it."""
    widths = Grid.of(4, 40, 1024, is_cuda=False, is_static=is_static).positions
    assert widths[:8] == ((1, 2, 4, 8, 16, 40) if is_static else (1, 2, 3, 4, 5, 6, 7, 8))[:8]
    assert widths[-1] == 40 and len(widths) < 20


@pytest.mark.parametrize(
    ("sizes", "layers", "message"),
    [
        ({"max_num_seqs": 0}, [2], "max_num_seqs=0 of a latency profile must be at least 1"),
        ({"max_window": 0}, [2], "max_window=0 of a latency profile must be at least 1"),
        ({}, [2, 9], r"layers=\[9\] .* are no early exits of a model of 9 layers; choose 1 to 8"),
        ({}, [5], r"trained exits at layers \[2\] are not among layers=\[5\]"),
    ],
)
def test_impossible_sizes_are_refused(
    tiny_decoder: Decoder, exits: list[AdapterExit], sizes: dict[str, int], layers: list[int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        measure_latency(tiny_decoder, layers, exits, **{**SIZES, **sizes})


def test_a_short_model_is_measured_within_its_length(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "_SAMPLES", 1)
    profile = measure_latency(
        Decoder.load(open_checkpoint(tiny_path), torch.float32, CPU, max_positions=32),
        [],
        max_num_seqs=1,
        max_window=32,
    )
    assert (
        max(point.context_tokens + point.tokens for point in profile.points if point.stage == "verify/0")
        <= 32
    )
    with pytest.raises(
        ConfigError,
        match="max_model_len=15 leaves no room to measure in; a latency profile needs 16 positions",
    ):
        measure_latency(
            Decoder.load(open_checkpoint(tiny_path), torch.float32, CPU, max_positions=15), [], **SIZES
        )


@pytest.mark.parametrize(("window", "positions"), [(2, 64), (5, 256), (7, 300)])
def test_nothing_is_measured_at_positions_that_a_model_does_not_have(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, window: int, positions: int
) -> None:
    rig, lengths = measuring.Rig, []

    def recorded(decoder: Decoder, exits: Any, context: list[int], *rest: Any, **more: Any) -> Any:
        lengths.append(len(context))
        return rig(decoder, exits, context, *rest, **more)

    monkeypatch.setattr(measuring, "Rig", recorded)
    monkeypatch.setattr(measuring, "_SAMPLES", 1)
    decoder = Decoder.load(open_checkpoint(tiny_path), torch.float32, CPU, max_positions=positions)
    measure_latency(decoder, [], max_num_seqs=1, max_window=window)
    assert lengths and max(lengths) <= positions


# ---- what is kept ----


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HISPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def num_measured(measured: LatencyProfile, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The sizes of each measurement that is asked for; it takes no time."""
    asked: list[dict[str, Any]] = []

    def measure(
        decoder: Decoder, layers: list[int], exits: Sequence[AdapterExit] = (), **sizes: Any
    ) -> LatencyProfile:
        asked.append(sizes)
        return measured.model_copy(update={"max_num_seqs": sizes["max_num_seqs"]})

    monkeypatch.setattr(measuring, "measure_latency", measure)
    return asked


def test_a_profile_is_measured_once_and_kept(
    tiny_decoder: Decoder,
    exits: list[AdapterExit],
    measured: LatencyProfile,
    cache: Path,
    num_measured: list[Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    def ask(**changes: Any) -> LatencyProfile:
        return latency_for(
            tiny_decoder, [2, 5, 7], exits, **{**SIZES, "draft_model": tiny_decoder, **changes}
        )

    kept = kept_path(measured.subject)
    assert (
        ask() == measured
        and len(num_measured) == 1
        and load(kept) == measured
        and kept.parent == cache / "latency"
    )
    assert str(kept) in capsys.readouterr().err
    assert ask() == measured and len(num_measured) == 1
    ask(max_num_seqs=4)
    assert len(num_measured) == 2, "it must cover all rows"
    assert ask().max_num_seqs == 4 and len(num_measured) == 2
    values = json.loads(kept.read_text())
    values["subject"]["versions"]["torch"] = "1.0"
    kept.write_text(json.dumps(values))
    ask()
    assert len(num_measured) == 3, "a stale one is measured again"
    kept.write_text("{")
    ask()
    assert len(num_measured) == 4, "and so is a damaged one"
    ask(max_window=1)
    assert len(num_measured) == 4, "it may be of wider rounds"
    ask(max_window=2 * SIZES["max_window"])
    assert len(num_measured) == 5, "and not of narrower ones"


def test_what_one_job_needs_does_not_throw_out_what_another_has_measured(
    tiny_decoder: Decoder, measured: LatencyProfile, cache: Path, num_measured: list[Any]
) -> None:
    """Many rows of short rounds, then one row of long ones: both are measured the second time."""
    many, wide = {"max_num_seqs": 4, "max_window": 1}, {"max_num_seqs": 1, "max_window": 40}
    for sizes in (many, wide):
        latency_for(tiny_decoder, [2, 5, 7], **SIZES | {"draft_model": None} | sizes, progress=False)
    last = num_measured[-1]
    assert len(num_measured) == 2 and (last["max_num_seqs"], last["max_window"]) == (4, 40)


def test_before_a_measurement_it_is_said_what_how_long_and_where_it_is_kept(
    tiny_decoder: Decoder,
    measured: LatencyProfile,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = []

    def measure(*args: Any, **sizes: Any) -> LatencyProfile:
        said.append(capsys.readouterr().err)
        return measured

    monkeypatch.setattr(measuring, "measure_latency", measure)
    latency_for(tiny_decoder, [], **SIZES)
    (line,) = said[0].splitlines()
    kept = kept_path(subject_of(tiny_decoder, [], [], None))
    for part in ("each stage of a round costs", "about a minute", str(kept), "speculative.goodput.latency"):
        assert part in line
    latency_for(tiny_decoder, [], **SIZES | {"max_num_seqs": 64}, progress=False)
    assert said[1] == "", "nothing where no progress is to be shown"


def test_a_profile_that_is_named_must_fit(
    tiny_decoder: Decoder,
    exits: list[AdapterExit],
    measured: LatencyProfile,
    tmp_path: Path,
    num_measured: list[Any],
) -> None:
    save(measured, tmp_path / "mine.json")
    assert latency_for(tiny_decoder, [2, 5], exits, **SIZES, path=tmp_path / "mine.json") == measured
    with pytest.raises(ConfigError, match=r"has exits at layers \[2, 5, 7\], but not at \[3\]"):
        latency_for(tiny_decoder, [2, 3, 5], exits, **SIZES, path=tmp_path / "mine.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        latency_for(tiny_decoder, [2, 5], exits, **SIZES, path=tmp_path / "other.json")
    assert not num_measured


def test_a_cache_that_cannot_be_written_is_no_reason_to_stop(
    tiny_decoder: Decoder,
    measured: LatencyProfile,
    tmp_path: Path,
    num_measured: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HISPEC_CACHE", str(tmp_path / "file"))
    assert latency_for(tiny_decoder, [], **SIZES, progress=False) == measured
    assert "it will be measured again the next time" in caplog.text


def test_the_subject_tells_models_apart(
    tiny_path: Path, tiny_decoder: Decoder, exits: list[AdapterExit]
) -> None:
    mine = subject_of(tiny_decoder, [2, 5], exits, None)
    assert (
        mine.model["num_layers"] == 9
        and mine.model["dtype"] == "float32"
        and mine.exits["2"]["num_kv_layers"] == 1
    )
    sdpa = subject_of(
        Decoder.load(open_checkpoint(tiny_path), torch.float32, CPU, "sdpa"), [2, 5], exits, None
    )
    others = [
        sdpa,
        subject_of(tiny_decoder, [2, 5], [], None),
        subject_of(tiny_decoder, [2, 5], exits, tiny_decoder),
    ]
    assert len({each.fingerprint for each in (mine, *others)}) == 4


# ---- the command ----


def write_job(folder: Path, model: Path, **fields: Any) -> Path:
    (folder / "in.jsonl").write_text('{"prompt": "hello"}\n')
    values = {
        "model": str(model),
        "engine": {"max_num_seqs": 2, "max_model_len": 128, "dtype": "float32"},
        "speculative": {"draft": {"layer": 2}, "check": {"layer": 5}, "num_draft_tokens": 1, "num_checks": 1},
        "input": {"path": "in.jsonl"},
        "output": {"path": str(folder / "out.jsonl")},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(values | fields))
    return folder / "job.yaml"


def test_the_command_measures_writes_and_prints(
    tiny_path: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, path = write_job(tmp_path, tiny_path), tmp_path / "new" / "latency.json"
    assert main(["profile", str(job), "--latency", str(path), "--no-progress"]) == 0
    out = capsys.readouterr().out
    profile = load(path)
    assert profile.subject.layers == (2, 5) and profile.subject.exits == {} and profile.max_num_seqs == 2
    assert max(point.tokens for point in profile.points if point.stage == "verify/0") == 4, (
        "2 rows of K + 1 places"
    )
    rows = [
        line.split()[0] for line in out.splitlines() if line.split() and line.split()[0] in profile.stages
    ]
    assert rows == list(profile.stages) and "R²" in out and str(path) in out
    assert not cache.exists()


def test_the_command_keeps_it_where_it_is_looked_for(
    tiny_path: Path, tmp_path: Path, cache: Path, num_measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hispec.profile.stage_latency.measure_latency", measuring.measure_latency)
    job = write_job(tmp_path, tiny_path, speculative=None)
    assert main(["profile", str(job), "--latency", "--max-window", "7", "--no-progress"]) == 0
    (kept,) = (cache / "latency").iterdir()
    assert kept.suffix == ".json" and [
        (each["max_num_seqs"], each["max_window"]) for each in num_measured
    ] == [(2, 7)]


def test_the_command_measures_rounds_as_wide_as_a_controller_may_choose(
    tiny_path: Path, tmp_path: Path, cache: Path, num_measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a check, though the plan that it starts from has none: else the job would measure again."""
    monkeypatch.setattr("hispec.profile.stage_latency.measure_latency", measuring.measure_latency)
    plan = {"draft": {"kind": "ngram"}, "num_draft_tokens": 3, "num_checks": 2}
    for control, widest in (("fixed", 4), ("goodput", 8)):
        job = write_job(tmp_path, tiny_path, speculative=plan | {"control": control})
        assert main(["profile", str(job), "--latency", "--no-progress"]) == 0
        assert num_measured[-1]["max_window"] == widest


def test_the_command_refuses_what_means_nothing(
    tiny_path: Path, tmp_path: Path, num_measured: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_job(tmp_path, tiny_path)
    assert main(["profile", str(job), "--latency", "--json", "x.json", "--top", "2"]) == 2
    assert "--json, --top: means nothing with --latency" in capsys.readouterr().err
    assert main(["profile", str(job), "--latency", str(tmp_path)]) == 2
    assert "--latency" in capsys.readouterr().err and not num_measured
