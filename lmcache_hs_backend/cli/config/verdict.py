"""Would LMCache load the plugin with these settings, and would it then do anything?

Goes the way that LMCache's ``storage_plugin_launcher`` goes, and then the way of the plugin's own constructor, and
says at which key it ends. Then it says what works, but perhaps not as meant. Looks at the disk, but creates nothing
there.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lmcache_hs_backend.config import (
    GIB,
    LOADER_KEYS,
    ConfigError,
    TieredConfig,
    default_cold_path,
    hot_tier_bytes,
    plugin_names,
    shown_value,
)
from lmcache_hs_backend.integrations.lmcache.lmcache_settings import (
    DEFAULT,
    LoadedSettings,
    LoadError,
    load,
    mentioned_by_lmcache,
    variable,
)

PACKAGE = "lmcache_hs_backend"
PLUGIN_CLASS = "HSTieredBackend"
DEFAULT_PLUGIN = "hs_tiered"

_FSTAB = "/etc/fstab"

#: Modules that have the plugin's class.
_MODULES = (PACKAGE, f"{PACKAGE}.integrations.lmcache.backend")


class Remark(NamedTuple):
    """What is wrong or perhaps not as meant. ``key`` is what to change."""

    key: str
    text: str


class SettingRow(NamedTuple):
    """One setting as it would be used, and where it comes from."""

    name: str
    value: Any
    source: str
    doc: str


class DiskSpace(NamedTuple):
    """The filesystem on which a cold path is, or would be. ``path`` is what exists of the cold path."""

    path: str
    free_bytes: int
    total_bytes: int


@dataclass
class Verdict:
    """What became of the settings.

    Attributes:
        problems: Why the plugin would not load, or would load and do nothing, or keep nothing on disk.
        warnings: What works, but perhaps not as meant.
        plugin: The plugin's name, or that of what is nearest to being it; empty: there is nothing like it.
        settings: Every setting of the plugin, and those of LMCache that matter to it.
        config: The plugin's settings, with defaults in place of those that are wrong.
        disk: None where ``cold_path`` is wrong, or leads to no directory.
    """

    problems: list[Remark] = field(default_factory=list)
    warnings: list[Remark] = field(default_factory=list)
    plugin: str = ""
    settings: list[SettingRow] = field(default_factory=list)
    config: TieredConfig | None = None
    disk: DiskSpace | None = None

    @property
    def loads(self) -> bool:
        """Whether the plugin would load and work: a cold tier that would be offline is a problem too."""
        return not self.problems

    def key_of(self, name: str) -> str:
        """What the user calls a setting of the plugin."""
        return f"extra_config['storage_plugin.{self.plugin}.{name}']"

    def blame(self, key: str, text: str) -> None:
        """Add a problem."""
        self.problems.append(Remark(key, text))

    def warn(self, key: str, text: str) -> None:
        """Add a warning."""
        self.warnings.append(Remark(key, text))


def check(path: str | None, environ: Mapping[str, str] | None = None) -> Verdict:
    """Judge a configuration.

    Args:
        path: LMCache's YAML file; None: that of ``LMCACHE_CONFIG_FILE``, or none.
        environ: The environment; this process's by default.
    """
    env = os.environ if environ is None else environ
    verdict = Verdict()
    try:
        loaded = load(path, env)
    except LoadError as error:
        verdict.blame(error.key, f"LMCache does not start: {error}")
        return verdict
    verdict.warnings += [Remark(*warning) for warning in loaded.warnings]
    plugins, extra = loaded["storage_plugins"] or [], loaded["extra_config"] or {}
    if not all(isinstance(name, str) for name in plugins):
        verdict.blame("storage_plugins", f"storage_plugins is {plugins!r}, not a list of names")
        return verdict
    if odd := [key for key in extra if not isinstance(key, str)]:
        verdict.blame("extra_config", f"extra_config has the key {odd[0]!r}, which is no text")
        return verdict
    verdict.plugin = _plugin_of(plugins, extra)
    verdict.problems += _not_launched(loaded, plugins, extra)
    if verdict.plugin:
        verdict.problems += _inert(loaded)
        _resolve(verdict, loaded, extra)
        verdict.warnings += _advice(loaded, extra, verdict.plugin, env)
    return verdict


def cold_path_of(path: str | None) -> TieredConfig:
    """The settings of the tiers in a configuration, for tools that only want to know where the files are.

    Raises:
        LoadError: The configuration cannot be read.
        ConfigError: A setting is wrong.
    """
    loaded = load(path, ask_lmcache=False)
    extra = {key: value for key, value in (loaded["extra_config"] or {}).items() if isinstance(key, str)}
    plugins = [name for name in loaded["storage_plugins"] or [] if isinstance(name, str)]
    return TieredConfig.from_extra_config(extra, _plugin_of(plugins, extra) or DEFAULT_PLUGIN)


# -- what LMCache's launcher does ------------------------------------------------------------------------


def _ours(extra: Mapping[str, Any]) -> list[str]:
    """The plugin names whose class LMCache would find to be ours."""
    names = plugin_names(extra, PACKAGE, PLUGIN_CLASS)
    return [name for name in names if extra[f"storage_plugin.{name}.module_path"] in _MODULES]


def _plugin_of(plugins: list[str], extra: Mapping[str, Any]) -> str:
    """The name of our plugin, or of what is nearest to being ours: its settings are looked at as well."""
    names = _ours(extra)
    if names:
        return next((name for name in names if name in plugins), names[0])
    if not any(key.startswith("storage_plugin.") for key in extra):
        return ""
    for name in plugins:
        said = " ".join(str(extra.get(f"storage_plugin.{name}.{key}", "")) for key in LOADER_KEYS)
        if PACKAGE in said or PLUGIN_CLASS in said or "hs" in name.split("_"):
            return name
    return plugins[0] if plugins else DEFAULT_PLUGIN


def _not_launched(loaded: LoadedSettings, plugins: list[str], extra: Mapping[str, Any]) -> Iterator[Remark]:
    names = _ours(extra)
    replaced = ""
    if loaded.file_extra and loaded.sources["extra_config"] == variable("extra_config"):
        name = variable("extra_config")
        replaced = f" ({name} replaces the whole extra_config of the file: unset it, or say everything in it)"
    if loaded["enable_pd"] and not loaded["local_cpu"]:
        yield Remark("local_cpu", "LMCache loads no storage plugins with enable_pd when local_cpu is false")
    if not plugins:
        yield Remark("storage_plugins", f"storage_plugins is empty; set it to [{(names or [DEFAULT_PLUGIN])[0]}]")
    if not extra:
        yield Remark("extra_config", f"extra_config is empty{replaced}; LMCache then loads no plugin")
    elif plugins and not names:
        yield _wrong_loader_key(_plugin_of(plugins, extra) or plugins[0], extra, replaced)
    elif plugins and not any(name in plugins for name in names):
        yield Remark("storage_plugins", f"storage_plugins is {plugins!r}, and does not list {names[0]!r}")


def _wrong_loader_key(name: str, extra: Mapping[str, Any], replaced: str) -> Remark:
    """Which key keeps a plugin from being ours."""
    prefix = f"storage_plugin.{name}."
    wrong = "module_path" if extra.get(f"{prefix}module_path") not in _MODULES else "class_name"
    expected = PACKAGE if wrong == "module_path" else PLUGIN_CLASS
    value, key = extra.get(prefix + wrong), f"extra_config['{prefix}{wrong}']"
    if value:
        return Remark(key, f"{key} is {value!r}, but must be {expected!r}")
    near = difflib.get_close_matches(prefix + wrong, extra, n=1, cutoff=0.85)
    instead = f"; there is {near[0]!r}" if near else ""
    if "storage_plugin" in extra or name in extra:
        instead = "; the keys under extra_config are flat, with dots in them, not nested tables"
    return Remark(key, f"{key} is missing, must be {expected!r}{instead}{replaced}")


# -- what the plugin does --------------------------------------------------------------------------------


def _inert(loaded: LoadedSettings) -> Iterator[Remark]:
    if not loaded["enable_hidden_state_cache"]:
        yield Remark(
            "enable_hidden_state_cache",
            "enable_hidden_state_cache is false (only true and 1 are true for LMCache), so the plugin loads and does "
            "nothing; set it to true",
        )
    if loaded["enable_blending"]:
        yield Remark(
            "enable_blending",
            "enable_blending is true: blended chunks have no prefix, so the plugin loads and does nothing",
        )
    try:
        hot_tier_bytes(loaded["max_hidden_state_cpu_size"])
    except ConfigError as error:
        yield Remark("max_hidden_state_cpu_size", str(error))


def _resolve(verdict: Verdict, loaded: LoadedSettings, extra: Mapping[str, Any]) -> None:
    """Judge every setting and show it with its source; where one is wrong, the others are still looked at."""
    prefix = f"storage_plugin.{verdict.plugin}."
    given = {key.removeprefix(prefix): value for key, value in extra.items() if key.startswith(prefix)}
    good: dict[str, Any] = {}
    for name in [name for name in given if name not in LOADER_KEYS]:
        try:
            TieredConfig.from_mapping({"cold_path": "/", name: given[name]}, verdict.key_of)
            good[name] = given[name]
        except ConfigError as error:
            verdict.blame(verdict.key_of(name), str(error))
    if "cold_path" not in given:
        try:
            default_cold_path()
        except ConfigError as error:
            verdict.blame(verdict.key_of("cold_path"), str(error))
            given["cold_path"] = None
    unusable = {} if "cold_path" in good or "cold_path" not in given else {"cold_path": "/"}
    config = verdict.config = TieredConfig.from_mapping(good | unusable, verdict.key_of)
    if not unusable:
        _look_at_disk(verdict, config, str(given.get("cold_path", "/")))
    blamed = {problem.key for problem in verdict.problems}
    for our in dataclasses.fields(TieredConfig):
        value = shown_value(our.name, getattr(config, our.name))
        if verdict.key_of(our.name) in blamed:
            value = f"{shown_value(our.name, given.get(our.name, value))!r} is wrong"
        elif our.name == "cold_dir_mode":
            value = f"{value:04o}"
        source = loaded.sources["extra_config"] if prefix + our.name in extra else DEFAULT
        verdict.settings.append(SettingRow(our.name, value, source, our.metadata["doc"]))
    for theirs, doc in _THEIRS.items():
        value = f"{loaded[theirs]!r} is wrong" if theirs in blamed else loaded[theirs]
        verdict.settings.append(SettingRow(theirs, value, loaded.sources[theirs], doc))


_THEIRS = {
    "enable_hidden_state_cache": "LMCache's switch; without it the plugin does nothing",
    "max_hidden_state_cpu_size": "GB of the hot tier",
    "hidden_state_layers": "layers that are stored; none: all",
    "chunk_size": "tokens of a chunk",
    "save_unfull_chunk": "whether a prompt's last, shorter chunk is stored",
    "pre_caching_hash_algorithm": "how LMCache hashes chunks",
}


def _look_at_disk(verdict: Verdict, config: TieredConfig, given: str) -> None:
    """What the plugin would find at its cold path. One that cannot be used is a problem, also where it would load."""
    key = verdict.key_of("cold_path")
    existing = config.cold_path
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    trouble = ""
    if not os.path.isdir(existing):
        trouble = f"{existing} is not a directory"
    elif not os.access(existing, os.W_OK | os.X_OK):
        trouble = f"user {os.geteuid()} cannot write in {existing}"
    else:
        info = os.statvfs(existing)
        disk = DiskSpace(existing, info.f_bavail * info.f_frsize, info.f_blocks * info.f_frsize)
        if not disk.total_bytes:
            trouble = f"the filesystem of {existing} has no room for files"
    if trouble:
        outcome = "" if config.require_cold else "; with require_cold: false, rows stay in RAM until it can be used"
        verdict.blame(key, f"{key} is {config.cold_path!r}, but {trouble}{outcome}")
        return
    verdict.disk = disk
    if not os.path.isabs(os.path.expanduser(given)):
        verdict.warn(key, f"{key} is {given!r}, a relative path: it depends on where each process is started")
    if missing := _missing_mount(config.cold_path, existing):
        verdict.warn(key, missing)
    for name in ("max_cold_size", "min_free_disk"):
        label = verdict.key_of(name)
        try:
            nbytes, cut_down = config.limit_within(name, disk.total_bytes, verdict.key_of)
        except ConfigError as error:
            verdict.blame(label, str(error))
            continue
        if cut_down:
            verdict.warn(label, cut_down)
        elif disk.free_bytes < nbytes:
            beside = ", beside what is in it already" if existing == config.cold_path else ""
            free = f"{disk.free_bytes / GIB:.3g} GB are free at {existing}{beside}"
            verdict.warn(label, f"{label} is {getattr(config, name):g}, but {free}")


def _missing_mount(cold_path: str, existing: str) -> str:
    """Says that a disk of its own is probably meant for a path on the root filesystem; empty: nothing hints at it."""
    if os.stat(existing).st_dev != os.stat("/").st_dev:
        return ""
    top = "/" + cold_path.split("/")[1]
    mounts = [top] if not os.path.exists(top) else []
    mounts += [
        mount for mount in (*_fstab(), "/mnt", "/media") if mount != "/" and f"{cold_path}/".startswith(f"{mount}/")
    ]
    if not mounts:
        return ""
    would = "is" if existing == cold_path else "would be created"
    return f"{cold_path} {would} on the root filesystem: nothing is mounted at or below {mounts[0]}"


def _fstab() -> list[str]:
    """The places at which the machine mounts filesystems at its start."""
    try:
        with open(_FSTAB) as file:
            lines = [line.split() for line in file if not line.lstrip().startswith("#")]
    except OSError:
        return []
    return [words[1] for words in lines if len(words) > 1 and words[1].startswith("/")]


# -- what works, but perhaps not as meant ----------------------------------------------------------------


def _advice(loaded: LoadedSettings, extra: Mapping[str, Any], plugin: str, env: Mapping[str, str]) -> Iterator[Remark]:
    names = [name for name in _ours(extra) if name in (loaded["storage_plugins"] or ())]
    if len(names) > 1:
        yield Remark("storage_plugins", f"{names} are all this plugin; the settings of {names[0]!r} are used")
    yield from _unread_keys(loaded, extra, plugin)
    yield from _unread_variables(loaded, env)
    wanted, memory = loaded["max_hidden_state_cpu_size"], os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if isinstance(wanted, int | float) and wanted * GIB > memory:
        yield Remark(
            "max_hidden_state_cpu_size",
            f"max_hidden_state_cpu_size is {wanted:g}, but this machine has {memory / GIB:.1f} GB of memory: LMCache, "
            "which reserves the same for a store of its own before the plugin is there, may not start",
        )
    if loaded["pre_caching_hash_algorithm"] == "builtin" and env.get("PYTHONHASHSEED", "random") in ("", "random"):
        yield Remark(
            "PYTHONHASHSEED",
            "PYTHONHASHSEED is not set: under vLLM, chunk hashes then differ from start to start, and nothing on disk "
            "is found again after a restart; set it to the same number for every process (PYTHONHASHSEED=0)",
        )
    deletes = extra.get(f"storage_plugin.{plugin}.on_kv_gone", "delete") == "delete"
    if deletes and not any(loaded[name] for name in _KV_BEYOND_RAM):
        yield Remark(
            "on_kv_gone",
            "LMCache keeps KV in CPU memory only, and with on_kv_gone: delete the cold tier never holds more chunks "
            "than that; give LMCache a disk tier (local_disk), or set on_kv_gone to archive",
        )
    if loaded["remote_config_url"]:
        yield Remark("remote_config_url", "settings fetched from remote_config_url at start are not seen here")


#: Settings that give LMCache a place for KV other than CPU memory.
_KV_BEYOND_RAM = (
    "local_disk", "remote_url", "remote_storage_plugins", "gds_path", "maru_path", "enable_p2p", "enable_pd",
)  # fmt: skip


def _unread_keys(loaded: LoadedSettings, extra: Mapping[str, Any], plugin: str) -> Iterator[Remark]:
    """Keys of extra_config that are named like settings of ours, but stand where they are not read."""
    settings = TieredConfig.__dataclass_fields__
    for key in extra:
        prefix, _, name = key.rpartition(".")
        owner = prefix.removeprefix("storage_plugin.")
        if name not in settings or (owner != prefix and owner in (plugin, *(loaded["storage_plugins"] or ()))):
            continue
        if prefix in ("", plugin) or prefix.startswith("storage_plugin."):
            why = f", because storage_plugins does not list {owner!r}" if owner != prefix else ""
            text = f"nothing reads it{why}; the setting is 'storage_plugin.{plugin}.{name}'"
            yield Remark(f"extra_config['{key}']", text)


def _unread_variables(loaded: LoadedSettings, env: Mapping[str, str]) -> Iterator[Remark]:
    """Variables named like LMCache's that nothing reads.

    Without LMCache, only those that are named like settings of the plugin: others may be LMCache's own.
    """
    known = {variable(key) for key in loaded.known}
    unknown = {name for name in env if name.startswith(variable("")) and name not in known}
    if loaded.by_lmcache:
        unknown -= mentioned_by_lmcache(unknown)
    else:
        unknown = {name for name in unknown if name.startswith(variable("storage_plugin_"))}
    for name in sorted(unknown):
        instead = f"settings of the plugin go into {variable('extra_config')}"
        yield Remark(name, f"{name} is in the environment, and nothing reads it; {instead}")
