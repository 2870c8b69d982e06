"""Makes ``cold_path/`` and ``contents.json`` beside this file, with the code of commit 291168e::

    git worktree add /tmp/base 291168e && PYTHONPATH=/tmp/base python make_cold_path.py

They are what the project wrote before the package ``format`` existed. Tests hold today's code against them: it reads,
serves and extracts them bit for bit. Never make them again with a later commit; this file is kept to say what they are.

Two layers of 24 columns (bfloat16 in slot 2, float32 in slot 8, both with values that bfloat16 holds exactly), chunks
of 16 tokens and a shorter tail, so that no layer is a multiple of 4096 bytes. Namespaces: two models, and one of a
second process of the first (``p1``). In the first one chunk is archived, one is quarantined, and there are request
records.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path

import torch
import xxhash
from lmcache_hs_backend.integrations.vllm.records import RecordWriter

from lmcache_hs_backend.chunk import KeyedChunk, chunk_refs, token_bytes
from lmcache_hs_backend.config import TieredConfig
from lmcache_hs_backend.format.namespace import NamespaceId
from lmcache_hs_backend.tiered import TieredStore

HERE = Path(__file__).parent
CHUNK, HIDDEN = 16, 24
DTYPES = {2: torch.bfloat16, 8: torch.float32}
CAPTURE = {"source": "vllm", "layer_ids": "vllm", "last_layer": "pre-norm", "num_layers": 8}


def ids_of(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(50_000), k=count)


def rows_of(ids: list[int], slot: int) -> torch.Tensor:
    """Rows that depend on all tokens up to theirs, and on the layer."""
    digest = xxhash.xxh3_64(seed=slot)
    values = []
    for token in ids:
        digest.update(token.to_bytes(8, "little"))
        values.append(digest.intdigest() % 127)
    column = torch.tensor(values, dtype=torch.float32).unsqueeze(1)
    return (column + torch.arange(HIDDEN) % 7 - 64).to(torch.bfloat16).to(DTYPES[slot])


def keyed(model: str, ids: list[int]) -> list[KeyedChunk]:
    result, parent = [], ""
    for start in range(0, len(ids), CHUNK):
        part = ids[start : start + CHUNK]
        parent = xxhash.xxh3_64_hexdigest(parent.encode() + token_bytes(part))
        result.append(KeyedChunk(start, start + len(part), f"{model}@1@0@{parent}@bfloat16", parent, None))
    return result


class Maker:
    def __init__(self, cold_path: Path, model: str) -> None:
        self.model = model
        config = TieredConfig(
            cold_path=str(cold_path), max_cold_size=1, min_free_disk=0, write_back_sec=0, on_kv_gone="archive"
        )
        ident = NamespaceId(model=model, kv_dtype="bfloat16", chunk_size=CHUNK, hash_algorithm="test", none_hash="7")
        self.store = TieredStore(config, 1 << 24, ident, capture=json.dumps(CAPTURE))
        assert self.store.wait_recovered(20)

    def put(self, ids: list[int], slots: list[int] | None = None) -> None:
        raw = token_bytes(ids)
        refs = chunk_refs(keyed(self.model, ids), raw)
        assert self.store.store(refs, raw, {slot: rows_of(ids, slot) for slot in slots or DTYPES})
        assert self.store.flush(20) == 0

    def __enter__(self) -> Maker:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()


def main() -> None:
    cold_path = HERE / "cold_path"
    shutil.rmtree(cold_path, ignore_errors=True)
    shared = ids_of(32, 1)
    prompts = {
        "org/alpha": [shared + ids_of(21, 2), shared + ids_of(9, 3), ids_of(16, 4)],
        "org/beta": [ids_of(40, 5)],
        "p1": [ids_of(23, 6)],
    }
    archived, damaged = ids_of(16, 7), ids_of(16, 8)
    with Maker(cold_path, "org/alpha") as alpha:
        for ids in (*prompts["org/alpha"], archived, damaged):
            alpha.put(ids)
        alpha.store.kv_gone([chunk_refs(keyed("org/alpha", archived), token_bytes(archived))[0].name])
        with Maker(cold_path, "org/alpha") as second:  # the first one holds the namespace
            second.put(prompts["p1"][0])
        [bad] = chunk_refs(keyed("org/alpha", damaged), token_bytes(damaged))
        directory = Path(alpha.store.directory)
        path = directory / f"{bad.name[0]:02x}" / f"{bad.name.hex()}.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
        alpha.store.demote([bad.name])
        assert not alpha.store.retrieve([bad], [2])
        until = time.monotonic() + 20
        while path.exists() or not alpha.store.stats()["archived_chunks"]:
            assert time.monotonic() < until
        writer = RecordWriter(str(directory), 0o700)
        for number, (ids, prompt) in enumerate(zip(prompts["org/alpha"], (40, 32, 0), strict=True)):
            digests = [
                xxhash.xxh3_128_hexdigest(token_bytes(ids[:end])) for end in (len(ids), (len(ids) - 1) // 16 * 16)
            ]
            writer.append(
                {
                    "request_id": f"request-{number}", "created_at": "2026-01-02T03:04:05Z", "finish_reason": "stop",
                    "prompt_tokens": prompt, "generated_tokens": len(ids) - prompt + 1, "expected_tokens": len(ids),
                    "num_tokens": len(ids), "prefix": digests[0], "parent_prefix": digests[1] if len(ids) > 16 else "",
                    "last_chunk": keyed("org/alpha", ids)[-1].chunk_hash, "capture": CAPTURE,
                }
            )  # fmt: skip
        writer.close()
    with Maker(cold_path, "org/beta") as beta:
        beta.put(prompts["org/beta"][0], [8])
        beta.put(prompts["org/beta"][0], [2])  # merged into the files that are there
    for lock in cold_path.rglob(".lock"):
        lock.unlink()  # made anew by whoever opens the namespace
    contents = {
        "prompts": prompts,
        "archived": archived,
        "damaged": damaged,
        "rows": {
            "formula": "seed the xxh3_64 of the token ids so far (int64) with the slot; value = digest % 127; "
            "row = value + column % 7 - 64",
            "hidden": HIDDEN,
            "slots": {"2": "BF16", "8": "F32"},
        },
        "files": {
            str(path.relative_to(cold_path)): xxhash.xxh3_128_hexdigest(path.read_bytes())
            for path in sorted(cold_path.rglob("*"))
            if path.is_file()
        },
    }
    (HERE / "contents.json").write_text(json.dumps(contents, indent=1) + "\n")


if __name__ == "__main__":
    main()
