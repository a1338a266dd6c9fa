#!/usr/bin/env bash
# Everything from nothing: set up, start a pair, ask it, show what moved, stop it. Arguments go to `mooncake-v0 demo`.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
exec .venv/bin/python -m mooncake_v0 demo "$@"
