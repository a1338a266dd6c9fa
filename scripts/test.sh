#!/usr/bin/env bash
# Set up and run all tests, in two processes: the real pairs in one, all else in the other (tests/conftest.py). They take up
# to 12 GB of memory together; arguments go to pytest, such as --numprocesses 0 for one process. A failed test is run once
# more and listed as RERUN: the tests stop and kill real processes, and a busy machine can miss a deadline once. What fails
# twice fails the run.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
.venv/bin/python -m ruff check .
.venv/bin/python -m ruff format --check --quiet .
.venv/bin/python -m mypy --num-workers 2
exec .venv/bin/python -m pytest --numprocesses 2 --dist loadscope --no-loadscope-reorder --reruns 1 -raR "$@"
