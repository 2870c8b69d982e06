#!/usr/bin/env bash
# From a running server to a drafter that loads: docs/tutorial/training.md as a script, with checks. Run by check_trainers.sh.
#
#   scripts/trainers/served.sh VLLM_PYTHON SPECULATORS_PYTHON MODEL DIR
#
# vLLM serves MODEL with our connector, ten conversations are held with it, its request records become a training set,
# and speculators' own trainer trains on the files, then straight from the chunks. EPOCHS (default 2) times over the data.
set -euo pipefail
if [ $# != 4 ]; then
    sed -n '2,7p' "$0" | cut -c3- >&2
    exit 2
fi
vllm=$1 python=$2 model=$3 dir=$4
root=$(cd "$(dirname "$0")/../.." && pwd)
steps=$root/scripts/trainers
export OMP_WAIT_POLICY=passive # threads wait without spinning, which beside other work costs minutes
export PYTHONPATH=$root HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}
rm -rf "$dir"
mkdir -p "$dir"
cd "$dir"

echo "== a server"
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
# setsid: vLLM's processes are a group of their own, and end together.
setsid "$vllm" -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name smollm2 --port "$port" \
    --dtype bfloat16 --enforce-eager --max-model-len 2048 --max-num-seqs 4 \
    --speculative-config '{"method": "extract_hidden_states", "num_speculative_tokens": 1,
      "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 15, 27, 30]}}}' \
    --kv-transfer-config '{"kv_connector": "HSTieredConnector", "kv_role": "kv_producer",
      "kv_connector_module_path": "lmcache_hs_backend.integrations.vllm.connector",
      "kv_connector_extra_config": {"cold_path": "states", "chunk_size": 64, "max_cold_size": 2, "hot_size": 0.25}}' \
    >server.log 2>&1 &
server=$!
trap 'kill -KILL -- -$server 2>/dev/null || true' EXIT
for _ in $(seq 150); do
    kill -0 "$server" 2>/dev/null || break
    curl -fs -m 2 "http://127.0.0.1:$port/health" >/dev/null && break
    sleep 2
done
curl -fs -m 2 "http://127.0.0.1:$port/health" || { tail -n 40 server.log >&2; exit 1; }
grep -o 'hidden states of layers.*' server.log

echo "== conversations"
"$python" "$steps/talk.py" "http://127.0.0.1:$port" turns.jsonl
turns=$(wc -l <turns.jsonl)
for _ in $(seq 60); do # a record is written a moment after its answer
    [ "$(cat states/*/sequences/*.jsonl 2>/dev/null | wc -l)" -ge "$turns" ] && break
    sleep 0.5
done
kill -INT "$server"
wait "$server" || true

echo "== what is there"
"$python" -m lmcache_hs_backend.cli.inspect list states | sed -n 1,4p

echo "== extract"
"$python" -m lmcache_hs_backend.cli.extract states --out data --format speculators --sequences requests \
    --loss-mask generated --final-norm "$model" --val-fraction 0.1
"$python" "$steps/served.py" rows "$model" data turns.jsonl
"$python" "$steps/smollm2.py" logits "$model" data

train() { # NAME OPTIONS…
    "$python" "$steps/on_cpu.py" --speculator-type eagle3 --verifier-name-or-path "$model" \
        --data-path data --target-layer-ids 2 15 27 --draft-vocab-size 1024 --train-data-ratio 0.9 \
        --total-seq-len 512 --draft-attn-impl eager --loss-implementation eager --optimizer adamw --lr 1e-3 \
        --ttt-steps 1 --num-workers 1 --epochs "${EPOCHS:-2}" --on-missing raise --save-path "$1" "${@:2}" \
        >"$1.log" 2>&1 || { tail -n 40 "$1.log" >&2; return 1; }
}
echo "== train from the files"
train drafter-files --hidden-states-backend file
mv data/hidden_states files-that-nobody-needs
echo "== train from the chunks"
train drafter-live --hs-cold-path states --hs-final-norm "$model"
"$python" "$steps/served.py" drafters drafter-files drafter-live
