"""Rounds that run together as one call: what `rounds_numba` is told, and what it has done."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import torch

from ee_models.kernels.threads import address_of_cfunc
from ee_models.pass_steps import Link, TokenPlaces

from ..config import Plan
from .acceptance import CoupledJudge
from .batch import RoundBatch, RoundResult, Together
from .drafter import CompiledDrafter
from .rounds_numba import Lookups, Rounds, Row, Stage, advance
from .row_steps import nothing_noted, zeros
from .stages import Pass, Stages, Tier


def passes_of(
    plan: Plan, num_layers: int, drafter: CompiledDrafter, asks_probability: bool = False
) -> dict[int, Pass]:
    """The passes of a round, by Stage; asks_probability: whether the check does."""
    draft, check = plan.draft_layer, plan.check_layer
    passes = {}
    if drafter.computes:
        leaves = Pass(0, draft, leave=Tier.DRAFT)
        passes[Stage.DRAFT] = replace(leaves, asks_probability=drafter.confidence is not None)
        passes[Stage.FEED] = replace(leaves, reads=False)
    if check is not None:
        passes[Stage.CHECK] = Pass(draft, check, leave=Tier.CHECK, asks_probability=asks_probability)
        passes[Stage.VERIFY] = Pass(check, num_layers, resume=Tier.CHECK)
    if plan.num_checks == 1:
        passes[Stage.VERIFY_DRAFTS] = Pass(draft, num_layers)
    return {int(stage): each for stage, each in passes.items()}


def run(
    stages: Stages,
    plan: Plan,
    judge: CoupledJudge,
    drafter: CompiledDrafter,
    batch: RoundBatch,
    gate: float | None,
    together: Together,
) -> RoundResult:
    """The rounds as one call, as `rounds_together.run_together` has them. gate: its continue_confidence."""
    asks = judge.asks_probability or gate is not None
    passes = passes_of(plan, stages.num_layers, drafter, asks)
    linked = stages.link(passes, batch)
    assert linked is not None
    num_rows, window, most_rounds = batch.num_rows, batch.window, together.num_rounds
    num_checks, most_tokens = plan.num_checks, batch.num_rows * batch.window
    lookup, (_, num_blocks) = drafter.lookup, batch.block_tables.shape
    of_rows = np.zeros((Row.NUM_LINES, num_rows), np.int64)
    for line, values in (
        (Row.START, batch.starts),
        (Row.LIMIT, batch.limits),
        (Row.MOST_DRAFTS, batch.most_drafts),
        (Row.MOST_CHECKS, batch.most_checks),
        (Row.CAP, together.caps),
        (Row.ROOM, together.rooms),
        (Row.END, together.ends),
    ):
        of_rows[line] = values.numpy()
    located = torch.empty(8, most_tokens, dtype=torch.int64)
    token_ids, cu_q_lens = located.new_empty(most_tokens), located.new_zeros(num_rows + 1)
    places = TokenPlaces(token_ids, located[5], located[6], located[7], cu_q_lens)
    committed = np.empty((num_rows, 1 + most_rounds * window), np.int64)
    notes = np.full((most_rounds, num_rows, 3 + 3 * num_checks), -1, np.int64)
    evidence, flags = np.zeros(num_rows, np.float32), np.empty((2, most_tokens + num_rows), np.bool_)
    begins = np.cumsum([0, *map(len, together.stop_ids)], dtype=np.int64)
    stops = np.array([token for each in together.stop_ids for token in each], np.int64)
    nodes, asked = np.arange(window + 1), Lookups()
    num_computed = plan.num_draft_tokens if drafter.num_computed is None else drafter.num_computed
    rounds = Rounds(
        most_rounds=most_rounds,
        num_drafts=plan.num_draft_tokens,
        num_checks=num_checks,
        num_computed=min(num_computed, plan.num_draft_tokens) if drafter.computes else 0,
        has_check=plan.check_layer is not None,
        is_gated=gate is not None,
        tests_drafts=drafter.confidence is not None,
        tests_check=judge.check_confidence is not None,
        num_rows=num_rows,
        window=window,
        block_size=batch.block_size,
        num_blocks=num_blocks,
        vocab_size=stages.vocab_size,
        most_tokens=most_tokens,
        propose=0 if lookup is None else lookup.propose,
        extend=0 if lookup is None else lookup.extend,
        index=0 if lookup is None else ctypes.addressof(lookup.index),
        lookups=ctypes.addressof(asked),
        tables=batch.block_tables.data_ptr(),
        tokens=batch.tokens.data_ptr(),
        of_rows=of_rows.ctypes.data,
        nodes=nodes.ctypes.data,
        located=located.data_ptr(),
        stop_begins=begins.ctypes.data,
        stops=stops.ctypes.data,
        committed=committed.ctypes.data,
        notes=notes.ctypes.data,
        evidence=evidence.ctypes.data,
        flags=flags.ctypes.data,
        draft_confidence=drafter.confidence or 0.0,
        check_confidence=judge.check_confidence or 0.0,
        continue_confidence=gate or 0.0,
    )
    assert batch.block_tables.is_contiguous() and batch.tokens.is_contiguous()
    committed[:, 0] = batch.tokens[:, 0].numpy()
    stages.run_linked(passes, linked, batch, places, Link(address_of_cfunc(advance), rounds))
    nothing = zeros(num_rows, batch.limits.device)
    none = nothing_noted(num_rows, nothing.device)
    return RoundResult(
        tokens=torch.from_numpy(committed),
        counts=torch.from_numpy(of_rows[Row.COMMITTED]),
        drafted=none,
        kept=none,
        source=none,
        tentative=nothing,
        accepted=nothing,
        evidence=torch.from_numpy(evidence),
        logits=None,
        span=None,
        nodes=none,
        num_rounds=rounds.num_done,
        by_round=None if plan.is_plain else torch.from_numpy(notes[: rounds.num_done]),
    )
