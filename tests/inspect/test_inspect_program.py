"""The program around the sub-commands of ``lmcache-hs-inspect``: help, colours, terminals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from lmcache_hs_backend.cli import inspect as program
from lmcache_hs_backend.cli.inspect import COMMANDS
from lmcache_hs_backend.tiers.disk.owned_namespace import NamespaceLock
from tests.support import terminals
from tests.support.cold_paths import CHUNK, add_prompt, namespace, tokens_of
from tests.support.inspecting import PROGRAM, blocking, environment, fails, inspect
from tests.support.processes import takes_sigint
from tests.support.waiting import wait_until

#: What each command that reads a cold path needs besides it.
ARGUMENTS = {
    "list": (),
    "show": ("0",),
    "tree": (),
    "stats": (),
    "verify": (),
    "report": ("--out", "/dev/null/never"),
    "rm": ("--all", "--dry-run"),
    "gc": ("--expired", "1d", "--dry-run"),
}


def on_a_terminal(*args: object, columns: int = 100, **env: str) -> str:
    """What the program prints on a terminal of so many columns."""
    settings = environment(**{"TERM": "xterm-256color", "COLUMNS": str(columns), "NO_COLOR": "", **env})
    status, printed = terminals.on_a_terminal([*PROGRAM, *map(str, args)], settings)
    assert status in (0, 1)
    return printed


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
    manual = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "inspect.md").read_text()
    assert all(f"## {command}\n" in manual for command in COMMANDS)


def on(command: str, cold: object, *more: object) -> tuple[object, ...]:
    """The arguments of a command that reads a cold path."""
    first = (command, *ARGUMENTS[command][:1], cold) if command == "show" else (command, cold, *ARGUMENTS[command])
    return (*first, *more)


def test_the_installed_program_is_this_one() -> None:
    [entry] = [each for each in entry_points(group="console_scripts") if each.name == "lmcache-hs-inspect"]
    assert entry.load() is program.main


def test_every_command_reads_a_cold_path_or_a_configuration() -> None:
    assert {*ARGUMENTS} == {*COMMANDS} - {"check-config"}


@pytest.mark.parametrize("command", ARGUMENTS)
class TestWhatIsNoColdPath:
    def test_a_directory_of_something_else_is_one_line(self, command: str, tmp_path: Path) -> None:
        (tmp_path / "music").mkdir()
        assert f"{tmp_path} is not a cold path" in fails(*on(command, tmp_path))

    def test_a_newer_format_is_one_line(self, command: str, tmp_path: Path) -> None:
        record = namespace(tmp_path / "cold") / "namespace.json"
        record.write_text(json.dumps({**json.loads(record.read_text()), "version": 2}))
        assert "format version 2; this program knows version 1" in fails(*on(command, tmp_path / "cold"))


@pytest.mark.parametrize("command", ARGUMENTS)
def test_no_command_needs_lmcache_or_vllm(command: str, tmp_path: Path) -> None:
    prompt = add_prompt(namespace(tmp_path / "cold"), tokens_of(CHUNK))
    env = blocking(tmp_path / "blocker", "lmcache", "vllm", "transformers", "aiofiles")
    arguments = {
        "show": ("show", prompt.hashes[0], tmp_path / "cold"),
        "report": ("report", tmp_path / "cold", "--out", tmp_path / "page.html"),
    }.get(command, on(command, tmp_path / "cold"))
    done = inspect(*arguments, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


class TestInFlight:
    @pytest.fixture
    def running(self, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
        """``list`` on a pipe that nobody reads, in a process group of its own, as a terminal starts it."""
        add_prompt(namespace(tmp_path / "cold"), tokens_of(2000 * CHUNK))
        process = subprocess.Popen(
            [*PROGRAM, "list", str(tmp_path / "cold")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), start_new_session=True,
            preexec_fn=takes_sigint,
        )  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.readline()  # the first chunk: it is in the middle of things
        yield process
        if process.poll() is None:
            process.kill()
        process.communicate()

    def test_ctrl_c_ends_all_its_processes_with_130_and_no_word(self, running: subprocess.Popen[bytes]) -> None:
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        assert children or len(os.sched_getaffinity(0)) == 1
        os.killpg(running.pid, signal.SIGINT)
        _, errors = running.communicate(timeout=30)
        assert (running.returncode, errors) == (130, b"")
        assert not any(Path(f"/proc/{child}").exists() for child in children)

    def test_ctrl_c_is_quiet_also_while_the_processes_are_being_made(self, tmp_path: Path) -> None:
        code = """
import sys
from lmcache_hs_backend.cli.inspect.workers import in_processes

def read(number):
    return list(sys.stdin.read())

try:
    print("ready", flush=True)
    list(in_processes(read, list(range(4))))
except KeyboardInterrupt:
    sys.exit(130)
"""
        for number in range(20):
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                env=environment(), start_new_session=True, preexec_fn=takes_sigint,
            )  # fmt: skip
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(number * 0.0002)  # somewhere between the first fork and the last
            os.killpg(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=30)
            assert (process.returncode, errors) == (130, b"")

    def test_when_it_is_killed_its_processes_end_too(self, running: subprocess.Popen[bytes]) -> None:
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        running.kill()
        running.wait(30)
        wait_until(lambda: not any(alive(child) for child in children))

    def test_an_engine_can_start_meanwhile(self, running: subprocess.Popen[bytes], tmp_path: Path) -> None:
        lock = NamespaceLock.take(str(namespace(tmp_path / "cold")))
        assert lock is not None
        lock.close()
        assert running.poll() is None


def alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


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
