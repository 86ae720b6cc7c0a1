"""Runs one stage of a round: picks the live tokens, runs a span of layers over them, keeps the hidden states
that the next tier resumes from."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache
from operator import sub
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from cache.hidden import HiddenBuffer
from cache.paged_kv import PagedKV
from cache.view import BatchView, packed_slots_of
from ee_models.config import ModelConfig
from ee_models.decoder import Decoder
from ee_models.exits import AdapterExit, Exit
from ee_models.kernels import runs_numba, runs_triton
from ee_models.pass_steps import Kind, Link, LinkedCounts, LinkedPass, Output, PassStep, Rows, TokenPlaces

from ..sampling.logits import Logits
from .batch import RoundBatch, Span, make_sampling_input
from .draft_tree import DraftTree

if TYPE_CHECKING:
    from ee_models.fused_pass import PassProgram


class DecoderLike(Protocol):
    """What a round needs of a model; ee_models.decoder.Decoder is one, tests script others."""

    config: ModelConfig
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    max_positions: int  # positions that its rotary table has

    def embed(self, token_ids: Tensor) -> Tensor: ...

    def run_layers(self, hidden: Tensor, lo: int, hi: int, kv: PagedKV, view: BatchView) -> Tensor: ...

    def fill_layers(self, hidden: Tensor, lo: int, hi: int, kv: PagedKV, view: BatchView) -> None: ...

    def logits(self, hidden: Tensor, exit_layer: int) -> Tensor: ...


class Tier(IntEnum):
    """The tiers that leave hidden states behind; also their index in the hidden buffer."""

    DRAFT = 0
    CHECK = 1


@dataclass(frozen=True)
class Pass:
    """Layers [lo, hi) over the tokens of a span.

    resume             whose hidden states it begins with; at layer 0 with embeddings
    leave              for whom it leaves those that it ends with; None = for nobody
    token_ids          [tokens], to embed others than those of the window
    asks_probability   whether the likeliest tokens' probability will be asked for
    reads              of a linked pass, whether the exit after its layers is read
    """

    lo: int
    hi: int
    resume: Tier = Tier.DRAFT
    leave: Tier | None = None
    token_ids: Tensor | None = None
    asks_probability: bool = False
    reads: bool = True

    @property
    def seconds(self) -> str:
        """Which of PassCounts its time is: that of the tier that it leaves hidden states for, or verify's."""
        return "verify_pass_s" if self.leave is None else ("draft_pass_s", "check_pass_s")[self.leave]


@dataclass
class PassCounts:
    """Layers of the model run, summed over passes; those of prompts among them; layers times positions;
    passes over an adapter's blocks for logits; and on a CPU the seconds that rounds spent in passes of each
    tier, plain decoding's being verify's. On a GPU nobody waits for a single pass."""

    layer_passes: int = 0
    prefill_layer_passes: int = 0
    layer_positions: int = 0
    adapter_passes: int = 0
    draft_pass_s: float = 0.0
    check_pass_s: float = 0.0
    verify_pass_s: float = 0.0

    @property
    def pass_s(self) -> float:
        """Seconds in passes of all tiers."""
        return self.draft_pass_s + self.check_pass_s + self.verify_pass_s

    def reset(self) -> None:
        self.set(PassCounts())

    def copy(self) -> PassCounts:
        return PassCounts(**vars(self))

    def set(self, other: PassCounts) -> None:
        vars(self).update(vars(other))

    def add(self, other: PassCounts) -> None:
        self.set(PassCounts(**{name: value + getattr(other, name) for name, value in vars(self).items()}))

    def since(self, earlier: PassCounts) -> PassCounts:
        """The difference: what was counted after the copy `earlier` was made."""
        return PassCounts(*map(sub, vars(self).values(), vars(earlier).values()))


class Stages:
    """Runs spans of layers and reads exits, over one decoder, one KV and one hidden-state buffer (None: no
    tier resumes).

    exits     trained ones; a layer without one is read through the model's own head. The KV layers of each
              follow those of the model and of the exits before it
    written   layers of exits whose KV every pass through their layer writes along the way; None = all of
              `exits`
    """

    def __init__(
        self,
        decoder: DecoderLike,
        num_layers: int,
        kv: PagedKV,
        hidden: HiddenBuffer | None,
        counts: PassCounts,
        exits: Iterable[Exit] = (),
        written: Collection[int] | None = None,
    ) -> None:
        self.num_layers, self.vocab_size, self.device = num_layers, decoder.config.vocab_size, decoder.device
        self.counts = counts
        self._decoder, self._kv, self._hidden = decoder, kv, hidden
        self._exits: dict[int, tuple[Exit, int]] = {}
        kv_layer = num_layers
        for exit_ in sorted(exits, key=lambda exit_: exit_.layer):
            self._exits[exit_.layer] = exit_, kv_layer
            kv_layer += exit_.num_kv_layers
        self._written = frozenset(self._exits if written is None else written)
        self._programs: dict[tuple[int, int, bool, bool], PassProgram | None] = {}

    @staticmethod
    def select(batch: RoundBatch, tree: DraftTree, first: Tensor, nodes: Tensor, num_live: Tensor) -> Span:
        """The tokens of one pass over a draft cycle: those of `nodes` [q_len] of `tree`, whose node 0 stands
        in column first [rows], that are below num_live [rows]. A live node's parents must be live in this
        round."""
        rows, q_len, device = first.shape[0], nodes.shape[0], nodes.device
        is_static = batch.execution.is_static
        token_ids = alive = None
        if is_static:
            cell, row, cu_q_lens = _rectangle(rows, q_len, device)
            first, node, column, flat, positions, slots, token_ids, alive = _addresses(
                batch, first, nodes, num_live, row
            )
        elif tree.is_chain and runs_numba(device):
            from . import addresses_numba

            (cell, row, node, first, column, flat, positions, slots), cu_q_lens = addresses_numba.addresses(
                num_live, first, batch.starts, nodes, batch.block_tables, batch.block_size, batch.window
            )
        else:
            live = nodes < num_live.unsqueeze(-1)
            cell = live.reshape(-1).nonzero().squeeze(-1)
            row, node = cell // q_len, nodes[cell % q_len]
            cu_q_lens = torch.zeros(rows + 1, dtype=torch.int64, device=device)
            torch.cumsum(live.sum(-1), 0, out=cu_q_lens[1:])
            first = first[row]
            column = first + node
            flat, positions = row * batch.window + column, batch.starts[row] + column
            slots = packed_slots_of(batch.block_tables, row, positions, batch.block_size)
        paths = path_slots = path_starts = None
        if not tree.is_chain:
            shape = tree.on(device)
            path_starts = batch.starts[row] + first + 1
            positions = path_starts - 1 + shape.depths[node]
            paths = first.unsqueeze(-1) + shape.paths[node, 1:]
            if alive is not None:
                path_starts, positions = path_starts.masked_fill(~alive, 1), positions.masked_fill(~alive, 0)
                paths = paths.masked_fill(~alive.unsqueeze(-1), 0)
            path_slots = packed_slots_of(
                batch.block_tables,
                row.unsqueeze(-1),
                batch.starts[row].unsqueeze(-1) + paths,
                batch.block_size,
            )
        view = BatchView(
            positions,
            slots,
            batch.block_tables,
            cu_q_lens,
            q_len,
            batch.max_context_len,
            path_slots,
            path_starts,
        )
        return Span(row, column, flat, first, node, cell, (rows, q_len), paths, alive, view, token_ids)

    def compute(self, batch: RoundBatch, span: Span, over: Pass) -> Logits:
        """Runs the pass over the span's tokens -> their logits at the exit after its layers. Writes the KV of
        these layers, and of the exits on the way."""
        started = time.perf_counter()
        logits = self._compute(batch, span, over)
        self._add_time(over, started)
        return logits

    def can_link(self, passes: Mapping[int, Pass]) -> bool:
        """Whether each of the passes is a single call, where no exits are watched."""
        return all(self._program_of(over.lo, over.hi, over.reads) is not None for over in passes.values())

    def link(self, passes: Mapping[int, Pass], batch: RoundBatch) -> dict[int, LinkedPass] | None:
        """The passes, of any of which many are to follow each other in one call; None where one of them is no
        single call."""
        linked = {}
        for number, over in passes.items():
            program = self._program(over, over.reads, batch)
            if program is None:
                return None
            decoder, hidden = self._decoder, self._hidden
            assert isinstance(decoder, Decoder)
            assert hidden is not None or (over.lo == 0 and over.leave is None)
            source = decoder.embedding if hidden is None or over.lo == 0 else hidden.rows(over.resume)
            target = None if hidden is None or over.leave is None else hidden.rows(over.leave)
            linked[number] = LinkedPass(program, source, over.lo == 0, target, over.asks_probability)
        return linked

    def run_linked(
        self,
        passes: Mapping[int, Pass],
        linked: Mapping[int, LinkedPass],
        batch: RoundBatch,
        places: TokenPlaces,
        link: Link,
    ) -> dict[int, LinkedCounts]:
        """Runs passes, as `link` has made `linked` of them, as the link given asks for them -> counts, by
        number."""
        decoder = self._decoder
        assert isinstance(decoder, Decoder) and decoder.passes is not None
        started = time.perf_counter()
        counts = decoder.passes.run_linked(linked, places, batch.block_tables, self._kv, link)
        seconds, last = max(0.0, time.perf_counter() - started), max(passes)
        is_timed = any(count.seconds for count in counts.values())
        for number, over in passes.items():
            count = counts[number]
            self.counts.layer_passes += (over.hi - over.lo) * count.passes
            self.counts.layer_positions += (over.hi - over.lo) * count.tokens
            exit_, _ = self._exits.get(over.hi, (None, 0))
            if exit_ is not None and over.reads:
                self.counts.adapter_passes += exit_.num_kv_layers * count.passes
            vars(self.counts)[over.seconds] += count.seconds if is_timed else seconds * (number == last)
        return counts

    def _compute(self, batch: RoundBatch, span: Span, over: Pass) -> Logits:
        program = self._program(over, True, batch)
        if program is None:
            return self.logits(self._run(batch, span, over), over.hi, span, over.asks_probability)
        exit_, _ = self._exits.get(over.hi, (None, 0))
        self.counts.adapter_passes += 0 if exit_ is None else exit_.num_kv_layers
        out = self._run_program(program, batch, span, over)
        assert out.logits is not None
        vocabulary = None if exit_ is None else exit_.vocabulary
        return Logits(out.logits, self.vocab_size, vocabulary, out.best, out.sums)

    def advance(self, batch: RoundBatch, span: Span, over: Pass) -> None:
        """As `compute`, for tokens whose logits are not needed."""
        started = time.perf_counter()
        program = self._program(over, False, batch)
        if program is None:
            self.fill(self._run(batch, span, over), over.hi, span.view)
        else:
            self._run_program(program, batch, span, over)
        self._add_time(over, started)

    def _add_time(self, over: Pass, started: float) -> None:
        if self.device.type == "cpu":
            counts = vars(self.counts)
            counts[over.seconds] += max(0.0, time.perf_counter() - started)

    def _run(self, batch: RoundBatch, span: Span, over: Pass) -> Tensor:
        """A pass, one operation after the other, up to hidden [tokens, hidden]."""
        if over.lo:
            hidden = self.resume(over.resume, span)
        else:
            hidden = self._decoder.embed(_token_ids(batch, span, over))
        hidden = self._run_layers(hidden, over.lo, over.hi, batch, span)
        if over.leave is not None:
            self._leave(over.leave, span, hidden)
        return hidden

    def _program(self, over: Pass, reads: bool, batch: RoundBatch) -> PassProgram | None:
        """The pass as one call, where something runs it so; exits that are watched, and static shapes, it
        does not know."""
        if batch.watch is not None or batch.execution.is_static:
            return None
        return self._program_of(over.lo, over.hi, reads)

    def _program_of(self, lo: int, hi: int, reads: bool, is_prompt: bool = False) -> PassProgram | None:
        key = lo, hi, reads, is_prompt
        if key not in self._programs:
            self._programs[key] = self._make_program(*key)
        return self._programs[key]

    def _make_program(self, lo: int, hi: int, reads: bool, is_prompt: bool) -> PassProgram | None:
        """Layers [lo, hi) and the exits on the way. is_prompt: all exits are filled, not `written` alone, and
        of the last layer no more is computed than its keys and values."""
        assert not (is_prompt and reads)
        decoder, exits = self._decoder, self._exits
        # Whatever has methods of its own is asked by these.
        if type(decoder) is not Decoder or decoder.passes is None or hi <= lo:
            return None
        steps: list[PassStep] = []
        filled = exits if is_prompt else self._written
        for stop in sorted({layer for layer in filled if lo < layer < hi} | {hi}):
            steps += decoder.layer_steps(lo, stop)
            lo = stop
            exit_, kv_layer = exits.get(stop, (None, 0))
            if exit_ is None:
                steps += [decoder.head_step()] if reads and stop == hi else []
            elif type(exit_) is AdapterExit:
                read = reads and stop == hi
                steps += exit_.logit_steps(kv_layer) if read else exit_.fill_steps(kv_layer)
            else:
                return None
        if is_prompt:
            steps[-1] = replace(steps[-1], kind=Kind.FILL)
        return decoder.passes.program(steps)

    def _run_program(
        self,
        program: PassProgram,
        batch: RoundBatch,
        span: Span,
        over: Pass,
    ) -> Output:
        decoder, hidden, target = self._decoder, self._hidden, None
        assert isinstance(decoder, Decoder) and decoder.passes is not None
        self._count(over.lo, over.hi, span.num_tokens)
        if over.lo:
            assert hidden is not None
            source = Rows(hidden.rows(over.resume), span.flat)
        else:
            source = Rows(decoder.embedding, _token_ids(batch, span, over))
        if over.leave is not None:
            assert hidden is not None
            target = Rows(hidden.rows(over.leave), span.flat)
        wants_best = batch.sampler.takes_likeliest
        return decoder.passes.run(
            program, source, self._kv, span.view, target, wants_best, over.asks_probability
        )

    def _run_layers(self, hidden: Tensor, lo: int, hi: int, batch: RoundBatch, span: Span) -> Tensor:
        """Runs layers [lo, hi) over hidden [tokens, hidden] of the span; writes their KV, and that of the
        exits between lo and hi. Watched exits between them note what they would have chosen."""
        watched = () if batch.watch is None else batch.watch.layers

        def pass_by(hidden: Tensor, layer: int) -> None:
            if batch.watch is None or layer not in watched:
                self.fill(hidden, layer, span.view)
                return
            logits = self.logits(hidden, layer, span).wide()
            chosen = batch.sampler.choose_top(logits, make_sampling_input(batch, span), 1)
            span.put(batch.watch.tokens[watched.index(layer)], span.columns.unsqueeze(-1), chosen)

        return self._through(hidden, lo, hi, span.view, {*self._written, *watched}, pass_by)

    def _count(self, lo: int, hi: int, num_tokens: int) -> None:
        self.counts.layer_passes += hi - lo
        self.counts.layer_positions += (hi - lo) * num_tokens

    def _leave(self, tier: Tier, span: Span, hidden: Tensor) -> None:
        """Stores hidden [tokens, hidden] for the tier that resumes from it."""
        assert self._hidden is not None
        self._hidden.write(tier, span.flat, hidden)

    def resume(self, tier: Tier, span: Span) -> Tensor:
        """Hidden states [tokens, hidden] that `tier` left for the span's tokens."""
        assert self._hidden is not None
        return self._hidden.read(tier, span.flat)

    def logits(self, hidden: Tensor, exit_layer: int, span: Span, asks_probability: bool = False) -> Logits:
        """Read at the exit after `exit_layer` layers; an adapter there writes its KV. asks_probability: as
        Pass has it."""
        if exit_layer not in self._exits:
            values = self._decoder.logits(hidden, exit_layer)
            return Logits(values, self.vocab_size, asks_probability=asks_probability)
        exit_, kv_layer = self._exits[exit_layer]
        self.counts.adapter_passes += exit_.num_kv_layers
        values = exit_.logits(hidden, self._kv, kv_layer, span.view)
        return Logits(values, self.vocab_size, exit_.vocabulary, asks_probability=asks_probability)

    def fill(self, hidden: Tensor, exit_layer: int, view: BatchView) -> None:
        """Writes the KV of an adapter after `exit_layer` layers, as `logits` does, and computes nothing
        else."""
        if exit_layer in self._exits:
            exit_, kv_layer = self._exits[exit_layer]
            exit_.fill(hidden, self._kv, kv_layer, view)

    def prefill(self, token_ids: Tensor, view: BatchView) -> None:
        """Writes the KV of all layers and of all exits for token_ids [tokens]."""
        before = self.counts.layer_passes
        program, decoder = self._program_of(0, self.num_layers, reads=False, is_prompt=True), self._decoder
        if program is None:
            hidden, lo = self._fill_exits(token_ids, view, self._exits)
            self._count(lo, self.num_layers, view.num_tokens)
            decoder.fill_layers(hidden, lo, self.num_layers, self._kv, view)
        else:
            assert isinstance(decoder, Decoder) and decoder.passes is not None
            self._count(0, self.num_layers, view.num_tokens)
            decoder.passes.run(program, Rows(decoder.embedding, token_ids), self._kv, view)
        self.counts.prefill_layer_passes += self.counts.layer_passes - before

    def backfill(self, token_ids: Tensor, view: BatchView, layers: Collection[int]) -> None:
        """Writes the missing KV of the exits at `layers` for token_ids [tokens], whose KV at all layers of
        the model is there."""
        self._fill_exits(token_ids, view, layers)

    def _fill_exits(self, token_ids: Tensor, view: BatchView, layers: Collection[int]) -> tuple[Tensor, int]:
        """Writes the KV of the exits at `layers`, and of the model's layers below -> hidden states [tokens,
        hidden] after the last of these, and how many they are."""
        hidden, last = self._decoder.embed(token_ids), max(layers, default=0)
        if last > 0:
            hidden = self._through(hidden, 0, last, view, layers)
            self.fill(hidden, last, view)
        return hidden, last

    def _through(
        self,
        hidden: Tensor,
        lo: int,
        hi: int,
        view: BatchView,
        stops: Collection[int],
        pass_by: Callable[[Tensor, int], None] | None = None,
    ) -> Tensor:
        """Runs layers [lo, hi), and calls pass_by(hidden, layer) after those of `stops` that lie between;
        None writes the KV of the exits there."""
        for stop in sorted({layer for layer in stops if lo < layer < hi} | {hi}):
            self._count(lo, stop, view.num_tokens)
            hidden = self._decoder.run_layers(hidden, lo, stop, self._kv, view)
            if stop < hi:
                pass_by(hidden, stop) if pass_by else self.fill(hidden, stop, view)
            lo = stop
        return hidden

    def move(self, batch: RoundBatch, layer: int, sources: Tensor, targets: Tensor) -> None:
        """Copies columns sources [rows, n] to columns targets [rows, n], -1 = nowhere: KV of layers [0,
        layer) and of the exits there, and the check tier's hidden states."""
        is_nowhere = (targets < 0).reshape(-1)
        slots_from = self._slots(batch, sources)
        slots_to = self._slots(batch, targets.clamp(min=0)).masked_fill(is_nowhere, -1)
        self._kv.move(0, layer, slots_from, slots_to)
        for exit_layer, (exit_, kv_layer) in self._exits.items():
            if exit_layer <= layer and exit_.num_kv_layers:
                self._kv.move(kv_layer, kv_layer + exit_.num_kv_layers, slots_from, slots_to)
        if self._hidden is not None:
            rows = torch.arange(sources.shape[0], device=sources.device).unsqueeze(-1) * batch.window
            self._hidden.move(
                Tier.CHECK,
                (rows + sources).reshape(-1),
                torch.where(targets < 0, -1, rows + targets).reshape(-1),
            )

    @staticmethod
    def _slots(batch: RoundBatch, columns: Tensor) -> Tensor:
        """KV slots [rows * n] of columns [rows, n]."""
        rows = torch.arange(columns.shape[0], device=columns.device).unsqueeze(-1)
        return packed_slots_of(
            batch.block_tables, rows, batch.starts.unsqueeze(-1) + columns, batch.block_size
        ).reshape(-1)


def _token_ids(batch: RoundBatch, span: Span, over: Pass) -> Tensor:
    """[tokens]: the span's tokens, as the window has them now, unless the pass has others."""
    return span.read_tokens(batch) if over.token_ids is None else over.token_ids


@cache  # never dropped: captured graphs read them at their addresses
def _rectangle(rows: int, q_len: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Cells of a rectangle [rows * q_len], the row of each, and where rows begin [rows + 1]; made once."""
    with torch.inference_mode(False):
        cell = torch.arange(rows * q_len, device=device)
        return cell, cell // q_len, torch.arange(0, (rows + 1) * q_len, q_len, device=device)


def _addresses(
    batch: RoundBatch, first: Tensor, nodes: Tensor, num_live: Tensor, row: Tensor
) -> tuple[Tensor, ...]:
    """Of all cells of a rectangle [rows, q_len], which are in row [rows * q_len]: first, node, column, row *
    window + column, position, slot, token, and whether it is live."""
    if runs_triton(row.device):
        from . import addresses_triton

        return addresses_triton.addresses(
            first, num_live, batch.starts, nodes, batch.block_tables, batch.block_size, batch.tokens
        )
    node, first = nodes.repeat(len(num_live)), first[row]
    alive = node < num_live[row]
    column = first + node
    positions = (batch.starts[row] + column).masked_fill(~alive, 0)
    slots = packed_slots_of(batch.block_tables, row, positions, batch.block_size).masked_fill(~alive, -1)
    flat = (row * batch.window + column).masked_fill(~alive, -1)
    tokens = batch.tokens[row, column.clamp(max=batch.window)].masked_fill(~alive, 0)
    return first, node, column, flat, positions, slots, tokens, alive
