#!/usr/bin/env bash
# Fills the tiers with the hidden states of a dataset, with vLLM in this process or a running server.
#
#   scripts/capture.sh MODEL DATA.jsonl                 run MODEL on every row
#   scripts/capture.sh MODEL DATA.jsonl --server URL    send every row to a vLLM server that has the connector
#   scripts/capture.sh MODEL --serve-command            print the command that starts such a server
#   scripts/capture.sh --help                           all options
#
# Needs a Python with vLLM 0.32: PYTHON names it (default: .venv-vllm, which scripts/test_vllm.sh makes).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv-vllm/bin/python}
if ! "$python" -c 'import vllm' 2>/dev/null; then
  case " $* " in *" --help "* | *" -h "*) sed -n '2,9p' "$0" | cut -c3- && exit 0 ;; esac
  echo "scripts/capture.sh: $python has no vLLM; set PYTHON to one that has vLLM 0.32, or run scripts/test_vllm.sh" >&2
  exit 2
fi
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$python" "$root/scripts/vllm_capture.py" "$@"
