"""Puts the worker's half together: the settings, the model, the store, and what vLLM has beside us.

It is imported only in a process that has the model's caches. It decides nothing about rows.
"""

from __future__ import annotations

import atexit
import json
import logging
import weakref

import torch

from lmcache_hs_backend.config import ConfigError
from lmcache_hs_backend.format.namespace import NamespaceId, local_model_revision
from lmcache_hs_backend.integrations.vllm.naming import HASH_ALGORITHM, KeyFormat
from lmcache_hs_backend.integrations.vllm.settings import ConnectorSettings, doubtful_layers, label
from lmcache_hs_backend.integrations.vllm.vllm_api import VLLM_VERSION, VllmConfig, get_kv_transfer_group
from lmcache_hs_backend.integrations.vllm.worker_side.device import HiddenStatesCache
from lmcache_hs_backend.integrations.vllm.worker_side.lmcache_engine import EngineChunks, find_store
from lmcache_hs_backend.integrations.vllm.worker_side.request_files import RequestFiles
from lmcache_hs_backend.integrations.vllm.worker_side.server_sink import ServerChunks, ServerSink, open_server
from lmcache_hs_backend.integrations.vllm.worker_side.sink import CapturedModel, CaptureSink
from lmcache_hs_backend.integrations.vllm.worker_side.worker import Worker

logger = logging.getLogger(__name__)


def build_worker(
    vllm_config: VllmConfig, settings: ConnectorSettings, key_format: KeyFormat, caches: torch.Tensor
) -> Worker:
    """The worker's half over vLLM's cache of hidden states ``[num_blocks, num_layers, block_size, hidden_dim]``.

    Raises:
        ConfigError: Settings do not go together, or the cold path cannot be used.
    """
    cache = HiddenStatesCache(caches)
    sink: CaptureSink | ServerSink | None = None
    engine: EngineChunks | ServerChunks | None = None
    files = None
    places = []
    if settings.to_server:
        sink, engine = open_server(settings, _model(vllm_config, settings, key_format, cache))
        places = [f"the store of LMCache's server at {settings.mp_server_url}"]
    elif settings.to_tiers:
        sink, engine = _sink(settings, _model(vllm_config, settings, key_format, cache))
        places = [f"chunks in {sink.store.directory}"]
    if settings.to_files:
        files = RequestFiles(settings.save_roots, settings.num_writer_threads, lock=settings.use_synchronization_lock)
    made = Worker(cache, sink, files, engine, settings.store_wait_ms / 1000)
    atexit.register(_close, weakref.ref(made))  # vLLM's engine in this process ends without a word
    places += [f"files in {settings.shared_storage_path}"] if files else []
    for problem in doubtful_layers(_layer_ids(vllm_config), vllm_config.model_config.get_total_num_hidden_layers()):
        logger.warning("%s", problem)
    logger.info("hidden states of layers %s go to %s", _layer_ids(vllm_config), " and ".join(places))
    return made


def _close(made: weakref.ref[Worker]) -> None:
    alive = made()
    if alive is not None:
        alive.close()


def _sink(settings: ConnectorSettings, model: CapturedModel) -> tuple[CaptureSink, EngineChunks | None]:
    store = find_store(getattr(get_kv_transfer_group(), "sub_connectors", ()))
    if store is None:
        return CaptureSink(settings, model), None
    if store.chunk_size != settings.chunk_size:
        raise ConfigError(
            f"{label('chunk_size')} is {settings.chunk_size}, but must be {store.chunk_size} as in LMCache, "
            f"whose hidden-state store is used"
        )
    if store.allowed is not None and store.allowed.isdisjoint(model.layer_idxs):
        raise ConfigError(
            f"hidden_state_layers of LMCache, whose hidden-state store is used, is {sorted(store.allowed)}, but must "
            f"name at least one of the layers {model.layer_idxs}"
        )
    return CaptureSink(settings, model, store.tiers, store.allowed), EngineChunks(store)


def _layer_ids(vllm_config: VllmConfig) -> tuple[int, ...]:
    """The layers of the cache in its order: vLLM sorts what was configured and drops duplicates."""
    config = vllm_config.speculative_config.draft_model_config.hf_config
    return tuple(sorted(set(config.eagle_aux_hidden_state_layer_ids)))


def _model(
    vllm_config: VllmConfig, settings: ConnectorSettings, key_format: KeyFormat, cache: HiddenStatesCache
) -> CapturedModel:
    model = vllm_config.model_config
    layer_ids = _layer_ids(vllm_config)
    if len(layer_ids) != cache.num_layers:
        raise ConfigError(f"eagle_aux_hidden_state_layer_ids must be {cache.num_layers} different numbers")
    num_layers = model.get_total_num_hidden_layers()
    revision = settings.model_revision
    ident = NamespaceId(
        model=model.model,
        model_revision=(model.revision or local_model_revision(model.model)) if revision is None else revision,
        kv_dtype=key_format.dtype,
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
    return CapturedModel(ident, key_format, layer_ids, json.dumps(capture), labels)
