"""Cold paths for the dataset tests: real chunk files, stored through the tiers under keys of our own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import save_file

from lmcache_hs_backend.chunk import KeyedChunk, chunk_refs, token_bytes
from lmcache_hs_backend.config import TieredConfig
from lmcache_hs_backend.dataset.final_norm import FinalNorm
from lmcache_hs_backend.format.namespace import NamespaceId
from lmcache_hs_backend.tiered import TieredStore
from tests.support.waiting import wait_until

MODEL = "org/tiny"
CHUNK = 16
HIDDEN = 32
#: Slots as vLLM numbers them: three auxiliary layers of eight, and the stream before the final norm.
AUX, LAST, NUM_LAYERS = (2, 4, 5), 8, 8
VLLM = {"source": "vllm", "layer_ids": "vllm", "last_layer": "pre-norm", "num_layers": NUM_LAYERS}


def ids_of(count: int, seed: int = 0) -> list[int]:
    """Token ids that are the same for the same seed."""
    return torch.randint(0, 5000, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def rows_of(ids: Sequence[int], slot: int, hidden: int = HIDDEN, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rows ``[S, hidden]`` that depend on each token and all before it, and on the layer, as real ones do."""
    states, state = [], slot & 0xFFFF
    for token in ids:
        state = (state * 6364136223846793005 + token + 1442695040888963407) % 2**62
        states.append(state)
    seeds = torch.tensor(states, dtype=torch.float64).unsqueeze(1)
    return torch.sin(seeds / 2**40 + torch.arange(hidden, dtype=torch.float64) * 1.7).mul(3).to(dtype)


def keyed(ids: Sequence[int], chunk: int = CHUNK, rank: int = 0, salt: str = "") -> list[KeyedChunk]:
    """Chunks of a prompt under a hash chain of our own, with a shorter tail."""
    result, parent = [], salt
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        parent = xxhash.xxh3_64_hexdigest(parent.encode() + token_bytes(part))
        key = f"{MODEL}@1@{rank}@{parent}@bfloat16"
        result.append(KeyedChunk(start, start + len(part), key, parent, None))
    return result


class Writer:
    """A store over a cold path, as a serving worker has one. Use as a context manager; closing it writes all."""

    def __init__(
        self, cold_path: Path, *, capture: Mapping[str, object] | None = VLLM, chunk: int = CHUNK, rank: int = 0,
        model: str = MODEL, revision: str = "", salt: str = "", **settings: Any,
    ) -> None:  # fmt: skip
        self.chunk, self.rank, self.salt = chunk, rank, salt
        config = TieredConfig(
            cold_path=str(cold_path), max_cold_size=2, min_free_disk=0, write_back_sec=0, close_timeout_sec=30,
            **settings,
        )  # fmt: skip
        ident = NamespaceId(
            model=model, model_revision=revision, kv_dtype="bfloat16", chunk_size=chunk, worker_id=rank,
            hash_algorithm="test", none_hash=salt,
        )  # fmt: skip
        self.store = TieredStore(config, 64 << 20, ident, capture=json.dumps(capture or {}))
        self.directory = self.store.directory

    def __enter__(self) -> Writer:
        assert self.store.wait_recovered(20)
        return self

    def __exit__(self, *_: object) -> None:
        if self.store.config.has_shared_tier:
            self.store.flush(30)
            wait_until(lambda: not self.store.stats()["queue_uploads"], 60)
        self.store.close()

    def put(
        self, ids: Sequence[int], slots: Sequence[int] = (*AUX, LAST),
        make: Callable[[Sequence[int], int], torch.Tensor] = rows_of,
    ) -> None:  # fmt: skip
        """Store the rows of a prompt."""
        raw = token_bytes(list(ids))
        refs = chunk_refs(keyed(ids, self.chunk, self.rank, self.salt), raw)
        self.store.store(refs, raw, {slot: make(ids, slot) for slot in slots})


def store_prompts(
    cold_path: Path, prompts: Sequence[Sequence[int]], make: Callable[[Sequence[int], int], torch.Tensor] = rows_of
) -> Path:
    """Store the rows of some prompts, and return the cold path."""
    with Writer(cold_path) as writer:
        for ids in prompts:
            writer.put(ids, make=make)
    return cold_path


def aux_of(ids: Sequence[int]) -> torch.Tensor:
    """The three auxiliary layers side by side, as most trainers want them: ``[S, 3 * H]``."""
    return stacked_of(ids, AUX).flatten(1)


def normed(model: Path | str, ids: Sequence[int]) -> torch.Tensor:
    """The last layer behind the final norm of a model."""
    return FinalNorm.load(str(model))(rows_of(ids, LAST)).bfloat16()


def stacked_of(ids: Sequence[int], slots: Sequence[int] = (*AUX, LAST)) -> torch.Tensor:
    """What a speculators file should hold: ``[S, layers, H]``."""
    return torch.stack([rows_of(ids, slot) for slot in slots], dim=1)


def save_norm(folder: Path, hidden: int = HIDDEN, **changes: object) -> Path:
    """A model directory as far as its final norm goes."""
    folder.mkdir(parents=True)
    config = {"model_type": "llama", "hidden_size": hidden, "rms_norm_eps": 1e-5, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    weight = torch.rand(hidden, generator=torch.Generator().manual_seed(3)) + 0.5
    save_file({"model.norm.weight": weight, "lm_head.weight": torch.zeros(2, hidden)}, folder / "model.safetensors")
    return folder
