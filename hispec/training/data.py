"""The first stages of training: prompts, written or read, and the target's own answers to them.

Both are jobs of `hispec run`, so they are resumed row by row. Files in the work folder:

    written.in.jsonl, written.jsonl     what the model is asked to go on with, and the user turns that it
                                        wrote
    prompts.jsonl, answers.jsonl        all conversations, and the answers
"""

from __future__ import annotations

import codecs
import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ee_models.checkpoint.loader import Checkpoint
from ee_models.training.examples import Example
from ee_models.training.loop import write_atomically

from ..config import EngineConfig
from ..errors import ConfigError, RequestError, build, shown
from ..jobs.inputs import Record
from ..jobs.manifest import AnotherJobsOutput, load_manifest
from ..jobs.rows import Message, identify
from ..jobs.runner import run_job
from ..jobs.schema import InputConfig, Job, OutputConfig
from ..prompts import encode_prompt
from ..sampling_params import SamplingParams
from .schema import PromptSource, TrainConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "\u2063HISPEC\u2063"  # placeholder of the user's text in a rendered template; never part of a text
_MIN_CHARS = 8  # shorter than this, what the model wrote is no prompt
_MIN_PIECE = 16  # tokens: in less of a text, nearly all is guessed without context
Messages = list[dict[str, str]]


@dataclass
class BadRows:
    """Rows that cannot be used; with `stop` the first one raises ConfigError."""

    stop: bool
    messages: list[str] = field(default_factory=list)

    def add(self, where: str, why: str) -> None:
        if self.stop:
            raise ConfigError(f"{where}: {why}; mend the row, or set data.on_bad_row=skip")
        self.messages.append(f"{where}: {why}")

    def report(self, shown: int = 10) -> None:
        """On stderr: how many, and the first of them."""
        if self.messages:
            first = self.messages[:shown] + ["..."] * (len(self.messages) > shown)
            print(f"{len(self.messages)} rows left out:", *first, sep="\n  ", file=sys.stderr)


@dataclass(frozen=True)
class Prompt:
    """A conversation, with its answer or up to where the model is to answer, and where it came from: its
    source, and the place in it. output: of the job that has answered it, if one has."""

    messages: Messages
    source: str
    where: str
    output: dict[str, Any] | None = None

    @property
    def has_answer(self) -> bool:
        """Whether the conversation ends with it."""
        return self.messages[-1]["role"] == "assistant"

    @property
    def is_asked(self) -> bool:
        return self.output is None and not self.has_answer


@dataclass(frozen=True)
class Text:
    """What is learnt as it stands, and where it came from."""

    text: str
    source: str
    where: str


def make_examples(
    config: TrainConfig,
    work: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    progress: bool,
    only_reads: bool = False,
) -> list[Example]:
    """Prompts and answers -> examples, in the order of prompts.jsonl. Finished work is reused.

    only_reads: another process has written everything in `work`, and nothing is written here

    Raises ConfigError for sources that can't be read, or that leave no example.
    """
    bad = BadRows(config.data.on_bad_row == "stop")
    # Files first: one that is missing is found before minutes of writing.
    read = [each for source in config.data.prompts if source.path for each in _read_file(source, bad)]
    prompts = [*_written(config, work, tokenizer, bad, progress, only_reads), *read]
    random.Random(config.seed).shuffle(prompts)
    asked = [prompt.messages for prompt in prompts if isinstance(prompt, Prompt) and prompt.is_asked]
    answered = _answers(config, work, asked, progress, only_reads)
    examples: list[Example] = []
    mix = defaultdict[str, list[Example]](list)
    for prompt in prompts:
        made = list(_examples(prompt, config, answered, tokenizer, bad))
        examples += made
        mix[prompt.source] += made
    bad.report()
    for source, those in sorted(mix.items()):
        learnt = sum(len(example.token_ids) - example.prompt_len for example in those)
        print(f"{source}: {len(those)} examples, {learnt} tokens to learn", file=sys.stderr)
    if len(examples) <= config.data.held_out:
        raise ConfigError(
            f"data: {len(examples)} usable examples, of which data.held_out={config.data.held_out} are held"
            " out; give more prompts"
        )
    return examples


def _examples(
    prompt: Prompt | Text,
    config: TrainConfig,
    answered: Iterator[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    bad: BadRows,
) -> Iterator[Example]:
    """What is learnt of a prompt or text. answered: the answers of prompts that bring none, from here on."""
    if isinstance(prompt, Text):
        yield from _pieces(prompt, tokenizer, config.data.max_length, bad)
        return
    messages = prompt.messages
    if prompt.output is None and prompt.has_answer:
        response = tokenizer.encode(messages[-1]["content"], add_special_tokens=False)
        if tokenizer.eos_token_id is not None:
            response.append(tokenizer.eos_token_id)
        messages = messages[:-1]
    else:
        row = next(answered) if prompt.output is None else prompt.output
        if row["error"] is not None:
            bad.add(prompt.where, row["error"]["message"])
            return
        response = row["outputs"][0]["token_ids"]
    try:
        _, token_ids = encode_prompt(tokenizer, messages, chat=True)
    except RequestError as error:
        bad.add(prompt.where, str(error))
        return
    if len(response) < 2:
        bad.add(prompt.where, "the response is empty")
    elif len(token_ids) + len(response) > config.data.max_length:
        bad.add(
            prompt.where,
            f"{len(token_ids)} tokens of prompt and {len(response)} of response are over"
            f" data.max_length={config.data.max_length}",
        )
    else:
        yield Example([*token_ids, *response], len(token_ids))


def _pieces(
    text: Text, tokenizer: PreTrainedTokenizerBase, max_length: int, bad: BadRows
) -> Iterator[Example]:
    """A text as examples that are responses from the second token on."""
    token_ids = tokenizer.encode(text.text, add_special_tokens=False, verbose=False)
    if len(token_ids) < _MIN_PIECE:
        bad.add(text.where, f"the text has {len(token_ids)} tokens; {_MIN_PIECE} are the least to learn from")
    for start in range(0, len(token_ids), max_length):
        # What is left at the end of a long text may be too little.
        if len(piece := token_ids[start : start + max_length]) >= _MIN_PIECE:
            yield Example(piece, 1)


def _written(
    config: TrainConfig,
    work: Path,
    tokenizer: PreTrainedTokenizerBase,
    bad: BadRows,
    progress: bool,
    only_reads: bool = False,
) -> Iterator[Prompt]:
    """User turns that the model writes: it is given the chat template up to the user's text, and the
    opening."""
    sources = [source for source in config.data.prompts if source.opening is not None]
    if not sources:
        return
    before = _before_user(tokenizer)
    rows: list[dict[str, Any]] = []
    for source in sources:
        assert source.opening is not None and source.count is not None
        # A space at the end would keep the model from its usual tokens, which begin with one.
        prompt = tokenizer.encode(before + source.opening.rstrip(" "), add_special_tokens=False)
        row = {"prompt_token_ids": prompt, "metadata": {"opening": source.opening}}
        for number in range(len(rows), len(rows) + source.count):
            sampling = {"max_tokens": source.max_tokens, "seed": config.seed + number}
            rows.append({"id": number, "sampling": sampling, **row})
    params = SamplingParams(temperature=config.data.writing_temperature)
    files = work / "written.in.jsonl", work / "written.jsonl"
    seen = set()
    for row in _generate(config, *files, rows, params, "writing prompts", progress, only_reads):
        opening, where = row["metadata"]["opening"], f"written prompt {row['id'] + 1}"
        if row["error"] is not None:
            bad.add(f"{where} (opening {shown(opening)})", row["error"]["message"])
            continue
        text = row["outputs"][0]["text"].rstrip()
        # After an opening that ends with a space or line, the text's own would be a second one.
        prompt = opening + (text.lstrip() if not opening or opening[-1].isspace() else text)
        if len(text.strip()) >= _MIN_CHARS and prompt not in seen:
            seen.add(prompt)
            conversation = [{"role": "user", "content": prompt}]
            yield Prompt(conversation, f"opening {shown(opening)}", f"{where} ({shown(prompt)})")


def _before_user(tokenizer: PreTrainedTokenizerBase) -> str:
    """What the chat template puts before the user's text. Raises ConfigError if it cannot be told."""
    why = "does not repeat the user's text as it is"
    try:
        text, _ = encode_prompt(tokenizer, [{"role": "user", "content": _MARK}], chat=True)
        before, mark, _ = (text or "").partition(_MARK)
        if mark:
            return before
    except RequestError as error:
        why = f"refuses a conversation that begins with the user ({error})"
    raise ConfigError(
        f"data.prompts: the model cannot write prompts of an `opening`: its chat template {why}; give files"
        " of prompts"
    )


def _read_file(source: PromptSource, bad: BadRows) -> Iterator[Prompt | Text]:
    path = source.path
    assert path is not None
    lines = _read_lines(path)
    if not any(map(bytes.strip, lines)):
        raise ConfigError(
            f"data.prompts: {path} has no rows; it needs one JSON object per line, such as"
            f' {{"{source.text or source.field}": "Hello"}}'
        )
    outputs = None if source.outputs is None else _read_outputs(source.outputs)
    index = -1
    for number, raw in enumerate(lines, start=1):
        if not raw.strip():
            continue
        index += 1
        if index == source.limit:
            break
        where = f"{path}, line {number}"
        try:
            row = json.loads(raw)
            json.dumps(row, ensure_ascii=False).encode()  # half a surrogate pair is no character
        except (ValueError, RecursionError) as error:
            bad.add(where, f"not valid JSON: {error}")
            continue
        if source.text is None and isinstance(row, dict) and "messages" in row:
            try:
                messages = [build(Message, message, "messages").model_dump() for message in row["messages"]]
                if any(message["content"] is None for message in messages):
                    raise ConfigError("messages.content: must be text; calls of tools alone are not learnt")
            except (ConfigError, TypeError) as error:
                bad.add(where, f"messages: {error}")
                continue
            output = None if outputs is None else outputs.get(index)
            if outputs is not None and output is None:
                bad.add(where, f"{source.outputs} has no output of it; go on with the job, or set `limit`")
                continue
            if output is not None and output.get("hash") not in (None, _hash_of(path, number, raw)):
                raise ConfigError(
                    f"data.prompts: row {index} of outputs {source.outputs} answers another row than {where};"
                    " give the input that the job ran on"
                )
            if messages and messages[-1]["content"].strip():
                yield Prompt(messages, str(path), where, output)
            elif not messages:
                bad.add(where, "messages: there is none")
            else:
                is_answer = messages[-1]["role"] == "assistant"
                bad.add(where, f"the {'response' if is_answer else 'last message'} is empty")
            continue
        if outputs is not None:
            bad.add(where, "responses of `outputs` are to `messages`, and it has none; run the job on those")
            continue
        fields = {"user": source.text or source.field}
        if source.answer is not None:
            fields["assistant"] = source.answer
        texts = {role: row.get(name) if isinstance(row, dict) else None for role, name in fields.items()}
        empty = [role for role, text in texts.items() if not (isinstance(text, str) and text.strip())]
        if not empty and source.text is not None:
            yield Text(str(texts["user"]), str(path), where)
        elif not empty:
            messages = [{"role": role, "content": str(text).strip()} for role, text in texts.items()]
            yield Prompt(messages, str(path), where)
        elif (text := texts[empty[0]]) is not None:
            bad.add(where, f"field {fields[empty[0]]!r} must be a non-empty string, got {shown(text)}")
        else:
            has = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            other = "" if source.text else " (or `messages`)"
            bad.add(where, f"needs a non-empty string in field {fields[empty[0]]!r}{other}; it has: {has}")


def _read_lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
    except OSError as error:
        raise ConfigError(
            f"data.prompts: cannot read {path}: {error.strerror}; mend the path, or leave this source out"
        ) from None


def _read_outputs(path: Path) -> dict[int, dict[str, Any]]:
    """The rows of a job's output by the index of their input. Raises ConfigError for a file that is none, or
    that has no tokens."""
    rows = {}
    for number, line in enumerate(_read_lines(path), start=1):
        if not line.strip():
            continue
        where = f"data.prompts: outputs {path}, line {number},"
        try:
            row = json.loads(line)
            rows[row["index"]] = row
            failed = row["error"] is not None and row["error"]["message"]
            tokens = [] if failed else row["outputs"][0].get("token_ids")
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
            raise ConfigError(
                f"{where} is no output of `hispec run`; give the file that a job has written in JSONL, and go"
                " on with the job if it was interrupted"
            ) from None
        if not isinstance(tokens, list):
            raise ConfigError(f"{where} has no token_ids; run the job with output.token_ids: true")
        if wrong := [token for token in tokens if type(token) is not int or token < 0]:
            raise ConfigError(
                f"{where} has {shown(wrong[0])} among its token_ids, which must be whole numbers from 0 on;"
                " run the job again"
            )
    return rows


def _hash_of(path: Path, line: int, raw: bytes) -> str:
    """What a job's output says of the row of its input that it answers."""
    return identify(InputConfig(path=path), Record(None, line, raw.strip())).content_hash


def _answers(
    config: TrainConfig, work: Path, conversations: list[Messages], progress: bool, only_reads: bool
) -> Iterator[dict[str, Any]]:
    rows = []
    for number, (messages, temperature) in enumerate(
        zip(conversations, cycle(config.data.temperatures), strict=False)
    ):
        sampling = {"temperature": temperature, "seed": config.seed + number}
        rows.append({"id": number, "messages": messages, "sampling": sampling})
    params = SamplingParams(max_tokens=config.data.max_tokens)
    files = work / "prompts.jsonl", work / "answers.jsonl"
    return _generate(config, *files, rows, params, "answers", progress, only_reads)


def check_model_of_answers(config: TrainConfig, work: Path, checkpoint: Checkpoint) -> None:
    """Raises ConfigError if what was written in the folder `work` is another model's, though of that name; or
    if `outputs` are, where the recipe learns the model's own answers."""
    for target in (work / "written.jsonl", work / "answers.jsonl"):
        if _is_of_others(target, checkpoint, "choose another output.work, or delete it and its file"):
            raise ConfigError(
                f"{target} was written by other weights than those of {checkpoint.path} today; choose another"
                " output.work, or delete the file"
            )
    learns_own = config.recipe in ("adapters", "ngrams") or (
        config.ee is not None and config.ee.target == "self"
    )
    for outputs in dict.fromkeys(source.outputs for source in config.data.prompts if source.outputs):
        if _is_of_others(outputs, checkpoint, "run the job again, or delete the manifest if you know better"):
            what = f"data.prompts: outputs {outputs} were written by another model than {config.model}"
            if learns_own:
                raise ConfigError(
                    f"{what}, whose own answers are learnt here; give outputs of it, or leave `outputs` out"
                )
            print(f"{what}; they are learnt as they are", file=sys.stderr)


def _is_of_others(target: Path, checkpoint: Checkpoint, way_out: str) -> bool:
    """Whether the manifest of a job's output says that another model wrote it. Raises ConfigError for a
    manifest that cannot be read."""
    try:
        manifest = load_manifest(target)
    except ConfigError as error:
        raise ConfigError(f"{error}; {way_out}") from None
    made_by = None if manifest is None else manifest.settings.get("fingerprint.model")
    return made_by is not None and made_by != checkpoint.fingerprint


def _generate(
    config: TrainConfig,
    source: Path,
    target: Path,
    rows: list[dict[str, Any]],
    params: SamplingParams,
    what: str,
    progress: bool,
    only_reads: bool,
) -> Iterator[dict[str, Any]]:
    """Runs `rows` as a job, going on from what `target` holds -> output rows in the order of `rows`."""
    if not rows:
        return
    if not only_reads:
        longest = config.engine.max_model_len or config.data.max_length
        job = Job(
            model=config.model,
            engine=EngineConfig.model_validate(config.engine.model_dump() | {"max_model_len": longest}),
            sampling=params,
            input=InputConfig(path=source),
            output=OutputConfig(path=target, resume=True, echo_input=False, token_ids=True),
        )
        print(f"{what}: {len(rows)} rows to {target}", file=sys.stderr)
        _run_rows(job, source, rows, progress)
    with target.open(encoding="utf-8") as file:
        answers = {answer["id"]: answer for answer in map(json.loads, file)}
    for row in rows:  # the file may hold those of more rows
        yield answers[row["id"]]


def _run_rows(job: Job, source: Path, rows: list[dict[str, Any]], progress: bool) -> None:
    """Writes `rows` to `source`, the job's input, and runs it."""
    target = job.output.path
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_atomically(source, lambda draft: draft.write_bytes(text.encode()))
    try:
        run_job(job, progress=progress)
    except AnotherJobsOutput as error:
        raise ConfigError(
            f"{target} holds what other prompts or settings gave; choose another output.work, or delete the"
            " file"
        ) from error
