"""A pass over tokens on a CPU in one call: torch's threads walk through all of its steps together, and
nothing of Python stands between these.

The steps are those of `Decoder` and of exits, by the same functions: products over panels, in float32 or
narrow numbers, numba's kernels and its attention. So are their bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cache.paged_kv import PagedKV
from cache.view import BatchView

from .attention import AttentionBackend
from .attention.numba_pages import Call as AttentionCall
from .attention.numba_pages import NumbaAttention, attend
from .fused_kernel import run_linked, run_pass
from .kernels import numba_gemm, numba_narrow
from .kernels.cpu import size_of_numbers
from .kernels.numba_narrow import bytes_per_token, look_ahead, tiles_from
from .kernels.threads import KernelThreads, address_of_cfunc, find_clock
from .linear import Linear
from .narrow_linear import NarrowLinear
from .panel_linear import PanelLinear
from .pass_steps import Kind, Link, LinkedCounts, LinkedPass, Output, PassStep, Rows, TokenPlaces
from .pass_structures import Call, Linked, Places, Step

if TYPE_CHECKING:
    from .decoder import LayerWeights

# Multiplications of a pass's products from which other threads are worth their waiting for each other.
_PARALLEL_FROM = 1 << 18
# Of a pass's memory, what is kept for the next one. Beyond, each pass that reaches further has new pages from
# the system, which it clears.
_KEPT_BYTES = 1 << 28


@dataclass(frozen=True)
class PassProgram:
    """Steps that are run together: as an array of Step; what each Call over them begins as, and that of its
    attention; what a pass needs memory for, in numbers a token; multiplications of its products, a token; its
    logits."""

    steps: Sequence[PassStep]
    table: Any
    call: Call
    attention: AttentionCall
    sizes: dict[str, int]
    num_products: int
    num_logits: int


class _Scratch(NamedTuple):
    """Memory of a pass, and where its threads wait for each other."""

    memory: Tensor
    barrier: np.ndarray[Any, np.dtype[np.int64]]
    barrier_address: int


class FusedPasses:
    """Runs passes of which all linears are PanelLinears or NarrowLinears, with numba's attention."""

    def __init__(
        self,
        attention: AttentionBackend,
        threads: KernelThreads,
        cos_sin: Tensor,
        eps: float,
        num_heads: int,
        num_kv_heads: int,
    ) -> None:
        assert isinstance(attention, NumbaAttention)
        self.attention, self._threads = attention, threads
        self._cos_sin, self._eps = cos_sin, eps
        self._num_heads, self._num_kv_heads = num_heads, num_kv_heads
        self._of_layers: dict[tuple[int, ...], PassProgram] = {}
        self._scratch: _Scratch | None = None

    @staticmethod
    def can_run(attention: AttentionBackend, threads: KernelThreads) -> bool:
        """Whether attention is numba's, and a kernel's threads can wait for each other."""
        return isinstance(attention, NumbaAttention) and (threads.count == 1 or threads.can_wait)

    def program(self, steps: Sequence[PassStep]) -> PassProgram:
        """What is the same in all passes of these steps; it keeps their weights."""
        table = (Step * len(steps))(*map(_step, steps))
        hidden_size, head_dim = _hidden_size(steps), 2 * self._cos_sin.shape[-1]
        size_q, size_kv = self._num_heads * head_dim, self._num_kv_heads * head_dim
        intermediate = max(step.num_inputs for step in table)
        sizes = {
            "aside": hidden_size if any(step.kind == Kind.BRANCH for step in steps) else 0,
            "normed": hidden_size,
            "qkv": size_q + 2 * size_kv,
            "q": size_q,
            "attended": size_q,
            "delta": hidden_size,
            "gate_up": 2 * intermediate,
            "activated": intermediate,
        }
        if bits := {step.bits for step in table} - {0}:  # in numbers of four bytes, too
            # The widest token need not take the most bytes: how many inputs share a scale differs.
            widths = {hidden_size, size_q, *(step.num_inputs for step in table)} - {0}
            sizes["terms"] = max(bytes_per_token(each, width) for each in bits for width in widths) // 4
        call = Call(
            steps=ctypes.addressof(table),
            num_steps=len(steps),
            hidden_size=hidden_size,
            num_heads=self._num_heads,
            num_kv_heads=self._num_kv_heads,
            head_dim=head_dim,
            cos_sin=self._cos_sin.data_ptr(),
            num_positions=len(self._cos_sin),
            eps=self._eps,
            ahead=look_ahead() if bits else 0,
            tiles_from=tiles_from() if bits else 0,
            attend=address_of_cfunc(attend),
            multiply=numba_gemm.multiply.address,
            split_tokens=numba_narrow.split_tokens.address,
            multiply_narrow=numba_narrow.multiply.address,
        )
        attention = AttentionCall(
            num_heads=self._num_heads,
            num_kv_heads=self._num_kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
        )
        linears = [linear for step in steps for linear in _linears(step).values()]
        num_products = sum(linear.num_inputs * linear.num_outputs for linear in linears)
        num_logits = sum(step.num_outputs for step in table)
        return PassProgram(steps, table, call, attention, sizes, num_products, num_logits)

    def run_layers(
        self, layers: Sequence[LayerWeights], hidden: Tensor, kv: PagedKV, kv_layer: int, view: BatchView
    ) -> None:
        """As Decoder.run_weights, over at least one layer; adds to hidden [tokens, hidden] in place."""
        key = kv_layer, *map(id, layers)  # ids stay their own, since the program keeps the layers
        if key not in self._of_layers:
            steps = [PassStep(Kind.LAYER, layer, index) for index, layer in enumerate(layers, start=kv_layer)]
            self._of_layers[key] = self.program(steps)
        self.run(self._of_layers[key], hidden, kv, view)

    def run(
        self,
        program: PassProgram,
        source: Tensor | Rows,
        kv: PagedKV,
        view: BatchView,
        target: Rows | None = None,
        wants_best: bool = False,
        wants_sums: bool = False,
    ) -> Output:
        """Runs a pass at the places of `view`, and writes its KV.

        source    hidden states [tokens, hidden], which are worked on in place; or where they are read
        target    where those after the last layer are left, too
        """
        if isinstance(source, Tensor):
            hidden, num_tokens = source, source.shape[0]
        else:
            num_tokens = source.index.shape[0]
            hidden = source.matrix.new_empty(num_tokens, program.call.hidden_size)
        assert hidden.is_contiguous() and hidden.dtype == torch.float32, (hidden.stride(), hidden.dtype)
        assert num_tokens == view.num_tokens and (target is None or target.index.shape[0] == num_tokens)
        call = self._call(program, kv)
        call.hidden, call.num_tokens = hidden.data_ptr(), num_tokens
        _held = self._place(program, call, kv, view)  # what it points to stays until it is done
        if isinstance(source, Rows):
            call.source, call.source_rows = _addresses(source)
        if target is not None:
            call.target, call.target_rows = _addresses(target)
        logits = best = sums = None
        if program.num_logits:
            logits = hidden.new_empty(num_tokens, program.num_logits)
            call.logits = logits.data_ptr()
            if wants_best or wants_sums:
                best = view.slots.new_empty(num_tokens)
                call.best = best.data_ptr()
            if wants_sums:
                sums = hidden.new_empty(num_tokens)
                call.sums = sums.data_ptr()
        num_threads = self._num_threads(program, num_tokens)
        starts, total = _lay_out(program.sizes, num_tokens)
        scratch = self._take_scratch(total, hidden)
        if num_threads > 1:
            call.team_size, call.barrier = self._threads.team_size, scratch.barrier_address
        _share_scratch(call, scratch.memory.data_ptr(), starts)
        self._threads.run(run_pass, ctypes.addressof(call), num_threads)
        self._keep_scratch(scratch)
        return Output(hidden, logits, best, sums)

    def run_linked(
        self,
        passes: Mapping[int, LinkedPass],
        places: TokenPlaces,
        block_tables: Tensor,
        kv: PagedKV,
        link: Link,
    ) -> dict[int, LinkedCounts]:
        """Runs passes one after the other, as `link` asks for them by their numbers, over chains of tokens at
        `places`; all of them tell which tokens are likeliest -> counts, by number."""
        most, num_calls = len(places.token_ids), max(passes) + 1
        for each in passes.values():
            for matrix in (each.source, each.target):  # what follows goes by address
                assert matrix is None or (matrix.is_contiguous() and matrix.dtype == torch.float32)
        width = max(each.program.call.hidden_size for each in passes.values())
        num_logits = max(each.program.num_logits for each in passes.values())
        sizes = {"hidden": width, "logits": num_logits, "sums": 1, "best": 2}  # in numbers of four bytes
        starts, shared = _lay_out(sizes, most)
        own = {number: _lay_out(each.program.sizes, most) for number, each in passes.items()}
        scratch = self._take_scratch(shared + max(total for _, total in own.values()), kv.data)
        begin = scratch.memory.data_ptr()
        calls = (Call * num_calls)()
        at = Places(which=-1, best=begin + starts["best"], logits=begin + starts["logits"])
        at.sums = begin + starts["sums"]
        for name in ("token_ids", "hidden_rows", "positions", "slots", "cu_q_lens"):
            array = getattr(places, name)
            assert array.is_contiguous() and array.dtype == torch.int64, name
            setattr(at, name, array.data_ptr())
        view = BatchView(places.positions, places.slots, block_tables, places.cu_q_lens, 0, 0)
        held = []
        for number, each in passes.items():
            call = self._call(each.program, kv)
            call.num_tokens = most
            held.append(self._place(each.program, call, kv, view))
            call.hidden, call.logits, call.best = begin + starts["hidden"], at.logits, at.best
            call.sums = at.sums if each.wants_sums else 0
            call.source = each.source.data_ptr()
            call.source_rows = at.token_ids if each.begins else at.hidden_rows
            if each.target is not None:
                call.target, call.target_rows = each.target.data_ptr(), at.hidden_rows
            _share_scratch(call, begin + 4 * shared, own[number][0])
            calls[number] = call
        num_threads = max(self._num_threads(each.program, most) for each in passes.values())
        counts = np.zeros((num_calls, 3), np.int64)
        linked = Linked(
            calls=ctypes.addressof(calls),
            num_calls=num_calls,
            places=ctypes.addressof(at),
            link=link.function,
            data=ctypes.addressof(link.data),
            run_pass=address_of_cfunc(run_pass),
            clock=find_clock(),
            counts=counts.ctypes.data,
        )
        if num_threads > 1:
            linked.team_size, linked.barrier = self._threads.team_size, scratch.barrier_address
            for call in calls:
                call.team_size, call.barrier = self._threads.team_size, scratch.barrier_address
        self._threads.run(run_linked, ctypes.addressof(linked), num_threads)
        self._keep_scratch(scratch)
        return {
            number: LinkedCounts(passes, tokens, nanoseconds / 1e9)
            for number, (passes, tokens, nanoseconds) in enumerate(counts.tolist())
        }

    def _num_threads(self, program: PassProgram, num_tokens: int) -> int:
        return self._threads.count if num_tokens * program.num_products > _PARALLEL_FROM else 1

    @staticmethod
    def _call(program: PassProgram, kv: PagedKV) -> Call:
        call = Call.from_buffer_copy(program.call)
        call.kv_size = size_of_numbers(kv)
        call.keys, call.values = kv.keys(0).data_ptr(), kv.values(0).data_ptr()
        call.bytes_per_kv_layer = call.kv_size * kv.data.stride(0)
        return call

    def _place(self, program: PassProgram, call: Call, kv: PagedKV, view: BatchView) -> tuple[object, ...]:
        """Tells the call where its tokens lie -> all that it then points to."""
        positions, slots, tables = view.positions.contiguous(), view.slots.contiguous(), view.block_tables
        tables, cu_q_lens = tables.contiguous(), view.cu_q_lens.contiguous()
        (num_rows, num_blocks), num_tokens = tables.shape, call.num_tokens
        assert cu_q_lens.shape[0] == num_rows + 1, (cu_q_lens.shape, num_rows)
        call.most_per_unit = self.attention.most_per_unit
        numbers = np.empty(4 * num_tokens, np.int64)  # path starts, and units, of which none is empty
        of_attention = AttentionCall.from_buffer_copy(program.attention)
        of_attention.tables, of_attention.num_rows, of_attention.num_blocks = (
            tables.data_ptr(),
            num_rows,
            num_blocks,
        )
        of_attention.positions, of_attention.num_tokens = positions.data_ptr(), num_tokens
        of_attention.many_units = self.attention.many_units
        of_attention.in_bfloat16 = self.attention.in_bfloat16
        of_attention.kv_size, of_attention.block_size = call.kv_size, kv.block_size
        of_attention.path_starts = numbers.ctypes.data
        of_attention.units = of_attention.path_starts + 8 * num_tokens
        paths = path_starts = None
        if view.paths is None or view.path_starts is None:
            call.is_chain = 1
        else:
            paths, path_starts = view.paths.contiguous(), view.path_starts.contiguous()
            of_attention.paths, of_attention.path_len = paths.data_ptr(), paths.shape[1]
            of_attention.path_starts = path_starts.data_ptr()
        call.positions, call.slots, call.cu_q_lens = (
            positions.data_ptr(),
            slots.data_ptr(),
            cu_q_lens.data_ptr(),
        )
        call.attention = ctypes.addressof(of_attention)
        return positions, slots, tables, cu_q_lens, numbers, of_attention, paths, path_starts

    def _take_scratch(self, total: int, like: Tensor) -> _Scratch:
        """Memory for so many numbers of four bytes. It is kept between passes, since new memory costs a pass
        of few tokens as much as all of its norms; while one runs it is not there, so that another thread's
        pass makes its own. After an exception it is gone, with a barrier of which nobody knows who waits
        there."""
        scratch, self._scratch = self._scratch, None
        if scratch is None or scratch.memory.numel() < total:
            scratch = None  # the smaller one goes first
            barrier = self._threads.make_barrier()
            scratch = _Scratch(like.new_empty(total, dtype=torch.float32), barrier, barrier.ctypes.data)
        return scratch

    def _keep_scratch(self, scratch: _Scratch) -> None:
        if scratch.memory.nbytes <= _KEPT_BYTES:
            self._scratch = scratch


def _lay_out(sizes: Mapping[str, int], num_tokens: int) -> tuple[dict[str, int], int]:
    """Arrays of so many numbers of four bytes a token, each beginning in a cache line of its own: where they
    begin, in bytes, and how many numbers they take in all."""
    starts, begin = {}, 0
    for name, size in sizes.items():
        starts[name] = begin
        begin += 64 * -(-size * num_tokens // 16)
    return starts, begin // 4


def _share_scratch(call: Call, begin: int, starts: Mapping[str, int]) -> None:
    """Tells the call where its arrays lie: from `begin` on, by where each of them starts."""
    for name, start in starts.items():
        setattr(call, name, begin + start)


def _addresses(rows: Rows) -> tuple[int, int]:
    # What follows goes by address: nothing else would notice.
    assert rows.matrix.is_contiguous() and rows.matrix.dtype == torch.float32
    assert rows.index.is_contiguous() and rows.index.dtype == torch.int64
    num_rows = rows.matrix.shape[0]
    assert all(0 <= place < num_rows for place in rows.index.tolist()), rows.index
    return rows.matrix.data_ptr(), rows.index.data_ptr()


def _linears(step: PassStep) -> dict[str, PanelLinear | NarrowLinear]:
    linears: dict[str, Linear] = {}
    if step.layer is not None and step.layer.attention is not None:
        linears |= {"qkv": step.layer.attention.qkv, "output": step.layer.attention.output}
    if step.layer is not None and step.layer.mlp is not None:
        linears |= {"gate_up": step.layer.mlp.gate_up, "down": step.layer.mlp.down}
    if step.head is not None:
        linears["head"] = step.head
    found = {}
    for name, linear in linears.items():
        assert isinstance(linear, PanelLinear | NarrowLinear)
        found[name] = linear
    return found


def _hidden_size(steps: Sequence[PassStep]) -> int:
    norms = [step.norm for step in steps] + [
        half.norm for step in steps if step.layer for half in (step.layer.attention, step.layer.mlp) if half
    ]
    return next(len(norm) for norm in norms if norm is not None)


def _step(step: PassStep) -> Step:
    out = Step(kind=step.kind, kv_layer=step.kv_layer)
    if step.norm is not None:
        out.norm = step.norm.data_ptr()
    if step.layer is not None and step.layer.attention is not None:
        out.norm = step.layer.attention.norm.data_ptr()
        if step.layer.attention.qk_norms is not None:
            out.q_norm, out.k_norm = (norm.data_ptr() for norm in step.layer.attention.qk_norms)
    if step.layer is not None and step.layer.mlp is not None and step.kind is Kind.LAYER:
        out.mlp_norm = step.layer.mlp.norm.data_ptr()
    if step.vocabulary is not None:
        out.vocabulary = step.vocabulary.data_ptr()
    linears = _linears(step)
    (out.bits,) = {getattr(linear, "bits", 0) for linear in linears.values()} or {0}
    for name, linear in linears.items():
        setattr(out, name, linear.panels.data_ptr())
        if isinstance(linear, PanelLinear):  # panels of the other have their biases
            setattr(out, f"{name}_bias", linear.bias.data_ptr())
            setattr(out, f"{name}_size", linear.panels.itemsize)
        if name == "down":
            out.num_inputs = linear.num_inputs
        if name == "head":
            out.num_outputs = linear.num_outputs
    return out
