"""hispec env: what a bug report needs."""

from __future__ import annotations

import argparse
import json
from typing import Any

from .common import OK, add_command


def add(commands: Any) -> None:
    description = "Print versions, hardware and settings for a bug report; no names of users or hosts."
    env = add_command(commands, "env", _env, "what a bug report needs", description, has_set=False)
    env.add_argument("--json", action="store_true", help="as JSON")


def _env(options: argparse.Namespace) -> int:
    from ..utils.bug_report import bug_report

    found = bug_report()
    if options.json:
        print(json.dumps(found, indent=2))
        return OK
    width = max(map(len, found))
    for name, value in found.items():
        print(f"{name:<{width}}  {_text(value)}")
    return OK


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items()) or "none"
    return "none" if value is None else str(value)
