"""Whether `hispec serve` stands clients of all kinds for long: a test of endurance, not of speed.

    python benchmarks/serve_soak.py [--seconds 300] [--warm-up 120] [--clients 200]
                                    [--json FILE] [--markdown FILE]

A server of a tiny random model runs in a process of its own, with three tiers and little memory, so that
requests are refused and preempted. Clients ask for whole answers and streams, leave in the middle, stall,
send nonsense or half a body, and ask for too much (benchmarks/soak_clients.py). The exit status is 1, with a
line for each reason, if

- an answer has a status other than 200, or one of those that docs/serving.md names for that request;
- the same greedy request has two different texts, or a stream has an error or no end;
- the server's memory grows by 5 % or more in `--seconds`, after the same load for `--warm-up` seconds, in
  which the arenas of the allocator fill;
- anything is left once all clients are gone: requests, KV blocks, connections, asyncio tasks, open files; or
  the engine's own `check` finds its cache or its scheduler inconsistent.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvicorn

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run from a checkout: nothing needs to be installed

from benchmarks.arguments import at_least_one
from benchmarks.command import check_results, exit_code
from benchmarks.markdown import table
from benchmarks.soak_clients import Client, Tally
from hispec import LLM
from hispec.engine import Engine
from hispec.serving.app import make_app
from hispec.serving.async_engine import AsyncEngine
from hispec.serving.run import listen
from hispec.serving.server_config import ServerConfig
from hispec.utils.environment import environment, hardware_text
from hispec.utils.files import write_atomically, write_json

ENGINE: dict[str, Any] = {
    "max_model_len": 256,
    "num_kv_blocks": 24,
    "max_num_seqs": 8,
    "speculative": {"draft": {"layer": 3}, "check": {"layer": 6}, "num_draft_tokens": 2, "num_checks": 2},
}
MOST_REQUESTS = 96
TIMEOUT_S = 60.0
SETTLE_S = 120.0  # that the server has to be rid of everything, once all clients are gone
MOST_GROWTH = 0.05


def serve(model: str, pipe: Connection) -> None:
    """The server's process: says where it listens, serves until it is asked, and says what is left."""
    config = ServerConfig(name="tiny", port=0, max_requests=MOST_REQUESTS, max_tokens=64, timeout_s=TIMEOUT_S)
    engine = AsyncEngine(lambda: LLM(model, **ENGINE), max_requests=MOST_REQUESTS)
    listener = listen(config)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 15)  # or a stalled stream would fit into it
    app = make_app(engine, config, {"temperature": 0.0})
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=5))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(server.serve(sockets=[listener])))
    thread.start()
    while not server.started:
        time.sleep(0.05)
    files = num_files()
    pipe.send((listener.getsockname()[:2], files))
    pipe.recv()
    until = time.monotonic() + SETTLE_S
    while (left := what_is_left(engine, server, loop, files)) and time.monotonic() < until:
        time.sleep(0.5)
    pipe.send((left, engine._call(engine.llm.stats).result(60)))
    server.should_exit = True
    thread.join(60)
    pipe.send(thread.is_alive())


def what_is_left(
    engine: AsyncEngine, server: uvicorn.Server, loop: asyncio.AbstractEventLoop, files: int
) -> list[str]:
    """A line for each thing that a server without clients should not have."""
    assert isinstance(engine.llm.engine, Engine)
    try:
        engine._call(engine.llm.engine.check).result(60)
    except AssertionError as error:
        return [f"Engine.check failed: {error}"]
    stats = engine._call(engine.llm.stats).result(60)
    names = [task.get_name() for task in asyncio.all_tasks(loop)]
    numbers = {
        "requests of the AsyncEngine": engine.num_unfinished,
        "requests that wait in the AsyncEngine": len(engine._waiting) + len(engine._running),
        "requests of the LLM": int(engine.llm.has_unfinished()),
        "requests in rows": stats["running"],
        "requests in the queue": stats["waiting"],
        "KV blocks held": stats["kv_blocks_used"],
        "connections": len(server.server_state.connections),
        "tasks of requests": len(server.server_state.tasks),
        "asyncio tasks beside the server's two": max(0, len(names) - 2),
        "open files more than before": max(0, num_files() - files),
    }
    return [f"{number} {what}" for what, number in numbers.items() if number]


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_mb(process: int) -> float:
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def torment(
    address: tuple[str, int], clients: int, seconds: float, process: int
) -> tuple[Tally, list[float]]:
    """What became of all requests, and the server's memory in MB, second by second."""
    tally, memory, until = Tally(), [], time.monotonic() + seconds

    async def run(seed: int) -> None:
        client = Client(address, tally, seed)
        while time.monotonic() < until:
            await client.request()

    everybody = asyncio.gather(*(run(seed) for seed in range(clients)))
    while time.monotonic() < until:
        memory.append(resident_mb(process))
        await asyncio.sleep(1.0)
    await everybody
    return tally, memory


def measure(options: argparse.Namespace) -> dict[str, Any]:
    from tests.helpers.tiny import tiny_checkpoint

    measured_on = environment()  # now, so that its load is that of others
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_checkpoint(Path(folder) / "model", tokenizer=True)
        pipe, its = spawn.Pipe()
        process = spawn.Process(target=serve, args=(str(model), its), daemon=True)
        process.start()
        its.close()
        try:
            address, _ = pipe.recv()
            assert process.pid is not None
            seconds = options.warm_up + options.seconds
            tally, memory = asyncio.run(torment(address, options.clients, seconds, process.pid))
            pipe.send("what is left?")
            left, stats = pipe.recv()
            is_stuck = pipe.recv()
        except (EOFError, OSError):  # what is sent to a process that has ended is a broken pipe
            tally, memory, left, stats, is_stuck = Tally(), [0.0], ["the server's process ended"], {}, False
        finally:
            process.join(30)
            process.kill()
    growth = growth_of(memory[options.warm_up :])
    failures = [f"{words} ({count} times)" for words, count in sorted(tally.failures.items())]
    failures += [f"after the run: {words}" for words in left]
    if growth >= MOST_GROWTH:
        failures.append(f"the server's memory grew by {growth:.1%}, at most {MOST_GROWTH:.0%} is allowed")
    if is_stuck:
        failures.append("the server did not end when it was told to")
    kinds = sorted({kind for kind, _ in tally.statuses})
    statuses = {
        kind: {str(status): n for (k, status), n in sorted(tally.statuses.items()) if k == kind}
        for kind in kinds
    }
    names = (
        *("finished", "finished_by_reason", "preemptions", "rounds", "tokens"),
        *("kv_blocks", "kv_blocks_used"),
    )
    return {
        "benchmark": "serve_soak",
        "environment": measured_on,
        "options": {"clients": options.clients, "warm_up": options.warm_up, "seconds": options.seconds},
        "server": {"max_requests": MOST_REQUESTS, "timeout_s": TIMEOUT_S, "engine": ENGINE},
        "statuses": statuses,
        "bytes_read": tally.bytes_read,
        "memory_mb": {"growth": growth, "every_10_s": [round(each, 1) for each in memory[::10]]},
        "engine": {name: stats[name] for name in names if name in stats},
        "failures": failures,
    }


def growth_of(memory: Sequence[float]) -> float:
    """From the median of the first tenth to that of the last, as a share."""
    tenth = max(1, len(memory) // 10)
    before = statistics.median(memory[:tenth] or [0.0])
    return statistics.median(memory[-tenth:]) / before - 1 if before else 0.0


def markdown(result: dict[str, Any]) -> list[str]:
    memory, options = result["memory_mb"], result["options"]
    rows = [
        [kind, str(sum(counts.values())), ", ".join(f"{n} × {s}" for s, n in counts.items() if s != "0")]
        for kind, counts in result["statuses"].items()
    ]
    samples = memory["every_10_s"]
    return [
        "# A server under clients of all kinds",
        "",
        f"{options['clients']} clients for {options['warm_up']} + {options['seconds']} seconds,"
        f" `benchmarks/serve_soak.py`;"
        f" {hardware_text(result['environment'])}.",
        "",
        *table(["clients that", "requests", "statuses that they read"], rows),
        "",
        f"Memory of the server: {samples[0]:.0f} MB at first, {samples[-1]:.0f} MB at last,"
        f" {memory['growth']:+.1%} after the first {options['warm_up']} seconds.",
        "",
        *(["Failures:", "", *(f"- {each}" for each in result["failures"])] if result["failures"] else []),
        *([] if result["failures"] else ["Nothing failed, and nothing was left."]),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=at_least_one, default=300, metavar="N")
    parser.add_argument("--warm-up", type=at_least_one, default=120, metavar="N")
    parser.add_argument("--clients", type=at_least_one, default=200, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    return exit_code("serve_soak", lambda: run(options))


def run(options: argparse.Namespace) -> int:
    """Measures, prints, and writes --json and --markdown -> 1 where something failed."""
    check_results(options, ("--json", "--markdown"))
    result = measure(options)
    lines = markdown(result)
    print(*lines, sep="\n")
    if options.json is not None:
        write_json(options.json, result)
    if options.markdown is not None:
        write_atomically(options.markdown, ("\n".join(lines) + "\n").encode())
    for each in result["failures"]:
        print(f"serve_soak: {each}", file=sys.stderr)
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
