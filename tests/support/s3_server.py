"""A bucket on localhost that LMCache's S3Connector can talk to, and that can be in every kind of trouble.

Enough of S3 for whole objects: PUT, HEAD, GET. No signature is checked.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class S3Server:
    """Objects in memory. ``mode``: ``ok``, ``hang`` (accepts, never answers), or a status that everything gets."""

    def __init__(self) -> None:
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

            def _answer(self, status: int, body: bytes = b"", *, head: bool = False) -> None:
                with contextlib.suppress(OSError):
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(body)))
                    self.send_header("ETag", '"0"')
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
                if not self._in_trouble():
                    held = bucket.objects.get(self.path)
                    self._answer(404 if held is None else 200, held or b"")

        return Handler
