"""``rm`` and ``gc`` of ``lmcache-hs-inspect`` delete what was asked for, and nothing under a running engine."""

from __future__ import annotations

import os
import pty
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_hs_backend.config import GIB
from lmcache_hs_backend.tiers.disk.owned_namespace import NamespaceLock
from tests.support.cold_paths import CHUNK, add_prompt, namespace, tokens_of
from tests.support.inspecting import PROGRAM, environment, fails, inspect, inspect_json

SIZE = 8192  # of one chunk file here


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    return tmp_path / "cold"


def chunk_files(cold: Path) -> set[Path]:
    return set(cold.rglob("*.safetensors"))


@pytest.fixture
def locked(cold: Path) -> Iterator[Path]:
    """A namespace that a process holds, with one chunk."""
    directory = namespace(cold, "org/in-use")
    add_prompt(directory, tokens_of(CHUNK), model="org/in-use", used_at=1)
    lock = NamespaceLock.take(str(directory))
    assert lock is not None
    yield directory
    lock.close()


class TestRm:
    def test_exactly_what_matches_is_deleted(self, cold: Path) -> None:
        add_prompt(namespace(cold, "org/one"), tokens_of(3 * CHUNK), model="org/one")
        kept = add_prompt(namespace(cold, "org/two"), tokens_of(2 * CHUNK), model="org/two").files
        result = inspect_json("rm", cold, "--model", "one", "--yes")
        assert (result["deleted_files"], result["deleted_bytes"], result["left"]) == (3, 3 * SIZE, [])
        assert chunk_files(cold) == set(kept)

    def test_a_dry_run_shows_and_deletes_nothing(self, cold: Path) -> None:
        files = add_prompt(namespace(cold), tokens_of(3 * CHUNK)).files
        done = inspect("rm", cold, "--all", "--dry-run")
        assert done.returncode == 0
        assert all(str(path) in done.stdout for path in files)
        assert done.stdout.splitlines()[-1] == "would delete 3 files, 24.00 KB"
        assert len(inspect_json("rm", cold, "--all", "--dry-run")["would_delete"]) == 3
        assert chunk_files(cold) == set(files)

    @pytest.mark.parametrize("option", ["--model", "--namespace", "--since", "--before", "--prefix-of"])
    def test_an_empty_value_is_an_error_and_never_means_everything(self, cold: Path, option: str) -> None:
        files = add_prompt(namespace(cold), tokens_of(CHUNK)).files
        assert f"{option} is empty" in fails("rm", cold, option, "", "--yes")
        assert chunk_files(cold) == set(files)

    def test_without_a_choice_or_an_answer_nothing_happens(self, cold: Path) -> None:
        add_prompt(namespace(cold), tokens_of(CHUNK))
        assert "say which chunks" in fails("rm", cold)
        assert "say which chunks, or --all, not both" in fails("rm", cold, "--all", "--state", "cold")
        assert "no terminal to ask on" in fails("rm", cold, "--all")
        assert len(chunk_files(cold)) == 1

    @pytest.mark.parametrize(("answer", "left", "status"), [("n", 1, 1), ("", 1, 1), ("y", 0, 0), ("yes", 0, 0)])
    def test_it_asks_on_a_terminal(self, cold: Path, answer: str, left: int, status: int) -> None:
        add_prompt(namespace(cold), tokens_of(CHUNK))
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [*PROGRAM, "rm", str(cold), "--all"], stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env=environment(),
        )  # fmt: skip
        os.write(ours, f"{answer}\n".encode())
        _, errors = process.communicate(timeout=60)
        os.close(ours)
        os.close(theirs)
        assert "Delete 1 files, 8.00 KB? [y/N]" in errors
        assert process.returncode == status
        assert len(chunk_files(cold)) == left

    def test_a_running_engine_keeps_its_chunks(self, cold: Path, locked: Path) -> None:
        add_prompt(namespace(cold), tokens_of(CHUNK))
        result = inspect_json("rm", cold, "--all", "--yes", status=1)
        assert result["deleted_files"] == 1
        assert result["left"] == [{"what": locked.name, "why": "a running engine holds it"}]
        assert len(chunk_files(locked)) == 1


class TestGc:
    def test_left_overs_go_and_chunks_stay(self, cold: Path) -> None:
        files = add_prompt(namespace(cold), tokens_of(2 * CHUNK)).files
        (files[0].parent / ".x.1.2.tmp").write_text("half")
        (files[0].parent / "foreign").write_text("mine")
        assert inspect_json("gc", cold, "--yes")["deleted_files"] == 1
        assert chunk_files(cold) == set(files)
        assert (files[0].parent / "foreign").exists()

    def test_other_namespaces(self, cold: Path) -> None:
        kept = add_prompt(namespace(cold, "org/kept"), tokens_of(CHUNK), model="org/kept").files
        add_prompt(namespace(cold, "org/old"), tokens_of(2 * CHUNK), model="org/old")
        result = inspect_json("gc", cold, "--keep", "kept-", "--dry-run")
        assert [each["why"] for each in result["would_delete"]] == ["other namespace"] * 2
        inspect_json("gc", cold, "--keep", "kept-", "--yes")
        assert chunk_files(cold) == set(kept)

    def test_what_is_to_be_kept_must_exist_or_a_slip_of_the_pen_would_delete_everything(self, cold: Path) -> None:
        files = add_prompt(namespace(cold, "org/kept"), tokens_of(CHUNK), model="org/kept").files
        for slips in (["Kept-"], ["kept-", "old-"]):
            options = [option for slip in slips for option in ("--keep", slip)]
            assert f"--keep {slips[-1]}: there is none that begins so" in fails("gc", cold, *options, "--yes")
        assert chunk_files(cold) == set(files)

    def test_expired(self, cold: Path) -> None:
        directory = namespace(cold)
        add_prompt(directory, tokens_of(2 * CHUNK), used_at=time.time() - 10 * 86400)
        kept = add_prompt(directory, tokens_of(CHUNK, 2), used_at=time.time() - 86400).files
        assert inspect_json("gc", cold, "--expired", "7d", "--yes")["deleted_files"] == 2
        assert chunk_files(cold) == set(kept)

    def test_over_the_limit_leaves_in_the_stores_order(self, cold: Path) -> None:
        directory = namespace(cold)
        old = add_prompt(directory, tokens_of(2 * CHUNK, 1), used_at=1000)
        new = add_prompt(directory, tokens_of(2 * CHUNK, 2), used_at=3000)
        archived = add_prompt(directory / "archive", tokens_of(CHUNK, 3), used_at=9000)
        (directory / "quarantine").mkdir()
        bad = directory / "quarantine" / "bad.safetensors"
        bad.write_bytes(bytes(SIZE))
        left = [*old.files, *new.files, *archived.files, bad]
        for room, gone in ((5, bad), (4, archived.files[0])):
            inspect_json("gc", cold, "--max-size", room * SIZE / GIB, "--yes")
            left.remove(gone)
            assert chunk_files(cold) == set(left)
        inspect_json("gc", cold, "--max-size", 2 * SIZE / GIB, "--yes")
        assert chunk_files(cold) == set(new.files)

    def test_the_limit_of_the_configuration_is_used(self, cold: Path, tmp_path: Path) -> None:
        add_prompt(namespace(cold), tokens_of(3 * CHUNK))
        config = tmp_path / "lmcache.yaml"
        config.write_text(
            "extra_config:\n"
            f"  storage_plugin.hs_tiered.cold_path: {cold}\n"
            f"  storage_plugin.hs_tiered.max_cold_size: {SIZE / GIB}\n"
        )
        assert inspect_json("gc", "--config", config, "--dry-run")["files"] == 2

    def test_a_running_engine_keeps_everything(self, cold: Path, locked: Path) -> None:
        temporary = locked / ".x.1.2.tmp"
        temporary.write_text("being written")
        namespace(cold, "org/kept")
        done = inspect("gc", cold, "--expired", "1d", "--max-size", "0", "--keep", "kept-", "--yes")
        assert done.returncode == 1, "as rm"
        assert f"in use, left alone: {locked.name}" in done.stdout
        assert temporary.exists()
        assert len(chunk_files(locked)) == 1

    def test_wrong_options_are_one_line(self, cold: Path) -> None:
        namespace(cold)
        assert "--max-size is -1" in fails("gc", cold, "--max-size", "-1")
        assert "--expired long ago" in fails("gc", cold, "--expired", "long ago")
