"""`hispec profile --numbers`: what numbers of fewer bits save and cost, on a job's prompts, decoded plainly.

Each is timed in turns with the first, so that the machine's drift cancels out of its ratio, and read beside
it over the first one's answers: so no more than two models are in memory at once.
"""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ee_models.checkpoint.loader import CheckpointError
from ee_models.training.examples import Example

from ..errors import ConfigError, RequestError
from ..jobs.bench_inputs import TokenIds, generate, good_rows, warm_up
from ..jobs.bench_runs import Runs, make_groups, num_matches
from ..jobs.confidence_interval import Paired, mean_of, mean_ratio, noise_of_repeats, ratio_interval
from ..jobs.rows import Row, count_rows
from ..jobs.schema import Job
from ..loading.target_model import select_device
from ..measure.likelihood import score
from ..sampling_params import SamplingParams
from ..utils.console import count, make_bar, make_console, make_table, number, percent, print_if_busy
from ..utils.environment import environment, hardware_text, watch_others
from ..utils.files import write_json
from .options import NumbersOptions, Targets
from .timed_runs import check_served

if TYPE_CHECKING:
    from ..llm import LLM

_QUANTIZED = ("int8", "int4")
_MANY = 20  # batches, which tell more by themselves than a few repeats of them


def default_numbers(device: str) -> list[str]:
    """What is compared where nothing is named: those of which a device has kernels of its own."""
    return ["float32", "bfloat16", "int8"] if select_device(device).type == "cpu" else ["bfloat16", "int8"]


def engine_settings(numbers: str, compared: Collection[str] = ()) -> dict[str, str | None]:
    """The fields of `engine` that hold weights in these numbers; int8_kv: keys and values in int8, too. Where
    that is among those that are compared, the others say that they have these as they would by themselves."""
    kv: dict[str, str | None] = {"kv_cache_dtype": "auto"} if "int8_kv" in compared else {}
    if numbers == "int8_kv":
        return {"dtype": "auto", "quantization": "int8", "kv_cache_dtype": "int8"}
    if numbers in _QUANTIZED:
        return {"dtype": "auto", "quantization": numbers, **kv}
    return {"dtype": numbers, "quantization": None, **kv}


def numbers_to_file(
    job: Job,
    options: NumbersOptions,
    path: Path | None,
    *,
    job_file: Path | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """As `compare_numbers`, and writes the result, if `path` is given, which must not be the job's file."""
    Targets(json=path, job_file=job_file).check(job)
    result = compare_numbers(job, options, progress=progress)
    if path is not None:
        write_json(path, result)
    return result


def compare_numbers(job: Job, options: NumbersOptions, *, progress: bool = True) -> dict[str, Any]:
    """Measures and returns what `--json` writes.

    Raises ConfigError for a bad setting or input row, or where nothing but the first can be had,
    CheckpointError, and RequestError if a prompt can't be served.
    """
    count_rows(job.input)
    rows = good_rows(job)
    options = options.model_copy(
        update={
            "batch_size": min(options.batch_size or job.engine.max_num_seqs, len(rows)),
            "max_tokens": options.max_tokens or job.sampling.max_tokens,
        }
    )
    # Now, so that its load is that of others.
    measured_on, others = environment(select_device(job.engine.device)), watch_others()
    first, *rest = options.numbers
    with _open(job, first, options) as llm:
        prompts = [llm.encode(row.prompt, chat=row.is_chat) for row in rows]
        sampling = SamplingParams(
            temperature=0.0, max_tokens=options.max_tokens, ignore_eos=job.sampling.ignore_eos
        )
        check_served(llm, prompts, sampling)
        generate(llm, prompts, sampling)  # what the first cannot do is no fault of the others
        lengths, speeds, found, refused = list(map(len, prompts)), [], [], {}
        for name in rest:
            try:
                other = _open(job, name, options)
            except (ConfigError, CheckpointError) as error:  # the others can be compared all the same
                refused[name] = str(error)
                continue
            with other:
                try:
                    figures, speed = _compare(other, llm, name, rows, prompts, sampling, options, progress)
                except RequestError as error:  # as of numbers too large for float16
                    refused[name] = str(error)
                    continue
            found.append(figures)
            speeds.append(speed)
        if not found:
            raise ConfigError(
                f"--numbers {' '.join(options.numbers)}: there is nothing to compare {first} with:\n"
                + "\n".join(f"{name}: {why}" for name, why in refused.items())
            )
        measured = [
            {"numbers": first, **_held(llm), "tokens_per_s": statistics.geometric_mean(speeds)},
            *found,
        ]
    return {
        "model": job.model,
        "date": datetime.date.today().isoformat(),
        "environment": measured_on | {"others": others()},
        "options": options.model_dump(),
        "prompts": {
            "num": len(prompts),
            "tokens_mean": sum(lengths) / len(lengths),
            "tokens_max": max(lengths),
        },
        "measured": measured,
        "refused": refused,
        "best": best_of(measured, options.max_kl),
    }


def best_of(measured: Sequence[Mapping[str, Any]], max_kl: float) -> str:
    """The fastest of those that differ from the first by no more than max_kl; the first, unless another's
    speed is above its own beyond chance."""
    first, *rest = measured
    faster = [
        each
        for each in rest
        if each["kl"]["value"] <= max_kl and each["interval"] is not None and each["interval"][0] > 1.0
    ]
    best: str = max(faster, key=lambda each: each["ratio"], default=first)["numbers"]
    return best


def _open(job: Job, numbers: str, options: NumbersOptions) -> LLM:
    """The job's model held in these numbers, decoding plainly."""
    from ..llm import LLM

    settings = job.engine.model_dump() | {
        **engine_settings(numbers, options.numbers),
        "max_num_seqs": options.batch_size,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": job.engine.gpu_memory_utilization / 2,  # there are two at once
        "trace": None,
    }
    return LLM(job.model, **settings)


def _compare(
    llm: LLM,
    first: LLM,
    name: str,
    rows: Sequence[Row],
    prompts: list[TokenIds],
    sampling: SamplingParams,
    options: NumbersOptions,
    progress: bool,
) -> tuple[dict[str, Any], float]:
    """A model beside the first: their speeds in turns, and how far apart both are on the first's answers ->
    its figures, and the first's tokens per second."""
    batch_size = options.batch_size or 1
    groups = make_groups(list(rows), batch_size, by_batch=True)
    run, reference = Runs(groups), Runs(groups)
    turns = [(first, reference), (llm, run)]
    for each, _ in turns:
        warm_up(each, prompts[:batch_size], sampling)
    with make_bar(options.repeats * len(groups), name, "batch", progress) as bar:
        for repeat in range(options.repeats):
            for _, runs in turns:
                runs.begin_run()
            for at in range(len(groups)):
                # Neither always finds in the caches what it has left there itself.
                for each, runs in reversed(turns) if (repeat + at) % 2 else turns:
                    runs.time(at, prompts, partial(generate, each, sampling=sampling))
                bar.update()
    answers = [
        Example([*prompt, *answer], len(prompt))
        for prompt, answer in zip(prompts, reference.outputs[0], strict=True)
    ]
    counts = [len(example.token_ids) - example.prompt_len for example in answers]
    decoders = llm.decoder, first.decoder
    scores = score(decoders, answers, batch_size, f"{name}, read beside the first", progress=progress)
    ratio, interval = _ratio(run, reference)
    return {
        "numbers": name,
        **_held(llm),
        "tokens_per_s": run.median_tokens_per_s(),
        "ratio": ratio,
        "interval": interval,
        "kl": mean_of([each[2] for each in scores], counts),
        "same": mean_of([each[3] for each in scores], counts),
        "tokens": sum(counts),
        "equal_outputs": num_matches(run, reference),
    }, reference.median_tokens_per_s()


def _ratio(run: Runs, reference: Runs) -> tuple[float, list[float] | None]:
    """Mean over tasks of the ratio of speeds, and its 95 % interval: over batches, where there are many, else
    by the noise of repeats; None where neither can be told."""
    tasks = list(dict.fromkeys(group.task for group in run.groups))
    paired = [Paired(*run.by_group(task), *reference.by_group(task)) for task in tasks]
    ratio = mean_ratio(paired)
    interval = ratio_interval(paired) if len(run.groups) >= _MANY else None
    noise = noise_of_repeats([run.tokens_per_s(), reference.tokens_per_s()])
    if interval is None and noise is not None:
        interval = ratio / noise, ratio * noise
    return ratio, None if interval is None else list(interval)


def _held(llm: LLM) -> dict[str, Any]:
    """What weights, keys and values are held in, and the bytes of the first."""
    decoder = llm.decoder
    return {
        "weights_bytes": decoder.num_bytes,
        "kv_dtype": str(decoder.kv_dtype).removeprefix("torch."),
    }


def print_numbers(result: Mapping[str, Any], job: Path, file: IO[str] | None = None) -> None:
    """Prints the table of a result, and what to do with it, on stdout unless `file` is given."""
    console = make_console(file)
    options, prompts, (first, *rest) = result["options"], result["prompts"], result["measured"]
    console.print(
        f"{result['model']}: {count(prompts['num'], 'prompt')} of {prompts['tokens_mean']:.0f} tokens (mean),"
        f" plain, greedy, batch {options['batch_size']}, {count(options['repeats'], 'repeat')}"
    )
    console.print(hardware_text(result["environment"]))
    console.print()
    name = first["numbers"]
    table = make_table("weights", "MB", "KV", "tokens/s", f"x {name}", "95 %", "KL", "same token", "equal")
    for each in result["measured"]:
        is_first = each is first
        interval = each.get("interval")
        table.add_row(
            f"{each['numbers']}{' <-' if each['numbers'] == result['best'] else ''}",
            f"{each['weights_bytes'] / 1e6:.0f}",
            each["kv_dtype"],
            f"{each['tokens_per_s']:.1f}",
            number(1.0 if is_first else each["ratio"]),
            "" if interval is None else f"{interval[0]:.2f}-{interval[1]:.2f}",
            "" if is_first else f"{each['kl']['value']:.4f}",
            "" if is_first else percent(each["same"]["value"]),
            "" if is_first else "{}/{}".format(*each["equal_outputs"]),
        )
    console.print(table)
    console.print(
        f"Speeds include prompts. Over the {rest[0]['tokens']} tokens that {name} answered: KL is by how many"
        " nats a token the others' probabilities differ from its own; same token: at how many of them both"
        " find the same one likeliest; equal: prompts that got the same answer, token for token."
    )
    for other, why in result["refused"].items():
        console.print(f"{other} is not to be had here: {why}")
    console.print()
    console.print(_advice(result, job))
    print_if_busy(console, result["environment"])


def _advice(result: Mapping[str, Any], job: Path) -> str:
    best, max_kl = result["best"], result["options"]["max_kl"]
    if best == result["measured"][0]["numbers"]:
        if any(each["interval"] is None for each in result["measured"][1:]):
            return f"{best} it is: a single repeat of so few batches tells no speeds apart; give --repeats 3."
        return f"{best} it is: nothing else is faster, beyond chance, and within --max-kl={max_kl:g} of it."
    compared = result["options"]["numbers"]
    settings = " ".join(
        f"engine.{name}={'null' if value is None else value}"
        for name, value in engine_settings(best, compared).items()
    )
    return (
        f"{best} is the fastest within --max-kl={max_kl:g}. The best plan for it:\n"
        f"  hispec profile {job} --set {settings} --write-preset FILE.yaml"
    )
