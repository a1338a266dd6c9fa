#!/usr/bin/env bash
# Set up and run all tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
.venv/bin/python -m ruff check .
.venv/bin/python -m ruff format --check --quiet .
.venv/bin/python -m mypy
exec .venv/bin/python -m pytest "$@"
