"""`benchmarks/hierarchy.py` on a tiny model: what is tuned, what is counted and measured, what is refused."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import hispec.llm
from benchmarks import hierarchy, hierarchy_timing
from benchmarks.hierarchy_ratios import Totals, compared
from ee_models.checkpoint.exit_files import ExitInfo
from ee_models.checkpoint.loader import open_checkpoint
from hispec import LLM
from hispec.measure import latency as measuring
from hispec.profile import predict
from hispec.profile.options import ProfileOptions
from tests.helpers.adapters import TINY_MLP, make_exits

KINDS = [
    "plain",
    "two-tier exit",
    "two-tier n-gram",
    "two-tier hybrid",
    "three-tier exit",
    "three-tier exit, gated",
    "three-tier n-gram",
    "three-tier n-gram, gated",
    "three-tier hybrid",
    "three-tier hybrid, gated",
]
TUNE = [("chat", "hello there"), ("maths", "1+1="), ("chat", "what is it")]
HELD_OUT = [("chat", "good day to you"), ("maths", "2+2="), ("chat", "who are you"), ("maths", "3*7=")]


def write_prompts(path: Path, prompts: list[tuple[str, str]]) -> Path:
    path.write_text(
        "".join(
            json.dumps({"messages": [{"role": "user", "content": text}], "metadata": {"task": task}}) + "\n"
            for task, text in prompts
        )
    )
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("prompts")
    tune, held_out = write_prompts(folder / "tune", TUNE), write_prompts(folder / "held_out", HELD_OUT)
    return ["--tune", str(tune), "--prompts", str(held_out)]


@pytest.fixture(scope="module")
def model(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with exits beside its weights that are right as often as the model's own head at layers 6
    and 8."""
    folder = tmp_path_factory.mktemp("model") / "ee"
    shutil.copytree(tiny_path, folder)
    infos = [
        ExitInfo(layer=2, num_blocks=4, intermediate_size=TINY_MLP),
        ExitInfo(layer=5, num_blocks=3, intermediate_size=TINY_MLP),
    ]
    make_exits(folder, open_checkpoint(tiny_path), infos, from_trunk=True)
    return folder


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    """Few plans are searched, and what passes take is of no interest."""
    with pytest.MonkeyPatch.context() as patch:
        sizes = {"max_drafts": 2, "max_checks": 2, "max_window": 6}
        for module in (hierarchy, hierarchy_timing):
            patch.setattr(module, "ProfileOptions", partial(ProfileOptions, **sizes))
        patch.setattr(predict, "_REFINED", 1)
        patch.setattr(measuring, "_SAMPLES", 1)
        yield


@pytest.fixture(scope="module")
def counted(model: Path, files: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("result") / "new" / "result.json"
    arguments = [str(model), *files, "--max-tokens", "16", "--no-timing", "--json", str(path)]
    assert hierarchy.main(arguments) == 0
    assert [file.name for file in path.parent.iterdir()] == ["result.json"]
    return json.loads(path.read_text())


def test_the_best_plan_of_every_kind_is_tuned_and_gated_ones_are_gated(counted: dict[str, Any]) -> None:
    plans = counted["counted"]["plans"]
    assert list(plans) == KINDS and plans["plain"]["speculative"] is None
    for kind in KINDS[1:]:
        check = plans[kind]["speculative"]["check"]
        assert (check is not None) == kind.startswith("three-tier"), kind
        assert check is None or (check["continue_confidence"] is not None) == kind.endswith("gated"), kind
        assert plans[kind]["speculative"]["num_branches"] == 1, "trees are asked for by --trees"


def test_what_the_answers_add_up_to_is_what_is_predicted_of_all(counted: dict[str, Any]) -> None:
    lengths = counted["prompts"]["held_out"]["answer_tokens"]
    for kind, plan in counted["counted"]["plans"].items():
        answers, predicted = plan["answers"], plan["held_out"]
        assert answers["tokens"] == lengths and sum(lengths) == counted["agreement"]["positions"]
        tokens, rounds = sum(lengths), sum(answers["rounds"])
        assert tokens / rounds == pytest.approx(predicted["tokens_per_round"]), kind
        assert tokens / sum(answers["full_passes"]) == pytest.approx(predicted["tokens_per_full_pass"]), kind
        assert tokens / sum(answers["cost"]) == pytest.approx(predicted["ratio_to_plain"]), kind
    assert counted["counted"]["plans"]["plain"]["answers"]["cost"] == lengths, "a full pass costs 1"


def test_figures_are_means_over_tasks_and_the_claims_are_of_what_tuning_found(
    counted: dict[str, Any],
) -> None:
    plans, tasks = counted["counted"]["plans"], [task for task, _ in HELD_OUT]

    def mean(kind: str, base: str, cost: str) -> float:
        def speed(of: str, task: str) -> float:
            values = plans[of]["answers"]
            taken = [at for at, each in enumerate(tasks) if each == task]
            return sum(values["tokens"][at] for at in taken) / sum(values[cost][at] for at in taken)

        return sum(speed(kind, task) / speed(base, task) for task in ("chat", "maths")) / 2

    def best(tiers: str) -> str:
        of_kind = [kind for kind in plans if kind.startswith(tiers)]
        return max(of_kind, key=lambda kind: plans[kind]["tuned"]["ratio_to_plain"])

    for kind in KINDS:
        assert plans[kind]["per_cost"]["ratio"] == pytest.approx(mean(kind, "plain", "cost"))
        assert plans[kind]["per_full_pass"]["ratio"] == pytest.approx(mean(kind, "plain", "full_passes"))
        low, high = plans[kind]["per_cost"]["interval"]
        assert low <= plans[kind]["per_cost"]["ratio"] <= high
    for name, cost in (("per_cost", "cost"), ("per_full_pass", "full_passes")):
        found = counted["counted"]["claims"][name]
        for claim, base in (("over_exits", "two-tier exit"), ("over_any", best("two"))):
            assert (found[claim]["three_tier"], found[claim]["two_tier"]) == (best("three"), base)
            assert found[claim]["ratio"] == pytest.approx(mean(best("three"), base, cost))


def test_agreement_is_that_of_the_held_out_answers(counted: dict[str, Any]) -> None:
    exits = counted["agreement"]["exits"]
    assert [each["layer"] for each in exits] == [2, 5] and set(exits[0]["tasks"]) == {"chat", "maths"}
    assert "measured" not in counted and {"cpu", "others", "hispec"} <= counted["environment"].keys()


def test_plans_are_measured_batch_by_batch_beside_what_is_predicted(
    model: Path,
    files: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, batch = tmp_path / "result.json", ["--batch-size", "2", "--max-tokens", "6"]
    loads = itertools.count(0.25)  # which the command itself makes rise
    monkeypatch.setattr("os.getloadavg", lambda: (next(loads), 0.0, 0.0))
    assert hierarchy.main([str(model), *files, *batch, "--json", str(path)]) == 0
    whole = json.loads(path.read_text())
    result = whole["measured"]["2"]
    assert whole["environment"]["load"] == 0.25, "before the command itself has added to it"
    assert result["drift"]["tokens"] == [2.0, 4.0, 8.0] and min(result["drift"]["factors"]) > 0
    assert [group["prompts"] for group in result["groups"]] == [[0, 2], [1, 3]]
    assert list(result["plans"]) == KINDS
    for kind, plan in result["plans"].items():
        groups, together = plan["groups"], plan["all_prompts"]
        assert plan["exact_match"] == (None if kind == "plain" else [4, 4])
        speed = sum(groups["tokens"]) / sum(groups["seconds"])
        assert plan["tokens_per_s"] == pytest.approx(speed)
        assert together["measured"] / together["predicted"] - 1 == pytest.approx(together["difference"])
        assert plan["to_plain"]["interval"] is None, "each task is a single batch"
    printed = capsys.readouterr().out
    for title in ("## Own greedy answers", "## Counted rounds", "## Measured, batch 2"):
        assert title in printed
    tables = [line for line in printed.splitlines() if line.startswith("| three-tier hybrid, gated |")]
    assert [line.count("|") for line in tables] == [8, 11]


def test_intervals_by_hand() -> None:
    """Of two prompts, one twice as fast and one as fast as the base: a quarter of draws each has one of them
    alone. By two no variance is known: Student's t of one degree of freedom, over the normal distribution's,
    and the root of 2 / (2 - 1)."""
    ours, base = Totals([10, 10], [5, 10]), Totals([10, 10], [10, 10])
    widened = 2**0.5 * 12.71 / 1.95996
    ends = [0.0, 4 / 3 + 2 / 3 * widened]  # a ratio is not below 0
    assert compared(ours, base, ["a", "a"]) == {
        "ratio": pytest.approx(4 / 3),
        "interval": pytest.approx(ends),
    }
    twice = compared(Totals([10, 30, 7], [5, 15, 2]), Totals([10, 30, 7], [10, 30, 4]), ["a", "a", "a"])
    assert twice == {"ratio": 2.0, "interval": [2.0, 2.0]}
    tasks = compared(Totals([8, 8], [4, 2]), Totals([8, 8], [8, 8]), ["a", "b"])
    assert tasks == {"ratio": 3.0, "interval": None}, "the mean of 2 and 4; single prompts do not vary"


def test_prompts_that_plans_are_tuned_on_are_refused(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """However they are written, and before a model is loaded."""
    rows = [{"prompt": "fresh"}, {"prompt": " hello  there\n"}]
    (tmp_path / "rows").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert hierarchy.main(["nowhere", *files[:3], str(tmp_path / "rows")]) == 2
    error = capsys.readouterr().err
    assert "1 of 2 prompts are also in --tune, the first in line 2 (there in line 1): 'hello there'" in error


def test_a_turn_that_only_calls_a_tool_says_nothing(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "hello  there"}]
    (tmp_path / "rows").write_text(json.dumps({"messages": turns}) + "\n")
    assert hierarchy.main(["nowhere", *files[:3], str(tmp_path / "rows")]) == 2
    assert "1 of 1 prompts are also in --tune" in capsys.readouterr().err


def test_the_prompts_are_not_written_over(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert hierarchy.main(["nowhere", *files, "--json", files[1]]) == 2
    assert "--json: " in (error := capsys.readouterr().err) and "is read by this command" in error


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing", None, "cannot read"),
        ("empty", "", "has no rows"),
        ("bad", '{"prompt": 1}\n', "line 1: prompt: must be a string"),
    ],
)
def test_bad_files_are_refused(
    files: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: str | None,
    words: str,
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    assert hierarchy.main(["nowhere", *files[:3], str(tmp_path / name)]) == 2
    assert words in capsys.readouterr().err


def test_weights_are_quantized_as_asked_where_rounds_are_counted_and_timed(
    model: Path, files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def spy(*arguments: Any, **settings: Any) -> LLM:
        made.append(settings["quantization"])
        return LLM(*arguments, **settings)

    for module in (hierarchy, hispec.llm):
        monkeypatch.setattr(module, "LLM", spy)
    path = tmp_path / "result.json"
    sizes = ["--max-tokens", "4", "--batch-size", "2", "--quantization", "int8"]
    assert hierarchy.main([str(model), *files, *sizes, "--json", str(path)]) == 0
    assert made == ["int8", "int8"] and json.loads(path.read_text())["options"]["quantization"] == "int8"


def test_weights_of_another_kind_are_refused(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert hierarchy.main(["nowhere", *files, "--quantization", "int3"]) == 2
    assert "quantization" in capsys.readouterr().err


def test_a_model_without_exits_is_refused(
    tiny_path: Path, files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert hierarchy.main([str(tiny_path), *files, "--max-tokens", "4"]) == 2
    assert "train some with `hispec train`" in capsys.readouterr().err
