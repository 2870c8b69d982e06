"""What a start finds is put into order by last use, a few numbers a chunk."""

from __future__ import annotations

import random

from lmcache_hs_backend.format.layout import FoundFile
from lmcache_hs_backend.tiers.disk.found_chunks import FoundChunks


def test_chunks_come_back_by_last_use_with_their_sizes() -> None:
    numbers = list(range(2500))
    random.Random(5).shuffle(numbers)
    found = FoundChunks()
    for n in numbers:
        found.add(FoundFile(f"/somewhere/{n}", 100 + n, 1_760_000_000_000_000_000 + n, n.to_bytes(16, "big")))
    found.sort()
    assert len(found) == 2500
    back = [file for batch in found.by_use(1000) for file in batch]
    assert [(int.from_bytes(file.name, "big"), file.size - 100) for file in back] == [(n, n) for n in range(2500)]
    youngest_first = [name for batch in found.names_by_use(64) for name in batch]
    assert youngest_first == [file.name for file in reversed(back)]


def test_nothing_found_is_no_batch() -> None:
    found = FoundChunks()
    found.sort()
    assert [file for batch in found.by_use(10) for file in batch] == []
    assert [name for batch in found.names_by_use(10) for name in batch] == []
