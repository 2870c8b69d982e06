"""Bytes of objects on the local disk: the right ones or none, and no more than the limit."""

from __future__ import annotations

import pickle
from pathlib import Path

from lmcache_hs_backend.format.object_cache import ObjectCache

SIZE = 1000


def entries(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def body(number: int) -> memoryview:
    return memoryview(number.to_bytes(4, "little") * (SIZE // 4))


def test_what_was_put_is_what_comes_back_for_that_version_of_the_object_only(tmp_path: Path) -> None:
    cache = pickle.loads(pickle.dumps(ObjectCache(str(tmp_path / "cache"), 1 << 20)))
    assert cache.get("s3://b/one", 5000, SIZE) is None
    cache.put("s3://b/one", 5000, body(1))
    assert cache.get("s3://b/one", 5000, SIZE) == body(1)
    assert cache.get("s3://b/one", 5001, SIZE) is None, "it has been replaced since"
    assert cache.get("s3://b/one", 5000, SIZE - 1) is None
    assert cache.get("s3://b/two", 5000, SIZE) is None
    (path,) = entries(tmp_path)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert cache.get("s3://b/one", 5000, SIZE) is None
    assert not entries(tmp_path), "a damaged entry is none"


def test_it_stays_below_its_limit_whoever_writes(tmp_path: Path) -> None:
    limit = 100 * SIZE
    caches = [ObjectCache(str(tmp_path / "cache"), limit) for _ in range(3)]
    for number in range(600):
        caches[number % 3].put(f"s3://b/{number}", SIZE, body(number))
        assert sum(path.stat().st_size for path in entries(tmp_path)) <= limit * 1.2
    assert caches[0].get("s3://b/599", SIZE, SIZE) == body(599)
    assert caches[0].get("s3://b/0", SIZE, SIZE) is None
    assert len(entries(tmp_path)) > 60


def test_a_place_that_cannot_be_written_is_a_cache_without_entries(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    cache = ObjectCache(str(tmp_path / "file" / "cache"), 1 << 20)
    cache.put("s3://b/one", SIZE, body(1))
    assert cache.get("s3://b/one", SIZE, SIZE) is None
