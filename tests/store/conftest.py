"""Buckets for the tests of the shared tier: a directory, and a real S3-compatible server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(params=["file", "s3"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Settings of a shared tier that no other test uses."""
    from tests.support.sharing import on_server

    if request.param == "file":
        return {"shared_url": f"file://{tmp_path}/bucket"}
    return on_server(request.getfixturevalue("weed"), request.node.nodeid)
