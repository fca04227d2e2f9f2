#!/usr/bin/env bash
# Kills, cuts, stops and interrupts jobs at moments drawn by chance, and looks for what is wrong or left behind:
#   ci/soak.sh MINUTES [--seed N] [--first N]
# See tests/faults/soak.py. Emulated hosts need root.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m tests.faults.soak "$@"
