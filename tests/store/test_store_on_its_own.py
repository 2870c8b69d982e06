"""``TieredStore.open`` and ``prompt``: the store without LMCache and without vLLM, as a stranger uses it first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_hs_backend import ColdTierReader, TieredStore
from lmcache_hs_backend.config import ConfigError
from lmcache_hs_backend.integrations.vllm.naming import KeyFormat
from lmcache_hs_backend.integrations.vllm.scheduler_side.sequence import ChunkedSequence

SETTINGS: dict[str, Any] = {"hot_size": 0.01, "max_cold_size": 1, "min_free_disk": 0}


def some_rows(num_tokens: int) -> torch.Tensor:
    return torch.randn(num_tokens, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


def test_rows_come_back_also_after_a_restart_and_for_a_prefix(tmp_path: Path) -> None:
    ids, rows = list(range(1000)), some_rows(1000)
    with TieredStore.open(tmp_path, model="org/model", **SETTINGS) as store:
        assert store.store(*store.prompt(ids), {0: rows, -1: rows * 2}) == 4
        assert store.retrieve(store.prompt(ids).refs, [0])[0].equal(rows.float())
    with TieredStore.open(tmp_path, model="org/model", **SETTINGS) as store:
        found = store.retrieve(store.prompt(torch.tensor([*ids[:600], 7, 7])).refs, [0, -1], None)
        assert found[0].equal(rows[:512])
        assert found[-1].equal(rows[:512] * 2)
        assert store.retrieve(store.prompt([5, *ids]).refs, [0]) == {}
        assert store.stats()["hits_cold"] == 2


def test_without_a_tail_only_full_chunks_are_named(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path, model="m", chunk_size=100, **SETTINGS) as store:
        assert [ref.num_tokens for ref in store.prompt(range(250)).refs] == [100, 100, 50]
        assert [ref.num_tokens for ref in store.prompt(range(250), tail=False).refs] == [100, 100]
        assert store.prompt([]).refs == []


def test_another_model_or_revision_shares_nothing(tmp_path: Path) -> None:
    ids, rows = list(range(300)), some_rows(300)
    with TieredStore.open(tmp_path, model="a", **SETTINGS) as store:
        store.store(*store.prompt(ids), {0: rows})
    for other in ({"model": "b"}, {"model": "a", "model_revision": "2"}):
        with TieredStore.open(tmp_path, **other, **SETTINGS) as store:
            assert store.retrieve(store.prompt(ids).refs, [0]) == {}


def test_chunks_have_the_names_that_the_vllm_connector_gives_them(tmp_path: Path) -> None:
    ids = list(range(70))
    sequence = ChunkedSequence(KeyFormat("org/model", "bfloat16"), 32)
    sequence.close(ids, len(ids))
    with TieredStore.open(tmp_path, model="org/model", chunk_size=32, **SETTINGS) as store:
        assert store.prompt(ids).refs == sequence.refs


def test_what_is_known_of_the_rows_is_in_every_file(tmp_path: Path) -> None:
    capture = {"layer_ids": "vllm", "num_layers": 30, "last_layer": "pre-norm"}
    with TieredStore.open(tmp_path, model="m", capture=capture, **SETTINGS) as store:
        store.store(*store.prompt(range(10)), {0: some_rows(10)})
    (chunk,) = ColdTierReader(str(tmp_path)).chunks()
    assert chunk.header is not None
    assert json.loads(chunk.header.meta.capture) == capture


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hot_size": 0}, r"^hot_size is 0, but must be a number above 0$"),
        ({"hot_sise": 1}, r"^hot_sise is not a setting; the nearest one is hot_size$"),
        ({"chunk_size": 2.5}, r"^chunk_size is 2.5, but must be a whole number"),
        ({"max_cold_size": "many"}, r"^max_cold_size is 'many', but must be a number above 0$"),
        ({"max_cold_size": 10**9}, r"^max_cold_size is 1e\+09, but must be at most .*the size in GB of the filesystem"),
    ],
)
def test_a_wrong_setting_is_named_and_leaves_nothing_locked(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        TieredStore.open(tmp_path, model="m", **(SETTINGS | changes))
    with TieredStore.open(tmp_path, model="m", **SETTINGS, on_locked="error") as store:
        assert len(store) == 0
