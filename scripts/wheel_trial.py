"""What scripts/try_wheel.py runs in the environment that it made: python -I wheel_trial.py CHECKOUT.

All that a user meets first, with a tiny random model: Python, the commands, a job with Parquet files, a page
of a trace, a server. Fails with an AssertionError or the command's own error.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

SMALL: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4}
THREE_TIERS: dict[str, Any] = {
    "draft": {"layer": 3},
    "check": {"layer": 6},
    "num_draft_tokens": 2,
    "num_checks": 2,
}
PROMPTS = [f"prompt {number} of some" for number in range(6)]
COMMAND = Path(sys.executable).with_name("hispec")


def main(checkout: Path) -> None:
    import hispec

    assert checkout not in Path(hispec.__file__).parents, f"{hispec.__file__} is not the wheel's"
    model = runpy.run_path(str(checkout / "tests" / "helpers" / "tiny.py"))["tiny_checkpoint"](
        "model", tokenizer=True
    )
    outputs(str(model))
    for arguments in (["--help"], ["env"], ["schema"]):
        assert command(*arguments)
    job(str(model))
    serve(str(model))
    assert hispec.__version__ in command("--version")
    print("Python, commands, job, report and server work")


def outputs(model: str) -> None:
    """Plain decoding and three tiers agree, in float32 and int8, greedy and sampled."""
    from hispec import LLM, SamplingParams

    for quantization in (None, "int8"):
        for temperature in (0.0, 0.8):
            params = SamplingParams(temperature=temperature, max_tokens=24, seed=1)
            texts = []
            for plan in (None, THREE_TIERS, {"draft": {"kind": "ngram"}, "num_draft_tokens": 4}):
                with LLM(model, speculative=plan, quantization=quantization, **SMALL) as llm:
                    done = llm.generate(PROMPTS, params, use_tqdm=False)
                texts.append([output.outputs[0].token_ids for output in done])
            assert texts[0] == texts[1] == texts[2], (quantization, temperature)


def job(model: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.table({"prompt": PROMPTS}), "in.parquet")
    settings = {
        "model": model,
        "engine": {**SMALL, "trace": "trace.jsonl"},
        "speculative": THREE_TIERS,
        "sampling": {"max_tokens": 16, "temperature": 0.0},
        "input": {"path": "in.parquet"},
        "output": {"path": "out.parquet"},
    }
    Path("job.yaml").write_text(json.dumps(settings))  # which is YAML, too
    command("run", "job.yaml", "--no-progress")
    assert pyarrow.parquet.read_table("out.parquet").num_rows == len(PROMPTS)
    command("report", "trace.jsonl", "--html", "report.html", "-o", "trace.png")
    assert "<html" in Path("report.html").read_text() and Path("trace.png").stat().st_size > 0


def serve(model: str) -> None:
    server = subprocess.Popen([COMMAND, "serve", model, "--port", "0"], stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        url = next(
            found.group() for line in server.stderr if (found := re.search(r"http://[\d.]+:\d+", line))
        )
        with urllib.request.urlopen(f"{url}/") as page:
            assert b"<html" in page.read()
        body = json.dumps({"model": Path(model).name, "prompt": "one", "max_tokens": 4}).encode()
        asked = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4
    finally:
        server.terminate()
        rest = server.stderr.read()
    assert server.wait(60) in (0, -signal.SIGTERM), (
        rest
    )  # uvicorn ends itself as it was told to, once all is done


def command(*arguments: str) -> str:
    """What a command prints."""
    done = subprocess.run([COMMAND, *arguments], stdout=subprocess.PIPE, text=True, env=os.environ)
    assert done.returncode == 0, f"hispec {' '.join(arguments)}: status {done.returncode}"
    return done.stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
