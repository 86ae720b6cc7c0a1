"""hispec schema: the JSON Schema of a job file."""

from __future__ import annotations

import argparse
import json
from typing import Any

from .common import OK, add_command


def add(commands: Any) -> None:
    description = "Print the JSON Schema of job files, for editors and checks (docs/jobs.md)."
    add_command(commands, "schema", _schema, "the JSON Schema of a job file", description, has_set=False)


def _schema(options: argparse.Namespace) -> int:
    from ..jobs.schema import Job

    print(json.dumps(Job.model_json_schema(), indent=2))
    return OK
