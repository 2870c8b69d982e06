"""Buckets for the tests of the shared tier: a directory, and a real S3-compatible server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.seaweed import SeaweedServer


@pytest.fixture(scope="session")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    """A server for all tests, each in a folder of its own. A test that stops one starts its own."""
    server = SeaweedServer(tmp_path_factory.mktemp("weed"))
    yield server
    server.stop()


@pytest.fixture(params=["file", "s3"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Settings of a shared tier that no other test uses."""
    from tests.support.sharing import on_server

    if request.param == "file":
        return {"shared_url": f"file://{tmp_path}/bucket"}
    return on_server(request.getfixturevalue("weed"), request.node.nodeid)
