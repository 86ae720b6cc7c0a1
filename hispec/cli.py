"""The command line. Everything heavy is imported by the command that needs it, so that `--help` answers at once."""
from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .jobs.schema import RunConfig

OK, ALL_FAILED, USER_ERROR, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 130, 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code (docs/jobs.md). HISPEC_DEBUG=1 lets errors through, with their traceback."""
    options = _parser().parse_args(arguments)
    debug = os.environ.get("HISPEC_DEBUG", "") not in ("", "0")
    try:
        code: int = options.command(options)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as interrupt:
        print(f"\nInterrupted. {interrupt}".rstrip(), file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has gone; what Python would still flush at exit must go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        if debug or not _is_users(error):
            raise
        print(f"hispec: {error}", file=sys.stderr)
        return USER_ERROR


def _is_users(error: Exception) -> bool:
    """Whether the message of `error` is all that a user needs."""
    from ee_models.errors import CheckpointError, TrainingError

    from .errors import HiSpecError

    return isinstance(error, HiSpecError | CheckpointError | TrainingError | OSError)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hispec", description="Early-exit hierarchical speculative decoding.")
    parser.add_argument("--version", action="version", version=f"hispec {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands)
    _add_generate(commands)
    _add_bench(commands)
    _add_profile(commands)
    _add_train(commands)
    _add_fetch(commands)
    return parser


def _add_run(commands: Any) -> None:
    run = commands.add_parser("run", help="run an offline job", description="Run the job of a YAML file (docs/jobs.md).")
    run.add_argument("job", type=Path, metavar="JOB.yaml")
    _add_preset(run)
    _add_set(run)
    run.add_argument("--no-progress", action="store_true", help="no progress bar")
    run.set_defaults(command=_run)


def _add_generate(commands: Any) -> None:
    generate = commands.add_parser(
        "generate", help="answer one prompt", description="Stream the answer to one prompt. Without --draft-layer, decoding is plain."
    )
    generate.add_argument("prompt", metavar="PROMPT", help="the prompt; - reads it from standard input")
    generate.add_argument("--model", help="a name that `hispec fetch` knows, a hub id, or a folder")
    _add_preset(generate)
    generate.add_argument("--chat", action=argparse.BooleanOptionalAction, default=True, help="put the prompt into the model's chat template (default: yes)")
    generate.add_argument("--draft-layer", type=int, metavar="D", help="draft with layers [0, D)")
    generate.add_argument("--check-layer", type=int, metavar="C", help="check drafts with layers [D, C)")
    generate.add_argument("--num-draft-tokens", type=int, metavar="K", help="tokens per draft cycle")
    generate.add_argument("--num-checks", type=int, metavar="R", help="draft cycles per verify")
    generate.add_argument("--max-tokens", type=int, metavar="N", help="new tokens at most (default: 256)")
    generate.add_argument("--temperature", type=float, metavar="T", help="0 = greedy (default: 0)")
    generate.add_argument("--top-p", type=float, metavar="P", help="nucleus sampling")
    generate.add_argument("--seed", type=int, help="of sampling")
    _add_set(generate)
    generate.set_defaults(command=_generate)


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="compare transformers, plain, two-tier and three-tier decoding",
        description="Measure a job's prompts, greedy, in one process with interleaved repeats: transformers, plain, two-tier, three-tier.",
    )
    bench.add_argument("job", type=Path, metavar="JOB.yaml")
    _add_preset(bench)
    bench.add_argument("--plan", type=Path, action="append", default=[], metavar="FILE.yaml", help="measure this preset's plan too, under the file's name")
    bench.add_argument(
        "--profile", type=Path, metavar="FILE.json", help="measure the best plan of each drafter too, two-tier and three-tier, of a `hispec profile --json`"
    )
    _add_set(bench)
    bench.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    bench.add_argument("--repeats", type=int, metavar="N", help="timed runs of each engine (default: 3)")
    bench.add_argument("--batch-size", type=int, metavar="B", help="prompts that run together (default: 16)")
    bench.add_argument("--max-tokens", type=int, metavar="M", help="new tokens per prompt (default: 64)")
    bench.add_argument("--temperature", type=float, metavar="T", help="sample at this temperature, each prompt with its own seed (default: 0, greedy)")
    bench.add_argument("--limit", type=int, metavar="N", help="use the first N prompts")
    bench.add_argument("--context", type=int, metavar="N", help="repeat or cut each prompt to N tokens")
    bench.add_argument("--no-transformers", dest="transformers", action="store_false", help="leave transformers out, and its copy of the model")
    bench.set_defaults(command=_bench)


def _add_profile(commands: Any) -> None:
    profile = commands.add_parser(
        "profile",
        help="find the plan that is fastest here",
        description="Measure exits and stages on a job's prompts, greedy; predict every plan, run the best for real, and keep the fastest as a preset.",
    )
    profile.add_argument("job", type=Path, metavar="JOB.yaml")
    _add_set(profile)
    profile.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured and predicted as JSON")
    profile.add_argument("--write-preset", dest="preset", type=Path, metavar="FILE.yaml", help="write the fastest plan as the settings of a job")
    profile.add_argument("--plots", type=Path, metavar="DIR", help="draw acceptance by layer and predicted speed by exits as PNG files")
    profile.add_argument("--overwrite", action="store_true", help="replace an existing preset")
    profile.add_argument("--exits", metavar="FOLDER", help="trained exits to profile (default: the job's, else those that come with HiSpec for the model)")
    profile.add_argument("--batch-size", type=int, metavar="B", help="prompts that run together (default: the job's engine.max_num_seqs)")
    profile.add_argument("--max-tokens", type=int, metavar="M", help="new tokens per prompt (default: 64)")
    profile.add_argument("--limit", type=int, metavar="N", help="use the first N prompts")
    profile.add_argument("--max-drafts", type=int, metavar="K", help="largest num_draft_tokens of exits and draft models (default: 8)")
    profile.add_argument("--max-checks", type=int, metavar="R", help="largest num_checks of a plan (default: 8)")
    profile.add_argument("--max-window", type=int, metavar="W", help="places of a round at most, R * (B * K + 1) (default: 32)")
    profile.add_argument("--drafters", nargs="+", metavar="KIND", help="drafters to look at: exit, tree, ngram, hybrid, model (default: all that apply)")
    profile.add_argument("--top", type=int, metavar="N", help="plans of each kind that are run for real (default: 2)")
    profile.add_argument("--repeats", type=int, metavar="N", help="timed runs of each (default: 3)")
    profile.add_argument("--no-progress", action="store_true", help="no progress bars")
    profile.set_defaults(command=_profile)


def _add_train(commands: Any) -> None:
    train = commands.add_parser("train", help="train exits", description="Train exits, or a LayerSkip model, as a YAML file says (docs/training.md).")
    train.add_argument("config", type=Path, metavar="CONFIG.yaml")
    _add_set(train)
    train.add_argument("--only-data", action="store_true", help="write prompts and answers, and stop before training")
    train.add_argument("--no-progress", action="store_true", help="no progress bars")
    train.set_defaults(command=_train)


def _add_fetch(commands: Any) -> None:
    fetch = commands.add_parser("fetch", help="get a model", description="Download and convert a known model; prints its folder.")
    fetch.add_argument("name", metavar="NAME", help="such as smollm2")
    fetch.add_argument("--force", action="store_true", help="do it again even if it is there")
    fetch.set_defaults(command=_fetch)


def _add_preset(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", type=Path, metavar="FILE.yaml", help="take model, engine, plan and sampling from this file, such as configs/smollm2.yaml")


def _add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--set", action="extend", nargs="+", default=[], metavar="KEY.PATH=VALUE", help="override settings, such as sampling.max_tokens=64")


def _run(options: argparse.Namespace) -> int:
    from .jobs.load import load_job

    job = load_job(options.job, options.set, options.preset)
    from .jobs.report import print_job
    from .jobs.runner import run_job

    report = run_job(job, progress=not options.no_progress)
    print_job(report)
    return ALL_FAILED if report.all_failed else OK


def _generate(options: argparse.Namespace) -> int:
    config = _generate_config(options)
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    from .llm import LLM

    llm = LLM(config.model, speculative=config.speculative, **config.engine.model_dump())
    try:
        arrivals: list[tuple[float, int]] = []  # seconds since the start, tokens
        started = time.perf_counter()
        for delta in llm.stream([{"role": "user", "content": prompt}] if options.chat else prompt, config.sampling, chat=options.chat):
            arrivals.append((time.perf_counter() - started, len(delta.token_ids)))
            print(delta.text, end="", flush=True)
            if delta.error is not None:
                raise RuntimeError(delta.error)
        print(flush=True)
        _print_generate_stats(arrivals, llm.stats(), config)
    finally:
        llm.close()
    return OK


def _generate_config(options: argparse.Namespace) -> RunConfig:
    """The same settings as a job's, from flags and --set."""
    from .errors import build
    from .jobs.load import apply_overrides, load_preset
    from .jobs.schema import RunConfig

    def given(**values: Any) -> dict[str, Any]:
        return {name: value for name, value in values.items() if value is not None}

    speculative = given(
        draft=None if options.draft_layer is None else {"layer": options.draft_layer},
        check=None if options.check_layer is None else {"layer": options.check_layer},
        num_draft_tokens=options.num_draft_tokens,
        num_checks=options.num_checks,
    )
    sampling = given(max_tokens=options.max_tokens, temperature=options.temperature, top_p=options.top_p, seed=options.seed)
    values: dict[str, Any] = {} if options.preset is None else load_preset(options.preset).model_dump(exclude_unset=True)
    values |= given(model=options.model, speculative=speculative or None)
    values["engine"] = {**values.get("engine", {}), "max_num_seqs": 1}
    values["sampling"] = {"max_tokens": 256, "temperature": 0.0, **values.get("sampling", {}), **sampling}
    apply_overrides(values, options.set)
    return build(RunConfig, values)


def _print_generate_stats(arrivals: list[tuple[float, int]], stats: dict[str, Any], config: RunConfig) -> None:
    """One line. The speed is that after the first tokens: before them lie the prompt and, the first time, compiling."""
    from .jobs.stats import Rates

    rates = Rates.of(stats, config.speculative)
    counts = [count for _, count in arrivals]
    parts = [f"{sum(counts)} tokens, the first after {arrivals[0][0]:.1f} s"]
    if sum(counts[1:]):
        parts.append(f"then {sum(counts[1:]) / (arrivals[-1][0] - arrivals[0][0]):.1f} tokens/s")
    for share, name in ((rates.draft_accepted, "of drafted"), (rates.tentative_accepted, "of tentative")):
        if share is not None:
            parts.append(f"{share:.0%} {name} tokens kept")
    if config.speculative is not None and rates.mean_accepted_len is not None:
        parts.append(f"{rates.mean_accepted_len:.2f} tokens per round")
    print(", ".join(parts), file=sys.stderr)


def _bench(options: argparse.Namespace) -> int:
    import json

    from .errors import ConfigError, build
    from .jobs.bench import BenchOptions, run_bench
    from .jobs.load import best_plans, load_job, load_preset
    from .jobs.report import print_bench

    limit = [] if options.limit is None else [f"input.limit={options.limit}"]
    job = load_job(options.job, options.set + limit, options.preset)
    values = {name: getattr(options, name) for name in BenchOptions.model_fields if getattr(options, name, None) is not None}
    values["plans"] = {path.stem: load_preset(path).speculative for path in options.plan}
    if options.profile is not None:
        found = best_plans(options.profile)
        if taken := sorted(values["plans"].keys() & found.keys()):
            raise ConfigError(f"--plan: {taken[0]!r} is also a name in {options.profile}; rename the file, which names the plan")
        values["plans"] |= found
    bench_options = build(BenchOptions, values)
    if options.json is not None:
        try:
            options.json.open("a", encoding="utf-8").close()
        except OSError as error:
            raise ConfigError(f"--json: cannot write {options.json}: {error.strerror}") from None
    result = run_bench(job, bench_options)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print_bench(result)
    return OK


def _profile(options: argparse.Namespace) -> int:
    from .errors import build
    from .jobs.load import load_job
    from .profile.files import Targets
    from .profile.options import ProfileOptions

    limit = [] if options.limit is None else [f"input.limit={options.limit}"]
    job = load_job(options.job, options.set + limit)
    values = {name: getattr(options, name) for name in ProfileOptions.model_fields if getattr(options, name) is not None}
    profile_options = build(ProfileOptions, values)
    targets = Targets(json=options.json, preset=options.preset, plots=options.plots, overwrite=options.overwrite)
    from .profile.report import print_profile
    from .profile.run import profile_to_files

    print_profile(profile_to_files(job, profile_options, targets, progress=not options.no_progress))
    return OK


def _train(options: argparse.Namespace) -> int:
    from .training.load import load_training

    config = load_training(options.config, options.set)
    from .training.run import run_training

    report = run_training(config, only_data=options.only_data, progress=not options.no_progress)
    if report is not None:
        for name, value in report.outcome.metrics.items():
            print(f"{name}: {value:.4f}")
        print(f"{report.outcome.steps_run} steps in {report.outcome.seconds:.0f} s; {report.path}")
    return OK


def _fetch(options: argparse.Namespace) -> int:
    from .fetch import fetch

    print(fetch(options.name, force=options.force))
    return OK
