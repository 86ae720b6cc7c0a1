"""hispec generate: one prompt, streamed."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

from .common import OK, PRESET, add_command, add_options

if TYPE_CHECKING:
    from ..jobs.schema import RunConfig


_NEED_A_DRAFTER = ("check_layer", "num_draft_tokens", "num_checks")


def add(commands: Any) -> None:
    description = (
        "Stream the answer to one prompt. Decoding is plain without a drafter: --draft-layer, --preset, or"
        " --set speculative.draft.kind=ngram."
    )
    generate = add_command(commands, "generate", _generate, "answer one prompt", description)
    generate.add_argument("prompt", metavar="PROMPT", help="the prompt; - reads it from standard input")
    generate.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="put the prompt into the model's chat template (default: yes)",
    )
    generate.add_argument(
        "--show-tiers",
        action="store_true",
        help="colour each token by the tier whose choice it is, on a terminal, and count them on stderr",
    )
    add_options(
        generate,
        ("--model", str, "MODEL", "a name that `hispec fetch` knows, a hub id, or a folder"),
        PRESET,
        ("--draft-layer", int, "D", "draft with layers [0, D)"),
        ("--check-layer", int, "C", "check drafts with layers [D, C)"),
        ("--num-draft-tokens", int, "K", "tokens per draft cycle"),
        ("--num-checks", int, "R", "draft cycles per verify"),
        ("--max-tokens", int, "N", "new tokens at most (default: 256)"),
        ("--temperature", float, "T", "0 = greedy (default: 0)"),
        ("--top-p", float, "P", "nucleus sampling"),
        ("--seed", int, "SEED", "of sampling"),
    )


def _generate(options: argparse.Namespace) -> int:
    from ..errors import RequestError
    from .tier_text import TierText

    config = _generate_config(options)
    sampling = config.sampling
    if options.show_tiers:
        sampling = sampling.model_copy(update={"tiers": True})
    prompt = _read_stdin() if options.prompt == "-" else options.prompt
    given = [{"role": "user", "content": prompt}] if options.chat else prompt
    with closing(config.make_llm()) as llm:
        arrivals: list[tuple[float, int]] = []  # seconds since the start, tokens
        started = time.perf_counter()
        shown = TierText(llm.tokenizer, continues=not options.chat) if options.show_tiers else None
        for delta in llm.stream(given, sampling, chat=options.chat):
            arrivals.append((time.perf_counter() - started, len(delta.token_ids)))
            if shown is None:
                print(delta.text, end="", flush=True)
            else:
                shown.print(delta)
            if delta.error is not None:
                raise RequestError(delta.error)
        print(flush=True)
        if shown is not None:
            shown.print_legend()
        _print_generate_stats(arrivals, llm.stats(), config)
    return OK


def _read_stdin() -> str:
    """Raises ConfigError for bytes that are no text."""
    from ..errors import ConfigError

    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"PROMPT: standard input is not {error.encoding.upper()}: byte 0x{error.object[error.start]:02x}"
            f" at position {error.start}; convert it, as iconv does"
        ) from None


def _generate_config(options: argparse.Namespace) -> RunConfig:
    """The same settings as a job's, from flags and --set."""
    from ..errors import ConfigError, build
    from ..jobs.load import apply_overrides, load_preset
    from ..jobs.schema import RunConfig

    def given(**values: Any) -> dict[str, Any]:
        return {name: value for name, value in values.items() if value is not None}

    speculative = given(
        draft=None if options.draft_layer is None else {"layer": options.draft_layer},
        check=None if options.check_layer is None else {"layer": options.check_layer},
        num_draft_tokens=options.num_draft_tokens,
        num_checks=options.num_checks,
    )
    sampling = given(
        max_tokens=options.max_tokens, temperature=options.temperature, top_p=options.top_p, seed=options.seed
    )
    values: dict[str, Any] = (
        {} if options.preset is None else load_preset(options.preset).model_dump(exclude_unset=True)
    )
    if speculative:
        former = values.get("speculative") or {}
        for tier in ("draft", "check"):
            # A layer is changed of a tier that has one, whose other settings stay.
            if tier in speculative and (former.get(tier) or {}).get("layer") is not None:
                speculative[tier] = {**former[tier], **speculative[tier]}
        speculative = {**former, **speculative}
    values |= given(model=options.model, speculative=speculative or None)
    values["engine"] = {**values.get("engine", {}), "max_num_seqs": 1}
    values["sampling"] = {"max_tokens": 256, "temperature": 0.0, **values.get("sampling", {}), **sampling}
    apply_overrides(values, options.set)
    final = values.get("speculative")
    if speculative and isinstance(final, dict) and "draft" not in final:
        flags = ", ".join(
            f"--{name.replace('_', '-')}" for name in _NEED_A_DRAFTER if name in given(**vars(options))
        )
        raise ConfigError(
            f"{flags}: nothing drafts; add --draft-layer D, --set speculative.draft.kind=ngram (prompt"
            " lookup), or --preset FILE.yaml"
        )
    return build(RunConfig, values)


def _print_generate_stats(
    arrivals: list[tuple[float, int]], stats: dict[str, Any], config: RunConfig
) -> None:
    """One line. The speed is that after the first tokens: before them lie the prompt and, the first time,
    compiling."""
    from ..jobs.rates import Rates, floor_warning

    rates = Rates.of(stats, config.speculative)
    counts = [count for _, count in arrivals]
    parts = [f"{sum(counts)} tokens, the first after {arrivals[0][0]:.1f} s"]
    if sum(counts[1:]):
        parts.append(f"then {sum(counts[1:]) / (arrivals[-1][0] - arrivals[0][0]):.1f} tokens/s")
    for share, name in ((rates.draft_kept, "of drafted"), (rates.tentative_accepted, "of tentative")):
        if share is not None:
            parts.append(f"{share:.0%} {name} tokens kept")
    if config.speculative is not None and rates.mean_accepted_len is not None:
        parts.append(f"{rates.mean_accepted_len:.2f} tokens per round")
    print(", ".join(parts), file=sys.stderr)
    if warning := floor_warning(rates, config.speculative):
        print(warning, file=sys.stderr)
