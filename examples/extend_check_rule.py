"""A check rule of your own: the check overrules a draft only if its likeliest token is twice as likely as the
next.

Run: python examples/extend_check_rule.py [MODEL]
"""

from __future__ import annotations

import argparse
from typing import Any

from torch import Tensor

from hispec import LLM, SamplingParams
from hispec.decoding.acceptance import CoupledJudge, register_judge
from hispec.sampling.logits import Logits


class MarginJudge(CoupledJudge):
    def find_unsure(self, logits: Logits, own: Tensor) -> Tensor:
        best, second = logits.wide().float().softmax(-1).topk(2).values.unbind(-1)
        return best < 2 * second


def main(model: str, **settings: Any) -> tuple[list[int], list[int], dict[str, Any]]:
    """Tokens without and with the check rule, and what was counted with it."""
    register_judge("margin", lambda check: MarginJudge())
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=48)
    prompt = "one two three one two three one two"
    with LLM(model, **settings) as llm:
        plain = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
        depth = llm.decoder.config.num_layers
        llm.set_speculative(
            {
                "draft": {"kind": "ngram"},
                "check": {"layer": depth - 1},
                "num_draft_tokens": 4,
                "acceptance": "margin",
            }
        )
        checked = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
        return list(plain), list(checked), llm.stats()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", metavar="MODEL", nargs="?", default="smollm2")
    plain, checked, stats = main(parser.parse_args().model)
    print(f"same output: {plain == checked}; verify kept {stats['accepted']} of {stats['tentative']} tokens")
