"""Hidden states in LMCache's MP mode: the tiers as a module of ``lmcache server``, and the client for workers.

Start the server with::

    lmcache server … --server-module '{"module_path": "lmcache_hs_backend.integrations.lmcache_mp", "config": {…}}'

where ``config`` has our settings without a prefix, and ``hot_size`` (GB). Workers on the same machine use
``HiddenStateClient``. LMCache 0.5.6 calls ``build_server_modules``; 0.5.7 finds ``HiddenStatesModule``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from lmcache.logging import init_logger

from lmcache_hs_backend.config import ServerConfig
from lmcache_hs_backend.integrations.lmcache_mp.client import HiddenStateClient
from lmcache_hs_backend.integrations.lmcache_mp.connections import Connections
from lmcache_hs_backend.integrations.lmcache_mp.kv_events import KvEvents
from lmcache_hs_backend.integrations.lmcache_mp.mp_api import DiscoverableModule, server_module_handler
from lmcache_hs_backend.integrations.lmcache_mp.spaces import Spaces
from lmcache_hs_backend.integrations.lmcache_mp.wire import name_for_port

__all__ = ["HiddenStateClient", "HiddenStatesModule", "build_server_modules"]

logger = logging.getLogger(__name__)


class HiddenStatesModule(DiscoverableModule):  # type: ignore[misc]
    """The module: stores, the socket that clients connect to, and the coupling to KV.

    Raises ConfigError for wrong settings and OSError when the socket's name is taken; LMCache's server then does not
    start.
    """

    module_name = "hs_tiered"

    @classmethod
    def create(cls, build_ctx: Any) -> HiddenStatesModule:
        """LMCache 0.5.7 builds it here."""
        return cls(build_ctx.engine_context, build_ctx.mp_config, build_ctx.config_for(cls))

    def __init__(self, context: Any, mp_config: Any, config: Mapping[str, Any]) -> None:
        init_logger("lmcache_hs_backend")
        settings = ServerConfig.from_mapping(config, lambda name: f"config[{name!r}] of the server module")
        assert isinstance(settings, ServerConfig)
        self._context = context
        self._spaces = Spaces(context, settings)
        self._connections = Connections(name_for_port(mp_config.port), self._spaces, settings)
        self._kv_events = KvEvents(context.storage_manager, self._spaces.kv_gone)
        logger.info("hs_tiered loaded: clients find it by port %d, cold tier %s", mp_config.port, settings.cold_path)

    @property
    def context(self) -> Any:
        """LMCache's context of the server."""
        return self._context

    def report_status(self) -> dict[str, Any]:
        """For LMCache's status: connections, and for each store its directory and figures."""
        return {"hs_tiered": {"connections": len(self._connections), "stores": self._spaces.report()}}

    def close(self) -> None:
        """End connections and close the stores, each within ``close_timeout_sec``."""
        self._connections.close()
        self._kv_events.close()
        self._spaces.close()

    @server_module_handler("lmcache_hs.stats")  # type: ignore[untyped-decorator]
    def stats(self, payload: bytes) -> bytes:
        """``report_status`` as JSON, through LMCache's own RPC. The payload is not looked at."""
        return json.dumps(self.report_status()).encode()


def build_server_modules(build_context: Any) -> HiddenStatesModule:
    """LMCache 0.5.6 builds it here."""
    return HiddenStatesModule(build_context.server_context, build_context.mp_config, build_context.config)
