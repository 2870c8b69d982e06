"""What is known about every chunk: one ``Entry`` each, its state, and the orders it stands in.

The index is the one mutable picture of both tiers. The store's lock guards all of it; nothing here
blocks, does I/O, copies rows or calls out. Every operation takes constant time per chunk.

States of an entry (``standing``), and who moves it on:

==============  ==============================================================  =====================
standing        meaning                                                         leaves it by
==============  ==============================================================  =====================
UNREAD          a file found at start, its header not read yet: only counted    ``header_known``, ``adopt``
UNCONFIRMED     its KV has not been seen present in this process: kept, hidden  ``confirm``
CONFIRMED       its KV has been seen: served, and deleted when the KV is gone   ``remove``, as do the others
GONE            no longer in the index: leases and file operations wind down    never
==============  ==============================================================  =====================

Residency is per layer and is not stored twice: a layer is *hot* when it has a slot, *cold* when the
file has it, *dirty* when it is hot and the file does not have it.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from lmcache_hs_backend.chunk import LayerSpec
from lmcache_hs_backend.format.header import Description, FileLayout
from lmcache_hs_backend.format.pages import align

_SIDE_BY_SIDE = 16


class Standing(Enum):
    """See the table above."""

    UNREAD = "unread"
    UNCONFIRMED = "unconfirmed"
    CONFIRMED = "confirmed"
    GONE = "gone"

    __hash__ = object.__hash__  # Enum's is Python code, and they are counted for every chunk


#: The members by themselves, for what is done for every chunk: up to Python 3.11 ``Standing.GONE`` takes 80 ns.
UNREAD, UNCONFIRMED, CONFIRMED, GONE = Standing


class Slot(NamedTuple):
    """A layer of a chunk in the hot tier: where it lies and what it is. ``nbytes`` is what it occupies."""

    offset: int
    nbytes: int
    spec: LayerSpec


def slot_bytes(spec: LayerSpec, num_tokens: int) -> int:
    """Bytes of the hot tier that one layer of a chunk occupies."""
    return align(spec.nbytes(num_tokens))


@dataclass(slots=True, eq=False)
class Entry:
    """One chunk. Only ``Index`` and the holder of the store's lock change it."""

    name: bytes
    standing: Standing
    prefix: bytes = b""
    num_tokens: int = 0
    kv_key: Any = None
    hot: dict[int, Slot] = field(default_factory=dict)
    filed: FileLayout | None = None
    file_bytes: int = 0
    digests: bytes = b""  # of the file that ``filed`` describes; empty when it is not known
    # What the writer needs beyond the rows; kept while there are rows in RAM.
    described: Description | None = None
    # Recovered layers that no store has been answered for yet (see Intake.store).
    uncounted: frozenset[int] = frozenset()
    leases: int = 0  # users of the slots: readers, writers
    claimed: bool = False  # a write of this chunk is under way
    refused: str = ""  # why the disk does not keep it, a reason of metrics.DROPS; it may leave RAM unwritten
    seen_ns: int = 0  # when its KV was last seen present (monotonic)
    used_ns: int = 0
    saved_ns: int = 0  # the use that the file's mtime tells
    dirty_since: float = 0.0
    stored_at: float = 0.0  # when a layer was last added
    # How the index has counted this entry so far.
    counted_hot: bool = False
    counted_dirty: bool = False
    counted_clean_bytes: int = 0
    held_clean_bytes: int = 0  # what it counted for before a lease took it out of the clean ones

    def has(self, layer_idx: int) -> bool:
        """Whether either tier holds the layer."""
        return layer_idx in self.hot or self.on_file(layer_idx)

    def on_file(self, layer_idx: int) -> bool:
        return self.filed is not None and self.filed.spec(layer_idx) is not None

    def spec(self, layer_idx: int) -> LayerSpec | None:
        slot = self.hot.get(layer_idx)
        if slot is not None:
            return slot.spec
        return None if self.filed is None else self.filed.spec(layer_idx)

    def specs(self, layer_idxs: Iterable[int]) -> list[LayerSpec]:
        """Of those layers that either tier holds."""
        return [spec for layer_idx in layer_idxs if (spec := self.spec(layer_idx)) is not None]

    def layer_idxs(self) -> set[int]:
        filed = {spec.layer_idx for spec in self.filed.layers} if self.filed else set()
        return filed | self.hot.keys()

    @property
    def gone(self) -> bool:
        return self.standing is GONE

    @property
    def unread(self) -> bool:
        """Whether it has a file that nobody has looked into yet."""
        return self.filed is None and self.file_bytes > 0

    @property
    def dirty(self) -> bool:
        filed = self.filed
        if filed is None:
            return bool(self.hot)
        return any(filed.spec(layer_idx) is None for layer_idx in self.hot)

    @property
    def hot_bytes(self) -> int:
        return sum(slot.nbytes for slot in self.hot.values())


class Index:
    """All entries, by name, and the orders in which they leave a tier.

    ``clean``: may leave RAM at once (hot, nothing to write, nobody reading), least recently used first.
    ``dirty``: must be written first, least recently used first. ``aging``: the same chunks by how long
    they have been dirty. ``cold``: chunks with a file, least recently used first.
    """

    def __init__(self) -> None:
        self.entries: OrderedDict[bytes, Entry] = OrderedDict()  # in no useful order: see in_turn
        self.clean: OrderedDict[bytes, Entry] = OrderedDict()
        self.dirty: OrderedDict[bytes, Entry] = OrderedDict()
        self.aging: OrderedDict[bytes, Entry] = OrderedDict()
        self.cold: OrderedDict[bytes, Entry] = OrderedDict()
        self.standings: Counter[Standing] = Counter()
        self.clean_bytes = 0
        self.hot_chunks = 0
        self.dirty_chunks = 0
        self._used_early: list[Entry] = []  # see date
        self._layouts: dict[FileLayout, FileLayout] = {}
        self._last_ns = 0

    def get(self, name: bytes) -> Entry | None:
        return self.entries.get(name)

    def add(self, entry: Entry) -> None:
        """A new chunk, youngest of all."""
        self.entries[entry.name] = entry
        self.standings[entry.standing] += 1
        entry.used_ns = self.tick()
        self.settle(entry)

    def add_found(self, name: bytes, file_bytes: int) -> None:
        """A new chunk of which no more is known than that it has a file, oldest of all until ``date`` is called."""
        self.entries[name] = self.cold[name] = Entry(name, Standing.UNREAD, file_bytes=file_bytes)
        self.standings[Standing.UNREAD] += 1

    def date(self, entry: Entry, used_ns: int) -> None:
        """When a found chunk was last used, said of all of them in that order. A use since then counts more."""
        entry.saved_ns = used_ns
        if entry.used_ns:
            self._used_early.append(entry)
        else:
            entry.used_ns = used_ns
        self.cold.move_to_end(entry.name)

    def all_dated(self) -> None:
        """That was the last of them: those that were used before they had a date are the youngest."""
        used, self._used_early = self._used_early, []
        for entry in sorted(used, key=lambda entry: entry.used_ns):
            if entry.name in self.cold:
                self.cold.move_to_end(entry.name)

    def remove(self, entry: Entry) -> None:
        """The chunk is GONE: out of the index and of every order. Its slots and file stay to be freed."""
        if self.entries.get(entry.name) is entry:
            del self.entries[entry.name]
            self.stand(entry, Standing.GONE)
            self.settle(entry)

    def stand(self, entry: Entry, standing: Standing) -> None:
        """Change an entry's standing; the only place that does."""
        self.standings[entry.standing] -= 1
        self.standings[standing] += 1
        entry.standing = standing

    def hold(self, entry: Entry) -> None:
        """A first lease has begun: the chunk may not leave RAM. ``let_go`` or ``settle`` undoes it."""
        if self.clean.pop(entry.name, None) is not None:
            self.clean_bytes -= entry.counted_clean_bytes
            entry.held_clean_bytes, entry.counted_clean_bytes = entry.counted_clean_bytes, 0

    def let_go(self, entry: Entry) -> None:
        """The last lease has ended and nothing else has changed: where it was before, as the youngest."""
        nbytes = entry.held_clean_bytes
        if nbytes:  # nobody has settled it since
            entry.held_clean_bytes, entry.counted_clean_bytes = 0, nbytes
            self.clean_bytes += nbytes
            self.clean[entry.name] = entry
        elif entry.name not in self.dirty:  # there it has stayed
            self.settle(entry)

    def settle(self, entry: Entry) -> None:
        """Put an entry into the orders that fit its state. Called after every change to it."""
        name = entry.name
        alive = not entry.gone
        hot = alive and bool(entry.hot)
        dirty = hot and entry.dirty
        evictable = hot and not entry.leases and not entry.claimed and (not dirty or bool(entry.refused))
        to_write = dirty and not entry.refused
        if alive and entry.file_bytes:
            self.cold.setdefault(name, entry)
        else:
            self.cold.pop(name, None)
        if to_write and not entry.claimed:
            self.dirty.setdefault(name, entry)
        else:
            self.dirty.pop(name, None)
        if not to_write:
            self.aging.pop(name, None)
        elif name not in self.aging:
            entry.dirty_since = time.monotonic()
            self.aging[name] = entry
        if evictable:
            self.clean.setdefault(name, entry)
        else:
            self.clean.pop(name, None)
        clean_bytes = entry.hot_bytes if evictable else 0
        self.clean_bytes += clean_bytes - entry.counted_clean_bytes
        self.hot_chunks += hot - entry.counted_hot
        self.dirty_chunks += dirty - entry.counted_dirty
        entry.counted_clean_bytes, entry.held_clean_bytes = clean_bytes, 0
        entry.counted_hot, entry.counted_dirty = hot, dirty

    def touch(self, entries: Sequence[Entry]) -> None:
        """A sequence was used: its chunks become the youngest, the first one youngest of all."""
        clean, dirty, cold = self.clean, self.dirty, self.cold
        for used_ns, entry in enumerate(reversed(entries), self.tick()):
            if not entry.gone:
                name = entry.name
                entry.used_ns = self._last_ns = used_ns
                if name in clean:
                    clean.move_to_end(name)
                elif name in dirty:
                    dirty.move_to_end(name)
                if entry.file_bytes and name in cold:
                    cold.move_to_end(name)

    def age(self, entry: Entry) -> None:
        """Make an entry the first to leave RAM: the suffix of a sequence that does not fit."""
        for order in (self.clean, self.dirty):
            if entry.name in order:
                entry.used_ns = min(entry.used_ns, next(iter(order.values())).used_ns - 1)
                order.move_to_end(entry.name, last=False)

    @staticmethod
    def oldest(entries: Iterable[Entry]) -> Entry | None:
        """The least recently used of an order.

        Chunks enter ``clean`` and ``cold`` when their write ends, and writes that run side by side end in
        any order; so the first few are compared.
        """
        return min(itertools.islice(entries, _SIDE_BY_SIDE), key=lambda entry: entry.used_ns, default=None)

    def tick(self) -> int:
        """Nanoseconds of the clock, strictly ascending whatever the clock does."""
        now, last = time.time_ns(), self._last_ns
        self._last_ns = now = now if now > last else last + 1
        return now

    def share(self, layout: FileLayout) -> FileLayout:
        """One object for equal layouts: a million chunks have a handful of them."""
        return self._layouts.setdefault(layout, layout)

    def in_turn(self, count: int) -> list[Entry]:
        """The next ``count`` chunks; calling again and again visits all, without a copy of the index."""
        turn = []
        for _ in range(min(count, len(self.entries))):
            name, entry = next(iter(self.entries.items()))
            self.entries.move_to_end(name)
            turn.append(entry)
        return turn
