"""Attention over pages: numba's backend against sdpa and against a softmax over explicit positions; and bit
for bit against itself, whatever else is in the pass, however the pages lie, on one thread and on all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cache.paged_kv import PagedKV
from cache.view import BatchView
from ee_models.attention import AttentionBackend, numba_pages, select_backend
from ee_models.attention.numba_pages import NumbaAttention
from ee_models.attention.sdpa import SdpaAttention
from ee_models.checkpoint.loader import open_checkpoint
from ee_models.decoder import Decoder
from ee_models.kernels import threads as threads_module
from ee_models.kernels.threads import KernelThreads

CPU = torch.device("cpu")
LAYER = 1
# (heads, kv_heads, head_dim): groups of 1 to 4, head sizes that are and are not multiples of a vector.
INVARIANT_HEADS = [(9, 3, 64), (4, 2, 16), (2, 2, 40), (3, 1, 34), (4, 1, 128)]
TILE_EDGES = [1, 2, 3, 4, 5, 62, 63, 64, 65, 66, 127, 128, 129, 200]


@dataclass(frozen=True)
class Row:
    """One sequence: keys and values [context, kv_heads, head_dim], queries [context, heads, head_dim]; of
    these a pass attends with the last `q_len` before `context_len`."""

    keys: Tensor
    values: Tensor
    queries: Tensor
    context_len: int
    q_len: int

    @classmethod
    def random(cls, context_len: int, q_len: int, heads: tuple[int, int, int], seed: int = 0) -> Row:
        num_heads, num_kv_heads, head_dim = heads
        generator = torch.Generator().manual_seed(seed * 1009 + context_len)
        keys, values = (
            torch.randn(context_len, num_kv_heads, head_dim, generator=generator) for _ in range(2)
        )
        return cls(
            keys,
            values,
            torch.randn(context_len, num_heads, head_dim, generator=generator),
            context_len,
            q_len,
        )

    def last(self, q_len: int, context_len: int | None = None) -> Row:
        """The same sequence, attended to with other queries of it."""
        return Row(
            self.keys,
            self.values,
            self.queries,
            self.context_len if context_len is None else context_len,
            q_len,
        )


@dataclass(frozen=True)
class Pass:
    queries: Tensor
    kv: PagedKV
    view: BatchView

    @classmethod
    def of(cls, rows: Sequence[Row], block_size: int = 16, seed: int = 0) -> Pass:
        """Lays the rows on scattered blocks. All other slots hold large numbers, which nothing must read with
        any weight."""
        generator = torch.Generator().manual_seed(seed)
        num_kv_heads, head_dim = rows[0].keys.shape[1:]
        max_blocks = max(-(-row.context_len // block_size) for row in rows)
        num_blocks = len(rows) * max_blocks + 3
        tables = torch.randperm(num_blocks, generator=generator)[: len(rows) * max_blocks].view(
            len(rows), max_blocks
        )
        kv = PagedKV(LAYER + 1, num_blocks, block_size, num_kv_heads, head_dim, torch.float32, CPU)
        kv.data.fill_(1e4)
        positions, slots = [], []
        for row, table in zip(rows, tables, strict=True):
            at = torch.arange(row.context_len)
            row_slots = table[at // block_size] * block_size + at % block_size
            kv.keys(LAYER)[row_slots], kv.values(LAYER)[row_slots] = (
                row.keys[: row.context_len],
                row.values[: row.context_len],
            )
            positions.append(at[row.context_len - row.q_len :])
            slots.append(row_slots[row.context_len - row.q_len :])
        q_lens = torch.tensor([row.q_len for row in rows])
        view = BatchView(
            positions=torch.cat(positions),
            slots=torch.cat(slots),
            block_tables=tables.contiguous(),
            cu_q_lens=torch.cat((torch.zeros(1, dtype=torch.int64), q_lens.cumsum(0))),
            max_q_len=int(q_lens.max()),
            max_context_len=max(row.context_len for row in rows),
        )
        return cls(
            torch.cat([row.queries[row.context_len - row.q_len : row.context_len] for row in rows]), kv, view
        )

    def over(self, dtype: torch.dtype) -> Pass:
        """The pass over its KV rounded to `dtype`, and kept in that."""
        kv = self.kv
        found = PagedKV(kv.num_layers, kv.num_blocks, kv.block_size, kv.num_kv_heads, kv.head_dim, dtype, CPU)
        found.write(LAYER, torch.arange(kv.data.shape[2]), kv.keys(LAYER), kv.values(LAYER))
        return Pass(self.queries, found, self.view)

    def rounded(self, dtype: torch.dtype) -> Pass:
        """The pass over its KV rounded to `dtype`, and kept in float32."""
        small, found = self.over(dtype).kv, self.over(torch.float32)
        slots = torch.arange(self.kv.data.shape[2])
        found.kv.write(LAYER, slots, *small.read(LAYER, slots))
        return found

    def attend(self, backend: AttentionBackend) -> Tensor:
        return backend.attend(self.queries, self.kv, LAYER, backend.prepare(self.view, self.kv))


@pytest.mark.parametrize("of", ["queries", "keys", "values"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_number_that_is_none_reaches_those_who_see_it(of: str, dtype: torch.dtype) -> None:
    """Requests whose logits are no numbers fail by name, which needs them to arrive; and in no other row."""
    row = Row.random(80, 20, (4, 2, 16))
    getattr(row, of)[70, 0] = float("nan")
    batch = Pass.of([row, Row.random(80, 20, (4, 2, 16), seed=1)]).over(dtype)
    found = batch.attend(NumbaAttention()).view(40, 4, 16)
    seeing = found[10:11, :1] if of == "queries" else found[10:20, :2]
    assert not seeing.isfinite().any()
    assert found[20:].isfinite().all() and found[:20, 2:].isfinite().all()


def naive(rows: Sequence[Row]) -> Tensor:
    """[tokens, heads * head_dim] in float64, token by token and head by head, from the sequences
    themselves."""
    out = []
    for row in rows:
        group = row.queries.shape[1] // row.keys.shape[1]
        for position in range(row.context_len - row.q_len, row.context_len):
            for head in range(row.queries.shape[1]):
                keys, values = (
                    row.keys[: position + 1, head // group].double(),
                    row.values[: position + 1, head // group].double(),
                )
                scores = keys @ row.queries[position, head].double() / keys.shape[1] ** 0.5
                out.append(scores.softmax(0) @ values)
    return torch.cat(out).view(-1, rows[0].queries.shape[1] * rows[0].queries.shape[2]).float()


def check_backends(rows: Sequence[Row], block_size: int = 16) -> None:
    batch = Pass.of(rows, block_size)
    by_numba, by_sdpa, expected = batch.attend(NumbaAttention()), batch.attend(SdpaAttention()), naive(rows)
    torch.testing.assert_close(by_numba, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(by_sdpa, expected, atol=1e-5, rtol=0)


def check_bits_are_its_own(attend: Callable[..., Tensor], heads: tuple[int, int, int]) -> None:
    """Of a token's output, whatever else is in the pass. attend(rows, block size, seed) -> that of rows."""
    row = Row.random(200, 40, heads)
    whole = attend([row])
    for q_len in (1, 2, 3, 8, 17):
        assert torch.equal(attend([row.last(q_len)]), whole[-q_len:])
        among = attend([Row.random(66, 5, heads, seed=1), row.last(q_len), Row.random(130, 1, heads)])
        assert torch.equal(among[5:-1], whole[-q_len:])
    for context_len in (161, 170, 191, 192, 193):  # a chunk of a prompt, or a token alone
        assert torch.equal(attend([row.last(1, context_len)])[0], whole[context_len - 161])


def check_bits_of_units(
    attend: Callable[..., Tensor],
    heads: tuple[int, int, int],
    block_sizes: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks, units and threads of any size give the same."""
    rows = [Row.random(150, 33, heads), Row.random(64, 64, heads), Row.random(3, 1, heads)]
    expected = attend(rows)
    for num_threads, tokens, block_size in zip((3, 1, 3), (16, 5, 1), block_sizes, strict=True):
        use_threads(num_threads, monkeypatch)
        monkeypatch.setattr(numba_pages, "_TOKENS_PER_UNIT", tokens)
        assert torch.equal(attend(rows, block_size, seed=block_size), expected)


def use_threads(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes backends that are built from now on share even the smallest call among so many threads, whatever
    the machine has."""
    monkeypatch.setattr(numba_pages, "_PARALLEL_FROM", -1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the test on one thread, and shared among three."""
    use_threads(request.param, monkeypatch)


@pytest.mark.parametrize(
    "heads",
    [
        (1, 1, 8),
        (4, 2, 16),
        (6, 2, 40),
        (9, 3, 64),
        (8, 2, 128),
        (6, 6, 10),
        (3, 1, 34),
        (2, 1, 126),
        (4, 4, 2),
    ],
)
@pytest.mark.parametrize("q_len", [1, 3])
def test_backends_agree_for_all_groups_and_head_sizes(
    heads: tuple[int, int, int], q_len: int, threads: None
) -> None:
    check_backends([Row.random(context_len, q_len, heads) for context_len in (q_len, 70)])


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
@pytest.mark.parametrize("q_len", [1, 5])
def test_backends_agree_around_the_edges_of_tiles(q_len: int, block_size: int, threads: None) -> None:
    check_backends(
        [Row.random(context_len, min(q_len, context_len), (4, 2, 16)) for context_len in TILE_EDGES],
        block_size,
    )


@pytest.mark.parametrize("context_len", [64, 65, 200])
@pytest.mark.parametrize("q_len", [15, 16, 17, 64])
def test_backends_agree_for_long_queries_and_whole_prompts(
    q_len: int, context_len: int, threads: None
) -> None:
    check_backends([Row.random(context_len, q_len, (4, 2, 16)), Row.random(q_len, q_len, (4, 2, 16))])


@pytest.mark.parametrize("heads", INVARIANT_HEADS)
def test_kv_in_bfloat16_gives_the_bits_of_its_numbers_in_float32(
    heads: tuple[int, int, int], threads: None
) -> None:
    rows = [Row.random(context_len, q_len, heads) for context_len, q_len in ((130, 1), (65, 20), (9, 9))]
    batch = Pass.of(rows)
    small, whole = batch.over(torch.bfloat16), batch.rounded(torch.bfloat16)
    for backend in (NumbaAttention(), SdpaAttention()):
        found = small.attend(backend)
        assert torch.equal(found, whole.attend(backend))
        assert not torch.equal(found, Pass.of(rows).attend(backend))


def test_kv_that_numba_cannot_read_is_refused() -> None:
    batch = Pass.of([Row.random(9, 9, (4, 2, 16))])
    kv = PagedKV(LAYER + 1, batch.kv.num_blocks, 16, 2, 16, torch.float16, CPU)
    with pytest.raises(
        ValueError, match=r"in float32, bfloat16 or int8, not torch\.float16; use another kv_cache"
    ):
        Pass(batch.queries, kv, batch.view).attend(NumbaAttention())


@pytest.mark.parametrize("q_lens", [[1, 4, 2], [0, 3, 0], [5, 0, 0, 1], [0, 0, 2], [17, 0, 1, 33]])
def test_backends_agree_on_ragged_rows(q_lens: list[int], threads: None) -> None:
    check_backends(
        [Row.random(70 + 7 * i, q_len, (6, 2, 16)) for i, q_len in enumerate(q_lens)], block_size=4
    )


def test_backends_agree_when_scores_are_far_apart(threads: None) -> None:
    """Most weights underflow, and the largest score comes first, in between, or last."""
    for peak in (0, 65, 199):
        row = Row.random(200, 3, (4, 2, 16))
        row.keys.mul_(3.0)
        row.keys[peak] = row.queries[199, 0] * 20
        check_backends([row, row.last(1)])


@pytest.mark.parametrize("name", ["numba", "sdpa"])
def test_a_token_sees_nothing_after_its_own_position(name: str) -> None:
    backend, row = select_backend(name, CPU, torch.float32), Row.random(80, 20, (4, 2, 16))
    before = Pass.of([row]).attend(backend)
    row.keys[70:], row.values[70:] = 50.0, -50.0
    after = Pass.of([row]).attend(backend)
    assert torch.equal(before[:10], after[:10])
    assert not torch.isclose(before[10:], after[10:]).all(-1).any()


@pytest.mark.parametrize("heads", INVARIANT_HEADS)
def test_a_tokens_bits_do_not_depend_on_the_rest_of_the_pass(
    heads: tuple[int, int, int], threads: None
) -> None:
    backend, row = NumbaAttention(), Row.random(200, 40, heads)
    together = Pass.of([row]).attend(backend)
    others = [Row.random(length, min(length, 7), heads, seed=1) for length in (1, 64, 129, 300)]
    for q_len in (1, 2, 15, 16, 17, 33):
        assert torch.equal(Pass.of([row.last(q_len)]).attend(backend), together[-q_len:]), f"q_len {q_len}"
        among = Pass.of([*others[:2], row.last(q_len), *others[2:]], seed=1).attend(backend)
        first = sum(other.q_len for other in others[:2])
        assert torch.equal(among[first : first + q_len], together[-q_len:]), f"q_len {q_len} in a batch"
    for position in (160, 177, 191, 192, 193, 199):  # alone, and with nothing after it
        assert torch.equal(
            Pass.of([row.last(1, context_len=position + 1)]).attend(backend)[0], together[position - 160]
        ), f"position {position}"


@pytest.mark.parametrize("heads", INVARIANT_HEADS)
def test_bits_do_not_depend_on_blocks_or_threads(
    heads: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        Row.random(context_len, min(q_len, context_len), heads)
        for context_len in (1, 63, 64, 65, 129, 200)
        for q_len in (1, 18)
    ]
    seen = []
    for num_threads in (1, 2, 5):
        use_threads(num_threads, monkeypatch)
        for block_size in (1, 3, 4, 16, 64, 256):
            seen.append(Pass.of(rows, block_size, seed=block_size).attend(NumbaAttention()))
    assert all(torch.equal(seen[0], other) for other in seen[1:])


@pytest.mark.parametrize(
    ("num_threads", "parallel_from", "used"), [(1, -1, 1), (4, -1, 4), (4, 4 * 4 * 70 * 16, 1)]
)
def test_large_calls_are_shared_among_torchs_threads_and_small_ones_are_not(
    num_threads: int, parallel_from: int, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_threads(num_threads, monkeypatch)
    monkeypatch.setattr(numba_pages, "_PARALLEL_FROM", parallel_from)
    seen: list[int] = []
    monkeypatch.setattr(KernelThreads, "run", lambda self, kernel, data, count: seen.append(count))
    Pass.of([Row.random(70, 4, (4, 2, 16))]).attend(NumbaAttention())
    assert seen == [used]


def test_a_pool_computes_the_same_bits_where_torch_has_another_openmp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_threads(3, monkeypatch)
    batch = Pass.of([Row.random(context_len, 20, (9, 3, 64)) for context_len in (20, 65, 200)])
    expected = batch.attend(NumbaAttention())
    monkeypatch.setattr(threads_module, "_find_gomp", lambda: (None, 0))
    assert torch.equal(batch.attend(NumbaAttention()), expected)


def test_a_pass_without_tokens_gives_nothing(threads: None) -> None:
    assert Pass.of([Row.random(5, 0, (4, 2, 16))]).attend(NumbaAttention()).shape == (0, 64)


def test_auto_takes_numba_on_a_cpu_in_float32_triton_on_a_gpu_and_sdpa_elsewhere() -> None:
    assert isinstance(select_backend("auto", CPU, torch.float32), NumbaAttention)
    assert isinstance(select_backend("auto", CPU, torch.bfloat16), SdpaAttention)
    assert select_backend("auto", torch.device("cuda"), torch.float32).name == "triton"
    assert select_backend("auto", torch.device("cuda"), torch.bfloat16, exact=True).row_invariant
    assert isinstance(select_backend("sdpa", CPU, torch.float32), SdpaAttention)
    assert isinstance(select_backend("numba", CPU, torch.float32), NumbaAttention)


@pytest.mark.parametrize(("device", "dtype"), [("cuda", torch.float32), ("cpu", torch.bfloat16)])
def test_numba_is_refused_where_it_cannot_run(device: str, dtype: torch.dtype) -> None:
    with pytest.raises(
        ValueError,
        match=f"'numba' runs on a CPU in float32, not on {device} in {dtype}; use 'sdpa' or 'auto'",
    ):
        select_backend("numba", torch.device(device), dtype)


@pytest.mark.parametrize(
    ("device", "dtype", "name", "words"),
    [
        ("cuda", torch.float32, "auto", "'triton', which needs the package triton, which is not installed;"),
        ("cuda", torch.float32, "sdpa", "'triton', which needs the package triton, which is not installed;"),
        (
            "cpu",
            torch.bfloat16,
            "auto",
            "'numba', which runs on a CPU in float32, not on cpu in torch.b",
        ),
    ],
)
def test_exact_verify_says_what_is_missing(
    device: str, dtype: torch.dtype, name: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ee_models.attention.runs_triton", lambda device: False)
    with pytest.raises(ValueError, match="^exact_verify needs the attention backend " + words):
        select_backend(name, torch.device(device), dtype, exact=True)


def test_attention_that_cannot_run_is_refused_before_weights_are_read(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(tiny_path)
    monkeypatch.setattr(type(checkpoint), "tensor", None)
    with pytest.raises(ValueError, match="attention backend 'triton' needs a CUDA GPU"):
        Decoder.load(checkpoint, torch.float32, CPU, attention="triton")


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown attention backend 'flash'; known: auto, sdpa, numba"):
        select_backend("flash", CPU, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("context_len", [512, 2048])
@pytest.mark.parametrize("num_rows", [1, 16])
def test_numba_is_faster_than_sdpa_on_long_contexts(num_rows: int, context_len: int) -> None:
    """One token per row, as in decoding. Medians of interleaved runs."""
    batch = Pass.of([Row.random(context_len, 1, (9, 3, 64), seed=i) for i in range(num_rows)])
    backends = NumbaAttention(), SdpaAttention()
    prepared = [backend.prepare(batch.view, batch.kv) for backend in backends]
    times_s: tuple[list[float], list[float]] = ([], [])
    for _ in range(25):
        for backend, ready, taken in zip(backends, prepared, times_s, strict=True):
            start = time.perf_counter()
            backend.attend(batch.queries, batch.kv, LAYER, ready)
            taken.append(time.perf_counter() - start)
    by_numba, by_sdpa = (statistics.median(taken[5:]) for taken in times_s)
    print(
        f"{num_rows=} {context_len=} numba {by_numba * 1e3:.3f} ms, sdpa {by_sdpa * 1e3:.3f} ms, ratio"
        f" {by_sdpa / by_numba:.2f}"
    )
    assert by_sdpa / by_numba > 1.2
