"""What LMCache's own loader makes of a configuration, as YAML on standard output. ``lmcache_settings.py`` runs this.

It is a program and not a function, because importing LMCache imports torch, changes logging, and may write to standard
output. It loads what LMCache would load, from the file that its argument names and from its environment, and starts
nothing. It names LMCache's modules itself, because ``compat.py`` would also load the engine, which takes seconds more.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Container
from typing import Any

import yaml

from lmcache_hs_backend.integrations.lmcache.lmcache_settings import LoadError, convert, read


def main(path: str | None) -> None:
    """Print what ``load`` gives."""
    output = os.dup(1)
    os.dup2(2, 1)  # what LMCache prints while it is imported is no part of the answer
    answer = load(path)
    with os.fdopen(output, "w") as file:
        yaml.safe_dump(answer, file)


def load(path: str | None) -> dict[str, Any]:
    """The fields of a LoadedSettings that only LMCache knows, or ``error``: the key and the text of a LoadError."""
    from lmcache.v1 import config

    definitions = {name: (each["env_converter"], each["default"]) for name, each in config._CONFIG_DEFINITIONS.items()}
    # LMCache lists more aliases than it uses: only those that it also lists as deprecated are mapped.
    aliases = {old: new for old, new in config._CONFIG_ALIASES.items() if old in config._DEPRECATED_CONFIGS}
    try:
        loaded = convert(read(path) if path else {}, os.environ, path, definitions, aliases)
        values = config.load_engine_config_with_overrides(path).to_dict()
    except LoadError as error:
        return {"error": [error.key, str(error)]}
    except Exception as error:  # noqa: BLE001 - it is the verdict
        return {"error": _refusal(error, definitions)}
    warnings = [list(warning) for warning in loaded.warnings]
    return {"values": values, "aliases": aliases, "sources": loaded.sources, "warnings": warnings}


def _refusal(error: Exception, settings: Container[str]) -> list[str]:
    """Which setting LMCache's validation names, in its message or else in the line that failed, and what it says."""
    line = traceback.extract_tb(error.__traceback__)[-1].line or ""
    words = re.findall(r"\w+", f"{error} {line}")
    key = next((word for word in words if word in settings), "")
    return [key, str(error) or f"LMCache checks `{line}`"]


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
