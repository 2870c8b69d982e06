"""The whole API in any order, with restarts, lost KV, damaged files, failing disks and clock steps.

Checked against a simple model: rows are a function of the tokens, so whatever is returned can be judged; and
as long as nothing was dropped, damaged or refused, what was stored must be there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmcache_hs_backend.chunk import Presence
from lmcache_hs_backend.tiered import TieredStore
from lmcache_hs_backend.tiers.state import orders
from tests.support.disks import INJECTED, FaultyDisk
from tests.support.prompts import CHUNK, IDENT, LAYER_BYTES, Prompt, check_balance, honest_rows
from tests.support.prompts import settings as store_settings
from tests.support.waiting import wait_until

LAYERS = (-1, 0, 7)

# Prompts that share prefixes: each is a path through a small tree of chunks.
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=5)
LAYER_SETS = st.lists(st.sampled_from(LAYERS), min_size=1, max_size=3, unique=True)


def prompt_of(path: Sequence[int]) -> Prompt:
    return Prompt([1000 * branch + token for branch in path for token in range(CHUNK)])


class Clock:
    """The time module with a wall clock that somebody has set."""

    def __init__(self) -> None:
        self.step_ns = 0
        self.monotonic = time.monotonic

    def time_ns(self) -> int:
        return time.time_ns() + self.step_ns


class TwoTiers(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="hs-state-"))
        self.disk = FaultyDisk()
        self.clock = Clock()
        orders.time = self.clock  # type: ignore[assignment]
        self.kv: dict[object, Presence] = {}
        self.sure: set[tuple[bytes, int]] = set()  # (chunk, layer) that must be there
        self.damaged: set[str] = set()
        self.open()

    def open(self) -> None:
        config = store_settings(
            self.root, clean_fraction=0.25, write_back_sec=0.2, store_wait_ms=2000, close_timeout_sec=5
        )
        self.store = TieredStore(config, 6 * LAYER_BYTES, IDENT, ask=self.ask, files=self.disk)
        assert self.store.wait_recovered(20)

    def ask(self, keys: Sequence[object], memory_only: bool) -> list[Presence]:
        return [self.kv.get(key, Presence.PRESENT) for key in keys]

    @initialize()
    def start(self) -> None:
        pass

    @rule(path=PATHS, layers=LAYER_SETS, skip=st.integers(0, 2))
    def store_rows(self, path: list[int], layers: list[int], skip: int) -> None:
        p = prompt_of(path)
        offset = min(skip * CHUNK, len(p))
        x = {idx: honest_rows(p.ids, idx)[offset:] for idx in layers}
        stored = self.store.store(p.refs, p.bytes, x, offset)
        assert 0 <= stored <= len(p.refs)
        if not self.disk.errors:
            before = self.store.stats()
            if before["drops_no_room"] == 0:
                self.sure |= {(ref.name, idx) for ref in p.refs if ref.start >= offset for idx in layers}

    @rule(path=PATHS, layers=LAYER_SETS, native=st.booleans())
    def retrieve_rows(self, path: list[int], layers: list[int], native: bool) -> None:
        p = prompt_of(path)
        out = self.store.retrieve(p.refs, layers, None if native else torch.float32)
        tokens = len(next(iter(out.values()))) if out else 0
        for idx, tensor in out.items():
            assert tensor.shape[0] == tokens
            assert torch.equal(tensor.float(), honest_rows(p.ids, idx)[:tokens].float())
        absent = [self.kv.get(ref.kv_key, Presence.PRESENT) is not Presence.PRESENT for ref in p.refs]
        if True in absent:
            assert tokens <= absent.index(True) * CHUNK, "nothing is served beyond the KV"
        if not self.disk.errors and self.store.stats()["cold_state"] != "offline":
            certain = 0
            for ref, gone in zip(p.refs, absent, strict=True):
                if gone or not all((ref.name, idx) in self.sure for idx in layers):
                    break
                certain += CHUNK
            assert tokens >= certain, "what nobody has taken away is there"
        for ref in p.refs:
            if self.kv.get(ref.kv_key) is Presence.GONE:
                self.sure -= {(ref.name, idx) for idx in LAYERS}

    @rule(path=PATHS, layers=st.none() | LAYER_SETS)
    def prefetch(self, path: list[int], layers: list[int] | None) -> None:
        self.store.prefetch(prompt_of(path).refs, layers)

    @rule(path=PATHS, layers=LAYER_SETS)
    def coverage(self, path: list[int], layers: list[int]) -> None:
        p = prompt_of(path)
        assert 0 <= self.store.covered(p.names, layers) <= len(p.refs)

    @rule(path=PATHS)
    def drop(self, path: list[int]) -> None:
        name = prompt_of(path).names[-1]
        self.store.drop([name])
        assert not any(self.store.has(name, idx) != (False, False) for idx in LAYERS)
        self.sure -= {(name, idx) for idx in LAYERS}

    @rule(path=PATHS, answer=st.sampled_from(Presence))
    def kv_changes(self, path: list[int], answer: Presence) -> None:
        ref = prompt_of(path).refs[-1]
        self.kv[ref.kv_key] = answer
        if answer is Presence.GONE:  # the idle pass or the cleaner may find it at any time
            self.sure -= {(ref.name, idx) for idx in LAYERS}

    @rule()
    def flush(self) -> None:
        left = self.store.flush(5)
        if not self.disk.errors and self.store.stats()["cold_state"] == "online":
            assert left == 0

    @rule()
    def clear(self) -> None:
        self.store.clear()
        assert len(self.store) == 0
        self.sure.clear()

    @rule(hours=st.sampled_from([-48, -1, 1, 48]))
    def set_the_clock(self, hours: int) -> None:
        self.clock.step_ns += hours * 3600 * 10**9

    @rule(
        path=PATHS,
        layer_idx=st.sampled_from(LAYERS),
        tiers=st.sampled_from([(True, True), (True, False), (False, True)]),
    )
    def read_one_layer(self, path: list[int], layer_idx: int, tiers: tuple[bool, bool]) -> None:
        p = prompt_of(path)
        got = self.store.read_layer(p.names[-1], layer_idx, p.refs[-1].kv_key, tiers=tiers)
        if got is not None:
            assert torch.equal(got, honest_rows(p.ids, layer_idx)[-CHUNK:])

    @rule(path=PATHS, layer_idx=st.sampled_from(LAYERS))
    def add_one_layer(self, path: list[int], layer_idx: int) -> None:
        p = prompt_of(path)
        self.store.add_layer(p.names[-1], layer_idx, honest_rows(p.ids, layer_idx)[-CHUNK:], p.refs[-1].kv_key)

    @rule(
        call=st.sampled_from(["pwritev", "preadv", "rename", "unlink", "open"]),
        code=st.sampled_from([errno.EIO, errno.EROFS, errno.ENOSPC]),
    )
    def break_the_disk(self, call: str, code: int) -> None:
        self.disk.errors[call] = code
        self.sure.clear()

    @rule(size=st.sampled_from([0, 1000]))
    def move_only_so_many_bytes_at_a_time(self, size: int) -> None:
        self.disk.short = size

    @precondition(lambda self: self.disk.errors)
    @rule()
    def mend_the_disk(self) -> None:
        self.disk.errors.clear()
        wait_until(lambda: self.store.stats()["cold_state"] == "online", 40)
        self.sure.clear()

    @rule(
        pick=st.integers(0, 1000), how=st.sampled_from(["cut", "deleted", "flipped bit", "another's rows", "directory"])
    )
    def damage_a_file(self, pick: int, how: str) -> None:
        files = sorted(self.root.glob("*/??/*.safetensors"))
        if not files:
            return
        path, other = files[pick % len(files)], files[(pick + 1) % len(files)]
        INJECTED[f"state machine: {how}"] += 1
        self.damaged.add(path.stem)
        self.sure = {(name, idx) for name, idx in self.sure if name.hex() != path.stem}
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # it has left meanwhile, or is damaged enough
            if how == "cut":
                os.truncate(path, path.stat().st_size // 2)
            elif how == "flipped bit":
                with path.open("r+b") as file:
                    file.seek(pick % path.stat().st_size)
                    old = file.read(1)[0]
                    file.seek(-1, os.SEEK_CUR)
                    file.write(bytes([old ^ 1 << pick % 8]))
            elif how == "another's rows":
                shutil.copy(other, self.root / "copy")
                os.replace(self.root / "copy", path)
            else:
                path.unlink()
                if how == "directory":
                    path.mkdir()

    @precondition(lambda self: not self.disk.errors)
    @rule()
    def restart(self) -> None:
        self.store.close()
        assert self.store.stats()["drops_close"] == 0
        self.open()

    @invariant()
    def memory_stays_inside_the_pool(self) -> None:
        assert self.store.stats()["hot_bytes"] <= 6 * LAYER_BYTES

    def teardown(self) -> None:
        self.disk.errors.clear()
        try:
            wait_until(lambda: self.store.stats()["cold_state"] == "online", 40)
            self.store.flush(10)
            wait_until(lambda: not self.store.debug.busy())
            wait_until(lambda: not self.store.debug.undeleted())
            wait_until(lambda: not self.store.debug.busy())
            check_balance(self.store, self.damaged)
            known = {name.hex() for name, chunk in self.store.debug.chunks().items() if chunk.file != "absent"}
            uncounted = {path.stem for path in self.root.glob("*/??/*.safetensors")} - known - self.damaged
            assert not uncounted, "every file is in the accounts"
            assert self.store.stats()["errors_internal"] == 0
        finally:
            self.store.close()
            orders.time = time
            shutil.rmtree(self.root)


TwoTiers.TestCase.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
class TestTwoTiers(TwoTiers.TestCase):  # type: ignore[valid-type]
    """Any order of operations."""
