"""The program around the sub-commands of ``lmcache-hs-inspect``: help, colours, terminals."""

from __future__ import annotations

import os
import pty
import subprocess
from pathlib import Path

import pytest
from cold_paths import CHUNK, add_prompt, namespace, tokens_of
from inspecting import PROGRAM, environment, inspect

from lmcache_hs_backend.cli.inspect import COMMANDS


def on_a_terminal(*args: object, columns: int = 100, **env: str) -> str:
    """What the program prints on a terminal of so many columns."""
    ours, theirs = pty.openpty()
    settings = environment(**{"TERM": "xterm-256color", "COLUMNS": str(columns), "NO_COLOR": "", **env})
    process = subprocess.Popen([*PROGRAM, *map(str, args)], stdin=theirs, stdout=theirs, stderr=theirs, env=settings)
    os.close(theirs)
    printed = b""
    try:
        while data := os.read(ours, 65536):
            printed += data
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait(60) in (0, 1)
    return printed.decode()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_with_an_example(command: str) -> None:
    done = inspect(command, "--help")
    assert done.returncode == 0
    assert "example" in done.stdout
    assert f"  lmcache-hs-inspect {command}" in done.stdout
    assert "--format {terminal,json}" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120


def test_without_a_command_it_shows_them_all() -> None:
    done = inspect()
    assert done.returncode == 1
    assert all(command in done.stdout for command in COMMANDS)
    assert inspect("--version").stdout.startswith("lmcache-hs-inspect ")
    assert inspect("nonsense").returncode == 2


def test_the_pages_of_the_manual_name_every_command() -> None:
    manual = (Path(__file__).parent.parent / "docs" / "inspect.md").read_text()
    assert all(f"## {command}\n" in manual for command in COMMANDS)


class TestTerminal:
    @pytest.fixture
    def cold(self, tmp_path: Path) -> Path:
        add_prompt(namespace(tmp_path / "cold"), tokens_of(3 * CHUNK))
        return tmp_path / "cold"

    @pytest.mark.parametrize("command", ["list", "stats", "tree", "verify"])
    def test_colours_only_on_a_terminal_and_not_with_no_color(self, cold: Path, command: str) -> None:
        assert "\x1b[" in on_a_terminal(command, cold)
        plain = on_a_terminal(command, cold, NO_COLOR="1")
        assert not any(f"\x1b[{colour}" in plain for colour in ("31", "32", "33", "1;31", "1;32"))
        assert "\x1b" not in inspect(command, cold).stdout

    def test_a_listing_fits_the_terminal(self, cold: Path) -> None:
        for columns in (60, 90, 200):
            lines = on_a_terminal("list", cold, columns=columns, NO_COLOR="1").splitlines()
            assert len(lines) == 5
            assert max(map(len, lines[1:-1])) <= columns
        assert "NAMESPACE" in on_a_terminal("list", cold, columns=200)
        assert "NAMESPACE" not in on_a_terminal("list", cold, columns=60)
