"""Settings of the HTTP server."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ..config import Settings


class ServerConfig(Settings):
    """How `hispec serve` serves.

    name            of the model, for clients
    host, port      where it listens; 127.0.0.1 is for this machine alone
    api_key         that clients must send as a bearer token; None = none
    max_requests    unfinished outputs, `n` of each prompt; requests that bring more get status 429
    max_tokens      new tokens of a request at most, whatever it names or leaves out; None = what the context
                    and the KV blocks leave
    max_logprobs    likeliest tokens that a body may ask for beside each token: they are held until their
                    request ends
    max_body_bytes  of a request
    timeout_s       seconds that a request may take in all, its place in the queue included
    drain_s         seconds that unfinished requests have when the server is told to end, or until it is told
                    again
    """

    name: Annotated[str, Field(min_length=1)]
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, lt=2**16)] = 8000
    api_key: Annotated[str, Field(min_length=1)] | None = None
    max_requests: Annotated[int, Field(ge=1)] = 256
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_logprobs: Annotated[int, Field(ge=0, le=64)] = 20
    max_body_bytes: Annotated[int, Field(ge=1024)] = 4 << 20
    timeout_s: Annotated[float, Field(gt=0.0)] = 600.0
    drain_s: Annotated[float, Field(ge=0.0)] = 30.0
