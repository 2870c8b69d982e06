"""LMCache's settings as LMCache would load them: by LMCache where it is installed, else those that matter here.

A YAML file, then ``LMCACHE_<KEY>`` from the environment over it. LMCache's own loader runs in a process of its own
(``lmcache_loader.py``), because importing LMCache imports torch, and this module may not. Without LMCache only
``SETTINGS`` are read, with LMCache's conversions; what other settings would do to LMCache's start is not known. What
the plugin makes of the result is not decided here.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

_LOADER = "lmcache_hs_backend.integrations.lmcache.lmcache_loader"
_TIMEOUT_SEC = 120.0
_VARIABLE = re.compile(r"LMCACHE_[A-Z0-9]\w*")
DEFAULT = "default"

#: Setting → LMCache's conversion of what is set, and its default.
Definitions = Mapping[str, tuple[Callable[[Any], Any], Any]]


class LoadError(Exception):
    """LMCache would not start with these settings. ``key`` is the one that is wrong, if it is one."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(text)
        self.key = key


@dataclass
class LoadedSettings:
    """LMCache's settings, where each came from, and what LMCache only mentions in its log."""

    values: dict[str, Any]
    aliases: dict[str, str]  # deprecated name → setting
    sources: dict[str, str]  # setting → the file or variable that has set it, or DEFAULT
    warnings: list[tuple[str, str]] = field(default_factory=list)  # (key, text)
    by_lmcache: bool = False
    file_extra: Any = None  # extra_config of the file, also where the environment has replaced it

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    @property
    def known(self) -> set[str]:
        """Names of settings, deprecated ones too, as far as they are known here."""
        return {*self.values, *self.aliases}


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return f"LMCACHE_{name.upper()}"


def lmcache_directory() -> str | None:
    """Where LMCache is installed for this interpreter; None: it is not. Imports nothing."""
    try:
        spec = importlib.util.find_spec("lmcache")
    except ImportError:
        return None
    return next(iter(spec.submodule_search_locations or ()), None) if spec else None


def mentioned_by_lmcache(names: Iterable[str]) -> set[str]:
    """Those environment variables that LMCache's code names, itself or by a prefix such as ``LMCACHE_EC_``."""
    wanted, found = set(names), set[str]()
    for path in Path(lmcache_directory() or os.devnull).rglob("*.py") if wanted else ():
        for word in set(_VARIABLE.findall(path.read_text(errors="replace"))):
            found |= {name for name in wanted - found if name == word or (word.endswith("_") and name.startswith(word))}
    return found


def load(
    path: str | None = None, environ: Mapping[str, str] | None = None, *, ask_lmcache: bool = True
) -> LoadedSettings:
    """The settings of a file (else of ``LMCACHE_CONFIG_FILE``, else none) and of the environment.

    Args:
        path: LMCache's YAML file.
        environ: The environment; this process's by default.
        ask_lmcache: Run LMCache's loader where LMCache is installed. It takes seconds.

    Raises:
        LoadError: LMCache would not start.
    """
    env = os.environ if environ is None else environ
    path = path or env.get("LMCACHE_CONFIG_FILE")
    file = read(path) if path else {}
    loaded = _by_lmcache(path, env) if ask_lmcache and lmcache_directory() else _by_hand(file, env, path)
    loaded.file_extra = file.get("extra_config")
    for key in map(str, file):
        if key in loaded.aliases:
            loaded.warnings.append((key, f"{key} (in {path}) is deprecated: use {loaded.aliases[key]}"))
        elif key not in loaded.known and (hint := _unknown(key, loaded)):
            loaded.warnings.append((key, f"{key} (in {path}) is not a setting of LMCache; {hint}"))
    return loaded


def read(path: str) -> dict[Any, Any]:
    """The table of a YAML file. Raises LoadError."""
    try:
        with open(path) as file:
            values = yaml.safe_load(file) or {}
    except OSError as error:
        raise LoadError("", f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise LoadError("", f"{path} is not text: {error}") from None
    except yaml.YAMLError as error:
        raise LoadError("", f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise LoadError("", f"{path} holds a {type(values).__name__}, not a table of settings")
    return values


def _unknown(key: str, loaded: LoadedSettings) -> str:
    """What to say of a key that is none of the known ones; empty: nothing, because it may be one of LMCache's."""
    if key.startswith("storage_plugin."):
        return "it belongs under extra_config"
    near = difflib.get_close_matches(key, loaded.known, n=1, cutoff=0.85)
    return f"there is {near[0]}" if near else "it is ignored" if loaded.by_lmcache else ""


def _by_lmcache(path: str | None, env: Mapping[str, str]) -> LoadedSettings:
    """The answer of LMCache's loader, from a process of its own with this one's modules. Raises LoadError."""
    child_env = {**env, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", _LOADER, *([path] if path else [])]
    try:
        done = subprocess.run(command, env=child_env, capture_output=True, text=True, timeout=_TIMEOUT_SEC, check=True)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or [f"it ended with status {error.returncode}"])[-1]
        raise LoadError("", f"LMCache is installed here, but its loader does not run: {last}") from None
    except subprocess.TimeoutExpired:
        raise LoadError("", f"LMCache's loader has not answered in {_TIMEOUT_SEC:g} s") from None
    answer = yaml.safe_load(done.stdout)
    if "error" in answer:
        raise LoadError(*answer["error"])
    return LoadedSettings(**answer, by_lmcache=True)


def convert(
    file: Mapping[Any, Any],
    env: Mapping[str, str],
    path: str | None,
    settings: Definitions,
    aliases: Mapping[str, str],
) -> LoadedSettings:
    """Convert what is set as LMCache does: a value that cannot be converted becomes nothing, or leaves the file's.

    Args:
        file: The table of the file ``path``; empty without one.
        env: The environment.
        path: The file, for messages.
        settings: LMCache's settings, or some of them.
        aliases: Deprecated name → setting.

    Raises:
        LoadError: A conversion ends in a way that LMCache does not expect, so that it does not start.
    """
    values = {name: default for name, (_, default) in settings.items()}
    loaded = LoadedSettings(values, dict(aliases), dict.fromkeys(values, DEFAULT))
    for name, value, source in _given(file, env, path, {**{name: name for name in settings}, **aliases}):
        try:
            values[name] = None if value is None else settings[name][0](value)
        except ValueError as error:
            loaded.warnings.append((name, _unusable(name, value, source, error)))
            if path and source != path:
                continue
            values[name] = None
        except Exception as error:  # noqa: BLE001 - whatever a conversion raises, LMCache does not start
            raise LoadError(name, _unusable(name, value, source, error)) from None
        loaded.sources[name] = source
    return loaded


def _given(
    file: Mapping[Any, Any], env: Mapping[str, str], path: str | None, names: Mapping[str, str]
) -> Iterator[tuple[str, Any, str]]:
    """What is set, as (setting, value, the file or variable): that of the file, then that of the environment."""
    in_file = {names[key]: (value, str(path)) for key, value in file.items() if key in names}
    in_env = {
        name: (_unquoted(env[variable(key)]), variable(key)) for key, name in names.items() if variable(key) in env
    }
    for given in (in_file, in_env):
        for name, (value, source) in given.items():
            yield name, value, source


def _unquoted(text: str) -> str:
    text = text.strip()
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        try:
            evaluated = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return text[1:-1]
        return evaluated if isinstance(evaluated, str) else text
    return text


def _unusable(name: str, value: Any, source: str, error: Exception) -> str:
    """A value that cannot be converted, in words. ``extra_config`` may hold credentials and is not shown."""
    if name == "extra_config":
        return f"extra_config (in {source}) cannot be used: it must be a table"
    return f"{name} is {value!r} (in {source}), which cannot be used: {error}"


# -- without LMCache: the settings that matter here, and LMCache's conversions, also for what they let through ---------


def _boolean(value: Any) -> bool:
    return value if isinstance(value, bool) else str(value).strip().lower() in ("true", "1")


def _texts(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [part.strip() for part in value.split(",") if part.strip()]


def _integers(value: Any) -> list[int]:
    if isinstance(value, list):
        return [int(item) for item in value]
    return [value] if isinstance(value, int) else [int(part) for part in _texts(str(value))]


def _table(value: Any) -> Any:
    return value if isinstance(value, dict) else json.loads(value) if value else None


def _disks(value: Any) -> str | None:
    return ",".join(part.removeprefix("file://") for part in _texts(str(value))) or None


#: As in LMCache 0.5.6 and 0.5.7.
SETTINGS: Definitions = {
    "storage_plugins": (_texts, None), "extra_config": (_table, None), "chunk_size": (int, 256),
    "save_unfull_chunk": (_boolean, False), "pre_caching_hash_algorithm": (str, "builtin"),
    "enable_hidden_state_cache": (_boolean, False), "max_hidden_state_cpu_size": (float, 2.0),
    "hidden_state_layers": (_integers, None), "enable_blending": (_boolean, False), "local_cpu": (_boolean, True),
    "local_disk": (_disks, None), "remote_url": (str, None), "remote_storage_plugins": (_texts, None),
    "gds_path": (str, None), "maru_path": (str, None), "enable_p2p": (_boolean, False), "enable_pd": (_boolean, False),
    "remote_config_url": (str, None),
}  # fmt: skip
ALIASES = {"external_backends": "storage_plugins"}


def _by_hand(file: Mapping[Any, Any], env: Mapping[str, str], path: str | None) -> LoadedSettings:
    loaded = convert(file, env, path, SETTINGS, ALIASES)
    extra = loaded["extra_config"]
    if extra is not None and not isinstance(extra, dict):
        raise LoadError("extra_config", f"extra_config is a {type(extra).__name__}, not a table")
    if loaded["enable_blending"] or loaded["enable_pd"]:
        loaded.values["save_unfull_chunk"] = True
    return loaded
