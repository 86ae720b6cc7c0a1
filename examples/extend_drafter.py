"""A drafter of your own: after each token it drafts the one that last followed it in any request's text.

Run: python examples/extend_drafter.py [MODEL]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hispec import LLM, SamplingParams
from hispec.config import DraftConfig
from hispec.decoding.acceptance import Judge, Proposals, Source
from hispec.decoding.batch import RoundBatch
from hispec.decoding.draft_tree import DraftTree
from hispec.decoding.drafter import Draft, Drafter, count_allowed
from hispec.decoding.stages import Stages
from hispec.drafters.make import register_drafter


class BigramDrafter(Drafter):
    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._next = torch.zeros(vocab_size, dtype=torch.int64, device=device)

    def follow(self, rows: Sequence[tuple[int, Sequence[int]]]) -> None:
        for _, token_ids in rows:
            text = torch.tensor(token_ids, device=self._next.device)
            self._next[text[:-1]] = text[1:]

    def propose(self, batch: RoundBatch, first: Tensor, tree: DraftTree) -> Draft:
        counts = count_allowed(batch, first, tree)
        token = batch.tokens.gather(1, first.unsqueeze(1)).squeeze(1)
        for step in range(1, tree.depth + 1):
            token = self._next[token]
            batch.put_tokens(first + step, token, counts >= step)
        return Draft(Proposals(tree, first, counts), Source.LOOKED_UP)


def make(draft: DraftConfig, stages: Stages, judge: Judge, max_num_seqs: int, max_model_len: int) -> Drafter:
    return BigramDrafter(stages.vocab_size, stages.device)


def main(model: str, **settings: Any) -> tuple[list[int], list[int], dict[str, Any]]:
    """Tokens without and with the drafter, and what was counted with it."""
    register_drafter("bigram", make)
    params = SamplingParams(temperature=0.0, max_tokens=48)
    prompt = "one two three one two three one two"
    with LLM(model, **settings) as llm:
        plain = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
        llm.set_speculative({"draft": {"kind": "bigram"}, "num_draft_tokens": 3})
        drafted = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
        return list(plain), list(drafted), llm.stats()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", metavar="MODEL", nargs="?", default="smollm2")
    plain, drafted, stats = main(parser.parse_args().model)
    print(f"same output: {plain == drafted}; {stats['draft_kept']} of {stats['drafted']} drafts kept")
