#!/usr/bin/env bash
# Everything that must pass before a change goes in: lint, types, tests. Called by `make test`, and so by CI.
# PYTHON names the interpreter that has HiSpec and its test tools installed; arguments go to pytest.
#
# Tests run in as many processes as there are cores for this one (at most 8: each takes about 1 GB), each with one
# thread: WORKERS and OMP_NUM_THREADS say otherwise. Tests of several threads set them themselves.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
cores='import os; print(min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))'
workers="${WORKERS:-$("$python" -c "$cores")}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

"$python" -m ruff check .
"$python" -m ruff format --check .
# Types are checked beside the tests: alone that would use one core. Kernels are compiled first, once, those that take
# longest on two cores: pytest's processes would each do it.
("$python" -c 'import hispec.drafters.lookup_numba'; exec "$python" -m mypy) &
types=$!
trap 'kill "$types" 2>/dev/null || true' EXIT
"$python" -c 'import ee_models.fused_kernel'
if [ "$#" -eq 0 ]; then
    set -- -m "not slow"
fi
status=0
"$python" -m pytest -q -n "$workers" --dist loadfile --durations=20 "$@" || status=$?
wait "$types" || status=$?
exit "$status"
