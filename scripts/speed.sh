#!/usr/bin/env bash
# Side by side in one run: LMCache's own HiddenStateStore, this package, and plain copies of the same bytes.
#
#   scripts/speed.sh [--rounds N]
#
# Uses the environment of scripts/test.sh; run that first. Wants a quiet machine with 4 GB to spare.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -x .venv/bin/python ] || { echo "scripts/speed.sh: run scripts/test.sh first, it sets up .venv" >&2; exit 1; }
export LMCACHE_TRACK_USAGE=false LMCACHE_LOG_LEVEL=ERROR
exec .venv/bin/python scripts/speed.py "$@"
