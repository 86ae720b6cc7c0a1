"""What training cost a model in quality: numbers found in answers, figures beside transformers' own, input
that is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import quality
from benchmarks.command import USER_ERROR
from benchmarks.quality_figures import gsm8k_figures, wilson
from benchmarks.quality_inputs import Models, Prompt, examples_of, final_number, prompts_of
from ee_models.checkpoint.loader import load_tokenizer, open_checkpoint
from hispec.errors import build
from hispec.jobs.confidence_interval import mean_of
from hispec.measure import likelihood
from hispec.outputs import CompletionOutput, RequestOutput
from hispec.training.data import make_examples
from hispec.training.schema import TrainConfig
from tests.helpers.tiny import tiny_checkpoint

MAX_TOKENS = 6
QUESTIONS = [
    {"question": "What is 6 times 7? ", "answer": "6 * 7 = <<6*7=42>>42\n#### 42"},
    {"question": "And 2 + 2?", "answer": " Four. #### 4\n"},
    {"question": "How much is it?", "answer": "It costs more than one thinks.\n#### 1,234"},
]


def chat(text: str, task: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "metadata": {"task": task}}


PROMPTS = [chat("Hello", "a"), chat("A much longer hello", "a"), chat("x", "b"), {"prompt": "Once"}]


def write(path: Path, rows: Sequence[Any]) -> Path:
    """Objects as JSON, bytes as they are."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models and files of rows."""
    folder = tmp_path_factory.mktemp("quality")
    for name, seed in (("model", 0), ("original", 1)):
        tiny_checkpoint(folder / name, num_layers=2, seed=seed, tokenizer=True)
    write(folder / "questions.jsonl", QUESTIONS)
    write(folder / "prompts.jsonl", PROMPTS)
    return folder


def run(folder: Path, *arguments: str, model: str = "model") -> dict[str, Any]:
    """What a run writes."""
    target = folder / "out" / "quality.json"
    sizes = ["--max-tokens", str(MAX_TOKENS), "--json", str(target)]
    assert quality.main([str(folder / model), *arguments, *sizes]) == 0
    return json.loads(target.read_text(encoding="utf-8"))


def parts(folder: Path, *names: str) -> list[str]:
    files = {"gsm8k": "questions", "text": "questions", "prompts": "prompts"}
    return [each for name in names for each in (f"--{name}", str(folder / f"{files[name]}.jsonl"))]


# ---- numbers in answers ----


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("6 * 7 = <<6*7=42>>42\n#### 42", "42"),
        ("#### 1,234,567", "1234567"),
        ("#### $1,234.", "1234"),
        ("#### $ 18.50 a day", "18.5"),
        ("#### 18.00", "18"),
        ("#### -3", "-3"),
        ("#### −3", "-3"),
        ("#### -$3", "-3"),
        ("#### $-3", "-3"),
        ("#### .5", "0.5"),
        ("#### **12** apples, not 13", "12"),
        ("#### 75%.", "75"),
        ("####\n9", "9"),
        ("#### 5\n#### 6", "5"),  # it did not stop: what follows is no part of the answer
        ("She has 7 left. #### none", "7"),
        ("She buys 3, and then 4, so 3 + 4 = 7.", "7"),
        ("It is 10-4.", "4"),
        ("It is 5 - 3", "3"),
        ("covid-19", "19"),
        ("12,34", "34"),
        ("x2y", "2"),
        ("- $ -", None),
        ("none at all", None),
        ("", None),
    ],
)
def test_the_final_number_of_an_answer(text: str, number: str | None) -> None:
    assert final_number(text) == (None if number is None else Decimal(number))


# ---- figures ----


def test_accuracy_is_of_all_questions_and_the_difference_of_pairs() -> None:
    def answers(*texts: str) -> list[RequestOutput]:
        return [
            RequestOutput("", None, [], [CompletionOutput(0, text, [1] * len(text), None, reason, None)])
            for text, reason in zip(texts, ("stop", "length", "stop"), strict=True)
        ]

    questions = [Prompt(f"line {number}", [1], number=Decimal(number)) for number in (42, 4, 1234)]
    said = [answers("#### 42.0", "$4", "1,2"), answers("#### 41", "4", "")]
    figures = gsm8k_figures(questions, said)
    model, original = figures["models"]
    assert model["accuracy"]["value"] == pytest.approx(2 / 3)
    assert original["accuracy"]["value"] == pytest.approx(1 / 3)
    assert model["ended"] == pytest.approx(2 / 3)
    assert model["mean_tokens"] == pytest.approx((9 + 2 + 3) / 3)
    assert figures["difference"]["value"] == pytest.approx(1 / 3)
    widened = (3 / 2) ** 0.5 * 4.30 / 1.95996  # of three
    ends = 1 / 3 - 1 / 3 * widened, 1 / 3 + 2 / 3 * widened
    assert figures["difference"]["interval"] == pytest.approx(ends), "the pairs say 1, 0, 0"
    assert [[each["is_right"] for each in row["answers"]] for row in figures["rows"]] == [
        [True, False],
        [True, True],
        [False, False],
    ]


def test_wilsons_interval() -> None:
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(0, 3)[0] == 0.0, "and not -0.0 by rounding"
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)


def test_means_weigh_tokens_in_a_task_and_tasks_alike() -> None:
    totals, counts, tasks = [1.0, 8.0, 3.0, 3.0], [1.0, 3.0, 1.0, 1.0], ["a", "a", "b", "b"]
    assert mean_of(totals, counts)["value"] == pytest.approx(15 / 6)
    of_tasks = mean_of(totals, counts, tasks)
    assert of_tasks["value"] == pytest.approx((9 / 4 + 3) / 2)
    widened = 2**0.5 * 4.30 / 1.95996  # of two tasks of two
    ends = ((9 / 4 + end * widened + 3) / 2 for end in (1 - 9 / 4, 8 / 3 - 9 / 4))
    assert of_tasks["interval"] == pytest.approx(tuple(ends)), "b does not vary, a from 1 to 8/3"
    assert mean_of(totals, counts, ["a", "b", "b", "b"])["interval"] is None


# ---- beside transformers ----


@cache
def loaded(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def logits_of(model: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """float64 [tokens, vocab], of log-probabilities."""
    with torch.no_grad():
        return loaded(model)(torch.tensor([token_ids])).logits[0].double().log_softmax(-1)


def greedy(model: Path, token_ids: Sequence[int]) -> list[int]:
    asked = torch.tensor([token_ids])
    made = loaded(model).generate(
        asked, attention_mask=torch.ones_like(asked), do_sample=False, max_new_tokens=MAX_TOKENS
    )
    return made[0, len(token_ids) :].tolist()


@pytest.mark.parametrize("sizes", [("16", 2**22), ("2", 700)], ids=["at once", "in pieces"])
def test_nats_and_divergence_are_those_of_transformers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sizes: tuple[str, int]
) -> None:
    batch_size, logits_at_once = sizes
    monkeypatch.setattr(likelihood, "LOGITS_AT_ONCE", logits_at_once)
    model, original = folder / "model", folder / "original"
    arguments = [*parts(folder, "text", "prompts"), "--against", str(original), "--batch-size", batch_size]
    result = run(folder, *arguments)
    tokenizer = AutoTokenizer.from_pretrained(model)

    def encoded(row: dict[str, Any]) -> list[int]:
        if "prompt" in row:
            return tokenizer.encode(row["prompt"])
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False, add_generation_prompt=True)
        return tokenizer.encode(text, add_special_tokens=False)

    nats, divergence = [], 0.0
    for row, found in zip(QUESTIONS, result["text"]["rows"], strict=True):
        prompt = encoded({"messages": [{"role": "user", "content": row["question"].strip()}]})
        answer = [*tokenizer.encode(row["answer"].strip()), tokenizer.eos_token_id]
        own, others = (
            logits_of(path, [*prompt, *answer])[len(prompt) - 1 : -1] for path in (model, original)
        )
        each = [-float(logs[range(len(answer)), answer].sum()) for logs in (own, others)]
        assert found["kl"] == pytest.approx(float((others.exp() * (others - own)).sum()), rel=1e-4)
        assert found["same"] == int((own.argmax(-1) == others.argmax(-1)).sum())
        divergence += found["kl"]
        assert found["tokens"] == len(answer) and found["nats"] == pytest.approx(each, rel=1e-5)
        nats.append(each)
    num_tokens = result["text"]["tokens"]
    more = sum(own - others for own, others in nats) / num_tokens
    assert result["text"]["difference"]["value"] == pytest.approx(more, rel=1e-4)
    low, high = result["text"]["difference"]["interval"]
    assert low < more < high
    assert result["text"]["kl"]["value"] == pytest.approx(divergence / num_tokens)

    expected = []
    for row, found in zip(PROMPTS, result["prompts"]["rows"], strict=True):
        prompt = encoded(row)
        answer = greedy(original, prompt)
        own, others = (
            logits_of(path, [*prompt, *answer])[len(prompt) - 1 : -1] for path in (model, original)
        )
        kl = float((others.exp() * (others - own)).sum())
        same = int((own.argmax(-1) == others.argmax(-1)).sum())
        assert found["tokens"] == len(answer)
        assert (found["kl"], found["same"]) == (pytest.approx(kl, rel=1e-4), same)
        expected.append(kl / len(answer) if found["task"] != "a" else kl)
    first, second, *others = expected
    of_a = (first + second) / result["prompts"]["tasks"]["a"]["tokens"]
    tasks = result["prompts"]["tasks"]
    assert [tasks[task]["kl"]["value"] for task in ("a", "b", "all")] == pytest.approx(
        [of_a, *others], rel=1e-4
    )
    assert result["prompts"]["mean"]["kl"]["value"] == pytest.approx(sum([of_a, *others]) / 3, rel=1e-4)
    printed = capsys.readouterr().out
    assert "| mean over tasks | 4 |" in printed and f"| difference | {more:+.4f} |" in printed


def test_quantized_weights_are_those_of_the_model_asked_about(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    against = ["--against", str(folder / "model"), *parts(folder, "text")]
    result = run(folder, *against, "--quantization", "int8")
    plain = run(folder, *against)
    assert 0 < result["text"]["kl"]["value"] < 0.1 and plain["text"]["kl"]["value"] == pytest.approx(
        0, abs=1e-9
    )
    own, original = ([row["nats"][at] for row in result["text"]["rows"]] for at in (0, 1))
    assert own != original == [row["nats"][1] for row in plain["text"]["rows"]]
    assert result["models"][0]["name"].endswith("model, quantization=int8")
    assert [model["kv_cache_dtype"] for model in result["models"]] == ["bfloat16", "float32"]
    assert "same likeliest token" in capsys.readouterr().out


def test_weights_and_kv_in_bfloat16_are_those_of_the_model_asked_about(folder: Path) -> None:
    against = ["--against", str(folder / "model"), *parts(folder, "text")]
    lost = []
    for numbers in (["--kv-cache-dtype", "bfloat16"], ["--dtype", "bfloat16"]):
        result = run(folder, *against, *numbers)
        assert result["models"][0]["kv_cache_dtype"] == "bfloat16"
        lost.append(result["text"]["kl"]["value"])
    assert 0 < lost[0] < lost[1] < 0.1


def test_a_model_has_lost_nothing_against_itself(folder: Path) -> None:
    result = run(
        folder, *parts(folder, "gsm8k", "text", "prompts"), "--against", str(folder / "original"),
        model="original",
    )  # fmt: skip
    assert [(row["kl"], row["same"]) for row in result["prompts"]["rows"]] == [
        (0.0, row["tokens"]) for row in result["prompts"]["rows"]
    ]
    nothing = {"value": 0.0, "interval": [0.0, 0.0]}
    assert result["text"]["difference"] == result["gsm8k"]["difference"] == nothing
    first, second = result["models"]
    assert first["fingerprint"] == second["fingerprint"] and first["dtype"] == "float32"
    assert result["prompts"]["rows"][0]["row"] == "prompts.jsonl, line 1", "no folder of this machine"
    assert result["environment"]["torch"] == torch.__version__


def test_one_model_alone_is_asked_and_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(folder, *parts(folder, "gsm8k", "text"), "--limit", "2")
    assert "difference" not in result["gsm8k"] and "difference" not in result["text"]
    assert len(result["gsm8k"]["rows"]) == len(result["text"]["rows"]) == 2
    (answer,) = result["gsm8k"]["rows"][0]["answers"]
    assert answer["tokens"] <= MAX_TOKENS and answer["finish_reason"] in ("stop", "length")
    assert "difference" not in capsys.readouterr().out


def test_text_is_put_as_training_puts_it(folder: Path, tmp_path: Path) -> None:
    path = folder / "questions.jsonl"
    data = {"prompts": [{"path": str(path), "field": "question", "answer": "answer"}], "held_out": 1}
    config = build(
        TrainConfig,
        {
            "model": str(folder / "model"),
            "data": data,
            "adapters": {"exits": [{"layer": 1}]},
            "loop": {"num_steps": 1},
            "output": {"path": str(tmp_path / "exits")},
        },
    )
    tokenizer = load_tokenizer(open_checkpoint(folder / "model"))
    assert tokenizer is not None
    examples = make_examples(config, tmp_path, tokenizer, progress=False)
    models = Models.open([str(folder / "model")])
    found = examples_of(models, path, ("question", "answer"), None)
    assert sorted(found, key=str) == sorted(examples, key=str)


def test_a_limit_takes_so_many_of_each_task(folder: Path) -> None:
    models = Models.open([str(folder / "model")])
    prompts = prompts_of(models, folder / "prompts.jsonl", 1)
    assert [(prompt.task, prompt.where[-6:]) for prompt in prompts] == [
        ("a", "line 1"),
        ("b", "line 3"),
        ("all", "line 4"),
    ]


# ---- what is refused ----


@pytest.mark.parametrize(
    ("part", "rows", "message"),
    [
        ("gsm8k", [], "rows.jsonl has no rows; it needs one JSON object with question and answer a line"),
        ("gsm8k", [b"{"], "rows.jsonl, line 1: not valid JSON"),
        ("gsm8k", [b"\xff"], "rows.jsonl, line 1: not valid JSON"),
        ("gsm8k", [b'{"question": "\\ud800"}'], "rows.jsonl, line 1: not valid JSON"),
        ("gsm8k", [b"", [1]], "rows.jsonl, line 2: must be a JSON object, got [1]"),
        ("gsm8k", [{"question": "Why?"}], "line 1: has no field 'answer', only question"),
        (
            "text",
            [{"question": " ", "answer": "x"}],
            "line 1: 'question' must be a non-empty string, got ' '",
        ),
        ("text", [{"question": "x", "answer": 3}], "line 1: 'answer' must be a non-empty string, got 3"),
        ("gsm8k", [{"question": "x", "answer": "none"}], "line 1: 'answer' has no number, got 'none'"),
        ("text", [{"question": "x", "answer": "y" * 600}], "tokens are over the model's limit of 512; leave"),
        ("gsm8k", [{"question": "x" * 500, "answer": "4"}], "and --max-tokens=6 are over the model's limit"),
        ("prompts", [], "rows.jsonl has no rows"),
        ("prompts", [{"metadata": {}}], "line 1: a row needs exactly one of prompt"),
    ],
)
def test_rows_that_cannot_be_used_are_named(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    rows: list[Any],
    message: str,
) -> None:
    monkeypatch.delattr(quality, "LLM")  # no weights are read for it
    model, path = str(folder / "model"), write(tmp_path / "rows.jsonl", rows)
    arguments = [model, "--against", model, f"--{part}", str(path), "--max-tokens", "6"]
    assert quality.main(arguments) == USER_ERROR
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("part", ["gsm8k", "text", "prompts"])
def test_a_file_that_is_not_there_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], part: str
) -> None:
    model = str(folder / "model")
    assert quality.main([model, "--against", model, f"--{part}", "no.jsonl"]) == USER_ERROR
    assert "cannot read no.jsonl: No such file or directory" in capsys.readouterr().err


def test_models_of_other_tokens_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(model: Path) -> str:
        arguments = [str(folder / "model"), "--against", str(model), *parts(folder, "text")]
        assert quality.main(arguments) == USER_ERROR
        return capsys.readouterr().err

    larger = tiny_checkpoint(tmp_path / "larger", num_layers=2, vocab=300, tokenizer=True)
    assert "have vocabularies of 260 and 300 tokens, and are not comparable" in refused(larger)
    other = tiny_checkpoint(tmp_path / "other", num_layers=2, tokenizer=True)
    template = other / "chat_template.jinja"
    template.write_text(template.read_text(encoding="utf-8") + "!", encoding="utf-8")
    assert "have different chat templates" in refused(other)
    renamed = other / "tokenizer.json"
    renamed.write_text(renamed.read_text(encoding="utf-8").replace("<|role|>", "<|who|>"), encoding="utf-8")
    assert "have different tokenizers" in refused(other)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to measure: give --gsm8k, --text or --prompts"),
        (["--prompts", "x.jsonl"], "--prompts needs --against"),
        (["--text", "x.jsonl", "--limit", "0"], "argument --limit: must be at least 1, got 0"),
    ],
)
def test_a_command_without_sense_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        quality.main(["model", *arguments])
    assert message in capsys.readouterr().err


def test_a_target_that_cannot_be_written_is_refused_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["no model", "--text", "no.jsonl", "--json", str(tmp_path)]
    assert quality.main(arguments) == USER_ERROR
    assert "--json:" in capsys.readouterr().err and not list(tmp_path.iterdir())
