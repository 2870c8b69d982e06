"""The steps of opening a store that touch its disk, and the recovery that follows. None may hang with the disk.

Each runs on an I/O thread or in the background; a caller waits a bounded time. What is wrong becomes a
ConfigError in the user's own words: the setting, its value, what is allowed.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError

from lmcache_hs_backend.config import GIB, ConfigError, TieredConfig
from lmcache_hs_backend.format.namespace import NamespaceId
from lmcache_hs_backend.tiers.background import Background
from lmcache_hs_backend.tiers.cleaner import Cleaner
from lmcache_hs_backend.tiers.index import Standing
from lmcache_hs_backend.tiers.mover import Executor, Mover
from lmcache_hs_backend.tiers.namespace import Namespace
from lmcache_hs_backend.tiers.pair import TierPair
from lmcache_hs_backend.tiers.recovery import Recovery

_TIMEOUT_SEC = 20.0
_LOOK_AGAIN_SEC = 1.0
_LOOK_AT_DEAD_SEC = 60.0


class Opening:
    """Opens one store's directory. ``setting`` turns the name of a setting into what the user wrote."""

    def __init__(
        self, config: TieredConfig, mover: Mover, background: Background, setting: Callable[[str], str]
    ) -> None:
        self._config = config
        self._mover = mover
        self._background = background
        self._setting = setting

    def namespace(self, ident: NamespaceId, executor: Executor) -> Namespace:
        """Create or find the namespace and lock it."""
        config = self._config
        opening = Namespace.open(
            config.cold_path, ident, on_locked=config.on_locked, mode=config.cold_dir_mode,
            label=self._setting("cold_path"), executor=executor,
        )  # fmt: skip
        try:
            return self._background.call(opening, _TIMEOUT_SEC)
        except TimeoutError:
            raise self._no_answer() from None

    def on_io_thread(self, call: Callable[[], None]) -> None:
        """Look at the disk without hanging with it."""
        try:
            self._mover.call(call).result(_TIMEOUT_SEC)
        except FutureTimeoutError:
            raise self._no_answer() from None

    def check_size(self, directory: str) -> None:
        """Compare the limits with the size of the filesystem."""
        disk = os.statvfs(directory)
        total = disk.f_blocks * disk.f_frsize
        for name, nbytes in (
            ("max_cold_size", self._config.max_cold_bytes),
            ("min_free_disk", self._config.min_free_bytes),
        ):
            if nbytes > total:
                raise ConfigError(
                    f"{self._setting(name)} is {getattr(self._config, name):g}, but must be at most {total / GIB:.4g}, "
                    f"the size in GB of the filesystem of {self._config.cold_path}"
                )

    async def recover(
        self, pair: TierPair, cleaner: Cleaner, directory: str, executor: Executor, recovered: threading.Event
    ) -> None:
        """Find what is there already, then look again for as long as the store is open. Runs in the background.

        Nothing is written before it is known what the disk holds. ``recovered`` is set when all headers are read.
        """
        recovery = Recovery(pair, self._config.cold_path, directory, executor)
        try:
            await recovery.scan()
        finally:
            with pair.lock:
                cleaner.enabled = True
                pair.mover.wake()
        await recovery.read_headers()
        await recovery.trim()
        recovered.set()
        looked = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_AGAIN_SEC)
            if pair.index.standings[Standing.UNREAD] and pair.cold.readable:
                await recovery.read_headers()  # a disk that failed meanwhile is back
            if time.monotonic() - looked > _LOOK_AT_DEAD_SEC:
                looked = time.monotonic()
                await recovery.forget_revived()

    def _no_answer(self) -> ConfigError:
        return ConfigError(
            f"{self._setting('cold_path')} is {self._config.cold_path!r}, but that disk has not answered in "
            f"{_TIMEOUT_SEC:g} s"
        )
