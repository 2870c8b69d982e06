"""Moving what is wrong to the quarantine, beside a running engine: by renaming, never by deleting.

A file is moved only when it has been judged bad once more, through a descriptor that stays open until it
has been moved; and when the thing that was moved turns out not to be the thing that was judged, because an
engine published a new file in between, it goes back. Where an engine holds the namespace, nothing else is
touched: its unfinished files are its own. Where none does, its lock is held meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections import defaultdict
from collections.abc import Iterator

from lmcache_hs_backend.cli.inspect.care.verifier import Finding, check_open
from lmcache_hs_backend.format.chunk_file import FileLayer, open_regular
from lmcache_hs_backend.format.header import BadChunk
from lmcache_hs_backend.format.layout import QUARANTINE, ChunkPath, quarantine_name
from lmcache_hs_backend.format.namespace import NamespaceDirectory
from lmcache_hs_backend.format.reader import Place
from lmcache_hs_backend.format.url_files import is_url

#: A chunk file that has one of these is bad for every reader, and safe to move under an engine.
BAD_FILE = ("header", "version", "size", "short", "type", "checksum", "key", "model")
#: These are moved only where no engine is.
NEEDS_LOCK = ("misplaced", "temporary", "prefix")

_FILES = FileLayer()

_LEFT = {
    "foreign": "left alone: not ours to move (the quarantine is emptied for room)",
    "orphan": "left alone: it is good, and is served again when its parent has been stored",
    "unreadable": "left alone: it may be good",
    "record": "left alone: its other lines are good, and readers pass over the bad ones",
    "namespace": "left alone: not understood",
}


def repair(findings: list[Finding]) -> Iterator[tuple[Finding, bool, str]]:
    """``(finding, whether it has been dealt with, what was done)`` for each, namespace by namespace."""
    by_namespace: dict[str, list[Finding]] = defaultdict(list)
    for finding in findings:
        if is_url(finding.path):
            yield finding, False, "left alone: there is no quarantine below a URL (rm deletes objects)"
        elif finding.namespace is None or finding.kind in _LEFT:
            yield finding, False, _LEFT[finding.kind]
        else:
            by_namespace[finding.namespace.directory].append(finding)
    if not by_namespace:
        return

    from lmcache_hs_backend.tiers.disk.owned_namespace import NamespaceLock  # imports aiofiles

    for directory, group in by_namespace.items():
        try:
            lock = NamespaceLock.take(directory)
        except OSError as error:
            for finding in group:
                yield finding, False, f"left alone: the namespace cannot be locked: {error.strerror}"
            continue
        try:
            for finding in group:
                yield finding, *_deal_with(finding, busy=lock is None)
        finally:
            if lock is not None:
                lock.close()


def _deal_with(finding: Finding, *, busy: bool) -> tuple[bool, str]:
    if finding.kind in NEEDS_LOCK and busy:
        return False, "left alone: a running engine holds the namespace"
    assert finding.namespace is not None
    try:
        if finding.kind in BAD_FILE:
            return _quarantine_if_bad(finding, finding.namespace)
        info = os.lstat(finding.path)
        return True, _quarantine(finding.path, info, finding.namespace, finding.kind)
    except FileNotFoundError:
        return True, "gone meanwhile"
    except OSError as error:
        return False, f"cannot be moved: {error.strerror}"


def _quarantine_if_bad(finding: Finding, namespace: NamespaceDirectory) -> tuple[bool, str]:
    name = bytes.fromhex(os.path.basename(finding.path)[:32])
    place = Place(namespace, "", ChunkPath(finding.path, name))
    try:
        fd, info = open_regular(_FILES, finding.path)
    except BadChunk:
        info = os.lstat(finding.path)
        if stat.S_ISREG(info.st_mode):
            return True, "good by now"
        return True, _quarantine(finding.path, info, namespace, "type")
    try:
        try:
            check_open(_FILES, fd, info.st_size, place)
        except BadChunk as wrong:
            return True, _quarantine(finding.path, info, namespace, wrong.reason)
        return True, "good by now"
    finally:
        os.close(fd)


def _quarantine(path: str, judged: os.stat_result, namespace: NamespaceDirectory, reason: str) -> str:
    """Move a file to the quarantine of its namespace, under the name that the store would give it."""
    folder = os.path.join(namespace.directory, QUARANTINE)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, stat.S_IMODE(os.stat(namespace.directory).st_mode))
    target = os.path.join(folder, quarantine_name(os.path.basename(path), reason))
    os.rename(path, target)
    moved = os.lstat(target)
    if (moved.st_dev, moved.st_ino) == (judged.st_dev, judged.st_ino):
        return f"moved to {target}"
    # The engine has published another file under that name between the look and the move. It goes back,
    # unless there is yet another one by now.
    try:
        os.link(target, path, follow_symlinks=False)
    except FileExistsError:
        return f"replaced meanwhile, more than once; one version is now {target}"
    os.unlink(target)
    return "replaced meanwhile"
