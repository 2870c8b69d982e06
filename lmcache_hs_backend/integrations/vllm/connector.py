"""``HSTieredConnector``: vLLM's KV connector that keeps hidden states in the two tiers.

Used with the ``extract_hidden_states`` method, in place of vLLM's ExampleHiddenStatesConnector, whose
settings, files and replies it keeps. vLLM builds it twice, once beside the scheduler and once beside the
model; this module joins the two halves to vLLM's interface and decides nothing itself. It only stores:
it never gives vLLM any KV.
"""

from __future__ import annotations

import atexit
import json
import logging
import weakref
from typing import Any

import torch

from lmcache_hs_backend.config import ConfigError
from lmcache_hs_backend.integrations.vllm.capture import Capture, Model
from lmcache_hs_backend.integrations.vllm.compat import (
    VLLM_VERSION,
    CacheOnlyAttentionLayer,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
    VllmConfig,
    get_kv_transfer_group,
    get_layers_from_vllm_config,
    get_tensor_model_parallel_rank,
)
from lmcache_hs_backend.integrations.vllm.device import HiddenStatesCache
from lmcache_hs_backend.integrations.vllm.files import RequestFiles
from lmcache_hs_backend.integrations.vllm.lmcache_engine import EngineChunks, find_store
from lmcache_hs_backend.integrations.vllm.messages import Finish, Step
from lmcache_hs_backend.integrations.vllm.scheduler import Scheduler
from lmcache_hs_backend.integrations.vllm.sequence import HASH_ALGORITHM, Keying
from lmcache_hs_backend.integrations.vllm.settings import ConnectorSettings, label
from lmcache_hs_backend.integrations.vllm.worker import Worker, in_this_process
from lmcache_hs_backend.tiers.namespace import NamespaceId, local_model_revision

logger = logging.getLogger(__name__)


class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """A Step in the wrapping that vLLM asks for."""

    def __init__(self, step: Step) -> None:
        self.step = step


class HSTieredConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See the module's text, and docs/vllm.md for its settings."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Raises ConfigError for settings that cannot be used."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        _show_in_vllms_log()
        speculative = vllm_config.speculative_config
        if speculative is None or not speculative.uses_extract_hidden_states():
            raise ConfigError("HSTieredConnector needs speculative_config with method 'extract_hidden_states'")
        self._settings = ConnectorSettings.from_connector(self._kv_transfer_config.kv_connector_extra_config)
        self._group, self._block_size = _hidden_states_group(kv_cache_config)
        self._worker: Worker | None = None
        self._layer_name = ""
        self._scheduler: Scheduler | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = Scheduler(
                self._settings, _keying(vllm_config), self._group, self._block_size, self._hand_over
            )

    # -- beside the model --------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if get_tensor_model_parallel_rank() != 0:
            return
        layers = list(get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches)))
        if not layers:  # a pipeline stage without it
            return
        (self._layer_name,) = layers
        cache = HiddenStatesCache(kv_caches[self._layer_name])
        if cache.block_size != self._block_size:
            raise ValueError(
                f"the hidden-states cache has blocks of {cache.block_size} tokens, its group says {self._block_size}"
            )
        settings = self._settings
        engine_store = find_store(getattr(get_kv_transfer_group(), "sub_connectors", ()))
        if engine_store is not None and engine_store.chunk_size != settings.chunk_size:
            raise ConfigError(
                f"{label('chunk_size')} is {settings.chunk_size}, but must be {engine_store.chunk_size} as in LMCache, "
                f"whose hidden-state store is used"
            )
        capture, engine = None, None
        if settings.to_tiers:
            model = _model(self._vllm_config, settings, cache)
            capture = Capture(settings, model, None if engine_store is None else engine_store.tiers)
            engine = None if engine_store is None else EngineChunks(engine_store)
        files = None
        if settings.to_files:
            files = RequestFiles(
                settings.save_roots, settings.num_writer_threads, lock=settings.use_synchronization_lock
            )
        self._worker = Worker(cache, capture, files, engine)
        in_this_process[self._kv_transfer_config.engine_id] = self._worker
        atexit.register(_close, weakref.ref(self._worker))  # vLLM's engine in this process ends without a word
        logger.info(
            "hidden states of layers %s go to %s", _layer_ids(self._vllm_config),
            " and ".join(
                ([f"chunks in {capture.store.directory}"] if capture else [])
                + ([f"files in {settings.shared_storage_path}"] if files else [])
            ),
        )  # fmt: skip

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is ever loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is ever loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        if layer_name == self._layer_name and self._worker is not None:
            self._worker.wrote_hidden_states()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if self._worker is not None and isinstance(kv_connector_metadata, StepMetadata):
            self._worker.before_step(kv_connector_metadata.step)

    def wait_for_save(self) -> None:
        step = self._step()
        if self._worker is not None and step is not None:
            self._worker.announce(step)
            self._worker.after_step(step)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is None:
            return None, None
        step = self._step()
        for finish in step.finished if step is not None else ():
            self._worker.finish(finish)
            self._worker.hold(finish.req_id)
        return self._worker.reported() or None, None

    def get_finished_count(self) -> int:
        """One worker reports a request; the default would wait for all of them, for ever."""
        return 1

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    # -- beside the scheduler ----------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is not None:
            self._scheduler.found_locally(request, num_computed_tokens)
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        assert self._scheduler is not None  # vLLM calls this beside the scheduler only
        return StepMetadata(self._scheduler.step(scheduler_output))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        return self._scheduler.finish(request, block_ids)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        # A request that was never scheduled has no blocks of any group.
        return self.request_finished(request, block_ids[self._group] if self._group < len(block_ids) else [])

    # -- inside ------------------------------------------------------------------------------------------

    def _step(self) -> Step | None:
        metadata = self._connector_metadata
        return metadata.step if isinstance(metadata, StepMetadata) else None

    def _hand_over(self, finish: Finish) -> bool | None:
        worker = in_this_process.get(self._kv_transfer_config.engine_id)
        return None if worker is None else worker.finish(finish)


def _show_in_vllms_log() -> None:
    """vLLM configures only the loggers of its own name; without its handlers ours would be silent."""
    ours, theirs = logging.getLogger("lmcache_hs_backend"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.getEffectiveLevel())
        ours.propagate = theirs.propagate


def _close(worker: weakref.ref[Worker]) -> None:
    alive = worker()
    if alive is not None:
        alive.close()


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


def _layer_ids(vllm_config: VllmConfig) -> tuple[int, ...]:
    """The layers of the cache in its order: vLLM sorts what was configured and drops duplicates."""
    config = vllm_config.speculative_config.draft_model_config.hf_config
    return tuple(sorted(set(config.eagle_aux_hidden_state_layer_ids)))


def _keying(vllm_config: VllmConfig) -> Keying:
    model = vllm_config.model_config
    return Keying(model.model, str(model.dtype).removeprefix("torch."))


def _model(vllm_config: VllmConfig, settings: ConnectorSettings, cache: HiddenStatesCache) -> Model:
    model = vllm_config.model_config
    layer_ids = _layer_ids(vllm_config)
    if len(layer_ids) != cache.num_layers:
        raise ConfigError(f"eagle_aux_hidden_state_layer_ids must be {cache.num_layers} different numbers")
    num_layers = model.get_total_num_hidden_layers()
    revision = settings.model_revision
    keying = _keying(vllm_config)
    ident = NamespaceId(
        model=model.model,
        model_revision=(model.revision or local_model_revision(model.model)) if revision is None else revision,
        kv_dtype=keying.dtype,
        chunk_size=settings.chunk_size,
        hash_algorithm=HASH_ALGORITHM,
    )
    capture = {
        "source": "vllm",
        "version": VLLM_VERSION,
        "layer_ids": "vllm",  # id k: the stream after k layers, so id num_layers is before the final norm
        "layers": list(layer_ids),
        "num_layers": num_layers,
        "last_layer": "pre-norm",
    }
    served = model.served_model_name
    labels = {
        "model_name": model.model,
        "worker_id": 0,
        "role": "vllm",
        "served_model_name": served if isinstance(served, str) else (served or [""])[0],
    }
    return Model(ident, keying, layer_ids, json.dumps(capture), labels)
