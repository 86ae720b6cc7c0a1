"""Lines of OpenAI's Batch API: requests in, responses out."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..detokenizer import TokenBytes
from ..errors import ConfigError, nearest, shown
from ..openai.requests import CHAT, COMPLETIONS, read_body
from ..openai.responses import error_body, response_body
from ..outputs import RequestOutput

if TYPE_CHECKING:
    from .output import RowError
    from .rows import BadRow, Row

KEYS = ("custom_id", "method", "url", "body")


def is_request(values: Mapping[str, Any]) -> bool:
    """Whether a line looks like a request of the Batch API, though it may be a bad one; a row with a prompt
    of its own is none, whatever else it has."""
    keys = values.keys()
    is_row = not keys.isdisjoint(("prompt", "prompt_token_ids", "messages"))
    return "custom_id" in keys and not keys.isdisjoint(("url", "body")) and not is_row


def read_openai_line(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of an InputLine. Raises ConfigError."""
    for name in values:
        if name not in KEYS:
            raise ConfigError(f"{name}: unknown key{nearest(name, KEYS)}; known: {', '.join(KEYS)}")
    custom_id = values.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise ConfigError(f"custom_id: must be a text, got {shown(custom_id)}")
    if values.get("method", "POST") != "POST":
        raise ConfigError(f"method: must be POST, got {shown(values['method'])}")
    if (url := values.get("url")) not in (CHAT, COMPLETIONS):
        raise ConfigError(f"url: must be {CHAT} or {COMPLETIONS}, got {shown(url)}")
    try:
        return {"id": custom_id, **read_body(url, values.get("body"))}
    except ConfigError as error:
        raise ConfigError(f"body.{error}".replace("body.body", "body")) from None


def openai_row(
    row: Row | BadRow,
    outcome: RequestOutput | RowError,
    model: str,
    token_bytes: TokenBytes,
) -> dict[str, Any]:
    """The line of the output file for a row: its `id` holds the row's content hash, and, as other rows may
    have the same, one of its own."""
    key = row.index if row.id is None else row.id
    own = hashlib.blake2b(str(key).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    name = f"{row.content_hash}-{own}"
    if isinstance(outcome, RequestOutput):
        kind = "chatcmpl" if row.is_chat else "cmpl"
        response_id = f"{kind}-{name}"
        status, body = (
            200,
            response_body(outcome, row.is_chat, model, int(time.time()), response_id, token_bytes),
        )
    else:
        refused = outcome.type != "failed"
        status, body = (400 if refused else 500), error_body(outcome.message, refused)
    response = {"status_code": status, "request_id": f"req_{name}", "body": body}
    return {"id": f"batch_req_{name}", "custom_id": row.id, "response": response, "error": None}
