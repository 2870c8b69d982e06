"""Files that are read by system calls or by requests: paths as ever, and URLs of objects (``s3://…``, ``gs://…``).

To everything that reads a chunk's file, an object is a file that can only be read. Opening one is one request, which
brings its first bytes; a read of what has not come yet is one more. Requests that are known to come (``will_read``) run
side by side on threads of their own. obstore is imported when the first URL is opened.

An object never changes under an open handle: what was read together belongs together, or the checksums say otherwise.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from lmcache_hs_backend.format.chunk_file import FileLayer
from lmcache_hs_backend.format.object_cache import ObjectCache

if TYPE_CHECKING:
    from lmcache_hs_backend.format.objects import Objects, Reply

#: Handles of objects: no file descriptor is as large.
_FIRST_HANDLE = 1 << 40
#: The first bytes that come with the opening: the whole preamble of nearly every chunk.
_FIRST_BYTES = 8192
_THREADS = 32
#: What readers of rows keep of objects, unless they are asked for more or less.
DEFAULT_CACHE_GB = 10.0
_TIMEOUT_SEC = 30.0
_RETRIES = 3
#: Requests that were announced and are not picked up yet; the oldest are forgotten.
_MOST_ANNOUNCED = 128


def is_url(path: str) -> bool:
    """Whether a path is a URL of objects. ``file://`` is not: that is a directory."""
    return path.startswith(("s3://", "gs://", "az://"))


@dataclass(frozen=True)
class UrlOptions:
    """How objects are read.

    Attributes:
        options: obstore's, as the setting ``shared_options``; empty: what environment variables and the machine say.
        cache_directory: Where bytes are kept that are likely to be read again; empty: nowhere.
        cache_bytes: How many, at most.
    """

    options: Mapping[str, Any]
    cache_directory: str = ""
    cache_bytes: int = 0


def url_options(
    options: Mapping[str, Any] | None = None, cache_directory: str | None = None, cache_bytes: int = 0
) -> UrlOptions:
    """``UrlOptions`` with a default directory: ``lmcache-hs-objects`` in the user's cache directory."""
    if cache_directory is None and cache_bytes > 0:
        base = os.environ.get("XDG_CACHE_HOME", "")
        base = base if os.path.isabs(base) else os.path.join(os.path.expanduser("~"), ".cache")
        cache_directory = os.path.join(base, "lmcache-hs-objects")
    return UrlOptions(options or {}, cache_directory or "", cache_bytes)


class _Begun(NamedTuple):
    """The first bytes of an object, asked for."""

    nbytes: int
    reply: Future[Reply]


class _OpenObject:
    """An object that is open: its first bytes, its size, and when it was written."""

    __slots__ = ("address", "first", "modified", "size")

    def __init__(self, address: str, first: memoryview, size: int, modified: float) -> None:
        self.address = address
        self.first = first
        self.size = size
        self.modified = modified


class UrlFiles(FileLayer):
    """The file layer of readers. Thread-safe, picklable. In a forked child whose parent has used it, OSError."""

    def __init__(self, how: UrlOptions | None = None, roots: Sequence[str] = ()) -> None:
        """No request is made, and no thread started, before a URL is opened.

        Args:
            how: How objects are read.
            roots: URLs below which there are objects; ``mount`` adds more.
        """
        self._how = how or UrlOptions({})
        self._cache: ObjectCache | None = None
        if self._how.cache_directory and self._how.cache_bytes > 0:
            self._cache = ObjectCache(self._how.cache_directory, self._how.cache_bytes)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._roots: dict[str, Objects | None] = {}
        self._open: dict[int, _OpenObject] = {}
        self._begun: dict[str, _Begun] = {}
        self._handles = itertools.count(_FIRST_HANDLE)
        self._pool: ThreadPoolExecutor | None = None
        for root in roots:
            self.mount(root)

    def __reduce__(self) -> tuple[type[UrlFiles], tuple[UrlOptions, tuple[str, ...]]]:
        return UrlFiles, (self._how, tuple(self._roots))

    def mount(self, root: str) -> None:
        """From now on, open what is below a URL as well."""
        with self._lock:
            self._roots.setdefault(root, None)

    # -- what FileLayer has ----------------------------------------------------------------------------------

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """A file descriptor, or a handle of an object. Raises OSError."""
        if not is_url(path):
            return os.open(path, flags, mode, dir_fd=dir_fd)
        self._refuse_fork(path)
        with self._lock:
            begun = self._begun.pop(path, None)
        reply = None
        if begun is not None:
            with contextlib.suppress(CancelledError):  # it had not started when ``release`` was called
                reply = begun.reply.result()
        if reply is None:
            reply = self._get(path, 0, _FIRST_BYTES)
        handle = next(self._handles)
        self._open[handle] = _OpenObject(path, _body(reply, path), reply.size, reply.modified)
        return handle

    def close(self, fd: int) -> None:
        """Close either."""
        if fd < _FIRST_HANDLE:
            os.close(fd)
        else:
            del self._open[fd]

    def fstat(self, fd: int) -> os.stat_result:
        """Of an object: that it is a regular file, its size, and when it was written."""
        if fd < _FIRST_HANDLE:
            return os.fstat(fd)
        this = self._open[fd]
        times = {"st_atime_ns": 0, "st_mtime_ns": int(this.modified * 1e9), "st_ctime_ns": 0}
        at = (int(this.modified),) * 3
        return os.stat_result((stat.S_IFREG | 0o444, 0, 0, 1, 0, 0, this.size, *at), times)

    def preadv(self, fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        """Fill buffers from a position on; the bytes that were read, 0 at the end. Raises OSError."""
        if fd < _FIRST_HANDLE:
            return os.preadv(fd, buffers, offset, flags)
        this = self._open[fd]
        end = min(offset + sum(map(len, buffers)), this.size)
        if end <= offset:
            return 0
        if end <= len(this.first):
            data = this.first[offset:end]
        else:
            data = _body(self._get(this.address, offset, end), this.address)
        return _scatter(data, buffers)

    def will_read(self, path: str, nbytes: int = 0, size: int | None = None, *, again: bool = False) -> None:
        """Begin to read the first bytes of an object, for the next ``open`` of it."""
        if not is_url(path):
            return
        nbytes = nbytes or _FIRST_BYTES
        self._refuse_fork(path)
        with self._lock:
            before = self._begun.get(path)
            if before is not None and before.nbytes >= nbytes:
                return
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="hs-objects")
            self._begun[path] = _Begun(nbytes, self._pool.submit(self._first, path, nbytes, size, again))
            while len(self._begun) > _MOST_ANNOUNCED:
                del self._begun[next(iter(self._begun))]

    def release(self) -> None:
        """See FileLayer. Does not wait: threads end with the requests that they are in, clients with the last of them.

        In a forked child, where the threads are not, this does nothing.
        """
        if self._pid != os.getpid():
            return
        with self._lock:
            pool, self._pool = self._pool, None
            self._begun.clear()
            self._roots = dict.fromkeys(self._roots)
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    # -- requests --------------------------------------------------------------------------------------------

    def objects(self, url: str) -> tuple[Objects, str]:
        """The client for a URL, and the URL's path in it. Raises ObjectsError; ValueError below no mounted root."""
        from lmcache_hs_backend.format.objects import Objects

        root = max((root for root in self._roots if f"{url}/".startswith(f"{root}/")), key=len, default=None)
        if root is None:
            raise ValueError(f"{url} is below none of {', '.join(self._roots) or 'no URL'}")
        with self._lock:
            store = self._roots[root]
            if store is None:
                store = Objects(root, self._how.options, timeout_sec=_TIMEOUT_SEC, retries=_RETRIES)
                self._roots[root] = store
        return store, url[len(root) + 1 :]

    def _first(self, path: str, nbytes: int, size: int | None, again: bool) -> Reply:
        from lmcache_hs_backend.format.objects import Answer, Reply

        cache = self._cache if again and size is not None else None
        if cache is not None and size is not None:
            body = cache.get(path, size, min(nbytes, size))
            if body is not None:
                return Reply(Answer.OK, body, size=size)
        reply = self._get(path, 0, nbytes)
        if cache is not None and reply.answer is Answer.OK and reply.size == size:
            cache.put(path, size, reply.body)
        return reply

    def _get(self, path: str, begin: int, end: int) -> Reply:
        store, name = self.objects(path)
        return store.get_range(name, begin, end)

    def _refuse_fork(self, path: str) -> None:
        """Requests that the parent has begun never end in a forked child, nor does obstore's runtime work there."""
        if self._pid != os.getpid():
            raise OSError(errno.EIO, "objects cannot be read after a fork: use spawn or forkserver", path)


def _body(reply: Reply, path: str) -> memoryview:
    """The bytes of an answer. Raises OSError when there are none, FileNotFoundError when there is no object."""
    from lmcache_hs_backend.format.objects import Answer

    if reply.answer is Answer.OK:
        return reply.body
    if reply.answer is Answer.ABSENT:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    code = errno.EACCES if reply.answer is Answer.DENIED else errno.EIO
    raise OSError(code, reply.why or reply.answer.value, path)


def _scatter(data: memoryview, buffers: Sequence[Any]) -> int:
    done = 0
    for buffer in buffers:
        part = data[done : done + len(buffer)]
        memoryview(buffer)[: len(part)] = part
        done += len(part)
    return done
