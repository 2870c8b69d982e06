"""Ends of the jobs that take chunk files away, or only touch them.

The beginnings of the former are in ``TierState.drop``.
"""

from __future__ import annotations

from collections.abc import Iterable

from lmcache_hs_backend.tiers.state import sharing
from lmcache_hs_backend.tiers.state.entries import SHARED, ChunkEntry
from lmcache_hs_backend.tiers.state.jobs import ArchiveJob, DeleteJob, SaveUseJob
from lmcache_hs_backend.tiers.state.tier_state import TierState


def end_delete(state: TierState, job: DeleteJob, *, deleted: bool) -> None:
    """The file that a dropped chunk has left is gone, or could not be deleted and is tried again later."""
    _end_leftover(state, job.name, deleted)
    state.jobs.finish(job.name)


def end_archive(state: TierState, job: ArchiveJob, size: int, reserved: int, *, kept: bool, deleted: bool) -> None:
    """A dropped chunk is in the archive with ``size`` bytes (0: there was no file), or, if not ``kept``, lost.

    ``deleted``: whether there is no file in its former place any more; ``reserved``: what a write had promised.
    """
    state.accounts.reserved -= reserved
    if size:
        # What RAM had besides is new to the bucket, if it has the chunk at all.
        sharing.archived(state, job.name, size, in_bucket=job.entry.share is SHARED and not job.pinned)
    if not kept:
        state.tally.loss("archive")
    _end_leftover(state, job.name, deleted)
    if job.pinned:
        state.unpin([job.entry])
    state.jobs.finish(job.name)


def _end_leftover(state: TierState, name: bytes, deleted: bool) -> None:
    if deleted or name not in state.accounts.leftover:
        state.accounts.remove_leftover(name)
        state.undeletable.discard(name)
    else:
        state.undeletable.add(name)


def delete_unseen(state: TierState, name: bytes) -> None:
    """A chunk is to be deleted while it is not known yet what is on disk: its file is, should there be one."""
    if name not in state.accounts.leftover:
        state.accounts.set_leftover(name, 0)
        state.jobs.submit(DeleteJob(name))


def delete_again(state: TierState) -> None:
    """Try once more to delete the files whose deletion has failed."""
    for name in state.undeletable:
        state.jobs.submit(DeleteJob(name))
    state.undeletable.clear()


def submit_save_uses(state: TierState, entries: Iterable[ChunkEntry], before_ns: int, until: float) -> None:
    """Have the last use of chunks saved whose file tells one that is older, and that was saved before ``before_ns``.

    ``until``: when that is too late (monotonic).
    """
    for entry in entries:
        if entry.has_file and entry.used_ns > entry.saved_ns and entry.saved_ns < before_ns:
            state.jobs.submit(SaveUseJob(entry, until))


def end_save_use(state: TierState, job: SaveUseJob, saved_ns: int) -> None:
    """``saved_ns``: the use that the file's mtime tells now; 0 when it could not be set."""
    if saved_ns:
        entry = job.entry
        entry.saved_ns = entry.used_ns if entry.used_ns == saved_ns else saved_ns  # one int object for both
    state.jobs.finish(job.name)
