"""The only place that names vLLM's modules, and where an untested vLLM is refused.

vLLM calls its connector interface experimental and changes it between minor versions. A connector that
meets another interface fails late and obscurely, so the version is judged here, before anything else of
vLLM is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable

from packaging.version import Version
from vllm.version import __version__ as VLLM_VERSION

#: Minor versions of vLLM that the tests run with.
TESTED = ("0.32", "0.33")


def refuse_untested(version: str) -> None:
    """Raise ImportError, in words, for a vLLM that this package has not been tested with."""
    found = Version(version)
    if f"{found.major}.{found.minor}" not in TESTED:
        raise ImportError(
            f"lmcache_hs_backend.integrations.vllm is tested with vLLM {', '.join(f'{v}.x' for v in TESTED)}, but "
            f"vLLM {version} is installed; its connector interface may differ. Install one of the tested versions, "
            f"or a release of lmcache-hs-backend that names vLLM {found.major}.{found.minor}."
        )


refuse_untested(VLLM_VERSION)

from vllm.config import VllmConfig, get_layers_from_vllm_config  # noqa: E402 - not before the version is known
from vllm.distributed.kv_transfer import get_kv_transfer_group  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank  # noqa: E402
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec, KVCacheConfig  # noqa: E402

__all__ = [
    "TESTED",
    "VLLM_VERSION",
    "HiddenStateCacheSpec",
    "KVCacheConfig",
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorRole",
    "SupportsHMA",
    "VllmConfig",
    "get_kv_transfer_group",
    "get_tensor_model_parallel_rank",
    "hidden_states_layers",
    "refuse_untested",
]


def hidden_states_layers(config: VllmConfig, names: Iterable[str]) -> list[str]:
    """Those of a model's layers that only cache hidden states."""
    # Not at the top: it brings vLLM's model code, 10 MB, also into the processes that have no model.
    from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer

    return list(get_layers_from_vllm_config(config, CacheOnlyAttentionLayer, list(names)))
