"""Arguments that benchmarks have in common, and types of arguments, as argparse calls them."""

from __future__ import annotations

import argparse
import math
from pathlib import Path


def at_least_one(text: str) -> int:
    return _at_least(1, text)


def at_least_zero(text: str) -> int:
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    if (value := int(text)) < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
    return value


def above_zero(text: str) -> float:
    if not 0.0 < (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, got {text}")
    return value


def not_negative(text: str) -> float:
    if not 0.0 <= (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number of at least 0, got {text}")
    return value


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Of a benchmark that decodes the prompts of one file."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE")
    parser.add_argument("--limit", type=at_least_one, metavar="N", help="the first N prompts")
    parser.add_argument("--quantization", choices=["int8", "int4"])
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser
