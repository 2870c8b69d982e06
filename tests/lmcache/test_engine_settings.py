"""Wrong settings: one error that says which, LMCache's own store stays, and the engine works."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
import torch

from lmcache_hs_backend import TieredHiddenStateStore
from lmcache_hs_backend.config import ConfigError
from tests.support.engines import (
    CHUNK,
    ChunkedTokenDatabase,
    Engine,
    HiddenStateStore,
    logged,
    make_config,
    make_metadata,
    our_threads,
    rows_of,
    tokens_of,
)

pytestmark = pytest.mark.engine

TOKENS, ROWS = tokens_of(3), rows_of(3 * CHUNK)

#: setting → value → what the error must say besides the setting and the value
WRONG: list[tuple[str, Any, str]] = [
    ("max_cold_size", 0, "a number above 0"),
    ("max_cold_size", -1, "a number above 0"),
    ("max_cold_size", "lots", "a number above 0"),
    ("max_cold_size", float("nan"), "a number above 0"),
    ("max_cold_size", float("inf"), "a number above 0"),
    ("max_cold_size", None, "a number above 0"),
    ("max_cold_size", [20], "a number above 0"),
    ("max_cold_size", True, "a number above 0"),
    ("max_cold_size", 10**9, "the size in GB of the filesystem"),
    ("min_free_disk", -0.5, "a number at least 0"),
    ("min_free_disk", "nan", "a number at least 0"),
    ("io_threads", 0, "a whole number at least 1 and at most 64"),
    ("io_threads", 2.5, "a whole number at least 1 and at most 64"),
    ("io_threads", 1000, "a whole number at least 1 and at most 64"),
    ("io_threads", "four", "a whole number at least 1 and at most 64"),
    ("clean_fraction", 1.5, "a number at least 0 and at most 1"),
    ("write_back_sec", "soon", "a number at least 0"),
    ("store_wait_ms", -1, "a number at least 0"),
    ("read_timeout_sec", 0, "a number above 0"),
    ("kv_presence_timeout_ms", 0, "a number above 0"),
    ("close_timeout_sec", -1, "a number at least 0"),
    ("use_odirect", "maybe", "'auto' or 'on' or 'off'"),
    ("on_kv_gone", "keep", "'delete' or 'archive'"),
    ("store_count", "all", "'held' or 'new'"),
    ("on_locked", "wait", "'subdir' or 'error'"),
    ("promote", "yes please", "true or false"),
    ("fsync", 2, "true or false"),
    ("verify_reads", None, "true or false"),
    ("cold_dir_mode", "0900", "an octal mode"),
    ("cold_dir_mode", "0070", "an octal mode"),
    ("model_revision", {"a": 1}, "a text"),
    ("cold_path", "", "the path of a directory"),
    ("cold_path", 7, "the path of a directory"),
    ("cold_path", None, "the path of a directory"),
    ("require_cold", "perhaps", "true or false"),
]
UNUSABLE = ["/proc/hidden-states", "/dev/null", "/dev/null/below"]


def errors_at_start(start, **changes: Any) -> tuple[Engine, list[str]]:
    with logged("lmcache.v1.storage_backend", logging.ERROR) as messages:
        engine = start(**changes)
    return engine, messages


def works_without_us(engine: Engine) -> None:
    assert isinstance(engine.store, HiddenStateStore)
    assert "hs_tiered" not in engine.manager.storage_backends
    engine.store_kv(TOKENS)
    assert engine.engine.lookup(TOKENS) == 3 * CHUNK
    assert engine.store.store_hidden_states(TOKENS, ROWS) == 3
    assert torch.equal(engine.retrieve(TOKENS), ROWS.float())
    assert not our_threads()


@pytest.mark.parametrize(("setting", "value", "allowed"), WRONG)
def test_a_wrong_value_is_one_error_that_says_what_is_allowed(start, tmp_path, setting, value, allowed):
    engine, messages = errors_at_start(start, settings={setting: value})
    assert len(messages) == 1
    key = f"extra_config['storage_plugin.hs_tiered.{setting}']"
    assert key in messages[0]
    assert allowed in messages[0]
    assert (f"{value:g}" if setting == "max_cold_size" and value == 10**9 else repr(value)) in messages[0]
    works_without_us(engine)


@pytest.mark.parametrize("path", UNUSABLE)
def test_a_cold_path_that_cannot_be_used_is_an_error_where_it_is_required(start, path):
    engine, messages = errors_at_start(start, settings={"cold_path": path, "require_cold": True})
    assert len(messages) == 1
    assert "extra_config['storage_plugin.hs_tiered.cold_path']" in messages[0]
    assert "a directory that user" in messages[0]
    assert repr(path) in messages[0]
    works_without_us(engine)


@pytest.mark.parametrize("path", UNUSABLE)
def test_with_a_cold_path_that_cannot_be_used_rows_stay_in_ram(start, path):
    package = "lmcache_hs_backend"
    health, backend = f"{package}.tiers.disk.health", f"{package}.integrations.lmcache.backend"
    with logged(health, logging.WARNING) as warnings, logged(backend) as messages:
        engine, errors = errors_at_start(start, settings={"cold_path": path})
    assert not errors
    (warning,) = warnings
    assert "is offline" in warning
    assert f"extra_config['storage_plugin.hs_tiered.cold_path'] is {path!r}" in warning
    assert "a directory that user" in warning
    (loaded,) = [text for text in messages if text.startswith("hs_tiered loaded")]
    assert "(offline, " in loaded
    assert engine.store.stats()["cold_state"] == "offline"
    engine.store_both(TOKENS, ROWS)
    assert torch.equal(engine.retrieve(TOKENS), ROWS.float())


def test_a_cold_path_that_can_be_used_later_is_used_then_and_what_it_holds_is_served(start, cold_path):
    first = start()
    first.store_both(TOKENS, ROWS)
    first.close()
    aside = cold_path.rename(cold_path.with_name("aside"))
    cold_path.write_text("precious")
    engine = start()
    assert isinstance(engine.store, TieredHiddenStateStore)
    assert engine.store.stats()["cold_state"] == "offline"
    others = tokens_of(2, seed=7)
    engine.store_both(others, rows_of(2 * CHUNK, seed=7))
    engine.store_kv(TOKENS)
    assert engine.served(TOKENS) == 0
    assert cold_path.read_text() == "precious"
    cold_path.unlink()
    aside.rename(cold_path)
    engine.wait(lambda: engine.store.tiers.wait_recovered(0))
    assert torch.equal(engine.retrieve(TOKENS), ROWS.float())
    assert engine.store.flush(10) == 0
    assert len(engine.files) == 5


def test_a_cold_path_that_is_a_file_is_an_error_and_the_file_stays(start, tmp_path):
    file = tmp_path / "file"
    file.write_text("precious")
    engine, messages = errors_at_start(start, path=file, settings={"require_cold": True})
    assert len(messages) == 1
    assert "extra_config['storage_plugin.hs_tiered.cold_path']" in messages[0]
    assert repr(str(file)) in messages[0]
    works_without_us(engine)
    assert file.read_text() == "precious"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cold_path_that_is_not_writable_is_an_error(start, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    engine, messages = errors_at_start(start, path=tmp_path / "locked", settings={"require_cold": True})
    assert len(messages) == 1
    assert "cold_path" in messages[0]
    works_without_us(engine)


@pytest.mark.parametrize(
    ("given", "meant"), [("max_cold_sise", "max_cold_size"), ("coldpath", "cold_path"), ("on_kv_lost", "on_kv_gone")]
)
def test_an_unknown_key_is_an_error_that_names_the_nearest(start, given, meant):
    engine, messages = errors_at_start(start, settings={given: 1})
    assert len(messages) == 1
    assert f"extra_config['storage_plugin.hs_tiered.{given}'] is not a setting" in messages[0]
    assert f"the nearest one is extra_config['storage_plugin.hs_tiered.{meant}']" in messages[0]
    works_without_us(engine)


def test_the_error_names_the_plugin_as_the_user_did(start):
    engine, messages = errors_at_start(start, plugin="my_rows", settings={"io_threads": 0})
    assert len(messages) == 1
    assert "extra_config['storage_plugin.my_rows.io_threads'] is 0" in messages[0]
    works_without_us(engine)


def test_a_namespace_that_is_held_is_an_error_where_that_is_asked_for(start):
    first = start(settings={"on_locked": "error"})
    with logged("lmcache.v1.storage_backend", logging.ERROR) as messages:
        second = start(settings={"on_locked": "error"})
    assert len(messages) == 1
    assert "extra_config['storage_plugin.hs_tiered.cold_path']" in messages[0]
    assert first.store.tiers.directory in messages[0]
    assert "subdir" in messages[0]
    assert isinstance(second.store, HiddenStateStore)
    first.store_both(TOKENS, ROWS)
    assert first.served(TOKENS) == 3 * CHUNK
    first.close()
    third = start(settings={"on_locked": "error"})
    assert third.store.tiers.directory == first.store.tiers.directory


@pytest.mark.parametrize("value", [10**9, "/dev/null"])
def test_a_failed_start_holds_nothing_that_the_next_one_needs(start, cold_path, value):
    setting = "max_cold_size" if isinstance(value, int) else "cold_path"
    failed, messages = errors_at_start(start, settings={setting: value, "require_cold": True})
    assert messages
    works_without_us(failed)
    engine = start(settings={"on_locked": "error"})
    engine.store_both(TOKENS, ROWS)
    assert engine.served(TOKENS) == 3 * CHUNK


@pytest.mark.parametrize("size", [0, -1, "big", float("nan")])
def test_a_hot_tier_without_a_size_is_an_error(cold_path, size):
    config = make_config(cold_path, max_hidden_state_cpu_size=size)
    with pytest.raises(ConfigError, match=r"max_hidden_state_cpu_size is .* must be a number above 0"):
        TieredHiddenStateStore(config, ChunkedTokenDatabase(config, make_metadata()))
    assert not cold_path.exists()
    assert not our_threads()


def test_values_may_be_text_as_the_environment_gives_them(start):
    settings = {
        "max_cold_size": "0.5",
        "io_threads": "2",
        "promote": "False",
        "fsync": "1",
        "cold_dir_mode": "0750",
        "on_kv_gone": "archive",
        "use_odirect": False,
    }
    config = start(settings=settings).store.tiers.config
    assert (config.max_cold_size, config.io_threads, config.promote, config.fsync) == (0.5, 2, False, True)
    assert (config.cold_dir_mode, config.on_kv_gone, config.use_odirect) == (0o750, "archive", "off")


def test_every_directory_that_is_created_gets_the_mode(start, cold_path):
    engine = start(settings={"cold_dir_mode": "0750"})
    engine.store_both(TOKENS, ROWS)
    assert engine.store.flush(10) == 0
    namespace = engine.files[0].parent.parent
    made = [cold_path, namespace, *(file.parent for file in engine.files)]
    assert {str(path): oct(path.stat().st_mode & 0o777) for path in made} == {str(path): "0o750" for path in made}


def test_a_home_directory_is_expanded(start, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    engine = start(path="~/rows")
    assert engine.store.tiers.directory.startswith(str(tmp_path / "rows"))
