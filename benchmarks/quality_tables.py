"""The tables of benchmarks/quality.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.markdown import table
from hispec.utils.environment import hardware_text


def in_words(figure: dict[str, Any], kind: str) -> list[str]:
    """A value and its interval, by the format `kind`."""
    interval = figure["interval"]
    return [
        f"{figure['value']:{kind}}",
        "" if interval is None else f"{interval[0]:{kind}} to {interval[1]:{kind}}",
    ]


def lines_of(result: dict[str, Any]) -> Iterator[str]:
    """The result as Markdown."""
    names = [model["name"] for model in result["models"]]
    yield f"{', '.join(names)}; {hardware_text(result['environment'])}, {result['date']}"
    if "gsm8k" in result:
        part = result["gsm8k"]
        yield f"\nGSM8K, {part['questions']} questions, at most {result['max_tokens']} tokens:\n"
        rows = [
            [name, *in_words(of["accuracy"], ".1%"), f"{of['ended']:.1%}", f"{of['mean_tokens']:.1f}"]
            for name, of in zip(names, part["models"], strict=True)
        ]
        if "difference" in part:
            rows.append(["difference", *in_words(part["difference"], "+.1%"), "", ""])
        yield from table(["model", "right", "95 %", "ended by themselves", "mean tokens"], rows)
    if "text" in result:
        part = result["text"]
        yield f"\nHeld-out text, {part['texts']} answers, {part['tokens']} tokens:\n"
        rows = [[name, *in_words(of, ".4f")] for name, of in zip(names, part["models"], strict=True)]
        if "difference" in part:
            rows.append(["difference", *in_words(part["difference"], "+.4f")])
        yield from table(["model", "nats a token", "95 %"], rows)
        if "kl" in part:
            (kl, kl_interval), (same, same_interval) = (
                in_words(part["kl"], ".4f"),
                in_words(part["same"], ".1%"),
            )
            yield (
                f"\nKL of {names[1]} to {names[0]}: {kl} nats a token (95 %: {kl_interval or 'one text'});"
                f" same likeliest token: {same} ({same_interval or 'one text'})"
            )
    if "prompts" in result:
        part = result["prompts"]
        yield f"\n{names[0]} on greedy answers of {names[1]}, at most {result['max_tokens']} tokens:\n"
        rows = [
            [
                task,
                str(of["prompts"]),
                str(of["tokens"]),
                *in_words(of["kl"], ".4f"),
                *in_words(of["same"], ".1%"),
            ]
            for task, of in (*part["tasks"].items(), ("mean over tasks", part["mean"]))
        ]
        titles = ["task", "prompts", "tokens", "KL, nats a token", "95 %", "same greedy tokens", "95 %"]
        yield from table(titles, rows)
