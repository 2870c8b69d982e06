"""A cold path that commit 291168e wrote (data/make_cold_path.py) is read, served and extracted, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from lmcache_hs_backend.chunk import KeyedChunk, chunk_refs, token_bytes
from lmcache_hs_backend.cli import extract
from lmcache_hs_backend.config import TieredConfig
from lmcache_hs_backend.format import chunk_file
from lmcache_hs_backend.format.chunk_file import FileLayer, read_header
from lmcache_hs_backend.format.header import BadChunk
from lmcache_hs_backend.format.layout import QUARANTINE, scan_flat
from lmcache_hs_backend.format.namespace import NamespaceId
from lmcache_hs_backend.format.reader import ChunkInfo, ColdTierReader
from lmcache_hs_backend.format.request_log import RequestRecord, read_records, record_files
from lmcache_hs_backend.tiered import TieredStore
from lmcache_hs_backend.tiers.memory.dtypes import TORCH_DTYPES

DATA = Path(__file__).parent / "data"
CONTENTS: dict[str, Any] = json.loads((DATA / "contents.json").read_text())
HIDDEN = CONTENTS["rows"]["hidden"]
DTYPES = {int(slot): TORCH_DTYPES[name] for slot, name in CONTENTS["rows"]["slots"].items()}
CHUNK = 16


def rows_of(ids: list[int], slot: int) -> torch.Tensor:
    """By the formula in contents.json."""
    digest = xxhash.xxh3_64(seed=slot)
    values = []
    for token in ids:
        digest.update(token.to_bytes(8, "little"))
        values.append(digest.intdigest() % 127)
    return (torch.tensor(values).unsqueeze(1) + torch.arange(HIDDEN) % 7 - 64).to(DTYPES[slot])


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    """A copy that may be written to. Git keeps no empty directory and no times, which nothing depends on."""
    return Path(shutil.copytree(DATA / "cold_path", tmp_path / "cold"))


def chunks(cold: Path) -> list[ChunkInfo]:
    return list(ColdTierReader(str(cold)).chunks())


def sequences() -> list[list[int]]:
    return [ids for group in CONTENTS["prompts"].values() for ids in group] + [CONTENTS["archived"]]


def test_the_files_are_those_that_were_written(cold: Path) -> None:
    """Else the tests below compare today's code with itself."""
    found = {str(path.relative_to(cold)): path.read_bytes() for path in cold.rglob("*") if path.is_file()}
    assert {path: xxhash.xxh3_128_hexdigest(data) for path, data in found.items()} == CONTENTS["files"]


def test_every_chunk_is_read_bit_for_bit(cold: Path) -> None:
    by_prefix = {}
    for ids in sequences():
        raw = token_bytes(ids)
        for end in [*range(CHUNK, len(ids), CHUNK), len(ids)]:
            by_prefix[xxhash.xxh3_128_digest(raw[: 8 * end])] = ids[:end]
    found = chunks(cold)
    assert [info.state for info in found].count("archived") == 1
    assert {str(Path(info.file.path).relative_to(cold)) for info in found} == {
        path for path in CONTENTS["files"] if path.endswith(".safetensors") and QUARANTINE not in path
    }
    for info in found:
        assert info.header is not None, info.problem
        meta, layout = info.header.meta, info.header.layout
        ids = by_prefix[meta.prefix]
        assert (meta.start, meta.num_tokens) == ((len(ids) - 1) // CHUNK * CHUNK, (len(ids) - 1) % CHUNK + 1)
        assert info.header.token_ids == token_bytes(ids[meta.start :])
        assert [(spec.layer_idx, spec.dtype) for spec in layout.layers] == [(8, "F32"), (2, "BF16")]
        assert not layout.direct
        into = {spec.layer_idx: memoryview(bytearray(spec.nbytes(layout.num_tokens))) for spec in layout.layers}
        chunk_file.read(
            FileLayer(), info.file.path, info.file.name, meta.prefix, layout, into, direct=False, verify=True
        )
        for slot, view in into.items():
            rows = torch.frombuffer(view, dtype=DTYPES[slot]).view(-1, HIDDEN)
            assert torch.equal(rows, rows_of(ids, slot)[meta.start :])


def test_todays_writer_makes_the_same_bytes(cold: Path, tmp_path: Path) -> None:
    for info in chunks(cold):
        header = info.header
        assert header is not None
        data = Path(info.file.path).read_bytes()
        rows, position = {}, header.layout.preamble_bytes
        for spec in header.layout.layers:
            rows[spec] = memoryview(data)[position : position + spec.nbytes(header.meta.num_tokens)]
            position += len(rows[spec])
        path, layout, digests = chunk_file.write(
            FileLayer(), str(tmp_path), header.meta, header.token_ids, rows, direct=False, fsync=False, mtime_ns=1
        )
        assert Path(path).read_bytes() == data
        assert (layout, digests) == (header.layout, header.digests)


def test_the_quarantined_file_is_still_bad(cold: Path) -> None:
    [directory] = [path for path in cold.iterdir() if (path / QUARANTINE).is_dir()]
    [file] = scan_flat(str(directory / QUARANTINE))
    header = read_header(FileLayer(), file.path)
    assert header.token_ids == token_bytes(CONTENTS["damaged"])
    into = {2: memoryview(bytearray(CHUNK * HIDDEN * 2))}
    with pytest.raises(BadChunk, match=r"layer\.2 do not match"):
        chunk_file.read(
            FileLayer(), file.path, bytes.fromhex(Path(file.path).name[:32]), header.meta.prefix, header.layout, into,
            direct=False, verify=True,
        )  # fmt: skip


def test_the_request_records_are_read(cold: Path) -> None:
    prompts = CONTENTS["prompts"]["org/alpha"]
    [path] = [path for each in ColdTierReader(str(cold)).namespaces for path in record_files(each.directory)]
    records = list(read_records(path))
    assert [record for record in records if not isinstance(record, RequestRecord)] == []
    assert [(r.request_id, r.num_tokens) for r in records if isinstance(r, RequestRecord)] == [
        (f"request-{number}", len(ids)) for number, ids in enumerate(prompts)
    ]


@pytest.mark.parametrize("model", ["org/alpha", "org/beta"])
def test_a_store_serves_it(cold: Path, model: str) -> None:
    config = TieredConfig(cold_path=str(cold), max_cold_size=1, min_free_disk=0)
    ident = NamespaceId(model=model, kv_dtype="bfloat16", chunk_size=CHUNK, hash_algorithm="test", none_hash="7")
    store = TieredStore(config, 1 << 24, ident)
    try:
        assert store.wait_recovered(20)
        for ids in CONTENTS["prompts"][model]:
            got = store.retrieve(chunk_refs(keyed(model, ids), token_bytes(ids)), [2, 8], None)
            assert {slot: rows.dtype for slot, rows in got.items()} == DTYPES
            assert all(torch.equal(rows, rows_of(ids, slot)) for slot, rows in got.items())
        if model == "org/alpha":
            archived = CONTENTS["archived"]
            assert not store.retrieve(chunk_refs(keyed(model, archived), token_bytes(archived)), [2, 8], None)
        stats = store.stats()
        assert (stats["misses_bad_file"], stats["drops_bad_file"]) == (0, 0)
        alpha = model == "org/alpha"
        assert (stats["archived_chunks"], stats["quarantined_chunks"]) == ((1, 1) if alpha else (0, 0))
    finally:
        store.close()


def keyed(model: str, ids: list[int]) -> list[KeyedChunk]:
    result, parent = [], ""
    for start in range(0, len(ids), CHUNK):
        part = ids[start : start + CHUNK]
        parent = xxhash.xxh3_64_hexdigest(parent.encode() + token_bytes(part))
        result.append(KeyedChunk(start, start + len(part), f"{model}@1@0@{parent}@bfloat16", parent, None))
    return result


@pytest.mark.parametrize("source", ["requests", "leaves"])
def test_it_is_extracted(cold: Path, tmp_path: Path, source: str) -> None:
    out = tmp_path / "out"
    options = ["--format", "speculators", "--layers", "2", "--last-layer", "8", "--sequences", source, "-q"]
    assert extract.main([str(cold), "--out", str(out), "--model", "org/alpha", *options]) == 0
    wanted = CONTENTS["prompts"]["org/alpha"]
    if source == "leaves":
        wanted = wanted + CONTENTS["prompts"]["p1"] + [CONTENTS["archived"]]
    found = {}
    for path in out.rglob("*.safetensors"):
        tensors = load_file(path)
        found[tuple(tensors["token_ids"].tolist())] = tensors["hidden_states"]
    assert sorted(found) == sorted(map(tuple, wanted))
    for ids, rows in found.items():
        expected = torch.stack([rows_of(list(ids), slot).to(torch.bfloat16) for slot in (2, 8)], dim=1)
        assert torch.equal(rows, expected)
