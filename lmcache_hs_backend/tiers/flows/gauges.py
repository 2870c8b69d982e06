"""The gauges of a store: what is in its tiers at this moment, by the names of ``metrics.GAUGES``."""

from __future__ import annotations

import time

from lmcache_hs_backend.tiers.flows.core import Core
from lmcache_hs_backend.tiers.state import sharing


def publish(core: Core) -> None:
    """Bring the log and Prometheus up to date, and give up memory that has not been needed for a while."""
    now = gauges(core)
    core.metrics.report_losses()
    core.metrics.publish(now)
    core.pool.trim()


def gauges(core: Core) -> dict[str, float]:
    """One consistent reading, under the lock, in constant time. Also brings the counters up to date."""
    state = core.state
    writable = core.disk.health.writable
    stuck_since = time.monotonic() - core.config.read_timeout_sec
    with core.lock, core.step:
        core.count()
        return {
            "hot_bytes": state.free_list.used_bytes,
            "hot_chunks": state.orders.hot_chunks,
            "dirty_chunks": state.orders.dirty_chunks,
            "cold_bytes": state.accounts.total,
            "cold_chunks": len(state.orders.cold),
            "archived_chunks": len(state.accounts.archived),
            "quarantined_chunks": len(state.accounts.quarantined),
            "unconfirmed_chunks": state.unconfirmed_chunks,
            "capacity_bytes": state.free_list.capacity,
            "cold_limit_bytes": state.max_cold_bytes,
            "cold_online": int(writable),
            "pinned": int(core.arena.pinned),
            "slots_stuck": state.jobs.stuck(stuck_since),
            "queue_reads": state.jobs.queued_reads,
            "queue_writes": len(state.orders.aging),
            "queue_uploads": sharing.waiting(state),
            "shared_chunks": len(state.orders.shared) + len(state.accounts.archive_shared),
            "shared_read_online": int(core.share is not None and core.share.reads_online),
            "shared_write_online": int(core.share is not None and core.share.writes_online),
        }
