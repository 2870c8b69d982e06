"""What the connector tells vLLM about itself, and what it costs the processes that have no model."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, supports_hma
from vllm.v1.kv_cache_interface import FullAttentionSpec, HiddenStateCacheSpec

from lmcache_hs_backend.config import ConfigError
from lmcache_hs_backend.integrations.vllm import connector
from lmcache_hs_backend.integrations.vllm.connector import HSTieredConnector, StepMetadata, _hidden_states_group
from lmcache_hs_backend.integrations.vllm.protocol import Finish, Step

ATTENTION = FullAttentionSpec(block_size=64, num_kv_heads=3, head_size=64, dtype=torch.bfloat16)
HIDDEN = HiddenStateCacheSpec(block_size=16, num_kv_heads=4, head_size=576, dtype=torch.bfloat16)


def caches(*specs: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


def bare() -> Any:
    """A connector whose constructor, which wants a whole configuration of vLLM, has not run."""
    made = HSTieredConnector.__new__(HSTieredConnector)
    made._cache = made._worker = made._scheduler = made._connector_metadata = None
    return made


def test_it_is_a_connector_that_can_do_with_several_cache_groups() -> None:
    assert issubclass(HSTieredConnector, KVConnectorBase_V1)
    assert supports_hma(HSTieredConnector)


def test_every_rank_reports_a_request_because_beside_other_connectors_vllm_waits_for_all() -> None:
    other = bare()
    assert other.get_finished_count() is None
    other.bind_connector_metadata(StepMetadata(Step(tokens=0, finished=[Finish("r", [], [], None, None)])))
    assert other.get_finished({"r"}) == ({"r"}, None)
    other.clear_connector_metadata()
    assert other.get_finished({"r"}) == (None, None)


def test_the_group_of_the_hidden_states_is_found_by_its_spec_with_its_own_block_size() -> None:
    assert _hidden_states_group(caches(ATTENTION, HIDDEN)) == (1, 16)
    assert _hidden_states_group(caches(HIDDEN, ATTENTION)) == (0, 16)
    with pytest.raises(ConfigError, match="2 of the 2 KV cache groups"):
        _hidden_states_group(caches(HIDDEN, HIDDEN))


def test_of_the_tensor_parallel_ranks_only_rank_0_takes_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector, "get_tensor_model_parallel_rank", lambda: 1)
    other = bare()
    other.register_kv_caches({"cache_only_layers.30": torch.zeros(1, 4, 16, 576)})
    other.set_host_xfer_buffer_ops(None)
    assert other._worker is None
    assert other.get_finished({"r"}) == (None, None)


def test_a_process_without_a_model_loads_neither_the_tiers_nor_vllms_models() -> None:
    heavy = ["lmcache_hs_backend.tiered", "vllm.model_executor.models.extract_hidden_states"]
    code = f"import sys, {connector.__name__}; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    assert found.stdout.splitlines()[-1] == "[]"
