"""What early-exit training cost a model in quality, or any model beside the one that it was made of.

    python benchmarks/quality.py MODEL [--quantization int8|int4] [--dtype bfloat16]
    [--kv-cache-dtype float32] [--against MODEL2] [--gsm8k FILE.jsonl] [--text FILE.jsonl]
    [--prompts FILE.jsonl] [--limit N] [--batch-size 16] [--max-tokens 256] [--json FILE]

--gsm8k     rows of `question` and `answer`: each model answers the questions greedily, as chats, and its
            final number is compared with the reference's
--text      held-out rows of --field and --answer (default: question, answer): nats of the last layer per
            token of the answer and its end, put into the chat template as training does; with MODEL2 also
            what --prompts measures
--prompts   input rows of a job, as benchmarks/prompts.py writes them; MODEL2 (the original) answers them
            greedily, and both models read its answers: KL(original || model) in nats a token, and the share
            of places where both find the same token likeliest

Decoding is plain. Intervals are of 95 %: Wilson's for a share of right answers, else by bootstrap over rows,
in which what two models say to a row stays together. Means over tasks give every task the same weight. MODEL2
may be MODEL, of which --quantization, --dtype or --kv-cache-dtype then make another. Both are in memory at
once; tables are Markdown, and the JSON has every row.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run from a checkout: nothing needs to be installed

from benchmarks.arguments import at_least_one
from benchmarks.command import run
from benchmarks.quality_figures import gsm8k_figures, prompts_figures, text_figures
from benchmarks.quality_inputs import Models, Prompt, examples_of, prompts_of, questions_of
from benchmarks.quality_tables import lines_of
from ee_models.training.examples import Example
from hispec.errors import ConfigError
from hispec.jobs.bench_inputs import token_ids_of
from hispec.llm import LLM
from hispec.measure.likelihood import score
from hispec.outputs import RequestOutput
from hispec.sampling_params import SamplingParams
from hispec.utils.environment import environment


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Raises ConfigError for input that cannot be used, before weights are read, and what loading a model
    raises."""
    models = Models.open([options.model, *filter(None, [options.against])])
    limit, max_tokens = options.limit, options.max_tokens
    questions = [] if options.gsm8k is None else questions_of(models, options.gsm8k, limit)
    fields = (options.field, options.answer)
    texts = [] if options.text is None else examples_of(models, options.text, fields, limit)
    prompts = [] if options.prompts is None else prompts_of(models, options.prompts, limit)
    for prompt in (*questions, *prompts):
        if len(prompt.token_ids) + max_tokens > models.max_len:
            raise ConfigError(
                f"{prompt.where}: {len(prompt.token_ids)} tokens and --max-tokens={max_tokens} are over the"
                f" model's limit of {models.max_len}; leave the row out, or lower --max-tokens"
            )
    longest = max(
        [len(prompt.token_ids) + max_tokens for prompt in (*questions, *prompts)]
        + [len(example.token_ids) for example in texts]
    )
    result: dict[str, Any] = {
        "benchmark": "quality",
        "date": time.strftime("%Y-%m-%d"),
        "environment": environment(),
        "models": [],
        "limit": limit,
        "batch_size": options.batch_size,
        "max_tokens": max_tokens,
    }
    decoders, answered, original = [], [], []
    for name, checkpoint in zip(models.names, models.checkpoints, strict=True):
        settings = {} if decoders else _numbers(options)
        with LLM(name, max_num_seqs=options.batch_size, max_model_len=longest, **settings) as llm:
            if questions:
                answered.append(answers_of(llm, questions, max_tokens))
            if prompts and len(decoders) == 1:
                original = answers_of(llm, prompts, max_tokens)
            decoders.append(llm.decoder)
        dtypes = {
            "dtype": str(decoders[-1].weights_dtype).removeprefix("torch."),
            "kv_cache_dtype": str(decoders[-1].kv_dtype).removeprefix("torch."),
        }
        shown = ", ".join([name, *(f"{field}={value}" for field, value in settings.items())])
        result["models"].append({"name": shown, "fingerprint": checkpoint.fingerprint} | dtypes)
    if questions:
        result["gsm8k"] = {"file": options.gsm8k.name} | gsm8k_figures(questions, answered)
    if texts:
        scores = score(decoders, texts, options.batch_size, "text")
        result["text"] = {"file": options.text.name} | text_figures(texts, scores)
    if prompts:
        read = [
            Example([*prompt.token_ids, *own], len(prompt.token_ids))
            for prompt, own in zip(prompts, token_ids_of(original), strict=True)
        ]
        scores = score(decoders, read, options.batch_size, "answers of the original")
        result["prompts"] = {"file": options.prompts.name} | prompts_figures(prompts, read, scores)
    return result


def answers_of(llm: LLM, prompts: Sequence[Prompt], max_tokens: int) -> list[RequestOutput]:
    """Greedy answers. Raises RequestError with all that can't be served."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    outputs = llm.generate([prompt.token_ids for prompt in prompts], params)
    token_ids_of(outputs)
    return outputs


def _numbers(options: argparse.Namespace) -> dict[str, str]:
    """What MODEL is held in, as far as it was given."""
    given = {name: getattr(options, name) for name in ("quantization", "dtype", "kv_cache_dtype")}
    return {name: value for name, value in given.items() if value is not None}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--against", metavar="MODEL2", help="the original, or any model of the same tokens")
    parser.add_argument("--quantization", choices=["int8", "int4"], help="of MODEL's weights")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="of MODEL's weights")
    parser.add_argument("--kv-cache-dtype", choices=["float32", "bfloat16", "int8"], help="of MODEL's KV")
    parser.add_argument("--gsm8k", type=Path, metavar="FILE")
    parser.add_argument("--text", type=Path, metavar="FILE")
    parser.add_argument("--field", default="question", help="of --text (default: question)")
    parser.add_argument("--answer", default="answer", help="of --text (default: answer)")
    parser.add_argument("--prompts", type=Path, metavar="FILE")
    parser.add_argument(
        "--limit",
        type=at_least_one,
        metavar="N",
        help="the first rows of each file; of --prompts, each task's",
    )
    parser.add_argument("--batch-size", type=at_least_one, default=16)
    parser.add_argument("--max-tokens", type=at_least_one, default=256, help="of an answer (default: 256)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    if options.gsm8k is options.text is options.prompts is None:
        parser.error("nothing to measure: give --gsm8k, --text or --prompts, or several of them")
    if options.prompts is not None and options.against is None:
        parser.error("--prompts needs --against, the model whose answers are read")
    return run("quality", options, measure, lambda result: print(*lines_of(result), sep="\n"))


if __name__ == "__main__":
    sys.exit(main())
