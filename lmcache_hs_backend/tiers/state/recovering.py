"""Files found at start become chunks: first by name, then by size and last use, then by header.

Everything recovered is UNCONFIRMED: it is not served before its KV is seen, and not deleted because its KV is absent.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from lmcache_hs_backend.chunk import ChunkMeta, chunk_name
from lmcache_hs_backend.format.header import BadChunk, FileLayout, Header
from lmcache_hs_backend.format.layout import FoundFile
from lmcache_hs_backend.tiers.state.entries import ABSENT, KNOWN, LOCAL, UNREAD, ChunkEntry
from lmcache_hs_backend.tiers.state.jobs import DeleteJob
from lmcache_hs_backend.tiers.state.tier_state import TierState


def found(state: TierState, names: Iterable[bytes]) -> None:
    """There are files of these names. If everything was cleared since the start, they are deleted.

    No file is written before all are found, so none of them can have come after that.
    """
    accounts = state.accounts
    for name in names:
        entry = state.entries.get(name)
        if name in accounts.leftover:
            continue  # it is about to be deleted
        if state.epoch:
            if entry is None or not entry.has_file:
                accounts.set_leftover(name, 0)
                state.jobs.submit(DeleteJob(name))
        elif entry is None:
            entry = ChunkEntry(name, file=UNREAD, generation=state.generation)
            state.entries[name] = entry
            state.orders.reindex(entry)
        elif not entry.has_file:  # stored since the start, and not written yet
            entry.file = UNREAD
            state.orders.reindex(entry)


def sized(state: TierState, files: Sequence[FoundFile]) -> None:
    """How large files are and when they were used, in the order of their last use. What left since stays away."""
    accounts = state.accounts
    for file in files:
        entry = state.entries.get(file.name)
        if entry is None:
            if file.name in accounts.leftover:
                accounts.set_leftover(file.name, file.size)
        elif entry.has_file:
            if entry.file is UNREAD:
                state.set_size(entry, file.size)
            state.orders.date(entry, file.mtime_ns)


def all_sized(state: TierState) -> None:
    """That was the last of them: our own chunks may be evicted from now on."""
    state.orders.all_dated()
    state.accounts.sized = True


def header_read(state: TierState, entry: ChunkEntry, header: Header) -> None:
    """The header of an UNREAD file is known. Raises BadChunk when it is another chunk's; nothing changes then."""
    if entry.file is not UNREAD or (entry.dropped and not entry.hot):
        return
    meta = header.meta
    _check_identity(entry, meta)
    for spec in header.layout.layers:
        slot = entry.hot.get(spec.layer_idx)
        if slot is not None and slot.spec.hidden_dim != spec.hidden_dim:
            raise BadChunk("replaced", f"layer {spec.layer_idx} was stored again with another hidden size")
    if not entry.identified:
        entry.prefix, entry.num_tokens = meta.prefix, meta.num_tokens
        entry.unacknowledged = _layer_idxs(header.layout)
    entry.file = KNOWN
    entry.layout, entry.digests = state.share(header.layout), header.digests
    if not entry.dropped:  # else it is being archived, and its bytes count as a leftover's
        state.set_size(entry, header.layout.size)
        state.orders.reindex(entry)


@functools.lru_cache(maxsize=256)
def _layer_idxs(layout: FileLayout) -> frozenset[int]:
    """One object for equal layouts: a set of its own for each chunk is a quarter of a kilobyte."""
    return frozenset([spec.layer_idx for spec in layout.layers])


def _check_identity(entry: ChunkEntry, meta: ChunkMeta) -> None:
    if chunk_name(meta.key) != entry.name:
        raise BadChunk("key", f"it holds the chunk {meta.key[:200]!r}")
    if entry.identified and (meta.prefix, meta.num_tokens) != (entry.prefix, entry.num_tokens):
        raise BadChunk("collision", "another prompt with the same chunk hash was stored before it was read")


def file_lost(state: TierState, entry: ChunkEntry, quarantined: FoundFile | None, *, still_there: bool) -> None:
    """The file of a chunk is not usable. Its name is busy with the caller's job.

    ``quarantined``: where the file is now; None when it was gone already, or could not be moved
    (``still_there``): then it is deleted later, and counts until then.
    """
    if quarantined is not None:
        state.accounts.add_quarantined(quarantined)
    if entry.dropped:
        entry.file, entry.layout, entry.digests = ABSENT, None, b""  # what is archived of it, RAM holds
        if not still_there:
            state.accounts.remove_leftover(entry.name)
        return
    layout = entry.layout
    if layout is None or any(spec.layer_idx not in entry.hot for spec in layout.layers):
        state.tally.loss("bad_file")
    if not still_there:
        state.file_gone(entry)
    elif entry.hot:
        entry.file, entry.layout, entry.digests, entry.share = UNREAD, None, b"", LOCAL  # its next write tries again
        state.orders.reindex(entry)
    else:
        state.drop(entry)
