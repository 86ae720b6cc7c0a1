"""Two minutes: does anything run here at all? What is missing; 20 steps eagerly, the same from graphs, tokens
equal."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.gpu_parts.correctness import plans_for
from benchmarks.gpu_parts.engines import CheckedGraphs, decode, graph_device, make_engine
from benchmarks.gpu_parts.needs import NO_MODEL, how_to_bring, missing
from benchmarks.gpu_parts.run import Bench
from benchmarks.gpu_parts.subjects import Loaded, found_subject, loaded, random_prompts
from hispec.config import SpeculativeConfig

STEPS, LENGTH = 20, 128
ADVICE = (
    "to find the kernel: CUDA_LAUNCH_BLOCKING=1 compute-sanitizer python benchmarks/gpu.py --parts smoke;"
    " what it runs first is eager"
)


def run(bench: Bench, out: dict[str, Any]) -> None:
    _, optional = missing()
    out["missing"] = optional
    if optional:
        print(f"  some of it is left out; {how_to_bring(optional)}", flush=True)
    with found_subject(bench) as subject:
        out["model"] = subject.label
        if not subject.is_real:
            out["no_model"] = NO_MODEL
            print(f"  {NO_MODEL}", flush=True)
        with loaded(bench, subject, "bfloat16", LENGTH) as model:
            for name, plan in {
                "plain": None,
                "exits, three tiers": plans_for(subject)["exits, three tiers"],
            }.items():
                bench.step(out, name, 5, partial(_compared, bench, model, name, plan))
    if bench.result["failures"]:
        out["advice"] = ADVICE
        print(f"  {ADVICE}", flush=True)


def _compared(bench: Bench, model: Loaded, name: str, plan: SpeculativeConfig | None) -> dict[str, Any]:
    """The same two prompts for 20 steps, eagerly first."""
    prompts = random_prompts(2, model.decoder.config.vocab_size, 10, 20)
    checked = CheckedGraphs(graph_device(bench.device))
    found: dict[str, Any] = {}
    outputs = {}
    for how, graphs in (("eager", False), ("captured", True)):
        engine = make_engine(
            model.decoder,
            plan,
            model.exits(plan),
            rows=2,
            length=LENGTH,
            graphs=graphs,
            captured_on=checked,
        )
        # At least a token a step.
        decoded = decode(engine, prompts, STEPS if plan is None else STEPS * engine.plan.window, steps=STEPS)
        outputs[how] = decoded.outputs
        found[how] = {
            "ms_per_round": decoded.ms_per_round,
            "tokens": sum(map(len, decoded.outputs)),
            "replays": engine.stats().get("graph_replays", 0),
        }
        engine.close()
    lengths = [min(map(len, each)) for each in zip(*outputs.values(), strict=True)]
    found["equal"] = all(
        one[:length] == other[:length] for one, other, length in zip(*outputs.values(), lengths, strict=True)
    )
    found["graphs"], found["different"] = checked.num_checked, checked.num_different
    if not found["equal"]:
        bench.fail(f"{name}: tokens from graphs are others than those of the eager run")
    if checked.num_different:
        bench.fail(
            f"{name}: {checked.num_different} of {checked.num_checked} graphs differ from eager rounds"
        )
    if not found["captured"]["replays"]:
        bench.fail(f"{name}: no graph was replayed; the log says why none was captured")
    return found
