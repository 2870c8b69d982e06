"""What the tests of the shared tier have in common: nodes that name the same prompt differently, and their bucket."""

from __future__ import annotations

import dataclasses
from typing import Any

import xxhash

from lmcache_hs_backend.chunk import KeyedChunk, chunk_refs
from lmcache_hs_backend.format.objects import Objects
from tests.support.prompts import IDENT, Prompt
from tests.support.seaweed import BUCKET, SeaweedServer
from tests.support.waiting import wait_until

MODEL = dataclasses.replace(IDENT, model_revision="abc123", world_size=2)
OTHER_RANK = dataclasses.replace(MODEL, worker_id=1, none_hash="17")


def on_server(server: SeaweedServer, name: str, **keys: str) -> dict[str, Any]:
    place = xxhash.xxh3_64_hexdigest(name.encode())
    return {"shared_url": f"s3://{BUCKET}/{place}", "shared_options": server.options(**keys)}


def elsewhere(p: Prompt, tag: str = "") -> Prompt:
    """The same prompt as another rank with another hash seed names it."""
    other = Prompt(p.ids)
    chunks = []
    for ref in p.refs:
        value = f"{xxhash.xxh3_64_intdigest(ref.chunk_hash.encode(), seed=99):x}"
        chunks.append(KeyedChunk(ref.start, ref.end, f"org/test-model@2@1@{value}@bfloat16{tag}", value, value))
    other.refs = chunk_refs(chunks, p.bytes)
    return other


def uploaded(store: Any, count: int) -> None:
    assert store.flush(10) == 0
    wait_until(lambda: store.stats()["shared_chunks"] >= count and not store.stats()["queue_uploads"], 30 + count / 10)


def objects_of(shared: dict[str, Any]) -> Objects:
    return Objects(shared["shared_url"], shared.get("shared_options"))


def chunks_in(shared: dict[str, Any]) -> list[str]:
    return [found.path for found in objects_of(shared).list() if found.path.endswith(".safetensors")]
