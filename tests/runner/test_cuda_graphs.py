"""GraphCache and the sizes of static rounds: what is captured when, what makes room, what is counted."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from hispec.decoding.stages import PassCounts
from hispec.runner import cuda_graphs
from hispec.runner.buckets import context_bucket, context_buckets, row_bucket, row_buckets
from hispec.runner.cuda_graphs import CudaGraphs, GraphCache
from hispec.runner.launchers import _Upload
from hispec.utils.memory import is_due_to_memory
from tests.helpers.recorded_graphs import NotCapturable, RecordedGraphs


def make(max_graphs: int = 10, max_bytes: int = 1000) -> tuple[GraphCache, RecordedGraphs, PassCounts]:
    device, counts = RecordedGraphs(), PassCounts()
    return GraphCache(device, [counts], max_graphs, max_bytes), device, counts


class Work:
    """Adds `by` to a tensor of its own, and its input to the result; `num_runs` counts Python."""

    def __init__(self, counts: PassCounts) -> None:
        self.state, self.counts, self.num_runs = torch.zeros(3), counts, 0

    def __call__(self, x: Tensor) -> Tensor:
        self.num_runs += 1
        self.counts.layer_passes += 5
        self.state.copy_(x * 2)
        return self.state + 1


def test_the_first_run_is_eager_and_later_ones_are_replays() -> None:
    cache, device, counts = make()
    work = Work(counts)
    for step in range(1, 5):
        assert torch.equal(
            cache.run("key", work, torch.full((3,), float(step))), torch.full((3,), 2.0 * step + 1)
        )
        assert torch.equal(work.state, torch.full((3,), 2.0 * step))
        assert counts.layer_passes == 5 * step, "a replay counts, a capture does not"
    assert (work.num_runs, device.num_captured, cache.num_captures, cache.num_replays) == (2, 1, 1, 3)


def test_a_replay_knows_no_python() -> None:
    cache, _, _ = make()
    factor = [1.0]

    def run(x: Tensor) -> Tensor:
        return x * factor[0]

    assert cache.run("key", run, torch.ones(1)).item() == 1.0
    factor[0] = 3.0
    assert cache.run("key", run, torch.ones(1)).item() == 1.0
    assert cache.run("another", run, torch.ones(1)).item() == 3.0


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.item(),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x + torch.tensor([1.0]),
    ],
)
def test_the_recorder_is_as_strict_as_a_gpu(read: Any) -> None:
    cache, _, _ = make()
    with pytest.raises(NotCapturable, match="in a capture"):
        cache.run("key", read, torch.ones(1))


def test_the_least_recently_used_makes_room() -> None:
    cache, device, counts = make(max_graphs=2)
    work = Work(counts)
    x = torch.ones(3)
    for key in ("a", "b", "a", "c"):  # c takes the place of b
        cache.run(key, work, x)
    assert (len(cache), device.num_captured, cache.num_evictions) == (2, 3, 1)
    cache.run("a", work, x)
    assert device.num_captured == 3
    cache.run("b", work, x)
    assert device.num_captured == 4


def test_stages_of_a_round_count_as_one_and_make_room_together() -> None:
    cache, device, counts = make(max_graphs=2)
    work, x = Work(counts), torch.ones(3)
    for key in "ab":
        for stage in ("draft", "check", "verify"):
            cache.run(key, work, x, stage=stage)
    assert (len(cache), device.num_captured, cache.num_evictions) == (6, 6, 0)
    cache.run("a", work, x, stage="check")
    cache.run("c", work, x)  # in the place of all of b
    assert (len(cache), device.num_captured, cache.num_evictions) == (4, 7, 3)
    cache.run("a", work, x, stage="verify")
    cache.run("a", work, x)  # another stage of what is there
    assert (len(cache), device.num_captured, cache.num_evictions) == (5, 8, 3)
    cache.clear()
    assert (len(cache), cache.num_evictions) == (0, 8)


def test_stages_that_are_too_large_together_stay() -> None:
    cache, device, counts = make(max_bytes=15)
    device.bytes_of_a_graph = 10
    work = Work(counts)
    for _ in range(2):
        for stage in ("draft", "verify"):
            cache.run("a", work, torch.ones(3), stage=stage)
    assert device.num_captured == 2 and cache.num_replays == 2


def test_a_pool_that_has_grown_too_large_is_given_back_as_a_whole(caplog: pytest.LogCaptureFixture) -> None:
    cache, device, counts = make(max_bytes=25)
    device.bytes_of_a_graph = 10
    work = Work(counts)
    with caplog.at_level(logging.WARNING):
        for key in "abc":
            assert torch.equal(cache.run(key, work, torch.ones(3)), torch.full((3,), 3.0))
    assert len(cache) == 0 and "engine.max_graph_bytes=25; raise it" in caplog.text
    assert torch.equal(cache.run("a", work, torch.ones(3)), torch.full((3,), 3.0))


def test_a_pool_whose_last_graph_is_gone_is_not_captured_into_again() -> None:
    cache, device, counts = make(max_graphs=1)
    work = Work(counts)
    for key in "aab":
        cache.run(key, work, torch.ones(3))
    assert device.num_renewed == 2
    cache.clear()
    cache.run("a", work, torch.ones(3))
    assert device.num_renewed == 3
    cache, device, counts = make(max_graphs=2)
    for key in "abcd":
        cache.run(key, Work(counts), torch.ones(3))
    assert device.num_renewed == 1


def test_one_graph_that_is_too_large_stays() -> None:
    cache, device, counts = make(max_bytes=5)
    device.bytes_of_a_graph = 10
    work = Work(counts)
    for _ in range(4):
        cache.run("a", work, torch.ones(3))
    assert device.num_captured == 1 and cache.num_replays == 3


def no_memory() -> BaseException:
    return torch.OutOfMemoryError("no memory for a graph")


def no_memory_before() -> BaseException:
    """As torch raises it: ending the capture that was interrupted fails as well."""
    error = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    error.__context__ = no_memory()
    return error


def no_memory_behind() -> BaseException:
    error = ValueError("a drafter's own words")
    error.__cause__ = no_memory_before()
    return error


@pytest.mark.parametrize("failure", [no_memory, no_memory_before, no_memory_behind])
def test_without_memory_for_a_capture_work_goes_on_eagerly(
    caplog: pytest.LogCaptureFixture, failure: Callable[[], BaseException]
) -> None:
    cache, device, counts = make()
    device.failure = failure
    work = Work(counts)
    with caplog.at_level(logging.WARNING):
        for step in range(1, 4):
            assert torch.equal(
                cache.run("a", work, torch.full((3,), float(step))), torch.full((3,), 2.0 * step + 1)
            )
    assert work.num_runs == 4 and counts.layer_passes == 15, "captured once, and in vain"
    assert caplog.text.count("no memory to capture") == 1, "said once"
    device.failure = None
    cache.clear()
    cache.run("a", work, torch.ones(3))
    assert cache.num_captures == 1, "graphs were dropped: there may be memory now"


@pytest.mark.parametrize("error", [RuntimeError, AssertionError, NotImplementedError])
def test_a_capture_that_fails_is_said_once_and_not_tried_again(
    caplog: pytest.LogCaptureFixture, error: type[Exception]
) -> None:
    cache, device, counts = make()
    device.failure = lambda: error("operation not permitted when stream is capturing")
    work = Work(counts)
    with caplog.at_level(logging.WARNING):
        for step in range(1, 4):
            assert torch.equal(
                cache.run(("the", "key"), work, torch.full((3,), float(step))),
                torch.full((3,), 2.0 * step + 1),
            )
            cache.clear()
    assert (work.num_runs, counts.layer_passes, cache.num_failures, len(cache)) == (4, 15, 1, 0)
    (record,) = caplog.records
    assert "('the', 'key')" in record.getMessage() and "operation not permitted" in caplog.text
    device.failure = None
    cache.run("another", work, torch.ones(3))
    assert cache.num_captures == 1, "other keys are captured"
    cache.run(("the", "key"), work, torch.ones(3))
    assert cache.num_captures == 1
    cache.forget()
    cache.run(("the", "key"), work, torch.ones(3))
    assert cache.num_captures == 2, "its plan is another now"


def test_an_interrupt_in_a_capture_is_no_failure_of_it() -> None:
    cache, device, counts = make()
    device.failure = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        cache.run("a", Work(counts), torch.ones(3))
    assert (cache.num_failures, len(cache), counts.layer_passes) == (0, 0, 5)


class FakeStream:
    def __init__(self, device: torch.device) -> None:
        self.device = device


class FakeCuda:
    """What CudaGraphs uses of torch.cuda; `ends` = whether a capture can be ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ends: bool = True) -> None:
        self.streams: list[torch.device] = []
        self.current: Any = self.make_stream(torch.device("cuda", 0))
        self.used: list[Any] = []
        self.given_up: list[tuple[int, Any]] = []  # pools that captures were no longer to allocate from
        monkeypatch.setattr(cuda_graphs, "_streams", {})
        monkeypatch.setattr(
            torch._C,
            "_cuda_endAllocateToPool",
            lambda index, pool: self.given_up.append((index, pool)),
            raising=False,
        )
        for name, value in {
            "Stream": self.make_stream,
            "current_device": lambda: 0,
            "current_stream": lambda device: self.current,
            "set_stream": lambda stream: setattr(self, "current", stream),
            "graph_pool_handle": object,
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

        @contextlib.contextmanager
        def graph(graph: Any, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
            assert capture_error_mode == "thread_local"
            before, self.current = self.current, stream
            self.used.append(stream)
            try:
                yield
            finally:
                if not ends:
                    raise RuntimeError("CUDA error: the capture was invalidated")
                self.current = before

        monkeypatch.setattr(torch.cuda, "graph", graph)

    def make_stream(self, device: torch.device) -> Any:
        self.streams.append(device)
        return FakeStream(device)


def test_all_engines_of_a_device_capture_in_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    for device in ("cuda", "cuda:0", "cuda:1", "cuda:1"):
        CudaGraphs(torch.device(device)).capture(lambda: None)
    assert cuda.used[0] is cuda.used[1] is not cuda.used[2] is cuda.used[3]
    assert [stream.device.index for stream in cuda.used] == [0, 0, 1, 1]


def test_graphs_of_another_kind_have_memory_of_their_own_and_the_same_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda(monkeypatch)
    first = CudaGraphs(torch.device("cuda", 1))
    for graphs in (first, second := first.another()):
        graphs.capture(lambda: None)
    assert cuda.used[0] is cuda.used[1] and first._pool is not second._pool


@pytest.mark.parametrize("ends", [True, False])
def test_after_a_failed_capture_work_goes_on_in_the_stream_before(
    monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    cuda = FakeCuda(monkeypatch, ends)
    before = cuda.current

    def run() -> None:
        assert cuda.current is not before
        raise torch.OutOfMemoryError("no memory")

    graphs = CudaGraphs(torch.device("cuda", 0))
    with pytest.raises(RuntimeError) as failed:
        graphs.capture(run)
    assert cuda.current is before and is_due_to_memory(failed.value)
    assert cuda.given_up == ([] if ends else [(0, graphs._pool)])
    assert not cuda_graphs._capturing.locked()


def test_an_error_in_the_work_leaves_nothing_behind() -> None:
    cache, device, _ = make()

    def broken(x: Tensor) -> Tensor:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        cache.run("a", broken, torch.ones(1))
    assert len(cache) == device.num_captured == 0


@pytest.mark.parametrize("most", [1, 3, 8, 20, 33, 128, 200])
def test_every_number_of_rows_has_a_bucket_that_is_not_much_larger(most: int) -> None:
    for rows in range(1, most + 1):
        found = row_bucket(rows, most)
        assert rows <= found <= min(most, max(2 * rows - 1, rows + 31))
        assert found in row_buckets(most)
    assert row_buckets(most) == sorted(set(row_buckets(most)), reverse=True) and row_buckets(most)[0] == most
    assert len(row_buckets(128)) <= 16


@pytest.mark.parametrize("most", [100, 512, 2048, 5000, 131072])
def test_every_context_has_a_bucket(most: int) -> None:
    lengths = context_buckets(most)
    assert lengths[-1] == most and len(lengths) <= 6
    for context in (1, 99, 100, 511, 512, 513, 2048, 2049, 5000, 100_000):
        if context <= most:
            assert context_bucket(context, most) == min(length for length in lengths if length >= context)


def test_what_cannot_be_captured_leaves_no_graph_in_its_pool() -> None:
    """By then the pool may be fit for no further capture: those after have another."""
    cache, device, _ = make()
    cache.run("a", lambda x: x + 1, torch.ones(1))
    assert len(cache) == 1
    renewed: list[None] = []
    device.renew = lambda: renewed.append(None)  # type: ignore[method-assign]

    capture = device.capture

    def fails(run: Callable[[], Any]) -> Any:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    device.capture = fails  # type: ignore[method-assign]
    cache.run("b", lambda x: x, torch.ones(1))
    assert len(cache) == 0 and cache.num_failures == 1 and cache.num_bytes == 0 and not renewed
    device.capture = capture  # type: ignore[method-assign]
    cache.run("a", lambda x: x + 1, torch.ones(1))
    assert len(cache) == 1 and len(renewed) == 1


class FakeEvent:
    log: ClassVar[list[str]] = []

    def synchronize(self) -> None:
        self.log.append("waited")

    def record(self) -> None:
        self.log.append("copied")


def test_pinned_memory_is_written_once_the_copies_from_it_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda source, pin_memory: empty_like(source))
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    FakeEvent.log.clear()
    upload, targets = _Upload(torch.device("cuda", 0)), [torch.zeros(2), torch.zeros(2)]
    for value in (1.0, 2.0):
        for target in targets:
            upload(target, torch.full((2,), value))
            assert target.tolist() == [value] * 2
    assert FakeEvent.log == ["waited", "copied"] * 4 and len({*upload._copied.values()}) == 2
