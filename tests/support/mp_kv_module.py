"""A module of LMCache's MP server for tests: puts KV objects into its storage manager and deletes them.

An engine does the first with its own memory, which a CPU does not have; the objects, their hashes and the events are
the real ones.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey

from lmcache_hs_backend.integrations.lmcache_mp.mp_api import DiscoverableModule, server_module_handler


class KvOfTests(DiscoverableModule):
    module_name = "kv_of_tests"

    @classmethod
    def create(cls, build_ctx: Any) -> KvOfTests:
        return cls(build_ctx.engine_context)

    def __init__(self, context: Any) -> None:
        self._context = context

    @property
    def context(self) -> Any:
        return self._context

    def report_status(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        return

    @server_module_handler("kv_of_tests.put")
    def put(self, payload: bytes) -> bytes:
        """Store the KV of a prompt's chunks; how many were stored."""
        manager, call = self._context.storage_manager, json.loads(payload)
        keys = self._keys(call)
        layout = MemoryLayoutDesc([torch.Size([call["bytes"] // 2])], [torch.bfloat16])
        reserved = manager.reserve_write(keys, layout)
        manager.finish_write(list(reserved))
        return str(len(reserved)).encode()

    @server_module_handler("kv_of_tests.delete")
    def delete(self, payload: bytes) -> bytes:
        """Delete the KV of chunks from L1."""
        call = json.loads(payload)
        self._context.storage_manager.delete_l1_keys([self._keys(call)[n] for n in call["chunks"]])
        return b""

    @server_module_handler("kv_of_tests.delete_from_l2")
    def delete_from_l2(self, payload: bytes) -> bytes:
        """Delete the KV of chunks from the L2 adapters."""
        call = json.loads(payload)
        for adapter in self._context.storage_manager._l2_adapters.values():
            adapter.delete([self._keys(call)[n] for n in call["chunks"]])
        return b""

    def _keys(self, call: dict[str, Any]) -> list[ObjectKey]:
        hashes = self._context.token_hasher.compute_chunk_hashes(call["tokens"])
        rank = ObjectKey.ComputeKVRank(1, 0, 1, 0)
        return [ObjectKey(chunk_hash, call["model"], rank) for chunk_hash in hashes]


def build_server_modules(build_context: Any) -> KvOfTests:
    return KvOfTests(build_context.server_context)
