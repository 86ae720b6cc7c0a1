"""Rows in the middle of an answer, on which single stages of a round can be run again and again."""

from __future__ import annotations

import copy
import ctypes
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
from torch import Tensor

from cache.hidden import HiddenBuffer
from cache.host_kv import HostKV
from cache.paged_kv import PagedKV
from cache.view import BatchView, packed_slots_of
from ee_models.exits import Exit
from ee_models.pass_steps import Link, TokenPlaces

from ..config import PLAIN, NgramConfig, Plan
from ..decoding.acceptance import CoupledJudge, Proposals
from ..decoding.batch import PACKED, STATIC, RoundBatch, Span, make_sampling_input
from ..decoding.draft_tree import DraftTree
from ..decoding.drafter import CompiledLookup
from ..decoding.round import Round, run_round
from ..decoding.stages import DecoderLike, Pass, PassCounts, Stages, Tier
from ..drafters.autoregressive import ComputedDrafter, ExitHead
from ..drafters.ngram import NgramDrafter
from ..runner.buckets import context_bucket
from ..runner.cuda_graphs import CudaGraphs, GraphDevice
from ..sampling.sampler import Sampler
from .timing import Timed

_BLOCK_SIZE = 16
_TOKENS_PER_PASS = 512
_TIMED_AGAIN = 2  # passes over the same layers that are timed after a first one


def blocks_of(context_len: int, window: int) -> int:
    """KV blocks of a row of context_len positions, the last of them that of its round's first token, and a
    round of so many."""
    return -(-(context_len - 1 + window) // _BLOCK_SIZE)


class Rig:
    """`rows` rows that all have the tokens `context`, the last of which is not processed yet: a round's entry
    invariant.

    Every method returns what runs one stage once, in the code of `hispec.decoding.round` and its drafters,
    except for a single draft pass, which is a piece of a loop. Where rounds run together, as one call, stages
    are passes of such a call, which tell how long they took. Stages overwrite what they wrote before;
    nothing is ever committed. A draft model has a rig of its own, whose draft passes go through all of its
    layers.

    On a GPU a stage has static shapes, attends within the bucket of its context as an engine's rounds do, and
    is replayed from a graph that its first run is followed by: so what is timed is what the device does, not
    the launches.
    """

    def __init__(
        self,
        decoder: DecoderLike,
        exits: Sequence[Exit],
        context: Sequence[int],
        rows: int,
        window: int,
        graph_device: GraphDevice | None = None,
        written: Collection[int] | None = None,
    ) -> None:
        """graph_device: where stages are captured; None = as the decoder's device wants it, which on a CPU is
        nowhere. written: layers of exits whose KV passes write on their way; None = all of `exits`."""
        config = decoder.config
        self._graphs = graph_device or (CudaGraphs(decoder.device) if decoder.device.type == "cuda" else None)
        # All in one pool of memory, as large as the largest of them needs: one runs at a time. Held, since a
        # pool is fit for captures for as long as a graph of it lives.
        self._replays: list[Callable[[], None]] = []
        if self._graphs is not None:
            self._graphs.renew()  # those of a rig before may be gone
        context = [min(token, config.vocab_size - 1) for token in context]  # as a draft model is fed
        self._context, self._start, self._window = context, len(context) - 1, window
        max_blocks = blocks_of(len(context), window)
        self._most_context = max(decoder.max_positions, self._start + window)
        num_kv_layers = config.num_layers + sum(exit_.num_kv_layers for exit_ in exits)
        self._tables = torch.arange(rows * max_blocks, device=decoder.device).view(rows, max_blocks)
        self._kv = PagedKV(
            num_kv_layers,
            rows * max_blocks,
            _BLOCK_SIZE,
            config.num_kv_heads,
            config.head_dim,
            decoder.kv_dtype,
            decoder.device,
        )
        hidden = HiddenBuffer(len(Tier), rows, window, config.hidden_size, decoder.dtype, decoder.device)
        self._stages = Stages(decoder, config.num_layers, self._kv, hidden, PassCounts(), exits, written)
        self._judge = CoupledJudge()
        self._num_layers, self._vocab_size, self._device = (
            config.num_layers,
            config.vocab_size,
            decoder.device,
        )
        self._tokens = torch.tensor(
            [context[-1], *(context[at % len(context)] for at in range(window))], device=decoder.device
        ).expand(rows, -1)
        with torch.inference_mode():
            self._prefill(context)
            # Tiers resume from hidden states of an ordinary size, not from what the memory held.
            hidden.data[:] = decoder.embed(self._tokens[:, :window].reshape(-1)).view(rows, window, -1)

    def laid_out(self, context_len: int, num_rows: int) -> Rig:
        """The memory of this rig as that of num_rows rows with context_len positions each: shorter ones of
        the same text, or fewer and longer ones. What a longer one attends to is as much as it should be, but
        not its own text. Raises ValueError if so many rows have no room: passes would go beyond the memory.
        """
        rig = copy.copy(self)
        rig._context = (self._context * -(-context_len // len(self._context)))[:context_len]
        rig._start = context_len - 1
        if context_len > len(self._context):
            max_blocks = blocks_of(context_len, self._window)
            rows = self._tables.numel() // max_blocks
            rig._tables = self._tables.flatten()[: rows * max_blocks].view(rows, max_blocks)
            rig._most_context = max(self._most_context, rig._start + self._window)
        if len(rig._tables) < num_rows:
            raise ValueError(
                f"{num_rows} rows of {context_len} positions and a window of {self._window} do not fit into"
                f" {self._tables.numel()} blocks"
            )
        return rig

    def close(self) -> None:
        """Gives the KV memory back."""
        self._kv.release()

    def plain(self, rows: int) -> Timed:
        batch = self._batch(rows, 1)
        return self._linked(batch, 1, Pass(0, self._num_layers)) or self._stage(
            lambda: run_round(self._stages, PLAIN, self._judge, None, batch)
        )

    def draft(self, rows: int, q_len: int, layer: int | None) -> Timed:
        """As a step of `ComputedDrafter.propose`: over node 0 for one position, else over a level of a tree
        of so many branches. `layer`: of the exit; None = all layers, as of a draft model."""
        tree = DraftTree.branches(2, q_len) if q_len > 1 else DraftTree.chain(1)
        batch, head = self._batch(rows, tree.num_nodes), self._head(layer)
        nodes = tree.on(self._device).levels[1 if q_len > 1 else 0]

        def run() -> None:
            span = self._select(batch, tree, nodes)
            chosen = self._judge.choose(head.logits(batch, span, False), batch, span)
            batch.tokens[span.rows.unsqueeze(-1), span.columns.unsqueeze(-1) + 1] = chosen

        linked = None
        if q_len == 1 and layer is not None:
            linked = self._linked(batch, 1, Pass(0, layer, leave=Tier.DRAFT))
        return linked or self._stage(run)

    def first(self, rows: int, layer: int) -> Timed | None:
        """As `draft` of one position, the first of a cycle; None where passes are not told apart."""
        return self._linked(self._batch(rows, 1), 1, Pass(0, layer, leave=Tier.DRAFT), is_first=True)

    def fill(self, rows: int, q_len: int, layer: int | None) -> Timed:
        """As the last step of `ComputedDrafter.propose`, or what `HybridDrafter` does with what it looked up:
        a chain. A level of a tree has other positions to attend to, but not more of them."""
        tree = DraftTree.chain(q_len - 1)
        batch, head = self._batch(rows, q_len), self._head(layer)

        def run() -> None:
            span = self._select(batch, tree, tree.on(self._device).nodes)
            head.fill(batch, span)

        linked = None
        if layer is not None:
            linked = self._linked(batch, q_len, Pass(0, layer, leave=Tier.DRAFT, reads=False))
        return linked or self._stage(run)

    def check(self, rows: int, q_len: int, lo: int, hi: int) -> Timed:
        """A check in layers [lo, hi) of a chain of q_len - 1 drafts in each row."""
        batch, plan = self._batch(rows, q_len), Plan(lo, hi, max(1, q_len - 1))
        one = Round(self._stages, plan, self._judge, self._drafter(plan), batch)
        return self._linked(batch, q_len, Pass(lo, hi, leave=Tier.CHECK)) or self._stage(
            lambda: one.check(self._proposals(batch, q_len), batch.limits)
        )

    def verify(self, rows: int, q_len: int, lo: int) -> Timed:
        """Verify from layer `lo` on, over a chain of q_len positions of each row. A tree of as many takes a
        little longer: its places attend by their paths, and the accepted path is moved."""
        batch, plan = self._batch(rows, q_len), Plan(lo, None, max(1, q_len - 1))
        one = Round(self._stages, plan, self._judge, self._drafter(plan), batch)
        return self._linked(batch, q_len, Pass(lo, self._num_layers)) or self._stage(
            lambda: one.verify(self._proposals(batch, q_len), batch.limits)
        )

    def lookup(self, rows: int, most: int) -> Timed:
        """One proposal of prompt lookup in each row."""
        batch = self._batch(rows, most + 1)
        drafter = NgramDrafter(NgramConfig(), rows, len(self._context), self._device)
        drafter.follow([(row, self._context) for row in range(rows)])
        compiled = drafter.compiled()
        if compiled and compiled.lookup and self._stages.can_link({0: Pass(0, self._num_layers)}):
            return self._compiled_lookup(batch, compiled.lookup)
        return self._stage(
            lambda: drafter.propose(batch, torch.zeros_like(batch.limits), DraftTree.chain(most))
        )

    def along(self, rows: int, q_len: int, layer: int) -> Callable[[], None]:
        """The KV of the trained exit at `layer`, at q_len positions of each row, from hidden states that
        are there."""
        _, span, hidden = self._left(rows, q_len)
        return self._stage(lambda: self._stages.fill(hidden, layer, span.view))

    def shadow(self, rows: int, q_len: int, layer: int) -> Callable[[], None]:
        """The logits of the exit at `layer` and its token at q_len positions of each row, from hidden states
        that are there."""
        batch, span, hidden = self._left(rows, q_len)
        said = torch.zeros_like(batch.tokens)

        def run() -> None:
            logits = self._stages.logits(hidden, layer, span).wide()
            span.put(
                said,
                span.columns.unsqueeze(-1),
                batch.sampler.choose_top(logits, make_sampling_input(batch, span), 1),
            )

        return self._stage(run)

    def prefill(self, num_tokens: int) -> Callable[[], None]:
        """The last num_tokens positions of one row's context, at all layers and exits. On a GPU from a graph,
        as an engine computes prompts, which pads them besides."""
        start = self._start - num_tokens
        token_ids, view = self._chunk(self._context, start, self._start)
        return self._stage(lambda: self._stages.prefill(token_ids, view))

    def swap(self, num_positions: int) -> Callable[[], None]:
        """The KV of the first num_positions positions of one row at all layers and exits: to host memory and
        back, as for a request that makes room, which no graph does."""
        # Twice: pinned memory comes in powers of two.
        host, blocks = HostKV(2 * self._kv.num_bytes), self._tables[0].tolist()

        def run() -> None:
            is_saved = host.save(0, [self._kv], blocks, num_positions)
            assert is_saved
            host.restore(0, [self._kv], blocks)

        return self._quiet(run)

    # ---- inside ----

    @staticmethod
    def _quiet(run: Callable[[], object]) -> Callable[[], None]:
        """`run` without autograd's bookkeeping, as the engine runs it."""

        @torch.inference_mode()
        def quiet() -> None:
            run()

        return quiet

    def _linked(self, batch: RoundBatch, q_len: int, over: Pass, is_first: bool = False) -> Timed | None:
        """The pass over q_len positions of each row, which tells its milliseconds, as one of those that run
        linked: after the whole model, as what follows a verify finds its weights in no near cache; from a
        later layer on after those before it and their exit, too, as a round has it, since a large cache may
        keep some of what the last pass over the same weights has left. But those from the first layer to an
        exit, of which there may be several in a row, find there what the one before them has left, unless it
        is the first. None where passes do not run so, or nothing tells them the time."""
        is_again = over.lo == 0 and over.hi < self._num_layers and not is_first
        ahead = [Pass(0, self._num_layers)]
        if over.lo > 0:
            ahead.append(Pass(0, over.lo, leave=Tier.DRAFT))
        elif is_again:
            ahead.append(over)
        timed_ones = range(len(ahead), len(ahead) + (_TIMED_AGAIN if is_again else 1))
        passes = dict(enumerate(ahead)) | dict.fromkeys(timed_ones, over)
        if self._device.type != "cpu" or (linked := self._stages.link(passes, batch)) is None:
            return None
        # Here, since a machine with a GPU need not have numba.
        from ee_models.fused_kernel import in_order
        from ee_models.kernels.threads import address_of_cfunc, find_clock
        from ee_models.pass_structures import InOrder

        if not find_clock():
            return None

        tree = DraftTree.chain(q_len - 1)
        span = self._select(batch, tree, tree.on(self._device).nodes)
        view = span.view
        places = TokenPlaces(span.read_tokens(batch), span.flat, view.positions, view.slots, view.cu_q_lens)
        asked = InOrder(num_passes=len(passes), num_tokens=span.num_tokens)
        link = Link(address_of_cfunc(in_order), asked)

        @torch.inference_mode()
        def timed() -> float:
            counts = self._stages.run_linked(passes, linked, batch, places, link)
            return 1e3 * sum(counts[number].seconds for number in timed_ones) / len(timed_ones)

        return timed

    @staticmethod
    def _compiled_lookup(batch: RoundBatch, lookup: CompiledLookup) -> Timed:
        """A proposal as a link asks for it, without Python around it."""
        from ..decoding.rounds_numba import Lookups  # here, since a machine with a GPU need not have numba

        first, counts = torch.zeros_like(batch.limits), torch.empty_like(batch.limits)
        asked = Lookups(batch.num_rows, batch.window, batch.tokens.data_ptr())
        asked.first, asked.most = first.data_ptr(), batch.most_drafts.data_ptr()
        asked.counts = counts.data_ptr()
        propose = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(lookup.propose)

        def timed(*held: object) -> float:
            started = time.perf_counter()
            propose(ctypes.addressof(asked), ctypes.addressof(lookup.index))
            return 1e3 * (time.perf_counter() - started)

        return partial(timed, first, counts, batch, lookup)  # what the addresses are of

    def _stage(self, run: Callable[[], object]) -> Callable[[], None]:
        """`run` as `_quiet` has it; on a GPU from a graph."""
        quiet = self._quiet(run)
        if self._graphs is None:
            return quiet
        return torch.inference_mode()(_captured(quiet, self._graphs, self._replays))

    def _head(self, layer: int | None) -> ExitHead:
        return ExitHead(self._stages, self._num_layers if layer is None else layer)

    def _drafter(self, plan: Plan) -> ComputedDrafter:
        """A drafter for check and verify, which only call it when KV moves."""
        return ComputedDrafter(ExitHead(self._stages, plan.draft_layer), self._judge)

    def _left(self, rows: int, q_len: int) -> tuple[RoundBatch, Span, Tensor]:
        """q_len positions of each row, and the hidden states that the draft tier has left there."""
        batch, tree = self._batch(rows, q_len), DraftTree.chain(q_len - 1)
        with torch.inference_mode():
            span = self._select(batch, tree, tree.on(self._device).nodes)
            return batch, span, self._stages.resume(Tier.DRAFT, span)

    @staticmethod
    def _select(batch: RoundBatch, tree: DraftTree, nodes: Tensor) -> Span:
        """The positions of these nodes, in every row."""
        num_live = torch.full_like(batch.limits, tree.num_nodes)
        return Stages.select(batch, tree, torch.zeros_like(batch.limits), nodes, num_live)

    @staticmethod
    def _proposals(batch: RoundBatch, q_len: int) -> Proposals:
        return Proposals(
            DraftTree.chain(q_len - 1),
            torch.zeros_like(batch.limits),
            torch.full_like(batch.limits, q_len - 1),
        )

    def _batch(self, rows: int, window: int) -> RoundBatch:
        """The first `rows` rows in a round of `window` positions."""
        return RoundBatch(
            tokens=self._tokens[:rows, : window + 1].clone(),
            starts=torch.full((rows,), self._start, device=self._device),
            limits=torch.full((rows,), window, device=self._device),
            most_drafts=torch.full((rows,), window - 1, device=self._device),
            most_checks=torch.ones(rows, dtype=torch.int64, device=self._device),
            block_tables=self._tables[:rows],
            block_size=_BLOCK_SIZE,
            max_context_len=(
                self._start + window
                if self._graphs is None
                else context_bucket(self._start + window, self._most_context)
            ),
            sampler=Sampler([None] * rows, self._vocab_size, self._device),
            execution=PACKED if self._graphs is None else STATIC,
            keeps_logits=self._graphs is None,
        )

    def _prefill(self, context: Sequence[int]) -> None:
        """KV of all but the last token: computed for the first row, copied for the others."""
        for start in range(0, self._start, _TOKENS_PER_PASS):
            self._stages.prefill(*self._chunk(context, start, min(start + _TOKENS_PER_PASS, self._start)))
        of_rows = self._kv.data.unflatten(2, (self._tables.shape[0], -1))
        of_rows[:, :, 1:] = of_rows[:, :, :1]

    def _chunk(self, context: Sequence[int], start: int, stop: int) -> tuple[Tensor, BatchView]:
        """Positions [start, stop) of the first row's context, for one pass."""
        positions = torch.arange(start, stop, device=self._device)
        slots = packed_slots_of(self._tables[:1], torch.zeros_like(positions), positions, _BLOCK_SIZE)
        view = BatchView(
            positions,
            slots,
            self._tables[:1],
            torch.tensor([0, stop - start], device=self._device),
            stop - start,
            stop,
        )
        return torch.tensor(context[start:stop], device=self._device), view


def _captured(
    run: Callable[[], None], device: GraphDevice, replays: list[Callable[[], None]]
) -> Callable[[], None]:
    """`run`, which is captured once it was run, and replayed from then on; replays: takes what replays it."""
    replay: Callable[[], None] | None = None

    def replayed() -> None:
        nonlocal replay
        if replay is None:
            run()
            replay, _ = device.capture(run)
            replays.append(replay)
        else:
            replay()

    return replayed
