"""The GPU benchmark, rehearsed without a GPU: every path of it, and its report."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_report
from benchmarks.gpu_parts import correctness as gpu_correctness
from benchmarks.gpu_parts import joined as gpu_joined
from benchmarks.gpu_parts import part as gpu_part
from benchmarks.gpu_parts import run as gpu_run
from benchmarks.gpu_parts import shapes as gpu_shapes
from benchmarks.gpu_parts import subjects as gpu_subjects
from benchmarks.gpu_parts.correctness import Difference, first_difference
from benchmarks.gpu_parts.engines import CheckedGraphs, Rerun, decode, grouped, make_engine
from benchmarks.gpu_parts.floors import bytes_read, stages_of
from benchmarks.gpu_parts.run import FIGURES, Bench
from ee_models.config import ModelConfig
from ee_models.decoder import Decoder
from ee_models.kernels.numba_gemm import COLUMNS
from hispec.config import PLAIN, CheckConfig, DraftConfig, Plan, SpeculativeConfig
from hispec.outputs import TokenLogprobs
from hispec.runner.launchers import StaticLauncher
from tests.helpers.support import random_prompts

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any], str]:
    """Exit code, JSON and what was printed."""
    folder, code = tmp_path_factory.mktemp("gpu"), 0
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for name, part in gpu.PARTS.items():
            arguments = [name, part.module, "--into", str(folder / f"{name}.json"), "--seconds", "100000"]
            code |= gpu_part.main([*arguments, "--tiny", "--device", "cpu"])
        result = gpu_joined.join_parts(folder, list(gpu.PARTS), {})
        gpu_joined.print_table(result)
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"{name}.json" for name in gpu.PARTS)
    return code, result, printed.getvalue()


def bench(folder: Path, seconds: float = 100_000.0) -> Bench:
    return Bench(CPU, True, seconds, folder / "gpu-rehearsal.json", {})


# ---- the command ----


@pytest.mark.slow
def test_a_rehearsal_goes_through_all_parts_and_measures_nothing(
    rehearsal: tuple[int, dict[str, Any], str],
) -> None:
    code, result, printed = rehearsal
    assert code == 0 and result["failures"] == [], result["failures"]
    assert {name: part["status"] for name, part in result["parts"].items()} == dict.fromkeys(
        gpu.PARTS, "done"
    )
    assert result["rehearsal"] is True and "rehearsal" in result["label"]
    assert result["figures"] == dict.fromkeys(FIGURES) and set(result["reasons"]) == set(FIGURES)
    assert set(result["rehearsed_not_measured"]) == set(FIGURES), "a figure that no part gives"
    assert {"torch", "transformers", "cuda", "triton", "gpu"} <= set(result["environment"])
    table = printed[printed.index("*** a rehearsal") :]
    assert all(figure.text in table for figure in FIGURES.values()) and table.count("not measured") == len(
        FIGURES
    )
    assert printed.splitlines()[-1] == "correct"


@pytest.mark.slow
def test_nothing_in_a_rehearsal_was_left_out_or_failed(rehearsal: tuple[int, dict[str, Any], str]) -> None:
    def walk(value: Any, where: str) -> None:
        if isinstance(value, dict):
            assert not {"error", "left_out", "traceback"} & set(value), where
            for key, item in value.items():
                walk(item, f"{where}/{key}")

    walk(rehearsal[1]["parts"], "")


@pytest.mark.slow
def test_what_a_rehearsal_compares_is_compared(rehearsal: tuple[int, dict[str, Any], str]) -> None:
    found = rehearsal[1]["parts"]["correctness"]
    plans = found["replay equals eager"]
    assert len(plans) == 7 and all(
        plan["graphs"] >= 3 and plan["replays"] > 0 and plan["different"] == 0 for plan in plans.values()
    )
    assert all(
        equal == found["fp32 equals plain"]["prompts"]
        for equal in found["fp32 equals plain"]["equal"].values()
    )
    assert found["bf16 against plain"]["outputs"] == 4 * found["fp32 equals plain"]["prompts"]
    for name in ("plain", "exits, three tiers"):
        smoke = rehearsal[1]["parts"]["smoke"][name]
        assert smoke["equal"] and smoke["captured"]["replays"] > 5 and smoke["graphs"] > 0
    synthetic = rehearsal[1]["parts"]["shapes"]["Llama-3-8B"]["batch 1"]["synthetic"]
    assert synthetic["label"] == gpu_run.SYNTHETIC and len(synthetic["ratio_to_plain"]) == 5


def test_plans_and_candidates_cover_every_drafter() -> None:
    from benchmarks.gpu_parts.smollm2 import candidates

    real = gpu_subjects.Subject("", "", True, (4, 7, 15))
    for rows in (1, 8, 32, 128):
        plans = candidates(real, rows)
        for check in (True, False):
            assert {plan.draft.kind for plan in plans.values() if (plan.check is not None) == check} >= {
                "adapter",
                "ngram",
                "hybrid",
            }
        assert all(plan.plan(30) for plan in plans.values())
        assert {layer for plan in plans.values() for layer in plan.trained_layers().values()} == {4, 7, 15}


def test_a_part_that_raises_is_recorded_with_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(bench: Bench, out: dict[str, Any]) -> None:
        out["before"] = 1
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(gpu_correctness, "run", broken)
    into = tmp_path / "correctness.json"
    arguments = [
        "correctness",
        "benchmarks.gpu_parts.correctness",
        "--into",
        str(into),
        "--tiny",
        "--device",
        "cpu",
    ]
    assert gpu_part.main(arguments) == 1
    part = gpu_joined.join_parts(tmp_path, ["correctness", "shapes"], {})["parts"]["correctness"]
    assert part["status"] == "failed" and "no such kernel" in part["error"] and part["before"] == 1
    assert "FAILED: correctness: RuntimeError: no such kernel" in capsys.readouterr().out


def test_a_step_that_raises_is_recorded_and_one_without_time_is_left_out(tmp_path: Path) -> None:
    run, out = bench(tmp_path), {}
    assert run.step(out, "good", 1, lambda: {"value": 3}) == {"value": 3}
    assert run.step(out, "bad", 1, lambda: [][0]) is None and out["bad"]["error"].startswith("IndexError")
    late = bench(tmp_path, seconds=-1.0)
    assert late.step(out, "late", 1, dict) is None and "left_out" in out["late"]
    assert run.result["failures"] and not late.result["failures"]


def test_no_script_lies_beside_a_namesake_of_python_s_modules() -> None:
    """Python looks in a script's folder first: a profile.py there would be what torch imports so."""
    for folder in ("benchmarks", "benchmarks/gpu_parts", "scripts", "examples"):
        names = {path.stem for path in (ROOT / folder).glob("*.py")}
        assert names and not names & sys.stdlib_module_names, folder


def test_what_a_step_has_found_is_kept_when_a_case_fails_or_time_ends(tmp_path: Path) -> None:
    run, out = bench(tmp_path), {}

    def cases() -> dict[str, Any]:
        for number in range(4):
            with run.case(f"case {number}"):
                run.found[str(number)] = 6 // (number - 2)
        return run.found

    assert run.step(out, "cases", 1, cases) == {"0": -3, "1": -6, "3": 6}
    assert out["errors_of_steps"]["cases"]["case 2"]["error"].startswith("ZeroDivisionError")
    assert len(run.result["failures"]) == 1

    def ends() -> None:
        run.found["first"] = 1
        with run.case("second"):
            raise gpu_run.OutOfTime

    with pytest.raises(gpu_run.OutOfTime):
        run.step(out, "ends", 1, ends)
    assert out["ends"] == {"first": 1, "cut_short": "the time was up"}

    def fails() -> None:
        run.found["first"] = 1
        raise RuntimeError("no")

    assert run.step(out, "fails", 1, fails) is None
    assert out["fails"]["first"] == 1 and out["fails"]["error"] == "RuntimeError: no"


def test_time_ends_a_part_wherever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(bench: Bench, out: dict[str, Any]) -> None:
        out["begun"] = True
        while True:
            with contextlib.suppress(Exception):  # as a drafter's guard does
                torch.zeros(1)

    monkeypatch.setattr(gpu_correctness, "run", endless)
    run = bench(tmp_path, seconds=1.0)
    for name in ("correctness", "shapes"):
        gpu_part.measure(run, name, gpu.PARTS[name].module)
    parts = json.loads(run.path.read_text())["parts"]
    assert parts["correctness"]["status"].startswith("cut short") and parts["shapes"]["status"].startswith(
        "left out"
    )
    assert run.result["failures"] == [], "to run out of time is no failure"


def test_figures_are_those_of_a_gpu_alone_and_the_worst_counts(tmp_path: Path) -> None:
    run = bench(tmp_path)
    run.is_rehearsal = False
    for value in (0.01, 0.04, 0.02):
        run.figure("host_gap_fraction", value)
        run.figure("captured_vs_eager", 100 * value)
    run.missing("three_tier_vs_plain_b1", "no model")
    run.save()
    result = json.loads(run.path.read_text())
    assert (result["figures"]["host_gap_fraction"], result["figures"]["captured_vs_eager"]) == (0.04, 1.0)
    assert (
        result["reasons"]["three_tier_vs_plain_b1"] == "no model"
        and "host_gap_fraction" not in result["reasons"]
    )
    verdicts = dict(zip(FIGURES, (row[-1] for row in gpu_run.figure_rows(result)), strict=True))
    assert (
        verdicts["host_gap_fraction"] == verdicts["captured_vs_eager"] == "MISSED"
        and verdicts["three_tier_vs_plain_b1"] == "not measured"
    )
    assert (
        FIGURES["host_gap_fraction"].verdict(0.03) == FIGURES["captured_vs_eager"].verdict(4.0) == "reached"
    )


@pytest.mark.parametrize(
    ("arguments", "words"), [([], "--tiny --device cpu"), (["--device", "cpu"], "add --tiny")]
)
def test_without_a_gpu_it_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([*arguments, "--out", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_nothing_that_it_imports_needs_numba() -> None:
    paths = [*(ROOT / "benchmarks").glob("gpu*.py"), *(ROOT / "benchmarks" / "gpu_parts").glob("*.py")]
    modules = sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths)
    code = (
        "import sys\nclass Blocked:\n    def find_spec(self, name, path=None, target=None):\n        if"
        " name.split('.')[0] in ('numba', 'llvmlite'):\n            raise"
        " ModuleNotFoundError(name)\nsys.meta_path.insert(0, Blocked())\nimport hispec.measure.stage_bench,"
        f" hispec.drafters.lookup_torch, {', '.join(modules)}\n"
    )
    assert {"benchmarks.gpu", *(part.module for part in gpu.PARTS.values())} < set(modules)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


# ---- its parts ----


def test_the_first_difference_is_measured_by_the_references_own_words() -> None:
    said = [TokenLogprobs(token, -0.1, {token: -0.1, 9: -0.3}) for token in (1, 2, 3)]
    assert first_difference([1, 2, 3], [1, 2, 3], said) is None
    assert first_difference([1, 9, 8], [1, 2, 3], said) == Difference(1, pytest.approx(0.2))
    assert first_difference([1, 7, 8], [1, 2, 3], said) == Difference(1, None)


def test_checked_graphs_see_a_replay_that_differs() -> None:
    class Wrong(Rerun):
        def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
            _, result = super().capture(run)
            return lambda: result[0].add_(1), result

    held = torch.arange(4)
    right, wrong = CheckedGraphs(Rerun()), CheckedGraphs(Wrong())
    for graphs in (right, wrong):
        graphs.capture(lambda: (held * 2, (held, None)))
    assert (right.num_checked, right.num_different, wrong.num_different) == (1, 0, 1)


def test_a_stage_that_replaces_what_it_has_read_is_compared_from_the_same_window() -> None:
    """As verify does with drafts, where it is a graph of its own."""

    class Lazy(Rerun):
        """Captures without doing the work, as a GPU does."""

        def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
            result = torch.zeros(2)

            def replay() -> None:
                result.copy_(run())

            return replay, result

    window = torch.arange(2.0)

    def stage() -> torch.Tensor:
        window.add_(1)
        return window.clone()

    blind, seeing = CheckedGraphs(Lazy()), CheckedGraphs(Lazy())
    seeing.windows = lambda: [window]
    for graphs in (blind, seeing):
        graphs.capture(stage)
    assert (blind.num_different, seeing.num_different) == (1, 0)


def test_prompts_are_compared_by_the_kv_that_they_write(tiny_decoder: Decoder) -> None:
    class Forgetful(Rerun):
        """A replay that does nothing."""

        def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
            return lambda: None, run()

    class Checked(CheckedGraphs):
        """Of prompts, those of `of_prompts`."""

        def __init__(self, of_prompts: Rerun) -> None:
            super().__init__(Rerun())
            self.of_prompts = of_prompts

        def another(self) -> CheckedGraphs:
            return CheckedGraphs(self.of_prompts, self)

    different = []
    for of_prompts in (Rerun(), Forgetful()):
        checked = Checked(of_prompts)
        engine = make_engine(tiny_decoder, rows=2, length=64, captured_on=checked)
        outputs = [decode(engine, [[5, 6, 7, 8, 9]] * 2, 4).outputs for _ in range(3)]
        assert outputs[0] == outputs[1] == outputs[2]
        assert (
            checked.num_checked == engine.stats()["graph_captures"] + engine.stats()["prompt_graph_captures"]
        )
        assert engine.stats()["prompt_graph_captures"] > 0
        different.append(checked.num_different)
        engine.close()
    assert different[0] == 0 < different[1]


def test_the_windows_are_those_of_the_engine_that_captures(tiny_decoder: Decoder) -> None:
    checked = CheckedGraphs(Rerun())
    engines = [
        make_engine(tiny_decoder, rows=2, length=64, graphs=graphs, captured_on=checked)
        for graphs in (True, False)
    ]
    decode(engines[0], [[5, 6, 7]], 4)
    assert checked.kv is not None and checked.kv() is engines[0]._runtime.kv.data
    launcher = engines[0]._rounds._launcher
    assert isinstance(launcher, StaticLauncher)
    windows = launcher._windows
    assert windows and all(
        one is other for one, other in zip(checked.windows(), windows.values(), strict=True)
    )
    for engine in engines:
        engine.close()


def test_groups_are_filled_up_from_the_front() -> None:
    assert grouped([[1], [2], [3]], 2) == [[[1], [2]], [[3], [1]]]
    assert grouped([[1], [2]], 5) == [[[1], [2], [1], [2], [1]]]


def test_a_speed_is_that_of_full_batches(tiny_decoder: Decoder) -> None:
    engine = make_engine(
        tiny_decoder, SpeculativeConfig(draft=DraftConfig(layer=6), num_draft_tokens=4), rows=3, length=128
    )
    prompts = random_prompts((4, 9, 17))
    whole, part = decode(engine, prompts, 40), decode(engine, prompts, 40, while_full=True)
    assert [len(output) for output in whole.outputs] == [40] * 3
    lengths = [len(output) for output in part.outputs]
    assert max(lengths) == 40 and min(lengths) < 40, "the rows are not apart: this proves nothing"
    assert [output[:length] for output, length in zip(whole.outputs, lengths, strict=True)] == part.outputs
    assert not engine.has_unfinished() and part.decode_rounds < whole.decode_rounds
    assert decode(engine, prompts, 40).outputs == whole.outputs, "what was aborted leaves nothing behind"


def held(num_outputs: int, num_inputs: int) -> int:
    """Bytes of a float32 weight and its bias in panels, each of which has all its outputs."""
    return 4 * (num_outputs + -num_outputs % COLUMNS) * (num_inputs + 1)


def held_by_layer(config: ModelConfig) -> int:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    return (
        held(config.q_size + 2 * config.kv_size, hidden)
        + held(hidden, config.q_size)
        + held(2 * intermediate, hidden)
        + held(hidden, intermediate)
    )


def test_floors_count_weights_heads_and_context(tiny_decoder: Decoder) -> None:
    config = tiny_decoder.config
    head, kv = held(config.vocab_size, config.hidden_size), 4 * 4 * 30 * 2 * config.kv_size
    assert bytes_read(tiny_decoder, 2, 5, 2, 4, 30) == 3 * (held_by_layer(config) + kv) + 2 * head
    assert stages_of(PLAIN) == {"plain": (1, 1, 0, -1, 1)}
    stages = stages_of(Plan(2, 5, 3, 2))
    assert {name: (often, width) for name, (often, width, *_) in stages.items()} == {
        "draft": (6, 1),
        "fill": (2, 1),
        "check": (2, 4),
        "verify": (1, 8),
    }


def test_random_shapes_run_in_any_split(tmp_path: Path) -> None:
    shape = gpu_shapes.TINY_SHAPES["Llama-3-8B"].config
    decoder = gpu_subjects.random_decoder(shape, CPU, torch.float32, 64)
    head, embedding = held(260, 48), 4 * 260 * 48
    assert decoder.num_bytes == embedding + head + 4 * held_by_layer(shape)
    prompts = random_prompts((5, 9), vocab=260)
    plain = decode(make_engine(decoder, rows=2, length=64), prompts, 20).outputs
    plan = SpeculativeConfig(draft=DraftConfig(layer=1), check=CheckConfig(layer=2))
    assert decode(make_engine(decoder, plan, rows=2, length=64), prompts, 20).outputs == plain
    assert len(set(plain[0])) > 5, "one token over and over proves nothing"


# ---- the report ----


@pytest.fixture
def measured(rehearsal: tuple[int, dict[str, Any], str]) -> dict[str, Any]:
    """As if it were one."""
    result = copy.deepcopy(rehearsal[1]) | {"rehearsal": False, "reasons": {"captured_vs_eager": "too late"}}
    result["parts"]["smoke"]["compiling"]["seconds"] = 12.3
    result["figures"] |= {"plain_8b_floor_fraction": 0.8123, "host_gap_fraction": 0.5}
    return result


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.slow
def test_a_report_stands_between_the_markers_and_nothing_else_changes(
    tmp_path: Path, measured: dict[str, Any]
) -> None:
    docs = write(
        tmp_path / "performance.md",
        f"# Speed\nbefore\n\n{gpu_report.BEGIN}\nold\n{gpu_report.END}\n\nafter\n",
    )
    result = write(tmp_path / "gpu-x.json", json.dumps(measured))
    assert gpu_report.main([str(result), "--docs", str(docs)]) == 0
    once = docs.read_text()
    assert (
        once.startswith(f"# Speed\nbefore\n\n{gpu_report.BEGIN}\n")
        and once.endswith(f"\n{gpu_report.END}\n\nafter\n")
        and "\nold\n" not in once
    )
    assert "0.812 | >= 0.8 | reached" in once and "0.500 | <= 0.03 | MISSED" in once and "too late" in once
    assert (
        "**Synthetic acceptance**" in once
        and "gpu-x.json" in once
        and "| batch 1 |" in once
        and "Equal to plain in float32" in once
        and "Sampled at temperature 0.8 and top_p 0.95" in once
        and "One replay of a round's graph" in once
        and "left out of all times: smoke 12 s." in once
    )
    assert gpu_report.main([str(result), "--docs", str(docs)]) == 0 and docs.read_text() == once


@pytest.mark.slow
def test_what_is_no_measurement_is_refused(
    tmp_path: Path, measured: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    docs = write(tmp_path / "performance.md", f"{gpu_report.BEGIN}\n{gpu_report.END}\n")
    for text, words in (
        ("{", "Expecting"),
        ("[]", "not written by"),
        (json.dumps({"figures": {}}), "not written by"),
        (json.dumps(measured | {"rehearsal": True}), "rehearsal"),
        (json.dumps(measured | {"figures": {"captured_vs_eager": 5.0}}), "must have the keys"),
        (
            json.dumps(measured | {"figures": dict.fromkeys(FIGURES) | {"captured_vs_eager": "fast"}}),
            "captured_vs_eager are no numbers",
        ),
    ):
        before = docs.read_text()
        assert gpu_report.main([str(write(tmp_path / "x.json", text)), "--docs", str(docs)]) == 2
        assert words in capsys.readouterr().err and docs.read_text() == before
    assert (
        gpu_report.main(
            [
                str(write(tmp_path / "x.json", json.dumps(measured))),
                "--docs",
                str(write(tmp_path / "none.md", "no markers")),
            ]
        )
        == 2
    )


def test_the_documentation_has_a_place_for_it() -> None:
    document = (ROOT / "docs" / "performance" / "gpu.md").read_text(encoding="utf-8")
    assert gpu_report.written(document, ["what was measured"])


def test_without_a_result_the_page_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    docs = write(tmp_path / "performance.md", f"{gpu_report.BEGIN}\nold\n{gpu_report.END}\n")
    with pytest.raises(SystemExit) as ended:
        gpu_report.main(["--docs", str(docs)])
    assert ended.value.code == 2 and "required: result" in capsys.readouterr().err
    assert "old" in docs.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--parts", ","], "--parts: give at least one of smoke, "),
        (["--parts", "smoke,shape"], "--parts: shape; there are smoke, "),
        (["--device", "gpu"], "--device 'gpu': "),
        (["--seconds", "0"], "--seconds: must be more than 0, got 0"),
        (["--seconds", "nan"], "--seconds: must be more than 0, got nan"),
        (["--tiny", "--device", "cpu", "--out", "{file}"], "--out {file}: File exists"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: str,
) -> None:
    file = write(tmp_path / "file", "mine")
    monkeypatch.setattr(gpu, "missing", lambda on_gpu: ([], []))
    with pytest.raises(SystemExit) as ended:
        gpu.main([argument.format(file=file) for argument in arguments])
    assert ended.value.code == 2 and words.format(file=file) in capsys.readouterr().err
    assert file.read_text() == "mine" and list(tmp_path.iterdir()) == [file]
