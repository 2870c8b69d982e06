"""A bucket on localhost that LMCache's S3Connector can talk to, and that can be in every kind of trouble.

Enough of S3 for whole objects: PUT, GET (with ranges), HEAD, DELETE, a listing. No signature is checked, and a
condition of a put is ignored, as some stores do. ``python -m tests.support.s3_server [SECONDS]`` serves until its stdin
ends, and answers a GET after so many seconds: on localhost there is no network.
"""

from __future__ import annotations

import contextlib
import re
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


class S3Server:
    """Objects in memory. ``mode``: ``ok``, ``hang`` (accepts, never answers), or a status that everything gets."""

    def __init__(self, delay_sec: float = 0.0) -> None:
        self.delay_sec = delay_sec  # before each GET is answered
        self.objects: dict[str, bytes] = {}
        self.mode: str | int = "ok"
        self._go_on = threading.Event()
        self._server: ThreadingHTTPServer | None = None
        self.port = 0
        self.start()

    def start(self) -> None:
        """Listen, on the port of the first time."""
        self._go_on.clear()
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), self._handler())
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def stop(self) -> None:
        """Nothing listens on the port any more; what hangs is dropped."""
        server, self._server = self._server, None
        self._go_on.set()
        if server is not None:
            server.shutdown()
            server.server_close()

    def be(self, mode: str | int) -> None:
        """Change the mode; ``down``: nothing listens."""
        self.stop()
        if mode != "down":
            self.mode = mode
            self.start()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        bucket = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                return

            def _answer(self, status: int, body: bytes = b"", *, head: bool = False, **headers: str) -> None:
                with contextlib.suppress(OSError):
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(body)))
                    self.send_header("ETag", '"0"')
                    self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
                    self.end_headers()
                    if not head:
                        self.wfile.write(body)

            def _in_trouble(self) -> bool:
                if bucket.mode == "hang":
                    bucket._go_on.wait(120)
                if self.server is not bucket._server:  # a connection kept alive from before a stop
                    with contextlib.suppress(OSError):
                        self.connection.shutdown(socket.SHUT_RDWR)
                    self.close_connection = True
                    return True
                if bucket.mode != "ok":
                    self._answer(int(bucket.mode))
                    return True
                return False

            def do_PUT(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if not self._in_trouble():
                    bucket.objects[self.path] = body
                    self._answer(200)

            def do_HEAD(self) -> None:
                if not self._in_trouble():
                    held = bucket.objects.get(self.path)
                    self._answer(404 if held is None else 200, held or b"", head=True)

            def do_GET(self) -> None:
                time.sleep(bucket.delay_sec)
                if self._in_trouble():
                    return
                query = parse_qs(urlsplit(self.path).query)
                if "list-type" in query:
                    self._answer(200, self._listing(query.get("prefix", [""])[0]))
                    return
                held = bucket.objects.get(self.path)
                part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
                if held is not None and part is not None:
                    first, last = int(part[1]), min(int(part[2]), len(held) - 1)
                    span = {"Content-Range": f"bytes {first}-{last}/{len(held)}"}
                    self._answer(206, held[first : last + 1], **span)
                else:
                    self._answer(404 if held is None else 200, held or b"")

            def _listing(self, prefix: str) -> bytes:
                folder = urlsplit(self.path).path.rstrip("/") + "/"
                names = sorted(unquote(path).removeprefix(folder) for path in bucket.objects)
                entries = "".join(
                    f"<Contents><Key>{escape(name)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                    f"<Size>{len(bucket.objects[folder + name])}</Size></Contents>"
                    for name in names
                    if name.startswith(prefix)
                )
                return f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>".encode()

            def do_POST(self) -> None:  # DeleteObjects
                body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
                if not self._in_trouble():
                    folder = urlsplit(self.path).path.rstrip("/") + "/"
                    keys = re.findall("<Key>(.*?)</Key>", body)
                    for key in keys:
                        bucket.objects.pop(folder + key, None)
                    deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
                    self._answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())

            def do_DELETE(self) -> None:
                if not self._in_trouble():
                    bucket.objects.pop(self.path, None)
                    self._answer(204)

        return Handler


if __name__ == "__main__":
    print(S3Server(float(sys.argv[1]) if len(sys.argv) > 1 else 0.0).port, flush=True)
    sys.stdin.read()
