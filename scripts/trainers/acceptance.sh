#!/usr/bin/env bash
# The proof that captured rows train a drafter that works: what is captured, extracted and trained on here is then
# accepted by the model itself, in vLLM's own speculative decoding, as often as with rows of a Hugging Face forward.
#
#   scripts/trainers/acceptance.sh VLLM_PYTHON TRAINER_PYTHON MODEL DIR
#
# Stages, each left out when it has ended before (so the same command goes on):
#   prompts    PROMPTS prompts to train on (2000) and HELD_OUT to measure with (80), from texts that are on the machine
#   capture    lmcache-hs-capture: MODEL answers each with up to TOKENS tokens (64); its rows go to chunks
#   extract    lmcache-hs-extract: a set for speculators
#   rows       the same set with the rows of a Hugging Face forward; and twice with a mistake that no trainer notices:
#              `wrong-last`, layer n - 1 in place of the last; `wrong-aux`, the other three one layer too early
#   train-*    one EAGLE-3 drafter on each set by speculators, EPOCHS times over it (2), with a vocabulary of VOCABULARY
#              tokens (2048); all else equal, the seed too. `chunks-2` is `chunks` with another seed: the noise
#   accept-*   each drafter proposes DRAFT_TOKENS tokens a step (2) for the held-out prompts; greedy, ANSWER tokens (64)
#   report     the table, DIR/acceptance.json and DIR/acceptance.png; status 1 when it is not as it should be
#
# DRAFTERS names the sets to train on (default: chunks hf wrong-last chunks-2; wrong-aux is there, too). VLLM_PYTHON:
# scripts/vllm_env.sh makes one; TRAINER_PYTHON: a Python with speculators 0.9 and this package's needs, as
# scripts/check_trainers.sh makes. The defaults took 95 minutes on two cores beside a test suite, at a load of 4 to 12.
set -euo pipefail
if [ $# != 4 ]; then
    sed -n '2,22p' "$0" | cut -c3- >&2
    exit 2
fi
vllm=$(realpath -s "$1") trainer=$(realpath -s "$2") model=$(realpath "$3") dir=$4
root=$(cd "$(dirname "$0")/../.." && pwd)
steps=$root/scripts/trainers
export OMP_WAIT_POLICY=passive # threads wait without spinning, which beside other work costs minutes
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}
read -ra drafters <<<"${DRAFTERS:-chunks hf wrong-last chunks-2}"
mkdir -p "$dir"
cd "$dir"

# stage NAME COMMAND…: run once; its output goes to NAME.log, its wall and CPU seconds to times.tsv.
stage() {
    local name=$1 seconds
    shift
    if [ -e "$name.done" ]; then
        echo "== $name: done before"
        return
    fi
    echo "== $name"
    TIMEFORMAT=$'%R\t%U\t%S'
    # The brace group's own standard error is where `time` writes; the command's goes to the log.
    seconds=$({ time "$@" >"$name.log" 2>&1; } 2>&1) || { tail -n 40 "$name.log" >&2; return 1; }
    printf '%s\t%s\n' "$name" "$seconds" >>times.tsv
    touch "$name.done"
}

cat >capture.yaml <<'YAML'
engine: {max_num_seqs: 64, max_model_len: 1024, dtype: bfloat16, enforce_eager: true}
connector: {chunk_size: 64}
YAML

train() { # SET NAME SEED
    "$trainer" "$steps/on_cpu.py" --speculator-type eagle3 --verifier-name-or-path "$model" --data-path "set-$1" \
        --target-layer-ids 2 15 27 --draft-vocab-size "${VOCABULARY:-2048}" --train-data-ratio 0.95 \
        --total-seq-len 512 --draft-attn-impl eager --loss-implementation eager --full-attention-indices 0 \
        --optimizer adamw --lr 1e-3 --ttt-steps "${DRAFT_TOKENS:-2}" --num-workers 1 --epochs "${EPOCHS:-2}" \
        --seed "$3" --log-freq 20 --hidden-states-backend file --on-missing raise --save-path "drafter-$2"
}

stage prompts "$trainer" "$steps/acceptance_prompts.py" prompts --train "${PROMPTS:-2000}" --held-out "${HELD_OUT:-80}"
stage capture "$vllm" -m lmcache_hs_backend.cli.capture "$model" prompts/train.jsonl --config capture.yaml \
    --cold-path states --max-tokens "${TOKENS:-64}" --max-cold-size 8
stage extract "$trainer" -m lmcache_hs_backend.cli.extract states --out set-chunks --format speculators \
    --sequences requests --final-norm "$model"
stage rows "$trainer" "$steps/acceptance.py" rows "$model" set-chunks hf=2,15,27,30 wrong-last=2,15,27,29 \
    wrong-aux=1,14,26,30
for name in "${drafters[@]}"; do
    case $name in
        *-2) stage "train-$name" train "${name%-2}" "$name" 2 ;;
        *) stage "train-$name" train "$name" "$name" 1 ;;
    esac
done
stage accept-none "$vllm" "$steps/acceptance.py" accept "$model" none prompts/held-out.jsonl accept-none.json \
    --answer "${ANSWER:-64}"
for name in "${drafters[@]}"; do
    stage "accept-$name" "$vllm" "$steps/acceptance.py" accept "$model" "drafter-$name" prompts/held-out.jsonl \
        "accept-$name.json" --answer "${ANSWER:-64}" --draft-tokens "${DRAFT_TOKENS:-2}"
done
echo "== seconds of each stage: wall, user, system"
cat times.tsv
"$trainer" "$steps/acceptance.py" report . "${drafters[@]}"
