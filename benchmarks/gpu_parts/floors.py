"""Stages alone: how long each takes, and how long it must take, since it has to read its weights and its
context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.gpu_parts.run import Bench
from cache.paged_kv import PagedKV
from ee_models.decoder import Decoder
from ee_models.exits import Exit
from hispec.config import PLAIN, Plan
from hispec.measure.stage_bench import Rig


def bytes_read(decoder: Decoder, lo: int, hi: int, num_heads: int, rows: int, context: int) -> int:
    """What a pass over layers [lo, hi) has to read: their weights, `num_heads` times the head's, and keys and
    values of `rows` contexts. Activations, norms and rows of the embedding are left out: they are few, and
    mostly in the cache."""
    config = decoder.config
    weights = sum(linear.num_bytes for layer in decoder._layers[lo:hi] for linear in layer.linears)
    shape = context, config.num_kv_heads, config.head_dim
    kv = rows * PagedKV.bytes_per_block(hi - lo, *shape, decoder.kv_dtype)
    return weights + num_heads * decoder.head.num_bytes + kv


def stages_of(plan: Plan) -> dict[str, tuple[int, int, int, int, int]]:
    """(how often in a round, positions of a row, first layer, last layer or -1, heads) of each stage of a
    round, of a chain drafted by an exit."""
    if plan.is_plain:
        return {"plain": (1, 1, 0, -1, 1)}
    drafts, checks = plan.num_draft_tokens, plan.num_checks
    stages = {
        "draft": (checks * drafts, 1, 0, plan.draft_layer, 1),
        "fill": (checks, 1, 0, plan.draft_layer, 0),
    }
    if plan.check_layer is None:
        return stages | {"verify": (1, drafts + 1, plan.draft_layer, -1, 1)}
    stages["check"] = (checks, drafts + 1, plan.draft_layer, plan.check_layer, 1)
    return stages | {"verify": (1, checks * (drafts + 1), plan.check_layer, -1, 1)}


def round_against_stages(
    bench: Bench,
    decoder: Decoder,
    exits: Sequence[Exit],
    plan: Plan | None,
    context: Sequence[int],
    rows: int,
) -> dict[str, Any]:
    """Milliseconds of each stage of a round measured alone, its floor, and their sums over the round; None =
    plain decoding."""
    plan = plan or PLAIN
    stages = stages_of(plan)
    rig = Rig(decoder, exits, context, rows, plan.window if not plan.is_plain else 1)
    try:
        runs = {}
        for name, (_, q_len, lo, hi, _) in stages.items():
            if name == "plain":
                runs[name] = rig.plain(rows)
            elif name == "draft":
                runs[name] = rig.draft(rows, 1, hi)
            elif name == "fill":
                runs[name] = rig.fill(rows, 1, hi)
            else:
                runs[name] = (
                    rig.check(rows, q_len, lo, hi) if name == "check" else rig.verify(rows, q_len, lo)
                )
        times = bench.clock.medians(
            runs, samples=2 if bench.is_tiny else 7, repeats=2 if bench.is_tiny else 20
        )
    finally:
        rig.close()
    found: dict[str, Any] = {}
    adapters = {exit_.layer: exit_.num_bytes for exit_ in exits}
    for name, (times_a_round, q_len, lo, hi, heads) in stages.items():
        last = decoder.config.num_layers if hi < 0 else hi
        own = adapters.get(last, 0) if heads else 0
        floor = (bytes_read(decoder, lo, last, heads, rows, len(context)) + own) / bench.bandwidth * 1e3
        found[name] = {
            "ms": times[name],
            "floor_ms": floor,
            "ms / floor": times[name] / floor,
            "in_a_round": times_a_round,
            "positions": q_len,
        }
    sums = {
        key: sum(stage[source] * stage["in_a_round"] for stage in found.values())
        for key, source in (("sum_ms", "ms"), ("floor_ms", "floor_ms"))
    }
    return {"context": len(context), "stages": found, **sums}
