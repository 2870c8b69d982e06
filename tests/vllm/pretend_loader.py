"""A KV connector that claims to have the KV of some prompts' first 128 tokens, and loads nothing.

What the model computes from there on is nonsense, which does not matter here: the question is what becomes
of the hidden states of tokens that no forward has seen.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

TOKENS = 128


class Nothing(KVConnectorMetadata):
    pass


class PretendLoader(KVConnectorBase_V1, SupportsHMA):
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        wanted = bool((request.kv_transfer_params or {}).get("pretend"))
        return (max(0, TOKENS - num_computed_tokens) if wanted else 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return Nothing()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...
