"""Faults of the engine's step, scheduling and blocks of KV."""

from __future__ import annotations

from .fault import Fault
from .suites import CLOCKS, CONTROL, NUMBERS, RUNS, STAGES, STATIC

FAULTS = (
    Fault(
        "prefix cache kept although its blocks lack the new exits' KV",
        "hispec/engine/engine.py",
        "        if drops_cache:\n            self._pool.forget()",
        "        if drops_cache:\n            pass",
        ("tests/laws/test_adapters.py", "tests/runner/test_adapter_plans.py"),
    ),
    Fault(
        "the prefix cache kept although scoring wrote over its blocks",
        "hispec/engine/engine.py",
        "            self._pool.forget()  # its blocks are written over\n",
        "            pass\n",
        ("tests/engine/test_scoring.py",),
    ),
    Fault(
        "KV of a padding row written (reference)",
        "cache/paged_kv.py",
        "        self._storage[layer, 0][slots] = keys.to(self.data.dtype)\n",
        "        slots = slots.clamp(min=0)\n        self._storage[layer, 0][slots] ="
        " keys.to(self.data.dtype)\n",
        ("tests/cache/test_tensors.py", "tests/ee_models/test_kernels.py"),
    ),
    Fault(
        "prefix cache fed uncommitted blocks",
        "hispec/scheduling/scheduler.py",
        "self._pool.publish(request.table, request.token_ids, num_complete)",
        "self._pool.publish(request.table, request.token_ids, min(len(request.token_ids),"
        " len(request.table.blocks) * self._pool.block_size))",
    ),
    Fault(
        "blocks without the draft model's KV are published",
        "hispec/scheduling/scheduler.py",
        "num_complete = min(num_computed, *request.gaps.values()) if request.gaps else num_computed",
        "num_complete = num_computed",
        ("tests/drafters/test_drafters.py",),
    ),
    Fault(
        "stop handled after the cap",
        "hispec/scheduling/request.py",
        "            if may_stop:",
        "            if may_stop and num_output < self.max_tokens:",
    ),
    Fault(
        "tokens after EOS are kept",
        "hispec/scheduling/request.py",
        "            if self.has_ended():\n                return taken",
        "            self.has_ended()",
    ),
    Fault(
        "a request that was preempted trusts its old computed length",
        "hispec/scheduling/kv_blocks.py",
        "request.table, request.num_computed = table, num_cached",
        "request.table, request.num_computed = table, max(request.num_computed, num_cached)",
        ("tests/laws/test_drafters.py",),
    ),
    Fault(
        "blocks that the round in flight needs are given back",
        "hispec/engine/step_loop.py",
        "release=self.flight is None)",
        "release=True)",
        STATIC,
    ),
    Fault(
        "what ended a round ago is committed once more",
        "hispec/engine/step_loop.py",
        "            if request.finish_reason is None  # else",
        "            if True  # else",
        STATIC,
    ),
    Fault(
        "blocks that lack an exit's KV are published",
        "hispec/scheduling/scheduler.py",
        "min(num_computed, *request.gaps.values()) if request.gaps else num_computed",
        "num_computed",
        CONTROL,
    ),
    Fault(
        "KV that was moved out comes back in another order",
        "cache/host_kv.py",
        "            _copy_in(kv, part, where)",
        "            _copy_in(kv, part, where.flip(0))",
        CONTROL,
    ),
    Fault(
        "no numbers: a row takes its batch along",
        "hispec/engine/step_loop.py",
        "            if not math.isfinite(outcome.evidence):",
        "            if len(rows) < len(live):",
        NUMBERS,
    ),
    Fault(
        "no numbers: drafts are not suspected",
        "hispec/engine/step_loop.py",
        "if not request.is_suspect:",
        "if False:",
        NUMBERS,
    ),
    Fault(
        "no numbers: a round ahead of the host goes on from what was not committed",
        "hispec/engine/step_loop.py",
        "            self.flight = None  # it goes on from what was not committed",
        "            pass",
        NUMBERS,
    ),
    Fault(
        "no numbers: a request that starts over takes its prefix from the cache again",
        "hispec/scheduling/kv_blocks.py",
        "if self._enable_prefix_caching and not request.is_suspect:",
        "if self._enable_prefix_caching:",
        NUMBERS,
    ),
    Fault(
        "no numbers: what is not to be trusted stays in the prefix cache",
        "hispec/scheduling/scheduler.py",
        "        self._pool.retract(request.table)",
        "        pass",
        NUMBERS,
    ),
    Fault(
        "no numbers: what is not to be trusted comes into the prefix cache again",
        "hispec/scheduling/scheduler.py",
        "if self._enable_prefix_caching and not request.is_suspect:",
        "if self._enable_prefix_caching:",
        NUMBERS,
    ),
    Fault(
        "memory: after a request that fits nowhere the others stay one by one",
        "hispec/engine/step_loop.py",
        "            scheduler.widen()",
        "            pass",
        STAGES,
    ),
    Fault(
        "memory: what logprobs lack stops the engine",
        "hispec/engine/step_loop.py",
        'self._reduce_capacity(live, "a round", error)',
        "raise",
        STAGES,
    ),
    Fault(
        "a clock that goes back makes negative service",
        "hispec/engine/step_loop.py",
        "        if seconds < 0.0:",
        "        if seconds < -math.inf:",
        CLOCKS,
    ),
    Fault(
        "a clock that goes back ends requests before they came",
        "hispec/scheduling/request.py",
        "if now_s < before_s:",
        "if False:",
        CLOCKS,
    ),
    Fault(
        "tiers: of a cut round all are kept",
        "hispec/scheduling/request.py",
        "tiers=_first(self.tiers, token_ids)",
        "tiers=self.tiers",
    ),
    Fault(
        "rounds run on where the controller is to choose",
        "hispec/engine/step_loop.py",
        "self._recorder.control.rounds_left, scheduler.rounds_until_review",
        "1 << 62, scheduler.rounds_until_review",
        RUNS,
    ),
    Fault(
        "rounds run on where the policy is to review who runs",
        "hispec/engine/step_loop.py",
        "self._recorder.control.rounds_left, scheduler.rounds_until_review",
        "self._recorder.control.rounds_left, 1 << 62",
        RUNS,
    ),
)
