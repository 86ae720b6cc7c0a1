"""The exits and models that come with HiSpec: small enough to ship, whole, and good for what they are for."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from ee_models.checkpoint.ee_package import EEPackage
from ee_models.checkpoint.exit_files import INFO, ExitsFile
from ee_models.checkpoint.ngram_file import INFO as NGRAMS_INFO
from ee_models.checkpoint.ngram_file import NgramsFile
from hispec import LLM, SamplingParams
from hispec.jobs.load import load_preset, load_settings
from hispec.loading.ee_packages import PRETRAINED, _borrowed_ngrams, packages
from hispec.training.exits import describe_data, describe_recipe
from hispec.training.schema import TrainConfig
from tests.test_packaging import ROOT

FOLDERS = sorted(path.parent for path in PRETRAINED.glob(f"*/{INFO}"))
WITH_NGRAMS = sorted(path.parent for path in PRETRAINED.glob(f"*/{NGRAMS_INFO}"))
CONFIGS = {
    "smollm2-135m-instruct": "train_smollm2.yaml",
    "smollm2-maths": "train_smollm2_maths.yaml",
    "smollm2-ee": "train_smollm2_ee.yaml",
}


def test_there_are_some_and_they_fit_the_package() -> None:
    assert FOLDERS and packages().keys() <= {folder.name for folder in FOLDERS} <= CONFIGS.keys()
    sizes = {
        folder.name: sum(file.stat().st_size for file in folder.iterdir()) for folder in PRETRAINED.iterdir()
    }
    assert sum(sizes.values()) < 80e6 and all(sizes[name] < 25e6 for name in packages()), sizes


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_each_is_whole_and_says_where_it_comes_from(folder: Path) -> None:
    file = ExitsFile(folder)
    file.check_tensors()
    assert file.about.data["examples"] > 0
    assert all({"loss", "agreement"} <= info.held_out.keys() for info in file.about.exits)
    if folder.name in packages():
        about = EEPackage(folder).about
        assert about.recipe == file.about.recipe and about.data == file.about.data
        assert about.base_model.name == "smollm2" and about.held_out["loss"] > 0
        card = (folder / "README.md").read_text(encoding="utf-8")
        for title in ("## Data", "## Licence", "## Cost", "## Figures", "## What was lost"):
            assert title in card, f"{folder.name}: the card has no section {title!r}"


def trained_by(folder: Path) -> list[TrainConfig]:
    """What trained them, one after the other: the commands that the card gives for the committed recipe, and
    for those that go on from it, whose names begin like its own."""
    first, card = CONFIGS[folder.name], folder / "README.md"
    text = card.read_text(encoding="utf-8").partition("## Cost")[2] if card.exists() else ""
    text = text.partition("\n## ")[0].replace("\\\n", " ")
    command = re.compile(rf"    hispec train configs/({first.removesuffix('.yaml')}\w*\.yaml)(.*)")
    given = [found.groups() for line in text.splitlines() if (found := command.fullmatch(line))]
    parser = argparse.ArgumentParser()
    parser.add_argument("--set", nargs="+", default=[])
    configs = [
        load_settings(TrainConfig, ROOT / "configs" / name, parser.parse_args(shlex.split(more)).set, ())
        for name, more in given or [(first, "")]
    ]
    return [config for config in configs if config.recipe != "ngrams"]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_committed_recipe_is_the_one_they_were_trained_by(folder: Path) -> None:
    about = ExitsFile(folder).about
    recipes = [about.recipe]
    while "begun_as" in recipes[0]:
        recipes[:1] = [recipes[0].pop("begun_as"), recipes[0]]
    for config, recipe in zip(trained_by(folder), recipes, strict=True):
        shapes = config.adapters or config.ee
        assert shapes is not None
        assert [(exit_.layer, exit_.num_blocks, exit_.vocabulary_size) for exit_ in shapes.exits] == [
            (info.layer, info.num_blocks, info.vocabulary_size) for info in about.exits
        ]
        # What was not there to be set yet is now at what it was then.
        assert config.loop is not None
        later: dict[str, Any] = {"compile": False, "step": config.loop.num_steps}
        if config.ee is not None:
            later |= {"original_share": 1.0, "skip_batches": 0, "prompts_learn": True}
        assert later | recipe == describe_recipe(config, recipe.get("step", later["step"]))
    assert about.data["prompts"] == describe_data(config, [])["prompts"]


def test_what_has_no_ngrams_of_its_own_has_those_of_its_base() -> None:
    without = set(FOLDERS) - set(WITH_NGRAMS)
    assert {folder.name for folder in without} == {"smollm2-ee"}
    for folder in without:
        of_base = PRETRAINED / "smollm2-135m-instruct"
        assert [file.parent for file in _borrowed_ngrams(EEPackage(folder))] == [of_base] * 2


@pytest.mark.parametrize("folder", WITH_NGRAMS, ids=lambda folder: folder.name)
def test_ngrams_are_whole_and_those_of_the_committed_recipe(folder: Path) -> None:
    file = NgramsFile(folder)
    ngrams = file.read()
    name = CONFIGS[folder.name].removesuffix(".yaml")
    config = load_settings(TrainConfig, ROOT / "configs" / f"{name}_ngrams.yaml", (), ())
    assert config.ngrams is not None and list(ngrams) == list(range(1, config.ngrams.max_size + 1))
    assert file.about.vocab_size == 49152 and file.about.model == config.model
    assert file.about.recipe == {"name": "ngrams", "seed": config.seed, **config.ngrams.model_dump()}
    assert file.about.data["prompts"] == describe_data(config, [])["prompts"]
    assert file.about.held_out["guessed"] > file.about.held_out["right"] > 0.2


def test_presets_load_and_use_them() -> None:
    """Exits, and n-grams to guess from."""
    kangaroo, tuned = (
        load_preset(ROOT / "configs" / name).speculative for name in ("kangaroo_smollm2.yaml", "smollm2.yaml")
    )
    assert kangaroo is not None and kangaroo.draft.is_trained and kangaroo.draft.path is None
    ngram = tuned.draft.ngram if tuned is not None else None
    assert ngram is not None and ngram.guess_confidence is not None and ngram.guess_path is None


@pytest.mark.slow
@pytest.mark.parametrize("check", [None, {"kind": "adapter", "layer": 15}], ids=["two tiers", "three tiers"])
def test_with_the_model_they_keep_its_output_and_most_are_far_above_untrained_exits(
    check: dict[str, object] | None,
) -> None:
    messages = [
        [{"role": "user", "content": text}]
        for text in ("What is 12 * 7? Explain.", "Write a Python function that reverses a string.")
    ]
    sampling = SamplingParams(temperature=0.0, max_tokens=64)
    with LLM("smollm2", max_num_seqs=2, max_model_len=512) as llm:
        plain = [result.outputs[0].token_ids for result in llm.chat(messages, sampling, use_tqdm=False)]
        llm.set_speculative(
            {"draft": {"kind": "adapter", "layer": 7}, "check": check, "num_draft_tokens": 1, "num_checks": 1}
        )
        llm.reset_stats()
        assert [
            result.outputs[0].token_ids for result in llm.chat(messages, sampling, use_tqdm=False)
        ] == plain
        stats = llm.stats()
    assert stats["draft_kept"] / stats["drafted"] > 0.35, "untrained, the exit after 7 layers agrees on 4 %"
