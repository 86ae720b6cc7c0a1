"""`hispec train` with `recipe: ee`: a checkpoint with exits of its own, and a package that makes the same one
anywhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ee_models.checkpoint.ee_package import INFO, TENSORS, EEPackage, PackageError
from ee_models.checkpoint.exit_files import ExitsFile
from ee_models.checkpoint.loader import open_checkpoint
from ee_models.checkpoint.low_rank import LowRank
from hispec import LLM, SamplingParams
from hispec.loading import ee_packages
from hispec.loading.fetch import fetch
from hispec.loading.known_models import resolve_model
from hispec.loading.target_model import open_model
from hispec.training.schema import load_training
from tests.helpers.tiny import EOS_ID, tiny_checkpoint
from tests.helpers.training_command import SMALL, train, write_config

EE: dict[str, Any] = {
    "target": "labels",
    "lora_rank": 4,
    "exits": [
        {"layer": 2, "vocabulary_size": 100, "weight": 2.0},
        {"layer": 4, "intermediate_size": 24},
    ],
}
RECIPE: dict[str, Any] = {"recipe": "ee", "adapters": "left out"}
ANSWERED = [{"path": "answered.jsonl", "field": "question", "answer": "answer"}]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("HISPEC_CACHE", str(folder))
    return folder


def write(folder: Path, model: Path, ee: Any, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"question": f"What is {n}?", "answer": f"It is {n + 1}, of course."} for n in range(12)]
    (folder / "answered.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"prompts": ANSWERED, "max_length": 100, "held_out": 2}
    loop = {"num_steps": 6, "batch_size": 4, "eval_every": 4, "checkpoint_every": 2, "learning_rate": 0.01}
    return write_config(folder, model, **{"data": data, "ee": ee, "loop": loop, **RECIPE, **changes})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The folder of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("ee")
    assert train(write(folder, model, EE)) == 0
    return folder / "out"


def weights(folder: Path) -> dict[str, Tensor]:
    checkpoint = open_checkpoint(folder)
    return {name: checkpoint.tensor(name) for name in checkpoint.tensors}


def generate(model: str | Path, **options: Any) -> list[list[int]]:
    prompts = ["What is 3?", "Why?", "x" * 30]
    with LLM(str(model), **SMALL, **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=20)
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def test_the_model_decodes_with_its_own_exits_without_changing_its_output(trained: Path, model: Path) -> None:
    files = {path.name for path in trained.iterdir()}
    assert files == {"checkpoint.safetensors", "log.jsonl", "model", "package", "work"}
    plain = generate(trained / "model")
    assert plain != generate(model), "nothing was learnt"
    tiers = {"draft": {"kind": "adapter", "layer": 2}, "check": {"kind": "adapter", "layer": 4}}
    assert generate(trained / "model", speculative=tiers | {"num_draft_tokens": 2, "num_checks": 2}) == plain
    about = ExitsFile(trained / "package").about
    assert [info.layer for info in about.exits] == [2, 4] and about.recipe["name"] == "ee"
    assert (about.recipe["target"], about.recipe["lora_rank"]) == ("labels", 4)
    assert about.recipe["exits"][0] == {"layer": 2, "init": "trunk", "weight": 2.0}
    assert all({"loss", "agreement"} == info.held_out.keys() for info in about.exits)
    with safe_open(trained / "package" / "exits.safetensors", "pt") as file:
        assert EOS_ID in file.get_tensor("layer2.vocabulary").tolist()
    assert EEPackage(trained / "package").about.held_out.keys() == {"loss"}


def test_the_package_makes_the_same_model_once(
    trained: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = trained / "package"
    assert {path.name for path in package.iterdir()} == {
        INFO,
        TENSORS,
        "exits.json",
        "exits.safetensors",
    }
    made = Path(resolve_model(str(package)))
    assert made.parent == cache / "models" and "making a checkpoint" in capsys.readouterr().err
    one, other = weights(made), weights(trained / "model")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert generate(package) == generate(trained / "model")
    assert open_model(package).path == str(made)
    stamp = (made / "config.json").stat().st_mtime_ns
    assert resolve_model(str(package)) == str(made) and capsys.readouterr().err == ""
    assert (made / "config.json").stat().st_mtime_ns == stamp
    assert not list(made.parent.glob(".*/")), "a temporary folder was left behind"


def test_a_package_that_comes_with_hispec_is_fetched_by_its_name(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(trained / "package", tmp_path / "tiny-maths")
    monkeypatch.setattr(ee_packages, "PRETRAINED", tmp_path)
    made = fetch("tiny-maths", progress=False)
    assert resolve_model("tiny-maths") == str(made)
    assert generate("tiny-maths") == generate(trained / "model")


def test_another_base_model_is_refused_by_name(trained: Path, tmp_path: Path) -> None:
    other = tiny_checkpoint(tmp_path / "other", num_layers=6, tokenizer=True, seed=5)
    package = EEPackage(trained / "package")
    (tmp_path / "made").mkdir()
    with pytest.raises(
        PackageError, match=r"the changes in .*package belong to .*model; .*other has the same"
    ):
        package.make_checkpoint(open_checkpoint(other), tmp_path / "made")
    assert not list((tmp_path / "made").iterdir())


@pytest.mark.parametrize("name", [INFO, TENSORS, "exits.json", "exits.safetensors"])
@pytest.mark.parametrize("damage", ["cut", "gone", "other"])
def test_a_damaged_package_is_an_error_and_leaves_nothing(
    trained: Path, tmp_path: Path, cache: Path, name: str, damage: str
) -> None:
    package = tmp_path / "package"
    shutil.copytree(trained / "package", package)
    file = package / name
    if damage == "cut":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    elif damage == "gone":
        file.unlink()
    elif name == INFO:
        file.write_text(json.dumps(json.loads(file.read_text()) | {"surprise": 1}))
    elif name == "exits.json":
        about = json.loads(file.read_text())
        about["base_model"]["fingerprint"] = "0" * 32
        file.write_text(json.dumps(about))
    else:
        tensors = load_file(file)
        save_file({key: tensor.flip(0).contiguous() for key, tensor in tensors.items()}, file)
    if (name, damage) == (INFO, "gone"):
        return  # then it is no package
    if (name, damage) == ("exits.json", "gone"):
        assert open_checkpoint(resolve_model(str(package)))  # a model that has no exits
        return
    with pytest.raises(Exception, match=str(package)) as caught:
        resolve_model(str(package))
    assert "copy" in str(caught.value) or "train" in str(caught.value), caught.value
    assert not list((cache / "models").glob("package-*"))


def test_what_an_interrupted_run_has_learnt_can_be_written(
    trained: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ee_models.training.early_exit import EarlyExitTask

    config, resume = write(tmp_path, model, EE), ("--set", "output.resume=true")
    assert train(config, "--only-export") != 0, "there is nothing to export yet"
    batches = EarlyExitTask.micro_batches

    def kill(self: EarlyExitTask, step: int, *others: Any) -> Any:
        if step == 5:
            raise KeyboardInterrupt
        return batches(self, step, *others)

    with monkeypatch.context() as patch:
        patch.setattr(EarlyExitTask, "micro_batches", kill)
        assert train(config, *resume) != 0
    overwrite = ("--set", "output.overwrite=true")  # nothing of it is begun anew
    assert train(config, "--only-data", *overwrite) == 0
    assert train(config, "--only-export", *overwrite) == 0
    early = weights(tmp_path / "out" / "model")
    assert train(config, "--only-export", *resume) == 0
    again = weights(tmp_path / "out" / "model")
    assert all(torch.equal(early[name], again[name]) for name in early)
    missing = ("--set", "data.prompts=[{path: no.jsonl}]")
    assert train(config, *overwrite, *missing) != 0, "whose data is not there"
    assert train(config, *resume) == 0
    late, whole = weights(tmp_path / "out" / "model"), weights(trained / "model")
    assert all(torch.equal(late[name], whole[name]) for name in whole)
    assert any(not torch.equal(early[name], whole[name]) for name in whole)


def test_with_all_weights_there_is_a_model_with_exits_and_no_package(model: Path, tmp_path: Path) -> None:
    assert train(write(tmp_path, model, EE | {"lora_rank": None})) == 0
    assert not (tmp_path / "out" / "package").exists()
    plain = generate(tmp_path / "out" / "model")
    exits = {"draft": {"kind": "adapter", "layer": 2}, "num_draft_tokens": 2}
    assert generate(tmp_path / "out" / "model", speculative=exits) == plain != generate(model)


def test_a_model_without_room_for_its_exits_replaces_none(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, folder = write(tmp_path, model, EE | {"lora_rank": None}), tmp_path / "out" / "model"
    assert train(config) == 0
    before = {file.name: file.read_bytes() for file in folder.iterdir()}

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("hispec.training.recipes.save_exits", full)
    assert train(config, "--set", "output.overwrite=true", "seed=1") == 2
    assert "No space left on device" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_target_self_trains_on_the_models_own_answers(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"prompts": [{"path": "prompts.jsonl"}], "max_tokens": 8, "max_length": 100, "held_out": 2}
    assert train(write(tmp_path, model, EE | {"target": "self"}, data=data)) == 0
    out = capsys.readouterr().out
    assert "last_kl: " in out and "last_same: " in out
    held_out = EEPackage(tmp_path / "out" / "package").about.held_out
    assert held_out.keys() == {"loss", "kl", "same"}


def test_exits_go_on_from_trained_ones(
    trained: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The vocabulary is chosen anew, so that one which fits other answers can be taken along."""
    first = write_config(tmp_path / "adapters", model)
    assert train(first) == 0
    exits = [{"layer": 2, "init": "trained", "vocabulary_size": 50}, {"layer": 4, "intermediate_size": 24}]
    ee = EE | {"exits": exits, "init_path": str(tmp_path / "adapters" / "out")}
    no_learning = {"num_steps": 1, "batch_size": 4, "learning_rate": 1e-12}
    assert train(write(tmp_path / "ee", model, ee, loop=no_learning)) == 0
    before = load_file(tmp_path / "adapters" / "out" / "exits.safetensors")
    after = load_file(tmp_path / "ee" / "out" / "package" / "exits.safetensors")
    assert torch.equal(before["layer2.blocks.0.q_proj"], after["layer2.blocks.0.q_proj"])
    assert not torch.equal(before["layer4.blocks.0.q_proj"], after["layer4.blocks.0.q_proj"])
    assert before["layer2.vocabulary"].numel() == 100 and after["layer2.vocabulary"].numel() == 50
    exits[1]["init"] = "trained"  # which there has two blocks
    config = write(tmp_path / "other", model, ee | {"exits": exits})
    assert train(config) == 2 and "num_blocks=2, the one to train 1" in capsys.readouterr().err
    assert not (tmp_path / "other" / "out").exists(), "before anything was answered"


GOES_ON = EE | {"exits": [{**exit_, "init": "trained"} for exit_ in EE["exits"]]}


def test_training_goes_on_from_a_package(trained: Path, model: Path, tmp_path: Path) -> None:
    package = tmp_path / "package"
    shutil.copytree(trained / "package", package)
    ee = GOES_ON | {"init_path": str(package), "skip_batches": 6}
    no_learning = {"num_steps": 1, "batch_size": 4, "learning_rate": 1e-12}
    config = write(tmp_path, model, ee, loop=no_learning)
    assert train(config) == 0
    for name in (TENSORS, "exits.safetensors"):
        before, after = (load_file(folder / name) for folder in (package, tmp_path / "out" / "package"))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[each], after[each]) for each in before)
    about = EEPackage(tmp_path / "out" / "package").about
    assert about.recipe["begun_as"] == EEPackage(package).about.recipe
    assert about.recipe == ExitsFile(tmp_path / "out" / "package").about.recipe
    assert (about.recipe["step"], about.recipe["begun_as"]["step"]) == (1, 6)


def test_a_checkpoint_is_of_what_training_began_with(
    trained: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "package"
    shutil.copytree(trained / "package", package)
    config = write(tmp_path, model, GOES_ON | {"init_path": str(package)})
    assert train(config) == 0
    other = write(tmp_path / "other", model, EE, loop={"num_steps": 1, "batch_size": 4})
    assert train(other) == 0
    shutil.rmtree(package)
    shutil.copytree(tmp_path / "other" / "out" / "package", package)
    capsys.readouterr()
    resume = ("--set", "output.resume=true")
    assert train(config, *resume) == 2 and "belongs to another run" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"lora_rank": 3}, "low-rank matrices of lora_rank=4 and lora_alpha=32, not 3 and 32; give those"),
        ({**EE, "init_path": "somewhere"}, "is no EE package, and has no effect without an exit of init: tr"),
        ({"lora_alpha": 16}, "low-rank matrices of lora_rank=4 and lora_alpha=32, not 4 and 16; give those"),
        ({"lora_rank": None}, "whose low-rank matrices cannot be gone on with by training all weights"),
        ({"exits": [{"layer": 2, "init": "trained", "num_blocks": 2}]}, "num_blocks=1, the one to train 2"),
    ],
)
def test_a_package_of_another_kind_is_no_beginning(
    trained: Path,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    message: str,
) -> None:
    ee = GOES_ON | {"init_path": str(trained / "package")} | changes
    assert train(write(tmp_path, model, ee)) == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "out").exists(), "before anything was answered"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "had seed=0, not 1"),
        ({"loop": {"num_steps": 2, "batch_size": 5}}, "had batch_size=4, not 5"),
        ({"data": {"prompts": ANSWERED, "max_length": 100, "held_out": 3}}, "had 10 examples, this has 9"),
    ],
)
def test_batches_that_were_others_are_not_passed_over(
    trained: Path,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    message: str,
) -> None:
    ee = GOES_ON | {"init_path": str(trained / "package"), "skip_batches": 6}
    assert train(write(tmp_path, model, ee, **changes)) == 2 and message in capsys.readouterr().err


def test_new_exits_may_be_trained_over_a_packages_trunk(trained: Path, model: Path, tmp_path: Path) -> None:
    package = tmp_path / "package"  # which may have none itself
    package.mkdir()
    for name in (INFO, TENSORS):
        shutil.copyfile(trained / "package" / name, package / name)
    no_learning = {"num_steps": 1, "batch_size": 4, "learning_rate": 1e-12}
    assert train(write(tmp_path, model, EE | {"init_path": str(package)}, loop=no_learning)) == 0
    before, after = (load_file(folder / TENSORS) for folder in (package, tmp_path / "out" / "package"))
    assert all(torch.equal(before[each], after[each]) for each in before)


def test_what_cannot_be_trained_is_refused_before_anything_is_answered(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hispec.training.recipes.find_spec", lambda name: None)
    assert train(write(tmp_path, model, EE)) == 2
    assert "ee.lora_rank=4 needs the package peft" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_model_is_for_all_who_may_read_the_folder(trained: Path) -> None:
    modes = {(trained / name).stat().st_mode for name in ("model", "package")}
    assert modes == {trained.stat().st_mode}


def test_a_package_whose_base_is_nowhere_says_so(trained: Path, tmp_path: Path) -> None:
    package = tmp_path / "package"
    shutil.copytree(trained / "package", package)
    about = json.loads((package / INFO).read_text())
    about["base_model"]["name"] = "models/base"
    (package / INFO).write_text(json.dumps(about))
    words = r"is what changed of models/base, which is not to be had here: .* into ee.json, base_model.name"
    with pytest.raises(PackageError, match=words):
        resolve_model(str(package))


def test_a_package_of_another_model_is_no_beginning(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    another = tiny_checkpoint(tmp_path / "model", num_layers=6, tokenizer=True, seed=1)
    assert train(write(tmp_path, another, GOES_ON | {"init_path": str(trained / "package")})) == 2
    assert "they can only be added to the former" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"ee": EE | {"target": "self", "lora_rank": None}}, "give lora_rank"),
        ({"ee": "left out"}, "recipe: ee needs `ee` with the exits to train"),
        ({"ee": EE | {"exits": [{"layer": 2}, {"layer": 2}]}}, "exits must be at different layers"),
        ({"layerskip": {}}, "`layerskip` has no effect with recipe: ee"),
        ({"data": {"prompts": [{"opening": "x", "count": 1, "answer": "y"}]}}, "answers an `opening` itself"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    model: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config = write(tmp_path, model, changes.pop("ee", EE), **changes)
    with pytest.raises(ValueError, match=message):
        load_training(config)


def test_an_exit_that_the_model_cannot_have_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(write(tmp_path, model, EE | {"exits": [{"layer": 6}]})) != 0
    assert "ee.exits: layer 6 is no early exit of a model of 6 layers" in capsys.readouterr().err


def test_a_row_without_an_answer_is_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write(tmp_path, model, EE)
    with (tmp_path / "answered.jsonl").open("a") as file:
        file.write('{"question": "And?", "answer": " "}\n')
    assert train(config) == 0
    assert "line 13: field 'answer' must be a non-empty string, got ' '" in capsys.readouterr().err


def test_low_rank_changes_are_what_matrix_products_say_in_fixed_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(30, 20, generator=generator)
    a, b = torch.randn(5, 20, generator=generator), torch.randn(30, 5, generator=generator)
    change = LowRank(a.bfloat16(), b.bfloat16(), 0.5)
    expected = weight.double() + 0.5 * b.bfloat16().double() @ a.bfloat16().double()
    found = change.added_to(weight, torch.float64)
    torch.testing.assert_close(found, expected)
    # Summed one rank after the other by hand: the same bits.
    total = 0.0
    for rank in range(5):
        total += float(change.b[7, rank].double()) * float(change.a[rank, 3].double())
    assert float(found[7, 3]) == float(weight[7, 3].double()) + 0.5 * total
