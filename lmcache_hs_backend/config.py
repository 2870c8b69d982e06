"""Every setting of the tiers: its name, type, default, limits and meaning, in one place.

Values come from a flat mapping (LMCache's ``extra_config``, or the connector's own), and are checked
here once; nothing else in the package parses or defaults a setting. This module only looks at values:
it neither creates nor probes a path.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

GIB = 1024**3

#: A limit of 1000 GB for a disk of 931 GiB is a unit taken for another one.
_A_LITTLE_ABOVE = 1.1

#: Stands for a value that is not shown.
HIDDEN = "***"

#: The value of ``shared_url`` without a shared tier.
OFF = "off"
_URL = re.compile(r"(s3|gs|az|file)://.+")

#: The two keys by which LMCache finds the class; they stand beside the settings under the same prefix.
LOADER_KEYS = ("module_path", "class_name")


#: Settings whose defaults suit almost every machine; shown and documented apart from the others.
ADVANCED = frozenset(
    {
        "cold_dir_mode", "use_odirect", "clean_fraction", "kv_presence_timeout_ms", "promote", "on_locked",
        "touch_memory", "verify_reads", "store_count", "close_timeout_sec",
    }
)  # fmt: skip


class ConfigError(ValueError):
    """A setting is wrong. The text names the key, the value and what is allowed."""


def number(low: float, high: float = math.inf, *, above: bool = False, integer: bool = False) -> Callable[..., Any]:
    """A parser of numbers within limits. Like all parsers here, the ValueError that it raises says what is allowed.

    Args:
        low: The least value.
        high: The greatest value.
        above: Only values above ``low``, not ``low`` itself.
        integer: Only whole numbers.
    """
    kind = "a whole number" if integer else "a number"
    bound = f"{'above' if above else 'at least'} {low:g}" + (f" and at most {high:g}" if high < math.inf else "")

    def parse(value: Any) -> Any:
        try:
            if isinstance(value, bool):
                raise ValueError
            parsed = float(value)
            if integer and parsed != int(parsed):
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"{kind} {bound}") from None
        if not math.isfinite(parsed) or parsed > high or (parsed <= low if above else parsed < low):
            raise ValueError(f"{kind} {bound}")
        return int(parsed) if integer else parsed

    return parse


def boolean(value: Any) -> bool:
    """Parses true or false, as leniently as LMCache."""
    text = str(value).strip().lower()
    if text in ("true", "1"):
        return True
    if text in ("false", "0"):
        return False
    raise ValueError("true or false")


def choice_of(*allowed: str) -> Callable[[Any], str]:
    """A parser of one of a few words."""

    def parse(value: Any) -> str:
        if isinstance(value, bool):  # YAML reads a bare on or off as a boolean
            value = "on" if value else "off"
        if str(value) not in allowed:
            raise ValueError(" or ".join(repr(choice) for choice in allowed))
        return str(value)

    return parse


def directory(value: Any) -> str:
    """Parses the path of a directory: absolute, with ``~`` expanded. Whether it is one is not looked at."""
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ValueError("the path of a directory")
    expanded = os.path.expanduser(value)
    if expanded.startswith("~"):
        raise ValueError("the path of a directory; there is no home directory of that name")
    return os.path.abspath(expanded)


def _mode(value: Any) -> int:
    allowed = "an octal mode with rwx for the owner, such as '0700' or '0750'"
    try:  # YAML already reads a bare 0700 as octal; quoted text is read as octal here
        mode = int(value, 8) if isinstance(value, str) else int(value)
    except (TypeError, ValueError):
        raise ValueError(allowed) from None
    if isinstance(value, bool) or not 0 <= mode <= 0o777 or mode & 0o700 != 0o700:
        raise ValueError(allowed)
    return mode


def _text(value: Any) -> str | None:
    if value is not None and not isinstance(value, str | int | float):
        raise ValueError("a text")
    return None if value is None else str(value)


def checked_url(url: str) -> str:
    """A URL of objects, without a slash at its end. The ValueError that it raises says what is allowed."""
    if not _URL.fullmatch(url):
        raise ValueError("a URL such as 's3://bucket/prefix', 'gs://…', 'az://…' or 'file:///directory'")
    if url.startswith("file://") and not url.startswith("file:///"):
        raise ValueError("'file://' followed by an absolute path, so three slashes")
    return url.rstrip("/")


def _shared_url(value: Any) -> str:
    if value is None or value is False or str(value).strip().lower() in ("", "off"):  # YAML reads a bare off as false
        return OFF
    return checked_url(str(value))


def _options(value: Any) -> dict[str, Any]:
    allowed = "a table of obstore's options, such as {endpoint: 'http://host:9000', region: us-east-1}"
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError(allowed) from None
    if not isinstance(value, Mapping) or not all(isinstance(part, str | int | float | bool) for part in value.values()):
        raise ValueError(allowed)
    return {str(key): part for key, part in value.items()}


def shown_value(name: str, value: Any) -> Any:
    """A setting's value as logs and errors may show it: of ``shared_options``, which may hold credentials, the keys."""
    if name != "shared_options":
        return value
    return dict.fromkeys(value, HIDDEN) if isinstance(value, Mapping) else HIDDEN


def default_cold_path() -> str:
    """``lmcache-hs`` in the user's cache directory. Raises ConfigError where there is none.

    Relative paths in the environment are ignored, as the XDG specification says: they would depend on where a service
    is started.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.join(os.path.expanduser("~"), ".cache")
    if not os.path.isabs(base):
        raise ConfigError(
            f"cold_path is not set, and user {os.geteuid()} has no home directory for its default: set cold_path"
        )
    return os.path.join(base, "lmcache-hs")


def setting(default: Any, parse: Callable[[Any], Any], doc: str, *, shown: bool = True) -> Any:
    """A field of TieredConfig, or of a class that adds to it. ``shown``: whether its value is in the ``repr``."""
    metadata = {"parse": parse, "doc": doc}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata, repr=shown)
    return dataclasses.field(default=default, metadata=metadata, repr=shown)


@dataclass(frozen=True, kw_only=True)
class TieredConfig:
    """The settings of one store. Sizes are in GB of 1024**3 bytes, as LMCache counts them."""

    cold_path: str = setting(default_cold_path, directory, "directory of the cold tier, on a local disk")
    max_cold_size: float = setting(
        20.0, number(0, above=True), "GB that this process may keep on disk, everything of ours counted"
    )
    min_free_disk: float = setting(1.0, number(0), "GB that always stay free on that filesystem; 0: no floor")
    cold_dir_mode: int = setting(0o700, _mode, "permissions of the directories that are created")
    model_revision: str | None = setting(
        None, _text, "what tells two versions of a model apart; default: a digest of a local model directory"
    )
    io_threads: int = setting(4, number(1, 64, integer=True), "threads that read and write chunk files")
    use_odirect: str = setting(
        "auto", choice_of("auto", "on", "off"), "bypass the page cache; auto: where a test write succeeds"
    )
    clean_fraction: float = setting(
        0.25, number(0, 1), "share of the hot tier kept free or already on disk, ahead of need"
    )
    write_back_sec: float = setting(30.0, number(0), "seconds after which a dirty chunk is written anyway")
    store_wait_ms: float = setting(500.0, number(0), "milliseconds that a store may wait for the disk to make room")
    read_timeout_sec: float = setting(5.0, number(0, above=True), "seconds after which an unfinished read is a miss")
    kv_presence_timeout_ms: float = setting(
        250.0,
        number(0, above=True),
        "milliseconds that LMCache's remote backends may take, for one call, to say whether they hold the KV",
    )
    promote: bool = setting(True, boolean, "keep what a cold hit has read in the hot tier")
    on_kv_gone: str = setting(
        "delete", choice_of("delete", "archive"), "what becomes of a chunk whose KV LMCache has lost"
    )
    on_locked: str = setting(
        "subdir", choice_of("subdir", "error"), "what to do when another process holds the namespace"
    )
    require_cold: bool = setting(
        False,
        boolean,
        "a cold_path that cannot be used at start is an error; false: the cold tier is offline until it can",
    )
    fsync: bool = setting(False, boolean, "make each chunk file durable before it counts as written")
    verify_reads: bool = setting(True, boolean, "compare the checksum of every layer that is read")
    store_count: str = setting(
        "held",
        choice_of("held", "new"),
        "what a store returns: the chunks of its range that hold the layer, or those that newly do, as LMCache's own",
    )
    touch_memory: bool = setting(
        True, boolean, "touch the hot tier's memory in the background from the start, so that no store waits for it"
    )
    close_timeout_sec: float = setting(4.0, number(0), "seconds that close() may take to write dirty chunks")

    ranks: str = setting(
        "all",
        choice_of("all", "first"),
        "in LMCache: which ranks keep rows: each its own, or one for each node; see docs/how-to/ranks.md",
    )
    shared_url: str = setting(
        OFF,
        _shared_url,
        "where the shared tier is: s3://bucket/prefix, gs://…, az://… or file:///directory; off: none",
    )
    shared_access: str = setting("both", choice_of("both", "read", "write"), "what is done with the shared tier")
    shared_write: str = setting(
        "all",
        choice_of("all", "reused", "archive"),
        "which chunks are uploaded: all, those that were served at least once, or those whose KV has gone "
        "(on_kv_gone: archive)",
    )
    shared_read_sec: float = setting(
        2.0, number(0, above=True), "seconds that a retrieve may wait for the shared tier, at most"
    )
    shared_options: Mapping[str, Any] = setting(
        dict,
        _options,
        "obstore's options for shared_url: endpoint, region, … Keys come from AWS_* and the like too",
        shown=False,  # they may be credentials
    )

    @property
    def has_shared_tier(self) -> bool:
        """Whether ``shared_url`` names one."""
        return self.shared_url != OFF

    @property
    def uploads(self) -> str:
        """Which chunks are uploaded, as in ``shared_write``; empty: none."""
        return self.shared_write if self.has_shared_tier and self.shared_access != "read" else ""

    @property
    def max_cold_bytes(self) -> int:
        """``max_cold_size`` in bytes."""
        return int(self.max_cold_size * GIB)

    @property
    def min_free_bytes(self) -> int:
        """``min_free_disk`` in bytes."""
        return int(self.min_free_disk * GIB)

    def limit_within(self, name: str, total_bytes: int, label: Callable[[str], str]) -> tuple[int, str]:
        """A limit in bytes on a filesystem of a known size.

        A default, and a value that is a little above that size (GB taken for GiB, say), is cut down.

        Args:
            name: ``max_cold_size`` or ``min_free_disk``.
            total_bytes: The size of the filesystem.
            label: Turns a setting's name into what the user wrote.

        Returns:
            The bytes to use, and, if it was cut down, a text that says so; else an empty one.

        Raises:
            ConfigError: The value is far above the size.
        """
        value, default = getattr(self, name), type(self).__dataclass_fields__[name].default
        nbytes, total = int(value * GIB), f"{total_bytes / GIB:.4g}"
        if nbytes <= total_bytes:
            return nbytes, ""
        if value != default and nbytes > total_bytes * _A_LITTLE_ABOVE:
            raise ConfigError(
                f"{label(name)} is {value:g}, but must be at most {total}, the size in GB of the filesystem of "
                f"{self.cold_path}"
            )
        used = total_bytes // 20 if name == "min_free_disk" else total_bytes
        text = f"the filesystem of {self.cold_path} has {total} GB: {used / GIB:.4g} GB are used"
        return used, f"{label(name)} is {value:g}, but {text}"

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], label: Callable[[str], str]) -> TieredConfig:
        """Check values and build the settings.

        Args:
            values: Setting name to value, as text or as YAML reads it.
            label: Turns a setting's name into what the user wrote, for the error.

        Raises:
            ConfigError: A name is unknown, or a value is wrong.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        parsed = {}
        for name, value in values.items():
            if name not in fields:
                near = difflib.get_close_matches(name, fields, n=1, cutoff=0.0)
                raise ConfigError(f"{label(name)} is not a setting; the nearest one is {label(near[0])}")
            try:
                parsed[name] = fields[name].metadata["parse"](value)
            except ValueError as error:
                shown = shown_value(name, value)
                raise ConfigError(f"{label(name)} is {shown!r}, but must be {error}") from None
        return cls(**parsed)

    @classmethod
    def from_extra_config(cls, extra_config: Mapping[str, Any] | None, plugin: str) -> TieredConfig:
        """The settings under ``storage_plugin.<plugin>.`` of LMCache's extra_config. Raises ConfigError."""
        prefix = f"storage_plugin.{plugin}."
        values = {key[len(prefix) :]: value for key, value in (extra_config or {}).items() if key.startswith(prefix)}
        for key in LOADER_KEYS:
            values.pop(key, None)
        return cls.from_mapping(values, lambda name: f"extra_config['{prefix}{name}']")


@dataclass(frozen=True, kw_only=True)
class LocalConfig(TieredConfig):
    """The settings of a store without LMCache or vLLM: those of the tiers, and what these two would have given."""

    require_cold: bool = setting(True, boolean, "a cold_path that cannot be used at start is an error")
    hot_size: float = setting(2.0, number(0, above=True), "GB of the hot tier")
    chunk_size: int = setting(256, number(1, 2**20, integer=True), "tokens of a chunk; part of the namespace")


@dataclass(frozen=True, kw_only=True)
class ServerConfig(TieredConfig):
    """The settings of the module in LMCache's MP server: those of the tiers, for each model, and these."""

    hot_size: float = setting(2.0, number(0, above=True), "GB of the hot tier of each model, for all its workers")
    client_memory: float = setting(
        4.0, number(0, above=True), "GB of results that one connection of a client may hold in shared memory"
    )


def hot_tier_bytes(max_hidden_state_cpu_size: Any) -> int:
    """LMCache's ``max_hidden_state_cpu_size`` (GB) in bytes. Raises ConfigError."""
    try:
        size = number(0, above=True)(max_hidden_state_cpu_size)
    except ValueError as error:
        raise ConfigError(f"max_hidden_state_cpu_size is {max_hidden_state_cpu_size!r}, but must be {error}") from None
    return int(size * GIB)


def plugin_names(extra_config: Mapping[str, Any] | None, module_path: str, class_name: str) -> list[str]:
    """The storage plugin names of an extra_config that point to this class, in order of appearance."""
    suffix = ".class_name"
    extra = extra_config or {}
    return [
        name
        for key in extra
        if key.startswith("storage_plugin.") and key.endswith(suffix) and extra[key] == class_name
        for name in [key[len("storage_plugin.") : -len(suffix)]]
        if str(extra.get(f"storage_plugin.{name}.module_path", "")).split(".")[0] == module_path
    ]
