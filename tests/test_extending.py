"""The examples of docs/extending.md run, give plain decoding's output, and touch nothing but their own
entry."""

from __future__ import annotations

import copy
import re
import runpy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ee_models import families
from hispec import LLM
from hispec.config import ACCEPTANCES, KINDS, TRAITS, SpeculativeConfig
from hispec.control.candidates import candidates
from hispec.decoding import acceptance
from hispec.decoding.acceptance import CoupledJudge, register_judge
from hispec.decoding.stages import PassCounts
from hispec.drafters import make
from hispec.errors import ConfigError, build
from hispec.sampling.logits import Logits
from tests.helpers import tiny
from tests.helpers.support import transformers_greedy

ROOT = Path(__file__).parent.parent
SMALL: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 128, "num_kv_blocks": 64}
Example = Callable[..., tuple[list[int], list[int], dict[str, Any]]]


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    """What an example registers is gone after its test."""
    lists: list[list[Any]] = [ACCEPTANCES, KINDS, families.FAMILIES]
    tables: list[dict[str, Any]] = [TRAITS, make._REGISTERED, acceptance.JUDGES]
    held = copy.copy(lists), [copy.copy(each) for each in lists], [copy.copy(each) for each in tables]
    yield
    for each, before in zip(lists, held[1], strict=True):
        each[:] = before
    for table, entries in zip(tables, held[2], strict=True):
        table.clear()
        table.update(entries)


@pytest.fixture(scope="module")
def tiny_text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_checkpoint(tmp_path_factory.mktemp("text") / "model", tokenizer=True)


def example(name: str) -> Example:
    main: Example = runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"]
    return main


def test_a_drafter_of_ones_own(tiny_text_model: Path) -> None:
    plain, drafted, stats = example("extend_drafter")(str(tiny_text_model), **SMALL)
    assert drafted == plain and len(plain) == 48
    assert stats["drafted"] > 0 and stats["drafter_failures"] == 0


def test_a_drafter_of_ones_own_under_a_check_trees_and_rejection(tiny_text_model: Path) -> None:
    example("extend_drafter")(str(tiny_text_model), **SMALL)
    values: dict[str, Any] = {"draft": {"kind": "bigram"}, "num_draft_tokens": 3}
    from hispec import LLM, SamplingParams

    params = SamplingParams(temperature=0.9, seed=3, max_tokens=32)
    with LLM(str(tiny_text_model), **SMALL) as llm:
        plain = llm.generate("abcabcabc", params, use_tqdm=False)[0].outputs[0].token_ids
        for check in ({"layer": 6}, {"layer": 8, "confidence": 0.5}):
            llm.set_speculative({**values, "check": check})
            assert llm.generate("abcabcabc", params, use_tqdm=False)[0].outputs[0].token_ids == plain
        llm.set_speculative({**values, "check": {"layer": 6}, "acceptance": "rejection"})
        assert len(llm.generate("abcabcabc", params, use_tqdm=False)[0].outputs[0].token_ids) == 32
    with pytest.raises(ConfigError, match="num_branches=2 needs a drafter with probabilities"):
        build(SpeculativeConfig, {**values, "num_branches": 2})
    with pytest.raises(ConfigError, match="layer=3 means nothing for kind='bigram'"):
        build(SpeculativeConfig, {"draft": {"kind": "bigram", "layer": 3}})
    with pytest.raises(ConfigError, match="control='goodput' does not know what"):
        build(SpeculativeConfig, {**values, "control": "goodput"})
    goodput = build(SpeculativeConfig, {"draft": {"kind": "ngram"}, "control": "goodput"})
    assert {way.draft.kind for way in candidates(goodput, [])} == {"ngram"}


def test_a_check_rule_of_ones_own(tiny_text_model: Path) -> None:
    plain, checked, stats = example("extend_check_rule")(str(tiny_text_model), **SMALL)
    assert checked == plain and len(plain) == 48
    assert stats["drafted"] > 0 and stats["tentative"] > 0


def test_a_check_rule_decides_what_passes_the_check(tiny_text_model: Path) -> None:
    """One that is never sure passes all drafts, one that always is passes what the plain rule passes; the
    output is the same."""
    from hispec import LLM, SamplingParams

    class Unsure(CoupledJudge):
        def find_unsure(self, logits: Logits, own: torch.Tensor) -> torch.Tensor:
            return torch.ones_like(own, dtype=torch.bool)

    register_judge("unsure", lambda check: Unsure())
    values: dict[str, Any] = {"draft": {"layer": 1}, "check": {"layer": 8}, "num_draft_tokens": 3}
    params = SamplingParams(temperature=0.0, max_tokens=32)
    kept, outputs = {}, []
    with LLM(str(tiny_text_model), **SMALL) as llm:
        for name in ("coupled", "unsure"):
            llm.set_speculative({**values, "acceptance": name})
            llm.reset_stats()
            outputs.append(llm.generate("abcabcabc", params, use_tqdm=False)[0].outputs[0].token_ids)
            kept[name] = llm.stats()["draft_kept"] / llm.stats()["drafted"]
    assert outputs[0] == outputs[1]
    assert kept["unsure"] == 1.0 > kept["coupled"]


def test_a_model_family_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        tiny.FAMILIES, "seed_oss", {"class": "SeedOss", "num_key_value_heads": 2, "head_dim": 12}
    )
    path = tiny.tiny_checkpoint(tmp_path / "model", "seed_oss", tokenizer=True)
    with pytest.raises(ValueError, match="SeedOssForCausalLM"):
        from hispec import LLM

        LLM(str(path), **SMALL)
    plain, drafted, stats = example("extend_model_family")(str(path), **SMALL)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    prompt = tokenizer("one two three one two three one two").input_ids
    reference = transformers.SeedOssForCausalLM.from_pretrained(path).eval()
    assert plain == drafted == transformers_greedy(reference, prompt, 48, eos=tiny.EOS_ID)[: len(plain)]
    assert stats["drafted"] > 0 and len(plain) > 12


def test_a_model_family_of_ones_own_is_refused_before_a_worker_starts(
    tiny_text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a draft model's, too, and in place of one that comes with HiSpec."""
    monkeypatch.setitem(
        tiny.FAMILIES, "seed_oss", {"class": "SeedOss", "num_key_value_heads": 2, "head_dim": 12}
    )
    path = str(tiny.tiny_checkpoint(tmp_path / "model", "seed_oss", tokenizer=True))
    families.FAMILIES.append(
        families.Family("SeedOssForCausalLM", "seed_oss", "SeedOssConfig", output_bias=False)
    )
    monkeypatch.setattr("hispec.workers.pool.LocalLauncher", lambda _: pytest.fail("a worker starts"))
    words = "its family SeedOssForCausalLM was registered in this process, and workers are others"
    with pytest.raises(ConfigError, match=f"^model=.*{words}"):
        LLM(path, workers=2, **SMALL)
    draft = {"kind": "model", "path": path}
    with pytest.raises(ConfigError, match=rf"^speculative\.draft\.path=.*{words}"):
        LLM(str(tiny_text_model), workers=2, speculative={"draft": draft}, **SMALL)
    families.FAMILIES.append(replace(families.FAMILIES[0], gguf_name=None))
    with pytest.raises(ConfigError, match="its family LlamaForCausalLM was registered"):
        LLM(str(tiny_text_model), workers=2, **SMALL)


def test_the_family_is_shown_without_a_model_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = str(ROOT / "examples" / "extend_model_family.py")
    monkeypatch.setattr("sys.argv", [script])
    runpy.run_path(script, run_name="__main__")
    assert capsys.readouterr().out.startswith("same output: True; ")


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_an_example_says_how_it_is_used(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(path), run_name="__main__")
    assert caught.value.code == 0 and f"usage: {path.name} [-h] [MODEL]" in capsys.readouterr().out


def test_a_name_is_taken_once() -> None:
    def nothing(*_: Any) -> Any:
        raise AssertionError

    for taken in ("ngram", "exit"):
        with pytest.raises(ConfigError, match=f"draft.kind='{taken}' exists already"):
            make.register_drafter(taken, nothing)
    for taken in ("coupled", "rejection"):
        with pytest.raises(ConfigError, match=f"acceptance='{taken}' exists already"):
            register_judge(taken, nothing)
    with pytest.raises(ConfigError, match="acceptance: must be 'coupled' or 'rejection', got 'margin'"):
        build(SpeculativeConfig, {"draft": {"kind": "ngram"}, "acceptance": "margin"})


def test_the_page_names_each_example_and_what_is_there() -> None:
    """Files that the page names exist, and so do the names of code in them."""
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    assert all(str(path.relative_to(ROOT)) in page for path in (ROOT / "examples").glob("extend_*.py"))
    files = set(re.findall(r"`((?:hispec|ee_models|examples|tests|cache)/[\w/.]+\.py)`", page))
    assert len(files) > 8 and not [name for name in files if not (ROOT / name).is_file()]


def test_a_registered_drafter_is_told_of_requests_beside_others() -> None:
    """Under control: goodput, where routes share drafters, those that are shared hear of prompts and ends."""
    stages: Any = None
    made: list[Any] = []

    def make_drafter(*arguments: Any) -> Any:
        made.append(object())
        return made[-1]

    make.register_drafter("told", make_drafter)
    factory = make.DrafterFactory(2, 64, None, None, PassCounts())
    draft = build(SpeculativeConfig, {"draft": {"kind": "told"}, "num_draft_tokens": 2}).draft
    drafter = factory.make(draft, 0, None, stages, CoupledJudge())
    assert factory.shared == (drafter,) and made == [drafter]
