"""The engine inside an asyncio program: one generator of Deltas per request, all served together.

Run: python examples/embed_async.py [MODEL]
"""

from __future__ import annotations

import argparse
import asyncio
from contextlib import aclosing
from functools import partial
from typing import Any

from hispec import LLM, SamplingParams
from hispec.serving.async_engine import AsyncEngine

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, stop=["\n\n"])


async def answer(engine: AsyncEngine, prompt: str) -> str:
    """Prints a request's text as it comes."""
    text = ""
    async for delta in engine.stream(prompt, GREEDY):  # a task that is cancelled aborts its request
        text += delta.text
        print(f"{prompt!r}: {delta.text!r}")
    return text


async def main(model: str = "smollm2", **settings: Any) -> list[str]:
    """What each request got; a third one is left after its first tokens."""
    plan = {"draft": {"kind": "ngram"}, "num_draft_tokens": 4}  # None: plain decoding
    make = partial(LLM, model, speculative=plan, **{"max_num_seqs": 4, **settings})  # or workers=N
    async with AsyncEngine(make, max_requests=64) as engine:  # more wait their turn
        async with aclosing(engine.stream("never mind", GREEDY)) as left:
            await anext(left)
        texts = await asyncio.gather(answer(engine, "one two three one two"), answer(engine, "a b c a b"))
        await engine.drain()
        return list(texts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", metavar="MODEL", nargs="?", default="smollm2")
    asyncio.run(main(parser.parse_args().model))
