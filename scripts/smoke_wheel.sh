#!/usr/bin/env bash
# Build the source distribution and, from it, the wheel; install the wheel into an empty environment; use it as a user does.
#
#   scripts/smoke_wheel.sh [--keep DIR]    DIR: keep both distributions there
#
# Needs Python 3.10 or later with pip. PYTHON names another interpreter. Nothing of this checkout is on the path while the
# wheel is used, so a file that is missing from it is missed.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
torch=2.13.0
keep=
while [ $# -gt 0 ]; do
  case $1 in
    --keep) keep=$(mkdir -p "${2:?--keep needs a directory}" && cd "$2" && pwd); shift 2 ;;
    -h | --help) sed -n '2,7p' "$0" | cut -c3-; exit 0 ;;
    *) echo "scripts/smoke_wheel.sh: unknown argument $1 (see --help)" >&2; exit 2 ;;
  esac
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH

echo "== build"
"${PYTHON:-python3}" -m venv "$work/builder"
"$work/builder/bin/python" -m pip install -q build
"$work/builder/bin/python" -m build --outdir "$work/dist" "$root" > "$work/build.log" || { cat "$work/build.log"; exit 1; }
wheel=$(ls "$work"/dist/*.whl)
[ -z "$keep" ] || cp "$work"/dist/* "$keep"

echo "== install $(basename "$wheel")"
"${PYTHON:-python3}" -m venv "$work/user"
bin=$work/user/bin
"$bin/python" -m pip install -q "torch==$torch"    # first and pinned, as scripts/test.sh does
"$bin/python" -m pip install -q "$wheel"
"$bin/python" -m pip check

cd "$work"
echo "== use"
"$bin/python" - "$root/README.md" <<'PY'
import importlib.metadata
import re
import sys
from pathlib import Path

import lmcache_hs_backend

package = Path(lmcache_hs_backend.__file__).parent
assert "site-packages" in package.parts, package
assert importlib.metadata.version("lmcache-hs-backend") == lmcache_hs_backend.__version__
assert (package / "py.typed").is_file()
assert (package / "cli/inspect/figures/templates/report.html.jinja").is_file(), "the page of `report`"
files = {str(file) for file in importlib.metadata.files("lmcache-hs-backend")}
assert not any(file.startswith(("tests/", "benchmarks/", "scripts/", "docs/")) for file in files), "more than the package"
print("version", lmcache_hs_backend.__version__, "with", len(files), "files")

# What has to import without LMCache, vLLM or a trainer, and says so in one sentence where it cannot.
from lmcache_hs_backend import ColdTierReader, TieredConfig, TieredStore  # noqa: E402, F401

for name in ("HSTieredBackend", "TieredHiddenStateStore"):
    try:
        getattr(lmcache_hs_backend, name)
    except ImportError as error:
        print(f"{name}: {error}")
    else:
        raise AssertionError(f"{name} without lmcache")

# README's ten lines, as pasted.
example = next(code for code in re.findall(r"```python\n(.*?)```", Path(sys.argv[1]).read_text(), re.DOTALL) if "open(" in code)
exec(example, {})
PY
"$bin/lmcache-hs-inspect" --version
"$bin/lmcache-hs-inspect" list hidden-states
"$bin/lmcache-hs-inspect" verify hidden-states
for command in "$bin"/lmcache-hs-*; do
  "$command" --help > help.txt 2>&1 || grep -q "pip install" help.txt || { echo "$command --help:"; cat help.txt; exit 1; }
done
if "$bin/lmcache-hs-inspect" list /nonexistent 2> error.txt; then echo "no error for a missing path" >&2; exit 1; fi
[ "$(wc -l < error.txt)" = 1 ] || { cat error.txt; exit 1; }
echo "== the wheel works"
