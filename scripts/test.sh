#!/usr/bin/env bash
# Set up and run all tests. Arguments go to pytest, such as --numprocesses 2 --dist loadscope where there is memory for it.
# A failed test is run once more and listed as RERUN: the tests stop and kill real processes, and a busy machine can miss a
# deadline once. What fails twice fails the run.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
.venv/bin/python -m ruff check .
.venv/bin/python -m ruff format --check --quiet .
.venv/bin/python -m mypy
exec .venv/bin/python -m pytest --reruns 1 "$@"
