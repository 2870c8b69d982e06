"""The connector's settings: those of the tiers without their prefix, and the example connector's own.

They stand in ``kv_connector_extra_config``. Parsing, limits and the text of errors are those of
``config``; this module only adds fields. It imports no vLLM.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmcache_hs_backend.config import (
    GIB,
    OFF,
    ConfigError,
    TieredConfig,
    boolean,
    choice_of,
    directory,
    number,
    setting,
)


def label(name: str) -> str:
    """What the user wrote for a setting, for errors."""
    return f"kv_connector_extra_config['{name}']"


def _paths(value: Any) -> tuple[str, ...]:
    try:
        return tuple(directory(item) for item in ([value] if isinstance(value, str) else list(value)))
    except (TypeError, ValueError):
        raise ValueError("a directory or a list of directories") from None


def _server_url(value: Any) -> str:
    if value is None or value is False or str(value).strip().lower() in ("", OFF):
        return OFF
    if not re.fullmatch(r"(tcp|grpc)://[^/:]+:\d{1,5}", str(value)):
        raise ValueError("off, or the address of lmcache server on this machine as tcp://127.0.0.1:5555")
    return str(value)


@dataclass(frozen=True, kw_only=True)
class ConnectorSettings(TieredConfig):
    """TieredConfig, with rows written back at once to files that must be there, and what only the connector needs."""

    require_cold: bool = setting(True, boolean, "a cold_path that cannot be used at start is an error")
    write_back_sec: float = setting(0.0, number(0), "seconds after which a dirty chunk is written anyway")
    chunk_size: int = setting(256, number(16, 65536, integer=True), "tokens of a chunk")
    hot_size: float = setting(2.0, number(0, above=True), "GB of the hot tier")
    mp_server_url: str = setting(
        OFF, _server_url, "LMCache's MP server, when KV goes there: its store takes the rows. off or tcp://host:port"
    )
    emit: str = setting(
        "tiers", choice_of("tiers", "files", "both"), "where rows go: chunks, one file per request, or both"
    )
    shared_storage_path: str = setting("/tmp", directory, "directory of the files, one per request")
    num_writer_threads: int = setting(8, number(1, 64, integer=True), "threads that write those files")
    use_synchronization_lock: bool = setting(
        True, boolean, "hold a lock beside each file until it is there, for clients that wait for it"
    )
    allow_custom_save_path: bool = setting(False, boolean, "let a request name its file, inside custom_save_roots")
    custom_save_roots: tuple[str, ...] = setting(
        (), _paths, "directories that a request's file may lie in; default: shared_storage_path"
    )

    @property
    def hot_bytes(self) -> int:
        """``hot_size`` in bytes."""
        return int(self.hot_size * GIB)

    @property
    def to_server(self) -> bool:
        """Whether rows go to the store of LMCache's MP server."""
        return self.mp_server_url != OFF

    @property
    def to_tiers(self) -> bool:
        """Whether rows go to chunks."""
        return self.emit != "files"

    @property
    def to_files(self) -> bool:
        """Whether rows go to a file for each request."""
        return self.emit != "tiers"

    @property
    def save_roots(self) -> tuple[str, ...]:
        """The directories that files may lie in, their symbolic links resolved."""
        roots = (self.shared_storage_path, *(self.custom_save_roots if self.allow_custom_save_path else ()))
        return tuple(os.path.realpath(root) for root in roots)

    @classmethod
    def from_connector(cls, extra_config: Mapping[str, Any] | None) -> ConnectorSettings:
        """Raises ConfigError, which names the key, the value and what is allowed."""
        settings = cls.from_mapping(extra_config or {}, label)
        assert isinstance(settings, cls)  # from_mapping builds the class that it is called on
        if settings.to_server and settings.emit != "tiers":
            raise ConfigError(
                f"{label('emit')} is {settings.emit!r}, but must be 'tiers' with {label('mp_server_url')}: files are "
                "written from tiers of the connector's own"
            )
        return settings


def doubtful_layers(layer_ids: Sequence[int], num_layers: int) -> list[str]:
    """What is probably wrong with the layers that vLLM is to extract, in words.

    Args:
        layer_ids: ``eagle_aux_hidden_state_layer_ids``: id k is the residual stream after k decoder layers.
        num_layers: The model's decoder layers, so the last id there is.
    """
    found = []
    absent = [str(idx) for idx in layer_ids if not 0 <= idx <= num_layers]
    if absent:
        these = f"layer {absent[0]} does not" if len(absent) == 1 else f"layers {', '.join(absent)} do not"
        found.append(
            f"eagle_aux_hidden_state_layer_ids: {these} exist, the model has layers 0 (embeddings) to {num_layers}"
        )
    if num_layers not in layer_ids:
        found.append(
            f"eagle_aux_hidden_state_layer_ids: the last layer, {num_layers}, is not captured; drafter trainers need "
            f"it as the target (EAGLE-3, MTP, DFlash)"
        )
    return found
