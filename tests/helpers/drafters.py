"""Drafters for tests: settings of every kind over the tiny model, and drafters that misbehave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ee_models.checkpoint.ngram_file import Ngrams
from ee_models.decoder import Decoder
from hispec.config import EngineConfig, SchedulingConfig, SpeculativeConfig
from hispec.decoding.acceptance import Proposals, Source
from hispec.decoding.batch import RoundBatch
from hispec.decoding.draft_tree import DraftTree
from hispec.decoding.drafter import Draft, Drafter
from hispec.drafters.ngram_table import NgramTable, make_table
from hispec.engine import Engine
from hispec.errors import build
from hispec.runner.cuda_graphs import GraphDevice

SHORT = {"max_size": 3, "min_size": 1, "match_confidence": None}
GUESSES = {**SHORT, "min_size": 2, "guess_confidence": 0.3}
CHECK = {"layer": 6}

# One or more of every kind, with and without a check tier.
KINDS: dict[str, dict[str, Any]] = {
    "ngram": {"draft": {"kind": "ngram", "ngram": SHORT}, "num_draft_tokens": 5},
    "ngram by length": {
        "draft": {"kind": "ngram", "ngram": {"match_confidence": 0.5, "datastore_tokens": 1024}},
        "num_draft_tokens": 4,
    },
    "ngram guesses": {"draft": {"kind": "ngram", "ngram": GUESSES}, "num_draft_tokens": 4},
    "ngram check": {
        "draft": {"kind": "ngram", "ngram": SHORT},
        "check": CHECK,
        "num_draft_tokens": 3,
        "num_checks": 1,
    },
    "ngram checks": {
        "draft": {"kind": "ngram", "ngram": SHORT},
        "check": {"layer": 8},
        "num_draft_tokens": 2,
        "num_checks": 3,
    },
    "ngram lenient check": {
        "draft": {"kind": "ngram", "ngram": SHORT},
        "check": {"layer": 8, "confidence": 0.6},
        "num_draft_tokens": 3,
        "num_checks": 2,
    },
    "ngram gated": {
        "draft": {"kind": "ngram", "ngram": SHORT},
        "check": {"layer": 8, "continue_confidence": 0.6},
        "num_draft_tokens": 2,
        "num_checks": 4,
    },
    "exit gated": {
        "draft": {"layer": 5},
        "check": {"layer": 8, "continue_confidence": 0.5},
        "num_draft_tokens": 2,
        "num_checks": 3,
    },
    "hybrid": {
        "draft": {"kind": "hybrid", "layer": 3, "exit": "exit", "ngram": SHORT, "num_exit_tokens": 1},
        "num_draft_tokens": 4,
    },
    "hybrid sure": {
        "draft": {"kind": "hybrid", "layer": 5, "exit": "exit", "num_exit_tokens": 2},
        "num_draft_tokens": 3,
        "draft_confidence": 0.4,
    },
    "hybrid checks": {
        "draft": {"kind": "hybrid", "layer": 3, "exit": "exit", "ngram": SHORT},
        "check": CHECK,
        "num_draft_tokens": 2,
        "num_checks": 2,
    },
    "hybrid sure gated": {
        "draft": {"kind": "hybrid", "layer": 5, "exit": "exit", "num_exit_tokens": 2},
        "check": {"layer": 8, "confidence": 0.3, "continue_confidence": 0.7},
        "num_draft_tokens": 3,
        "num_checks": 3,
        "draft_confidence": 0.4,
    },
    "hybrid guesses gated": {
        "draft": {"kind": "hybrid", "layer": 3, "exit": "exit", "num_exit_tokens": 1, "ngram": GUESSES},
        "check": {"layer": 8, "confidence": 0.3, "continue_confidence": 0.5},
        "num_draft_tokens": 3,
        "num_checks": 2,
    },
    "model": {"draft": {"kind": "model", "path": "tiny"}, "num_draft_tokens": 3},
    "model sure": {
        "draft": {"kind": "model", "path": "tiny"},
        "num_draft_tokens": 3,
        "draft_confidence": 0.3,
    },
    "model checks": {
        "draft": {"kind": "model", "path": "tiny"},
        "check": CHECK,
        "num_draft_tokens": 2,
        "num_checks": 2,
    },
    "model gated": {
        "draft": {"kind": "model", "path": "tiny"},
        "check": {"layer": 8, "continue_confidence": 0.5},
        "num_draft_tokens": 1,
        "num_checks": 5,
    },
}
TREES: dict[str, dict[str, Any]] = {
    "tree": {"draft": {"layer": 3}, "num_draft_tokens": 2, "num_branches": 3},
    "leaves": {"draft": {"layer": 8}, "num_draft_tokens": 1, "num_branches": 5},
    "tree check": {
        "draft": {"layer": 5},
        "check": {"layer": 8},
        "num_draft_tokens": 2,
        "num_checks": 1,
        "num_branches": 2,
    },
    "tree checks": {
        "draft": {"layer": 3},
        "check": CHECK,
        "num_draft_tokens": 3,
        "num_checks": 2,
        "num_branches": 2,
    },
    "tree lenient check": {
        "draft": {"layer": 5},
        "check": {"layer": 8, "confidence": 0.7},
        "num_draft_tokens": 2,
        "num_checks": 2,
        "num_branches": 3,
    },
    "tree gated": {
        "draft": {"layer": 5},
        "check": {"layer": 8, "continue_confidence": 0.6},
        "num_draft_tokens": 2,
        "num_checks": 3,
        "num_branches": 2,
    },
    "model tree": {"draft": {"kind": "model", "path": "tiny"}, "num_draft_tokens": 2, "num_branches": 3},
}
ALL = KINDS | TREES


def make_guess_table(device: torch.device, path: str | None = None) -> NgramTable:
    """After half of all tokens something is guessed, and with another token before it something else."""
    tokens = np.arange(0, 256, 2)
    shares = (tokens * 37 % 200 + 56).astype(np.uint8)
    pairs = np.stack([tokens[::-1] + 1, tokens], axis=1)
    ngrams = {
        1: Ngrams(tokens[:, None], tokens * 7 % 256, shares),
        2: Ngrams(pairs, tokens * 5 % 256, shares[::-1]),
    }
    return make_table(path, ngrams, device)


def drafter_engine(
    decoder: Any,
    values: dict[str, Any],
    draft_model: Any = None,
    eos: tuple[int, ...] = (),
    *,
    is_static: bool = False,
    graph_device: GraphDevice | None = None,
    swap_bytes: int = 1 << 30,
    **config: Any,
) -> Engine:
    """As `support.make_engine`, by fields of SpeculativeConfig; `draft_model` is left out if they name
    none."""
    fields: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_model_len": 256,
        "block_size": 8,
        "num_kv_blocks": 256,
        "max_prefill_tokens": 32,
        "max_run_ms": 10_000.0,  # so that the machine's speed decides nothing
        **config,
    }
    speculative = build(SpeculativeConfig, values)
    wants_model = speculative.draft.kind == "model"
    return Engine(
        decoder,
        EngineConfig(**fields),
        speculative,
        draft_model=draft_model if wants_model else None,
        tables=[make_guess_table(decoder.device, path) for path in speculative.guess_paths],
        eos_token_ids=eos,
        scheduling=SchedulingConfig(swap_bytes=swap_bytes),
        is_static=is_static,
        graph_device=graph_device,
    )


class FixedDrafter(Drafter):
    """Proposes what `tokens` says of (row, column): a list, however long. Looked up, for all that a judge
    knows."""

    def __init__(self, tokens: Callable[[int, int], list[int]]) -> None:
        self._tokens = tokens
        self.num_asked = 0

    def propose(self, batch: RoundBatch, first: Tensor, tree: DraftTree) -> Draft:
        self.num_asked += 1
        counts = torch.zeros_like(first)
        for row, column in enumerate(first.tolist()):
            tokens = self._tokens(row, column)
            counts[row] = len(tokens)
            room = batch.tokens.shape[1] - column - 1
            batch.tokens[row, column + 1 : column + 1 + len(tokens)] = torch.tensor(
                tokens[:room], dtype=torch.int64
            )
        return Draft(Proposals(tree, first, counts), torch.full_like(first, Source.LOOKED_UP))


def with_drafter(engine: Engine, drafter: Any) -> Engine:
    """The engine, with another drafter in the place of its own."""
    engine._plans.runtime = replace(engine._runtime, drafter=drafter)
    return engine


def draft_decoder(path: Any) -> Decoder:
    from ee_models.checkpoint.loader import open_checkpoint

    return Decoder.load(open_checkpoint(path), torch.float32, torch.device("cpu"))
