"""One chunk as the tiers know it: where its rows are, what its file is, and whether its KV was seen.

Two states that have nothing to do with each other:

==========  ==================================================  ==========================================
file state  meaning                                             leaves it by
==========  ==================================================  ==========================================
ABSENT      there is no file                                    ``commit_write`` → KNOWN
UNREAD      a file found at start, its header not read yet      ``header_read`` → KNOWN, ``file_lost`` → ABSENT
KNOWN       ``layout`` says which layers the file holds         ``file_lost`` → ABSENT,
                                                                ``prepare_eviction`` → LEAVING
LEAVING     it is being deleted to make room                    ``commit_eviction`` → ABSENT,
                                                                ``abort_eviction`` → KNOWN or UNREAD
==========  ==================================================  ==========================================

===========  ======================================================  =====================================
KV state     meaning                                                 leaves it by
===========  ======================================================  =====================================
UNCONFIRMED  its KV has not been seen present in this process        ``TierState.confirm`` → CONFIRMED
CONFIRMED    its KV was seen: it is deleted when the KV is gone      never
===========  ======================================================  =====================================

Residency is per layer and is stored once: a layer is *hot* when it has a slot, *cold* when the file has it, *dirty*
when it is hot and the file does not have it. A chunk that has left the index is ``dropped``; pins and running
operations may keep its entry for a while, and nothing brings it back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

from lmcache_hs_backend.chunk import LayerSpec
from lmcache_hs_backend.format.header import Description, FileLayout
from lmcache_hs_backend.format.pages import align


class FileState(Enum):
    """See the first table above."""

    ABSENT = "absent"
    UNREAD = "unread"
    KNOWN = "known"
    LEAVING = "leaving"


class ShareState(Enum):
    """Whether the bucket of the shared tier holds what the file holds. Anything but LOCAL needs a known file."""

    LOCAL = "local"  # not, as far as is known; always so without a shared tier
    UPLOADING = "uploading"
    SHARED = "shared"  # it does: the file may leave the disk and nothing is lost
    REFUSED = "refused"  # the file cannot be uploaded, whatever is tried


class KvState(Enum):
    """See the second table above."""

    UNCONFIRMED = "unconfirmed"
    CONFIRMED = "confirmed"


#: The members by themselves, for what is done for every chunk: up to Python 3.11 ``FileState.KNOWN`` takes 80 ns.
ABSENT, UNREAD, KNOWN, LEAVING = FileState
UNCONFIRMED, CONFIRMED = KvState
LOCAL, UPLOADING, SHARED, REFUSED = ShareState

#: The ``drop_reason`` of a chunk whose file had to make room while the bucket holds it too: no loss.
IN_BUCKET = "in_bucket"
#: Every ``drop_reason`` of a chunk whose file had to make room.
LEFT_DISK = ("cold_limit", "unshared", IN_BUCKET)

_NO_LAYERS: frozenset[int] = frozenset()


class Slot(NamedTuple):
    """Memory of the hot tier for one layer of one chunk: ``nbytes`` (a multiple of 4096) at ``offset``."""

    offset: int
    nbytes: int
    spec: LayerSpec


#: Of a chunk that has no rows in RAM; one object for all of them.
NO_SLOTS: Mapping[int, Slot] = MappingProxyType({})


def slot_bytes(spec: LayerSpec, num_tokens: int) -> int:
    """Bytes of the hot tier that one layer of a chunk occupies."""
    return align(spec.nbytes(num_tokens))


@dataclass(slots=True, eq=False)
class Generation:
    """All entries between two clears: one flag drops them all at once."""

    cleared: bool = False


#: Of the entries that have left the index one by one.
REMOVED = Generation(cleared=True)


@dataclass(slots=True, eq=False)
class ChunkEntry:
    """One chunk. Only ``tiers.state`` writes its fields, under the store's lock.

    There may be ten million that are on disk only, so these share what they can: the layout and the ints in it, the
    slots that they do not have, their layers, the ticks of one call.
    """

    name: bytes
    prefix: bytes = b""  # its prefix digest; empty until a header or a store gives it
    num_tokens: int = 0
    kv_key: Any = None  # as KeyForm keeps it
    kv: KvState = UNCONFIRMED
    file: FileState = ABSENT
    size: int = 0  # bytes of its file that count against the limit; 0 while they are not known
    layout: FileLayout | None = None  # of its file; set exactly while the file is KNOWN
    digests: bytes = b""  # of its file's preamble and layers (see format.header); empty when not known
    hot: Mapping[int, Slot] = field(default_factory=lambda: NO_SLOTS)  # replaced, never changed
    share: ShareState = LOCAL
    reused: bool = False  # it was served (see shared_write)
    metadata: Description | None = None  # what a file says beside the rows; kept while there are rows in RAM
    # Layers recovered from disk that no store has been answered for yet: their first store counts as new.
    unacknowledged: frozenset[int] = _NO_LAYERS
    drop_reason: str = (
        ""  # why the disk does not keep its rows, one of metrics.DROPS or IN_BUCKET: it may leave RAM unwritten
    )
    pins: int = 0  # readers and writers of its slots
    generation: Generation = field(default_factory=Generation)
    # Its neighbours in ColdOrder; None outside it.
    older: Any = None
    younger: Any = None
    kv_seen_ns: int = 0  # when its KV was last seen present (monotonic)
    used_ns: int = 0
    saved_ns: int = 0  # the use that the file's mtime tells
    dirty_since: float = 0.0
    stored_at: float = 0.0  # when a layer was last added (monotonic)
    # How the orders have counted this entry so far; only Orders writes these.
    counted: int = 0  # as hot, dirty, unread: one bit each
    clean_bytes: int = 0  # among the clean; negative: what it counted for before a pin took it out of them

    @property
    def dropped(self) -> bool:
        """Whether it is no longer in the index."""
        return self.generation.cleared

    def has(self, layer_idx: int) -> bool:
        """Whether either tier holds the layer."""
        return layer_idx in self.hot or self.on_file(layer_idx)

    def on_file(self, layer_idx: int) -> bool:
        """Whether the file is known to hold the layer."""
        return self.layout is not None and self.layout.spec(layer_idx) is not None

    def spec(self, layer_idx: int) -> LayerSpec | None:
        """How the rows of a layer are laid out; None for a layer that neither tier holds."""
        slot = self.hot.get(layer_idx)
        if slot is not None:
            return slot.spec
        return None if self.layout is None else self.layout.spec(layer_idx)

    def specs(self, layer_idxs: Iterable[int]) -> list[LayerSpec]:
        """Of those layers that either tier holds."""
        return [spec for layer_idx in layer_idxs if (spec := self.spec(layer_idx)) is not None]

    def layer_idxs(self) -> set[int]:
        """The layers that either tier holds."""
        on_file = {spec.layer_idx for spec in self.layout.layers} if self.layout else set()
        return on_file | self.hot.keys()

    @property
    def identified(self) -> bool:
        """Whether it is known which tokens its rows belong to. Unidentified chunks are only counted."""
        return bool(self.prefix)

    @property
    def has_file(self) -> bool:
        """Whether there are bytes on disk under its name that its entry accounts for."""
        return self.file is not ABSENT

    @property
    def dirty(self) -> bool:
        """Whether RAM holds a layer that the file does not."""
        layout = self.layout
        if layout is None:
            return bool(self.hot)
        return any(layout.spec(layer_idx) is None for layer_idx in self.hot)

    @property
    def hot_bytes(self) -> int:
        """Bytes of its slots."""
        return sum([slot.nbytes for slot in self.hot.values()])
