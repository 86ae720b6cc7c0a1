"""What serving over HTTP costs beside `LLM.generate` of the same prompts.

    python benchmarks/serve_speed.py MODEL --prompts prompts.jsonl [--limit N] [--quantization int8]
    [--streams 16] [--max-tokens 64] [--repeats 3] [--json FILE]

Plain decoding, greedy, the end of a text ignored. `hispec serve` runs in a process of its own; so many
clients on the same machine each send the next prompt as soon as they have read their last answer, token by
token (as server-sent events), or whole. LLM.generate gets all prompts at once. All have --streams rows, and
take turns, each as often first. Tokens per second, prompts included, are medians of the repeats.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run from a checkout: nothing needs to be installed

from benchmarks.arguments import at_least_one, make_parser
from benchmarks.command import run
from benchmarks.markdown import table
from benchmarks.recorded import prompts_of
from hispec import LLM, SamplingParams
from hispec.errors import ConfigError, build
from hispec.jobs.bench_inputs import good_rows, token_ids_of
from hispec.jobs.rows import count_rows
from hispec.jobs.schema import Job
from hispec.profile.timed_runs import check_served
from hispec.utils.environment import environment, hardware_text

ROOT = Path(__file__).resolve().parents[1]
GENERATE, STREAMS, WHOLE = "LLM.generate", "serve, streams", "serve, whole answers"


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Raises ConfigError, CheckpointError, or RequestError with the prompts that cannot be served."""
    given = {"model": options.model, "input": {"path": options.prompts, "limit": options.limit}}
    job = build(Job, given | {"output": {"path": "unused"}})
    count_rows(job.input)
    rows = good_rows(job)
    if len({row.is_chat for row in rows}) > 1:
        raise ConfigError(f"--prompts: {options.prompts} has conversations and other prompts; one kind each")
    engine: dict[str, Any] = {"max_num_seqs": options.streams, "enable_prefix_caching": False}
    engine["quantization"] = options.quantization
    sampling: dict[str, Any] = {"temperature": 0.0, "max_tokens": options.max_tokens, "ignore_eos": True}
    runs: dict[str, list[float]] = {GENERATE: [], STREAMS: [], WHOLE: []}
    # Before anything is loaded, so that its load is that of others. No `others` follow: `watch_others` takes
    # off the time of this process alone, and would count the server among other programs.
    measured_on = environment()
    with ExitStack() as stack:
        llm = stack.enter_context(LLM(options.model, **engine))
        check_served(llm, prompts_of(llm, rows), SamplingParams(**sampling))
        url = stack.enter_context(server(options.model, engine))
        generate = llm.chat if rows[0].is_chat else llm.generate
        prompts: list[Any] = [row.prompt for row in rows]
        bodies = [body_of(row.prompt, row.is_chat, sampling) for row in rows]
        path = "/v1/chat/completions" if rows[0].is_chat else "/v1/completions"
        texts: dict[str, list[str]] = {}
        for turn in range(-1, options.repeats):  # the first warms up
            for name in [*runs][turn % 3 :] + [*runs][: turn % 3]:
                started = time.perf_counter()
                if name == GENERATE:
                    outputs = generate(prompts, sampling, use_tqdm=False)
                    token_ids_of(outputs)  # raises for those that failed
                    found = [output.outputs[0].text for output in outputs]
                else:
                    ask = ask_all(url + path, bodies, options.streams, is_stream=name == STREAMS)
                    found = asyncio.run(ask)
                seconds = time.perf_counter() - started
                if texts.setdefault(name, found) != found or found != texts[min(texts)]:
                    raise ConfigError(f"{name}: its texts are not those of {min(texts)}")
                if turn >= 0:
                    runs[name].append(len(rows) * options.max_tokens / seconds)
    return {
        "benchmark": "serve_speed",
        "environment": measured_on,
        "prompts": len(rows),
        "options": {"model": options.model, "max_tokens": options.max_tokens} | engine,
        "tokens_per_s": runs,
    }


def body_of(prompt: Any, is_chat: bool, sampling: dict[str, Any]) -> dict[str, Any]:
    return {"messages" if is_chat else "prompt": prompt, **sampling}


@contextmanager
def server(model: str, engine: dict[str, Any]) -> Iterator[str]:
    """The address of a server in a process of its own."""
    settings = [f"engine.{name}={json.dumps(value)}" for name, value in engine.items()]
    command = [
        sys.executable,
        "-m",
        "hispec",
        "serve",
        model,
        "--name",
        "model",
        "--port",
        "0",
        "--set",
        *settings,
    ]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if " at http://" in line:
                url = line.partition(" at ")[2].partition("/v1")[0]
                break
        else:
            raise ConfigError("the server did not start; run it by hand to see why")
        for _ in range(600):
            try:
                httpx.get(f"{url}/health").raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.communicate()


async def ask_all(url: str, bodies: Sequence[dict[str, Any]], clients: int, is_stream: bool) -> list[str]:
    """The text of each answer, by so many clients."""
    texts = [""] * len(bodies)
    left = iter(range(len(bodies)))
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(timeout=600.0, limits=limits) as client:

        async def ask() -> None:
            for at in left:
                if is_stream:
                    texts[at] = "".join([piece async for piece in read_stream(url, bodies[at])])
                else:
                    whole = await client.post(url, json=bodies[at])
                    if whole.status_code != 200:
                        raise ConfigError(f"the server answered {whole.status_code} {whole.reason_phrase}")
                    texts[at] = text_of(whole.json()["choices"][0])

        await asyncio.gather(*(ask() for _ in range(clients)))
    return texts


async def read_stream(url: str, body: dict[str, Any]) -> AsyncIterator[str]:
    """The pieces of an answer. Clients take their time from the same cores as the server, and a library for
    HTTP as much for a token as the server itself: here only lines are read, which suits a server that puts no
    event into two chunks."""
    to, content = urlsplit(url), json.dumps(body | {"stream": True}).encode()
    assert to.hostname is not None
    reader, writer = await asyncio.open_connection(to.hostname, to.port)
    head = f"POST {to.path} HTTP/1.1\r\nHost: {to.netloc}\r\nContent-Length: {len(content)}\r\n\r\n"
    try:
        writer.write(head.encode() + content)
        status = await reader.readline()
        if b" 200 " not in status:
            raise ConfigError(f"the server answered {status.decode().strip()}")
        async for line in reader:
            if line.startswith(b"data: {"):
                yield text_of(json.loads(line[6:])["choices"][0])
            elif line.startswith(b"data: "):  # [DONE]
                return
        raise ConfigError("the server ended a stream before its end")
    finally:
        writer.close()


def text_of(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    return str(choice.get("delta", choice.get("message", {})).get("content") or "")


def print_result(result: dict[str, Any]) -> None:
    medians = {name: statistics.median(runs) for name, runs in result["tokens_per_s"].items()}
    rows = [[name, f"{speed:.1f}", f"{speed / medians[GENERATE]:.3f}"] for name, speed in medians.items()]
    print(hardware_text(result["environment"]))
    print(*table(["", "tokens/s", f"of {GENERATE}"], rows), sep="\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--streams", type=at_least_one, default=16, metavar="N")
    parser.add_argument("--max-tokens", type=at_least_one, default=64, metavar="N")
    parser.add_argument("--repeats", type=at_least_one, default=3, metavar="N")
    options = parser.parse_args(arguments)
    return run("serve_speed", options, measure, print_result)


if __name__ == "__main__":
    sys.exit(main())
