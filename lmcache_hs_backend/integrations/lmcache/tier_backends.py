"""The two tiers as a pair of LMCache storage backends, and the keys that they are addressed by.

``HotTierBackend`` and ``ColdTierBackend`` present one tier each over ``HiddenStateKey``s. They add no state and no
rule: whatever they do is ``TieredHiddenStateStore``'s work. Towards KV keys they hold nothing, as the plugin does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote, unquote

import torch

from lmcache_hs_backend.integrations.lmcache.compat import (
    STR_DTYPE_TO_TORCH_DTYPE,
    TORCH_DTYPE_TO_STR_DTYPE,
    CacheEngineKey,
    MemoryFormat,
    MemoryObj,
    MemoryObjMetadata,
    StorageBackendInterface,
    TensorMemoryObj,
)
from lmcache_hs_backend.integrations.lmcache.store import TieredHiddenStateStore, key_name

_KEY = re.compile(r"hs@(-?\d+)@([^@]*)@(\d+)@(\d+)@(-?[0-9a-f]+)@(\w+)((?:@[^@=]*=[^@=]*)*)")
_TAG = "lmcache.tag."


class HiddenStateKey(CacheEngineKey):  # type: ignore[misc]
    """The key of one layer of hidden states of a chunk: the key of the chunk's KV, and ``layer_idx``.

    Equal only to its like, never to a KV key. ``to_string`` and ``from_string`` are inverse whatever the
    model's name or the tags contain (tag values become text).
    """

    __slots__ = ("layer_idx",)

    def __init__(self, kv_key: CacheEngineKey, layer_idx: int) -> None:
        tags = {f"{_TAG}{tag}": value for tag, value in kv_key.tags or ()}
        super().__init__(
            kv_key.model_name, kv_key.world_size, kv_key.worker_id, kv_key.chunk_hash, kv_key.dtype, tags or None
        )
        self.layer_idx = layer_idx

    @property
    def kv_key(self) -> CacheEngineKey:
        """The key of the KV of the same chunk."""
        return CacheEngineKey(
            self.model_name, self.world_size, self.worker_id, self.chunk_hash, self.dtype, self.request_configs
        )

    def __hash__(self) -> int:
        return hash((CacheEngineKey.__hash__(self), self.layer_idx))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HiddenStateKey) and super().__eq__(other) and self.layer_idx == other.layer_idx

    def to_string(self) -> str:
        """The key as text: ``hs@layer_idx@model@world_size@worker_id@chunk_hash@dtype`` and tags, escaped."""
        tags = "".join(f"@{quote(str(tag), '')}={quote(str(value), '')}" for tag, value in self.tags or ())
        return (
            f"hs@{self.layer_idx}@{quote(self.model_name, '/')}@{self.world_size}@{self.worker_id}"
            f"@{self.chunk_hash_hex}@{TORCH_DTYPE_TO_STR_DTYPE[self.dtype]}{tags}"
        )

    @staticmethod
    def from_string(text: str) -> HiddenStateKey:
        """The key that a text of ``to_string`` stands for.

        Raises:
            ValueError: ``to_string`` cannot have made this text.
        """
        match = _KEY.fullmatch(text)
        if match is None or match[6] not in STR_DTYPE_TO_TORCH_DTYPE:
            raise ValueError(f"not the key of hidden states: {text!r}")
        layer_idx, model, world_size, worker_id, chunk_hash, dtype, tags = match.groups()
        pairs = [tag.split("=") for tag in tags.split("@")[1:]]
        request_configs = {_TAG + unquote(tag): unquote(value) for tag, value in pairs}
        kv_key = CacheEngineKey(
            unquote(model),
            int(world_size),
            int(worker_id),
            int(chunk_hash, 16),
            STR_DTYPE_TO_TORCH_DTYPE[dtype],
            request_configs or None,
        )
        return HiddenStateKey(kv_key, int(layer_idx))


def are_ours(keys: Sequence[Any]) -> bool:
    """Whether there are keys, and all of them are of hidden states."""
    return bool(keys) and all(isinstance(key, HiddenStateKey) for key in keys)


class NothingForKv:
    """What every backend here answers where LMCache asks about KV that is loaded, pinned or on its way."""

    #: For KvPresence: there is no KV here.
    holds_no_kv = True

    def __str__(self) -> str:
        return type(self).__name__

    def get_non_blocking(self, key: CacheEngineKey, location: str | None = None) -> None:
        """Nothing: there is no KV here."""
        return

    def exists_in_put_tasks(self, key: CacheEngineKey) -> bool:
        """Never."""
        return False  # a put is over when it returns

    def pin(self, key: CacheEngineKey) -> bool:
        """Nothing is pinned for a caller."""
        return False

    def unpin(self, key: CacheEngineKey) -> bool:
        """Nothing was pinned."""
        return False

    def touch_cache(self) -> None:
        """Nothing to do: every use counts when it happens."""
        return

    def cancel_request(self, req_id: str) -> None:
        """Nothing to do: no call outlives its return."""
        return


class TierBackend(NothingForKv, StorageBackendInterface):  # type: ignore[misc]
    """What the two tiers have in common as storage backends. Other keys than HiddenStateKeys are not here."""

    #: Which tiers it looks at: (hot, cold).
    tiers: tuple[bool, bool]

    def __init__(self, store: TieredHiddenStateStore, allocator: Callable[[], Any]) -> None:
        super().__init__(dst_device="cpu")
        self._store = store
        self._allocator = allocator

    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        """Whether this tier holds the layer."""
        if not isinstance(key, HiddenStateKey):
            return False
        held = self._store.tiers.has(key_name(key.kv_key), key.layer_idx)
        return any(here and asked for here, asked in zip(held, self.tiers, strict=True))

    def get_blocking(self, key: CacheEngineKey) -> MemoryObj | None:
        """A MemoryObj ``[num_tokens, hidden_dim]`` that owns a copy of the rows, or None."""
        if not isinstance(key, HiddenStateKey):
            return None
        rows = self._store.tiers.read_layer(key_name(key.kv_key), key.layer_idx, key.kv_key, tiers=self.tiers)
        return None if rows is None else _memory_obj(rows)

    def batched_get_blocking(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        """One copy for each key, None where this tier does not hold the layer."""
        return [self.get_blocking(key) for key in keys]

    async def batched_async_contains(self, lookup_id: str, keys: Sequence[CacheEngineKey], pin: bool = False) -> int:
        """How many keys, from the first on, this tier holds."""
        return int(self.batched_contains(list(keys), pin))

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: Sequence[CacheEngineKey], transfer_spec: Any = None
    ) -> list[MemoryObj]:
        """Copies for the keys that this tier holds, from the first on."""
        found = self.batched_get_blocking(keys)
        return [obj for obj in found if obj is not None]

    def batched_submit_put_task(
        self,
        keys: Sequence[CacheEngineKey],
        objs: Sequence[MemoryObj],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[CacheEngineKey], None] | None = None,
    ) -> None:
        """Add layers to chunks that are in RAM already. Of others the token ids are not known: left out.

        Raises ValueError for rows that a store would refuse.
        """
        for key, obj in zip(keys, objs, strict=True):
            if isinstance(key, HiddenStateKey):
                self._store.add_layer(key.kv_key, key.layer_idx, obj.tensor)
                if on_complete_callback is not None:
                    on_complete_callback(key)

    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        """Delete the chunk of the layer, all layers of it, from both tiers: a chunk lives and dies as a whole."""
        return isinstance(key, HiddenStateKey) and self._store.drop_key(key.kv_key)

    def clear(self) -> int:
        """Delete all chunks from both tiers. 0, because no KV token was cleared."""
        self._store.clear()
        return 0

    def get_allocator_backend(self) -> Any:
        """LMCache's present allocator."""
        return self._allocator()

    def close(self) -> None:
        """The engine's store closes the tiers."""


class HotTierBackend(TierBackend):
    """The pinned-CPU tier."""

    tiers = (True, False)


class ColdTierBackend(TierBackend):
    """The safetensors-on-disk tier."""

    tiers = (False, True)


def _memory_obj(rows: torch.Tensor) -> MemoryObj:
    shape = rows.shape
    metadata = MemoryObjMetadata(
        shape=shape,
        dtype=rows.dtype,
        address=0,
        phy_size=rows.nbytes,
        ref_count=1,
        fmt=MemoryFormat.HS_TD,
        shapes=[shape],
        dtypes=[rows.dtype],
    )
    return TensorMemoryObj(rows.view(torch.uint8).flatten(), metadata, parent_allocator=None)
