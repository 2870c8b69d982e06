"""The gauges of a store: what is in its tiers at this moment, by the names of ``metrics.GAUGES``."""

from __future__ import annotations

from lmcache_hs_backend.config import TieredConfig
from lmcache_hs_backend.tiers.index import Standing
from lmcache_hs_backend.tiers.pair import TierPair


def gauges(pair: TierPair, config: TieredConfig) -> dict[str, float]:
    """One consistent reading, under the lock. Constant time."""
    cold, index, space = pair.cold, pair.index, pair.cold.space
    with pair.lock:
        return {
            "hot_bytes": pair.hot.used_bytes,
            "hot_chunks": index.hot_chunks,
            "dirty_chunks": index.dirty_chunks,
            "cold_bytes": space.usage.total,
            "cold_chunks": len(index.cold),
            "archived_chunks": len(space.archived),
            "quarantined_chunks": len(space.quarantined),
            "unconfirmed_chunks": index.standings[Standing.UNREAD] + index.standings[Standing.UNCONFIRMED],
            "capacity_bytes": pair.hot.arena.capacity,
            "cold_limit_bytes": config.max_cold_bytes,
            "cold_online": int(cold.writable),
            "pinned": int(pair.hot.arena.pinned),
            "slots_stuck": pair.mover.stuck(config.read_timeout_sec),
            "queue_reads": pair.mover.queued_reads,
            "queue_writes": len(index.aging),
        }
