"""Two tiers for LMCache's hidden states: a pinned-CPU hot tier over a safetensors-on-NVMe cold tier.

The public names are loaded when they are first used, so that a machine without LMCache can read a cold
path, and importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcache_hs_backend.config import TieredConfig
    from lmcache_hs_backend.dataset.torch import HiddenStateDataset
    from lmcache_hs_backend.format.reader import ColdTierReader
    from lmcache_hs_backend.integrations.lmcache.backend import HSTieredBackend
    from lmcache_hs_backend.integrations.lmcache.store import TieredHiddenStateStore
    from lmcache_hs_backend.tiered import TieredStore

__version__ = "0.1.0"

_WHERE = {
    "ColdTierReader": "lmcache_hs_backend.format.reader",
    "HiddenStateDataset": "lmcache_hs_backend.dataset.torch",
    "HSTieredBackend": "lmcache_hs_backend.integrations.lmcache.backend",
    "TieredConfig": "lmcache_hs_backend.config",
    "TieredHiddenStateStore": "lmcache_hs_backend.integrations.lmcache.store",
    "TieredStore": "lmcache_hs_backend.tiered",
}

__all__ = [
    "ColdTierReader",
    "HSTieredBackend",
    "HiddenStateDataset",
    "TieredConfig",
    "TieredHiddenStateStore",
    "TieredStore",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)
