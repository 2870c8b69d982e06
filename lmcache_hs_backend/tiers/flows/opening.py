"""How a store comes to its disk: the namespace is opened, the limits are compared with the disk, recovery follows.

Everything here that touches the disk runs on an I/O thread, so nothing hangs with it; the caller who opens a store
waits a bounded time. A cold path that cannot be used leaves the tier offline (``require_cold``: is an error), and is
tried again in the background. Settings that cannot be meant are a ConfigError in the user's own words: the setting, its
value, what is allowed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from lmcache_hs_backend.config import ConfigError, TieredConfig
from lmcache_hs_backend.tiers.disk.health import PROBE_SEC
from lmcache_hs_backend.tiers.disk.owned_namespace import OwnedNamespace, UnusableColdPath
from lmcache_hs_backend.tiers.flows.background import Background
from lmcache_hs_backend.tiers.flows.bell import Latch
from lmcache_hs_backend.tiers.flows.core import Core
from lmcache_hs_backend.tiers.flows.io_threads import IoExecutor
from lmcache_hs_backend.tiers.flows.make_room import MakeRoom
from lmcache_hs_backend.tiers.flows.neighbours import Neighbours
from lmcache_hs_backend.tiers.flows.recover import Recover

_TIMEOUT_SEC = 20.0
_LOOK_AGAIN_SEC = 1.0
_NEIGHBOURS_SEC = 10.0

logger = logging.getLogger(__name__)


class Opening:
    """Opens one store's namespace."""

    def __init__(
        self,
        core: Core,
        namespace: OwnedNamespace,
        background: Background,
        executor: IoExecutor,
        setting: Callable[[str], str],
    ) -> None:
        """``setting`` turns the name of a setting into what the user wrote."""
        self._core = core
        self._config: TieredConfig = core.config
        self._namespace = namespace
        self._background = background
        self._executor = executor
        self._setting = setting

    def open(self) -> None:
        """Open the namespace and fit the limits, or take the tier offline. Raises ConfigError."""
        try:
            self._background.call(self._open(), _TIMEOUT_SEC)
            return
        except UnusableColdPath as error:
            unusable = error
        except TimeoutError:
            unusable = UnusableColdPath(
                f"{self._setting('cold_path')} is {self._config.cold_path!r}, but that disk has not answered in "
                f"{_TIMEOUT_SEC:g} s"
            )
        if self._config.require_cold:
            raise unusable
        self._core.disk.health.go_offline(str(unusable))

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        await self._namespace.open(self._executor)
        try:
            await loop.run_in_executor(self._executor, self._core.disk.opened)
            await loop.run_in_executor(self._executor, self._fit_limits)
        except BaseException:
            self._namespace.close()
            raise

    async def _open_later(self) -> None:
        """Try again until the cold path can be used. There is no caller any more who would see a wrong setting."""
        pause, logged = PROBE_SEC[0], ""
        while not self._namespace.is_open:
            await asyncio.sleep(pause)
            pause = min(2 * pause, PROBE_SEC[1])
            try:
                await self._open()
            except UnusableColdPath as error:
                logger.debug("the cold tier stays offline: %s", error)
            except ConfigError as error:
                self._core.disk.health.go_offline(str(error))  # a probe may have found it open for a moment
                if str(error) != logged:
                    logged = str(error)
                    logger.error("the cold tier stays offline: %s", error)
        logger.info("cold tier %s can be used now", self._namespace.directory)
        self._core.disk.health.back_online()

    def _fit_limits(self) -> None:
        """Compare the limits with the size of the filesystem.

        A default, and a limit that is a little above it (GB taken for GiB, say), is cut down with a WARNING. Raises
        ConfigError for what is far above.
        """
        core = self._core
        total = core.disk.total_bytes()
        if total is None:  # then what is free is not known either
            core.min_free_bytes = 0
            return
        core.state.max_cold_bytes = self._within("max_cold_size", total)
        core.min_free_bytes = self._within("min_free_disk", total)

    def _within(self, name: str, total: int) -> int:
        nbytes, cut_down = self._config.limit_within(name, total, self._setting)
        if cut_down:
            logger.warning("%s", cut_down)
        return nbytes

    async def recover(self, room: MakeRoom, neighbours: Neighbours, recovered: Latch) -> None:
        """Find what is there already, then look again for as long as the store is open. Runs in the background.

        First of all the namespace is opened, if that has failed before.

        Nothing is written before it is known what the disk holds. ``recovered`` is set when all headers are read.
        """
        core, executor = self._core, self._executor
        if not self._namespace.is_open:
            await self._open_later()
        recover = Recover(core, room, neighbours, executor)
        try:
            await recover.scan()
        finally:
            with core.lock, core.step:
                core.recovered = True
                core.wake()
        await recover.read_headers()
        await recover.trim()
        recovered.set()
        scanned = time.monotonic()
        while True:
            try:
                while await asyncio.get_running_loop().run_in_executor(executor, room.empty_trash):
                    pass
                await asyncio.sleep(_LOOK_AGAIN_SEC)
                if core.state.orders.unread_files and core.disk.health.readable:
                    await recover.read_left_headers()  # a disk that had failed is back
                if time.monotonic() - scanned > _NEIGHBOURS_SEC:
                    scanned = time.monotonic()
                    await recover.look_at_neighbours()
            except Exception:  # one bad round must not end them for a process that runs for months
                logger.exception("a look at %s failed", core.disk.directory)
                await asyncio.sleep(_NEIGHBOURS_SEC)
