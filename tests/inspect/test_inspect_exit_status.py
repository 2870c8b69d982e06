"""The same exit status for the same thing, whichever command meets it: every command of ``lmcache-hs-inspect``.

The commands run in this process: what counts is what ``main`` returns, and ``test_inspect_program`` runs the program.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
from pathlib import Path

import pytest
import yaml

from lmcache_hs_backend.cli import exit_status
from lmcache_hs_backend.cli.inspect import COMMANDS, main
from lmcache_hs_backend.tiers.disk.owned_namespace import NamespaceLock
from tests.inspect.test_inspect_config import good
from tests.support.cold_paths import CHUNK, add_prompt, namespace, tokens_of

READING = ("list", "show", "tree", "stats", "report", "verify")
REMOVING = ("rm", "gc")


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    """A cold path with two chunks that nobody holds."""
    add_prompt(namespace(tmp_path / "cold"), tokens_of(2 * CHUNK), used_at=1000)
    return tmp_path / "cold"


def run(command: str, cold: Path, *more: object) -> tuple[int, str]:
    """The exit status of a command that does something to a cold path, and its standard error."""
    [chunk] = [path.name for path in sorted(cold.rglob("*.safetensors"))][:1] or ["none"]
    page = cold.parent / "page.html"
    arguments = {
        "show": (cold, chunk), "report": (cold, "--out", page), "rm": (cold, "--all", "--yes"),
        "gc": (cold, "--expired", "1d", "--yes"), "check-config": (config(cold),),
    }.get(command, (cold,))  # fmt: skip
    return call(command, *arguments, *more)


def call(*arguments: object) -> tuple[int, str]:
    errors, printed = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(printed):
        try:
            status = main([str(each) for each in arguments])
        except SystemExit as end:  # argparse's own, for wrong usage
            status = int(end.code or 0)
    assert "Traceback" not in errors.getvalue()
    return status, errors.getvalue()


def config(cold: Path) -> Path:
    path = cold.parent / "lmcache.yaml"
    path.write_text(yaml.safe_dump(good(cold)))
    return path


def test_the_commands_are_all_walked_over() -> None:
    assert {*READING, *REMOVING, "check-config"} == {*COMMANDS}


@pytest.mark.parametrize("command", COMMANDS)
class TestEveryCommand:
    def test_done(self, command: str, cold: Path) -> None:
        assert run(command, cold) == (exit_status.DONE, "")

    def test_wrong_usage(self, command: str, cold: Path) -> None:
        status, errors = run(command, cold, "--no-such-option")
        assert status == exit_status.USAGE
        assert "--no-such-option" in errors

    def test_a_wrong_value(self, command: str, cold: Path) -> None:
        status, errors = run(command, cold, "--format", "xml")
        assert (status, len(errors.splitlines())) == (exit_status.ERROR, 1)
        assert "--format cannot be 'xml'" in errors

    def test_an_output_that_cannot_be_written(self, command: str, cold: Path) -> None:
        status, errors = run(command, cold, "--output", "/nowhere/at/all")
        assert (status, len(errors.splitlines())) == (exit_status.ERROR, 1)
        assert "--output /nowhere/at/all cannot be written" in errors

    @pytest.mark.parametrize(
        ("raised", "status"),
        [
            (KeyboardInterrupt(), exit_status.INTERRUPTED),
            (BrokenPipeError(), exit_status.PIPE_CLOSED),
            (OSError(errno.EIO, os.strerror(errno.EIO)), exit_status.ERROR),
        ],
        ids=["ctrl-c", "closed-pipe", "disk"],
    )
    def test_what_ends_it_early(
        self, command: str, cold: Path, monkeypatch: pytest.MonkeyPatch, raised: BaseException, status: int
    ) -> None:
        def fail(*args: object, **keywords: object) -> None:
            raise raised

        monkeypatch.setattr("lmcache_hs_backend.cli.console._drop_standard_output", lambda: None)
        monkeypatch.setattr("lmcache_hs_backend.cli.console.Output.__enter__", fail)
        assert run(command, cold)[0] == status


@pytest.mark.parametrize("command", [*READING, *REMOVING])
class TestEveryCommandOnAColdPath:
    def test_no_cold_path(self, command: str, tmp_path: Path) -> None:
        (tmp_path / "music").mkdir()
        status, errors = run(command, tmp_path / "music")
        assert (status, len(errors.splitlines())) == (exit_status.ERROR, 1)
        assert "is not a cold path" in errors

    def test_a_path_in_use_is_left_alone_by_those_that_delete_and_no_matter_to_others(
        self, command: str, cold: Path
    ) -> None:
        lock = NamespaceLock.take(str(namespace(cold)))
        assert lock is not None
        try:
            dry = ("--dry-run",) if command in REMOVING else ()
            expected = exit_status.LEFT if command in REMOVING else exit_status.DONE
            assert run(command, cold)[0] == run(command, cold, *dry)[0] == expected
        finally:
            lock.close()
        assert len(list(cold.rglob("*.safetensors"))) == 2


@pytest.mark.parametrize("command", REMOVING)
def test_no_is_an_answer(command: str, cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("lmcache_hs_backend.cli.inspect.care.removal.confirm", lambda question: asked.append(question))
    arguments = {"rm": ("--all",), "gc": ("--expired", "1d")}[command]
    assert call(command, cold, *arguments)[0] == exit_status.LEFT
    assert len(asked) == 1
    assert len(list(cold.rglob("*.safetensors"))) == 2


@pytest.mark.parametrize("command", REMOVING)
def test_nothing_to_delete_is_done(command: str, cold: Path) -> None:
    for path in cold.rglob("*.safetensors"):
        path.unlink()
    assert run(command, cold)[0] == exit_status.DONE


@pytest.mark.parametrize("command", ["verify", "show"])
def test_rows_that_do_not_match_their_checksum_are_a_finding(command: str, cold: Path) -> None:
    for path in cold.rglob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    assert run(command, cold)[0] == exit_status.FINDING


def test_a_configuration_that_does_not_load_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "lmcache.yaml").write_text("storage_plugins: []\n")
    assert call("check-config", tmp_path / "lmcache.yaml")[0] == exit_status.FINDING


def test_the_manual_has_every_status(cold: Path) -> None:
    manual = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "inspect.md").read_text()
    section = manual.split("## Exit status\n")[1].split("\n## ")[0]
    numbers = {int(value) for name, value in vars(exit_status).items() if name.isupper()}
    rows = [row.split("|")[1].strip() for row in section.splitlines() if row.startswith("| ")]
    assert {int(cell) for cell in rows if cell.isdecimal()} == numbers
