"""The faults that `make faults` plants: what is right, what is wrong instead, and which tests should
notice."""

from __future__ import annotations

import re
from dataclasses import dataclass

LAWS = (
    "tests/laws/test_exact.py",
    "tests/decoding/test_scripted_patterns.py",
    "tests/laws/test_engine.py",
    "tests/laws/test_finish.py",
)
TIERS = ("tests/laws/test_tiers.py",)
GATE = ("tests/decoding/test_gate.py",)
STATIC = ("tests/laws/test_static.py",)
CONTROL = ("tests/laws/test_control.py",)
EARLY_EXIT = ("tests/training/test_early_exit.py",)
INTEGERS = ("tests/ee_models/test_int_linear.py",)
JOBS = ("tests/jobs/test_resume.py", "tests/jobs/test_output.py")
PACKAGE = ("tests/training/test_command_ee.py",)
UPLOADS = ("tests/jobs/test_upload.py",)
NUMBERS = ("tests/faults/test_numbers.py", "tests/scheduling/test_scheduler.py")
STAGES = ("tests/faults/test_stages.py",)
CLOCKS = ("tests/faults/test_clocks.py",)
METRICS = ("tests/metrics/test_latencies.py",)
FILES = ("tests/faults/test_files.py",)


@dataclass(frozen=True)
class Fault:
    """`right`, a piece of `file`, is found however the formatter laid it out: line breaks, indentation and
    commas before a closing bracket do not matter."""

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...] = LAWS

    def find(self, text: str) -> list[re.Match[str]]:
        """The places of `text` that read `right`."""
        characters = re.sub(r",(?=[)\]}])", "", "".join(self.right.split()))
        pattern = (",?\\s*" * (c in ")]}") + re.escape(c) for c in characters)
        return list(re.finditer("\\s*".join(pattern), text))

    def plant(self, text: str) -> str:
        """`text` with `wrong` at its only place, indented as the line where that begins. Raises ValueError
        if there is not exactly one place."""
        places = self.find(text)
        if len(places) != 1:
            raise ValueError(
                f"{self.name}: {self.file} has {len(places)} places that read {self.right!r};"
                " bring scripts/faults.py up to date"
            )
        start, end = places[0].span()
        line = text[text.rfind("\n", 0, start) + 1 :]
        shift = _indent(line) - _indent(self.right.lstrip("\n")) if self.right[:1].isspace() else 0
        first, *others = self.wrong.strip().split("\n") if self.wrong.strip() else [""]
        lines = [first, *(" " * (_indent(other) + shift) + other.lstrip() for other in others)]
        return text[:start] + "\n".join(lines) + text[end:]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


FAULTS = (
    Fault(
        "rollback off by one: a rejected position counts as computed",
        "hispec/decoding/row_steps_numba.py",
        "count = min(accepted[row] + 1, num_live[row])",
        "count = min(accepted[row] + 2, num_live[row])",
    ),
    Fault(
        "rollback off by one: the round starts a position early",
        "hispec/runner/rows.py",
        "start, room = len(request.token_ids) - 1,",
        "start, room = len(request.token_ids) - 2,",
    ),
    Fault(
        "a stale hidden row: the last draft's is not stored",
        "hispec/drafters/autoregressive.py",
        "            self._head.fill(batch, span)\n            return num_live",
        "            return num_live",
    ),
    Fault(
        "adapter KV of the last draft is not written (what Kangaroo has to catch up)",
        "hispec/decoding/stages.py",
        "if read else exit_.fill_steps(kv_layer)",
        "if read else [] if stop == hi else exit_.fill_steps(kv_layer)",
        ("tests/laws/test_adapters.py", "tests/runner/test_adapter_plans.py"),
    ),
    Fault(
        "adapter KV is not filled at prefill",
        "hispec/decoding/stages.py",
        "0, self.num_layers, view, self._exits)",
        "0, self.num_layers, view, ())",
        ("tests/laws/test_adapters.py", "tests/runner/test_adapter_plans.py"),
    ),
    Fault(
        "two exits share a layer of KV",
        "hispec/decoding/stages.py",
        "            kv_layer += exit_.num_kv_layers\n",
        "",
        ("tests/laws/test_adapters.py", "tests/runner/test_adapter_plans.py"),
    ),
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
        "bonus token taken from the wrong position",
        "hispec/decoding/acceptance.py",
        "return num_accepted, last, _at(own, last)",
        "return num_accepted, last, _at(own, (last - 1).clamp(min=0))",
        STATIC,
    ),
    Fault(
        "bonus token taken from the wrong position (numba)",
        "hispec/decoding/accept_numba.py",
        "own[min(begin + kept, end - 1)]",
        "own[max(begin, begin + kept - 1)]",
        ("tests/decoding/test_accept_numba.py", "tests/decoding/test_stages.py"),
    ),
    Fault(
        "a draft of the cycle before is judged (numba)",
        "hispec/decoding/accept_numba.py",
        "tokens[row, first[row] + kept + 1]",
        "tokens[row, kept + 1]",
        ("tests/decoding/test_accept_numba.py", "tests/decoding/test_stages.py"),
    ),
    Fault(
        "a packed pass writes to the slots of another row (numba)",
        "hispec/decoding/addresses_numba.py",
        "tables[row, position // block_size]",
        "tables[rows - 1 - row, position // block_size]",
        ("tests/decoding/test_accept_numba.py", "tests/decoding/test_stages.py"),
    ),
    Fault(
        "a token in int8 takes its neighbour's scale",
        "ee_models/kernels/numba_int8.py",
        "of_x = spread(builder, load(builder, row, of_group, FLOAT))",
        "of_x = spread(builder, load(builder, rows[0], of_group, FLOAT))",
        INTEGERS,
    ),
    Fault(
        "bytes are multiplied pair by pair, a token's in another order than weights",
        "ee_models/kernels/numba_int8.py",
        "for place in (0, 2, 1, 3)]",
        "for place in (0, 1, 2, 3)]",
        INTEGERS,
    ),
    Fault(
        "bytes are multiplied one by one, the last twice",
        "ee_models/kernels/numba_int8.py",
        "bits] * WIDTH) for bits in (24 - 8 * byte, 24))",
        "bits] * WIDTH) for bits in (24 - 8 * max(1, byte), 24))",
        INTEGERS,
    ),
    Fault(
        "int8 takes the scales of the first group for all",
        "ee_models/kernels/numba_int8.py",
        "load_half(builder, group, ",
        "load_half(builder, builder.add(panel, INT(HEAD)), ",
        INTEGERS,
    ),
    Fault(
        "int8 takes 128 away once too little",
        "ee_models/kernels/numba_int8.py",
        "INT32(-128)",
        "INT32(-127)",
        INTEGERS,
    ),
    Fault(
        "a share of int8 or int4 panels begins one too late",
        "ee_models/kernels/numba_int.py",
        "range(share * num_panels // num_shares, (share + 1)",
        "range(share * num_panels // num_shares + (share > 0), (share + 1)",
        INTEGERS,
    ),
    Fault(
        "int4 takes the scales and minima of the first group for all",
        "ee_models/kernels/numba_int4.py",
        "load_half(builder, group, INT(2 * (",
        "load_half(builder, builder.add(panel, INT(HEAD)), INT(2 * (",
        INTEGERS,
    ),
    Fault(
        "int4 takes a token's minima times its neighbour's sums",
        "ee_models/kernels/numba_int4.py",
        "spread(builder, load(builder, row, of_group, FLOAT))",
        "spread(builder, load(builder, rows[0], of_group, FLOAT))",
        INTEGERS,
    ),
    Fault(
        "int4 leaves out the minimum of a group",
        "ee_models/kernels/numba_int4.py",
        "add_product(builder, total[i], minimum,",
        "add_product(builder, total[i], _alike(0.0),",
        INTEGERS,
    ),
    Fault(
        "a token in int4 takes its neighbour's scale",
        "ee_models/kernels/numba_int4.py",
        "of_token = spread(builder, load(builder, row, scale, FLOAT))",
        "of_token = spread(builder, load(builder, rows[0], scale, FLOAT))",
        INTEGERS,
    ),
    Fault(
        "int4's sums of a token leave out the last input of a group",
        "ee_models/kernels/numba_int4.py",
        "range(group * GROUP, (group + 1) * GROUP)",
        "range(group * GROUP, (group + 1) * GROUP - 1)",
        INTEGERS,
    ),
    Fault(
        "a scale in float16 loses its lowest bits",
        "ee_models/kernels/numba_vectors.py",
        "0x8FFFE000",
        "0x8FFF0000",
        INTEGERS,
    ),
    Fault(
        "layers in one call split tokens for int4 as for int8",
        "ee_models/fused_kernel.py",
        "numba_int.split_tokens(bits, x,",
        "numba_int.split_tokens(8, x,",
        ("tests/ee_models/test_fused_pass.py",),
    ),
    Fault(
        "layers in one call project what attention has read, not what it found",
        "ee_models/fused_kernel.py",
        "_project(c, step.bits, c.attended, size_q,",
        "_project(c, step.bits, c.q, size_q,",
        ("tests/ee_models/test_fused_pass.py",),
    ),
    Fault(
        "the original is compared in rows that were not drawn",
        "ee_models/training/early_exit.py",
        "soft_label_loss(last[here], self.original(rows), head.detach())",
        "soft_label_loss(last[: len(here)], self.original(rows), head.detach())",
        EARLY_EXIT,
    ),
    Fault(
        "every panel takes the first one's bias",
        "ee_models/kernels/numba_gemm.py",
        "bias + number * 4 * COLUMNS",
        "bias",
        ("tests/ee_models/test_panel_linear.py",),
    ),
    Fault(
        "a second tile of tokens reads the first one's inputs",
        "ee_models/kernels/numba_gemm.py",
        "rows = x + first * bytes_per_x, bytes_per_x",
        "rows = x, bytes_per_x",
        ("tests/ee_models/test_panel_linear.py", "tests/ee_models/test_linear.py"),
    ),
    Fault(
        "layers in one call write the KV of the first",
        "ee_models/fused_kernel.py",
        "start = step.kv_layer * c.bytes_per_kv_layer",
        "start = 0",
        ("tests/ee_models/test_fused_pass.py",),
    ),
    Fault(
        "layers in one call forget the last one's output",
        "ee_models/fused_kernel.py",
        "numbers[i] += delta[i]",
        "numbers[i] += 0 * delta[i]",
        ("tests/ee_models/test_fused_pass.py",),
    ),
    Fault(
        "passes in one call write no KV of exits on the way",
        "hispec/decoding/stages.py",
        "for stop in sorted({layer for layer in self._written if lo < layer < hi} | {hi}):\n"
        "            steps +=",
        "for stop in (hi,):\n            steps +=",
        ("tests/laws/test_control.py", "tests/laws/test_adapters.py"),
    ),
    Fault(
        "an exit's columns are taken for tokens",
        "ee_models/fused_kernel.py",
        "if step.vocabulary != 0",
        "if step.vocabulary == -1",
        ("tests/ee_models/test_fused_pass.py",),
    ),
    Fault(
        "the likeliest token is taken where penalties have a say",
        "hispec/sampling/sampler.py",
        "return not (self._any_sampled or self._active)",
        "return not self._any_sampled",
        ("tests/laws/test_sampled.py", "tests/laws/test_exact.py"),
    ),
    Fault(
        "exits are not filled by passes in one call",
        "ee_models/exits.py",
        "if first else [last]",
        "if first else []",
        ("tests/laws/test_adapters.py",),
    ),
    Fault(
        "exits with several blocks fill their first one's KV",
        "ee_models/exits.py",
        "last = replace(last, kind=Kind.FILL)",
        "last = replace(last, kind=Kind.FILL, kv_layer=kv_layer)",
        ("tests/ee_models/test_fused_pass.py",),
    ),
    Fault(
        "a pass in one call leaves hidden states in their order",
        "ee_models/fused_kernel.py",
        "_copy_rows(c.hidden, 0, c.target, c.target_rows, width, first, last)",
        "_copy_rows(c.hidden, 0, c.target, 0, width, first, last)",
        ("tests/laws/test_exact.py", "tests/laws/test_layers.py"),
    ),
    Fault(
        "an exit works on the trunk's own hidden states",
        "ee_models/fused_kernel.py",
        "            hidden, has_delta = c.aside, False\n",
        "            hidden, has_delta = c.hidden, False\n",
        ("tests/ee_models/test_fused_pass.py",),
    ),
    Fault(
        "of equal logits the last token is chosen",
        "ee_models/kernels/numba_scan.py",
        "if peaks[i] > peak:",
        "if peaks[i] >= peak:",
        ("tests/sampling/test_scan.py",),
    ),
    Fault(
        "a query of another token's turn gets weight",
        "ee_models/attention/numba_pages.py",
        "end = i + num_in_turn * group",
        "end = (kv_head - first_head + 1) * num_per_head",
        ("tests/ee_models/test_attention_trees.py",),
    ),
    Fault(
        "sums and totals do not shrink with a new peak",
        "ee_models/attention/numba_products.py",
        "shrink, alike = exp(builder, builder.fsub(before, after)), spread(builder, after)",
        "shrink, alike = FLOAT(1.0), spread(builder, after)",
        ("tests/ee_models/test_attention.py",),
    ),
    Fault(
        "KV of a padding row written (numba)",
        "ee_models/kernels/cpu.py",
        "            if not is_query and slot < 0:\n                break\n",
        "",
        ("tests/ee_models/test_kernels.py",),
    ),
    Fault(
        "KV in bfloat16 is cut off, not rounded",
        "ee_models/kernels/numba_vectors.py",
        "builder.add(builder.add(whole, _every(bits, 0x7FFF)), odd)",
        "builder.add(whole, _every(bits, 0))",
        ("tests/ee_models/test_kernels.py",),
    ),
    Fault(
        "values in bfloat16 are read at the steps of float32",
        "ee_models/attention/numba_pages.py",
        "some_values, some_sums = (of_values + size * d,",
        "some_values, some_sums = (of_values + 4 * d,",
        ("tests/ee_models/test_attention.py",),
    ),
    Fault(
        "layers in one call find KV in float32 at the steps of bfloat16",
        "ee_models/fused_pass.py",
        "call.bytes_per_kv_layer = call.kv_size * kv.data.stride(0)",
        "call.bytes_per_kv_layer = 2 * kv.data.stride(0)",
        ("tests/ee_models/test_fused_pass.py",),
    ),
    Fault(
        "weights that bfloat16 would round are held in it",
        "ee_models/kernels/numba_gemm.py",
        "for part in (weight[:8], weight))",
        "for part in (weight[:8],))",
        ("tests/ee_models/test_panel_linear.py",),
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
        "a prompt that the draft model failed at counts as whole",
        "hispec/runner/prefill.py",
        """                chunk.request.gaps.setdefault("model", chunk.start)""",
        "                pass",
        ("tests/drafters/test_drafters.py",),
    ),
    Fault(
        "a draft model is not told of prompts",
        "hispec/runner/prefill.py",
        "                drafter.prefill(token_ids, view)",
        "                pass",
        ("tests/laws/test_drafters.py",),
    ),
    Fault(
        "a draft model's KV stays where the tree put it",
        "hispec/decoding/round.py",
        "            self.drafter.move(self.batch, sources, targets)\n",
        "            pass\n",
        ("tests/laws/test_drafters.py",),
    ),
    Fault(
        "the accepted path's KV stays where the tree put it",
        "hispec/decoding/stages.py",
        "        self._kv.move(0, layer, slots_from, slots_to)\n",
        "",
        ("tests/laws/test_drafters.py",),
    ),
    Fault(
        "the accepted path's hidden states stay where the tree put them",
        "hispec/decoding/stages.py",
        "            self._hidden.move(\n",
        "            (lambda *_: None)(\n",
        ("tests/laws/test_drafters.py",),
    ),
    Fault(
        "a node attends to its older sibling",
        "hispec/decoding/stages.py",
        "paths = first.unsqueeze(-1) + shape.paths[node, 1:]",
        "paths = first.unsqueeze(-1) + shape.paths[node, 1:].clamp(max=1)",
        ("tests/laws/test_drafters.py",),
    ),
    Fault(
        "penalties see a node's siblings",
        "hispec/sampling/inputs.py",
        "        if self.first is None or self.paths is None:",
        "        if True:",
        ("tests/laws/test_drafters.py", "tests/decoding/test_draft_tree.py"),
    ),
    Fault(
        "a looked-up draft has no probability in the rejection test",
        "hispec/drafters/ngram.py",
        "        self._judge.record_lookups(batch, proposals)\n",
        "",
        (
            "tests/laws/test_rejection.py",
            "tests/decoding/test_draft_tree.py",
            "tests/drafters/test_drafters.py",
        ),
    ),
    Fault(
        "prompt lookup keeps the text of the request that had its place before",
        "hispec/drafters/ngram.py",
        "                self._lookup.reset(index_row, token_ids)\n            elif",
        "                self._lookup.append(index_row, token_ids)\n            elif",
        ("tests/drafters/test_drafters.py", "tests/laws/test_drafters.py"),
    ),
    Fault(
        "q and p swapped in the test of acceptance",
        "hispec/decoding/acceptance.py",
        "uniform * q_of < p_of",
        "uniform * p_of < q_of",
        ("tests/laws/test_rejection.py", "tests/decoding/test_acceptance.py"),
    ),
    Fault(
        "q and p swapped in the residual",
        "hispec/decoding/acceptance.py",
        "(target - q[rows, last])",
        "(q[rows, last] - target)",
        ("tests/laws/test_rejection.py", "tests/decoding/test_acceptance.py"),
    ),
    Fault(
        "rejection: verify passes over the last tentative token",
        "hispec/decoding/round.py",
        "zeros(batch.num_rows, device), num_put)",
        "zeros(batch.num_rows, device), num_put - 1)",
        ("tests/laws/test_rejection.py",),
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
        "noise keyed by row instead of seed",
        "hispec/sampling/sampler.py",
        "noise.keys(self._seeds[at.rows], at.positions",
        "noise.keys(at.rows, at.positions",
        ("tests/laws/test_sampled.py", "tests/test_llm.py"),
    ),
    Fault(
        "penalties do not see tentative tokens",
        "hispec/sampling/inputs.py",
        "(columns >= 1) & (columns <= self.columns.unsqueeze(-1))",
        "(columns < 0) & (columns <= self.columns.unsqueeze(-1))",
        ("tests/laws/test_sampled.py", "tests/sampling/test_sampler.py"),
    ),
    Fault(
        "verify resumes at the draft's hidden states",
        "hispec/decoding/round.py",
        "below = Tier.CHECK if has_check else Tier.DRAFT",
        "below = Tier.DRAFT",
    ),
    Fault(
        "a request that was preempted trusts its old computed length",
        "hispec/scheduling/kv_blocks.py",
        "request.table, request.num_computed = table, num_cached",
        "request.table, request.num_computed = table, max(request.num_computed, num_cached)",
        ("tests/laws/test_drafters.py",),
    ),
    Fault(
        "padding places keep their hidden states",
        "hispec/decoding/stages.py",
        "(row * batch.window + column).masked_fill(~alive, -1)",
        "row * batch.window + column",
        STATIC,
    ),
    Fault(
        "padding places write their KV",
        "hispec/decoding/stages.py",
        "batch.block_size).masked_fill(~alive, -1)",
        "batch.block_size)",
        STATIC,
    ),
    Fault(
        "the round in flight begins with a token before the last committed one",
        "hispec/runner/round_inputs.py",
        "gather(1, counts.unsqueeze(1))",
        "gather(1, (counts - 1).clamp(min=0).unsqueeze(1))",
        STATIC,
    ),
    Fault(
        "the round in flight may output more than is left",
        "hispec/runner/round_inputs.py",
        "    room -= counts\n",
        "",
        STATIC,
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
        "the next round begins before the results of this one are copied",
        "hispec/runner/launchers.py",
        "        self._downloads.settle()  # a replay writes where the round before has left its results\n",
        "",
        ("tests/runner/test_downloads.py",),
    ),
    Fault(
        "a stage's graph reads another round's limits",
        "hispec/runner/round_inputs.py",
        "torch.minimum(cap, room, out=limits)",
        "torch.minimum(cap, room)",
        STATIC,
    ),
    Fault(
        "a failed capture ends the step",
        "hispec/runner/cuda_graphs.py",
        "            self._refuse((key, stage), error)\n            return\n",
        "            raise\n",
        STATIC,
    ),
    Fault(
        "a capture that failed is tried again in each round",
        "hispec/runner/cuda_graphs.py",
        "        self._failed.add(key)\n",
        "        pass\n",
        STATIC,
    ),
    Fault(
        "a capture's passes are counted too",
        "hispec/runner/cuda_graphs.py",
        "                counter.set(earlier)\n",
        "                pass\n",
        STATIC,
    ),
    Fault(
        "tokens of a round that failed count for penalties",
        "hispec/runner/round_runner.py",
        "        self._loaded = None\n\n    def warm_up",
        "        pass\n\n    def warm_up",
        ("tests/engine/test_kv_sizing.py",),
    ),
    Fault(
        "the sampler's mode is no part of a graph's key",
        "hispec/runner/launchers.py",
        "context_len, self._sampler.mode, rows",
        "context_len, rows",
        STATIC,
    ),
    Fault(
        "KV that an exit lacks is not backfilled",
        "hispec/runner/backfill.py",
        "            runtime.stages.backfill(token_ids, view, layers)",
        "            pass",
        CONTROL,
    ),
    Fault(
        "a pass writes no KV of exits on the way",
        "hispec/decoding/stages.py",
        "{*self._written, *watched}, pass_by)",
        "watched, pass_by)",
        CONTROL,
    ),
    Fault(
        "blocks that lack an exit's KV are published",
        "hispec/scheduling/scheduler.py",
        "min(num_computed, *request.gaps.values()) if request.gaps else num_computed",
        "num_computed",
        CONTROL,
    ),
    Fault(
        "a round that began late is where a gap begins",
        "hispec/runner/backfill.py",
        "request.gaps.setdefault(source, request.num_computed)",
        "request.gaps[source] = request.num_computed",
        CONTROL,
    ),
    Fault(
        "a request drafts more than it may",
        "hispec/decoding/row_steps_numba.py",
        "num_nodes)\n        if most_drafts.shape[0] > 0:",
        "num_nodes)\n        if False:",
        ("tests/decoding/test_row_steps.py",),
    ),
    Fault(
        "shadows are read one place late",
        "hispec/decoding/batch.py",
        "valid & (chosen == tokens[:, 1:])",
        "valid & (chosen == tokens[:, :-1])",
        CONTROL,
    ),
    Fault(
        "whether exits are watched is no part of a graph's key",
        "hispec/runner/launchers.py",
        "rows.keeps_logits, watches)",
        "rows.keeps_logits)",
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
        "all of an exit's gradient reaches the trunk",
        "ee_models/training/early_exit.py",
        "hidden = torch.lerp(hidden.detach(), hidden, share)",
        "",
        EARLY_EXIT,
    ),
    Fault(
        "the last layer learns from its exits",
        "ee_models/training/losses.py",
        "return _CrossEntropy.apply(normed, head, final.detach())",
        "return _CrossEntropy.apply(final, head, normed.detach())",
        EARLY_EXIT,
    ),
    Fault(
        "the original that a model is held to is the model in training",
        "ee_models/training/early_exit.py",
        "        with self.without_lora():\n            found",
        "        if True:\n            found",
        EARLY_EXIT,
    ),
    Fault(
        "micro-batches count alike whatever their size",
        "ee_models/training/early_exit.py",
        "MicroBatch(batch, len(batch.targets) / total, rows)",
        "MicroBatch(batch, 1 / len(batches), rows)",
        EARLY_EXIT,
    ),
    Fault(
        "a package is merged without its scale",
        "ee_models/checkpoint/low_rank.py",
        "self.scale * total",
        "total",
        PACKAGE,
    ),
    Fault(
        "a package is added to whatever model is there",
        "ee_models/checkpoint/ee_package.py",
        "        check_base_model(self.about.base_model, base, what, remedy, PackageError)",
        "        print(what, remedy, check_base_model)",
        PACKAGE,
    ),
    Fault(
        "gate: where the check is unsure, its own token is dropped",
        "hispec/decoding/row_steps_numba.py",
        "        out[row] = end\n",
        "        stops = goes_on.shape[0] > 0 and not goes_on[row] and end > 1\n"
        "        out[row] = end - 1 if stops else end\n",
        ("tests/laws/test_rejection.py",),
    ),
    Fault(
        "gate: a row that has stopped goes on writing",
        "hispec/decoding/batch.py",
        "self.limits.copy_(torch.where(which, columns, self.limits))",
        "self.limits.copy_(torch.where(which, columns + 1, self.limits))",
        GATE,
    ),
    Fault(
        "gate: of the row beside it",
        "hispec/decoding/batch.py",
        "return (self.view.cu_q_lens[:-1] + nodes).clamp(max=self.num_tokens - 1)",
        "return (self.view.cu_q_lens[:-1] + nodes).roll(1).clamp(max=self.num_tokens - 1)",
        GATE,
    ),
    Fault(
        "gate: of the cycle's first place, not of the check's own token",
        "hispec/decoding/round.py",
        "own = logits.max_probability(span.index_of(verdict.last))",
        "own = logits.max_probability(span.index_of(verdict.last * 0))",
        GATE,
    ),
    Fault(
        "gate: not asked in rounds of static shape",
        "hispec/runner/launchers.py",
        "drafter, batch, runtime.gate(plan))",
        "drafter, batch, None if batch.execution.is_static else runtime.gate(plan))",
        GATE,
    ),
    Fault(
        "gate: a controller counts checks that nobody asked as unsure",
        "hispec/runner/round_output.py",
        "went_on + 1 < choice.plan.num_checks and of_row.tentative < limit",
        "went_on + 1 < choice.plan.num_checks",
        ("tests/runner/test_round_output.py",),
    ),
    Fault(
        "gate: the profile's replay asks at the cycle's first place",
        "hispec/profile/replay_numba.py",
        "not goes_on[min(at + num_kept, first + length)]",
        "not goes_on[at]",
        ("tests/profile/test_replay_numba.py",),
    ),
    Fault(
        "gate: cycles that a row did not take count as cycles",
        "hispec/decoding/row_steps_numba.py",
        "count if is_live else -1",
        "count",
        GATE,
    ),
    Fault(
        "jobs: of equal rows without ids all are done as soon as one is",
        "hispec/jobs/row_index.py",
        "USING (key, nth)",
        "USING (key)",
        JOBS,
    ),
    Fault(
        "jobs: rows with ids are known by their content",
        "hispec/jobs/row_index.py",
        "if identity.id is None:\n        return",
        "if True:\n        return",
        JOBS,
    ),
    Fault(
        "jobs: what a crash left at the end stays in the output",
        "hispec/jobs/writer.py",
        "self._file.truncate(num_bytes)",
        "self._file.truncate(path.stat().st_size)",
        JOBS,
    ),
    Fault(
        "jobs: a line without its end counts as done",
        "hispec/jobs/resume.py",
        'if not line.endswith(b"}\\n") or',
        "if",
        ("tests/jobs/test_formats.py",),
    ),
    Fault(
        "jobs: a last line without its end is somebody else's",
        "hispec/jobs/resume.py",
        'if not line.endswith(b"\\n"):',
        "if False:",
        JOBS,
    ),
    Fault(
        "uploads: a part is not compared with what it was",
        "hispec/jobs/upload.py",
        "if copied != part.digest:",
        "if False:",
        UPLOADS,
    ),
    Fault(
        "uploads: rows of another machine are gone on with",
        "hispec/jobs/upload.py",
        "if any(_digest(_pieces(file, part.size)) != part.digest for part in self._ledger.parts):",
        "if False:",
        UPLOADS,
    ),
    Fault(
        "uploads: half a line counts",
        "hispec/jobs/upload.py",
        'content[: content.rfind(b"\\n") + 1]',
        "content",
        UPLOADS,
    ),
    Fault(
        "uploads: rows that were taken out stay there",
        "hispec/jobs/runner.py",
        "        upload.restart()",
        "        pass",
        UPLOADS,
    ),
    Fault(
        "workers: a call is not made again when all whom it went to died",
        "hispec/workers/pool.py",
        "while not replies:",
        "for _ in range(1):",
        ("tests/workers/test_deaths.py",),
    ),
    Fault(
        "workers: auto forgets what was measured",
        "hispec/workers/shares.py",
        "workers = workers if measured is None else min(workers, measured)",
        "pass",
        ("tests/workers/test_counts.py",),
    ),
    Fault(
        "jobs: rows in input order are written as they come",
        "hispec/jobs/writer.py",
        "while self._next in self._waiting:",
        "for self._next in list(self._waiting):",
        JOBS,
    ),
    Fault(
        "jobs: rows are not done again although the job says so",
        "hispec/jobs/resume.py",
        "if line is None or (line.failed and job.output.retry_failed):",
        "if line is None:",
        JOBS,
    ),
    Fault(
        "jobs: other settings are not looked at",
        "hispec/jobs/output.py",
        "if not output.only_missing:",
        "if False:",
        JOBS,
    ),
    Fault(
        "jobs: another model's weights are not looked at",
        "hispec/jobs/manifest.py",
        "if not job.output.only_missing:",
        "if False:",
        JOBS,
    ),
    Fault(
        "no numbers: nobody looks at the logits that are chosen",
        "hispec/decoding/row_steps_numba.py",
        "evidence[row] = total",
        "evidence[row] = total if np.isfinite(total) else np.float32(0.0)",
        NUMBERS,
    ),
    Fault(
        "no numbers: those of tokens that are not committed count",
        "hispec/decoding/row_steps_numba.py",
        "in range(min(count, most, tokens.shape[1] - 1))",
        "in range(min(most, tokens.shape[1] - 1))",
        NUMBERS,
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
        "tiers: the check's own token counts as drafted",
        "hispec/runner/round_output.py",
        'tentative.append("check")',
        'tentative.append("draft")',
        TIERS,
    ),
    Fault(
        "tiers: a round's bonus counts as accepted",
        "hispec/runner/round_output.py",
        "tentative[: min(self.round.accepted, len(self.token_ids))]",
        "tentative[: len(self.token_ids)]",
        TIERS,
    ),
    Fault(
        "tiers: of a cut round all are kept",
        "hispec/scheduling/request.py",
        "tiers=_first(self.tiers, token_ids)",
        "tiers=self.tiers",
    ),
    Fault(
        "gaps that came twice in a row count once",
        "hispec/metrics/latencies.py",
        "self._times += 1",
        "pass",
        METRICS,
    ),
    Fault(
        "rounds that were alike count once",
        "hispec/stats.py",
        "counts.add(of_row, times)",
        "counts.add(of_row)",
        METRICS,
    ),
    Fault(
        "tokens beyond a request's end count as output",
        "hispec/stats.py",
        "if num_taken != of_row.committed:",
        "if False:",
        METRICS,
    ),
    Fault(
        "a drafter's numbers are taken as they are",
        "hispec/decoding/round.py",
        "draft.check(batch.num_rows)",
        "pass",
        ("tests/drafters/test_drafters.py",),
    ),
    Fault(
        "a round's tokens are one value of the time between tokens",
        "hispec/metrics/latencies.py",
        'self._of["inter_token_s"].observe(gap_s / num_tokens, num_tokens * times)',
        'self._of["inter_token_s"].observe(gap_s, times)',
        METRICS,
    ),
    Fault(
        "time per token counts the first token's, too",
        "hispec/outputs.py",
        "return (self.last_token_s - self.first_token_s) / (self.num_output_tokens - 1)",
        "return (self.last_token_s - self.first_token_s) / self.num_output_tokens",
        METRICS,
    ),
    Fault(
        "histograms of workers are the first one's",
        "hispec/workers/totals.py",
        "add_histograms(values)",
        "values[0]",
        METRICS,
    ),
    Fault(
        "counts of dead workers are lost",
        "hispec/workers/totals.py",
        "gone or {}",
        "{}",
        ("tests/workers/test_deaths.py",),
    ),
    Fault(
        "verify counts a bonus that was the check's own token",
        "hispec/stats.py",
        "if each.committed > each.accepted:",
        "if True:",
        METRICS,
    ),
    Fault(
        "page: text of a file is HTML",
        "hispec/page/markup.py",
        "child if isinstance(child, Html) else escape(child)",
        "child",
        ("tests/page/test_page.py",),
    ),
    Fault(
        "files: a name that no system takes is looked for",
        "ee_models/checkpoint/weights.py",
        "if not os.path.isfile(path):",
        "if not path.is_file():",
        FILES,
    ),
    Fault(
        "files: a message repeats a whole document",
        "ee_models/errors.py",
        "return cut(repr(value), 100)",
        "return repr(value)",
        FILES,
    ),
)
