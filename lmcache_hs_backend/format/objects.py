"""Objects under a URL (S3, GCS, Azure, a directory) behind one class: put, get, list, delete, and what was answered.

The only place that imports obstore, and only when a URL is used. Every request ends in one of a few answers and raises
nothing; whether a bucket is worth asking at all is decided elsewhere (``tiers.shared.breakers``). A request cannot be
cancelled: it keeps its thread until its timeout, so callers bring threads of their own.

obstore's runtime does not survive a fork: a request in the child would never return. There, every answer is OFFLINE at
once.
"""

from __future__ import annotations

import datetime
import errno
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from lmcache_hs_backend.config import checked_url

_LIST_PAGE = 1000

_runtime_used = False  # by this process or, before the fork, by its parent
_forked = False


def _after_fork() -> None:
    global _forked
    _forked = _runtime_used


os.register_at_fork(after_in_child=_after_fork)


def usable() -> bool:
    """Whether this process may use obstore at all; see the module's text."""
    return not _forked


class ObjectsError(ValueError):
    """A URL or one of its options cannot be used; the text says what is allowed."""


class Answer(Enum):
    """What became of a request. ABSENT and EXISTS are answers of a bucket that works."""

    OK = "ok"
    ABSENT = "absent"
    EXISTS = "exists"  # or changed since: the condition of a put does not hold
    TOO_LARGE = "too large"
    DENIED = "denied"
    FAILED = "failed"
    OFFLINE = "offline"


class Reply(NamedTuple):
    """An answer, and what came with it.

    Attributes:
        answer: What became of the request.
        body: The bytes that were asked for.
        e_tag: Of this version of the object.
        why: The reason of a failure, in one line.
        size: Bytes of the whole object.
        modified: When it was written, in seconds since 1970.
    """

    answer: Answer
    body: memoryview = memoryview(b"")
    e_tag: str | None = None
    why: str = ""
    size: int = 0
    modified: float = 0.0


class Found(NamedTuple):
    """An object of a listing. ``modified``: seconds since 1970."""

    path: str
    size: int
    modified: float


class Objects:
    """The objects below one URL. Thread-safe. Paths are relative to the URL."""

    def __init__(
        self, url: str, options: Mapping[str, Any] | None = None, *, timeout_sec: float = 30.0, retries: int = 1
    ) -> None:
        """Prepare access; no request is made.

        Args:
            url: See ``config.checked_url``.
            options: obstore's own, such as ``endpoint``, ``region``, ``access_key_id``. Keys also come from the usual
                environment variables (``AWS_*``, ``GOOGLE_*``, ``AZURE_*``).
            timeout_sec: Seconds after which a request has failed.
            retries: How often a request that failed for the moment (a 503, say) is sent again within that time.

        Raises:
            ObjectsError: The URL or an option is wrong, or obstore is not installed.
        """
        try:
            self.url = checked_url(url)
        except ValueError as error:
            raise ObjectsError(str(error)) from None
        try:
            import obstore
            from obstore import exceptions, store
        except ImportError:
            raise ObjectsError("installed first: pip install 'lmcache-hs-backend[shared]'") from None
        global _runtime_used
        if not _forked:
            _runtime_used = True
        self._obstore, self._exceptions = obstore, exceptions
        try:
            if self.url.startswith("file://"):
                if options:
                    raise ObjectsError(f"without options for a file:// URL, but has {', '.join(sorted(options))}")
                self._store = store.from_url(self.url, mkdir=True)
            else:
                self._store = store.from_url(self.url, **_cloud_settings(self.url, options or {}, timeout_sec, retries))
        except ObjectsError:
            raise
        except Exception as error:  # noqa: BLE001 - of a dozen kinds
            raise ObjectsError(f"a URL and options that obstore takes: {_one_line(error)}") from None
        self.replaces_conditionally = not self.url.startswith("file://")

    # -- requests ----------------------------------------------------------------------------------------

    def create(self, path: str, body: bytes | memoryview) -> Reply:
        """Put an object unless there is one: EXISTS."""
        return self._do(lambda: self._put(path, body, "create"))

    def replace(self, path: str, body: bytes | memoryview, e_tag: str | None) -> Reply:
        """Put an object in place of the one with this tag; EXISTS when it is another one by now.

        A directory knows no condition: there the last of two writers wins, each with a whole object.
        """
        conditional = self.replaces_conditionally and e_tag is not None
        return self._do(lambda: self._put(path, body, {"e_tag": e_tag} if conditional else "overwrite"))

    def _put(self, path: str, body: bytes | memoryview, mode: Any) -> Reply:
        self._obstore.put(self._store, path, body, mode=mode, use_multipart=False)
        return Reply(Answer.OK)

    def get(self, path: str, most_bytes: int) -> Reply:
        """A whole object; TOO_LARGE, without its bytes, when it has more than ``most_bytes``."""

        def request() -> Reply:
            result = self._obstore.get(self._store, path)
            if result.meta["size"] > most_bytes:
                return Reply(Answer.TOO_LARGE, why=f"{result.meta['size']} bytes")
            return Reply(Answer.OK, memoryview(result.bytes()), result.meta.get("e_tag"))

        return self._do(request)

    def get_range(self, path: str, begin: int, end: int) -> Reply:
        """Bytes of an object, fewer where it ends before; tag, size and time of the object come along."""

        def request() -> Reply:
            result = self._obstore.get(self._store, path, options={"range": (begin, end)})
            meta = result.meta
            body, modified = memoryview(result.bytes()), meta["last_modified"].timestamp()
            return Reply(Answer.OK, body, meta.get("e_tag"), size=meta["size"], modified=modified)

        reply = self._do(request)
        if begin == 0 and reply.answer is Answer.FAILED and re.search(r"\b416\b", reply.why):
            return Reply(Answer.OK)  # there is nothing to read in an empty object
        return reply

    def delete(self, paths: Sequence[str]) -> Reply:
        """Delete objects; those that are not there do not matter."""

        def request() -> Reply:
            self._obstore.delete(self._store, list(paths))
            return Reply(Answer.OK)

        return self._do(request)

    def subfolders(self, folder: str = "") -> list[str]:
        """What lies directly in a folder and has objects below it, as paths. Raises OSError."""
        if _forked:
            raise OSError(errno.EIO, FORKED, self.url)
        try:
            return sorted(self._obstore.list_with_delimiter(self._store, folder or None)["common_prefixes"])
        except FileNotFoundError:
            return []
        except Exception as error:  # noqa: BLE001 - whatever obstore's stores raise
            raise OSError(errno.EIO, f"cannot be listed: {_one_line(error)}", self.url) from None

    def list(self, folder: str = "") -> Iterator[Found]:
        """All objects below a folder, in the order of their paths. Raises OSError when the listing fails."""
        if _forked:
            raise OSError(errno.EIO, FORKED, self.url)
        try:
            for page in self._obstore.list(self._store, folder or None, chunk_size=_LIST_PAGE):
                for item in page:
                    yield Found(item["path"], item["size"], item["last_modified"].timestamp())
        except FileNotFoundError:
            return
        except Exception as error:  # noqa: BLE001 - whatever obstore's stores raise
            raise OSError(errno.EIO, f"cannot be listed: {_one_line(error)}", self.url) from None

    def _do(self, request: Any) -> Reply:
        if _forked:
            return Reply(Answer.OFFLINE, why=FORKED)
        known = self._exceptions
        try:
            reply: Reply = request()
            return reply
        except (known.NotFoundError, FileNotFoundError):
            return Reply(Answer.ABSENT)
        except (known.AlreadyExistsError, known.PreconditionError):
            return Reply(Answer.EXISTS)
        except (known.PermissionDeniedError, known.UnauthenticatedError, PermissionError) as error:
            return Reply(Answer.DENIED, why=_one_line(error))
        except Exception as error:  # noqa: BLE001 - of a dozen kinds, and each means that there was no answer
            text = _one_line(error)
            denied = re.search(r"\b(403|401)\b|InvalidAccessKeyId|SignatureDoesNotMatch|AccessDenied", text)
            return Reply(Answer.DENIED if denied else Answer.FAILED, why=text)


FORKED = "this process was forked from one that had used the bucket; use spawn or forkserver"


_ENDPOINT_OPTIONS = ("endpoint", "endpoint_url", "aws_endpoint", "aws_endpoint_url")
_ENDPOINTS = ("AWS_ENDPOINT", "AWS_ENDPOINT_URL")  # what obstore looks at


def _cloud_settings(url: str, options: Mapping[str, Any], timeout_sec: float, retries: int) -> dict[str, Any]:
    named = {str(key): value for key, value in options.items()}
    endpoint = str(next(filter(None, [*map(named.get, _ENDPOINT_OPTIONS), *map(os.environ.get, _ENDPOINTS)]), ""))
    plain = endpoint.startswith("http://")
    settings: dict[str, Any] = {}
    if url.startswith("s3://"):
        settings["unsigned_payload"] = not plain  # over TLS a signature of the bytes adds only CPU time
        if endpoint:
            settings["virtual_hosted_style_request"] = False
            if not any(key in os.environ for key in ("AWS_REGION", "AWS_DEFAULT_REGION")):
                settings["region"] = "us-east-1"
    settings |= named
    return settings | {
        "client_options": {
            "timeout": f"{timeout_sec}s",
            "connect_timeout": f"{min(timeout_sec, 1.0)}s",
            "allow_http": plain,
        },
        "retry_config": {
            "max_retries": retries,
            "retry_timeout": datetime.timedelta(seconds=timeout_sec),
            "backoff": {
                "init_backoff": datetime.timedelta(milliseconds=50),
                "max_backoff": datetime.timedelta(milliseconds=500),
                "base": 2,
            },
        },
    }


def _one_line(error: BaseException) -> str:
    """What went wrong, without the addresses that obstore repeats: they push the reason out of a log line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return re.sub(r" for path \S+:| https?://[^\s,)]+|Debug source:.*", "", text)[:300]
