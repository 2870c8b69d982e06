"""Two real LMCache engines on two disks with one bucket: rows cross over, and only where the KV is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.engines import CHUNK, rows_of, tokens_of
from tests.support.seaweed import BUCKET, SeaweedServer
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


#: One engine in a process of its own, with the rank and the steps that the arguments name.
_NODE = """
import json, sys
from pathlib import Path
import torch
from tests.support.engines import *
from tests.support.engines import CHUNK, rows_of, tokens_of
path, rank, steps, shared = sys.argv[1], int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
seed = int(sys.argv[5])
ChunkedTokenDatabase._get_init_hash = lambda self: seed  # as vLLM draws one for each process without PYTHONHASHSEED
tokens, rows = tokens_of(4), rows_of(4 * CHUNK)
settings = {"model_revision": "abc123", **shared}
metadata = make_metadata(world_size=2, local_world_size=2, worker_id=rank, local_worker_id=rank)
with Engine(make_config(path, settings=settings), metadata) as node:
    store = node.store
    for step in steps.split(","):
        if step == "stores":
            node.store_both(tokens, rows)
            node.wait(lambda: store.flush(1) == 0 and store.stats()["shared_chunks"] == 4, 60)
        elif step == "has-no-kv":
            assert node.retrieve(tokens) is None
            assert store.stats()["shared_read_bytes"] == 0
        elif step == "has-kv":
            node.store_kv(tokens)
            assert torch.equal(node.retrieve(tokens), rows.float())
            assert store.stats()["shared_hits"] == 4
    print("hash", node.keys(tokens)[0].chunk_hash_hex)
"""


def test_engines_of_other_ranks_hash_seeds_and_disks_share_rows_on_a_real_server(tmp_path: Path) -> None:
    server = SeaweedServer(tmp_path / "weed")
    try:
        shared = json.dumps({"shared_url": f"s3://{BUCKET}/engines", "shared_options": server.options()})

        def node(disk: str, rank: int, seed: int, steps: str) -> str:
            command = [sys.executable, "-c", _NODE, str(tmp_path / disk), str(rank), steps, shared, str(seed)]
            env = {**os.environ, "PYTHONPATH": os.getcwd(), "PYTHONHASHSEED": str(seed)}
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
            assert done.returncode == 0, done.stderr[-3000:]
            return done.stdout.rpartition("hash")[2].strip()

        a = node("a", 0, 5, "stores")
        b = node("b", 1, 77, "has-no-kv,has-kv")
        assert a != b  # LMCache's own names of the chunk
        assert node("a-with-a-new-disk", 0, 5, "has-no-kv,has-kv") == a
    finally:
        server.stop()
