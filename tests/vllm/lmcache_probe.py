"""Looks into the LMCache engine of this process; runs there for test_run_lmcache.py."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from tests.support.waiting import wait_until
from tests.vllm.vllm_run import LAYERS


def engine() -> Any:
    (found,) = (
        connector._lmcache_engine.lmcache_engine
        for connector in get_kv_transfer_group().sub_connectors
        if hasattr(connector, "_lmcache_engine")
    )
    return found


def look(requests: list[dict[str, Any]], configs: dict[str, Any] | None = None) -> list[dict[str, int]]:
    """For every request, under LMCache's own keys: chunks, those with KV, those with every layer, rows served."""
    store, manager = engine().hidden_state_store, engine().storage_manager
    found = []
    for request in requests:
        ids = request["ids"][:-1]
        keys = [key for _, _, key in engine().token_database.process_tokens(tokens=ids, request_configs=configs)]
        rows = store.retrieve_hidden_states(ids, layer_idx=LAYERS[0], request_configs=configs)
        found.append(
            {
                "chunks": len(keys),
                "kv": sum(manager.contains(key) is not None for key in keys),
                "rows": sum(all(store.has_chunk(key, layer) for layer in LAYERS) for key in keys),
                "served": 0 if rows is None else len(rows),
            }
        )
    return found


def look_for_tagged(requests: list[dict[str, Any]]) -> dict[str, Any]:
    """The same with a user's tag, and without."""
    return {"tagged": look(requests, {"lmcache.tag.user": "a"}), "untagged": look(requests)}


def forget(requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Have LMCache delete all KV, and look again."""
    store = engine().hidden_state_store
    before = store.num_cached_chunks()
    engine().clear()
    wait_until(lambda: store.num_cached_chunks() == 0)
    return {"before": before, "after": look(requests)}
