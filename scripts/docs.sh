#!/usr/bin/env bash
# Build the documentation as a site, in build/site. Fails on a link, an anchor or an API name that leads nowhere.
#
#   scripts/docs.sh            build
#   scripts/docs.sh --serve    build, serve on http://127.0.0.1:8000, and build again at every change
#
# Makes an environment of its own, .venv-docs, with the extra `docs`: it needs neither torch nor LMCache.
set -euo pipefail
cd "$(dirname "$0")/.."
case ${1:-} in
  -h | --help) sed -n '2,7p' "$0" | cut -c3-; exit 0 ;;
  "" | --serve) ;;
  *) echo "scripts/docs.sh: unknown argument $1 (see --help)" >&2; exit 2 ;;
esac

venv=${HS_DOCS_VENV:-.venv-docs}
if ! "$venv/bin/python" -c 'import mkdocs, material, mkdocstrings_handlers.python' 2>/dev/null; then
  echo "== setting up $venv"
  [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
  # The names and versions are those of the extra `docs`; the package itself is read, not imported.
  "$venv/bin/python" - <<'PY' | xargs -d '\n' "$venv/bin/python" -m pip install -q
try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib
with open("pyproject.toml", "rb") as file:
    print("\n".join(tomllib.load(file)["project"]["optional-dependencies"]["docs"]))
PY
fi
if [ "${1:-}" = --serve ]; then
  exec "$venv/bin/python" -m mkdocs serve
fi
"$venv/bin/python" -m mkdocs build --strict --clean
echo "== build/site/index.html"
