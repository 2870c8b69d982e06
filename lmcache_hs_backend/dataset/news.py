"""Whether rows have come to cold paths and shared tiers since they were last looked through.

A cold path says so by the request records that the connector appends to it: reading the ends of their files costs
nothing. A shared tier is listed, at most every so often, because a listing is a request for every thousand objects, and
because its chunks may come minutes before their records, or without any.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import time
from collections.abc import Iterator, Sequence

import xxhash

from lmcache_hs_backend.dataset.errors import NothingThere
from lmcache_hs_backend.format.chunk_sources import NotAColdPath, source_of
from lmcache_hs_backend.format.layout import SEQUENCES
from lmcache_hs_backend.format.reader import STATES
from lmcache_hs_backend.format.request_log import SUFFIX, RequestRecord
from lmcache_hs_backend.format.url_files import UrlFiles, UrlOptions

logger = logging.getLogger(__name__)

#: Where namespaces are below a cold path: those of further processes lie in those of the first.
_NAMESPACES = (("*",), ("*", "p[1-9]*"))
_LOGS = os.path.join(SEQUENCES, f"*{SUFFIX}")

#: Seconds between two listings of a shared tier, at least.
FOLLOW_SEC = 15.0
#: Listings take at most this share of the time.
_MOST_OF_THE_TIME = 0.05


class News:
    """What came to some cold paths and URLs since they were last looked through. Picklable; for one thread."""

    def __init__(
        self, cold_paths: Sequence[str], urls: UrlOptions | None = None, follow_sec: float = FOLLOW_SEC
    ) -> None:
        """Nothing is read yet.

        Args:
            cold_paths: Paths, and URLs of shared tiers.
            urls: How URLs are read.
            follow_sec: Seconds between two listings of the shared tiers, at least; 0: they are not followed.
        """
        self._requests = _NewRequests([path for path in cold_paths if "://" not in path])
        shared = [path for path in cold_paths if "://" in path] if follow_sec > 0 else []
        self._tiers = _SharedTiers(shared, urls, follow_sec)
        self._retry_at = 0.0

    def of(self, prefix: bytes) -> bool:
        """Whether tokens with this prefix digest may have come.

        True if a request of just them has ended since, or if there is another object in a shared tier. After a look
        that has failed, nothing is news for a while.
        """
        if time.monotonic() < self._retry_at:
            return False
        self._requests.read()
        return prefix in self._requests.prefixes or self._tiers.is_news()

    @contextlib.contextmanager
    def look(self) -> Iterator[None]:
        """Around a look through the cold paths. What comes meanwhile is news to the next one; with an error, all is.

        NothingThere is no error of a cold path; of a shared tier it may mean that it did not answer.
        """
        begin = time.monotonic()
        self._requests.read()
        waiting, self._requests.prefixes = self._requests.prefixes, set()
        self._tiers.list_now()
        self._tiers.changed = False
        try:
            yield
        except NothingThere:
            self._tiers.changed = True
            raise
        except BaseException:
            self._requests.prefixes |= waiting
            self._tiers.changed = True
            self._retry_at = _next_time(FOLLOW_SEC, begin)
            raise
        finally:
            self._tiers.rest_since(begin)


def _next_time(seconds: float, begin: float) -> float:
    """When to do again what has begun then and just ended."""
    now = time.monotonic()
    return now + max(seconds, (now - begin) / _MOST_OF_THE_TIME)


class _NewRequests:
    """The prefix digests of requests that ended since ``prefixes`` was last emptied, from the ends of their logs."""

    def __init__(self, cold_paths: Sequence[str]) -> None:
        self.prefixes: set[bytes] = set()
        self._cold_paths = [os.path.expanduser(path) for path in cold_paths]
        self._read_to: dict[str, int] = {}

    def read(self) -> None:
        """Read on where the last call ended. A line that is being written is left for the next call."""
        for cold_path in map(glob.escape, self._cold_paths):
            for path in (path for below in _NAMESPACES for path in glob.glob(os.path.join(cold_path, *below, _LOGS))):
                begin = self._read_to.get(path, 0)
                with contextlib.suppress(OSError), open(path, "rb") as file:
                    if os.fstat(file.fileno()).st_size <= begin:
                        continue
                    file.seek(begin)
                    for line in file:
                        if not line.endswith(b"\n"):
                            break
                        begin += len(line)
                        with contextlib.suppress(ValueError):
                            self.prefixes.add(RequestRecord.parse(line).prefix)
                self._read_to[path] = begin


class _SharedTiers:
    """What the listings of shared tiers say: whether they are still what they were."""

    def __init__(self, urls: Sequence[str], options: UrlOptions | None, follow_sec: float) -> None:
        self.changed = False
        self._urls = list(urls)
        self._options = options
        self._follow_sec = follow_sec
        self._contents: tuple[int, int] | None = None  # not known yet
        self._not_before = 0.0  # by the clock of the machine, which all its processes have

    def is_news(self) -> bool:
        """List them, if it is time to, and say whether they have changed; between two listings there is no news."""
        if not self._urls or time.monotonic() < self._not_before:
            return False
        begin = time.monotonic()
        self.list_now()
        self.rest_since(begin)
        return self.changed

    def list_now(self) -> None:
        """List them. Where one cannot be listed there is no news, which the log says."""
        if not self._urls:
            return
        try:
            contents = self._list()
        except (OSError, NotAColdPath) as error:
            why = getattr(error, "strerror", None) or error
            logger.warning("new rows cannot be looked for in %s: %s", ", ".join(self._urls), why)
            return
        self.changed |= contents != self._contents
        self._contents = contents

    def rest_since(self, begin: float) -> None:
        """No listing for a while, the longer the longer that took which has begun then."""
        self._not_before = _next_time(self._follow_sec, begin)

    def _list(self) -> tuple[int, int]:
        """How many chunks there are, and a sum over which they are, whatever their order. Raises OSError."""
        files = UrlFiles(self._options)
        count = total = 0
        try:
            for url in self._urls:
                for path, size, mtime_ns in _chunks(url, files):
                    count += 1
                    total += xxhash.xxh3_64_intdigest(f"{path}\n{size}\n{mtime_ns}".encode("utf-8", "surrogateescape"))
        finally:
            files.release()
        return count, total


def _chunks(url: str, files: UrlFiles) -> Iterator[tuple[str, int, int]]:
    """Path, size and time of every chunk of a shared tier. Raises OSError."""
    source = source_of(url, files)
    try:
        namespaces, _ = source.namespaces()
    except FileNotFoundError:  # the directory of a tier that nothing was written to yet
        return
    for namespace in namespaces:
        for state in STATES:
            for folder in source.folders(namespace, state):
                for path, _, size, mtime_ns in source.chunks(folder):
                    if size < 0:
                        with contextlib.suppress(FileNotFoundError):
                            info = os.lstat(path)
                            size, mtime_ns = info.st_size, info.st_mtime_ns
                    yield path, size, mtime_ns
