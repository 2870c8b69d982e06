#!/usr/bin/env bash
# The report of lmcache-hs-inspect in a real browser: is what it shows what is there, on a desk, on a phone, on paper and
# in the dark, and does it fetch nothing? Installs Chromium. Needs Python 3.10 or later with pip.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/check_report.sh [DIR]

  DIR   where the environment, the cold path and the page go (default: /tmp/check-report); kept, and used again

environment: PYTHON (default: python3), CHROMIUM (default: the one installed, else Debian's, else Playwright's)
Writes docs/images/report.png and report-phone.png. Exit status 1 when something is not as it should be.
TEXT
}

case ${1:-} in
    -h | --help) usage && exit 0 ;;
    -*) usage >&2 && exit 2 ;;
esac
root=$(cd "$(dirname "$0")/.." && pwd)
dir=${1:-/tmp/check-report}
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)

venv=$dir/venv
stamp="torch 2.13.0 playwright 1.65.2 $root $(cksum <"$root/pyproject.toml")"
if [ "$(cat "$venv/stamp" 2>/dev/null)" != "$stamp" ]; then
    echo "== installing lmcache-hs-backend and playwright"
    "${PYTHON:-python3}" -m venv "$venv"
    # torch first and pinned: left to a dependency, pip would bring the CUDA build, gigabytes of it.
    "$venv/bin/pip" install -q torch==2.13.0
    "$venv/bin/pip" install -q playwright==1.65.2 numpy -e "$root[report]"
    echo "$stamp" >"$venv/stamp"
fi

browser=${CHROMIUM:-$(command -v chromium || command -v chromium-browser || command -v google-chrome || true)}
if [ -z "$browser" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "== installing Debian's Chromium"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null
    browser=$(command -v chromium)
fi
if [ -z "$browser" ]; then
    echo "== installing Playwright's Chromium"
    PLAYWRIGHT_BROWSERS_PATH=$dir/browsers "$venv/bin/playwright" install --with-deps chromium
    browser=$(find "$dir/browsers" -type f -name chrome -perm -u+x | head -n 1)
fi

cd "$root"
exec "$venv/bin/python" -m scripts.check_report "$dir" --browser "$browser" --pictures "$root/docs/images"
