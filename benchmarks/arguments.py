"""Arguments that benchmarks have in common, and types of arguments, as argparse calls them."""

from __future__ import annotations

import argparse
from pathlib import Path


def at_least_one(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
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
