"""Every kernel of Triton's is compiled for GPUs that need not be here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from ee_models.kernels import gpu, triton_linear  # noqa: E402
from hispec.decoding import accept_triton, addresses_triton, row_steps_triton  # noqa: E402
from hispec.drafters import lookup_triton  # noqa: E402
from hispec.runner import round_inputs_triton  # noqa: E402
from hispec.sampling import confidence_triton, floor_triton, noise_triton  # noqa: E402

ROOT = Path(__file__).parents[2]

# Every kernel: what its arguments are (* is a pointer to the dtype under test; what is not here is None or a
# constant), constants, launch.
EXACT, ROPE = (
    {"enable_fp_fusion": False},
    (
        "qkv:* cos_sin:*fp32 positions:*i64 slots:*i64 keys:* values:* q:* eps:fp32 qkv_stride:i32"
        " slot_stride:i32"
    ),
)
NORM, CHOICE = (
    "hidden:* weight:* out:* size:i32 hidden_stride:i32 delta_stride:i32 eps:fp32",
    "logits:* scores:*fp32 tokens:*i32 vocab_size:i32 row_stride:i32",
)
PRODUCT, TILE = (
    "x:* weight:* num_rows:i32 out_features:i32 in_features:i32 x_stride:i32",
    {
        "PART": 1024,
        "NUM_PARTS": 4,
        "BLOCK_ROWS": 16,
    },
)
DRAWS = "rows:*i64 fed:*i64 seeds:*i64 temperatures:*fp32"
HEADS_TILE = {"NUM_HEADS": 9, "NUM_KV_HEADS": 3, "HEAD_DIM": 96, "BLOCK_HEADS": 8, "BLOCK_HALF": 64}
ACCEPT = (
    "own:*i64 live:*i1 tokens:*i64 first:*i64 num_proposed:*i64 accepted:*i64 out:*i64 q_len:i32"
    " num_drafts:i32 token_stride:i32"
)
COUNT = "limits:*i64 first:*i64 out:*i64 num_rows:i32 num_nodes:i32 less:i32"
TAKE = (
    "tokens:*i64 limits:*i64 first:*i64 proposed:*i64 counts:*i64 num_live:*i64 drafted:*i64"
    " noted_sources:*i64 width:i32 num_nodes:i32 last_token:i32 cycle:i32 num_cycles:i32 source:i32"
)
CHECKED = (
    "tokens:*i64 limits:*i64 most_checks:*i64 first:*i64 accepted:*i64 own:*i64 kept:*i64 num_put:*i64"
    " num_rows:i32 width:i32 cycle:i32 num_cycles:i32"
)
VERIFIED = (
    "logits:* tokens:*i64 accepted:*i64 own:*i64 num_live:*i64 begins:*i64 counts:*i64 evidence:*fp32"
    " num_tokens:i32 width:i32 logit_stride:i32"
)
CHUNKS = {"CHUNKS": 32, "CHUNK": 4096}
LAST = {"STEPS": 4, "LOW_BITS": 0, "CHUNKS": 32}
WEIGHED = (
    "logits:* rows:*i64 temperatures:*fp32 ranks:*i64 sums:*fp32 histograms:*fp32 vocab_size:i32"
    " row_stride:i32 num_chunks:i32 num:i32"
)
FINISHED = (
    "rows:*i64 temperatures:*fp32 ranks:*i64 sums:*fp32 histograms:*fp32 out:*fp32 vocab_size:i32"
    " num_chunks:i32 num:i32"
)
TEXTS = (
    "rows:*i64 lengths:*i64 texts:*i32 store:*i32 tokens:*i64 tail_lens:*i64 best:*i64 num_stored:i32"
    " max_len:i32 within:i32 width:i32 num_chunks:i32"
)
PROPOSALS = (
    f"{TEXTS} most:*i64 counts:*i64 likely:*fp32 slots:i32 num_probes:i32 match_confidence:fp32"
    " guess_confidence:fp32"
)
PROPOSED = {"MIN_SIZE": 1, "CHUNKS": 8, "STEPS": 8}
KERNELS: list[tuple[Any, str, dict[str, Any], dict[str, Any]]] = [
    (gpu._add_rms_norm, f"{NORM} delta:*", {"BLOCK": 4096}, {"num_warps": 16, **EXACT}),
    (gpu._add_rms_norm, NORM, {"BLOCK": 16384}, {"num_warps": 16, **EXACT}),
    (gpu._rope_and_store, f"{ROPE} q_norm:* k_norm:*", HEADS_TILE, EXACT),
    (gpu._rope_and_store, ROPE, HEADS_TILE, EXACT),
    (gpu._silu_mul, "gate_up:* out:* size:i32 row_stride:i32", {"BLOCK": 1024}, EXACT),
    (noise_triton._best_of_block, CHOICE, {"BLOCK": 1024}, EXACT),
    (noise_triton._best_of_block, f"{CHOICE} sums:*fp32", {"BLOCK": 1024}, EXACT),
    (
        noise_triton._best_of_block,
        f"{CHOICE} {DRAWS} floors:*fp32",
        {"BLOCK": 1024},
        EXACT,
    ),
    (noise_triton._best_of_block, f"{CHOICE} {DRAWS}", {"BLOCK": 1024}, EXACT),
    (
        noise_triton._best_of_row,
        "scores:*fp32 tokens:*i32 out:*i64 num_blocks:i32 vocab_size:i32",
        {"BLOCKS": 128},
        {"num_warps": 1},
    ),
    (
        noise_triton._best_of_row,
        "scores:*fp32 tokens:*i32 sums:*fp32 out:*i64 out_sums:*fp32 num_blocks:i32 vocab_size:i32",
        {"BLOCKS": 128},
        {"num_warps": 1},
    ),
    (
        floor_triton._find_peaks,
        "logits:* peaks:*fp32 vocab_size:i32 row_stride:i32 num_chunks:i32",
        {"CHUNK": 4096},
        {},
    ),
    (
        floor_triton._weigh_digits,
        f"{WEIGHED} tops:*fp32 kept:*fp32 peaks:*fp32",
        {"STEP": 2, **CHUNKS, "BLOCK": 256},
        EXACT,
    ),
    (floor_triton._weigh_digits, f"{WEIGHED} tops:*i64", {"STEP": 0, **CHUNKS, "BLOCK": 256}, EXACT),
    (
        floor_triton._finish,
        f"{FINISHED} tops:*fp32 kept:*fp32 peaks:*fp32 min_ps:*fp32",
        {"BY_MASS": True, "TEMPERED": True, **LAST},
        EXACT,
    ),
    (
        floor_triton._finish,
        f"{FINISHED} tops:*i64",
        {"BY_MASS": False, "TEMPERED": False, **LAST},
        EXACT,
    ),
    (
        addresses_triton._locate,
        (
            "first:*i64 num_live:*i64 starts:*i64 nodes:*i64 tables:*i64 tokens:*i64 out:*i64 live:*i1"
            " num_cells:i32 q_len:i32 window:i32 table_stride:i32"
        ),
        {"BLOCK_SIZE": 16, "BLOCK": 128},
        {"num_warps": 1},
    ),
    (accept_triton._accept_chain, f"{ACCEPT} unsure:*i1", {"BLOCK": 4}, {"num_warps": 1}),
    (accept_triton._accept_chain, ACCEPT, {"BLOCK": 16}, {"num_warps": 1}),
    (row_steps_triton._count_live, f"{COUNT} most_drafts:*i64", {"BLOCK": 128}, {"num_warps": 1}),
    (row_steps_triton._count_live, COUNT, {"BLOCK": 128}, {"num_warps": 1}),
    (row_steps_triton._take_drafts, f"{TAKE} most_drafts:*i64 sources:*i64", {"BLOCK": 8}, {"num_warps": 1}),
    (row_steps_triton._take_drafts, TAKE, {"BLOCK": 8}, {"num_warps": 1}),
    (row_steps_triton._end_check, f"{CHECKED} goes_on:*i1", {"BLOCK": 128}, {"num_warps": 1}),
    (row_steps_triton._end_check, CHECKED, {"BLOCK": 128}, {"num_warps": 1}),
    (row_steps_triton._end_verify, f"{VERIFIED} paths:*i64 path_len:i32", {"BLOCK": 8}, {"num_warps": 1}),
    (row_steps_triton._end_verify, f"{VERIFIED} path_len:i32", {"BLOCK": 8}, {"num_warps": 1}),
    (
        row_steps_triton._put,
        (
            "target:*i64 rows:*i64 columns:*i64 values:*i64 live:*i1 num_values:i32 num:i32 width:i32"
            " shift:i32"
        ),
        {"BLOCK": 128},
        {"num_warps": 1},
    ),
    (lookup_triton._search, TEXTS, {"MAX_SIZE": 3, "CHUNK": 1024}, {}),
    (
        lookup_triton._propose,
        f"{PROPOSALS} keys:*i64 table_tokens:*i64 shares:*fp32",
        {**PROPOSED, "MAX_SIZE": 0, "RING": 1, "PROBES": 1},
        {"num_warps": 1, **EXACT},
    ),
    (
        lookup_triton._propose,
        f"{PROPOSALS} keys:*i64 table_tokens:*i32 shares:*fp32",
        {**PROPOSED, "MAX_SIZE": 4, "RING": 4, "PROBES": 32},
        {"num_warps": 1, **EXACT},
    ),
    (
        lookup_triton._extend,
        "rows:*i64 lengths:*i64 texts:*i32 tokens:*i64 counts:*i64 max_len:i32 width:i32",
        {"STEPS": 8},
        {"num_warps": 1},
    ),
    (
        round_inputs_triton._advance,
        "inputs:*i64 tokens:*i64 counts:*i64 num_rows:i32 input_stride:i32 width:i32",
        {"TOKEN": 0, "START": 1, "ROOM": 3, "BLOCK": 128},
        {"num_warps": 1},
    ),
    (
        round_inputs_triton._begin,
        "inputs:*i64 tokens:*i64 limits:*i64 num_rows:i32 input_stride:i32 width:i32",
        {"TOKEN": 0, "CAP": 2, "ROOM": 3, "BLOCK": 128},
        {"num_warps": 1},
    ),
    (
        confidence_triton._log_sum_exp,
        "logits:* out:*fp32 vocab_size:i32 row_stride:i32",
        {"NUM_BLOCKS": 32, "BLOCK": 4096},
        {"num_warps": 8},
    ),
    (
        triton_linear._product,
        f"{PRODUCT} bias:* out:*",
        {**TILE, "PARTS_APART": False, "BLOCK_OUT": 64, "BLOCK_IN": 128},
        {"num_stages": 4},
    ),
    (
        triton_linear._product,
        f"{PRODUCT} out:*fp32",
        {**TILE, "PARTS_APART": True, "BLOCK_OUT": 32, "BLOCK_IN": 64},
        {"num_stages": 4},
    ),
    (
        triton_linear._product,
        f"{PRODUCT} bias:* out:*".replace("weight:*", "weight:*i8 scales:*fp32"),
        {**TILE, "PARTS_APART": False, "BLOCK_OUT": 64, "BLOCK_IN": 128},
        {"num_stages": 4},
    ),
    (
        triton_linear._add_parts,
        "parts:*fp32 scales:*fp32 out:* num_rows:i32 out_features:i32",
        {"NUM_PARTS": 4, "BLOCK": 1024},
        {},
    ),
]


def compile_everything() -> None:
    """Runs in a process of its own, where Triton does not interpret. Like a launch, takes sizes that are 1
    for constants."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for kernel, arguments, constants, options in KERNELS:
        for dtype, capability, ones in (("fp32", 80, False), ("bf16", 90, False), ("fp16", 90, True)):
            given = dict(argument.split(":") for argument in arguments.split())
            types = {name: f"*{dtype}" if kind == "*" else kind for name, kind in given.items()}
            if ones:
                constants = {
                    **constants,
                    **{name: 1 for name, kind in types.items() if kind == "i32" and name != "num_rows"},
                }
            signature = {
                name: "constexpr" if name in constants else types.get(name, "constexpr")
                for name in kernel.arg_names
            }
            values = {name: constants.get(name) for name, kind in signature.items() if kind == "constexpr"}
            compiled = triton.compile(
                ASTSource(fn=kernel, signature=signature, constexprs=values),
                target=GPUTarget("cuda", capability, 32),
                options=options,
            )
            assert compiled.asm["cubin"], kernel
            assert ".f64" not in compiled.asm["ptx"], f"{kernel} computes in float64"


@pytest.mark.slow
def test_every_kernel_compiles_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    code = "from tests.gpu.test_compile_triton import compile_everything; compile_everything()"
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
