"""Two real LMCache engines on two disks with one bucket: rows cross over, and only where the KV is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.engines import CHUNK, rows_of, tokens_of
from tests.support.waiting import wait_until

pytest.importorskip("obstore")
pytestmark = pytest.mark.engine

TOKENS, ROWS = tokens_of(4), rows_of(4 * CHUNK)


def test_rows_of_one_engine_are_served_by_another_one_after_its_kv_is_there(start, tmp_path: Path) -> None:
    shared = {"model_revision": "abc123", "shared_url": f"file://{tmp_path}/bucket"}
    a = start(tmp_path / "a", settings=shared)
    a.store_both(TOKENS, ROWS)
    wait_until(lambda: a.store.flush(1) == 0 and a.store.stats()["shared_chunks"] == 4, 20)
    a.close()
    b = start(tmp_path / "b", settings=shared)
    assert b.retrieve(TOKENS) is None
    assert b.store.stats()["shared_read_bytes"] == 0
    b.store_kv(TOKENS[: 2 * CHUNK])
    assert torch.equal(b.retrieve(TOKENS), ROWS[: 2 * CHUNK].float())
    b.store_kv(TOKENS)
    assert torch.equal(b.retrieve(TOKENS), ROWS.float())
    assert b.store.stats()["shared_hits"] == 4
