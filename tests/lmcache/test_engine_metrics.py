"""Our figures on LMCache's own /metrics page, served by LMCache's own router over HTTP."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Iterator

import pytest
import uvicorn
from fastapi import FastAPI

from tests.support.engines import CHUNK, rows_of, tokens_of
from tests.support.waiting import wait_until

try:
    from lmcache.v1.internal_api_server.common.metrics_api import router
except ModuleNotFoundError:  # lmcache 0.5.7rc2 has one for the in-process engine and the server
    from lmcache.v1.multiprocess.http_apis.common.metrics_api import router


@pytest.fixture
def page() -> Iterator[str]:
    """The address of a /metrics page."""
    app = FastAPI()
    app.include_router(router)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/metrics"
    finally:
        server.should_exit = True
        thread.join()


def test_what_an_engine_does_is_on_lmcaches_metrics_page_with_lmcaches_labels(start, page):
    engine = start()
    tokens = tokens_of(4)
    engine.store_both(tokens, rows_of(4 * CHUNK))
    engine.served(tokens)

    def shown(figure: str) -> list[str]:
        with urllib.request.urlopen(page, timeout=10) as answer:
            return [line for line in answer.read().decode().splitlines() if line.startswith(f"lmcache:hs_{figure}{{")]

    engine.wait(lambda: any(line.endswith(" 4.0") for line in shown("hot_chunks")))
    labels = {part.split("=")[0] for part in shown("hot_chunks")[0].split("{")[1].split("}")[0].split(",")}
    assert {"model_name", "worker_id"} <= labels
    assert shown("stored_chunks_total")
    assert shown("hits_hot_total")
    assert shown("retrieve_seconds_count")
