"""Which chunks go to the bucket of the shared tier, and what an upload leaves.

The queue is an order of the index (``Orders.to_share``): it holds nothing but chunks that have a file, so an outage of
the bucket costs no memory, and what is uploaded while the bucket is away is whatever the disk still holds then.

``prepare_upload`` takes a chunk out of the queue; ``commit_upload`` or ``abort_upload`` ends it. The chunk is neither
pinned nor busy meanwhile: it may be written again, evicted or dropped, and the end finds that out.
"""

from __future__ import annotations

from collections.abc import Iterable

from lmcache_hs_backend.format.header import FileLayout
from lmcache_hs_backend.tiers.state.entries import (
    KNOWN,
    LEAVING,
    LOCAL,
    REFUSED,
    SHARED,
    UPLOADING,
    ChunkEntry,
    ShareState,
)
from lmcache_hs_backend.tiers.state.tier_state import TierState

#: How long a chunk is left alone after its last layer: its other layers are probably on their way.
QUIET_SEC = 0.5
_LOOKED_AT = 32
_IDLE_SEC = 3600.0


def prepare_upload(state: TierState, now: float) -> ChunkEntry | float:
    """A chunk whose upload starts now, or the seconds after which to ask again. ``now``: monotonic."""
    wait = _IDLE_SEC
    for count, entry in enumerate(state.orders.to_share.values()):
        if count == _LOOKED_AT:
            break
        rest = entry.stored_at + QUIET_SEC - now if entry.stored_at else 0.0
        if rest <= 0:
            _set(state, entry, UPLOADING)
            return entry
        wait = min(wait, rest)
    return wait


def commit_upload(state: TierState, entry: ChunkEntry, layout: FileLayout | None) -> bool:
    """The bucket holds every layer of ``layout``. Returns whether that is still what the file holds."""
    if entry.share is not UPLOADING:
        return False
    # A write would have made it LOCAL again; and while a file is being deleted, nothing writes it.
    whole = not entry.dropped and (entry.file is LEAVING or (entry.file is KNOWN and entry.layout == layout))
    _set(state, entry, SHARED if whole else LOCAL)
    return whole


def abort_upload(state: TierState, entry: ChunkEntry, *, refused: bool = False) -> None:
    """It was not uploaded. ``refused``: and it never will be. Otherwise it is the last of the queue."""
    if entry.share is UPLOADING:
        _set(state, entry, REFUSED if refused and entry.file is KNOWN else LOCAL)


def reused(state: TierState, names: Iterable[bytes]) -> bool:
    """These chunks were served. Returns whether there is something new to upload."""
    waiting = len(state.orders.to_share)
    for name in names:
        entry = state.entries.get(name)
        if entry is not None and not entry.reused:
            entry.reused = True
            state.orders.reindex(entry)
    return len(state.orders.to_share) > waiting


def prefix_of(state: TierState, name: bytes) -> bytes:
    """The prefix digest of a chunk; empty when it is not here, or its header is not read."""
    entry = state.entries.get(name)
    return b"" if entry is None else entry.prefix


def _set(state: TierState, entry: ChunkEntry, share: ShareState) -> None:
    entry.share = share
    state.orders.reindex(entry)
