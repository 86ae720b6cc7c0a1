"""Turns prompts and conversations, as users give them, into token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from .errors import RequestError, described, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | list[int] | dict[str, Any]
Message = dict[str, Any]
Role = Literal["system", "user", "assistant", "tool"]


def split_prompts(prompts: Any, chat: bool) -> dict[str, Any]:
    """The prompts of a call, or with `chat` its conversations, by what errors call them: "prompts" for a
    single one, "prompts[3]" in a list. Raises RequestError for the first that is none."""
    name, item = ("messages", dict) if chat else ("prompts", int)
    if not _is_list(prompts) or (len(prompts) > 0 and isinstance(prompts[0], item)):
        named = {name: prompts}
    else:
        named = {f"{name}[{at}]": prompt for at, prompt in enumerate(prompts)}
    for own_name, prompt in named.items():
        try:
            if chat:
                _check_conversation(prompt)
            else:
                _content(prompt)
        except RequestError as error:
            raise RequestError(f"{own_name}: {error}") from None
    return named


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase | None, prompt: Any, chat: bool
) -> tuple[str | None, list[int]]:
    """(text if there is one, token ids) of a prompt, or of a conversation through the chat template. Raises
    RequestError."""
    content = None if chat else _content(prompt)
    if isinstance(content, list):
        return None, content
    if tokenizer is None:
        raise RequestError("the model has no tokenizer; give prompt_token_ids")
    if content is not None:
        return content, _encode(tokenizer, content, add_special_tokens=True)
    _check_conversation(prompt)
    if not tokenizer.chat_template:
        raise RequestError(
            "the model's tokenizer has no chat template; give a plain prompt: generate(), or --no-chat on"
            " the command line"
        )
    prompt = [_plain_message(message, at) for at, message in enumerate(prompt)]
    try:
        text = str(tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # a template is code of the model's author, and raises what it likes
        raise RequestError(f"the chat template refuses the messages: {error}") from error
    return text, _encode(tokenizer, text, add_special_tokens=False)


def _content(prompt: Any) -> str | list[int]:
    """The text or the token ids of a prompt. Raises RequestError for what is no prompt."""
    content = prompt
    if isinstance(prompt, dict):
        given = [name for name in ("prompt_token_ids", "prompt") if prompt.get(name) is not None]
        if not given:
            raise RequestError(
                f"a dict needs 'prompt' or 'prompt_token_ids', got {shown(prompt)}{_hint(prompt)}"
            )
        content = prompt[given[0]]
    if isinstance(content, str):
        return content
    if not _is_list(content):
        raise RequestError(
            "a prompt is a string, a list of token ids, or a dict with 'prompt' or 'prompt_token_ids', got"
            f" {described(content)}; give one, or a list of them"
        )
    for at, token in enumerate(content):
        if not isinstance(token, int):
            raise RequestError(
                f"token ids are integers, got {described(token)} at position {at}{_hint(token)}"
            )
    return list(content)


def _hint(value: Any) -> str:
    is_message = isinstance(value, dict) and "role" in value
    return "; a conversation goes to LLM.chat, or to LLM.stream with chat=True" if is_message else ""


def _check_conversation(messages: Any) -> None:
    """Raises RequestError for what is no list of messages."""
    what = "a conversation is a list of messages such as {'role': 'user', 'content': 'Hello'}"
    if not _is_list(messages) or len(messages) == 0:
        raise RequestError(f"{what}, got {described(messages)}")
    for at, message in enumerate(messages):
        if not isinstance(message, dict):
            raise RequestError(f"{what}, got {described(message)} at position {at}")
        # An assistant's message may consist of calls of tools alone.
        if "role" not in message or not message.keys() & {"content", "tool_calls"}:
            missing = "content" if "role" in message else "role"
            raise RequestError(f"message {at} has no {missing!r}: {shown(message)}")


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def given_fields(message: Message) -> Message:
    """A message without what clients write of fields that they do not use: null, and no calls of tools."""
    return {
        name: value
        for name, value in message.items()
        if not (value is None or (name == "tool_calls" and value == []))
    }


def without_nulls(value: Any) -> Any:
    """Arrow gives all mappings of a column the fields of each: those of others are null."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def without_nulls_of_others(message: Any) -> Any:
    """A message without the fields of others; only its content may be null, as where it calls tools."""
    if not isinstance(message, dict):
        return message
    return without_nulls(message) | {name: None for name in ("content",) if message.get(name, "") is None}


def _plain_message(message: Message, at: int) -> Message:
    """Message number `at` of a conversation with its content as one text. Raises RequestError for a role that
    chat templates do not have, and for content that is not text."""
    message = given_fields(message)
    if (role := message.get("role")) not in get_args(Role):
        raise RequestError(
            f"messages.{at}.role must be one of {', '.join(get_args(Role))}, got {shown(role)}"
        )
    try:
        content = join_parts(message.get("content"))
    except RequestError as error:
        raise RequestError(f"messages.{at}.content: {error}") from None
    if not isinstance(content, str) and not (content is None and "tool_calls" in message):
        raise RequestError(
            f"messages.{at}.content: must be text, or a list of parts of text, got {type(content).__name__}"
            f" {shown(content)}"
        )
    return {**message, "content": content}


def join_parts(content: Any) -> Any:
    """A message's content: the texts of a list of parts as one, a line each, as vLLM does; what is no list as
    it is. Raises RequestError for a part that is not text."""
    if not isinstance(content, list | tuple):
        return content
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            what = f"of type {shown(kind)}" if kind not in (None, "text") else shown(part)
            raise RequestError(
                f'part {at} is {what}; only parts such as {{"type": "text", "text": "Hello"}} are read'
            )
    return "\n".join(part["text"] for part in content)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool) -> list[int]:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the prompt is no text: {text[error.start]!a} is half of a surrogate pair, or a byte that"
            " was not UTF-8"
        ) from None
    try:
        # verbose=False: whether a prompt is too long is for the engine to say, by max_model_len.
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False))
    except Exception as error:  # tokenizers raise what they like
        raise RequestError(f"the tokenizer refuses the prompt: {error}") from error
