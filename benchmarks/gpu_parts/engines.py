"""Engines as the GPU benchmark runs them: rounds of static shape, timed between the moments at which tokens
come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_parts.compiling import COMPILING
from benchmarks.gpu_parts.run import Bench
from ee_models.decoder import Decoder
from ee_models.exits import Exit
from hispec.config import EngineConfig, SpeculativeConfig
from hispec.engine import Engine
from hispec.outputs import TokenLogprobs
from hispec.runner.cuda_graphs import CudaGraphs, GraphDevice
from hispec.sampling_params import SamplingParams

BLOCK_SIZE = 16
TokenIds = list[int]


def tensors_of(value: object) -> Iterator[Tensor]:
    """All tensors of a result."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)


class Rerun:
    """Graphs of a rehearsal on a CPU: a replay runs the code again."""

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        result = run()

        def replay() -> None:
            for held, again in zip(tensors_of(result), tensors_of(run()), strict=True):
                if held.data_ptr() != again.data_ptr():
                    held.copy_(again)

        return replay, result

    def renew(self) -> None:
        pass

    def num_bytes(self) -> int:
        return 0

    def another(self) -> Rerun:
        return self


class CheckedGraphs:
    """Graphs that are compared when they are captured: every tensor of a replay's result with that of an
    eager run, bit for bit; of what has no result, such as a pass over prompts, the KV that it writes.

    windows   of an engine's rounds: where verify, as a stage of its own, replaces the drafts that it has
              read; both runs begin with the same
    kv        the engine's; None = what has no result is not compared, and not counted
    counter   whose counts these are too, and whose KV; None = its own alone
    """

    def __init__(self, inner: GraphDevice, counter: CheckedGraphs | None = None) -> None:
        self._inner, self._counter = inner, counter or self
        self.windows: Callable[[], Iterable[Tensor]] = tuple
        self.kv: Callable[[], Tensor] | None = None
        self.num_checked = self.num_different = 0

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        replay, result = self._inner.capture(run)
        if any(True for _ in tensors_of(result)):
            self._count(self._same_results(run, replay, result))
        elif (kv := self._counter.kv) is not None:
            self._count(_same_kv(kv(), run, replay))
        return replay, result

    def _count(self, is_same: bool) -> None:
        self._counter.num_checked += 1
        self._counter.num_different += not is_same

    def _same_results(self, run: Callable[[], Any], replay: Callable[[], None], result: Any) -> bool:
        windows = list(self.windows())
        before = [window.clone() for window in windows]
        eager = [tensor.clone() for tensor in tensors_of(run())]
        for window, value in zip(windows, before, strict=True):
            window.copy_(value)
        replay()
        return all(torch.equal(held, again) for held, again in zip(tensors_of(result), eager, strict=True))

    def renew(self) -> None:
        self._inner.renew()

    def num_bytes(self) -> int:
        return self._inner.num_bytes()

    def another(self) -> CheckedGraphs:
        return CheckedGraphs(self._inner.another(), self._counter)


def _same_kv(kv: Tensor, run: Callable[[], Any], replay: Callable[[], None]) -> bool:
    """Whether a replay writes the KV that an eager run does. What that writes is found over other numbers,
    and is not there when the replay begins."""
    before = kv.clone()
    others = kv.add_(1).clone()
    run()
    is_written = kv != others
    kv.copy_(before)
    run()
    eager = kv.clone()
    kv.copy_(before.masked_fill(is_written, 0))
    replay()
    is_same = torch.equal(kv, eager)
    kv.copy_(eager)
    return is_same


def graph_device(device: torch.device) -> GraphDevice:
    return CudaGraphs(device) if device.type == "cuda" else Rerun()


def make_engine(
    decoder: Decoder,
    speculative: SpeculativeConfig | None = None,
    exits: Sequence[Exit] = (),
    *,
    rows: int,
    length: int,
    graphs: bool = True,
    exact: bool = False,
    captured_on: GraphDevice | None = None,
) -> Engine:
    """Up to `rows` requests of `length` positions each; without `graphs` its rounds are the same, run
    eagerly."""
    config = EngineConfig(
        max_num_seqs=rows,
        max_model_len=length,
        block_size=BLOCK_SIZE,
        num_kv_blocks=rows * -(-length // BLOCK_SIZE),
        max_prefill_tokens=8192,
        enable_prefix_caching=False,
        graphs=graphs,
        exact_verify=exact,
        max_graph_bytes=16 << 30,
    )
    device = captured_on or graph_device(decoder.device)
    engine = Engine(decoder, config, speculative, exits=exits, is_static=True, graph_device=device)
    if isinstance(device, CheckedGraphs) and graphs:
        device.windows = engine._rounds._launcher._windows.values
        device.kv = lambda: engine._runtime.kv.data
    return engine


@dataclass(frozen=True)
class Decoded:
    """What requests that ran together gave. seconds: all of it, prompts included. decode_*: from the step
    that brought the last of them its first tokens on; a round is read when it is done and the next already
    runs, so these are rounds alone, and whole ones. What was compiled meanwhile is left out of both.
    """

    outputs: list[TokenIds]
    logprobs: list[list[TokenLogprobs]]
    seconds: float
    decode_seconds: float
    decode_tokens: int
    decode_rounds: int

    @property
    def ms_per_round(self) -> float:
        return 1e3 * self.decode_seconds / max(1, self.decode_rounds)


def speed(runs: Sequence[Decoded], whole: bool = False) -> float:
    """Tokens per second of several groups: of rounds alone, or `whole`, with prompts."""
    if whole:
        return sum(len(output) for run in runs for output in run.outputs) / sum(run.seconds for run in runs)
    return sum(run.decode_tokens for run in runs) / max(1e-9, sum(run.decode_seconds for run in runs))


def decode(
    engine: Engine,
    prompts: Sequence[TokenIds],
    max_tokens: int,
    *,
    logprobs: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    first_seed: int = 0,
    while_full: bool = False,
    steps: int | None = None,
) -> Decoded:
    """All prompts together, `max_tokens` each: what ends a text does not end it here, so that all engines do
    the same work.

    while_full   stop all as soon as the first of them is done: a server would fill its row again, and here
                 the rest would be other, smaller batches, with graphs of their own
    steps        stop all after so many steps
    """
    outputs: dict[str, TokenIds] = {}
    kept: dict[str, list[TokenLogprobs]] = {}
    started = _not_compiling_s()
    for number, prompt in enumerate(prompts, start=first_seed):
        params = SamplingParams(
            temperature=temperature,
            top_p=top_p,
            seed=number,
            max_tokens=max_tokens,
            ignore_eos=True,
            logprobs=logprobs,
        )
        request_id = engine.add_request(prompt, params)
        outputs[request_id], kept[request_id] = [], []
    waiting, began, tokens, rounds, done = set(outputs), started, 0, 0, 0
    now = started
    while engine.has_unfinished():
        deltas = engine.step()
        now = _not_compiling_s()
        for delta in deltas:
            if delta.error is not None:
                raise RuntimeError(delta.error)
            outputs[delta.request_id] += delta.token_ids
            kept[delta.request_id] += delta.logprobs or []
        if waiting:
            waiting -= {request_id for request_id, output in outputs.items() if output}
            began = now
        elif deltas:
            tokens += sum(len(delta.token_ids) for delta in deltas)
            rounds += 1
        done += 1
        is_first_done = not waiting and any(delta.finish_reason is not None for delta in deltas)
        if (while_full and is_first_done) or done == steps:
            engine.abort(outputs, notify=False)
    return Decoded(list(outputs.values()), list(kept.values()), now - started, now - began, tokens, rounds)


def _not_compiling_s() -> float:
    """Seconds of a clock that stands still while Triton compiles."""
    return time.perf_counter() - COMPILING.seconds


def grouped(prompts: Sequence[TokenIds], rows: int) -> list[list[TokenIds]]:
    """In groups of `rows` that run together; the last one is filled up from the front."""
    num_groups = -(-len(prompts) // rows)
    filled = [prompts[number % len(prompts)] for number in range(num_groups * rows)]
    return [filled[start : start + rows] for start in range(0, len(filled), rows)]


def steady(
    bench: Bench, engine: Engine, prompts: Sequence[TokenIds], rounds: int, max_tokens: int
) -> dict[str, Any]:
    """A round in the middle of answers: its time as rounds follow each other, the time of its graph alone,
    and the gap, which is the rest.

    The gap is not read off events around each replay: those would be work in the stream that the engine does
    not have. The graph is replayed back to back instead, which the host is far ahead of; doing a round again
    changes nothing. What is left of the engine's round is what the device waits for the host, and the few
    operations between two graphs.
    """
    # So few that no request can end meanwhile, whatever is accepted; 15 more go by around them.
    in_a_row = max(1, min(rounds, max_tokens // engine.plan.window - 15) // 3)
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
    ids = list(engine._loop.requests)
    try:
        for _ in range(6):  # by then all are ready, and their graph is captured
            engine.step()
        graphs = engine._rounds.graphs
        assert graphs is not None and len(graphs), "no graph was captured"
        replay = graphs.replays[-1]
        alone, walls = [], []
        for _ in range(3):
            with torch.inference_mode():
                alone.append(bench.clock.ms(replay, max(2, in_a_row)))
            for _ in range(3):  # the round in the air was done long ago
                engine.step()
            started, done = time.perf_counter(), 0
            for _ in range(in_a_row):
                done += bool(engine.step())
            walls.append((time.perf_counter() - started) * 1e3 / max(1, done))
        if len(engine._loop.requests) < len(ids):
            raise RuntimeError(f"requests ended within {max_tokens} tokens: nothing was steady")
    finally:
        engine.abort(ids, notify=False)
    wall, graph = sum(walls) / len(walls), sum(alone) / len(alone)
    return {
        "round_ms": wall,
        "graph_ms": graph,
        "host_gap": 1.0 - graph / wall,
        "rounds": 3 * in_a_row,
        "round_ms_runs": walls,
        "graph_ms_runs": alone,
    }
