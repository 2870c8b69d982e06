#!/usr/bin/env bash
# lmcache-hs-capture in the environment that scripts/vllm_env.sh makes: the same options, nothing to activate.
#
#   scripts/capture.sh MODEL DATA.jsonl                 run MODEL on every row
#   scripts/capture.sh MODEL DATA.jsonl --dry-run       only count: rows, tokens, bytes on disk, bad rows
#   scripts/capture.sh MODEL DATA.jsonl --server URL    send every row to a vLLM server that has the connector
#   scripts/capture.sh MODEL --serve-command            print the command that starts such a server
#   scripts/capture.sh MODEL DATA.jsonl -- ARGS         what stands behind -- is for vLLM
#   scripts/capture.sh --help                           all options
#
# PYTHON names another Python with vLLM 0.32 (default: .venv-vllm/bin/python).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv-vllm/bin/python}
if ! "$python" -c 'import transformers, yaml, xxhash' 2>/dev/null; then
  case " $* " in *" --help "* | *" -h "*) sed -n '2,11p' "$0" | cut -c3- && exit 0 ;; esac
  echo "scripts/capture.sh: $python is no Python with vLLM; scripts/vllm_env.sh makes one, PYTHON names another" >&2
  exit 2
fi
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m lmcache_hs_backend.cli.capture "$@"
