"""Figures of what models said, with their intervals: of all rows, of tasks, and of pairs of models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.quality_inputs import Prompt, final_number
from ee_models.training.examples import Example
from hispec.jobs.confidence_interval import mean_of
from hispec.outputs import RequestOutput

Z = 1.959964  # standard deviations on either side of the mean that hold 95 %


def wilson(num_right: int, num_all: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    share, spread = num_right / num_all, Z * Z / num_all
    middle = share + spread / 2
    half = Z * math.sqrt((share * (1 - share) + spread / 4) / num_all)
    return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))


def gsm8k_figures(questions: Sequence[Prompt], answers: Sequence[Sequence[RequestOutput]]) -> dict[str, Any]:
    """answers: by model."""
    rows: list[dict[str, Any]] = []
    for question, *of_row in zip(questions, *answers, strict=True):
        row: dict[str, Any] = {
            "row": Path(question.where).name,
            "number": str(question.number),
            "answers": [],
        }
        for output in (each.outputs[0] for each in of_row):
            number = final_number(output.text)
            row["answers"].append(
                {
                    "text": output.text,
                    "number": None if number is None else str(number),
                    "is_right": number == question.number,
                    "finish_reason": output.finish_reason,
                    "tokens": len(output.token_ids),
                }
            )
        rows.append(row)
    result: dict[str, Any] = {"questions": len(rows), "models": []}
    for model in range(len(answers)):
        own = [row["answers"][model] for row in rows]
        right = sum(answer["is_right"] for answer in own)
        result["models"].append(
            {
                "accuracy": {"value": right / len(rows), "interval": wilson(right, len(rows))},
                "ended": sum(answer["finish_reason"] == "stop" for answer in own) / len(rows),
                "mean_tokens": sum(answer["tokens"] for answer in own) / len(rows),
            }
        )
    if len(answers) == 2:
        gains = [row["answers"][0]["is_right"] - row["answers"][1]["is_right"] for row in rows]
        result["difference"] = mean_of(gains, [1.0] * len(rows))
    return result | {"rows": rows}


def text_figures(examples: Sequence[Example], scores: Sequence[Sequence[float]]) -> dict[str, Any]:
    counts = [len(example.token_ids) - example.prompt_len for example in examples]
    num_models = min(2, len(scores[0]))
    nats = [[score[model] for score in scores] for model in range(num_models)]
    result: dict[str, Any] = {
        "texts": len(counts),
        "tokens": sum(counts),
        "models": [mean_of(of_model, counts) for of_model in nats],
    }
    if num_models == 2:
        more = [own - others for own, others in zip(*nats, strict=True)]
        result["difference"] = mean_of(more, counts)
        for column, name in ((2, "kl"), (3, "same")):
            result[name] = mean_of([score[column] for score in scores], counts)
    result["rows"] = [
        {"tokens": count, "nats": score[:num_models]}
        | dict(zip(("kl", "same"), score[num_models:], strict=False))
        for count, score in zip(counts, scores, strict=True)
    ]
    return result


def prompts_figures(
    prompts: Sequence[Prompt], examples: Sequence[Example], scores: Sequence[Sequence[float]]
) -> dict[str, Any]:
    tasks = [prompt.task for prompt in prompts]
    rows = [
        {
            "row": Path(prompt.where).name,
            "task": prompt.task,
            "tokens": len(example.token_ids) - example.prompt_len,
        }
        | {"kl": kl, "same": same}
        for prompt, example, (_, _, kl, same) in zip(prompts, examples, scores, strict=True)
    ]

    def figures(of: Sequence[int]) -> dict[str, Any]:
        counts, named = [rows[at]["tokens"] for at in of], [tasks[at] for at in of]
        each = {name: mean_of([rows[at][name] for at in of], counts, named) for name in ("kl", "same")}
        return {"prompts": len(of), "tokens": sum(counts)} | each

    by_task = {
        task: figures([at for at, own in enumerate(tasks) if own == task]) for task in dict.fromkeys(tasks)
    }
    return {"tasks": by_task, "mean": figures(range(len(rows))), "rows": rows}
