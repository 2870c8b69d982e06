"""LMCache's settings, loaded the way LMCache loads them, on a machine that need not have LMCache.

A YAML file, then ``LMCACHE_<KEY>`` from the environment over it, with LMCache's own conversions, its
deprecated names, and its silent habits: a value that cannot be converted becomes the default or nothing,
an unknown key is only a warning, and ``LMCACHE_EXTRA_CONFIG`` replaces the whole ``extra_config`` of the
file. As LMCache 0.5.6 and 0.5.7 do it (``lmcache/v1/config.py``, ``config_base.py``); a test compares the
two loaders on the same input. What our plugin makes of the result is not decided here.
"""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml


class LoadError(Exception):
    """LMCache would not start with these settings. ``key`` is the one that is wrong, if it is one."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(text)
        self.key = key


# -- conversions, as LMCache has them: also for what they let through ------------------------------------


def _boolean(value: Any) -> bool:
    return value if isinstance(value, bool) else str(value).strip().lower() in ("true", "1")


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _integers(value: Any) -> list[int]:
    if isinstance(value, list):
        return [int(item) for item in value]
    return [value] if isinstance(value, int) else [int(part) for part in _parts(str(value))]


def _floats(value: Any) -> list[float]:
    if isinstance(value, list):
        return [float(item) for item in value]
    return [value] if isinstance(value, float) else [float(part) for part in _parts(str(value))]


def _texts(value: Any) -> list[Any]:
    return value if isinstance(value, list) else _parts(value)


def _locations(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value] if value else []


def _table(value: Any) -> Any:
    return value if isinstance(value, dict) else json.loads(value) if value else None


def _disks(value: Any) -> str | None:
    return ",".join(part.removeprefix("file://") for part in _parts(str(value))) or None


def _retrieve_mode(value: Any) -> str:
    text = str(value).strip().lower().replace("-", "_")
    if text in ("prefix_strict", "prefixstrict"):
        return "prefix_strict"
    if text in ("skip_missing_chunks", "skipmissingchunks", "legacy"):
        return "skip_missing_chunks"
    raise ValueError("must be 'prefix_strict' or 'skip_missing_chunks'")


#: LMCache's settings by how they are converted, with their defaults.
_BY_CONVERSION: list[tuple[Callable[[Any], Any], dict[str, Any]]] = [
    (int, {
        "chunk_size": 256, "blend_min_tokens": 256, "mp_port": 5555, "lmcache_worker_heartbeat_delay_time": 10,
        "lmcache_worker_heartbeat_time": None, "pd_buffer_size": None, "pd_proxy_port": None, "pd_max_prefill_len": 0,
        "nixl_buffer_size": None, "gds_buffer_size": None, "blocking_timeout_secs": 10,
        "internal_api_server_port_start": 6999, "priority_limit": None, "lookup_timeout_ms": 3000,
        "min_retrieve_tokens": 0, "chunk_statistics_auto_exit_target_unique_chunks": 0, "pin_timeout_sec": 300,
        "pin_check_interval_sec": 30,
    }),
    (float, {
        "max_local_cpu_size": 5.0, "reserve_local_cpu_size": 0.0, "max_local_disk_size": 0.0,
        "pd_allocation_timeout_sec": float("inf"), "pd_shutdown_timeout_sec": 5.0,
        "pd_condition_poll_interval_sec": 0.005, "maru_pool_size": 4.0, "hit_miss_ratio": None,
        "lazy_memory_initial_ratio": 0.2, "lazy_memory_expand_trigger_ratio": 0.5, "lazy_memory_step_ratio": 0.1,
        "lazy_memory_safe_size": 0.0, "chunk_statistics_auto_exit_timeout_hours": 0.0, "max_hidden_state_cpu_size": 2.0,
    }),
    (_boolean, {
        "local_cpu": True, "local_cpu_use_hugepages": False, "use_layerwise": False, "save_decode_cache": False,
        "enable_blending": False, "enable_p2p": False, "enable_controller": False, "enable_pd": False,
        "pd_skip_proxy_notification": False, "pd_bidirectional": False, "use_gds": True, "save_unfull_chunk": False,
        "py_enable_gc": True, "enable_async_loading": False, "internal_api_server_enabled": False,
        "enable_scheduler_bypass_lookup": False, "run_script_api_enabled": False,
        "enable_lazy_memory_allocator": False, "enable_chunk_statistics": False,
        "chunk_statistics_auto_start_statistics": False, "enable_kv_events": False, "use_gpu_connector_v3": False,
        "enable_hidden_state_cache": False,
    }),
    (str, {
        "local_disk_path_sharding": "by_gpu", "remote_url": None, "remote_serde": "naive",
        "pre_caching_hash_algorithm": "builtin", "blend_special_str": " # # ", "store_location": None, "p2p_host": None,
        "mp_host": None, "lmcache_instance_id": None, "controller_pull_url": None, "controller_reply_url": None,
        "pd_role": None, "pd_buffer_device": None, "pd_peer_host": None, "pd_proxy_host": None,
        "pd_backend_mode": "async", "transfer_channel": None, "nixl_buffer_device": None, "gds_path": None,
        "gds_path_sharding": "by_gpu", "maru_path": None, "gds_backend": "cufile", "audit_actual_remote_url": None,
        "internal_api_server_host": "127.0.0.1", "external_lookup_client": None, "cache_policy": "LRU",
        "numa_mode": None, "internal_api_server_socket_path_prefix": None,
        "chunk_statistics_strategy": "memory_bloom_filter", "remote_config_url": None, "app_id": None,
    }),
    (_integers, {
        "blend_check_layers": None, "p2p_init_ports": None, "p2p_lookup_ports": None, "lmcache_worker_ports": None,
        "lmcache_worker_ids": None, "pd_peer_init_port": None, "pd_peer_alloc_port": None, "pd_peer_query_port": None,
        "internal_api_server_include_index_list": None, "lookup_server_worker_ids": None, "hidden_state_layers": None,
    }),
    (_floats, {"blend_recompute_ratios": None, "blend_thresholds": None}),
    (_texts, {
        "retrieve_locations": None, "nixl_backends": None, "storage_plugins": None, "remote_storage_plugins": None,
        "script_allowed_imports": None,
    }),
    (_locations, {"runtime_plugin_locations": None}),
    (_table, {"extra_config": None}),
    (_disks, {"local_disk": None}),
    (_retrieve_mode, {"hidden_states_retrieve_mode": "prefix_strict"}),
]  # fmt: skip

DEFAULTS: dict[str, Any] = {name: value for _, names in _BY_CONVERSION for name, value in names.items()}
_CONVERT = {name: convert for convert, names in _BY_CONVERSION for name in names}

#: Deprecated names that are still heeded, and to which they are mapped.
ALIASES = {"plugin_locations": "runtime_plugin_locations", "external_backends": "storage_plugins"}
#: Names that LMCache itself lists as aliases, but then reports as unknown and does not use.
DEAD_ALIASES = {
    "enable_xpyd": "enable_pd",
    "nixl_peer_host": "pd_peer_host",
    "nixl_peer_init_port": "pd_peer_init_port",
    "nixl_peer_alloc_port": "pd_peer_alloc_port",
    "nixl_proxy_host": "pd_proxy_host",
    "nixl_proxy_port": "pd_proxy_port",
    "nixl_role": "pd_role",
    "controller_url": "controller_pull_url",
    "lmcache_worker_port": "lmcache_worker_ports",
}

DEFAULT, CONVERTED = "default", "default (what was set cannot be converted)"


@dataclass
class Loaded:
    """LMCache's settings, where each came from, and what LMCache would only mention in its log."""

    values: dict[str, Any] = field(default_factory=lambda: dict(DEFAULTS))
    sources: dict[str, str] = field(default_factory=lambda: dict.fromkeys(DEFAULTS, DEFAULT))
    warnings: list[tuple[str, str]] = field(default_factory=list)  # (key, text)
    file_extra: dict[str, Any] | None = None  # extra_config of the file, also when the environment replaced it

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return f"LMCACHE_{name.upper()}"


def load(path: str | None = None, environ: Mapping[str, str] | None = None) -> Loaded:
    """The settings of a file (else of ``LMCACHE_CONFIG_FILE``, else none) and of the environment.

    Raises LoadError where LMCache would not start.
    """
    env = os.environ if environ is None else environ
    loaded = Loaded()
    path = path or env.get("LMCACHE_CONFIG_FILE")
    if path:
        _from_file(loaded, path)
    _from_environment(loaded, env, keep=bool(path))
    _validate(loaded)
    return loaded


def _from_file(loaded: Loaded, path: str) -> None:
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
    for name, value in _resolve(loaded, values, path).items():
        loaded.sources[name] = path
        loaded.values[name] = _converted(loaded, name, value, path)
    extra = loaded["extra_config"]
    loaded.file_extra = extra if isinstance(extra, dict) else None


def _from_environment(loaded: Loaded, env: Mapping[str, str], *, keep: bool) -> None:
    """``keep``: a value that cannot be converted leaves what was there; else there is nothing."""
    names = (*DEFAULTS, *DEAD_ALIASES, *ALIASES)
    values = {name: env[variable(name)] for name in names if variable(name) in env}
    for name, text in _resolve(loaded, values, "the environment").items():
        source = variable(name)
        value = _unquoted(text)
        if keep:
            try:
                loaded.values[name] = _CONVERT[name](value)
            except ValueError as error:
                loaded.warnings.append((name, f"{source}={text!r} cannot be used and is ignored: {error}"))
                continue
            except Exception as error:  # noqa: BLE001 - LMCache's converters let it through, and it does not start
                raise LoadError(name, f"{source} is {text!r}: {error}") from None
        else:
            loaded.values[name] = _converted(loaded, name, value, source)
        loaded.sources[name] = source


def _resolve(loaded: Loaded, values: Mapping[Any, Any], source: str) -> dict[str, Any]:
    """Values by their present names; what LMCache does not know is only worth a warning to it."""
    resolved = {}
    for key, value in values.items():
        if key in ALIASES:
            loaded.warnings.append((key, f"{key} (in {source}) is deprecated: use {ALIASES[key]}"))
            resolved[ALIASES[key]] = value
        elif key in DEFAULTS:
            resolved[key] = value
        else:
            loaded.warnings.append((str(key), f"{key} (in {source}) is not a setting of LMCache{_hint(str(key))}"))
    return resolved


def _hint(key: str) -> str:
    if key in DEAD_ALIASES:
        return f"; it is called {DEAD_ALIASES[key]}"
    if key.startswith("storage_plugin."):
        return "; it belongs under extra_config"
    return ""


def _converted(loaded: Loaded, name: str, value: Any, source: str) -> Any:
    """A value as LMCache takes it: None where it cannot be converted. Raises LoadError."""
    if value is None:
        return None
    try:
        return _CONVERT[name](value)
    except ValueError as error:
        loaded.warnings.append((name, f"{name} is {value!r} (in {source}), which cannot be used: {error}"))
        return None
    except Exception as error:  # noqa: BLE001 - whatever a converter raises, LMCache does not start
        raise LoadError(name, f"{name} is {value!r} (in {source}): {error}") from None


def _unquoted(text: str) -> str:
    text = text.strip()
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        try:
            evaluated = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return text[1:-1]
        return evaluated if isinstance(evaluated, str) else text
    return text


# -- what LMCache checks ---------------------------------------------------------------------------------


def _validate(loaded: Loaded) -> None:
    """LMCache's own validation, which changes a few values. Raises LoadError."""
    values = loaded.values
    try:
        negative = values["min_retrieve_tokens"] < 0
    except TypeError:
        raise LoadError("min_retrieve_tokens", "min_retrieve_tokens must be a whole number") from None
    _demand(not negative, "min_retrieve_tokens", "min_retrieve_tokens must be at least 0")
    if values["enable_blending"]:
        values["save_unfull_chunk"] = True
    if values["enable_controller"]:
        for name in ("lmcache_instance_id", "controller_pull_url", "controller_reply_url"):
            # LMCache makes an instance id up where there is none
            _demand(values[name] is not None or name == "lmcache_instance_id", name, "enable_controller needs it")
        _demand(bool(values["lmcache_worker_ports"]), "lmcache_worker_ports", "enable_controller needs it")
    if values["enable_p2p"]:
        _demand(values["enable_controller"], "enable_controller", "enable_p2p needs it")
        for name in ("p2p_host", "p2p_init_ports", "p2p_lookup_ports", "transfer_channel"):
            _demand(values[name] is not None, name, "enable_p2p needs it")
    extra = values["extra_config"]
    _demand(extra is None or isinstance(extra, dict), "extra_config", f"it is {extra!r}, not a table")
    _validate_pd(values)
    if extra and extra.get("enable_nixl_storage"):
        _validate_nixl(loaded, extra)


def _validate_pd(values: dict[str, Any]) -> None:
    if not values["enable_pd"]:
        return
    for name in ("pd_role", "pd_buffer_size", "pd_buffer_device"):
        _demand(values[name] is not None, name, "enable_pd needs it")
    _demand(not values["enable_p2p"], "enable_p2p", "enable_pd does not go with it")
    _demand(values["pd_backend_mode"] in ("sync", "async"), "pd_backend_mode", "it must be 'sync' or 'async'")
    values["save_unfull_chunk"] = True
    if values["pd_role"] == "receiver":
        _demand(values["store_location"] != "PDBackend", "store_location", "a receiver cannot store in PDBackend")
        _demand(values["retrieve_locations"] in (None, ["PDBackend"]), "retrieve_locations", "a receiver has PDBackend")


def _validate_nixl(loaded: Loaded, extra: dict[str, Any]) -> None:
    values = loaded.values
    for name in ("nixl_backend", "nixl_pool_size"):
        _demand(extra.get(name) is not None, f"extra_config['{name}']", "enable_nixl_storage needs it")
    only = extra.get("nixl_presence_cache_only") and not extra.get("nixl_presence_cache")
    _demand(not only, "extra_config['nixl_presence_cache']", "nixl_presence_cache_only needs it")
    device = values["nixl_buffer_device"]
    _demand(device is not None, "nixl_buffer_device", "enable_nixl_storage needs it")
    if device == "cpu":
        _demand(values["nixl_buffer_size"] is None, "nixl_buffer_size", "nixl_buffer_device cpu has no such buffer")
        _demand(_above_zero(values["max_local_cpu_size"]), "max_local_cpu_size", "nixl_buffer_device cpu needs it")
        _demand(not values["enable_p2p"], "enable_p2p", "nixl_buffer_device cpu does not go with it")
    else:
        _demand(values["nixl_buffer_size"] is not None, "nixl_buffer_size", "enable_nixl_storage needs it")
    if "nixl_use_hugepages" in extra:
        huge = bool(extra["nixl_use_hugepages"])
        if device == "cpu":
            user_set = loaded.sources["local_cpu_use_hugepages"] != DEFAULT
            differs = user_set and values["local_cpu_use_hugepages"] != huge
            _demand(not differs, "local_cpu_use_hugepages", "extra_config.nixl_use_hugepages says otherwise")
            values["local_cpu_use_hugepages"] = huge
        del extra["nixl_use_hugepages"]


def _above_zero(value: Any) -> bool:
    return value is not None and value > 0


def _demand(good: bool, key: str, why: str) -> None:
    if not good:
        raise LoadError(key, f"{key}: {why}")
