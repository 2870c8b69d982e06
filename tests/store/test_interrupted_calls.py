"""An exception from outside ends a call at any moment, and leaks nothing: no pin, slot, busy name, lock or wait."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lmcache_hs_backend.chunk import LayerSpec
from lmcache_hs_backend.tiered import TieredStore
from lmcache_hs_backend.tiers.flows.bell import Bell, Latch
from lmcache_hs_backend.tiers.flows.retrieve_chunks import Retrieve
from lmcache_hs_backend.tiers.memory import copies
from lmcache_hs_backend.tiers.memory.copies import SharedCopies
from tests.support.amounts import amount
from tests.support.figures import tell
from tests.support.interrupts import Interrupt, InterruptAt, InterruptedThread, run_interrupted
from tests.support.prompts import HIDDEN, LAYER_BYTES, Prompt, check_balance, honest_rows, opened, tokens
from tests.support.sharing import MODEL
from tests.support.waiting import wait_until

SECONDS = amount("HS_FUZZ_SEC", 20, 100) / 4
LAYERS = (0, 3)
POOL = 40  # chunks of two layers
PROMPTS = [Prompt(tokens(number % 9 + 1, seed=number)) for number in range(24)]
ROWS = [{idx: honest_rows(one.ids, idx) for idx in LAYERS} for one in PROMPTS]


class Caller:
    """Calls everything that a store offers, and compares every row."""

    def __init__(self, store: TieredStore, seed: int) -> None:
        self.store = store
        self.random = random.Random(seed)
        self.calls: Counter[str] = Counter()
        self.rows = 0

    def step(self) -> None:
        store, choose = self.store, self.random
        number = choose.randrange(len(PROMPTS))
        one, layers = PROMPTS[number], choose.choice([(0,), (3,), LAYERS])
        kind = choose.choices(
            [
                "store",
                "retrieve",
                "prefetch",
                "drop",
                "kv_gone",
                "covered",
                "touch",
                "demote",
                "flush",
                "clear",
                "evict",
            ],
            [30, 40, 8, 6, 3, 5, 3, 5, 2, 0.4, 6],
        )[0]
        self.calls[kind] += 1
        if kind == "store":
            store.store(one.refs, one.bytes, {idx: ROWS[number][idx] for idx in layers}, wait_sec=0.05)
        elif kind == "retrieve":
            for idx, found in store.retrieve(one.refs, layers, None).items():
                assert torch.equal(found, ROWS[number][idx][: len(found)]), "a wrong row was served"
                self.rows += len(found)
        elif kind == "prefetch":
            store.prefetch(one.refs)
        elif kind == "drop":
            store.drop(one.names, durable=choose.random() < 0.3)
        elif kind == "kv_gone":
            store.kv_gone(one.names[-2:])
        elif kind == "covered":
            store.covered(one.names, layers)
        elif kind == "touch":
            store.touch(one.names)
        elif kind == "demote":
            store.demote(one.names)
        elif kind == "flush":
            store.flush(0.05)
        elif kind == "clear":
            store.clear()
        else:
            store.debug.evict_clean()


def held(store: TieredStore) -> list[str]:
    """What is held at this moment; what the store does by itself, a write for example, is over soon."""
    chunks = store.debug.chunks().values()
    found = {
        "calls": store.debug.active_calls(), "busy names": len(store.debug.busy()),
        "pins": sum(chunk.pins for chunk in chunks if not chunk.busy),
    }  # fmt: skip
    return [f"{count} {what}" for what, count in found.items() if count]


def what_stays_held(store: TieredStore) -> list[str]:
    """What is still held after ten seconds; returns at once when that is nothing."""
    left: list[str] = []

    def at_rest() -> bool:
        left[:] = held(store)
        return not left

    with contextlib.suppress(AssertionError):
        wait_until(at_rest)
    return left


def check_at_rest(store: TieredStore) -> None:
    """Nothing is held by anybody, all accounts add up, and the whole pool can be used again."""
    wait_until(lambda: not store.debug.active_calls() and not store.debug.busy())
    assert store.flush(20) == 0
    wait_until(lambda: not store.debug.busy())
    assert store.check() == []
    check_balance(store)
    assert not any(chunk.pins or chunk.busy for chunk in store.debug.chunks().values())
    for number, one in enumerate(PROMPTS):
        for idx, found in store.retrieve(one.refs, LAYERS, None).items():
            assert torch.equal(found, ROWS[number][idx][: len(found)]), "a wrong row is kept"
    store.clear()
    assert store.debug.memory().used == 0
    whole = Prompt(tokens(POOL, seed=1000))
    x = {idx: honest_rows(whole.ids, idx) for idx in LAYERS}
    assert store.store(whole.refs, whole.bytes, x) == POOL, "the whole pool is there for the next store"
    for idx, found in store.retrieve(whole.refs, LAYERS, None).items():
        assert torch.equal(found, x[idx])
    assert threading.active_count() < 40


@pytest.mark.parametrize("archive", [False, True], ids=["delete", "archive"])
def test_calls_that_are_interrupted_at_random_leak_nothing(tmp_path: Path, archive: bool) -> None:
    changes = {"on_kv_gone": "archive"} if archive else {}
    with opened(tmp_path, chunks=POOL, layers=len(LAYERS), write_back_sec=0.01, read_timeout_sec=3, **changes) as store:
        callers = [Caller(store, seed) for seed in range(2)]
        threads = [InterruptedThread(caller.step, seed) for seed, caller in enumerate(callers)]
        run_interrupted(threads, SECONDS)
        check_at_rest(store)
        interrupts, calls = sum(t.interrupts for t in threads), sum(sum(c.calls.values()) for c in callers)
        stats = store.stats()
        tell(
            f"interrupted calls: {interrupts} interrupts in {calls} calls, {sum(c.rows for c in callers)} rows right, "
            f"{stats['errors_interrupted']:.0f} transitions mended, {stats['drops_interrupted']:.0f} chunks in doubt"
        )
        assert interrupts > 20
        assert stats["errors_internal"] == 0


def test_calls_that_are_interrupted_at_random_leak_nothing_of_a_shared_tier_either(tmp_path: Path) -> None:
    changes = {"shared_url": f"file://{tmp_path}/bucket", "shared_read_sec": 20.0, "write_back_sec": 0.01}
    with opened(tmp_path / "cold", chunks=POOL, layers=len(LAYERS), ident=MODEL, **changes) as store:
        caller = Caller(store, 9)
        thread = InterruptedThread(caller.step, 9)
        run_interrupted([thread], SECONDS)
        wait_until(lambda: not store.debug.active_calls() and not store.debug.busy())
        assert store.check() == []
        for number, one in enumerate(PROMPTS):
            store.store(one.refs, one.bytes, ROWS[number])
            assert store.flush(20) == 0
        wait_until(lambda: not store.stats()["queue_uploads"], 30)
        store.clear()
        for number, one in enumerate(PROMPTS):
            for idx, found in store.retrieve(one.refs, LAYERS, None).items():
                assert torch.equal(found, ROWS[number][idx][: len(found)]), "a wrong row is kept"
        stats = store.stats()
        tell(f"with a shared tier: {thread.interrupts} interrupts, {stats['shared_hits']:.0f} chunks from the bucket")
        assert stats["shared_hits"]
        assert stats["errors_internal"] == 0
        assert not stats["shared_timeouts"], "no fetch was forgotten on its way"


# -- at every moment of one call ----------------------------------------------------------------------------------

ONE, ITS_ROWS = Prompt(tokens(6, seed=77)), honest_rows(tokens(6, seed=77))


def _stored(store: TieredStore) -> None:
    store.store(ONE.refs, ONE.bytes, {0: ITS_ROWS})
    assert store.covered(ONE.names, [0]) == len(ONE.refs)


def _on_disk(store: TieredStore) -> None:
    _stored(store)
    assert store.flush(10) == 0


def _cold(store: TieredStore) -> None:
    _on_disk(store)
    store.debug.evict_clean()


def _nothing(store: TieredStore) -> None:
    store.drop(ONE.names)


def _full(store: TieredStore) -> None:
    store.drop(ONE.names)
    for number in range(2):
        one = Prompt(tokens(8, seed=200 + number))
        store.store(one.refs, one.bytes, {0: honest_rows(one.ids)})
    assert store.flush(10) == 0


#: What is there before the call, and the call.
CALLS: dict[str, tuple[Callable[[TieredStore], None], Callable[[TieredStore], object]]] = {
    "store": (_nothing, lambda store: store.store(ONE.refs, ONE.bytes, {0: ITS_ROWS})),
    "store into a full pool": (_full, lambda store: store.store(ONE.refs, ONE.bytes, {0: ITS_ROWS})),
    "store what is there": (_stored, lambda store: store.store(ONE.refs, ONE.bytes, {0: ITS_ROWS})),
    "hot retrieve": (_stored, lambda store: store.retrieve(ONE.refs, [0], None)),
    "cold retrieve": (_cold, lambda store: store.retrieve(ONE.refs, [0], None)),
    "prefetch": (_cold, lambda store: store.prefetch(ONE.refs)),
    "drop": (_on_disk, lambda store: store.drop(ONE.names)),
    "kv gone": (_on_disk, lambda store: store.kv_gone(ONE.names)),
    "demote": (_on_disk, lambda store: store.demote(ONE.names)),
    "flush": (_stored, lambda store: store.flush(1)),
    "clear": (_on_disk, lambda store: store.clear()),
}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="says at which moments Python 3.11 looks for exceptions")
@pytest.mark.parametrize("archive", [False, True], ids=["delete", "archive"])
@pytest.mark.parametrize("what", CALLS)
def test_a_call_that_is_interrupted_at_any_moment_leaks_nothing(tmp_path: Path, what: str, archive: bool) -> None:
    prepare, call = CALLS[what]
    changes = {"on_kv_gone": "archive"} if archive else {}
    until = time.monotonic() + (SECONDS / 8 if SECONDS < 25 else 600)
    with opened(tmp_path, chunks=16, read_timeout_sec=5, write_back_sec=0.02, **changes) as store:
        with InterruptAt() as whole:
            prepare(store)
            whole.count = 0
            call(store)
        moments = list(range(1, whole.count + 1))
        if time.monotonic() + 0.02 * len(moments) > until:
            random.Random(len(what)).shuffle(moments)
        tried = 0
        for at in moments:
            prepare(store)
            with InterruptAt(at) as interrupted:
                call(store)
            left = what_stays_held(store)
            assert not left, f"{interrupted.where}: {left}"
            assert store.check() == [], interrupted.where
            assert store.debug.memory().used == store.stats()["hot_bytes"], interrupted.where
            for found in store.retrieve(ONE.refs, [0], None).values():
                assert torch.equal(found, ITS_ROWS[: len(found)]), interrupted.where
            tried += bool(interrupted.where)
            if tried and time.monotonic() > until:  # a late moment may not come: reads come in any order
                break
        stats = store.stats()
        tell(f"{what}: interrupted at {tried} of {whole.count} moments, {stats['errors_interrupted']:.0f} mended")
        assert tried
        assert stats["errors_internal"] == 0


# -- what cannot be given back at once ----------------------------------------------------------------------------


class Source:
    """Rows that something else writes into the slots; the call is interrupted, and again while it waits for that."""

    specs = (LayerSpec(0, "BF16", HIDDEN),)

    def __init__(self, error: BaseException | None = None) -> None:
        self.asked, self.ended = threading.Event(), threading.Event()
        self._first: list[BaseException] = [error or Interrupt()]

    def copy_in(self, moves: object) -> None:
        raise Interrupt

    def settle(self) -> None:
        if self._first:
            raise self._first.pop()
        self.asked.set()
        assert self.ended.wait(20)


def test_slots_that_something_may_still_write_into_come_back_when_it_has_ended(tmp_path: Path) -> None:
    with opened(tmp_path, chunks=6) as store:
        source = Source()
        with pytest.raises(Interrupt):
            store.store_from(ONE.refs, ONE.bytes, source)
        assert source.asked.wait(10)
        assert store.debug.memory().used == 6 * LAYER_BYTES
        assert store.store(ONE.refs, ONE.bytes, {0: ITS_ROWS}, wait_sec=0) == 0
        source.ended.set()
        wait_until(lambda: not store.debug.active_calls())
        assert store.store(ONE.refs, ONE.bytes, {0: ITS_ROWS}) == 6


def test_slots_of_which_nobody_can_say_that_are_never_used_again_and_a_close_does_not_wait(tmp_path: Path) -> None:
    with opened(tmp_path, chunks=6, close_timeout_sec=20) as store:
        with pytest.raises(ConnectionError):
            store.store_from(ONE.refs, ONE.bytes, Source(ConnectionAbortedError()))
        store.debug.run_chores()
        assert store.debug.memory().used == 6 * LAYER_BYTES
        assert store.check() == []
        started = time.monotonic()
    assert time.monotonic() - started < 10


def test_a_call_that_is_interrupted_while_it_gives_back_is_ended_by_the_next_chores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as store:
        _stored(store)

        def interrupted(*_: object) -> None:
            raise Interrupt

        monkeypatch.setattr(Retrieve, "_end", interrupted)
        with pytest.raises(Interrupt):
            store.retrieve(ONE.refs, [0])
        monkeypatch.undo()
        wait_until(lambda: not store.debug.active_calls())
        assert not any(chunk.pins for chunk in store.debug.chunks().values())
        assert torch.equal(store.retrieve(ONE.refs, [0], None)[0], ITS_ROWS)


def test_a_shared_copy_is_at_rest_when_its_caller_has_left_and_nobody_has_a_piece_in_hand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, go = threading.Event(), threading.Event()

    def slow(piece: object) -> None:
        begun.set()
        assert go.wait(20)

    monkeypatch.setattr(copies, "copy_all", slow)
    shared = SharedCopies([[], [], []])
    with shared.running:
        helper = threading.Thread(target=shared.help)
        helper.start()
        assert begun.wait(10)
        assert not shared.at_rest(), "the caller is there"
    assert not shared.at_rest(), "a thread has a piece in hand"
    go.set()
    helper.join()
    assert shared.at_rest()


# -- waiting ------------------------------------------------------------------------------------------------------


def test_whoever_waits_for_a_bell_is_woken_and_leaves_nothing() -> None:
    bell, latch = Bell(), Latch()
    assert bell.wait_for(lambda: True, 0.0)
    assert not bell.wait_for(lambda: False, time.monotonic() + 0.01)
    assert not bell._tickets
    ticket = bell.ticket()
    bell.ring()
    bell.wait(ticket, 20)
    assert not latch.wait(0.01)
    waiting = threading.Thread(target=latch.wait, args=(20,))
    waiting.start()
    latch.set()
    waiting.join(10)
    assert not waiting.is_alive()
    assert latch.wait(0)


def test_a_thread_that_is_interrupted_while_it_waits_stops_no_other() -> None:
    latch = Latch()
    thread = InterruptedThread(lambda: latch.wait(0.01), seed=3, longest_sec=0.002)
    run_interrupted([thread], 0.5)
    assert thread.interrupts
    waiting = threading.Thread(target=latch.wait, args=(20,))
    waiting.start()
    latch.set()
    waiting.join(10)
    assert not waiting.is_alive()
