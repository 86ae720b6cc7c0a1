"""The exits that come with HiSpec: small enough to ship, whole, and good for what they are there for."""

from __future__ import annotations

import pytest

from ee_models.checkpoint.exit_files import INFO, ExitsFile
from hispec import LLM, SamplingParams
from hispec.jobs.load import load_preset, load_settings
from hispec.loading.ee_packages import PRETRAINED
from hispec.training.schema import TrainConfig
from tests.test_packaging import ROOT

FOLDERS = sorted(path.parent for path in PRETRAINED.glob(f"*/{INFO}"))


def test_there_are_some_and_they_fit_the_package() -> None:
    assert FOLDERS
    assert sum(path.stat().st_size for path in PRETRAINED.rglob("*")) < 25e6


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_each_is_whole_and_says_where_it_comes_from(folder: object) -> None:
    file = ExitsFile(PRETRAINED / str(folder))
    file.check_tensors()
    assert file.about.recipe["name"] == "adapters" and file.about.data["examples"] > 0
    assert all({"loss", "agreement"} <= info.held_out.keys() for info in file.about.exits)


def test_the_committed_recipe_is_the_one_they_were_trained_by() -> None:
    config = load_settings(TrainConfig, ROOT / "configs" / "train_smollm2.yaml", (), ())
    about = ExitsFile(PRETRAINED / "smollm2-135m-instruct").about
    assert config.adapters is not None
    assert [(exit_.layer, exit_.num_blocks, exit_.vocabulary_size) for exit_ in config.adapters.exits] == [
        (info.layer, info.num_blocks, info.vocabulary_size) for info in about.exits
    ]
    assert about.recipe == {
        "name": "adapters",
        "seed": config.seed,
        "init": config.adapters.init,
        **config.loop.model_dump(),
    }
    assert [source.get("opening") for source in about.data["prompts"]] == [
        source.opening for source in config.data.prompts
    ]


@pytest.mark.parametrize("name", ["smollm2.yaml", "kangaroo_smollm2.yaml"])
def test_presets_load_and_use_them(name: str) -> None:
    preset = load_preset(ROOT / "configs" / name)
    assert (
        preset.speculative is not None
        and preset.speculative.draft.is_trained
        and preset.speculative.draft.path is None
    )


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
    assert stats["draft_accepted"] / stats["drafted"] > 0.35, (
        "untrained, the exit after 7 layers agrees on 4 %"
    )
