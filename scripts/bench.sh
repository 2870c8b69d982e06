#!/usr/bin/env bash
# Every figure beside its peers and beside the machine's limits, in one run.
#
#   scripts/bench.sh [--docs]    all subjects, some 35 minutes; --docs writes docs/performance.md and its appendix
#   scripts/bench.sh --render    writes these again from what was measured last
#   scripts/bench.sh --quick     a sign of life of each subject, under three minutes (CI)
#   scripts/bench.sh --only callers --real-time         small calls, as root, on a machine that has other work
#   scripts/bench.sh --only hot,cold --dir /nvme/tmp --vllm-python /opt/vllm/bin/python
#
# Uses the environment of scripts/test.sh; run that first. The full size wants a quiet machine with two cores, 8 GB of
# memory and 20 GB of disk. Starts over many files are cold only when run by root, which may empty the kernel's caches.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${HS_BENCH_PYTHON:-.venv/bin/python}
[ -x "$python" ] || { echo "scripts/bench.sh: run scripts/test.sh first, it sets up .venv" >&2; exit 1; }
case " $* " in
  *" --docs "* | *" --out"*)
    "$python" -c 'import matplotlib' 2>/dev/null || "$python" -m pip install -q -e '.[bench]' ;;
esac
export LMCACHE_TRACK_USAGE=false LMCACHE_LOG_LEVEL=ERROR
exec "$python" -m benchmarks "$@"
