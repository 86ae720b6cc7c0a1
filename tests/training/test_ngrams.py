"""The recipe `ngrams`: what is counted, what is worth keeping, and the command from prompts to guesses that
change no output."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from ee_models.checkpoint.ee_package import EEPackage, save_package
from ee_models.checkpoint.loader import open_checkpoint
from ee_models.checkpoint.low_rank import LowRank
from ee_models.checkpoint.ngram_file import INFO, TENSORS, Ngrams, NgramsError, NgramsFile, save_ngrams
from ee_models.training.examples import Example, TrainingError
from hispec import LLM, ConfigError, SamplingParams
from hispec.config import EngineConfig, SpeculativeConfig
from hispec.drafters import ngram_learner
from hispec.drafters.ngram_table import make_table
from hispec.engine import Engine
from hispec.errors import build
from hispec.training.ngrams import Guess, Guesses, by_size, count_ngrams, evaluate, look_up
from hispec.training.run import run_training
from hispec.training.schema import load_training
from tests.helpers.drafters import make_guess_table
from tests.helpers.tiny import tiny_checkpoint
from tests.helpers.training_command import SMALL, train, write_config


def counted_naively(examples: list[Example], max_size: int, least_count: int) -> Guesses:
    """The rule as it reads."""
    following: dict[tuple[int, ...], Counter[int]] = {}
    for example in examples:
        ids = example.token_ids
        for place in range(example.prompt_len, len(ids)):
            for size in range(1, min(max_size, place) + 1):
                following.setdefault(tuple(ids[place - size : place]), Counter())[ids[place]] += 1
    found: Guesses = {}
    for context in sorted(following, key=len):
        counts, total = following[context], following[context].total()
        token = min(counts, key=lambda token: (-counts[token], token))
        guess, shorter = Guess(token, counts[token] / (total + 2)), Guess(-1, 0.0)
        for start in range(1, len(context)):
            if (suffix := context[start:]) in found:
                shorter = found[suffix]
                break
        tells = guess.token != shorter.token or abs(guess.share - shorter.share) > 0.05
        if total >= least_count and tells and max(guess.share, shorter.share) >= 0.1:
            found[context] = guess
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("least_count", [1, 3])
def test_what_is_counted_is_that_of_the_rule(seed: int, least_count: int) -> None:
    draw = random.Random(seed)
    examples = []
    for _ in range(60):
        length = draw.randrange(2, 20)
        ids = [draw.randrange(draw.choice((3, 12))) for _ in range(length)]
        examples.append(Example(ids, draw.randrange(1, length)))
    counted = count_ngrams(examples, 4, least_count)
    assert counted == counted_naively(examples, 4, least_count)
    assert {1, 2, 3} <= {len(context) for context in counted}


def test_only_answers_are_counted_and_what_tells_nothing_new_is_left_out() -> None:
    answers = [Example([7, 7, 7, 7, 1, 2, 3, 1, 2, 4], 4)] * 5
    found = count_ngrams(answers, 3, 3)
    assert found[(7,)] == Guess(1, 5 / 7), "what an answer begins with follows the prompt"
    assert (7, 7) not in found, "a longer context that says the same"
    assert found[(2,)] == Guess(3, 5 / 12) and found[(3, 1, 2)] == Guess(4, 5 / 7)
    assert (2, 3) not in found, "which says of 1 what 3 says of it"
    assert count_ngrams(answers, 3, 6).keys() == {(1,), (2,)}, "what was seen in ten places"


def test_answers_of_another_model_are_refused(tmp_path: Path, model: Path) -> None:
    """Tokens beyond the vocabulary would be written as others."""
    rows = [{"messages": [{"role": "user", "content": f"question {number}"}]} for number in range(3)]
    outputs = [
        {"index": number, "error": None, "outputs": [{"text": "", "token_ids": [5, 70_000, 6]}]}
        for number in range(3)
    ]
    for name, lines in (("rows", rows), ("outputs", outputs)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    prompts = [{"path": str(tmp_path / "rows.jsonl"), "outputs": str(tmp_path / "outputs.jsonl")}]
    config = write_config(
        tmp_path,
        model,
        recipe="ngrams",
        adapters=None,
        loop=None,
        data={"prompts": prompts, "held_out": 1},
        ngrams={"least_count": 1},
    )
    with pytest.raises(TrainingError, match="it was made with another model's tokenizer"):
        run_training(load_training(config), progress=False)
    assert not (tmp_path / "out" / TENSORS).exists()


def test_guesses_are_those_of_the_longest_context() -> None:
    guesses = {(3,): Guess(1, 0.5), (2, 3): Guess(2, 0.15), (9, 2, 3): Guess(3, 0.9)}
    assert look_up(guesses, [9, 2, 3]).token == 3 and look_up(guesses, [8, 2, 3]).token == 2
    assert look_up(guesses, [3]).token == 1 and look_up(guesses, [3, 4]).share == look_up(guesses, []).share
    held_out = [Example([5, 3, 1, 3, 2, 3, 2], 1)]
    # After 1 and 2 nothing is known; after 3 twice a guess, once right; after 2 3 one that is not sure.
    assert evaluate(guesses, held_out, 3) == {"guessed": 2 / 6, "right": 1 / 6}
    written = by_size(guesses | {(4,): Guess(5, 0.0001)})
    assert written[1].contexts.tolist() == [[3], [4]] and written[3].tokens.tolist() == [3]
    assert written[1].shares.tolist() == [128, 1] and written[1].shares.dtype == np.uint8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("ngrams") / "model", num_layers=6, tokenizer=True)


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    folder = tmp_path_factory.mktemp("counted")
    config = write_config(
        folder,
        model,
        recipe="ngrams",
        adapters="left out",
        loop="left out",
        ngrams={"max_size": 3, "least_count": 1},
    )
    assert train(config) == 0
    return folder / "out"


def test_the_command_counts_and_says_what_of(
    model: Path, counted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sorted(path.name for path in counted.iterdir()) == [INFO, TENSORS, "work"]
    about = NgramsFile(counted).about
    assert (about.model, about.vocab_size) == (str(model), 260)
    assert about.recipe == {"name": "ngrams", "seed": 0, "max_size": 3, "least_count": 1}
    assert about.data["examples"] > 5 and about.data["prompts"][0]["path"] == "prompts.jsonl"
    assert set(about.held_out) == {"guessed", "right"}
    config = counted.parent / "train.yaml"
    before = (counted / TENSORS).read_bytes()
    assert train(config, "--set", "output.resume=true") == 0
    out = capsys.readouterr().out
    assert "contexts: " in out and "right: 0." in out and f"counted in 0 s; {counted}" in out
    assert (counted / TENSORS).read_bytes() == before, "the same answers give the same n-grams"
    assert train(config, "--set", "output.resume=true", "ngrams.least_count=1000") == 2
    assert "was seen 1000 times" in capsys.readouterr().err


PROMPTS = ["Say something about 3.", "Why not?", "x" * 40]
PARAMS = SamplingParams(temperature=0.0, max_tokens=20)


def plan(**guesses: object) -> dict[str, object]:
    ngram = {"max_size": 3, "min_size": 3, "guess_confidence": 0.1, **guesses}
    return {"draft": {"kind": "ngram", "ngram": ngram}, "num_draft_tokens": 4}


def outputs(llm: LLM) -> list[list[int]]:
    found = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [output.outputs[0].token_ids for output in found]


def test_guesses_change_no_output_and_some_are_right(model: Path, counted: Path, tmp_path: Path) -> None:
    llm = LLM(str(model), **SMALL)
    expected = outputs(llm)
    # Counted in these very answers, guesses are right.
    texts = [llm.encode(prompt, chat=False) for prompt in PROMPTS]
    answers = [Example([*text, *answer], len(text)) for text, answer in zip(texts, expected, strict=True)]
    known = by_size(count_ngrams(answers * 3, 3, 1))
    save_ngrams(tmp_path / "known", "tiny", 260, known, recipe={}, data={}, held_out={})
    rounds = {}
    for path in (counted, tmp_path / "known"):
        llm.set_speculative(plan(guess_path=str(path)))
        llm.reset_stats()
        assert outputs(llm) == expected
        rounds[path.name] = llm.stats()["rounds"]
    assert rounds["known"] < 0.6 * rounds["out"]
    prints = llm.fingerprints(build(SpeculativeConfig, plan(guess_path=str(counted))))
    assert prints[f"n-grams of {counted}"] == NgramsFile(counted).about.tensors_sha256


def test_tables_that_do_not_fit_are_refused_and_cost_no_cached_prompts(model: Path, counted: Path) -> None:
    llm = LLM(str(model), **SMALL)
    expected = outputs(llm)
    decoder, plan_of = llm.decoder, build(SpeculativeConfig, plan())
    config = EngineConfig(max_num_seqs=4, max_model_len=128, num_kv_blocks=64)
    with pytest.raises(ConfigError, match=r"guess_path=None: `tables` has n-grams of \['x'\] alone; pass"):
        Engine(decoder, config, plan_of, tables=[make_guess_table(decoder.device, "x")])
    large = {1: Ngrams(np.array([[3]]), np.array([260]), np.array([9], np.uint8))}
    with pytest.raises(ConfigError, match=r"of 261 tokens, and the model on cpu, of 260; make"):
        Engine(decoder, config, plan_of, tables=[make_table(None, large, decoder.device)])
    llm.set_speculative(plan(guess_path=str(counted)))
    llm.reset_stats()
    assert outputs(llm) == expected
    assert llm.stats()["cached_tokens"] > 0, "n-grams have no KV that cached blocks would lack"
    assert llm.memory()["drafter_bytes"] > 0


def test_those_beside_the_weights_are_the_models_own(model: Path, counted: Path, tmp_path: Path) -> None:
    with pytest.raises(NgramsError, match=r"guess_path: no n-grams come with .*; count some with"):
        LLM(str(model), speculative=plan(), **SMALL)
    with pytest.raises(
        NgramsError, match=r"guess_path: .*nowhere holds no n-grams: cannot read ngrams.json: (?!\[)"
    ):
        LLM(str(model), speculative=plan(guess_path=str(tmp_path / "nowhere")), **SMALL)
    shutil.copytree(model, tmp_path / "model")
    for name in (INFO, TENSORS):
        shutil.copyfile(counted / name, tmp_path / "model" / name)
    llm = LLM(str(tmp_path / "model"), speculative=plan(), **SMALL)
    assert outputs(llm) == outputs(LLM(str(model), **SMALL))
    assert set(llm.fingerprints(build(SpeculativeConfig, plan()))) == {"model", "weights and KV", "n-grams"}
    other = tiny_checkpoint(tmp_path / "other", num_layers=2, tokenizer=True, vocab_size=300)
    with pytest.raises(NgramsError, match=r"whose vocabulary has 260 tokens; .* has 300"):
        LLM(str(other), speculative=plan(guess_path=str(counted)), **SMALL)


def test_a_model_without_ngrams_can_learn_them(
    model: Path, counted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes with the model is used if there is any; a folder that is named must be there."""
    monkeypatch.setattr(ngram_learner, "_FIRST_TOKENS", 1)
    learns = plan(learn_tokens=8192)
    llm = LLM(str(model), speculative=learns, **SMALL)
    assert "n-grams" not in llm.fingerprints(build(SpeculativeConfig, learns))
    rounds = []
    expected = outputs(LLM(str(model), **SMALL))
    for _ in range(5):
        llm.reset_stats()
        assert outputs(llm) == expected
        rounds.append(llm.stats()["rounds"])
    assert rounds[-1] < 0.75 * rounds[0]
    with pytest.raises(NgramsError, match=r"guess_path: .*nowhere holds no n-grams"):
        llm.set_speculative(plan(learn_tokens=8192, guess_path=str(counted.parent / "nowhere")))
    both = plan(learn_tokens=8192, guess_path=str(counted))
    llm.set_speculative(both)
    assert f"n-grams of {counted}" in llm.fingerprints(build(SpeculativeConfig, both))
    shutil.copytree(model, counted.parent / "with")
    for name in (INFO, TENSORS):
        shutil.copyfile(counted / name, counted.parent / "with" / name)
    llm = LLM(str(counted.parent / "with"), speculative=learns, **SMALL)
    assert "n-grams" in llm.fingerprints(build(SpeculativeConfig, learns))


def test_a_package_hands_its_ngrams_on(model: Path, counted: Path, tmp_path: Path) -> None:
    base = open_checkpoint(model)
    name = "model.layers.0.self_attn.q_proj.weight"
    rows, columns = base.tensor(name).shape
    change = {name: LowRank(torch.ones(2, columns), torch.ones(rows, 2) * 0.01, 1.0)}
    (tmp_path / "package").mkdir()
    save_package(tmp_path / "package", str(model), base, change, recipe={}, data={}, held_out={})
    for file in (INFO, TENSORS):
        shutil.copyfile(counted / file, tmp_path / "package" / file)
    (tmp_path / "made").mkdir()
    made = EEPackage(tmp_path / "package").make_checkpoint(base, tmp_path / "made")
    assert (Path(made.path) / TENSORS).read_bytes() == (counted / TENSORS).read_bytes()
    assert NgramsFile(Path(made.path)).about == NgramsFile(counted).about


def test_the_committed_files_are_valid() -> None:
    for path in sorted((Path(__file__).parents[2] / "configs").glob("train_*ngrams.yaml")):
        assert load_training(path).recipe == "ngrams"
