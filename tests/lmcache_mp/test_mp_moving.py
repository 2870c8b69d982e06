"""From the in-process mode to MP mode: what the server does not find, and what it does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("lmcache")

from lmcache.v1.multiprocess.token_hasher import TokenHasher

from lmcache_hs_backend import ColdTierReader
from lmcache_hs_backend.integrations.lmcache.store import TieredHiddenStateStore
from tests.support.engines import ChunkedTokenDatabase, make_config, make_metadata
from tests.support.mp_server import CHUNK, MpServer
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.parametrize("algorithm", ["builtin", "sha256_cbor", "blake3"])
def test_the_modes_hash_tokens_differently_whatever_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    """The reason for docs/how-to/mp-mode.md's page on moving; should this fail, moving has become easy."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    tokens = list(range(CHUNK))
    config = make_config(str(tmp_path), chunk_size=CHUNK)
    config.pre_caching_hash_algorithm = algorithm
    database = ChunkedTokenDatabase(config, make_metadata(chunk=CHUNK))
    ((_, _, key),) = database.process_tokens(tokens=tokens)
    hashed = TokenHasher(CHUNK, algorithm).hash_tokens(tokens)
    as_number = int.from_bytes(hashed[:8], "big") if isinstance(hashed, bytes) else hashed
    assert key.chunk_hash != as_number


def test_rows_move_through_a_shared_tier_and_the_old_directory_can_be_read(tmp_path: Path) -> None:
    """Names in a shared tier come from the tokens, so the server finds what in-process engines have uploaded."""
    pytest.importorskip("obstore")
    shared = {"shared_url": f"file://{tmp_path}/shared", "model_revision": "r1"}
    metadata = make_metadata(chunk=CHUNK)
    config = make_config(str(tmp_path / "cold"), chunk_size=CHUNK, settings={**shared, "write_back_sec": 0})
    old = TieredHiddenStateStore(config, ChunkedTokenDatabase(config, metadata))
    tokens, rows = list(range(3 * CHUNK)), torch.randn(3 * CHUNK, 32).bfloat16()
    assert old.store_layers(tokens, {0: rows, 7: -rows}) == 3
    assert old.flush(60) == 0
    wait_until(lambda: old.stats()["shared_chunks"] == 3, 60)
    old.close()
    with MpServer(tmp_path / "cold", tmp_path / "log", shared_read_sec=60, **shared) as server:
        client = server.client(model=metadata.model_name, read_timeout_sec=120)
        assert client.coverage(tokens, [0, 7]) == 0  # the old directory is not the server's
        found = client.retrieve_layers(tokens, [0, 7], None)
        assert torch.equal(found[0], rows)
        assert torch.equal(found[7], -rows)
        assert client.flush(60) == 0
        client.close()
    chunks = list(ColdTierReader(str(tmp_path / "cold")).chunks())
    assert len(chunks) == 6  # of the old directory and of the server's
