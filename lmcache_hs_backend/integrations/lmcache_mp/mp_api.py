"""The only place here that names LMCache's modules of MP mode, because they change.

0.5.6 builds server modules with a factory; 0.5.7 discovers subclasses of ``DiscoverableModule``, which 0.5.6 does not
have.
"""

from __future__ import annotations

from typing import Any

from lmcache.v1.distributed.internal_api import L1ManagerListener, L2AdapterListener
from lmcache.v1.multiprocess import engine_module
from lmcache.v1.multiprocess.ext_server_module import server_module_handler

__all__ = [
    "DiscoverableModule",
    "L1ManagerListener",
    "L2AdapterListener",
    "l1_managers",
    "l2_adapters",
    "server_module_handler",
]

DiscoverableModule: Any = getattr(engine_module, "DiscoverableModule", object)


def l1_managers(storage_manager: Any) -> list[Any]:
    """The managers of the KV in RAM. Neither release has a public way to them."""
    managers = getattr(storage_manager, "_l1_managers_by_id", None)
    if managers:
        return list(managers.values())
    manager = getattr(storage_manager, "_l1_manager", None)
    return [] if manager is None else [manager]


def l2_adapters(storage_manager: Any) -> int:
    """How many L2 adapters there are; 1 if that is not known, which keeps rows whose KV one may hold."""
    adapters = getattr(storage_manager, "_l2_adapters", None)
    return 1 if adapters is None else len(adapters)
