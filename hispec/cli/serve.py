"""hispec serve: an HTTP server that speaks OpenAI's API."""

from __future__ import annotations

import argparse
import os
from contextlib import closing
from typing import TYPE_CHECKING, Any

from .common import OK, PRESET, add_command, add_options, given_fields

if TYPE_CHECKING:
    from ..llm import LLM

KEY_VARIABLE = "HISPEC_API_KEY"


def add(commands: Any) -> None:
    description = (
        "Serve a model over HTTP as OpenAI's API does (docs/serving.md): for this machine alone, unless"
        f" --host says otherwise. ${KEY_VARIABLE} is the key that clients must send."
    )
    serve = add_command(commands, "serve", _serve, "serve a model over HTTP", description)
    serve.add_argument(
        "model", nargs="?", metavar="MODEL", help="as in a job; may be left out where a preset names it"
    )
    add_options(
        serve,
        PRESET,
        ("--host", str, "HOST", "where to listen (default: 127.0.0.1; 0.0.0.0 = for all machines)"),
        ("--port", int, "PORT", "where to listen (default: 8000; 0 = any that is free)"),
        ("--name", str, "NAME", "of the model, for clients (default: MODEL)"),
        ("--workers", str, "N", "processes that share the work, or auto (default: 1)"),
        (
            "--max-requests",
            int,
            "N",
            "unfinished outputs, n of each prompt; more get status 429 (default: 256)",
        ),
        ("--max-tokens", int, "N", "new tokens of a request at most (default: what the context leaves)"),
        ("--max-logprobs", int, "N", "likeliest tokens beside each that a body may ask for (default: 20)"),
        ("--max-body-bytes", int, "N", "of a request (default: 4 MiB)"),
        ("--timeout-s", float, "SECONDS", "that a request may take in all (default: 600)"),
        (
            "--drain-s",
            float,
            "SECONDS",
            "that requests have to end after SIGTERM or a first Ctrl-C (default: 30)",
        ),
    )


def _serve(options: argparse.Namespace) -> int:
    from ..errors import ConfigError, build
    from ..jobs.load import apply_overrides, load_preset
    from ..jobs.schema import RunConfig

    try:
        from ..serving.run import listen, serve
    except ImportError as error:
        raise ConfigError(f"hispec serve needs {error.name}: pip install '.[server]'") from None
    from ..serving.server_config import ServerConfig
    from ..utils.memory import keep_loaded

    values: dict[str, Any] = (
        {} if options.preset is None else load_preset(options.preset).model_dump(exclude_unset=True)
    )
    if options.model is not None:
        values["model"] = options.model
    apply_overrides(values, options.set)
    run = build(RunConfig, values)
    given = {"name": run.model, "api_key": os.environ.get(KEY_VARIABLE) or None}
    config = build(ServerConfig, given | given_fields(options, ServerConfig), "serve")
    workers = options.workers or "1"

    def make_llm() -> LLM:
        llm = run.make_llm(workers=int(workers) if workers.isdecimal() else workers)
        keep_loaded()
        return llm

    sampling = run.sampling.model_dump(exclude_unset=True) if "sampling" in run.model_fields_set else None
    with closing(listen(config)) as listener:
        serve(make_llm, config, sampling, listener)
    return OK
