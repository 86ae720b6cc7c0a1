"""What several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path

OK, ALL_FAILED, USER_ERROR, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 130, 141


def add_preset(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--preset",
        type=Path,
        metavar="FILE.yaml",
        help="take model, engine, plan and sampling from this file, such as configs/smollm2.yaml",
    )


def add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="extend",
        nargs="+",
        default=[],
        metavar="KEY.PATH=VALUE",
        help="override settings, such as sampling.max_tokens=64",
    )
