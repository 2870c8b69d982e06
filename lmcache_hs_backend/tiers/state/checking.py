"""Every invariant of the state, in words.

``check`` looks at all of it, so it takes time proportional to the index. With ``HS_STRICT=1`` it runs whenever the
store's lock is given up; see ``flows.core``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from lmcache_hs_backend.tiers.state.entries import (
    ABSENT,
    CONFIRMED,
    KNOWN,
    LEAVING,
    LOCAL,
    SHARED,
    UNREAD,
    ChunkEntry,
    slot_bytes,
)
from lmcache_hs_backend.tiers.state.tier_state import TierState, VictimKind


def check(state: TierState) -> list[str]:
    """Each violated invariant as one sentence; empty when all hold. The store's lock must be held."""
    return [
        *_check_entries(state),
        *_check_orders(state),
        *_check_memory(state),
        *_check_accounts(state),
        *_check_jobs(state),
    ]


def _check_entries(state: TierState) -> Iterator[str]:
    for name, entry in state.entries.items():
        for problem in problems_of(state, entry):
            yield f"chunk {name.hex()}: {problem}"
        if entry.name != name:
            yield f"chunk {entry.name.hex()} is in the index under the name {name.hex()}"


def problems_of(state: TierState, entry: ChunkEntry) -> Iterator[str]:
    """What is wrong with a chunk of the index, whatever the others are like."""
    if entry.dropped:
        yield "it was dropped and is in the index"
    if entry.pins < 0:
        yield f"it has {entry.pins} pins"
    if (entry.layout is not None) != (entry.file is KNOWN):
        yield f"its file is {entry.file.value}, and its layout is {'set' if entry.layout else 'not set'}"
    if entry.digests and entry.file is not KNOWN:
        yield f"its file is {entry.file.value} and has digests"
    if entry.size < 0 or (entry.size and entry.file is ABSENT):
        yield f"its file is {entry.file.value} and has {entry.size} bytes"
    if entry.layout is not None and entry.size != entry.layout.size:
        yield f"its file has {entry.size} bytes, its layout {entry.layout.size}"
    if entry.file is LEAVING and not state.jobs.is_busy(entry.name):
        yield "its file is being deleted, and its name is not busy"
    if entry.share is not LOCAL and entry.file not in (KNOWN, LEAVING):
        yield f"its file is {entry.file.value}, and it is {entry.share.value}"
    if entry.file is ABSENT and not entry.hot:
        yield "it is in neither tier"
    if not entry.identified and (entry.hot or entry.kv is CONFIRMED or entry.file is KNOWN):
        yield "it is not identified, and has rows, a known file or confirmed KV"
    if entry.hot and entry.metadata is None:
        yield "it has rows in RAM without the metadata that a file needs"
    for layer_idx, slot in entry.hot.items():
        if slot.spec.layer_idx != layer_idx or slot.nbytes != slot_bytes(slot.spec, entry.num_tokens):
            yield f"the slot of layer {layer_idx} does not fit its rows"


def _check_orders(state: TierState) -> Iterator[str]:
    orders = state.orders
    entries = list(state.entries.values())
    to_write = {e.name for e in entries if e.hot and e.dirty and not e.drop_reason}
    evictable = {e.name for e in entries if e.hot and not e.pins and e.name not in to_write}
    deletable = {e.name for e in entries if e.file not in (ABSENT, LEAVING)}
    cold = {e.name: e for e in orders.cold}
    known = [e for e in entries if e.file is KNOWN and orders.share]
    wanted = [e for e in known if orders.is_wanted(e)]
    for what, order, expected in (
        ("clean", orders.clean, evictable),
        ("dirty", orders.dirty, to_write),
        ("aging", orders.aging, to_write),
        ("cold", cold, deletable),
        ("to_share", orders.to_share, {e.name for e in wanted if e.share is LOCAL}),
        ("shared", orders.shared, {e.name for e in known if e.share is SHARED}),
    ):
        for name in expected - order.keys():
            yield f"chunk {name.hex()} is missing in the order {what!r}"
        for name in order.keys() - expected:
            yield f"chunk {name.hex()} is in the order {what!r} and does not belong there"
        for name, entry in order.items():
            if state.entries.get(name) is not entry:
                yield f"chunk {name.hex()} of the order {what!r} is not the one in the index"
    for what, counted, actual in (
        ("bytes of clean chunks", orders.clean_bytes, sum(e.hot_bytes for e in orders.clean.values())),
        ("chunks with a file that may be deleted", len(orders.cold), len(cold)),
        ("chunks with rows in RAM", orders.hot_chunks, sum(bool(e.hot) for e in entries)),
        ("dirty chunks", orders.dirty_chunks, sum(e.dirty for e in entries)),
        ("files with an unread header", orders.unread_files, sum(e.file is UNREAD for e in entries)),
        ("confirmed chunks", state.confirmed_chunks, sum(e.kv is CONFIRMED for e in entries)),
    ):
        if counted != actual:
            yield f"{what}: counted {counted}, there are {actual}"


def _check_memory(state: TierState) -> Iterator[str]:
    free_list = state.free_list
    end = -1
    for offset, nbytes in free_list.runs():
        if offset <= end:
            yield f"the free run at {offset} overlaps the one before, or touches it"
        end = offset + nbytes
    if end > free_list.capacity:
        yield f"the last free run ends at {end}, beyond the hot tier's {free_list.capacity} bytes"
    free = sum(nbytes for _, nbytes in free_list.runs())
    if free != free_list.free_bytes:
        yield f"free bytes of the hot tier: counted {free_list.free_bytes}, there are {free}"
    spans = sorted((slot.offset, slot.nbytes) for entry in state.entries.values() for slot in entry.hot.values())
    spans = sorted([*spans, *free_list.runs()])
    for (offset, nbytes), (after, _) in itertools.pairwise(spans):
        if offset + nbytes > after:
            yield f"the bytes at {after} of the hot tier belong to two owners"
    held = sum(entry.hot_bytes for entry in state.entries.values())
    for what, nbytes in (("loaned", state.loaned_bytes), ("detached", state.detached_bytes)):
        if nbytes < 0:
            yield f"{what} bytes: {nbytes}"
    if held + state.loaned_bytes + state.detached_bytes != free_list.used_bytes:
        yield (
            f"used bytes of the hot tier: {free_list.used_bytes}, but chunks hold {held}, {state.loaned_bytes} are on "
            f"loan and {state.detached_bytes} of dropped chunks are pinned"
        )


def _check_accounts(state: TierState) -> Iterator[str]:
    accounts = state.accounts
    leaving = dict.fromkeys(VictimKind, 0)
    for victim in state.evictions:
        leaving[victim.kind] += victim.size
    sizes = sum(entry.size for entry in state.entries.values())
    for what, counted, actual in (
        ("own", accounts.own, sizes + sum(accounts.leftover.values())),
        ("archive", accounts.archive, sum(accounts.archived.values()) + leaving[VictimKind.ARCHIVE]),
        (
            "quarantine",
            accounts.quarantine,
            sum(file.size for file in accounts.quarantined) + leaving[VictimKind.QUARANTINE],
        ),
        ("dead", accounts.dead, sum(accounts.dead_bytes.values())),
    ):
        if counted != actual:
            yield f"bytes on disk of kind {what!r}: counted {counted}, there are {actual}"
    to_share, shared = accounts.archive_to_share.keys(), accounts.archive_shared.keys()
    for name in (to_share | shared) - accounts.archived.keys():
        yield f"archived file {name.hex()} is for the bucket, or in it, and is not in the archive"
    for name in to_share & shared:
        yield f"archived file {name.hex()} is in the bucket and to be uploaded"
    for what, nbytes in (("reserved", accounts.reserved), ("trash", accounts.trash)):
        if nbytes < 0:
            yield f"{nbytes} bytes on disk are {what}"
    for name in accounts.leftover:
        entry = state.entries.get(name)
        if entry is not None and entry.has_file:
            yield f"the file of chunk {name.hex()} is counted as its own and as a leftover"
        if not state.jobs.is_busy(name) and name not in state.undeletable:
            yield f"the leftover file {name.hex()} will never be deleted"


def _check_jobs(state: TierState) -> Iterator[str]:
    for name in state.jobs.running_names - state.jobs.busy_names:
        yield f"an operation on {name.hex()} is running, and the name is not busy"
    nbytes = sum(job.slot_bytes for job in state.writes)
    if state.writing_bytes != nbytes:
        yield f"bytes being written: counted {state.writing_bytes}, there are {nbytes}"
    if state.rate.active != len(state.writes):
        yield f"writes under way: counted {state.rate.active}, there are {len(state.writes)}"
    for job in state.writes:
        if job.entry.pins < 1 or not state.jobs.is_busy(job.name):
            yield f"chunk {job.name.hex()} is being written, and is not pinned and busy"
    for what, value in (("flushing", state.flushing), ("wanted_bytes", state.wanted_bytes)):
        if value < 0:
            yield f"{what} is {value}"
