"""vLLM's ExampleHiddenStatesConnector, changed only so far that it runs without an accelerator."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import ExampleHiddenStatesConnector


class _Done:
    """Stands in for the event of a copy that was not asynchronous."""

    def query(self) -> bool:
        return True


class ExampleOnCpu(ExampleHiddenStatesConnector):
    """It asks for pinned memory and polls an event, both of which need an accelerator."""

    def _submit_async_write(self, pending: Any) -> None:
        pinned = torch.empty_like
        torch.empty_like = lambda *args, pin_memory=False, **kwargs: pinned(*args, **kwargs)
        try:
            super()._submit_async_write(pending)
        finally:
            torch.empty_like = pinned
        self._req_copy_events[pending.req_id] = _Done()
