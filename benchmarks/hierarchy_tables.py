"""The tables of benchmarks/hierarchy.py."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.markdown import table
from hispec.utils.console import percent
from hispec.utils.environment import busy_text


def print_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    print(*table(titles, rows), "", sep="\n")


def interval_text(found: Mapping[str, Any]) -> str:
    return "" if found["interval"] is None else "–".join(f"{bound:.2f}" for bound in found["interval"])


def print_agreement(found: Mapping[str, Any]) -> None:
    print("\n## Own greedy answers\n")
    tasks = list(found["tasks"])
    mean = ["mean"] if len(tasks) > 1 else []
    rows = []
    for exit_ in found["exits"]:
        shares = [exit_["tasks"][task] for task in tasks]
        shares += [statistics.fmean(shares)] * len(mean)
        rows.append([str(exit_["layer"]), *(percent(share) for share in shares)])
    print_table(["exit", *tasks, *mean], rows)


def print_claims(found: Mapping[str, Mapping[str, Any]], what: Mapping[str, str]) -> None:
    print_table(
        [
            "three tiers over two",
            "three",
            "two",
            *(title for each in what.values() for title in (each, "95 %")),
        ],
        [
            [
                {"over_exits": "over exits", "over_any": "over the best of any drafter"}[name],
                first["three_tier"],
                first["two_tier"],
                *(
                    text
                    for of in what
                    for text in (f"{found[of][name]['ratio']:.3f}", interval_text(found[of][name]))
                ),
            ]
            for name, first in next(iter(found.values())).items()
        ],
    )


def print_counted(found: Mapping[str, Any]) -> None:
    print("## Counted rounds, a pass costs its share of the weights\n")
    print_table(
        [
            "best of",
            "tokens per cost of a full pass",
            "95 %",
            "tokens per full pass",
            "95 %",
            "tokens/round",
            "plan",
        ],
        [
            [
                kind,
                f"{each['per_cost']['ratio']:.3f}",
                interval_text(each["per_cost"]),
                f"{each['per_full_pass']['ratio']:.3f}",
                interval_text(each["per_full_pass"]),
                f"{each['held_out']['tokens_per_round']:.2f}",
                each["plan"],
            ]
            for kind, each in found["plans"].items()
        ],
    )
    print_claims(found["claims"], {"per_cost": "per cost", "per_full_pass": "per full pass"})


def print_measured(batch_size: str, found: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
    print(f"## Measured, batch {batch_size}\n")
    rows = []
    for kind, each in found["plans"].items():
        together, same = each["all_prompts"], each["exact_match"]
        rows.append(
            [
                kind,
                f"{each['tokens_per_s']:.1f}",
                f"{each['to_plain']['ratio']:.3f}",
                interval_text(each["to_plain"]) if kind != "plain" else "",
                f"{each['rounds_to_plain']['ratio']:.3f}",
                f"{together['predicted']:.3f}",
                f"{together['measured']:.3f}",
                f"{together['difference']:+.1%}",
                "/".join(map(str, same or ())),
                each["plan"],
            ]
        )
    titles = ["best of", "tokens/s", "× plain", "95 %", "rounds alone", "all prompts: predicted", "measured"]
    print_table([*titles, "difference", "same output", "plan"], rows)
    print_claims(found["claims"], {"all": "measured", "rounds": "rounds alone"})
    if not found["row_invariant"]:
        print("Rows do not keep their bits on this platform: outputs may differ at near-ties.\n")
    if (busy := busy_text(environment)) is not None:
        print(f"{busy}: do not rely on these speeds.\n")
