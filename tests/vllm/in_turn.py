"""Two connectors in one engine, of which each request uses one: ``kv_transfer_params["connector"]``, its position.

One process, one copy of the weights, the same pages: two engines beside each other differ by a quarter for no other
reason than where their memory lies. All requests that run at the same time must use the same connector.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector


class OneOf(KVConnectorMetadata):
    """The metadata of one connector, and which."""

    def __init__(self, position: int, metadata: KVConnectorMetadata) -> None:
        self.position = position
        self.metadata = metadata


class InTurn(MultiConnector):
    """Takes MultiConnector's settings; where that asks all of its connectors, this one asks the request's."""

    _position = 0

    @property
    def _present(self) -> KVConnectorBase_V1:
        return self._connectors[self._position]

    # -- beside the scheduler ----------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._position = request.kv_transfer_params["connector"]
        return self._present.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._present.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> OneOf:
        return OneOf(self._position, self._present.build_connector_meta(scheduler_output))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._present.request_finished_all_groups(request, block_ids)

    def update_connector_output(self, connector_output: Any) -> None:
        self._present.update_connector_output(connector_output)

    # -- beside the model --------------------------------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(connector_metadata, OneOf)
        self._position = connector_metadata.position
        self._present.bind_connector_metadata(connector_metadata.metadata)
        KVConnectorBase_V1.bind_connector_metadata(self, connector_metadata)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, OneOf)
        self._present.handle_preemptions(kv_connector_metadata.metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._present.start_load_kv(forward_context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._present.wait_for_layer_load(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self._present.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def wait_for_save(self) -> None:
        self._present.wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        reported = [connector.get_finished(finished_req_ids)[0] or set() for connector in self._connectors]
        return set().union(*reported) or None, None

    def get_finished_count(self) -> int:
        return 1
