#!/usr/bin/env bash
# Ten minutes of full churn on two small tiers: no wrong row, and memory, descriptors and threads stay flat.
#
#   scripts/soak.sh [SECONDS]
#
# Uses the environment of scripts/test.sh; run that first.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -x .venv/bin/python ] || { echo "scripts/soak.sh: run scripts/test.sh first, it sets up .venv" >&2; exit 1; }
HS_SOAK_SEC=${1:-600} exec .venv/bin/python -m pytest -q -s -o faulthandler_timeout=1200 tests/stress/test_soak.py
