"""Turns prompts and conversations, as users give them, into token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | list[int] | dict[str, Any]
Message = dict[str, Any]


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
    try:
        text = str(tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # a template is code of the model's author, and raises what it likes
        raise RequestError(f"the chat template refuses the messages: {error}") from error
    return text, _encode(tokenizer, text, add_special_tokens=False)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool) -> list[int]:
    try:
        # verbose=False: whether a prompt is too long is for the engine to say, by max_model_len.
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False))
    except Exception as error:  # tokenizers raise what they like, for a lone surrogate for example
        raise RequestError(f"the tokenizer refuses the prompt: {error}") from error
