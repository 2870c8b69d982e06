"""The steps of opening a store that touch its disk, and the recovery that follows. None may hang with the disk.

Each runs on an I/O thread or in the background; a caller waits a bounded time. What is wrong becomes a ConfigError in
the user's own words: the setting, its value, what is allowed.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TypeVar, cast

from lmcache_hs_backend.config import GIB, ConfigError, TieredConfig
from lmcache_hs_backend.format.namespace import NamespaceId
from lmcache_hs_backend.tiers.disk.owned_namespace import OwnedNamespace
from lmcache_hs_backend.tiers.flows.background import Background
from lmcache_hs_backend.tiers.flows.core import Core
from lmcache_hs_backend.tiers.flows.io_threads import IoExecutor, IoThreads
from lmcache_hs_backend.tiers.flows.make_room import MakeRoom
from lmcache_hs_backend.tiers.flows.neighbours import Neighbours
from lmcache_hs_backend.tiers.flows.recover import Recover

_TIMEOUT_SEC = 20.0
_LOOK_AGAIN_SEC = 1.0
_NEIGHBOURS_SEC = 10.0
#: A limit of 1000 GB for a disk of 931 GiB is a unit taken for another one.
_A_LITTLE_ABOVE = 1.1

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Opening:
    """Opens one store's directory."""

    def __init__(
        self, config: TieredConfig, io: IoThreads, background: Background, setting: Callable[[str], str]
    ) -> None:
        """``setting`` turns the name of a setting into what the user wrote."""
        self._config = config
        self._io = io
        self._background = background
        self._setting = setting

    def namespace(self, ident: NamespaceId, executor: IoExecutor) -> OwnedNamespace:
        """Create or find the namespace and lock it. Raises ConfigError."""
        config = self._config
        opening = OwnedNamespace.open(
            config.cold_path, ident, on_locked=config.on_locked, mode=config.cold_dir_mode,
            label=self._setting("cold_path"), executor=executor,
        )  # fmt: skip
        try:
            return self._background.call(opening, _TIMEOUT_SEC)
        except TimeoutError:
            raise self._no_answer() from None

    def on_io_thread(self, call: Callable[[], T]) -> T:
        """Ask the disk without hanging with it. Raises ConfigError when it does not answer, or what ``call`` raises."""
        try:
            return cast("T", self._io.call(call).result(_TIMEOUT_SEC))
        except FutureTimeoutError:
            raise self._no_answer() from None

    def fit_limits(self, core: Core) -> None:
        """Compare the limits with the size of the filesystem.

        A default, and a limit that is a little above it (GB taken for GiB, say), is cut down with a WARNING. Raises
        ConfigError for what is far above.
        """
        total = core.disk.total_bytes()
        if total is None:  # then what is free is not known either
            core.min_free_bytes = 0
            return
        if core.state.max_cold_bytes > total:
            self._refuse_or_warn("max_cold_size", core.state.max_cold_bytes, total, total)
            core.state.max_cold_bytes = total
        if core.min_free_bytes > total:
            self._refuse_or_warn("min_free_disk", core.min_free_bytes, total, total // 20)
            core.min_free_bytes = total // 20

    def _refuse_or_warn(self, name: str, nbytes: int, total: int, used: int) -> None:
        value, default = getattr(self._config, name), type(self._config).__dataclass_fields__[name].default
        if value != default and nbytes > total * _A_LITTLE_ABOVE:
            raise ConfigError(
                f"{self._setting(name)} is {value:g}, but must be at most {total / GIB:.4g}, "
                f"the size in GB of the filesystem of {self._config.cold_path}"
            )
        logger.warning(
            "%s is %g, but the filesystem of %s has %.4g GB: %.4g GB are used",
            self._setting(name), value, self._config.cold_path, total / GIB, used / GIB,
        )  # fmt: skip

    async def recover(
        self, core: Core, room: MakeRoom, neighbours: Neighbours, executor: IoExecutor, recovered: threading.Event
    ) -> None:
        """Find what is there already, then look again for as long as the store is open. Runs in the background.

        Nothing is written before it is known what the disk holds. ``recovered`` is set when all headers are read.
        """
        recover = Recover(core, room, neighbours, executor)
        try:
            await recover.scan()
        finally:
            with core.lock:
                core.recovered = True
                core.wake()
        await recover.read_headers()
        await recover.trim()
        recovered.set()
        scanned = time.monotonic()
        while True:
            while await asyncio.get_running_loop().run_in_executor(executor, room.empty_trash):
                pass
            await asyncio.sleep(_LOOK_AGAIN_SEC)
            if core.state.orders.unread_files and core.disk.health.readable:
                await recover.read_headers()  # a disk that had failed is back
            if time.monotonic() - scanned > _NEIGHBOURS_SEC:
                scanned = time.monotonic()
                await recover.look_at_neighbours()

    def _no_answer(self) -> ConfigError:
        return ConfigError(
            f"{self._setting('cold_path')} is {self._config.cold_path!r}, but that disk has not answered in "
            f"{_TIMEOUT_SEC:g} s"
        )
