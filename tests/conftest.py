"""Fixtures that start real LMCache engines and see to it that nothing of ours outlives them.

Nothing here imports lmcache before a test asks for an engine: most tests run without it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _our_logs_reach_pytest() -> None:
    """Undo what an engine of an earlier test has done to our loggers: LMCache's do not propagate to caplog."""
    logger = logging.getLogger("lmcache_hs_backend")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def _every_invariant_holds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Strict mode in every test that does not measure time (marker ``timing``)."""
    from lmcache_hs_backend.tiers.flows import strict

    monkeypatch.setenv("HS_STRICT", "0" if request.node.get_closest_marker("timing") else "1")
    strict.violations.clear()
    yield
    found, strict.violations[:] = list(strict.violations), []
    assert not found, "\n".join(f"{'; '.join(problems)}\n{where}" for problems, where in found)


@pytest.fixture
def disk() -> Iterator[Any]:
    """A FaultyDisk; whatever hangs in it at the end goes on."""
    from tests.support.disks import FaultyDisk

    disk = FaultyDisk()
    yield disk
    disk.resume()


@pytest.fixture(scope="session")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An S3-compatible server for all tests, each in a folder of its own. A test that stops one starts its own."""
    from tests.support.seaweed import SeaweedServer

    server = SeaweedServer(tmp_path_factory.mktemp("weed"))
    yield server
    server.stop()


@pytest.fixture
def cold_path(tmp_path: Path) -> Path:
    return tmp_path / "cold"


@pytest.fixture
def start(cold_path: Path) -> Iterator[Callable[..., Any]]:
    """``start(**changes)`` builds an engine on ``cold_path``; see engines.make_config for the changes.

    At the end all of them are destroyed, and none of our threads may be left.
    """
    from tests.support.engines import Engine, make_config, our_threads
    from tests.support.waiting import wait_until

    with contextlib.ExitStack() as stack:

        def start_one(path: object = cold_path, *, metadata: Any = None, config: Any = None, **changes: Any) -> Engine:
            return stack.enter_context(Engine(config or make_config(path, **changes), metadata))

        yield start_one
    wait_until(lambda: not our_threads())


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Figures that a reader of the log wants to see although everything passed."""
    from tests.support.disks import INJECTED
    from tests.support.figures import DROPS, LINES

    if INJECTED or LINES or DROPS:
        terminalreporter.section("figures")
        for line in LINES:
            terminalreporter.write_line(line)
        faults = ", ".join(f"{kind} {count}" for kind, count in sorted(INJECTED.items()))
        drops = ", ".join(f"{reason} {count}" for reason, count in sorted(DROPS.items()))
        terminalreporter.write_line(f"chunks dropped by reason: {drops or 'none'}")
        terminalreporter.write_line(f"faults injected by kind: {faults or 'none'}; wrong rows: 0 (one fails its test)")
