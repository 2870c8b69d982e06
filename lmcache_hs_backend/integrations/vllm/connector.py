"""``HSTieredConnector``: vLLM's KV connector that keeps hidden states in the two tiers.

Used with the ``extract_hidden_states`` method, in place of vLLM's ExampleHiddenStatesConnector, whose settings, files
and replies it keeps. vLLM builds it twice, once beside the scheduler and once beside the model, often in different
processes; this module joins the two halves, ``scheduler_side`` and ``worker_side``, to vLLM's interface and decides
nothing itself. It only stores: it never gives vLLM any KV.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from lmcache_hs_backend.config import ConfigError
from lmcache_hs_backend.integrations.vllm.naming import KeyFormat
from lmcache_hs_backend.integrations.vllm.protocol import Finish, Step, workers_here
from lmcache_hs_backend.integrations.vllm.scheduler_side.tracker import RequestTracker
from lmcache_hs_backend.integrations.vllm.settings import ConnectorSettings
from lmcache_hs_backend.integrations.vllm.vllm_api import (
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
    VllmConfig,
    get_tensor_model_parallel_rank,
    hidden_states_layers,
)

if TYPE_CHECKING:
    from lmcache_hs_backend.integrations.vllm.worker_side.worker import Worker

logger = logging.getLogger(__name__)


class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """A Step in the wrapping that vLLM asks for."""

    def __init__(self, step: Step) -> None:
        self.step = step


class HSTieredConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """vLLM's side of both halves. docs/reference/vllm.md lists its settings."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Raises ConfigError for settings that cannot be used."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        _log_like_vllm()
        speculative = vllm_config.speculative_config
        if speculative is None or not speculative.uses_extract_hidden_states():
            raise ConfigError("HSTieredConnector needs speculative_config with method 'extract_hidden_states'")
        self._settings = ConnectorSettings.from_connector(self._kv_transfer_config.kv_connector_extra_config)
        self._group, self._block_size = _hidden_states_group(kv_cache_config)
        self._worker: Worker | None = None
        self._cache: torch.Tensor | None = None
        self._layer_name = ""
        self._tracker: RequestTracker | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._tracker = RequestTracker(
                self._settings, _key_format(vllm_config), self._group, self._block_size, self._finish_here
            )

    # -- beside the model --------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Find the cache of hidden states. Only the first tensor-parallel rank takes rows."""
        if get_tensor_model_parallel_rank() != 0:
            return
        layers = hidden_states_layers(self._vllm_config, kv_caches)
        if not layers:  # a pipeline stage without it
            return
        (self._layer_name,) = layers
        self._cache = kv_caches[self._layer_name]
        block_size = self._cache.shape[2]
        if block_size != self._block_size:
            raise ValueError(
                f"the hidden-states cache has blocks of {block_size} tokens, its group says {self._block_size}"
            )

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        """Start the worker's half.

        vLLM calls this when every connector has its caches. Only then does an LMCache beside this one have its store.
        """
        if self._cache is not None:
            # Not at the top: the tiers are not needed in the processes without a model, which load this module too.
            from lmcache_hs_backend.integrations.vllm.worker_side.build import build_worker

            self._worker = build_worker(self._vllm_config, self._settings, _key_format(self._vllm_config), self._cache)
            workers_here[self._kv_transfer_config.engine_id] = self._worker

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """vLLM 0.33 asks before it allows sleep mode."""
        return True

    def unregister_kv_caches(self) -> None:
        """vLLM 0.33 calls this before sleep and discard: the cache's memory is about to go."""
        if self._worker is not None:
            self._worker.release_cache()

    def restore_kv_caches(self) -> None:
        """vLLM 0.33 calls this when the memory is back, at its old address. Its rows are not, so nothing changes."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is ever loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is ever loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Called when a layer is written; the one of hidden states says that this step has rows."""
        if layer_name == self._layer_name and self._worker is not None:
            self._worker.wrote_hidden_states()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Copy what is left in blocks that a preemption takes away, before the step."""
        if self._worker is not None and isinstance(kv_connector_metadata, StepMetadata):
            self._worker.before_step(kv_connector_metadata.step)

    def wait_for_save(self) -> None:
        """Take the rows of chunks that this step has completed. Copies go on after it."""
        step = self._step()
        if self._worker is not None and step is not None:
            self._worker.after_step(step)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The requests whose blocks vLLM may free: their copies are done. None was loaded."""
        step = self._step()
        finished = step.finished if step is not None else []
        if self._worker is None:
            # vLLM waits for a report of every rank, also of those without rows: beside another connector it accepts no
            # smaller number.
            return {finish.req_id for finish in finished} or None, None
        for finish in finished:
            self._worker.finish(finish)
            self._worker.defer_free(finish.req_id)
        return self._worker.pop_finished() or None, None

    def shutdown(self) -> None:
        """Write what is not on disk yet, and end."""
        if self._worker is not None:
            self._worker.close()

    # -- beside the scheduler ----------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """No tokens: this connector never gives vLLM any KV. It notes what vLLM found in its own prefix cache."""
        if self._tracker is not None:
            self._tracker.found_locally(request, num_computed_tokens)
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A request has blocks."""
        if self._tracker is not None:
            self._tracker.allocated(request)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """What the workers have to do in this step."""
        assert self._tracker is not None  # vLLM calls this beside the scheduler only
        return StepMetadata(self._tracker.step(scheduler_output))

    def reset_cache(self) -> bool | None:
        """vLLM calls this before it gives the cache's memory away: rows that have not been copied by then are lost."""
        if self._tracker is not None:
            self._tracker.reset()
        return None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks have to stay until rows are copied, and what the reply says of them."""
        assert self._tracker is not None
        return self._tracker.finish(request, block_ids)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As ``request_finished``, with the blocks of all cache groups."""
        # A request that was never scheduled has no blocks of any group.
        return self.request_finished(request, block_ids[self._group] if self._group < len(block_ids) else [])

    # -- inside ------------------------------------------------------------------------------------------

    def _step(self) -> Step | None:
        metadata = self._connector_metadata
        return metadata.step if isinstance(metadata, StepMetadata) else None

    def _finish_here(self, finish: Finish) -> bool | None:
        worker = workers_here.get(self._kv_transfer_config.engine_id)
        return None if worker is None else worker.finish(finish)


def _log_like_vllm() -> None:
    """vLLM configures only the loggers of its own name; without its handlers ours would be silent."""
    ours, theirs = logging.getLogger("lmcache_hs_backend"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.getEffectiveLevel())
        ours.propagate = theirs.propagate


def _hidden_states_group(kv_cache_config: KVCacheConfig) -> tuple[int, int]:
    """The cache group of the hidden states, by its spec, and its own block size.

    ``cache_config.block_size`` is not it: hybrid models raise that to a common multiple.
    """
    groups = kv_cache_config.kv_cache_groups
    found = [n for n, group in enumerate(groups) if isinstance(group.kv_cache_spec, HiddenStateCacheSpec)]
    if not found and len(groups) == 1:
        found = [0]
    if len(found) != 1:
        raise ConfigError(
            f"{len(found)} of the {len(groups)} KV cache groups hold hidden states, there must be exactly one "
            f"(vLLM's extract_hidden_states does not support MLA models)"
        )
    return found[0], groups[found[0]].kv_cache_spec.block_size


def _key_format(vllm_config: VllmConfig) -> KeyFormat:
    model = vllm_config.model_config
    return KeyFormat(model.model, str(model.dtype).removeprefix("torch."))
