"""A real ``lmcache server`` for the tests here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One server for all tests of a module that do it no harm."""
    from tests.support.mp_server import MpServer

    path = tmp_path_factory.mktemp("mp")
    with MpServer(path / "cold", path / "log", write_back_sec=0) as server:
        yield server


@pytest.fixture
def server(tmp_path: Any) -> Iterator[Any]:
    """A server of a test's own."""
    from tests.support.mp_server import MpServer

    with MpServer(tmp_path / "cold", tmp_path / "log", write_back_sec=0) as server:
        yield server
