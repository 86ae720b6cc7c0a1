"""A model family of your own: Seed-OSS, whose layers are Llama's with biases on queries, keys and values.

Run: python examples/extend_model_family.py MODEL
"""

from __future__ import annotations

import sys
from typing import Any

from ee_models.families import FAMILIES, Family
from hispec import LLM, SamplingParams

SEED_OSS = Family("SeedOssForCausalLM", "seed_oss", "SeedOssConfig", output_bias=False)


def main(model: str, **settings: Any) -> tuple[list[int], list[int], dict[str, Any]]:
    """Tokens without and with early exits, and what was counted with them."""
    FAMILIES.append(SEED_OSS)
    params = SamplingParams(temperature=0.0, max_tokens=48)
    prompt = "one two three one two three one two"
    with LLM(model, **settings) as llm:
        plain = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
        depth = llm.decoder.config.num_layers
        llm.set_speculative({"draft": {"layer": depth // 3}, "check": {"layer": 2 * depth // 3}})
        drafted = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
        return list(plain), list(drafted), llm.stats()


if __name__ == "__main__":
    plain, drafted, stats = main(sys.argv[1])
    print(f"same output: {plain == drafted}; {stats['draft_accepted']} of {stats['drafted']} drafts accepted")
