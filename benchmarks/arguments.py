"""Types of arguments, as argparse calls them."""

from __future__ import annotations

import argparse


def at_least_one(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
