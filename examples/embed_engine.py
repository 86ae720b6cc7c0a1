"""The engine inside a program of your own: requests in, Deltas out, one thread that steps.

Run: python examples/embed_engine.py [MODEL]
"""

from __future__ import annotations

import argparse
from typing import Any

from hispec import Engine, SamplingParams
from hispec.detokenizer import IncrementalText

Texts, Tokens = dict[str, str], dict[str, list[int]]


def main(model: str = "smollm2", **settings: Any) -> tuple[Texts, Tokens, dict[str, Any]]:
    """What each request got, and what was counted."""
    plan = {"draft": {"kind": "ngram"}, "num_draft_tokens": 4}  # None: plain decoding
    with Engine.from_pretrained(model, speculative=plan, **{"max_num_seqs": 4, **settings}) as engine:
        tokenizer = engine.pretrained.tokenizer
        assert tokenizer is not None, "the model's folder has none: give token ids, and text=None"
        params = SamplingParams(temperature=0.0, max_tokens=24, stop=["\n\n"])
        for name, prompt in (("one", "one two three one two"), ("two", "a b c a b"), ("left", "never mind")):
            text = IncrementalText(tokenizer, params.stop, continues=True)  # None: token ids only
            engine.add_request(tokenizer.encode(prompt), params, name, text=text)
        engine.abort(["left"])  # at any time between two steps
        texts: Texts = {}
        tokens: Tokens = {}
        while engine.has_unfinished():  # a server takes new requests here
            for delta in engine.step():
                texts[delta.request_id] = texts.get(delta.request_id, "") + delta.text
                tokens[delta.request_id] = tokens.get(delta.request_id, []) + delta.token_ids
                if delta.finish_reason is not None:  # stop, length, abort or error (delta.error says which)
                    print(f"{delta.request_id}: {delta.finish_reason}")
        return texts, tokens, engine.stats()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", metavar="MODEL", nargs="?", default="smollm2")
    texts, _, stats = main(parser.parse_args().model)
    print(texts, f"{stats['tokens']} tokens in {stats['rounds']} rounds", sep="\n")
