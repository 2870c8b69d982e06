"""Would LMCache load the plugin with these settings, and would it then do anything?

Goes the way that LMCache's ``storage_plugin_launcher`` goes, and then the way of the plugin's own
constructor, and says at which key it ends. Looks at the disk, but creates nothing there.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lmcache_hs_backend.cli.config.lmcache_settings import (
    ALIASES,
    DEAD_ALIASES,
    DEFAULT,
    DEFAULTS,
    Loaded,
    LoadError,
    load,
    variable,
)
from lmcache_hs_backend.config import (
    GIB,
    LOADER_KEYS,
    ConfigError,
    TieredConfig,
    default_cold_path,
    hot_tier_bytes,
    plugin_names,
)

PACKAGE = "lmcache_hs_backend"
PLUGIN_CLASS = "HSTieredBackend"
DEFAULT_PLUGIN = "hs_tiered"

#: Modules that have the plugin's class.
_MODULES = (PACKAGE, f"{PACKAGE}.integrations.lmcache.backend")


class Problem(NamedTuple):
    """Why the plugin would not load, or would do nothing, or keep nothing on disk. ``key`` is what to change."""

    key: str
    text: str


class Setting(NamedTuple):
    """One setting as it would be used, and where it comes from."""

    name: str
    value: Any
    source: str
    doc: str


@dataclass
class Verdict:
    """What became of the settings. ``plugin`` is the name under which it would load, empty when it would not."""

    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)
    plugin: str = ""
    settings: list[Setting] = field(default_factory=list)
    config: TieredConfig | None = None

    @property
    def loads(self) -> bool:
        """Whether it would load and work: a cold tier that would be offline is a problem too."""
        return not self.problems


def check(path: str | None, environ: Mapping[str, str] | None = None) -> Verdict:
    """Judge a configuration file and the environment."""
    env = os.environ if environ is None else environ
    verdict = Verdict()
    try:
        loaded = load(path, env)
    except LoadError as error:
        verdict.problems.append(Problem(error.key, f"LMCache does not start: {error}"))
        return verdict
    verdict.warnings += [Problem(key, text) for key, text in loaded.warnings]
    verdict.problems += _not_launched(loaded)
    extra = loaded["extra_config"] or {}
    name = _our_name(loaded, extra)
    if not name:
        return verdict
    verdict.plugin = name
    verdict.problems += _inert(loaded)
    _resolve(verdict, loaded, extra, name)
    if verdict.config is not None:
        verdict.problems += _disk(verdict.config, name)
    verdict.warnings += _advice(loaded, env, extra)
    return verdict


def cold_path_of(path: str | None) -> TieredConfig:
    """The settings of the tiers in a configuration, for tools that only want to know where the files are.

    Raises LoadError or ConfigError.
    """
    loaded = load(path)
    extra = loaded["extra_config"] or {}
    return TieredConfig.from_extra_config(extra, _our_name(loaded, extra) or DEFAULT_PLUGIN)


# -- what LMCache's launcher does ------------------------------------------------------------------------


def _not_launched(loaded: Loaded) -> Iterator[Problem]:
    plugins, extra = loaded["storage_plugins"], loaded["extra_config"]
    if plugins and not all(isinstance(name, str) for name in plugins):
        yield Problem("storage_plugins", f"storage_plugins is {plugins!r}, but must be a list of names")
        return
    if loaded["enable_pd"] and not loaded["local_cpu"]:
        yield Problem("local_cpu", "LMCache loads no storage plugins with enable_pd when local_cpu is false")
    if not plugins:
        yield Problem("storage_plugins", f"storage_plugins is empty; set it to [{_candidate(extra)}]")
    if not extra:
        yield Problem("extra_config", f"extra_config is empty{_replaced(loaded)}; LMCache then loads no plugin")
        return
    for key in extra:
        if not isinstance(key, str):
            yield Problem("extra_config", f"extra_config has the key {key!r}, which is no text")
            return
    if not plugins:
        return
    names = _ours(extra)
    if any(name in plugins for name in names):
        return
    if names:
        yield Problem("storage_plugins", f"storage_plugins is {plugins!r}, and does not list {names[0]!r}")
    else:
        yield _wrong_loader_key(loaded, plugins, extra)


def _wrong_loader_key(loaded: Loaded, plugins: list[str], extra: dict[str, Any]) -> Problem:
    """No listed plugin is ours: the key of the likeliest one that keeps it from being so."""
    name = _likeliest(plugins, extra)
    prefix = f"storage_plugin.{name}."
    right = dict(zip(LOADER_KEYS, (PACKAGE, PLUGIN_CLASS), strict=True))
    for loader_key, expected in right.items():
        key, value = f"extra_config['{prefix}{loader_key}']", extra.get(prefix + loader_key)
        if not value:
            near = difflib.get_close_matches(prefix + loader_key, extra, n=1, cutoff=0.85)
            instead = f"; there is {near[0]!r}" if near else ""
            if "storage_plugin" in extra or name in extra:
                instead = "; the keys under extra_config are flat, with dots in them, not nested tables"
            return Problem(key, f"{key} is missing, must be {expected!r}{instead}{_replaced(loaded)}")
        if loader_key == "module_path" and value not in _MODULES:
            why = "" if _is_module(value) else ", and there is no such module"
            return Problem(key, f"{key} is {value!r}, but must be {expected!r}{why}")
        if loader_key == "class_name" and value != expected:
            return Problem(key, f"{key} is {value!r}, but must be {expected!r}")
    raise AssertionError("a plugin with the right keys is ours")


def _ours(extra: Mapping[str, Any]) -> list[str]:
    """The plugin names whose class LMCache would find to be ours."""
    names = plugin_names(extra, PACKAGE, PLUGIN_CLASS)
    return [name for name in names if extra[f"storage_plugin.{name}.module_path"] in _MODULES]


def _our_name(loaded: Loaded, extra: Mapping[str, Any]) -> str:
    """The name of our plugin, or of what is nearest to being ours: its settings are looked at as well."""
    if not all(isinstance(key, str) for key in extra):
        return ""
    plugins = [name for name in loaded["storage_plugins"] or () if isinstance(name, str)]
    names = _ours(extra)
    listed = [name for name in names if name in plugins]
    if listed or names:
        return (listed or names)[0]
    return _likeliest(plugins, extra) if any(key.startswith("storage_plugin.") for key in extra) else ""


def _likeliest(plugins: list[str], extra: Mapping[str, Any]) -> str:
    """Which of the listed plugins is meant to be ours."""
    for name in plugins:
        said = " ".join(str(extra.get(f"storage_plugin.{name}.{key}", "")) for key in LOADER_KEYS)
        if PACKAGE in said or PLUGIN_CLASS in said or "hs" in name.split("_"):
            return name
    return plugins[0] if plugins else DEFAULT_PLUGIN


def _candidate(extra: Mapping[str, Any] | None) -> str:
    names = _ours(extra) if extra and all(isinstance(key, str) for key in extra) else []
    return (names or [DEFAULT_PLUGIN])[0]


def _replaced(loaded: Loaded) -> str:
    """A hint when the environment has thrown away the extra_config of the file."""
    if loaded.file_extra and loaded.sources["extra_config"] == variable("extra_config"):
        name = variable("extra_config")
        return f" ({name} replaces the whole extra_config of the file: unset it, or say everything in it)"
    return ""


def _is_module(name: Any) -> bool:
    try:
        return importlib.util.find_spec(str(name).split(".")[0]) is not None
    except (ImportError, ValueError):
        return False


# -- what the plugin does --------------------------------------------------------------------------------


def _inert(loaded: Loaded) -> Iterator[Problem]:
    if not loaded["enable_hidden_state_cache"]:
        yield Problem(
            "enable_hidden_state_cache",
            "enable_hidden_state_cache is false, so the plugin loads and does nothing; set it to true",
        )
    if loaded["enable_blending"]:
        yield Problem(
            "enable_blending",
            "enable_blending is true: blended chunks have no prefix, so the plugin loads and does nothing",
        )
    try:
        hot_tier_bytes(loaded["max_hidden_state_cpu_size"])
    except ConfigError as error:
        yield Problem("max_hidden_state_cpu_size", str(error))


def _resolve(verdict: Verdict, loaded: Loaded, extra: dict[str, Any], name: str) -> None:
    """Every setting with its source; a wrong one is a problem, and the others are still shown."""
    prefix = f"storage_plugin.{name}."
    source = loaded.sources["extra_config"]
    good = {}
    cold_path = f"{prefix}cold_path"
    home: dict[str, Any] = {}
    try:
        default_cold_path()
    except ConfigError as error:
        home = {cold_path: "/"}  # the others are judged all the same
        if cold_path not in extra:
            verdict.problems.append(Problem(f"extra_config['{cold_path}']", str(error)))
    wrong: dict[str, Any] = {}
    for key, value in extra.items():
        setting = key.removeprefix(prefix)
        if not key.startswith(prefix) or setting in LOADER_KEYS:
            continue
        try:
            TieredConfig.from_extra_config({**home, key: value}, name)
        except ConfigError as error:
            verdict.problems.append(Problem(f"extra_config['{key}']", str(error)))
            wrong[setting] = value
        else:
            good[key] = value
    config = TieredConfig.from_extra_config({**home, **good}, name)
    if not any(problem.key.startswith(f"extra_config['{prefix}") for problem in verdict.problems):
        verdict.config = config
    for our in dataclasses.fields(TieredConfig):
        where = source if prefix + our.name in good else DEFAULT
        value = getattr(config, our.name)
        if our.name == "cold_dir_mode":
            value = f"{value:04o}"
        if our.name in wrong:
            value, where = f"{wrong[our.name]!r} is wrong", source
        verdict.settings.append(Setting(our.name, value, where, our.metadata["doc"]))
    for theirs, doc in _THEIRS.items():
        verdict.settings.append(Setting(theirs, loaded[theirs], loaded.sources[theirs], doc))


_THEIRS = {
    "enable_hidden_state_cache": "LMCache's switch; without it the plugin does nothing",
    "max_hidden_state_cpu_size": "GB of the hot tier",
    "hidden_state_layers": "layers that are stored; none: all",
    "chunk_size": "tokens of a chunk",
    "save_unfull_chunk": "whether a prompt's last, shorter chunk is stored",
    "pre_caching_hash_algorithm": "how LMCache hashes chunks",
}


def _disk(config: TieredConfig, name: str) -> Iterator[Problem]:
    """What the plugin would find at its cold path. One that cannot be used is a problem, also where it would load."""
    outcome = "" if config.require_cold else "; with require_cold: false, rows would stay in RAM until it can be used"
    label = f"extra_config['storage_plugin.{name}.cold_path']"
    existing = config.cold_path
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    if not os.path.isdir(existing):
        yield Problem(label, f"{label} is {config.cold_path!r}, but {existing} is not a directory{outcome}")
        return
    if not os.access(existing, os.W_OK | os.X_OK):
        yield Problem(
            label, f"{label} is {config.cold_path!r}, but user {os.geteuid()} cannot write in {existing}{outcome}"
        )
        return
    disk = os.statvfs(existing)
    total = disk.f_blocks * disk.f_frsize
    if not total:
        yield Problem(
            label, f"{label} is {config.cold_path!r}, but the filesystem of {existing} has no room for files{outcome}"
        )
        return
    for setting, nbytes in (("max_cold_size", config.max_cold_bytes), ("min_free_disk", config.min_free_bytes)):
        if nbytes > total:
            key = f"extra_config['storage_plugin.{name}.{setting}']"
            yield Problem(
                key,
                f"{key} is {getattr(config, setting):g}, but must be at most {total / GIB:.2f}, the size in GB of the "
                f"filesystem of {config.cold_path}",
            )


def _advice(loaded: Loaded, env: Mapping[str, str], extra: Mapping[str, Any]) -> Iterator[Problem]:
    """What works, but perhaps not as meant."""
    names = [name for name in _ours(extra) if name in (loaded["storage_plugins"] or ())]
    if len(names) > 1:
        yield Problem("storage_plugins", f"{names} are all this plugin; the settings of {names[0]!r} are used")
    yield from _nobodys(extra, _our_name(loaded, extra), loaded["storage_plugins"] or ())
    wanted, memory = loaded["max_hidden_state_cpu_size"], os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if isinstance(wanted, int | float) and wanted * GIB > memory:
        yield Problem(
            "max_hidden_state_cpu_size",
            f"max_hidden_state_cpu_size is {wanted:g}, but this machine has {memory / GIB:.1f} GB of memory: LMCache, "
            "which reserves the same for a store of its own before the plugin is there, may not start",
        )
    seed = env.get("PYTHONHASHSEED", "random")
    if loaded["pre_caching_hash_algorithm"] == "builtin" and seed in ("", "random"):
        yield Problem(
            "PYTHONHASHSEED",
            "PYTHONHASHSEED is not set: under vLLM, chunk hashes then differ from start to start, and nothing on disk "
            "is found again after a restart; set it to the same number for every process (PYTHONHASHSEED=0)",
        )
    deletes = extra.get(f"storage_plugin.{_our_name(loaded, extra)}.on_kv_gone", "delete") == "delete"
    if deletes and not any(loaded[name] for name in _KV_BEYOND_RAM):
        yield Problem(
            "on_kv_gone",
            "LMCache keeps KV in CPU memory only, and with on_kv_gone: delete the cold tier never holds more chunks "
            "than that; give LMCache a disk tier (local_disk), or set on_kv_gone to archive",
        )
    yield from _place_of_files(extra, f"storage_plugin.{_our_name(loaded, extra)}.")
    known = {variable(key) for key in (*DEFAULTS, *ALIASES, *DEAD_ALIASES)} | _OTHER_VARIABLES
    for key in sorted(env):
        if key.startswith("LMCACHE_") and key not in known:
            yield Problem(key, f"{key} is in the environment, and nothing reads it; settings of the plugin go into "
                               f"{variable('extra_config')}")  # fmt: skip
    if loaded["remote_config_url"]:
        yield Problem("remote_config_url", "settings fetched from remote_config_url at start are not seen here")


def _place_of_files(extra: Mapping[str, Any], prefix: str) -> Iterator[Problem]:
    """Cold paths that are probably not where they were meant to be, and limits that the disk cannot hold today."""
    key, given = f"extra_config['{prefix}cold_path']", extra.get(f"{prefix}cold_path")
    if isinstance(given, str) and given.strip() and given.strip()[0] not in "/~":
        yield Problem(key, f"{key} is {given!r}, a relative path: it depends on where each process is started")
    try:
        config = TieredConfig.from_mapping(
            {name: extra[prefix + name] for name in ("cold_path", "max_cold_size") if prefix + name in extra}, str
        )
    except ConfigError:  # a problem already
        return
    existing = config.cold_path
    while not os.path.isdir(existing):
        existing = os.path.dirname(existing)
    top = "/" + config.cold_path.strip("/").split("/")[0]
    if existing == "/" and not os.path.exists(top):
        where = f"{config.cold_path} would be created on the root filesystem"
        yield Problem(key, f"{top} does not exist: {where}; is it mounted?")
    disk = os.statvfs(existing)
    free, total = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    if free < config.max_cold_bytes <= total:
        limit = f"extra_config['{prefix}max_cold_size']"
        yield Problem(limit, f"{limit} is {config.max_cold_size:g}, but {free / GIB:.3g} GB are free at {existing}")


#: Read by LMCache, vLLM or us elsewhere than in LMCache's configuration.
_OTHER_VARIABLES = {
    "LMCACHE_CONFIG_FILE", "LMCACHE_LOG_LEVEL", "LMCACHE_TRACK_USAGE", "LMCACHE_USE_EXPERIMENTAL", "LMCACHE_DEBUG",
    "LMCACHE_LOG_FILE", "LMCACHE_LOG_FORMAT",
}  # fmt: skip


def _nobodys(extra: Mapping[str, Any], ours: str, plugins: Sequence[str]) -> Iterator[Problem]:
    """Keys that are named like settings of ours, but that nobody reads."""
    settings = {field.name for field in dataclasses.fields(TieredConfig)}
    for key in extra:
        if key in settings:
            yield Problem(f"extra_config['{key}']", f"nobody reads it; the setting is 'storage_plugin.{ours}.{key}'")
        prefix, _, name = key.rpartition(".")
        plugin = prefix.removeprefix("storage_plugin.")
        if name in settings and prefix.startswith("storage_plugin.") and plugin != ours and plugin not in plugins:
            yield Problem(
                f"extra_config['{key}']",
                f"nobody reads it, because storage_plugins does not list {plugin!r}; the setting is "
                f"'storage_plugin.{ours}.{name}'",
            )


#: Settings that give LMCache a place for KV other than CPU memory.
_KV_BEYOND_RAM = (
    "local_disk",
    "remote_url",
    "remote_storage_plugins",
    "gds_path",
    "maru_path",
    "enable_p2p",
    "enable_pd",
)
