"""A running vLLM server with the connector, over HTTP: rows go to ``/v1/completions`` as token ids.

``VLLM_API_KEY`` is sent as a bearer token where it is set. The server's cold path must be readable here: what is done
is read from its records.
"""

from __future__ import annotations

import json
import os
import threading
import urllib.error
import urllib.request
from http.client import HTTPException
from queue import Empty, SimpleQueue
from typing import Any

from lmcache_hs_backend.capture.capture_settings import CaptureError, Settings
from lmcache_hs_backend.capture.vllm_backends import Outcome, Request

API_KEY = "VLLM_API_KEY"

_WAIT_SEC = 0.25
_START_SEC = 30
_ANSWER_SEC = 3600
_ERROR_BYTES = 1 << 16


class Refused(Exception):
    """The server's answer is an error. ``status`` 0: there was none."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Server:
    """One server. Its threads are daemons, so that nothing waits for a request that is under way."""

    def __init__(self, url: str, settings: Settings, concurrency: int) -> None:
        """Asks which model it serves. Raises CaptureError when it is none, or another."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self.running = 0
        self._concurrency = concurrency
        self._sampling = settings.sampling
        self._waiting: SimpleQueue[Request | None] = SimpleQueue()  # None ends a thread
        self._ended: SimpleQueue[Outcome] = SimpleQueue()
        try:
            card = self._ask("/v1/models", None, timeout=_START_SEC)["data"][0]
            self.model = str(card["id"])
        except Refused as error:
            raise CaptureError(f"--server {url}: {error}") from None
        except (KeyError, IndexError, TypeError):
            raise CaptureError(f"--server {url} answers, but names no model under /v1/models: no vLLM server") from None
        names = [self.model, str(card.get("root") or self.model)]
        if not any(_same_model(name, settings.model) for name in names):
            raise CaptureError(
                f"--server {url} serves {' from '.join(dict.fromkeys(names))}, not {settings.model}: its rows would be "
                f"another model's"
            )
        longest = card.get("max_model_len")
        self.max_model_len: int = longest if isinstance(longest, int) else settings.max_model_len or 1 << 30
        for number in range(concurrency):
            threading.Thread(target=self._run, name=f"hs-send-{number}", daemon=True).start()

    @property
    def room(self) -> int:
        """Requests that it takes now."""
        return self._concurrency - self.running

    def submit(self, request: Request) -> None:
        """Send a request."""
        self.running += 1
        self._waiting.put(request)

    def wait(self) -> list[Outcome]:
        """What has been answered."""
        ended = []
        try:
            ended.append(self._ended.get(timeout=_WAIT_SEC))
            while True:
                ended.append(self._ended.get_nowait())
        except Empty:
            self.running -= len(ended)
            return ended

    def close(self) -> None:
        """End the threads, each after its request; the server stays."""
        for _ in range(self._concurrency):
            self._waiting.put(None)

    def abandon(self) -> None:
        """The same: this process's end closes the connections, and the server then drops their requests."""
        self.close()

    def _run(self) -> None:
        while (request := self._waiting.get()) is not None:
            self._ended.put(self._complete(request))

    def _complete(self, request: Request) -> Outcome:
        body = {"model": self.model, "prompt": request.token_ids, **self._sampling, "max_tokens": request.max_tokens}
        if request.record:
            body["kv_transfer_params"] = request.transfer_params
        try:
            answer = self._ask("/v1/completions", body, timeout=_ANSWER_SEC, request_id=request.row_id)
            return Outcome(request, int(answer["usage"]["total_tokens"]), None, answer.get("kv_transfer_params") or {})
        except Refused as error:
            return Outcome(request, 0, str(error))
        except (KeyError, TypeError, ValueError) as error:
            return Outcome(request, 0, f"the server's answer is no completion: {error!r}")

    def _ask(self, path: str, body: dict[str, Any] | None, *, timeout: float, request_id: str = "") -> Any:
        """Raises Refused, with the server's own text."""
        headers = {"Content-Type": "application/json"}
        if request_id:
            headers["X-Request-Id"] = request_id
        if os.environ.get(API_KEY):
            headers["Authorization"] = f"Bearer {os.environ[API_KEY]}"
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=timeout) as got:
                return json.load(got)
        except urllib.error.HTTPError as error:
            raise Refused(error.code, _error_text(error)) from None
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise Refused(0, f"cannot be reached: {reason}") from None
        except ValueError as error:
            raise Refused(0, f"the answer is no JSON: {error}") from None


def _error_text(error: urllib.error.HTTPError) -> str:
    if error.code in (401, 403):
        had = "did not take the key in" if os.environ.get(API_KEY) else "wants an API key: set"
        return f"HTTP {error.code}: the server {had} {API_KEY}"
    try:
        text = error.read(_ERROR_BYTES).decode("utf-8", "replace")
    except OSError:
        text = ""
    try:
        said = json.loads(text)
        said = said.get("error", said) if isinstance(said, dict) else said
        text = str(said.get("message", said) if isinstance(said, dict) else said)
    except ValueError:
        pass
    return f"HTTP {error.code}: {' '.join(text.split())[:1000] or error.reason}"


def _same_model(name: str, wanted: str) -> bool:
    """Whether a server's name for its model can be ours: equal, or the same last part of a path."""
    last = os.path.basename(name.rstrip("/")), os.path.basename(wanted.rstrip("/"))
    return name == wanted or last[0] == last[1]
