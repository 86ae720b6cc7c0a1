"""lm-evaluation-harness: a plan changes neither generations nor likelihoods, nor what the harness makes of
them. Tasks are files with data of their own; nothing is fetched."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import PreTrainedModel

lm_eval = pytest.importorskip("lm_eval", reason="needs the extra [eval]")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from hispec import ConfigError, RequestError, SpeculativeConfig  # noqa: E402
from hispec.integrations.lm_eval import HiSpecLM, make_config  # noqa: E402
from hispec.outputs import ContinuationScore  # noqa: E402
from tests.helpers.tiny import BOS_ID, EOS_ID  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SMALL: dict[str, Any] = {"max_model_len": 128, "num_kv_blocks": 64, "max_num_seqs": 4}
THREE_TIERS = {
    "draft": {"kind": "exit", "layer": 3},
    "check": {"layer": 6},
    "num_draft_tokens": 2,
    "num_checks": 2,
}
PRESET = {"model": "to be overridden", "engine": SMALL, "speculative": THREE_TIERS}
QUESTIONS = [f"Question {number}: what is {number} + {number * 7 % 5}?\nAnswer:" for number in range(8)]
TEXTS = ["short", "a text of several windows, " * 14, "", "x" * 128, "y" * 129, "é漢字 " * 30]


@pytest.fixture(scope="module")
def offline() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
            patch.setenv(name, "1")
        yield


@pytest.fixture(scope="module")
def plain(tiny_path: Path) -> Iterator[HiSpecLM]:
    lm = HiSpecLM(str(tiny_path), **SMALL)
    yield lm
    lm.llm.close()


@pytest.fixture(scope="module")
def preset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("preset") / "three_tiers.yaml"
    path.write_text(yaml.safe_dump(PRESET))
    return path


@pytest.fixture(scope="module")
def tasks(plain: HiSpecLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks of which the tiny model, which knows nothing, solves some."""
    folder = tmp_path_factory.mktemp("tasks")
    arguments = [(text, {"until": ["q", "Z"], "max_gen_toks": 20}) for text in QUESTIONS]
    answers = plain.generate_until(requests("generate_until", arguments), disable_tqdm=True)
    rows = [
        {
            "question": question,
            "answer": answer if number % 2 else "no",
            "choices": [f" {number}", " seven", f" {number * 3 % 7} or so"],
            "label": number % 3,
        }
        for number, (question, answer) in enumerate(zip(QUESTIONS, answers, strict=True))
    ]
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    generation = {
        **common,
        "task": "tiny_generation",
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["q", "Z"], "max_gen_toks": 20, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    choice = {
        **common,
        "task": "tiny_choice",
        "output_type": "multiple_choice",
        "doc_to_target": "label",
        "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": name} for name in ("acc", "acc_norm")],
    }
    for task in (generation, choice):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(task))
    return folder


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=each, idx=0) for each in arguments]


def evaluate(tasks: Path, model: Any = "hispec", **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = lm_eval.simple_evaluate(
        model=model,
        tasks=["tiny_generation", "tiny_choice"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
        **more,
    )
    return found


def responses(found: dict[str, Any]) -> dict[str, Any]:
    return {task: [sample["resps"] for sample in samples] for task, samples in found["samples"].items()}


@pytest.fixture(scope="module")
def wanted(offline: None, tasks: Path, plain: HiSpecLM) -> dict[str, Any]:
    return evaluate(tasks, plain)


@pytest.mark.parametrize("workers", [1, 2])
def test_three_tiers_score_as_plain_decoding_answer_by_answer(
    wanted: dict[str, Any], tasks: Path, tiny_path: Path, preset: Path, workers: int
) -> None:
    found = evaluate(tasks, model_args=f"model={tiny_path},preset={preset},workers={workers}")
    assert responses(found) == responses(wanted)
    assert found["results"] == wanted["results"]
    assert found["results"]["tiny_generation"]["exact_match,none"] == 0.5
    assert 0.0 < found["results"]["tiny_choice"]["acc,none"] < 1.0
    assert found["config"]["model_speculative"]["draft"]["layer"] == 3
    assert wanted["config"]["model_speculative"] is None


def test_the_harness_s_own_backend_gives_the_same(
    wanted: dict[str, Any], tasks: Path, tiny_path: Path
) -> None:
    found = evaluate(
        tasks, "hf", model_args=f"pretrained={tiny_path},max_length=128,dtype=float32,device=cpu"
    )
    ours, theirs = responses(wanted), responses(found)
    assert ours["tiny_generation"] == theirs["tiny_generation"]
    pairs = zip(ours["tiny_choice"], theirs["tiny_choice"], strict=True)
    for (mine, is_greedy), (other, other_is_greedy) in (
        pair for each in pairs for pair in zip(flat(each[0]), flat(each[1]), strict=True)
    ):
        assert mine == pytest.approx(other, abs=1e-2) and is_greedy == other_is_greedy


def flat(answers: Any) -> list[tuple[float, bool]]:
    return [answer for (answer,) in answers]


def test_plans_that_speculate_do_speculate(plain: HiSpecLM, tiny_path: Path, preset: Path) -> None:
    lm = HiSpecLM(str(tiny_path), preset=str(preset))
    arguments = [(text, {"max_gen_toks": 30}) for text in QUESTIONS]
    asked = requests("generate_until", arguments)
    assert lm.generate_until(asked, disable_tqdm=True) == plain.generate_until(asked, disable_tqdm=True)
    stats = lm.llm.stats()
    assert stats["drafted"] > 0 and stats["tentative"] > 0
    lm.llm.close()


def test_rolling_windows_are_a_straightforward_reference_s(
    plain: HiSpecLM, tiny_reference: PreTrainedModel
) -> None:
    found = plain.loglikelihood_rolling(requests("loglikelihood_rolling", [(text,) for text in TEXTS]), True)
    for text, total in zip(TEXTS, found, strict=True):
        tokens = [BOS_ID, *plain.tokenizer.encode(text)]
        logprobs = []
        # A window reads 128 tokens; only the last one overlaps with the one before it, to be full.
        for begin in range(0, len(tokens) - 1, 128):
            end = min(begin + 128, len(tokens) - 1)
            first = 0 if begin == 0 else end - 128
            with torch.inference_mode():
                logits = tiny_reference(torch.tensor([tokens[first:end]])).logits[0, begin - first :]
            logprobs += logits.log_softmax(-1)[range(end - begin), tokens[begin + 1 : end + 1]].tolist()
        assert len(logprobs) == len(tokens) - 1
        assert total == pytest.approx(sum(logprobs), rel=1e-4, abs=1e-3)


def test_a_text_without_a_context_follows_bos(plain: HiSpecLM) -> None:
    arguments = [("", "abc"), ("<s>", "abc"), ("x ", "abc"), ("x", " abc")]
    answers = plain.loglikelihood(requests("loglikelihood", arguments), disable_tqdm=True)
    assert answers[0] == answers[1] and answers[2] == answers[3] and answers[0] != answers[2]
    tokens = plain.tokenizer.encode("abc")
    score = plain.llm.score([[BOS_ID]], [tokens], use_tqdm=False)[0]
    assert answers[0] == (pytest.approx(sum(score.logprobs)), score.is_greedy)


def test_a_score_that_is_no_number_ends_the_evaluation(
    plain: HiSpecLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = [ContinuationScore([-1.0], True), ContinuationScore([math.nan], False, "they overflow")]
    monkeypatch.setattr(plain.llm, "score", lambda *_, **__: scores)
    with pytest.raises(RequestError, match="1 of 2 continuations have no score: they overflow"):
        plain.loglikelihood(requests("loglikelihood", [("a", "b"), ("c", "d")]), disable_tqdm=True)


def test_long_contexts_lose_their_beginning(plain: HiSpecLM) -> None:
    arguments = [("z" * 500 + "w" * 125, "1234"), ("w" * 125, "1234"), ("u" + "w" * 124, "1234")]
    long, cut, other = plain.loglikelihood(requests("loglikelihood", arguments), disable_tqdm=True)
    assert long == cut != other
    given = {"max_gen_toks": 28, "until": ["never"]}
    asked = [("z" * 300 + "w" * 100, given), ("w" * 100, given)]
    first, second = plain.generate_until(requests("generate_until", asked), disable_tqdm=True)
    assert first == second


def test_outputs_end_before_the_first_of_their_stop_strings(plain: HiSpecLM) -> None:
    (whole,) = plain.generate_until(requests("generate_until", [("begin", {"max_gen_toks": 40})]), True)
    places = [(whole.find(char), char) for char in set(whole[5:30])]
    until = [char for _, char in places[:3]]
    (ended,) = plain.generate_until(
        requests("generate_until", [("begin", {"max_gen_toks": 40, "until": [*until, ""]})]), True
    )
    assert ended == whole[: min(place for place, _ in places[:3])]
    (one,) = plain.generate_until(
        requests("generate_until", [("begin", {"max_gen_toks": 40, "until": until[0]})]), True
    )
    assert one == whole[: whole.find(until[0])]


def test_generation_kwargs_follow_the_harness_s_rules(plain: HiSpecLM) -> None:
    sampling, until = plain._sampling({"until": "x"})
    assert until == ["x", "</s>"] and sampling.stop == until and sampling.stop_token_ids == [EOS_ID]
    assert (sampling.temperature, sampling.max_tokens) == (0.0, 256)
    for given, temperature in (
        ({"do_sample": False, "temperature": 0.7}, 0.0),
        ({"do_sample": True, "temperature": 0.7}, 0.7),
        ({"temperature": 0.7}, 0.7),
        ({"do_sample": True}, 1.0),
        ({"temperature": 0}, 0.0),
    ):
        assert plain._sampling(given)[0].temperature == temperature
    sampling, _ = plain._sampling(
        {"do_sample": True, "top_p": 0.9, "top_k": 5, "max_new_tokens": 3, "num_beams": 1}
    )
    assert (sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.9, 5, 3)
    thinking = HiSpecLM.__new__(HiSpecLM)
    vars(thinking).update(vars(plain), _think_end_token="</think>")
    assert thinking._sampling({"until": "\n\n"})[0].stop == []


def test_sampled_outputs_are_those_of_plain_decoding_too(
    plain: HiSpecLM, tiny_path: Path, preset: Path
) -> None:
    lm = HiSpecLM(str(tiny_path), preset=str(preset))
    given = {"do_sample": True, "temperature": 0.8, "max_gen_toks": 16, "seed": 5}
    asked = requests("generate_until", [(text, given) for text in QUESTIONS])
    assert lm.generate_until(asked, True) == plain.generate_until(asked, True)
    lm.llm.close()


def test_chat_templates_and_their_bos(plain: HiSpecLM, monkeypatch: pytest.MonkeyPatch) -> None:
    history = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    text = plain.apply_chat_template(history)
    assert text == "<|role|>system\nbe</s><|role|>user\nhi</s><|role|>assistant\n"
    begun = [*history, {"role": "assistant", "content": "It is"}]
    assert plain.apply_chat_template(begun, add_generation_prompt=False).endswith("assistant\nIt is")
    assert plain.chat_template(True) == plain.tokenizer.chat_template
    assert plain.tokenizer_name and "/" not in plain.tokenizer_name
    refuses = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
    monkeypatch.setattr(plain.tokenizer, "chat_template", refuses + "{{ messages[0]['content'] }}")
    assert plain.apply_chat_template(history) == "hi"
    # A tokenizer that puts BOS before a text does not put another before a template's.
    with_bos = HiSpecLM.__new__(HiSpecLM)
    vars(with_bos).update(vars(plain), _add_bos_token=True)
    encoded: list[dict[str, Any]] = []
    monkeypatch.setattr(
        plain.tokenizer, "encode", lambda string, **special: encoded.append(special) or [], raising=True
    )
    with_bos.tok_encode("<s>text")
    with_bos.tok_encode("text")
    with_bos.tok_encode("text", add_special_tokens=False)
    plain.tok_encode("text")
    assert [special.get("add_special_tokens") for special in encoded] == [False, True, False, None]


def test_model_args_name_presets_plans_and_settings(preset: Path) -> None:
    config = make_config(
        "m", preset, {"block_size": 8, "speculative.num_draft_tokens": "3", "engine.seed": 4}
    )
    assert (config.model, config.engine.block_size, config.engine.seed) == ("m", 8, 4)
    assert config.engine.max_model_len == 128
    assert config.speculative is not None and config.speculative.num_draft_tokens == 3
    assert config.speculative.check is not None and config.speculative.check.layer == 6
    for null in ("null", None):
        assert make_config("m", preset, {"speculative": null}).speculative is None
    ngram = {"draft": {"kind": "ngram"}, "num_draft_tokens": 4}
    for plan in (ngram, SpeculativeConfig.model_validate(ngram)):
        made = make_config("m", None, {"speculative": plan}).speculative
        assert made is not None and made.draft.kind == "ngram"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, r"^model_args\.model: required"),
        ({"model": "m", "pretrained": "m"}, "model and pretrained are the same"),
        ({"model": "m", "blok_size": 8}, r"^model_args\.blok_size: unknown setting"),
        ({"model": "m", "block_size": 0}, r"^model_args\.engine\.block_size: must be at least 1, got 0"),
        ({"model": "m", "sampling.top_k": 1}, r"^model_args\.sampling\.top_k: sampling is said by tasks"),
        ({"model": "m", "speculative.draft.kind": "[a"}, r"^model_args: 'speculative\.draft\.kind=\[a'"),
        ({"model": "m", "preset": "nowhere.yaml"}, r"cannot read nowhere\.yaml"),
        ({"model": "m", "workers": 0}, r"^workers: must be auto, or an integer"),
    ],
    ids=lambda each: "+".join(each) if isinstance(each, dict) else "",
)
def test_model_args_that_are_wrong_are_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        HiSpecLM(**arguments)


def test_requests_that_cannot_be_served_are_named(plain: HiSpecLM) -> None:
    for given, words in (
        ({"max_gen_toks": 128}, r"max_gen_toks=128 leaves no room .*choose at most 127"),
        ({"num_beams": 4}, r"^generation_kwargs\.num_beams=4: HiSpec has no beam search"),
        ({"length_penalty": 2.0}, r"^generation_kwargs\.length_penalty: unknown setting"),
        ({"top_p": 3.0}, r"^generation_kwargs\.top_p: must be at most 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            plain.generate_until(requests("generate_until", [("text", given)]), disable_tqdm=True)
    with pytest.raises(RequestError, match=r"a continuation has 129 tokens, but max_model_len=128"):
        plain.loglikelihood(requests("loglikelihood", [("a", "b" * 129)]), disable_tqdm=True)


def test_the_harness_s_device_is_said_where_it_is_not_its_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[dict[str, Any]] = []

    def note(model: Any, preset: Any, settings: dict[str, Any]) -> None:
        said.append(settings)
        raise InterruptedError

    monkeypatch.setattr("hispec.integrations.lm_eval.make_config", note)
    for device, settings in (("cuda:0", {}), (None, {}), ("cpu", {}), ("cuda:1", {"engine.device": "cpu"})):
        with pytest.raises(InterruptedError):
            HiSpecLM("m", device=device, batch_size=1, max_batch_size=None, **settings)
    assert said[:3] == [{}, {}, {"device": "cpu"}]
    assert list(said[3]) == ["device", "engine.device"], "what is said of the engine comes last, and wins"


def test_the_command_knows_the_model(
    tasks: Path, tiny_path: Path, wanted: dict[str, Any], tmp_path: Path
) -> None:
    """Also with a harness that looks for no plug-ins."""
    command = [sys.executable, "-m", "hispec.integrations.lm_eval", "--model", "hispec"]
    settings = [f"{name}={value}" for name, value in SMALL.items()]
    command += ["--model_args", ",".join([f"model={tiny_path}", "speculative=null", *settings])]
    command += ["--tasks", "tiny_choice,tiny_generation", "--include_path", str(tasks), "--output_path"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        [*command, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr
    (results,) = tmp_path.rglob("results_*.json")
    found = json.loads(results.read_text())["results"]
    for task, metric in (("tiny_choice", "acc,none"), ("tiny_generation", "exact_match,none")):
        assert found[task][metric] == wanted["results"][task][metric]
