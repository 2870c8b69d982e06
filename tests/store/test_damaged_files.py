"""Chunk files that are not what they should be: a miss and a counter each time, and never a wrong row."""

from __future__ import annotations

import os
import random
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lmcache_hs_backend.tiered import TieredStore
from tests.support.disks import INJECTED
from tests.support.prompts import CHUNK, LAYER_BYTES, Prompt, check_balance, chunk_files, on_disk, opened
from tests.support.waiting import wait_until

FOREVER = 3600.0


def truncated(path: Path, other: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def emptied(path: Path, other: Path) -> None:
    os.truncate(path, 0)


def with_a_flipped_bit_in_the_rows(path: Path, other: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)


def with_a_flipped_bit_in_the_header(path: Path, other: Path) -> None:
    data = bytearray(path.read_bytes())
    data[random.Random(1).randrange(200)] ^= 4
    path.write_bytes(data)


def with_a_flipped_bit_in_the_token_ids(path: Path, other: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096 - 3] ^= 4
    path.write_bytes(data)


def overwritten_by_another_chunk(path: Path, other: Path) -> None:
    shutil.copy(other, path)


def replaced_by_another_safetensors_file(path: Path, other: Path) -> None:
    save_file({"layer.0": torch.zeros(CHUNK, 128, dtype=torch.bfloat16)}, path)


def replaced_by_a_symlink(path: Path, other: Path) -> None:
    path.unlink()
    path.symlink_to(other)


def replaced_by_a_directory(path: Path, other: Path) -> None:
    path.unlink()
    path.mkdir()


def replaced_by_a_fifo(path: Path, other: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replaced_by_a_socket(path: Path, other: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as server:
        before = os.open(".", os.O_DIRECTORY)
        os.chdir(path.parent)  # a socket's path may have 107 characters
        try:
            server.bind(path.name)
        finally:
            os.fchdir(before)
            os.close(before)


def replaced_by_a_symlink_to_nowhere(path: Path, other: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def replaced_by_a_hard_link_to_another_chunk(path: Path, other: Path) -> None:
    path.unlink()
    path.hardlink_to(other)


def replaced_by_a_character_device(path: Path, other: Path) -> None:
    _make_device(path, stat.S_IFCHR, 1, 5)  # /dev/zero, of which a reader never sees the end


def replaced_by_a_block_device(path: Path, other: Path) -> None:
    _make_device(path, stat.S_IFBLK, 7, 0)


def _make_device(path: Path, kind: int, major: int, minor: int) -> None:
    device = path.with_name("device")
    try:
        os.mknod(device, 0o600 | kind, os.makedev(major, minor))
    except PermissionError as error:
        pytest.skip(f"making device nodes is not allowed here: {error}")
    device.replace(path)


def longer_by_a_page(path: Path, other: Path) -> None:
    os.truncate(path, path.stat().st_size + 4096)


def a_hole_of_half_a_gigabyte(path: Path, other: Path) -> None:
    os.truncate(path, 0)
    os.truncate(path, 1 << 29)


def zeroed_at_the_end(path: Path, other: Path) -> None:
    """As after a power cut: the size is on disk, the last pages are not."""
    size = path.stat().st_size
    os.truncate(path, size - 4096)
    os.truncate(path, size)


def deleted(path: Path, other: Path) -> None:
    path.unlink()


DAMAGES: list[Callable[[Path, Path], None]] = [
    truncated, emptied, with_a_flipped_bit_in_the_rows, with_a_flipped_bit_in_the_header,
    with_a_flipped_bit_in_the_token_ids, overwritten_by_another_chunk, replaced_by_another_safetensors_file,
    replaced_by_a_symlink, replaced_by_a_symlink_to_nowhere, replaced_by_a_hard_link_to_another_chunk,
    replaced_by_a_directory, replaced_by_a_fifo, replaced_by_a_socket, replaced_by_a_character_device,
    replaced_by_a_block_device, longer_by_a_page, a_hole_of_half_a_gigabyte, zeroed_at_the_end, deleted,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("when", ["while it is open", "before it is opened again"])
def test_a_chunk_file_that_is(
    tmp_path: Path, damage: Callable[[Path, Path], None], when: str, caplog: pytest.LogCaptureFixture
) -> None:
    """... is a miss, set aside and counted; the chunks before it are served, those after it live on."""
    with opened(tmp_path, write_back_sec=FOREVER) as store:
        p, x = on_disk(store, 4)
        paths = [Path(store.debug.path(name)) for name in p.names]
        if when == "while it is open":
            damage(paths[2], paths[0])
            INJECTED[damage.__name__] += 1
            _check_damaged(store, p, x, damage)
            assert store.stats()["misses_bad_file"] == store.stats()["drops_bad_file"] == 1
    if when != "while it is open":
        damage(paths[2], paths[0])
        INJECTED[damage.__name__] += 1
        with opened(tmp_path, write_back_sec=FOREVER) as store:
            _check_damaged(store, p, x, damage)
            assert store.stats()["drops_bad_file"] == (damage is not deleted)
    told = [record for record in caplog.records if "is not usable" in record.getMessage()]
    if damage is deleted and when != "while it is open":
        assert not told, "nobody has known of it"
    else:
        assert [record.levelname for record in told] == ["WARNING"]
        assert paths[2].name in told[0].getMessage()


def _check_damaged(store: TieredStore, p: Prompt, x: torch.Tensor, damage: Callable[..., None]) -> None:
    out = store.retrieve(p.refs, [0])[0]
    assert torch.equal(out, x[: 2 * CHUNK].float())
    assert store.stats()["quarantined_chunks"] == (damage is not deleted)
    assert not os.path.lexists(store.debug.path(p.names[2]))
    assert store.covered([p.names[3]], [0]) == 1
    assert store.store(p.refs, p.bytes, {0: x}) >= 1, "it can be stored again"
    assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
    store.flush(10)
    check_balance(store)


def test_a_file_of_a_terabyte_takes_nobodys_place(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        p, x = on_disk(store, 6)
        hole = Path(store.directory) / "ab" / f"{'ab' * 16}.safetensors"
    hole.parent.mkdir(exist_ok=True)
    hole.touch()
    try:
        os.truncate(hole, 1 << 40)
    except OSError as error:
        pytest.skip(f"this filesystem has no files of a terabyte: {error}")
    with opened(tmp_path) as store:
        assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
        assert store.stats()["cold_bytes"] < 1 << 30
        assert store.stats()["drops_cold_limit"] == 0
        assert not hole.exists()


def test_files_that_somebody_has_deleted_already_stop_no_eviction_and_no_drop(tmp_path: Path) -> None:
    limit = 6 * (LAYER_BYTES + 4096)
    with opened(tmp_path, max_cold_size=limit / 1024**3) as store:
        p, _ = on_disk(store, 6)
        for path in chunk_files(tmp_path):
            path.unlink()
            INJECTED["deleted"] += 1
        assert store.drop(p.names[:2]) == 2
        q, y = on_disk(store, 6, seed=1)
        assert torch.equal(store.retrieve(q.refs, [0])[0], y.float())
        assert store.stats()["errors_unlink"] == 0
        assert store.stats()["cold_bytes"] <= limit
        wait_until(lambda: not store.debug.busy())
        check_balance(store)


@pytest.mark.parametrize("when", ["while it is open", "before it is opened again"])
def test_two_chunk_files_that_are_swapped_with_each_other_are_both_misses(tmp_path: Path, when: str) -> None:
    def swap(store: TieredStore) -> None:
        INJECTED["swapped files"] += 1
        one, two = (Path(store.debug.path(name)) for name in (p.names[1], p.names[2]))
        aside = tmp_path / "aside"
        one.rename(aside)
        two.rename(one)
        aside.rename(two)

    def check(store: TieredStore) -> None:
        assert torch.equal(store.retrieve(p.refs, [0])[0], x[:CHUNK].float())
        assert store.retrieve(p.refs[2:3], [0]) == {}
        assert store.stats()["quarantined_chunks"] == 2
        assert store.store(p.refs, p.bytes, {0: x}) >= 2, "they can be stored again"
        assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
        store.flush(10)
        check_balance(store)

    with opened(tmp_path, write_back_sec=FOREVER, promote=False) as store:
        p, x = on_disk(store, 4)
        swap(store)
        if when == "while it is open":
            check(store)
    if when != "while it is open":
        with opened(tmp_path, write_back_sec=FOREVER, promote=False) as store:
            check(store)


def test_left_over_temporaries_are_removed_and_hundreds_of_foreign_files_are_not(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        p, x = on_disk(store, 2)
        folder = Path(store.debug.path(p.names[0])).parent
        root = Path(store.directory)
    (root / "archive" / "ab").mkdir(parents=True)
    name = p.names[0].hex()
    ours = [place / f".{name}.123.7.tmp" for place in (folder, root / "archive" / "ab")]
    ours += [folder / ".tmpAb12Cd", root / ".tmpzZ09aa", root / ".namespace.json.9.9.tmp", root / ".probe.9.9.tmp"]
    foreign = [place / f"notes-{n}.txt" for place in (root, folder) for n in range(200)]
    foreign += [root / "README", folder / "model.safetensors", folder / f"{name}.safetensors.bak", folder / ".tmp12345"]
    foreign += [folder / f"{'0' * 32}.safetensors"]  # named like a chunk of another directory
    foreign += [folder / os.fsdecode(b"no \xff text\n"), folder / "a" / "b.safetensors", tmp_path / "mine" / "x"]
    for path in ours + foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 100)
    INJECTED["left-over temporary"] += len(ours)
    INJECTED["foreign file"] += len(foreign)
    with opened(tmp_path) as store:
        assert not [path for path in ours if path.exists()]
        assert not [path for path in foreign if not path.exists()]
        assert store.stats()["cold_chunks"] == 2
        assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
        check_balance(store)


def test_fan_out_directories_that_became_links_are_not_followed_at_a_start(tmp_path: Path) -> None:
    with opened(tmp_path / "cold") as store:
        p, x = on_disk(store, 3)
    outside = tmp_path / "outside"
    outside.mkdir()
    folders = {path.parent for path in chunk_files(tmp_path / "cold")}
    for folder in folders:
        folder.rename(outside / folder.name)
        folder.symlink_to(outside / folder.name)
        INJECTED["symlinked directory"] += 1
    before = {path: path.stat() for path in outside.rglob("*.safetensors")}
    with opened(tmp_path / "cold", write_back_sec=0) as store:
        assert store.retrieve(p.refs, [0]) == {}
        assert store.store(p.refs, p.bytes, {0: x, 3: x}) == 3
        assert store.flush(10) == 0
        assert torch.equal(store.retrieve(p.refs, [0])[0], x.float())
        assert len(chunk_files(tmp_path / "cold")) == 3
        store.drop(p.names)
        wait_until(lambda: not chunk_files(tmp_path / "cold"))
    assert {path: path.stat() for path in outside.rglob("*.safetensors")} == before
