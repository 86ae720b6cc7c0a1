"""A model family of your own: Seed-OSS, whose layers are Llama's with biases on queries, keys and values.

Run: python examples/extend_model_family.py [MODEL]
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

from transformers import SeedOssConfig, SeedOssForCausalLM

from ee_models.families import FAMILIES, Family
from hispec import LLM, SamplingParams

SEED_OSS = Family("SeedOssForCausalLM", "seed_oss", "SeedOssConfig", output_bias=False)


def make_tiny(folder: str) -> None:
    """A model of random weights and without a tokenizer: the real ones have 36 billion parameters."""
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    SeedOssForCausalLM(SeedOssConfig(**sizes, **heads, max_position_embeddings=512)).save_pretrained(folder)


def main(model: str, **settings: Any) -> tuple[list[int], list[int], dict[str, Any]]:
    """Tokens without and with early exits, and what was counted with them."""
    FAMILIES.append(SEED_OSS)
    params = SamplingParams(temperature=0.0, max_tokens=48)
    with LLM(model, **settings) as llm:
        prompt = "one two three one two three one two" if llm.tokenizer else [1, 2, 3, 1, 2, 3, 1, 2]
        plain = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
        depth = llm.decoder.config.num_layers
        llm.set_speculative({"draft": {"layer": depth // 3}, "check": {"layer": 2 * depth // 3}})
        drafted = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
        return list(plain), list(drafted), llm.stats()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", metavar="MODEL", nargs="?", help="default: a tiny one, made for this run")
    with tempfile.TemporaryDirectory() as folder:
        model = parser.parse_args().model
        if model is None:
            make_tiny(model := folder)
        plain, drafted, stats = main(model)
    print(f"same output: {plain == drafted}; {stats['draft_kept']} of {stats['drafted']} drafts kept")
