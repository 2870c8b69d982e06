"""Which chunks go to the bucket of the shared tier, and what an upload leaves.

The queues are an order of the index (``Orders.to_share``) and one of the archive (``DiskAccounts.archive_to_share``).
They hold nothing but chunks that have a file, so an outage of the bucket costs no memory, and what is uploaded after
it is whatever the disk still holds then.

``prepare_upload`` takes a chunk out of its queue; ``commit_upload`` or ``abort_upload`` ends it. The chunk is neither
pinned nor busy meanwhile: it may be written again, archived, evicted or dropped, and the end finds that out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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


@dataclass(frozen=True, eq=False)
class Upload:
    """A chunk on its way to the bucket. ``entry``: None for an archived file; ``layout``: of the file, if known."""

    name: bytes
    entry: ChunkEntry | None = None
    layout: FileLayout | None = None
    size: int = 0  # of an archived file

    @property
    def archived(self) -> bool:
        """Whether its file is in the archive."""
        return self.entry is None


def waiting(state: TierState) -> int:
    """How many chunks wait for an upload."""
    return len(state.orders.to_share) + len(state.accounts.archive_to_share)


def prepare_upload(state: TierState, now: float) -> Upload | float:
    """A chunk whose upload starts now, or the seconds after which to ask again. ``now``: monotonic."""
    wait = _IDLE_SEC
    for count, entry in enumerate(state.orders.to_share.values()):
        if count == _LOOKED_AT:
            break
        rest = entry.stored_at + QUIET_SEC - now if entry.stored_at else 0.0
        if rest <= 0:
            _set(state, entry, UPLOADING)
            return Upload(entry.name, entry, entry.layout)
        wait = min(wait, rest)
    accounts = state.accounts
    if accounts.archive_to_share:
        name, _ = accounts.archive_to_share.popitem(last=False)
        return Upload(name, size=accounts.archived[name])
    return wait


def commit_upload(state: TierState, upload: Upload) -> None:
    """The bucket holds every layer of the file that was uploaded."""
    entry = upload.entry
    if entry is None:
        if _is_same_file(state, upload):
            state.accounts.archive_shared[upload.name] = None
    elif entry.share is UPLOADING:
        # A write would have made it LOCAL again; and while a file is being deleted, nothing writes it.
        known = entry.file is LEAVING or (entry.file is KNOWN and entry.layout == upload.layout)
        _set(state, entry, SHARED if known and not entry.dropped else LOCAL)


def abort_upload(state: TierState, upload: Upload, *, refused: bool = False) -> None:
    """It was not uploaded. ``refused``: and it never will be. Otherwise it is the last of the queue."""
    entry = upload.entry
    if entry is None:
        if not refused and _is_same_file(state, upload):
            state.accounts.archive_to_share[upload.name] = None
    elif entry.share is UPLOADING:
        _set(state, entry, REFUSED if refused and entry.file is KNOWN else LOCAL)


def archived(state: TierState, name: bytes, size: int, *, in_bucket: bool = False) -> None:
    """A chunk's file is in the archive now. ``in_bucket``: the bucket holds every layer of it."""
    accounts = state.accounts
    accounts.add_archived(name, size)
    if state.orders.shares_archive:
        (accounts.archive_shared if in_bucket else accounts.archive_to_share)[name] = None


def reused(state: TierState, names: Iterable[bytes]) -> None:
    """These chunks were served."""
    for name in names:
        entry = state.entries.get(name)
        if entry is not None and not entry.reused:
            entry.reused = True
            state.orders.reindex(entry)


def prefix_of(state: TierState, name: bytes) -> bytes:
    """The prefix digest of a chunk; empty when it is not here, or its header is not read."""
    entry = state.entries.get(name)
    return b"" if entry is None else entry.prefix


def _is_same_file(state: TierState, upload: Upload) -> bool:
    """Whether an archived file is still the one that was read: one that came after it is in the queue itself."""
    accounts, name = state.accounts, upload.name
    return (
        accounts.archived.get(name) == upload.size
        and name not in accounts.archive_to_share
        and name not in accounts.archive_shared
    )


def _set(state: TierState, entry: ChunkEntry, share: ShareState) -> None:
    entry.share = share
    if not entry.dropped:  # else it is in no order, and its place in those from before a clear is none of these
        state.orders.reindex(entry)
