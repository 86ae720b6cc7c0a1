"""Turns prompts and conversations, as users give them, into token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

from .errors import RequestError, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | list[int] | dict[str, Any]
Message = dict[str, Any]
Role = Literal["system", "user", "assistant", "tool"]


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase | None, prompt: Any, chat: bool
) -> tuple[str | None, list[int]]:
    """(text if there is one, token ids) of a prompt, or of a conversation through the chat template. Raises
    RequestError."""
    if not chat and isinstance(prompt, dict):
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if not chat and isinstance(prompt, (list, tuple)):
        return None, list(prompt)
    if tokenizer is None:
        raise RequestError("the model has no tokenizer; give prompt_token_ids")
    if not chat:
        if not isinstance(prompt, str):
            raise RequestError(
                "a prompt is a string, a list of token ids, or a dict with one of them, not"
                f" {type(prompt).__name__}"
            )
        return prompt, _encode(tokenizer, prompt, add_special_tokens=True)
    if not tokenizer.chat_template:
        raise RequestError(
            "the model's tokenizer has no chat template; give a plain prompt: generate(), or --no-chat on"
            " the command line"
        )
    prompt = [plain_message(message, at) for at, message in enumerate(prompt)]
    try:
        text = str(tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # a template is code of the model's author, and raises what it likes
        raise RequestError(f"the chat template refuses the messages: {error}") from error
    return text, _encode(tokenizer, text, add_special_tokens=False)


def plain_message(message: Any, at: int) -> Any:
    """Message number `at` of a conversation with its content as one text. Raises RequestError for a role that
    chat templates do not have, and for content that is not text."""
    if not isinstance(message, dict):
        return message
    if (role := message.get("role")) not in get_args(Role):
        raise RequestError(
            f"messages.{at}.role must be one of {', '.join(get_args(Role))}, got {shown(role)}"
        )
    try:
        return {**message, "content": join_parts(message.get("content"))}
    except RequestError as error:
        raise RequestError(f"messages.{at}.content: {error}") from None


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
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
    except Exception as error:  # tokenizers raise what they like, for a lone surrogate for example
        raise RequestError(f"the tokenizer refuses the prompt: {error}") from error
