"""Exits on disk: what is written is read again, and what cannot be used is refused with the reason and the
way out."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

import ee_models.checkpoint.exit_files
from ee_models.checkpoint.exit_files import (
    INFO,
    TENSORS,
    BaseModelInfo,
    ExitInfo,
    ExitsError,
    ExitsFile,
    save_exits,
)
from ee_models.checkpoint.loader import Checkpoint, open_checkpoint
from ee_models.decoder import Decoder
from ee_models.exits import load_exits
from hispec import LLM, ConfigError
from hispec.config import SpeculativeConfig
from hispec.loading.ee_packages import PRETRAINED
from hispec.loading.trained_exits import TrainedExits, shipped_exits
from tests.helpers.adapters import TINY_MLP, make_exits, make_module, tensors_of
from tests.helpers.tiny import tiny_checkpoint, tiny_model

INFOS = [
    ExitInfo(layer=3, intermediate_size=TINY_MLP, vocabulary_size=60, held_out={"loss": 1.25}),
    ExitInfo(layer=6, num_blocks=2),
]
SMALL: dict[str, Any] = {
    "max_model_len": 64,
    "num_kv_blocks": 16,
    "max_num_seqs": 2,
    "skip_tokenizer_init": True,
}


@pytest.fixture(scope="module")
def checkpoint(tiny_path: Path) -> Checkpoint:
    return open_checkpoint(tiny_path)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, checkpoint: Checkpoint) -> Path:
    return make_exits(tmp_path_factory.mktemp("exits") / "good", checkpoint, INFOS).folder


@pytest.fixture
def folder(tmp_path: Path, good: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(good, tmp_path / "exits")


def use(folder: Path, checkpoint: Checkpoint, decoder: Decoder, layers: tuple[int, ...] = (3, 6)) -> None:
    load_exits(ExitsFile(folder), list(layers), decoder, checkpoint)


def change_info(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    values = json.loads((folder / INFO).read_text())
    change(values)
    (folder / INFO).write_text(json.dumps(values))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """With a checksum that is right again, so that it is not what refuses."""
    tensors = load_file(folder / TENSORS)
    change(tensors)
    save_file(tensors, folder / TENSORS)
    change_info(
        folder,
        lambda values: values.update(tensors_sha256=ee_models.checkpoint.exit_files.sha256(folder / TENSORS)),
    )


def test_what_is_written_is_read_again(tmp_path: Path, checkpoint: Checkpoint, tiny_decoder: Decoder) -> None:
    exits = {info.layer: (info, tensors_of(make_module(info, checkpoint.config))) for info in reversed(INFOS)}
    recipe, data = (
        {"name": "adapters", "loop": {"num_steps": 7}},
        {
            "examples": 5,
            "prompts": [{"opening": "Žluť"}],
        },
    )
    written = save_exits(
        tmp_path / "new" / "exits", BaseModelInfo.of("tiny", checkpoint), exits, recipe, data
    )
    file = ExitsFile(tmp_path / "new" / "exits")
    assert file.about == written.about and file.layers == [3, 6]
    assert (file.about.recipe, file.about.data, file.about.base_model.name) == (recipe, data, "tiny")
    for info in INFOS:
        assert file.info(info.layer) == info
        tensors = file.tensors(info, checkpoint.config)
        assert tensors.keys() == info.shapes(checkpoint.config).keys() == exits[info.layer][1].keys()
        assert all(torch.equal(tensors[name], tensor) for name, tensor in exits[info.layer][1].items())
    assert [exit_.layer for exit_ in load_exits(file, [6, 3], tiny_decoder, checkpoint)] == [6, 3]
    assert sorted(path.name for path in file.folder.iterdir()) == [INFO, TENSORS]


def test_a_written_file_replaces_an_older_one(folder: Path, checkpoint: Checkpoint) -> None:
    one = make_exits(folder, checkpoint, [ExitInfo(layer=5)])
    assert ExitsFile(folder).layers == [5] and one.tensors(one.info(5), checkpoint.config)
    assert sorted(path.name for path in folder.iterdir()) == [INFO, TENSORS]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"layer": 0}, "layer"),
        ({"layer": 1, "num_blocks": 9}, "less than or equal to 8"),
        (
            {"layer": 1, "attention": False},
            "a block needs attention, an intermediate_size, or both; num_blocks 0 leaves blocks out",
        ),
        ({"layer": 1, "intermediate_size": 0}, "intermediate_size"),
        ({"layer": 1, "vocabulary_size": 0}, "vocabulary_size"),
        ({"layer": 1, "hidden_size": 3}, "Extra inputs"),
    ],
)
def test_a_shape_that_makes_no_sense_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ExitInfo(**values)


# ---- refused ----


def flip_a_byte(folder: Path) -> None:
    data = bytearray((folder / TENSORS).read_bytes())
    data[-5] ^= 1
    (folder / TENSORS).write_bytes(data)


def cut_short(folder: Path) -> None:
    (folder / TENSORS).write_bytes((folder / TENSORS).read_bytes()[:-100])


def pickled(folder: Path) -> None:
    (folder / TENSORS).write_bytes(pickle.dumps({"layer3.norm": 1}))
    change_info(
        folder,
        lambda values: values.update(tensors_sha256=ee_models.checkpoint.exit_files.sha256(folder / TENSORS)),
    )


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (
        shutil.rmtree,
        "holds no exits: cannot read exits.json: .*; give the folder that `hispec train` wrote",
    ),
    "no description": (lambda folder: (folder / INFO).unlink(), "holds no exits: cannot read exits.json"),
    "no tensors": (
        lambda folder: (folder / TENSORS).unlink(),
        "is incomplete: exits.safetensors is missing; copy it there, or train the exits again",
    ),
    "broken JSON": (
        lambda folder: (folder / INFO).write_text("{"),
        "exits.json is not a description of exits: the file: Invalid JSON.*; copy it again, or train",
    ),
    "not UTF-8": (
        lambda folder: (folder / INFO).write_bytes(b"\xff\xfe{}"),
        "holds no exits: cannot read exits.json",
    ),
    "not an object": (
        lambda folder: (folder / INFO).write_text("[]"),
        "exits.json is not a description of exits",
    ),
    "unknown field": (
        lambda folder: change_info(folder, lambda values: values["exits"][0].update(heads=2)),
        r"exits\.0\.heads: Extra inputs",
    ),
    "missing field": (
        lambda folder: change_info(folder, lambda values: values.pop("base_model")),
        "base_model: Field required",
    ),
    "later format": (
        lambda folder: change_info(folder, lambda values: values.update(format=2)),
        "format: Input should be 1",
    ),
    "no exits": (
        lambda folder: change_info(folder, lambda values: values.update(exits=[])),
        "exits: List should have at least 1",
    ),
    "a flipped bit": (
        flip_a_byte,
        (
            "exits.safetensors is damaged: its checksum is not the one in exits.json; copy it again, or train"
            " the exits again"
        ),
    ),
    "cut short": (cut_short, "exits.safetensors is damaged: its checksum"),
    "a pickle": (pickled, "exits.safetensors cannot be read"),
    "a tensor missing": (
        lambda folder: change_tensors(folder, lambda tensors: tensors.pop("layer6.blocks.1.v_proj")),
        "exits.safetensors cannot be read: .*layer6.blocks.1.v_proj",
    ),
    "another shape": (
        lambda folder: change_tensors(
            folder, lambda tensors: tensors.update({"layer3.blocks.0.o_proj": torch.zeros(48, 47)})
        ),
        r"layer3\.blocks\.0\.o_proj has shape \[48, 47\]; the exit needs \[48, 48\]; train the exits again",
    ),
    "another norm": (
        lambda folder: change_tensors(
            folder, lambda tensors: tensors.update({"layer6.norm": torch.ones(1, 48)})
        ),
        r"layer6\.norm has shape \[1, 48\]; the exit needs \[48\]",
    ),
    "vocabulary too high": (
        lambda folder: change_tensors(folder, lambda tensors: tensors["layer3.vocabulary"][7].fill_(260)),
        r"layer3\.vocabulary must hold distinct tokens of 0 to 259; train the exits again",
    ),
    "vocabulary negative": (
        lambda folder: change_tensors(folder, lambda tensors: tensors["layer3.vocabulary"][7].fill_(-1)),
        r"layer3\.vocabulary must hold distinct tokens of 0 to 259; train the exits again",
    ),
    "vocabulary repeated": (
        lambda folder: change_tensors(
            folder, lambda tensors: tensors["layer3.vocabulary"][7].copy_(tensors["layer3.vocabulary"][8])
        ),
        r"layer3\.vocabulary must hold distinct tokens of 0 to 259; train the exits again",
    ),
    "vocabulary of another size": (
        lambda folder: change_tensors(
            folder, lambda tensors: tensors.update({"layer3.vocabulary": torch.arange(61, dtype=torch.int32)})
        ),
        r"layer3\.vocabulary has shape \[61\]; the exit needs \[60\]",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_refused_with_the_reason(
    folder: Path, checkpoint: Checkpoint, tiny_decoder: Decoder, damage: str
) -> None:
    use(folder, checkpoint, tiny_decoder)
    harm, words = DAMAGE[damage]
    harm(folder)
    with pytest.raises(ExitsError, match=words) as caught:
        use(folder, checkpoint, tiny_decoder)
    assert str(folder) in str(caught.value)


def test_an_exit_that_is_not_there_is_named_with_those_that_are(
    good: Path, checkpoint: Checkpoint, tiny_decoder: Decoder
) -> None:
    with pytest.raises(
        ExitsError, match="has no exit at layer 4; it has exits at 3, 6; choose one of these, or train one"
    ):
        use(good, checkpoint, tiny_decoder, (3, 4))


def changed_copy(path: Path, tiny_path: Path, change: Callable[[dict[str, Tensor]], Any]) -> Checkpoint:
    """The tiny checkpoint with other weights."""
    shutil.copytree(tiny_path, path)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return open_checkpoint(path)


def add_low_rank(tensors: dict[str, Tensor]) -> None:
    """What merging a LoRA of the usual two projections does."""
    for name, tensor in tensors.items():
        if name.endswith(("q_proj.weight", "v_proj.weight")):
            tensor += 0.05 * torch.randn(tensor.shape[0], 1) @ torch.randn(1, tensor.shape[1])


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"num_layers": 8}, r"belong to tiny \(layers 9\), not to .*other \(layers 8\); train exits for it"),
        ({"hidden": 64}, r"belong to tiny \(hidden size 48\), not to .*other \(hidden size 64\)"),
        ({"vocab": 300}, r"belong to tiny \(vocabulary 260\), not to .*other \(vocabulary 300\)"),
        ({"seed": 1}, "belong to tiny; .*other has the same sizes, but other weights; train exits for it"),
    ],
)
def test_exits_of_another_model_are_refused(
    tmp_path: Path, good: Path, sizes: dict[str, int], words: str
) -> None:
    with pytest.raises(ExitsError, match=words):
        ExitsFile(good).check_model(open_checkpoint(tiny_checkpoint(tmp_path / "other", **sizes)))


@pytest.mark.parametrize(
    "change",
    [
        add_low_rank,
        lambda tensors: tensors["model.norm.weight"].mul_(1.01),
        lambda tensors: tensors["model.layers.5.input_layernorm.weight"].mul_(1.01),
        lambda tensors: tensors["model.layers.8.mlp.down_proj.weight"][3].mul_(1.01),
    ],
    ids=["low rank", "final norm", "a norm", "one row of an MLP"],
)
def test_exits_of_a_fine_tuned_model_are_refused(
    tmp_path: Path, tiny_path: Path, good: Path, change: Callable[[dict[str, Tensor]], Any]
) -> None:
    other = changed_copy(tmp_path / "tuned", tiny_path, change)
    with pytest.raises(ExitsError, match="tuned has the same sizes, but other weights"):
        ExitsFile(good).check_model(other)


def test_a_fingerprint_is_of_the_weights_and_not_of_how_they_are_stored(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    print_of_model = checkpoint.fingerprint
    shards = open_checkpoint(tiny_checkpoint(tmp_path / "shards", max_shard_size="100KB"))
    narrow = open_checkpoint(tiny_checkpoint(tmp_path / "narrow", dtype=torch.bfloat16))
    assert print_of_model == shards.fingerprint == narrow.fingerprint


def test_a_float16_copy_of_small_weights_counts_as_another_model(tmp_path: Path) -> None:
    """Float16 rounds small weights, so the copy's outputs differ too."""
    model = tiny_model(matrix_std=0.02).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "original")
    model.to(torch.float16).save_pretrained(tmp_path / "half")
    half, original = (open_checkpoint(tmp_path / name) for name in ("half", "original"))
    assert half.fingerprint != original.fingerprint


# ---- written whole or not at all ----


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: No space left on device")],
)
def test_a_full_disk_leaves_the_old_exits_and_no_others(
    folder: Path, good: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(tensors: dict[str, Tensor], path: Path, *_: Any) -> None:
        Path(path).write_bytes(b"half")
        raise error

    monkeypatch.setattr(ee_models.checkpoint.exit_files, "save_file", full)
    with pytest.raises(OSError, match="No space left on device"):
        make_exits(folder, checkpoint, [ExitInfo(layer=5)])
    assert sorted(path.name for path in folder.iterdir()) == [INFO, TENSORS]
    assert all((folder / name).read_bytes() == (good / name).read_bytes() for name in (INFO, TENSORS))


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failure_while_files_are_put_in_place_is_never_silently_wrong(
    folder: Path, checkpoint: Checkpoint, tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    replace, calls = os.replace, []

    def broken(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == failing:
            raise OSError(errno.EIO, "Input/output error")
        replace(source, target)

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="Input/output error"):
        make_exits(folder, checkpoint, INFOS, seed=1)
    assert sorted(path.name for path in folder.iterdir()) == [INFO, TENSORS]
    if failing == 1:
        use(folder, checkpoint, tiny_decoder)
    else:
        with pytest.raises(ExitsError, match="damaged: its checksum"):
            use(folder, checkpoint, tiny_decoder)


# ---- by the API ----


@pytest.fixture
def no_weights_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were loaded before the exits were looked at")

    monkeypatch.setattr(Decoder, "load", load)


def adapters(path: str | None, draft: int = 3, check: int | None = 6) -> dict[str, Any]:
    tiers = {
        "draft": {"kind": "adapter", "layer": draft, "path": path},
        "check": {"kind": "adapter", "layer": check, "path": path},
    }
    return tiers if check is not None else {"draft": tiers["draft"]}


@pytest.mark.usefixtures("no_weights_loaded")
def test_llm_refuses_exits_before_it_loads_weights(tmp_path: Path, tiny_path: Path, good: Path) -> None:
    other = str(tiny_checkpoint(tmp_path / "other", seed=1))
    for model, speculative, words in (
        (
            str(tiny_path),
            adapters(str(tmp_path / "nothing")),
            r"speculative\.draft: .*nothing holds no exits",
        ),
        (
            str(tiny_path),
            adapters(str(good), draft=4),
            r"speculative\.draft: .* has no exit at layer 4; it has exits at 3, 6",
        ),
        (
            str(tiny_path),
            adapters(str(good), check=7),
            r"speculative\.check: .* has no exit at layer 7; it has exits at 3, 6",
        ),
        (other, adapters(str(good)), r"speculative\.draft: .*other has the same sizes, but other weights"),
        (
            str(tiny_path),
            adapters(None),
            (
                r"speculative\.draft: HiSpec comes with exits for .* only, not for .*; train some with"
                r" `hispec train`"
            ),
        ),
    ):
        with pytest.raises(ExitsError, match=words):
            LLM(model, speculative=speculative, **SMALL)


@pytest.mark.parametrize(
    ("speculative", "words"),
    [
        (
            {"draft": {"layer": 3, "path": "somewhere"}},
            (
                "path='somewhere' means nothing for kind='exit'; leave it out, or choose .*: adapter, hybrid,"
                " model"
            ),
        ),
        (
            {"draft": {"layer": 3}, "check": {"layer": 5, "path": "x"}},
            r"speculative\.check: path='x' names trained exits",
        ),
        ({"draft": {"layer": 3, "kind": "adaptor"}}, "kind.*adapter"),
        ({"draft": {"layer": 3, "kind": "adapter", "path": ""}}, "path"),
        (
            adapters("x", draft=9, check=None),
            r"draft\.layer=9 is not an early exit of a model of 9 layers; choose 1 to 8",
        ),
    ],
)
@pytest.mark.usefixtures("no_weights_loaded")
def test_settings_that_contradict_each_other_are_refused(
    tiny_path: Path, speculative: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(str(tiny_path), speculative=speculative, **SMALL)


def test_damage_is_found_before_a_plan_is_changed(tiny_path: Path, folder: Path) -> None:
    llm = LLM(str(tiny_path), speculative=adapters(str(folder)), **SMALL)
    with pytest.raises(ExitsError, match=r"speculative\.draft: .*no exit at layer 4"):
        llm.set_speculative(adapters(str(folder), draft=4))
    llm.set_speculative(None)
    assert llm.memory()["exit_bytes"] == 0
    flip_a_byte(folder)
    plan = llm.engine.plan
    with pytest.raises(ExitsError, match="damaged"):
        LLM(str(tiny_path), speculative=adapters(str(folder)), **SMALL)
    broken = LLM(str(tiny_path), **SMALL)
    with pytest.raises(ExitsError, match="damaged"):
        broken.set_speculative(adapters(str(folder)))
    assert broken.engine.plan == plan and broken.memory()["exit_bytes"] == 0


def test_trained_exits_are_read_once_and_found_again(
    tiny_path: Path, tiny_decoder: Decoder, checkpoint: Checkpoint, good: Path
) -> None:
    trained = TrainedExits(checkpoint)
    config = SpeculativeConfig(draft={"kind": "adapter", "layer": 3, "path": str(good)}, check={"layer": 6})
    first = trained.load(config, tiny_decoder)
    assert [exit_.layer for exit_ in first] == [3] and trained.layers(str(good)) == [3, 6]
    again = trained.load(
        SpeculativeConfig(draft=config.draft, check={"kind": "adapter", "layer": 6, "path": str(good)}),
        tiny_decoder,
    )
    assert again[0] is first[0] and [exit_.layer for exit_ in again] == [3, 6]
    assert trained.load(None, tiny_decoder) == []


def test_a_controller_has_the_exits_that_it_may_choose_and_no_others(
    tiny_decoder: Decoder, checkpoint: Checkpoint, good: Path
) -> None:
    """Those of the plan that it starts from among them, unless goodput.layers leaves them out."""
    draft, trained = {"kind": "adapter", "layer": 3, "path": str(good)}, TrainedExits(checkpoint)
    for layers, expected in ((None, [3, 6]), ([6], [6]), ([3, 6], [3, 6])):
        config = SpeculativeConfig(draft=draft, check=None, control="goodput", goodput={"layers": layers})
        assert [each.layer for each in trained.load(config, tiny_decoder)] == expected


def test_shipped_exits_are_found_by_the_models_weights(
    tmp_path: Path, good: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hispec.loading.ee_packages.PRETRAINED", tmp_path)
    with pytest.raises(ExitsError, match="not for"):
        shipped_exits(checkpoint)
    other = open_checkpoint(tiny_checkpoint(tmp_path / "other", seed=1))
    make_exits(tmp_path / "a", other, [ExitInfo(layer=2)])
    with pytest.raises(ExitsError, match="HiSpec comes with exits for tiny only, not for"):
        shipped_exits(checkpoint)
    shutil.copytree(good, tmp_path / "b")
    assert (
        shipped_exits(checkpoint).folder == tmp_path / "b" and shipped_exits(other).folder == tmp_path / "a"
    )
    assert PRETRAINED.parent.name == "ee_models"
