"""What early-exit training cost a model in quality, or any model beside the one that it was made of.

    python benchmarks/quality.py MODEL [--against MODEL2] [--gsm8k FILE.jsonl] [--text FILE.jsonl]
    [--prompts FILE.jsonl] [--limit N] [--batch-size 16] [--max-tokens 256] [--json FILE]

--gsm8k     rows of `question` and `answer`: each model answers the questions greedily, as chats, and its
            final number is compared with the reference's
--text      held-out rows of --field and --answer (default: question, answer): nats of the last layer per
            token of the answer and its end, put into the chat template as training does
--prompts   input rows of a job, as benchmarks/prompts.py writes them; MODEL2 (the original) answers them
            greedily, and both models read its answers: KL(original || model) in nats a token, and the share
            of places where both find the same token likeliest

Decoding is plain. Intervals are of 95 %: Wilson's for a share of right answers, else by bootstrap over rows,
in which what two models say to a row stays together. Means over tasks give every task the same weight. Both
models are in memory at once; tables are Markdown, and the JSON has every row.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run from a checkout: nothing needs to be installed

from benchmarks.markdown import table
from ee_models.checkpoint.exit_files import fingerprint
from ee_models.checkpoint.loader import Checkpoint, load_tokenizer
from ee_models.decoder import Decoder
from ee_models.errors import CheckpointError
from ee_models.training.examples import Example
from ee_models.training.hidden_states import FINAL, trunk_states
from hispec.config import EngineConfig
from hispec.engine.kv_sizing import max_model_len
from hispec.errors import ConfigError, HiSpecError, RequestError, shown
from hispec.jobs.bench_inputs import good_rows, task_of, token_ids_of
from hispec.jobs.confidence_interval import Paired, ratio_interval
from hispec.jobs.rows import count_rows
from hispec.jobs.schema import InputConfig, Job, OutputConfig
from hispec.llm import LLM
from hispec.loading.target_model import open_model
from hispec.outputs import RequestOutput
from hispec.prompts import encode_prompt
from hispec.sampling_params import SamplingParams
from hispec.utils.console import make_bar
from hispec.utils.environment import environment, hardware_text
from hispec.utils.files import check_target, parse_json, write_json

LOGITS_AT_ONCE = 2**22  # of each model: 17 MB in float32
TOKENS_PER_PASS = 4096  # padding included
Z = 1.959964  # standard deviations on either side of the mean that hold 95 %
USER_ERROR = 2
# A minus sign, not the one between two numbers; thousands with or without commas.
NUMBER = re.compile(
    r"(?:(?<![\w.)])[-−]\$?|\$ ?[-−]?)?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
)
MARK = "####"  # before the final number of an answer of GSM8K


@dataclass(frozen=True)
class Prompt:
    """What a model is asked, as tokens. `number` is the right one, for a question of GSM8K."""

    where: str
    token_ids: list[int]
    task: str = ""
    number: Decimal | None = None


@dataclass(frozen=True)
class Models:
    """One or two models by their names: the one asked about, and the original."""

    names: list[str]
    checkpoints: list[Checkpoint]
    tokenizers: list[Any]

    @classmethod
    def open(cls, names: Sequence[str]) -> Models:
        """Reads no weights. Raises ConfigError for two models whose tokens differ, and what `open_model`
        raises."""
        checkpoints = [open_model(name) for name in names]
        made = cls(list(names), checkpoints, [load_tokenizer(checkpoint) for checkpoint in checkpoints])
        if len(names) == 2:
            made._check_alike()
        return made

    def _check_alike(self) -> None:
        def differ(what: str) -> ConfigError:
            return ConfigError(
                f"--against: {self.names[0]} and {self.names[1]} have {what}, and are not comparable token by"
                " token; choose the model that the first was made of"
            )

        sizes = [checkpoint.config.vocab_size for checkpoint in self.checkpoints]
        if sizes[0] != sizes[1]:
            raise differ(f"vocabularies of {sizes[0]} and {sizes[1]} tokens")
        first, second = (
            None if tokenizer is None else tokenizer.get_vocab() for tokenizer in self.tokenizers
        )
        if first != second:
            raise differ("different tokenizers")
        if first is not None and self.tokenizers[0].chat_template != self.tokenizers[1].chat_template:
            raise differ("different chat templates")

    @property
    def max_len(self) -> int:
        """The longest sequence, in tokens, that all of them take."""
        return min(
            max_model_len(EngineConfig(), each.config.max_position_embeddings, each.config.sliding_window)
            for each in self.checkpoints
        )

    def encode(self, prompt: Any, chat: bool, where: str) -> list[int]:
        """Raises ConfigError."""
        try:
            return encode_prompt(self.tokenizers[0], prompt, chat)[1]
        except RequestError as error:
            raise ConfigError(f"{where}: {error}") from None


# ---- input ----


def final_number(text: str) -> Decimal | None:
    """The first number after the first `####`, or else the last one of the text; None without a number."""
    _, _, after = text.partition(MARK)
    found = NUMBER.search(after)
    last = found.group() if found else ([None, *NUMBER.findall(text)])[-1]
    return None if last is None else Decimal(last.replace("−", "-").translate(str.maketrans("", "", "$, ")))


def texts_of(path: Path, fields: Sequence[str], limit: int | None) -> Iterator[tuple[str, list[str]]]:
    """(where, texts of `fields`) of the first `limit` rows. Raises ConfigError for what cannot be read."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; mend the path") from None
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise ConfigError(f"{path} has no rows; it needs one JSON object with {' and '.join(fields)} a line")
    for number, line in numbered[:limit]:
        where = f"{path}, line {number}"
        try:
            row = parse_json(line)
            json.dumps(row, ensure_ascii=False).encode()  # half a surrogate pair is no character
        except ValueError as error:
            raise ConfigError(f"{where}: not valid JSON: {error}; mend the row") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: must be a JSON object, got {shown(row)}; mend the row")
        for field in fields:
            if field not in row:
                raise ConfigError(f"{where}: has no field {field!r}, only {', '.join(row)}; mend the row")
            text = row[field]
            if not (isinstance(text, str) and text.strip()):
                raise ConfigError(
                    f"{where}: {field!r} must be a non-empty string, got {shown(text)}; mend the row"
                )
        yield where, [row[field].strip() for field in fields]


def questions_of(models: Models, path: Path, limit: int | None) -> list[Prompt]:
    """Raises ConfigError."""
    prompts = []
    for where, (question, answer) in texts_of(path, ("question", "answer"), limit):
        if (number := final_number(answer)) is None:
            raise ConfigError(f"{where}: 'answer' has no number, got {shown(answer)}; mend the row")
        message = {"role": "user", "content": question}
        prompts.append(Prompt(where, models.encode([message], True, where), number=number))
    return prompts


def examples_of(models: Models, path: Path, fields: Sequence[str], limit: int | None) -> list[Example]:
    """Rows as `hispec train` makes them into examples. Raises ConfigError, also for those that are too
    long."""
    examples = []
    for where, (question, answer) in texts_of(path, fields, limit):
        prompt = models.encode([{"role": "user", "content": question}], True, where)
        tokenizer = models.tokenizers[0]
        response = tokenizer.encode(answer, add_special_tokens=False)
        if tokenizer.eos_token_id is not None:
            response.append(tokenizer.eos_token_id)
        example = Example([*prompt, *response], len(prompt))
        if len(example.token_ids) > models.max_len:
            raise ConfigError(
                f"{where}: {len(example.token_ids)} tokens are over the model's limit of {models.max_len};"
                " leave the row out"
            )
        examples.append(example)
    return examples


def prompts_of(models: Models, path: Path, limit: int | None) -> list[Prompt]:
    """The first `limit` of each task. Raises ConfigError."""
    job = Job(model=models.names[0], input=InputConfig(path=path), output=OutputConfig(path=Path("unused")))
    prompts: dict[str, list[Prompt]] = {}
    count_rows(job.input)  # there are some
    for row in good_rows(job):
        of_task = prompts.setdefault(task_of(row), [])
        if limit is None or len(of_task) < limit:
            where = f"{path}, line {row.line}"
            of_task.append(Prompt(where, models.encode(row.prompt, row.is_chat, where), task_of(row)))
    return [prompt for of_task in prompts.values() for prompt in of_task]


# ---- what models say ----


def answers_of(llm: LLM, prompts: Sequence[Prompt], max_tokens: int) -> list[RequestOutput]:
    """Greedy answers. Raises RequestError with all that can't be served."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    outputs = llm.generate([prompt.token_ids for prompt in prompts], params)
    token_ids_of(outputs)
    return outputs


@torch.inference_mode()
def score(
    decoders: Sequence[Decoder], examples: Sequence[Example], batch_size: int, what: str
) -> list[list[float]]:
    """Of each example, in sums over the tokens of its response: nats by each model, and with two models
    KL(second || first) and the number of places where both find the same token likeliest."""
    scores: list[list[float]] = [[] for _ in examples]
    order = sorted(range(len(examples)), key=lambda index: len(examples[index].token_ids))
    with make_bar(len(examples), what, "row", True) as bar:
        while order:  # the longest first, so that what does not fit into memory shows at once
            longest = len(examples[order[-1]].token_ids)
            num_rows = min(batch_size, max(1, TOKENS_PER_PASS // longest))
            taken = order[-num_rows:]
            del order[-num_rows:]
            part = [examples[index] for index in taken]
            places, targets, start = [], [], 0
            for example in part:
                stop = start + len(example.token_ids)
                places.append(torch.arange(start + example.prompt_len - 1, stop - 1))
                targets += example.token_ids[example.prompt_len :]
                start = stop
            read = torch.cat(places)
            states = [
                trunk_states(each, (), part, each.dtype)[FINAL][read.to(each.device)] for each in decoders
            ]
            found = figures_of(decoders, states, torch.tensor(targets)).split([len(each) for each in places])
            for index, of_row in zip(taken, found, strict=True):
                scores[index] = of_row.sum(0).tolist()
            bar.update(len(taken))
    return scores


def figures_of(decoders: Sequence[Decoder], states: Sequence[Tensor], targets: Tensor) -> Tensor:
    """What `score` sums, [places, figures] float64 on the CPU, of states [places, hidden] after the final
    norm; logits are made a piece at a time."""
    at_once = max(1, LOGITS_AT_ONCE // decoders[0].config.vocab_size)
    found = []
    for start in range(0, len(targets), at_once):
        part = slice(start, start + at_once)
        logs = [
            decoder.head(of_model[part]).float().log_softmax(-1)
            for decoder, of_model in zip(decoders, states, strict=True)
        ]
        wanted = targets[part, None].to(logs[0].device)
        columns = [-log.gather(1, wanted)[:, 0] for log in logs]
        if len(logs) == 2:
            model, original = logs
            columns.append(F.kl_div(model, original, reduction="none", log_target=True).sum(-1))
            columns.append(model.argmax(-1) == original.argmax(-1))
        found.append(torch.stack([column.double().cpu() for column in columns], dim=1))
    return torch.cat(found)


# ---- figures ----


def wilson(num_right: int, num_all: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    share, spread = num_right / num_all, Z * Z / num_all
    middle = share + spread / 2
    half = Z * math.sqrt((share * (1 - share) + spread / 4) / num_all)
    return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))


def mean_of(
    totals: Sequence[float], counts: Sequence[float], tasks: Sequence[str] | None = None
) -> dict[str, Any]:
    """Sum of `totals` over sum of `counts`, the mean over tasks if given; with its bootstrap interval over
    rows (None where a task has a single row)."""
    rows: dict[str, list[int]] = {}
    for row in range(len(totals)):
        rows.setdefault("" if tasks is None else tasks[row], []).append(row)
    paired, means = [], []
    for of_task in rows.values():
        total, count = [totals[row] for row in of_task], [counts[row] for row in of_task]
        ones = [1.0] * len(of_task)  # over which a ratio is what it is
        paired.append(Paired(total, count, ones, ones))
        means.append(sum(total) / sum(count))
    return {"value": sum(means) / len(means), "interval": ratio_interval(paired)}


def gsm8k_figures(questions: Sequence[Prompt], answers: Sequence[Sequence[RequestOutput]]) -> dict[str, Any]:
    """answers: by model."""
    rows: list[dict[str, Any]] = []
    for question, *of_row in zip(questions, *answers, strict=True):
        row: dict[str, Any] = {
            "row": Path(question.where).name,
            "number": str(question.number),
            "answers": [],
        }
        for output in (each.outputs[0] for each in of_row):
            number = final_number(output.text)
            row["answers"].append(
                {
                    "text": output.text,
                    "number": None if number is None else str(number),
                    "is_right": number == question.number,
                    "finish_reason": output.finish_reason,
                    "tokens": len(output.token_ids),
                }
            )
        rows.append(row)
    result: dict[str, Any] = {"questions": len(rows), "models": []}
    for model in range(len(answers)):
        own = [row["answers"][model] for row in rows]
        right = sum(answer["is_right"] for answer in own)
        result["models"].append(
            {
                "accuracy": {"value": right / len(rows), "interval": wilson(right, len(rows))},
                "ended": sum(answer["finish_reason"] == "stop" for answer in own) / len(rows),
                "mean_tokens": sum(answer["tokens"] for answer in own) / len(rows),
            }
        )
    if len(answers) == 2:
        gains = [row["answers"][0]["is_right"] - row["answers"][1]["is_right"] for row in rows]
        result["difference"] = mean_of(gains, [1.0] * len(rows))
    return result | {"rows": rows}


def text_figures(examples: Sequence[Example], scores: Sequence[Sequence[float]]) -> dict[str, Any]:
    counts = [len(example.token_ids) - example.prompt_len for example in examples]
    num_models = min(2, len(scores[0]))
    nats = [[score[model] for score in scores] for model in range(num_models)]
    result: dict[str, Any] = {
        "texts": len(counts),
        "tokens": sum(counts),
        "models": [mean_of(of_model, counts) for of_model in nats],
    }
    if num_models == 2:
        more = [own - others for own, others in zip(*nats, strict=True)]
        result["difference"] = mean_of(more, counts)
    result["rows"] = [
        {"tokens": count, "nats": score[:num_models]} for count, score in zip(counts, scores, strict=True)
    ]
    return result


def prompts_figures(
    prompts: Sequence[Prompt], examples: Sequence[Example], scores: Sequence[Sequence[float]]
) -> dict[str, Any]:
    tasks = [prompt.task for prompt in prompts]
    rows = [
        {
            "row": Path(prompt.where).name,
            "task": prompt.task,
            "tokens": len(example.token_ids) - example.prompt_len,
        }
        | {"kl": kl, "same": same}
        for prompt, example, (_, _, kl, same) in zip(prompts, examples, scores, strict=True)
    ]

    def figures(of: Sequence[int]) -> dict[str, Any]:
        counts, named = [rows[at]["tokens"] for at in of], [tasks[at] for at in of]
        each = {name: mean_of([rows[at][name] for at in of], counts, named) for name in ("kl", "same")}
        return {"prompts": len(of), "tokens": sum(counts)} | each

    by_task = {
        task: figures([at for at, own in enumerate(tasks) if own == task]) for task in dict.fromkeys(tasks)
    }
    return {"tasks": by_task, "mean": figures(range(len(rows))), "rows": rows}


# ---- tables ----


def in_words(figure: dict[str, Any], kind: str) -> list[str]:
    """A value and its interval, by the format `kind`."""
    interval = figure["interval"]
    return [
        f"{figure['value']:{kind}}",
        "" if interval is None else f"{interval[0]:{kind}} to {interval[1]:{kind}}",
    ]


def lines_of(result: dict[str, Any]) -> Iterator[str]:
    """The result as Markdown."""
    names = [model["name"] for model in result["models"]]
    yield f"{', '.join(names)}; {hardware_text(result['environment'])}, {result['date']}"
    if "gsm8k" in result:
        part = result["gsm8k"]
        yield f"\nGSM8K, {part['questions']} questions, at most {result['max_tokens']} tokens:\n"
        rows = [
            [name, *in_words(of["accuracy"], ".1%"), f"{of['ended']:.1%}", f"{of['mean_tokens']:.1f}"]
            for name, of in zip(names, part["models"], strict=True)
        ]
        if "difference" in part:
            rows.append(["difference", *in_words(part["difference"], "+.1%"), "", ""])
        yield from table(["model", "right", "95 %", "ended by themselves", "mean tokens"], rows)
    if "text" in result:
        part = result["text"]
        yield f"\nHeld-out text, {part['texts']} answers, {part['tokens']} tokens:\n"
        rows = [[name, *in_words(of, ".4f")] for name, of in zip(names, part["models"], strict=True)]
        if "difference" in part:
            rows.append(["difference", *in_words(part["difference"], "+.4f")])
        yield from table(["model", "nats a token", "95 %"], rows)
    if "prompts" in result:
        part = result["prompts"]
        yield f"\n{names[0]} on greedy answers of {names[1]}, at most {result['max_tokens']} tokens:\n"
        rows = [
            [
                task,
                str(of["prompts"]),
                str(of["tokens"]),
                *in_words(of["kl"], ".4f"),
                *in_words(of["same"], ".1%"),
            ]
            for task, of in (*part["tasks"].items(), ("mean over tasks", part["mean"]))
        ]
        titles = ["task", "prompts", "tokens", "KL, nats a token", "95 %", "same greedy tokens", "95 %"]
        yield from table(titles, rows)


# ---- the command ----


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Raises ConfigError for input that cannot be used, before weights are read, and what loading a model
    raises."""
    if options.json is not None:
        check_target("--json", options.json)
    models = Models.open([options.model, *filter(None, [options.against])])
    limit, max_tokens = options.limit, options.max_tokens
    questions = [] if options.gsm8k is None else questions_of(models, options.gsm8k, limit)
    fields = (options.field, options.answer)
    texts = [] if options.text is None else examples_of(models, options.text, fields, limit)
    prompts = [] if options.prompts is None else prompts_of(models, options.prompts, limit)
    for prompt in (*questions, *prompts):
        if len(prompt.token_ids) + max_tokens > models.max_len:
            raise ConfigError(
                f"{prompt.where}: {len(prompt.token_ids)} tokens and --max-tokens={max_tokens} are over the"
                f" model's limit of {models.max_len}; leave the row out, or lower --max-tokens"
            )
    longest = max(
        [len(prompt.token_ids) + max_tokens for prompt in (*questions, *prompts)]
        + [len(example.token_ids) for example in texts]
    )
    result: dict[str, Any] = {
        "benchmark": "quality",
        "date": time.strftime("%Y-%m-%d"),
        "environment": environment(),
        "models": [],
        "limit": limit,
        "batch_size": options.batch_size,
        "max_tokens": max_tokens,
    }
    decoders, answered, original = [], [], []
    for name, checkpoint in zip(models.names, models.checkpoints, strict=True):
        with LLM(name, max_num_seqs=options.batch_size, max_model_len=longest) as llm:
            if questions:
                answered.append(answers_of(llm, questions, max_tokens))
            if prompts and len(decoders) == 1:
                original = answers_of(llm, prompts, max_tokens)
            decoders.append(llm.decoder)
        dtype = str(decoders[-1].dtype).removeprefix("torch.")
        result["models"].append({"name": name, "fingerprint": fingerprint(checkpoint), "dtype": dtype})
    if questions:
        result["gsm8k"] = {"file": options.gsm8k.name} | gsm8k_figures(questions, answered)
    if texts:
        scores = score(decoders, texts, options.batch_size, "text")
        result["text"] = {"file": options.text.name} | text_figures(texts, scores)
    if prompts:
        read = [
            Example([*prompt.token_ids, *own], len(prompt.token_ids))
            for prompt, own in zip(prompts, token_ids_of(original), strict=True)
        ]
        scores = score(decoders, read, options.batch_size, "answers of the original")
        result["prompts"] = {"file": options.prompts.name} | prompts_figures(prompts, read, scores)
    return result


def at_least_one(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--against", metavar="MODEL2", help="the original, or any model of the same tokens")
    parser.add_argument("--gsm8k", type=Path, metavar="FILE")
    parser.add_argument("--text", type=Path, metavar="FILE")
    parser.add_argument("--field", default="question", help="of --text (default: question)")
    parser.add_argument("--answer", default="answer", help="of --text (default: answer)")
    parser.add_argument("--prompts", type=Path, metavar="FILE")
    parser.add_argument(
        "--limit",
        type=at_least_one,
        metavar="N",
        help="the first rows of each file; of --prompts, each task's",
    )
    parser.add_argument("--batch-size", type=at_least_one, default=16)
    parser.add_argument("--max-tokens", type=at_least_one, default=256, help="of an answer (default: 256)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    if options.gsm8k is options.text is options.prompts is None:
        parser.error("nothing to measure: give --gsm8k, --text or --prompts, or several of them")
    if options.prompts is not None and options.against is None:
        parser.error("--prompts needs --against, the model whose answers are read")
    try:
        result = measure(options)
        if options.json is not None:
            write_json(options.json, result)
    except (HiSpecError, CheckpointError, OSError) as error:
        print(f"quality: {error}", file=sys.stderr)
        return USER_ERROR
    print(*lines_of(result), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
