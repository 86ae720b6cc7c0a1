"""Tests that should notice faults, by what they are of."""

from __future__ import annotations

LAWS = (
    "tests/laws/test_exact.py",
    "tests/decoding/test_scripted_patterns.py",
    "tests/laws/test_engine.py",
    "tests/laws/test_finish.py",
)
TIERS = ("tests/laws/test_tiers.py",)
GATE = ("tests/decoding/test_gate.py",)
STATIC = ("tests/laws/test_static.py",)
AHEAD = ("tests/engine/test_running_ahead.py", "tests/engine/test_round_times.py")
CONTROL = ("tests/laws/test_control.py",)
EARLY_EXIT = ("tests/training/test_early_exit.py", "tests/training/test_early_exit_runs.py")
INTEGERS = ("tests/ee_models/test_narrow_linear.py",)
INT8_KV = (
    "tests/cache/test_int8_kv.py",
    "tests/ee_models/test_attention_in_int8.py",
    "tests/laws/test_int8_kv.py",
)
BFLOAT16 = ("tests/ee_models/test_bfloat16.py", "tests/ee_models/test_attention_in_bfloat16.py")
JOBS = ("tests/jobs/test_resume.py", "tests/jobs/test_known_again.py", "tests/jobs/test_output.py")
PACKAGE = ("tests/training/command/test_ee.py",)
UPLOADS = tuple(f"tests/jobs/uploads/test_{name}.py" for name in ("progress", "places", "what_counts"))
NUMBERS = ("tests/faults/test_numbers.py", "tests/scheduling/test_scheduler.py")
STAGES = ("tests/faults/test_stages.py",)
CLOCKS = ("tests/faults/test_clocks.py",)
METRICS = ("tests/metrics/test_latencies.py",)
FILES = ("tests/faults/test_files.py",)
RUNS = ("tests/laws/test_rounds_together.py", "tests/laws/test_plans_together.py")
GUESSES = ("tests/drafters/test_lookup.py", "tests/gpu/test_lookup_triton.py")
COUNTED = ("tests/training/test_ngrams.py",)
LEARNT = ("tests/drafters/test_ngram_learner.py",)
ALIKE = ("tests/scheduling/test_prompts_that_begin_alike.py",)
