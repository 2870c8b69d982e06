"""An output disk that is really full, at a row or at the end: a clear error, nothing half-written, and --resume."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_hs_backend.cli.extract import main
from lmcache_hs_backend.dataset.journal import Journal
from tests.support.dataset_capture import HIDDEN, ids_of, rows_of, save_norm, store_prompts
from tests.support.disks import tmpfs
from tests.support.extracting import contents

PROMPTS = [ids_of(60, seed=seed) for seed in range(12)]
FORMATS = ["speculators", "specforge", "modelopt", "deepspec"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 4 MB of its own."""
    with tmpfs(tmp_path / "disk", "size=4m", may_be_open=False):
        yield tmp_path / "disk"


@pytest.fixture
def stored(cold_path: Path) -> Path:
    return store_prompts(cold_path, PROMPTS, make=lambda ids, slot: rows_of(ids, slot).repeat(1, 8))


class Plenty:
    """What a disk said it had before somebody else took it."""

    free = 1 << 40


def fill(disk: Path) -> None:
    """Take every byte that is left."""
    fd = os.open(disk / "ballast", os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError, match="No space left"):
        write_on(fd)
    os.close(fd)


def write_on(fd: int) -> None:
    while True:
        os.write(fd, b"\0" * 4096)


def after(count: int, then: Callable[[], None]) -> Callable[[Journal, Any], None]:
    """``Journal.append`` that does something when it has been called so often."""
    append, calls = Journal.append, []

    def wrapped(self: Journal, result: Any) -> None:
        append(self, result)
        calls.append(result)
        if len(calls) == count:
            then()

    return wrapped


@pytest.mark.parametrize("samples", [0, 3, len(PROMPTS)], ids=["at the plan", "at a row", "at the end"])
@pytest.mark.parametrize("format_", FORMATS)
def test_a_disk_that_fills_up_is_an_error_and_resume_ends_with_the_same_bytes(
    stored: Path, disk: Path, tmp_path: Path, format_: str, samples: int, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(save_norm(tmp_path / "model", hidden=8 * HIDDEN))
    options = ["--format", format_, "--final-norm", model, "--workers", "1", "-q"]
    assert main([str(stored), "--out", str(tmp_path / "unbroken"), *options]) == 0
    unbroken = contents(tmp_path / "unbroken")
    out = disk / "out"
    capsys.readouterr()
    with monkeypatch.context() as patch:
        if samples:
            patch.setattr(Journal, "append", after(samples, lambda: fill(disk)))
        else:
            patch.setattr(Journal, "has_plan", lambda self: fill(disk))
            patch.setattr("shutil.disk_usage", lambda path: Plenty)
        assert main([str(stored), "--out", str(out), *options]) == 1
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert error.startswith(f"lmcache-hs-extract: error: {out} cannot be written: the disk is full")
    assert "--resume goes on from there" in error
    state = {name: data for name, data in contents(out).items() if not name.startswith(".lmcache-hs-extract/")}
    assert "manifest.json" not in state
    assert all(unbroken[name] == data for name, data in state.items()), "what is there is whole"
    (disk / "ballast").unlink()
    assert main([str(stored), "--out", str(out), "--resume", *options]) == 0
    assert contents(out) == unbroken
