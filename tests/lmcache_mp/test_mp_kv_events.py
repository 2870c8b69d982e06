"""What is remembered of KV, from the events of LMCache's managers."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lmcache")

from lmcache.v1.distributed.api import ObjectKey

from lmcache_hs_backend.integrations.lmcache_mp import kv_events
from lmcache_hs_backend.integrations.lmcache_mp.kv_events import KvEvents
from tests.support.waiting import wait_until

pytestmark = pytest.mark.engine


class Manager:
    """Listeners, as LMCache's storage manager takes them; it has one L2 adapter."""

    def __init__(self) -> None:
        self._l1_manager = self
        self._l2_adapters = [object()]
        self.l1: Any = None
        self.l2: Any = None

    def register_listener(self, listener: Any) -> None:
        self.l1 = listener

    def register_l2_listener(self, listener: Any) -> None:
        self.l2 = listener


def key(number: int) -> ObjectKey:
    return ObjectKey(number.to_bytes(8, "big"), "model", 0)


def test_of_more_kv_in_l2_than_can_be_remembered_the_oldest_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "_MOST_PLACES", 100)
    manager, gone = Manager(), set[bytes]()
    events = KvEvents(manager, lambda chunks: gone.update(chunk_hash for _, chunk_hash, _ in chunks))
    for number in range(300):
        manager.l1.on_l1_keys_write_finished([key(number)])
        manager.l2.on_l2_keys_stored([key(number)], [1])
        manager.l1.on_l1_keys_deleted_by_manager([key(number)])
    manager.l2.on_l2_keys_deleted([key(0), key(299)])
    wait_until(lambda: bool(gone))
    assert gone == {key(299).chunk_hash}, "whether anything else holds the first is not known any more"
    assert len(events._places) <= 100
    events.close()
