"""What the connector tells vLLM about itself, and what it costs the processes that have no model."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import SpeculativeConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, supports_hma
from vllm.v1.kv_cache_interface import FullAttentionSpec, HiddenStateCacheSpec
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

from lmcache_hs_backend.config import ConfigError
from lmcache_hs_backend.integrations.vllm import connector
from lmcache_hs_backend.integrations.vllm.connector import HSTieredConnector, StepMetadata, _hidden_states_group
from lmcache_hs_backend.integrations.vllm.protocol import Finish, Step
from tests.support.waiting import wait_until
from tests.vllm.reference import ColdPath
from tests.vllm.worker_rig import LAYERS as RIG_LAYERS
from tests.vllm.worker_rig import Rig

ATTENTION = FullAttentionSpec(block_size=64, num_kv_heads=3, head_size=64, dtype=torch.bfloat16)
HIDDEN = HiddenStateCacheSpec(block_size=16, num_kv_heads=4, head_size=576, dtype=torch.bfloat16)


def caches(*specs: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


def bare() -> Any:
    """A connector whose constructor, which wants a whole configuration of vLLM, has not run."""
    made = HSTieredConnector.__new__(HSTieredConnector)
    made._cache = made._worker = made._tracker = made._connector_metadata = None
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


def test_it_can_follow_the_caches_through_sleep_mode(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    made = bare()
    made.unregister_kv_caches()  # a rank without rows
    made._worker = rig.worker
    assert HSTieredConnector.supports_sleep_mode(SimpleNamespace())
    for name in ("unregister_kv_caches", "restore_kv_caches"):
        if hasattr(KVConnectorBase_V1, name):
            assert getattr(HSTieredConnector, name) is not getattr(KVConnectorBase_V1, name)
    made.unregister_kv_caches()
    made.unregister_kv_caches()
    made.restore_kv_caches()
    rig.start(list(range(32)), [1, 2, 3, 4], wrote=False)
    wait_until(lambda: rig.sink.idle)
    assert rig.sink.figures["not_computed"] == 3
    rig.close()


def test_rows_are_right_in_the_second_model_runners_order_of_calls(tmp_path: Path) -> None:
    """vLLM's own code calls the connector; only the model runner around it, which needs a GPU, is left out."""
    rig = Rig(tmp_path)
    made = bare()
    made._worker, made._layer_name = rig.worker, "cache_only_layers.30"
    calls = ActiveKVConnector.__new__(ActiveKVConnector)
    calls.vllm_config, calls.kv_connector = VllmConfig(), made
    calls._pending_load_kwargs, calls._disabled = None, False
    deferred = "defer_finalize" in inspect.signature(calls.post_forward).parameters
    order: list[str] = []
    for name in ("handle_preemptions", "get_finished", "save_kv_layer", "wait_for_save"):
        plain = getattr(made, name)
        setattr(made, name, lambda *a, plain=plain, name=name, **k: order.append(name) or plain(*a, **k))

    def step(what: Step) -> set[str] | None:
        def drafter() -> None:
            for block, _ in what.written:
                rig.cache[block].normal_()
            made.save_kv_layer(made._layer_name, rig.cache, None)

        calls.pre_forward(
            SimpleNamespace(kv_connector_metadata=StepMetadata(what), has_sync_kv_loads=False, finished_req_ids=set())
        )
        if deferred:
            output = calls.post_forward(set(), defer_finalize=True)
            drafter()
            calls.finalize_step()
        else:
            drafter()
            output = calls.post_forward(set())
        return output.finished_sending

    requests = {"one": (list(range(24)), [1, 2, 3]), "two": (list(range(100, 124)), [4, 5, 6])}
    finished: list[Finish] = []
    for name, (ids, blocks) in requests.items():
        ready, sequence = rig.ready(ids, blocks)
        done = step(Step(tokens=24, ready=ready[:1], finished=finished, written=[(block, True) for block in blocks]))
        assert done == ({finish.req_id for finish in finished} or None)
        finished = [Finish(name, ready[1:], sequence.refs, {"request_id": name}, None)]
    assert step(Step(tokens=0, finished=finished)) == {"two"}
    if deferred:
        assert order[:4] == ["handle_preemptions", "get_finished", "save_kv_layer", "wait_for_save"]
    wait_until(lambda: rig.sink.idle)
    cold = ColdPath(str(tmp_path))
    for ids, blocks in requests.values():
        for layer in RIG_LAYERS:
            assert torch.equal(cold.rows(ids, layer), rig.right(ids, blocks, layer))
    rig.close()


def test_no_step_goes_without_the_drafter_which_writes_the_hidden_states() -> None:
    """vLLM 0.33 skips drafts whose tokens cannot be used, but only for methods with lookahead tokens; ours has none."""
    speculative = SpeculativeConfig.__new__(SpeculativeConfig)  # its constructor wants a model
    speculative.method = "extract_hidden_states"
    lookahead = getattr(VllmConfig, "num_lookahead_tokens", None)
    if lookahead is None:
        pytest.skip("this vLLM never skips drafts")
    assert lookahead.fget(SimpleNamespace(speculative_config=speculative, num_speculative_tokens=1)) == 0
