"""What benchmarks/quality.py reads: models, questions, texts and prompts, all as tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from benchmarks.json_rows import rows_of, text_in
from ee_models.checkpoint.loader import Checkpoint, load_tokenizer
from ee_models.training.examples import Example
from hispec.config import EngineConfig
from hispec.engine.kv_sizing import max_model_len
from hispec.errors import ConfigError, RequestError, shown
from hispec.jobs.bench_inputs import good_rows, task_of
from hispec.jobs.rows import count_rows
from hispec.jobs.schema import InputConfig, Job, OutputConfig
from hispec.loading.target_model import open_model
from hispec.prompts import encode_prompt

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


def final_number(text: str) -> Decimal | None:
    """The first number after the first `####`, or else the last one of the text; None without a number."""
    _, _, after = text.partition(MARK)
    found = NUMBER.search(after)
    last = found.group() if found else ([None, *NUMBER.findall(text)])[-1]
    return None if last is None else Decimal(last.replace("−", "-").translate(str.maketrans("", "", "$, ")))


def texts_of(path: Path, fields: Sequence[str], limit: int | None) -> Iterator[tuple[str, list[str]]]:
    """(where, texts of `fields`) of the first `limit` rows. Raises ConfigError for what cannot be read."""
    for where, row in rows_of(path, fields, limit):
        yield where, [text_in(where, row, field).strip() for field in fields]


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
