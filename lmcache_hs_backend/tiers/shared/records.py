"""Request records on their way to the bucket: pieces of their files, as objects that are named after what is in them.

Whoever makes a training set of a bucket wants the records beside the rows: they say what was one request, and which of
its tokens are trained on. The files only grow, and ``uploaded.json`` beside them says how much of each the bucket has.
It is written after the put, so after a kill, or without it, records may go up twice: readers count a record once. A
record may come to the bucket before its rows do, or outlive them, and readers count that, too.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time

import xxhash

from lmcache_hs_backend.format.chunk_file import FileLayer, open_regular
from lmcache_hs_backend.format.header import BadChunk
from lmcache_hs_backend.format.layout import SEQUENCES, temporary_name
from lmcache_hs_backend.format.objects import Answer
from lmcache_hs_backend.format.request_log import SUFFIX, record_files
from lmcache_hs_backend.tiers.shared.bucket import Bucket

logger = logging.getLogger(__name__)

#: Bytes of an object, at most; a record has some hundreds.
PIECE_BYTES = 4 << 20
#: A file that has not grown for so long is worth an object, as soon as no chunk waits to be uploaded.
QUIET_SEC = 15.0
#: What has waited for so long is uploaded in any case.
LATEST_SEC = 300.0

_STATE = "uploaded.json"


class RecordUploads:
    """The records of one namespace directory. For one thread."""

    def __init__(self, bucket: Bucket, directory: str) -> None:
        """Reads how far an earlier process has come."""
        self._bucket = bucket
        self._directory = directory
        self._state = os.path.join(directory, SEQUENCES, _STATE)
        self._files = FileLayer()
        self._waiting_since: dict[str, float] = {}  # file name → when there was more to upload (monotonic)
        self._sent: dict[str, int] = {}  # file name → its bytes that the bucket has
        try:
            with open(self._state, encoding="utf-8") as file:
                known = json.load(file)
            if known["url"] == bucket.objects.url:
                self._sent = {str(name): int(sent) for name, sent in known["files"].items()}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("%s cannot be used (%s); request records are uploaded again", self._state, error)

    def send(self, *, idle: bool) -> int:
        """Upload what is due, until the bucket does not take it. The bytes that it took.

        ``idle``: no chunk waits to be uploaded. Raises OSError when a file cannot be read.
        """
        total = 0
        for path in record_files(self._directory):
            while body := self._due(path, idle):
                if self._bucket.put_records(_object_name(body), body) not in (Answer.OK, Answer.EXISTS):
                    return total
                total += len(body)
                name = os.path.basename(path)
                self._sent[name] = self._sent.get(name, 0) + len(body)
                self._waiting_since.pop(name, None)
                self._save()
        return total

    def _due(self, path: str, idle: bool) -> bytes:
        """Whole lines of a file that are to be uploaded now; empty: none."""
        name = os.path.basename(path)
        try:
            fd, info = open_regular(self._files, path)
        except (BadChunk, FileNotFoundError):
            return b""
        try:
            sent = self._sent.get(name, 0)
            if info.st_size < sent:  # another file by now
                sent = self._sent[name] = 0
            more = info.st_size - sent
            if not more:
                return b""
            since = self._waiting_since.setdefault(name, time.monotonic())
            quiet = idle and time.time() - info.st_mtime >= QUIET_SEC
            if not quiet and more < PIECE_BYTES and time.monotonic() - since < LATEST_SEC:
                return b""
            body = os.pread(fd, PIECE_BYTES, sent)
        finally:
            os.close(fd)
        return body[: body.rfind(b"\n") + 1]

    def _save(self) -> None:
        temporary = os.path.join(os.path.dirname(self._state), temporary_name(_STATE))
        with open(temporary, "x", encoding="utf-8") as file:
            json.dump({"url": self._bucket.objects.url, "files": self._sent}, file)
        os.replace(temporary, self._state)


def _object_name(body: bytes) -> str:
    """When its first record was made, so that they are read in that order, and what is in it."""
    try:
        made = str(json.loads(body[: body.index(b"\n")])["created_at"])
    except (ValueError, KeyError, TypeError, RecursionError):
        made = ""
    made = re.sub(r"[^0-9TZ]", "", made)[:20] or "undated"
    return f"{made}-{xxhash.xxh3_128_hexdigest(body)}{SUFFIX}"
