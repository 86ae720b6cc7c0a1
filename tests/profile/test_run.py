"""`hispec profile` from the command line to its files, on a tiny model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap
from typing import Any

import pytest
import torch
import yaml

from ee_models.checkpoint.exit_files import ExitInfo
from ee_models.checkpoint.loader import open_checkpoint
from ee_models.decoder import Decoder
from ee_models.exits import AdapterExit
from hispec.cli import main
from hispec.config import NgramConfig
from hispec.control.candidates import trained_paths
from hispec.errors import ConfigError
from hispec.jobs.load import load_job, load_preset
from hispec.jobs.schema import Job, RunConfig
from hispec.latency.model import LatencyModel
from hispec.latency.profile_file import StageCost
from hispec.measure import latency as measuring
from hispec.profile import run as profile_run
from hispec.profile.candidates import Candidates, default_layers, exits_folder
from hispec.profile.options import ProfileOptions
from hispec.profile.plots import ACCEPTANCE, RATIO, draw_plots
from hispec.profile.preset import COMMENTS, _scalar, preset_text
from hispec.profile.report import print_profile
from hispec.profile.results import choose
from tests.helpers.adapters import TINY_MLP, make_exits
from tests.helpers.profile_job import ROWS, SMALL, write_job
from tests.profile.test_choice import speeds


@pytest.fixture(scope="module", autouse=True)
def few_samples() -> Iterator[None]:
    """What passes take here is of no interest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "_SAMPLES", 1)
        yield


@pytest.fixture(scope="module")
def exits(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained exits that are right as often as the model's own head at layers 6 and 8."""
    folder = tmp_path_factory.mktemp("exits")
    infos = [
        ExitInfo(layer=2, num_blocks=4, intermediate_size=TINY_MLP),
        ExitInfo(layer=5, num_blocks=3, intermediate_size=TINY_MLP),
    ]
    make_exits(folder, open_checkpoint(tiny_path), infos, from_trunk=True)
    return folder


@pytest.fixture(scope="module")
def profiled(
    tiny_path: Path, exits: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """The folder of a job that was run plainly, then profiled with trained exits, all files written; and the
    profile's result."""
    folder = tmp_path_factory.mktemp("profile")
    job = write_job(folder, tiny_path)
    assert main(["run", str(job), "--no-progress"]) == 0
    (folder / "out.jsonl").rename(folder / "plain.jsonl")
    files = [
        "--json",
        str(folder / "new" / "result.json"),
        "--write-preset",
        str(folder / "preset.yaml"),
        "--plots",
        str(folder / "plots"),
    ]
    assert main(["profile", str(job), *SMALL, *files, "--exits", str(exits)]) == 0
    return folder, json.loads((folder / "new" / "result.json").read_text())


def test_the_result_has_everything_that_was_measured(
    profiled: tuple[Path, dict[str, Any]], exits: Path
) -> None:
    _, result = profiled
    assert {
        "model",
        "date",
        "environment",
        "options",
        "prompts",
        "row_invariant",
        "num_layers",
        "best",
        "costs",
        "calibration",
    } < result.keys()
    assert result["exits"] == {"kind": "adapter", "layers": [2, 5], "path": str(exits), "note": None}
    agreement = result["agreement"]
    assert (
        agreement["positions"] == 72
        and agreement["tasks"] == {"chat": 48, "maths": 24}
        and agreement["full_model"] == 1.0
    )
    assert [exit_["layer"] for exit_ in agreement["own_head"]] == list(range(1, 9))
    for exit_, like in zip(agreement["exits"], (6, 8), strict=True):
        own = agreement["own_head"][like - 1]
        assert (exit_["agreement"], exit_["tasks"]) == (own["agreement"], own["tasks"]) and len(
            exit_["first_right"]
        ) == 2
        assert exit_["first_right"][0] == exit_["agreement"]
    assert (
        all(
            0 <= sizes["found"] < 1 and set(sizes["tasks"]) == {"chat", "maths"}
            for sizes in agreement["ngrams"]
        )
        and agreement["draft_model"] is None
    )
    assert max(sizes["found"] for sizes in agreement["ngrams"]) > 0.1
    kinds = {
        f"{drafter}_{tiers}_tier"
        for drafter in ("adapter", "tree", "ngram", "hybrid")
        for tiers in ("two", "three")
    }
    assert {plan["kind"] for plan in result["predictions"]} == kinds == set(
        result["best_of_kind"]
    ) and result["num_predicted"] > len(result["predictions"])
    assert (
        result["measured"][0]["kind"] == "plain" and {run["kind"] for run in result["measured"][1:]} == kinds
    )
    assert result["best"] in [run["plan_text"] for run in result["measured"]]
    for kind, best in result["best_of_kind"].items():
        (run,) = (run for run in result["measured"] if run["kind"] == kind)
        assert best == {
            name: run[name]
            for name in ("plan_text", "speculative", "tokens_per_s", "ratio_to_plain", "ratio_by_task")
        }
        assert set(best["ratio_by_task"]) == {"chat", "maths", "mean"}
    costs = result["costs"]
    assert 0 < costs["context_len"] < 128 and not costs["is_static"] and costs["row_buckets"] == []
    assert {"plain", "draft/2", "check/0-5", "check/2-5", "verify/5", "lookup"} <= costs["stages"].keys()
    model = LatencyModel({name: StageCost(**each).cost for name, each in costs["stages"].items()})
    plain_ms = model["plain"](2, 2, 2 * costs["context_len"])
    assert plain_ms == pytest.approx(result["calibration"]["plain_parts_ms"]) and plain_ms > 0
    assert result["options"]["batch_size"] == 2 and {"cpu", "torch", "hispec"} <= result["environment"].keys()


def test_what_was_run_gave_plains_output_and_the_predicted_tokens_per_round(
    profiled: tuple[Path, dict[str, Any]],
) -> None:
    plain, *others = profiled[1]["measured"]
    assert plain["tokens_per_round"] == 1.0 == plain["ratio_to_plain"]
    for run in [plain, *others]:
        assert run["exact_match"] == [3, 3] and len(run["tokens_per_s_runs"]) == 2
        assert run["predicted"]["tokens_per_round"] == run["tokens_per_round"]
        assert run["predicted"]["tokens_per_s"] > 0 and run["difference"]["tokens_per_round"] == 0.0
        # Which rows run in a step is known; what each of them needs of it is taken to be independent.
        rel = 1e-9 if run is plain else 0.15
        assert run["tokens_per_full_pass"] == pytest.approx(run["predicted"]["tokens_per_full_pass"], rel=rel)
    assert sum(run["tokens_per_round"] > 1.0 for run in others) >= 6, (
        "without a right draft, nothing is shown"
    )


def test_the_preset_is_a_run_config_with_every_field_explained(profiled: tuple[Path, dict[str, Any]]) -> None:
    folder, result = profiled
    text = (folder / "preset.yaml").read_text(encoding="utf-8")
    config = load_preset(folder / "preset.yaml")
    job = load_job(folder / "job.yaml")
    assert (config.model, config.sampling) == (job.model, job.sampling)
    assert config.engine == job.engine.model_copy(update={"max_num_seqs": 2})
    best, reason = choose(result["measured"])
    assert (best["plan_text"], reason) == (result["best"], result["best_reason"])
    assert (config.speculative.model_dump() if config.speculative else None) == best["speculative"]
    assert result["date"] in text and f"{best['tokens_per_s']:.1f} tokens/s" in text and "3/3" in text


def test_the_preset_of_a_plan_that_gains_nothing_is_plain_and_tells_the_interval(
    profiled: tuple[Path, dict[str, Any]],
) -> None:
    folder, result = profiled
    job = load_job(folder / "job.yaml")
    plain, two, three = (
        next({**run} for run in result["measured"] if run["kind"] == kind)
        for kind in ("plain", "ngram_two_tier", "ngram_three_tier")
    )
    two["tokens_per_round"], three["tokens_per_round"] = 1.5, 1.0
    text = preset_text(
        job,
        result
        | {
            "measured": [
                plain | speeds(50.0, 51.0),
                three | speeds(52.0, 53.0),
                two | speeds(50.8, 50.3) | {"ratio_interval": [0.961, 1.042], "ratio_to_plain": 1.001},
            ]
        },
    )
    assert yaml.safe_load(text)["speculative"] is None
    assert "the simplest of 2 that are within" in text and "1.00 x plain (0.96 to 1.04)" in text
    fast = two | speeds(70.0, 71.4) | {"ratio_interval": [1.385, 1.424], "ratio_to_plain": 1.4}
    text = preset_text(job, result | {"measured": [plain | speeds(50.0, 51.0), fast]})
    assert yaml.safe_load(text)["speculative"] == fast["speculative"]
    assert re.search(r"1\.40 x plain \(1\.39 to 1\.42\).* <- this plan", text)


@pytest.mark.parametrize(
    "kind", ["plain", "adapter_two_tier", "tree_three_tier", "ngram_two_tier", "hybrid_three_tier"]
)
def test_a_preset_of_any_plan_loads_and_runs_to_plains_output(
    profiled: tuple[Path, dict[str, Any]], kind: str, tmp_path: Path
) -> None:
    folder, result = profiled
    (chosen,) = (run for run in result["measured"] if run["kind"] == kind)
    text = preset_text(load_job(folder / "job.yaml"), result, chosen)
    (tmp_path / "preset.yaml").write_text(text, encoding="utf-8")
    config = load_preset(tmp_path / "preset.yaml")
    assert (config.speculative.model_dump() if config.speculative else None) == chosen["speculative"]
    settings = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all(" # " in line for line in settings)
    names = {line.partition(":")[0].strip() for line in settings}
    assert names == field_names(config.model_dump())
    if chosen["speculative"] is None:
        assert "speculative: null" in text and "plain decoding " in text
    assert (
        main(["run", str(folder / "job.yaml"), "--preset", str(tmp_path / "preset.yaml"), "--no-progress"])
        == 0
    )
    assert outputs_of(folder / "out.jsonl") == outputs_of(folder / "plain.jsonl")


def outputs_of(path: Path) -> list[list[dict[str, Any]]]:
    return [json.loads(line)["outputs"] for line in path.read_text().splitlines()]


def field_names(values: dict[str, Any]) -> set[str]:
    inner = [
        field_names(value)
        for name, value in values.items()
        if isinstance(value, dict) and name != "logit_bias"
    ]
    return set(values).union(*inner)


def test_every_setting_has_its_comment() -> None:
    def paths(model: Any, where: str = "") -> set[str]:
        found: set[str] = set()
        for name, field in model.model_fields.items():
            found.add(where + name)
            for nested in [field.annotation, *getattr(field.annotation, "__args__", ())]:
                if hasattr(nested, "model_fields"):
                    found |= paths(nested, f"{where}{name}.")
        return found

    assert paths(RunConfig) == set(COMMENTS)


def test_both_plots_are_pictures(profiled: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, result = profiled
    for name in (ACCEPTANCE, RATIO):
        assert (folder / "plots" / name).read_bytes().startswith(b"\x89PNG") and (
            folder / "plots" / name
        ).stat().st_size > 10_000
    # One task and no trained exits: less to draw, and no line twice.
    agreement = result["agreement"] | {
        "tasks": {"all": 72},
        "exits": [exit_ | {"kind": "exit"} for exit_ in result["agreement"]["exits"]],
    }
    draw_plots(result | {"agreement": agreement}, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [ACCEPTANCE, RATIO]


def test_the_tables_say_what_was_found(
    profiled: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    result = profiled[1]
    print_profile(
        result
        | {
            "row_invariant": False,
            "environment": result["environment"] | {"cores": 2, "machine_cores": 2, "load": 1.5},
        }
    )
    printed = capsys.readouterr().out
    exit_, sizes, run = (
        result["agreement"]["exits"][0],
        result["agreement"]["ngrams"][0],
        result["measured"][1],
    )
    shares = (
        f"{exit_['agreement']:.1%}",
        f"{sizes['found']:.1%}",
        f"{run['tokens_per_s']:.1f}",
        f"{run['tokens_per_full_pass']:.2f}",
    )
    assert all(
        part in printed
        for part in (
            *shares,
            "own head",
            "chat",
            "maths",
            "p(2)",
            "found",
            "3/3",
            "near-ties",
            "load 1.5",
            "Largest difference",
        )
    )
    lines = [line for run in result["measured"] for line in wrap(run["plan"], 56)]
    assert all(line in printed for line in lines), "one plan of each kind was run"
    assert max(map(len, printed.splitlines())) <= 140 and "…" not in printed
    in_a_line = " ".join(printed.split())  # a long reason is continued on the next
    assert f"best: {result['best']}, " in printed and result["best_reason"] in in_a_line


def test_a_model_without_trained_exits_is_profiled_with_its_own_head(
    tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_job(tmp_path, tiny_path, ROWS[:1])
    only = ["--drafters", "exit", "tree", "--json", str(tmp_path / "result.json")]
    assert main(["profile", str(job), *SMALL, *only, "--set", "engine.max_model_len=28"]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["exits"]["kind"] == "exit" and result["exits"]["layers"] == default_layers(9) == [
        1,
        2,
        3,
        4,
        6,
    ]
    assert result["agreement"]["exits"][2]["agreement"] == result["agreement"]["own_head"][2]["agreement"]
    assert all(
        run["predicted"]["tokens_per_round"] == run["tokens_per_round"] and run["exact_match"] == [1, 1]
        for run in result["measured"]
    )
    assert all(run["ratio_by_task"] == {} for run in result["measured"]), "there is one task"
    printed = capsys.readouterr().out
    assert (
        "the model's own head" in printed
        and "hispec train" in printed
        and result["options"]["batch_size"] == 1
        and "n-grams" not in printed
    )
    assert result["agreement"]["positions"] == 28 - 11 and result["costs"]["context_len"] == round(
        11 + 17 / 2
    ), "the model's length ends the answer"
    assert set(result["best_of_kind"]) == {
        "exit_two_tier",
        "exit_three_tier",
        "tree_two_tier",
        "tree_three_tier",
    }


def test_the_jobs_draft_model_is_profiled(
    tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model itself: its drafts are all right, and count for nothing in full passes."""
    job = write_job(
        tmp_path, tiny_path, ROWS[:2], speculative={"draft": {"kind": "model", "path": str(tiny_path)}}
    )
    assert (
        main(["profile", str(job), *SMALL, "--drafters", "model", "--json", str(tmp_path / "result.json")])
        == 0
    )
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["draft_model"] == str(tiny_path) and result["agreement"]["draft_model"]["agreement"] == 1.0
    two, three = (result["best_of_kind"][f"model_{tiers}_tier"] for tiers in ("two", "three"))
    assert two["speculative"]["draft"]["path"] == str(tiny_path) == three["speculative"]["draft"]["path"]
    runs = {run["kind"]: run for run in result["measured"]}
    assert (
        1.5
        < runs["model_two_tier"]["tokens_per_round"]
        == runs["model_two_tier"]["predicted"]["tokens_per_round"]
        <= 3
    )
    assert "A draft model's own layers are left out" in capsys.readouterr().out


def test_a_draft_models_path_is_whole_and_no_controller_is_started_for_it(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preset is read from other folders; and what a controller would measure, nothing here uses."""
    monkeypatch.setattr(profile_run.Session, "profile", lambda self, *args: {"plans": self.plans})
    monkeypatch.chdir(tiny_path.parent)
    own = {"draft": {"kind": "model", "path": tiny_path.name}, "control": "goodput", "graphs": False}
    own["goodput"] = {"latency": str(tmp_path / "nowhere.json")}
    job = Job.model_validate(
        yaml.safe_load(write_job(tmp_path, tiny_path).read_text())
        | {"speculative": own, "input": {"path": str(tmp_path / "in.jsonl")}}
    )
    result = profile_run.run_profile(job, ProfileOptions(drafters=("model", "ngram")), progress=False)
    assert result["draft_model"] == str(tiny_path)
    assert {plan.draft.path for plan in result["plans"]} == {str(tiny_path), None}
    assert not any(plan.graphs for plan in result["plans"])


@pytest.mark.parametrize(
    "stop", ["\x7f", "\x80", "a\x85b", "\u2028", "\uffff", "\ufeff", "é → 😀", '"\\\t\n']
)
def test_text_of_any_characters_is_read_back_as_it_was(stop: str) -> None:
    assert yaml.safe_load(_scalar([stop])) == [stop]


def test_default_layers_lie_inside_of_any_model() -> None:
    assert (
        default_layers(30) == [2, 4, 5, 8, 10, 15, 20]
        and default_layers(32) == [2, 4, 5, 8, 11, 16, 21]
        and default_layers(2) == [1]
    )


def test_exits_are_those_of_the_option_then_of_the_job(tiny_path: Path, exits: Path, tmp_path: Path) -> None:
    def job(**speculative: Any) -> Any:
        return load_job(write_job(tmp_path, tiny_path, speculative=speculative)).speculative

    named = job(draft={"kind": "adapter", "path": str(exits), "layer": 2})
    assert (
        exits_folder(None, named) == str(exits) == exits_folder(str(exits), job(draft={"layer": 2}))
        and exits_folder(None, None) is None
    )
    assert trained_paths(named) == [str(exits)] and trained_paths(None) == []
    assert trained_paths(job(draft={"kind": "adapter", "layer": 2})) == [None], "those that come with HiSpec"
    assert trained_paths(job(draft={"kind": "hybrid", "layer": 2})) == [None]
    assert trained_paths(job(draft={"kind": "hybrid", "exit": "exit", "layer": 2})) == []
    by_model = job(draft={"kind": "model", "path": "small"})
    assert exits_folder(None, by_model) is None and trained_paths(by_model) == []
    two = job(
        draft={"kind": "adapter", "path": "a", "layer": 2}, check={"kind": "adapter", "path": "b", "layer": 5}
    )
    with pytest.raises(ConfigError, match=r"two folders.*--exits"):
        exits_folder(None, two)
    assert exits_folder(str(exits), two) == str(exits)


def test_shipped_exits_have_no_path(tiny_decoder: Decoder) -> None:
    trained = [AdapterExit(tiny_decoder, layer, [], torch.ones(48), None, None) for layer in (2, 5)]
    tiers = Candidates([2, 5], trained).tiers
    draft, check, hybrid = tiers.draft(2), tiers.check(5), tiers.hybrid(2, NgramConfig(), 1)
    assert (
        draft.kind == check.kind == hybrid.exit == "adapter"
        and draft.path is None is check.path is hybrid.path
        and hybrid.is_trained
    )


def test_an_interrupt_leaves_no_file(
    tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: Any, **fields: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(profile_run, "time_plans", interrupt)
    job = write_job(tmp_path, tiny_path, ROWS[:1])
    before = sorted(tmp_path.iterdir())
    assert (
        main(
            [
                "profile",
                str(job),
                *SMALL,
                "--json",
                str(tmp_path / "r.json"),
                "--write-preset",
                str(tmp_path / "p.yaml"),
            ]
        )
        == 130
    )
    assert (
        "Nothing was written; the same command starts again" in capsys.readouterr().err
        and sorted(tmp_path.iterdir()) == before
    )


@pytest.mark.parametrize(
    "line", [["run", "--dry-run"], ["bench", "--no-transformers", "--repeats", "1"], ["profile", *SMALL]]
)
def test_a_jobs_trace_stays_that_of_its_own_rows(tiny_path: Path, tmp_path: Path, line: list[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    engine = {"max_num_seqs": 2, "max_model_len": 128, "dtype": "float32", "trace": str(trace)}
    speculative = {"draft": {"kind": "ngram"}, "num_draft_tokens": 2}
    job = write_job(tmp_path, tiny_path, engine=engine, speculative=speculative)
    assert main(["run", str(job), "--no-progress"]) == 0
    before = trace.read_bytes()
    command, *options = line
    assert main([command, str(job), *options]) == 0
    assert before and trace.read_bytes() == before
