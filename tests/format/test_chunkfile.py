"""The chunk file format: any library opens it, and no hostile file gets past the header reader."""

from __future__ import annotations

import ast
import json
import os
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from lmcache_hs_backend.chunk import ChunkMeta, LayerSpec, chunk_name, token_bytes
from lmcache_hs_backend.format import chunk_file
from lmcache_hs_backend.format.chunk_file import FileLayer
from lmcache_hs_backend.format.header import BadChunk, Header
from lmcache_hs_backend.format.pages import ALIGN
from lmcache_hs_backend.tiers.memory.buffers import BufferPool
from lmcache_hs_backend.tiers.memory.dtypes import DTYPE_NAMES, TORCH_DTYPES
from tests.support.amounts import amount
from tests.support.disks import INJECTED
from tests.support.figures import tell

FILES = FileLayer()
FUZZ_SEC = amount("HS_FUZZ_SEC", 8, 60)


@pytest.fixture
def pool() -> BufferPool:
    return BufferPool(64 << 20)


def write(
    folder: Path, pool: BufferPool, layers: dict[int, torch.Tensor], key: str = "m@1@0@ab@bfloat16", **changes: Any
) -> tuple[Path, ChunkMeta]:
    tokens = len(next(iter(layers.values())))
    meta = ChunkMeta(key, "ab", "", b"\7" * 16, 0, tokens, "org/model", "2026-01-01T00:00:00Z")._replace(**changes)
    specs = {idx: LayerSpec(idx, DTYPE_NAMES[tensor.dtype], tensor.shape[1]) for idx, tensor in layers.items()}
    buffers = {idx: pool.get(spec.nbytes(tokens)) for idx, spec in specs.items()}
    for idx, tensor in layers.items():
        buffers[idx].rows(tokens, tensor.shape[1], tensor.dtype).copy_(tensor)
    path, layout, _ = chunk_file.write(
        FILES, str(folder), meta, token_bytes(list(range(tokens))),
        {spec: buffers[idx].bytes() for idx, spec in specs.items()},
        direct=False, fsync=False, mtime_ns=1,
    )  # fmt: skip
    final = folder / f"{chunk_name(key).hex()}.safetensors"
    os.rename(path, final)
    assert final.stat().st_size == layout.size
    return final, meta


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(1, 300),
    layers=st.dictionaries(
        st.integers(-(2**63), 2**63 - 1),
        st.tuples(st.sampled_from(list(TORCH_DTYPES.values())), st.integers(1, 70)),
        min_size=1,
        max_size=5,
    ),
    key=st.text(min_size=1, max_size=300),
)
def test_any_chunk_round_trips_and_any_library_opens_it(
    tmp_path: Path, pool: BufferPool, tokens: int, layers: dict[int, tuple[torch.dtype, int]], key: str
) -> None:
    rows = {idx: torch.randn(tokens, hidden).to(dtype) for idx, (dtype, hidden) in layers.items()}
    path, meta = write(tmp_path, pool, rows, key)
    loaded = load_file(path)
    assert loaded.pop("token_ids").tolist() == list(range(tokens))
    assert {name: tensor.dtype for name, tensor in loaded.items()} == {
        f"layer.{idx}": tensor.dtype for idx, tensor in rows.items()
    }
    assert all(torch.equal(loaded[f"layer.{idx}"], tensor) for idx, tensor in rows.items())
    header = chunk_file.read_header(FILES, str(path))
    assert header.meta == meta
    assert header.layout.preamble_bytes % ALIGN == 0, "the first layer's rows start at a page"
    for idx, tensor in rows.items():
        buffer = pool.get(tensor.nbytes)
        chunk_file.read(
            FILES, str(path), chunk_name(key), meta.prefix, header.layout, {idx: buffer.bytes()},
            direct=False, verify=True,
        )  # fmt: skip
        assert torch.equal(buffer.rows(*tensor.shape, tensor.dtype), tensor)  # type: ignore[call-arg]


def test_the_header_says_what_the_documentation_says(tmp_path: Path, pool: BufferPool) -> None:
    rows = {-1: torch.randn(64, 64).bfloat16(), 2: torch.randn(64, 32)}
    path, _ = write(tmp_path, pool, rows)
    with safe_open(path, "pt") as file:
        info = file.metadata()
    assert info["format"] == "lmcache-hs-chunk"
    assert info["version"] == "1"
    assert set(json.loads(info["xxh3"])) == {"token_ids", "layer.-1", "layer.2"}
    names = list(json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")]))
    assert names == ["__metadata__", "token_ids", "layer.2", "layer.-1"], "by descending item size"


def test_files_get_the_mode_that_umask_says(tmp_path: Path, pool: BufferPool) -> None:
    before = os.umask(0o027)
    try:
        path, _ = write(tmp_path, pool, {0: torch.zeros(4, 4)})
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


def test_nothing_that_is_read_from_disk_is_unpickled() -> None:
    """Only cli/parallel.py pickles, between a program and the processes that it forked itself."""
    package = Path(chunk_file.__file__).parent
    found = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            loads = (
                isinstance(node, ast.Attribute) and node.attr == "load" and ast.unparse(node.value) in ("torch", "np")
            )
            if loads or any(name.split(".")[0] in ("pickle", "marshal", "shelve", "dill", "joblib") for name in names):
                found.add(str(path.relative_to(package)))
    assert found <= {"cli/parallel.py"}


# -- digests ---------------------------------------------------------------------------------------------------


class Sealed:
    """A file of two layers of which the first is read, again and again, by somebody who knows its digests."""

    def __init__(self, folder: Path, pool: BufferPool) -> None:
        self.path, self.meta = write(folder, pool, {0: torch.randn(64, 128).bfloat16(), 1: torch.randn(64, 32)})
        self.header = chunk_file.read_header(FILES, str(self.path))
        self.into = {0: pool.get(64 * 256).bytes()}

    def check(self, *, verify: bool = True, digests: bytes | None = None) -> bytes:
        layout = self.header.layout
        head = chunk_file.fetch(FILES, str(self.path), layout, self.into, direct=False)
        return chunk_file.check(
            head, chunk_name(self.meta.key), self.meta.prefix, layout, self.into,
            verify=verify, digests=self.header.digests if digests is None else digests,
        )  # fmt: skip

    def flip(self, offset: int) -> None:
        data = bytearray(self.path.read_bytes())
        data[offset] ^= 1
        self.path.write_bytes(data)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    "where", ["its JSON", "its padding", "its token ids", "the layer that is read", "another layer"]
)
def test_with_a_known_seal_a_flipped_bit_is_found_as_without(
    tmp_path: Path, pool: BufferPool, where: str, verify: bool, known: bool
) -> None:
    sealed = Sealed(tmp_path, pool)
    digests = sealed.header.digests if known else b""
    assert sealed.check(verify=verify, digests=digests) == sealed.header.digests
    begin, size = sealed.header.layout.preamble_bytes, sealed.header.layout.size
    # Layers lie in the file by descending item size: first 1, in float32, then 0.
    at = {
        "its JSON": 12,
        "its padding": begin - 64 * 8 - 1,
        "its token ids": begin - 1,
        "the layer that is read": size - 1,
        "another layer": begin,
    }
    sealed.flip(at[where])
    if where == "another layer" or (where == "the layer that is read" and not verify):
        assert sealed.check(verify=verify, digests=digests) == sealed.header.digests
    else:
        with pytest.raises(BadChunk):
            sealed.check(verify=verify, digests=digests)


def test_another_file_of_the_same_chunk_is_as_good_as_the_one_whose_seal_is_known(
    tmp_path: Path, pool: BufferPool
) -> None:
    sealed = Sealed(tmp_path, pool)
    other = Sealed(tmp_path, pool)  # of the same name, with other rows
    assert sealed.header.digests != other.header.digests
    assert sealed.check() == other.header.digests, "from now on it is that file's"


def test_a_checksum_that_is_none_costs_its_own_layer_only(tmp_path: Path, pool: BufferPool) -> None:
    sealed = Sealed(tmp_path, pool)
    header = header_of(sealed.path)
    checksums = json.loads(header["__metadata__"]["xxh3"])
    header["__metadata__"]["xxh3"] = json.dumps(checksums | {"layer.1": "unknown"})
    with_header(sealed.path, header)
    sealed.header = chunk_file.read_header(FILES, str(sealed.path))
    assert sealed.header.digests == b""
    assert sealed.check() == b"", "a reader parses its preamble each time"
    sealed.into = {1: pool.get(64 * 128).bytes()}
    with pytest.raises(BadChunk, match=r"layer\.1"):
        sealed.check()


# -- hostile files -----------------------------------------------------------------------------------------


def header_of(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return dict(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]))


def with_header(path: Path, header: Any, length: int | None = None) -> None:
    """Put another JSON header in front of the data of a chunk file."""
    data = path.read_bytes()
    old = int.from_bytes(data[:8], "little")
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data[8 + old :])


HOSTILE: dict[str, Any] = {
    "a header length of 10 GB": lambda h: (h, 10 * 2**30),
    "a header length of 2**64 - 1": lambda h: (h, 2**64 - 1),
    "a header length of zero": lambda h: (h, 0),
    "a million tensors": lambda h: b"{%s}" % b",".join(b'"%d":{}' % number for number in range(1_000_000)),
    "as many tensors as a header can hold": lambda h: h | {f"layer.{n}": h["layer.0"] for n in range(1, 12_000)},
    "one tensor more than a file may have": lambda h: h | {f"layer.{n}": h["layer.0"] for n in range(1, 1001)},
    "overlapping tensors": lambda h: h | {"layer.1": h["layer.0"]},
    "a negative offset": lambda h: h | {"layer.0": h["layer.0"] | {"data_offsets": [-8, 8]}},
    "a fractional offset": lambda h: h | {"layer.0": h["layer.0"] | {"data_offsets": [512.0, 33280.0]}},
    "a gap": lambda h: h | {"layer.0": h["layer.0"] | {"data_offsets": [x + 8 for x in h["layer.0"]["data_offsets"]]}},
    "a shape that disagrees with its bytes": lambda h: h | {"layer.0": h["layer.0"] | {"shape": [64, 1 << 40]}},
    "a negative shape": lambda h: h | {"layer.0": h["layer.0"] | {"shape": [-64, -128]}},
    "a shape of true": lambda h: h | {"layer.0": h["layer.0"] | {"shape": [64, True]}},
    "three dimensions": lambda h: h | {"layer.0": h["layer.0"] | {"shape": [64, 8, 16]}},
    "a dtype that disagrees": lambda h: h | {"layer.0": h["layer.0"] | {"dtype": "F32"}},
    "an unknown dtype": lambda h: h | {"layer.0": h["layer.0"] | {"dtype": "I64"}},
    "no token ids": lambda h: {name: value for name, value in h.items() if name != "token_ids"},
    "no layer": lambda h: {name: value for name, value in h.items() if name != "layer.0"},
    "no metadata": lambda h: {name: value for name, value in h.items() if name != "__metadata__"},
    "a foreign tensor": lambda h: h | {"weight": h.pop("layer.0")},
    "a layer name that is not canonical": lambda h: h | {"layer.00": h.pop("layer.0")},
    "a number in the metadata": lambda h: h | {"__metadata__": h["__metadata__"] | {"num_tokens": 64}},
    "a huge number of tokens": lambda h: h | {"__metadata__": h["__metadata__"] | {"num_tokens": "9" * 15}},
    "another format": lambda h: h | {"__metadata__": h["__metadata__"] | {"format": "pt"}},
    "a newer version": lambda h: h | {"__metadata__": h["__metadata__"] | {"version": "2"}},
    "checksums that are no table": lambda h: h | {"__metadata__": h["__metadata__"] | {"xxh3": "[1]"}},
    "a prefix that is no digest": lambda h: h | {"__metadata__": h["__metadata__"] | {"prefix": "../../etc"}},
    "a list": lambda h: [h],
    "a hundred thousand brackets": lambda h: b"[" * 100_000,
    "a shape a hundred thousand lists deep": lambda h: json.dumps(h).encode().replace(
        b"[64, 128]", b"[" * 100_000 + b"]" * 100_000
    ),
    "checksums a hundred thousand lists deep": lambda h: h
    | {"__metadata__": h["__metadata__"] | {"xxh3": "[" * 100_000 + "]" * 100_000}},
    "an offset of many digits": lambda h: json.dumps(h).encode().replace(b"[0, ", b"[%s, " % (b"9" * 99_999)),
    "an offset that is no number": lambda h: json.dumps(h).encode().replace(b"[0, ", b"[NaN, "),
    "an infinite shape": lambda h: json.dumps(h).encode().replace(b"[64, 128]", b"[64, Infinity]"),
    "a layer twice": lambda h: json.dumps(h).encode()[:-1] + b', "layer.0": {}}',
    "a layer number of twenty digits": lambda h: h | {"layer." + "9" * 20: h.pop("layer.0")},
    "a dtype that is a list": lambda h: h | {"layer.0": h["layer.0"] | {"dtype": ["BF16"]}},
    "a key that is a list": lambda h: h | {"__metadata__": h["__metadata__"] | {"key": ["m@1@0@ab@bfloat16"]}},
    "a negative start": lambda h: h | {"__metadata__": h["__metadata__"] | {"start": "-1"}},
    "bytes that are no text": lambda h: b"\xff\xfe" * 100,
    "nothing but spaces": lambda h: b" " * 300,
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_header_with(tmp_path: Path, pool: BufferPool, kind: str) -> None:
    """... is refused as a bad chunk, quickly and without much memory."""
    path, _ = write(tmp_path, pool, {0: torch.randn(64, 128).bfloat16()})
    made = HOSTILE[kind](header_of(path))
    with_header(path, *(made if isinstance(made, tuple) else (made,)))
    del made
    INJECTED["hostile header"] += 1
    tracemalloc.start()
    try:
        started = time.thread_time()
        with pytest.raises(BadChunk):
            chunk_file.read_header(FILES, str(path))
        assert time.thread_time() - started < 2.0, "of the processor's time, with every allocation traced"
        assert tracemalloc.get_traced_memory()[1] < 32 << 20, "bounded by the size of a header, not by what it says"
    finally:
        tracemalloc.stop()


def test_a_file_far_larger_than_its_header_says_is_a_bad_chunk(tmp_path: Path, pool: BufferPool) -> None:
    path, meta = write(tmp_path, pool, {0: torch.randn(64, 128).bfloat16()})
    layout = chunk_file.read_header(FILES, str(path)).layout
    os.truncate(path, 1 << 40)  # a hole of a terabyte
    with pytest.raises(BadChunk):
        chunk_file.read_header(FILES, str(path))
    rows = pool.get(64 * 256)
    with pytest.raises(BadChunk):
        chunk_file.read(
            FILES, str(path), chunk_name(meta.key), meta.prefix, layout, {0: rows.bytes()},
            direct=False, verify=True,
        )  # fmt: skip


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 100, 4095, 4096, 4097])
def test_a_file_that_ends_early_is_a_bad_chunk(tmp_path: Path, pool: BufferPool, size: int) -> None:
    path, _ = write(tmp_path, pool, {0: torch.randn(64, 128).bfloat16()})
    os.truncate(path, size)
    with pytest.raises(BadChunk):
        chunk_file.read_header(FILES, str(path))


def test_the_header_reader_survives_any_bytes(tmp_path: Path, pool: BufferPool) -> None:
    """Hypothesis feeds it for a while: every outcome is a header that adds up, or BadChunk."""
    path, _ = write(tmp_path, pool, {0: torch.randn(64, 128).bfloat16(), 3: torch.randn(64, 8)})
    good = path.read_bytes()
    until = time.monotonic() + FUZZ_SEC
    tried = refused = 0

    def judge(data: bytes) -> None:
        nonlocal tried, refused
        path.write_bytes(data)
        tried += 1
        try:
            header = chunk_file.read_header(FILES, str(path))
        except BadChunk:
            refused += 1
        else:
            assert isinstance(header, Header)
            assert header.layout.size == len(data)

    @settings(max_examples=300, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def feed(data: st.DataObject) -> None:
        kind = data.draw(st.sampled_from(["bytes", "json", "flips", "cut"]))
        if kind == "bytes":
            judge(data.draw(st.binary(max_size=5000)))
        elif kind == "json":
            leaf = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
            names = st.sampled_from(["__metadata__", "token_ids", "layer.0", "shape", "dtype", "data_offsets", "x"])
            value = data.draw(
                st.recursive(leaf, lambda c: st.lists(c, max_size=4) | st.dictionaries(names, c, max_size=5))
            )
            text = json.dumps(value).encode()
            judge(len(text).to_bytes(8, "little") + text + good[4096:])
        elif kind == "flips":
            changed = bytearray(good)
            for position in data.draw(st.lists(st.integers(0, 4200), min_size=1, max_size=5)):
                changed[position] = data.draw(st.integers(0, 255))
            judge(bytes(changed))
        else:
            judge(good[: data.draw(st.integers(0, len(good)))])

    while time.monotonic() < until:
        feed()
    assert refused
    tell(f"header fuzzing: {tried} files, {refused} refused, the others whole")
