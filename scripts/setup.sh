#!/usr/bin/env bash
# Install what the demo and the tests need: Debian packages (as root), then the pinned environment in .venv.
set -euo pipefail
cd "$(dirname "$0")/.."

missing=$(while read -r name; do
  dpkg-query -W -f='${Status}' "$name" 2>/dev/null | grep -q 'ok installed' || echo "$name"
done < scripts/apt-packages.txt)
if [ -n "$missing" ]; then
  if [ "$(id -u)" != 0 ]; then
    echo "error: Debian packages are missing: ${missing//$'\n'/ }" >&2
    echo "  fix: sudo apt-get install ${missing//$'\n'/ }" >&2
    exit 2
  fi
  echo "installing Debian packages: ${missing//$'\n'/ }" >&2
  apt-get update -qq
  # shellcheck disable=SC2086
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing > /dev/null
fi

exec "${PYTHON:-python3}" -m mooncake_v0.pin.environment
