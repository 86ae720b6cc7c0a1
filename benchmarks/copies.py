"""How often prompt lookup is right: its copies by how many tokens before them are the same, and guesses where
a copy says something else. `LIKELY` and `RIVAL` of hispec/drafters/lookup.py are from

    python benchmarks/prompts.py FOLDER prompts.jsonl --skip 0 --per-task 20
    python benchmarks/copies.py MODEL --prompts prompts.jsonl [--limit N] [--quantization int8]
    [--dtype auto] [--batch-size 16] [--max-tokens 96] [--json FILE]

The model answers greedily. At each place of its answers, the latest occurrence of the longest run of four to
one tokens says what is copied, and the n-grams that come with the model, if there are any, what is guessed.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run from a checkout: nothing needs to be installed

from benchmarks.arguments import at_least_one, make_parser
from benchmarks.command import run
from benchmarks.markdown import table
from hispec import SamplingParams
from hispec.drafters.lookup import MOST_MATCHED
from hispec.drafters.ngram_table import NgramTable, look_up
from hispec.errors import build
from hispec.jobs.bench_inputs import TokenIds, generate, good_rows
from hispec.jobs.rows import count_rows
from hispec.jobs.schema import Job
from hispec.loading.ngram_tables import NgramTables
from hispec.utils.environment import environment

_MAX_SIZE = 4
_SHARES = (0.2, 0.4, 0.6, 0.8, 1.0)  # guesses are told apart by where their shares lie between these


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Raises ConfigError or CheckpointError."""
    job = build(Job, _job_values(options))
    count_rows(job.input)
    rows, measured_on = good_rows(job), environment()
    with closing(job.make_llm()) as llm:
        prompts = [llm.encode(row.prompt, chat=row.is_chat) for row in rows]
        outputs = generate(llm, prompts, SamplingParams(temperature=0.0, max_tokens=options.max_tokens))
        tables = NgramTables(llm.trained_exits).candidates(None, llm.decoder.device)
    copies, rivals = _count(prompts, outputs, tables[0] if tables else None)
    return {
        "benchmark": "copies",
        "environment": measured_on,
        "prompts": len(prompts),
        "options": {name: value for name, value in vars(options).items() if name not in ("prompts", "json")},
        "copies": [[copies[size, kind] for kind in ("places", "right")] for size in range(MOST_MATCHED + 1)],
        "rivals": {
            f"{size} {share:g}": [rivals[size, share, kind] for kind in ("places", "copy", "guess")]
            for size, share in sorted({key[:2] for key in rivals})
        },
    }


def _job_values(options: argparse.Namespace) -> dict[str, Any]:
    engine = {
        "quantization": options.quantization,
        "dtype": options.dtype,
        "max_num_seqs": options.batch_size,
    }
    return {
        "model": options.model,
        "engine": engine,
        "input": {"path": str(options.prompts), "limit": options.limit},
        "output": {"path": "not-written.jsonl"},
    }


def _count(
    prompts: Sequence[TokenIds], outputs: Sequence[TokenIds], ngrams: NgramTable | None
) -> tuple[Counter[Any], Counter[Any]]:
    copies, rivals = Counter[Any](), Counter[Any]()
    for prompt, output in zip(prompts, outputs, strict=True):
        text = [*prompt, *output]
        for place, guess, share in _guessed(text, len(prompt), ngrams):
            copy, matched = find(text[:place])
            copies[matched, "places"] += 1
            copies[matched, "right"] += copy == text[place]
            if copy is not None and share > 0 and guess != copy:
                key = matched, next(each for each in _SHARES if share <= each)
                rivals[*key, "places"] += 1
                rivals[*key, "copy"] += copy == text[place]
                rivals[*key, "guess"] += guess == text[place]
    return copies, rivals


def _guessed(text: TokenIds, first: int, ngrams: NgramTable | None) -> Iterator[tuple[int, int, float]]:
    """(place, guess, its share) of the places from `first` on."""
    places = torch.arange(first, len(text))
    if ngrams is None:
        guesses = torch.zeros_like(places), torch.zeros(len(places))
    else:
        texts = torch.tensor(text, device=ngrams.keys.device).expand(len(places), -1)
        guesses = look_up(ngrams, texts, places.to(ngrams.keys.device))
    yield from zip(places.tolist(), *(each.tolist() for each in guesses), strict=True)


def find(text: TokenIds) -> tuple[int | None, int]:
    """What followed the last tokens when they last stood in the text, and how many of them are the same, at
    most MOST_MATCHED; None and 0 where nothing is."""
    for size in range(min(_MAX_SIZE, len(text) - 1), 0, -1):
        for end in range(len(text) - 2, size - 2, -1):
            if text[end - size + 1 : end + 1] == text[-size:]:
                matched = size
                while matched < min(MOST_MATCHED, end + 1) and text[end - matched] == text[-1 - matched]:
                    matched += 1
                return text[end + 1], matched
    return None, 0


def print_result(result: dict[str, Any]) -> None:
    lines = [
        [str(size), str(places), f"{right / places:.2f}" if places else ""]
        for size, (places, right) in enumerate(result["copies"])
    ]
    print(f"{result['prompts']} prompts; {MOST_MATCHED}: so many or more")
    print(*table(["tokens matched", "places", "copies right"], lines), sep="\n")
    if result["rivals"]:
        print("\nwhere a guess says something else")
        lines = [
            [*key.split(), str(places), f"{copy / places:.2f}", f"{guess / places:.2f}"]
            for key, (places, copy, guess) in result["rivals"].items()
        ]
        titles = ["tokens matched", "share of the guess up to", "places", "copies right", "guesses right"]
        print(*table(titles, lines), sep="\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batch-size", type=at_least_one, default=16)
    parser.add_argument("--max-tokens", type=at_least_one, default=96)
    return run("copies", parser.parse_args(arguments), measure, print_result)


if __name__ == "__main__":
    sys.exit(main())
