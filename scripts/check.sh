#!/usr/bin/env bash
# Everything that must pass before a change goes in: lint, types, tests. Called by `make test`, and so by CI.
# PYTHON names the interpreter that has HiSpec and its test tools installed; arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"

"$python" -m ruff check .
"$python" -m mypy
if [ "$#" -eq 0 ]; then
    set -- -m "not slow"
fi
"$python" -m pytest -q "$@"
