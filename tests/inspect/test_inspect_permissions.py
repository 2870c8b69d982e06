"""What the tools may not look into, or cannot make out, is told of, and costs nothing else."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cold_paths import CHUNK, add_prompt, namespace, tokens_of
from tests.support.inspecting import PROGRAM, environment, inspect, inspect_json

LOOKING = ("list", "stats", "tree")
REMOVING = (("gc", "--max-size", "0", "--yes"), ("rm", "--model", "org/other", "--yes"))


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    """Two namespaces: eight chunks of one model, one chunk of another."""
    path = tmp_path / "cold"
    add_prompt(namespace(path), tokens_of(8 * CHUNK))
    add_prompt(namespace(path, "org/other"), tokens_of(CHUNK, 1), model="org/other")
    return path


@pytest.fixture
def first(cold: Path) -> Path:
    """The namespace of eight chunks."""
    return namespace(cold)


@pytest.fixture
def forbidden(first: Path) -> Iterator[Path]:
    """One of its directories ``<hh>``, into which nobody may look."""
    folder = next(path for path in sorted(first.iterdir()) if len(path.name) == 2)
    folder.chmod(0)
    yield folder
    folder.chmod(0o700)


@pytest.fixture
def closed(first: Path) -> Iterator[Path]:
    """The whole namespace, into which nobody may look."""
    first.chmod(0)
    yield first
    first.chmod(0o700)


class TestADirectoryThatMayNotBeLookedInto:
    def test_costs_a_listing_its_chunks_only_and_is_counted(self, cold: Path, forbidden: Path) -> None:
        done = inspect("list", cold, "--format", "json", root=False)
        result = json.loads(done.stdout)
        assert (done.returncode, done.stderr) == (0, "")
        assert result["summary"]["skipped"] == {"unreadable": 1}
        assert 1 <= len(result["chunks"]) < 9

    @pytest.mark.parametrize("command", LOOKING)
    def test_is_named_by_its_reason(self, cold: Path, forbidden: Path, command: str) -> None:
        done = inspect(command, cold, root=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert "1 skipped (unreadable 1)" in done.stdout

    def test_is_a_finding(self, cold: Path, forbidden: Path) -> None:
        for option in ((), ("--fix",)):
            done = inspect("verify", cold, "--ignore", "orphan", "--format", "json", *option, root=False)
            (problem,) = json.loads(done.stdout)["problems"]
            assert (done.returncode, problem["kind"], problem["path"]) == (1, "unreadable", str(forbidden))
            assert not problem["fixed"]

    @pytest.mark.parametrize("command", REMOVING)
    def test_keeps_nothing_else_from_being_deleted(self, cold: Path, forbidden: Path, command: tuple[str, ...]) -> None:
        done = inspect(command[0], cold, *command[1:], "--format", "json", root=False)
        result = json.loads(done.stdout)
        assert (done.returncode, result["left"]) == (0, [])
        assert result["skipped"] == {"unreadable": 1}
        assert not list(namespace(cold, "org/other").glob("??/*.safetensors"))


class TestANamespaceThatMayNotBeLookedInto:
    @pytest.mark.parametrize(
        "command", [(name,) for name in LOOKING] + [("gc", "--dry-run"), ("rm", "--all", "--dry-run")]
    )
    def test_is_told_of_and_the_rest_is_there(self, cold: Path, closed: Path, command: tuple[str, ...]) -> None:
        done = inspect(command[0], cold, *command[1:], root=False)
        assert done.returncode == 0
        assert done.stderr == f"note: left out: {closed}: Permission denied\n"
        assert "left out" not in inspect(command[0], cold, *command[1:], "--quiet", root=False).stderr

    def test_is_a_finding(self, cold: Path, closed: Path) -> None:
        done = inspect("verify", cold, "--format", "json", root=False)
        (problem,) = json.loads(done.stdout)["problems"]
        assert (done.returncode, done.stderr, problem["kind"]) == (1, "", "namespace")
        assert str(closed) in problem["detail"]

    def test_what_is_not_named_like_one_is_nobodys_business(self, cold: Path) -> None:
        other = cold / "lost+found"
        other.mkdir(0)
        done = inspect("verify", cold, root=False)
        assert (done.returncode, done.stderr) == (0, "")
        other.chmod(0o700)


class TestChunksWithoutARecord:
    @pytest.mark.parametrize("where", ["", "p1"])
    def test_are_told_of_because_no_engine_will_ever_see_or_delete_them(
        self, cold: Path, first: Path, where: str
    ) -> None:
        if where:
            add_prompt(first / where, tokens_of(CHUNK, 2))
        (first / where / "namespace.json").unlink(missing_ok=True)
        result = inspect_json("verify", cold, "--ignore", "foreign", status=1)
        assert [problem["kind"] for problem in result["problems"]] == ["namespace"]
        assert str(first / where) in result["problems"][0]["detail"]
        assert str(first / where) in inspect("stats", cold).stderr

    def test_a_directory_that_is_just_being_made_is_no_such_thing(self, cold: Path) -> None:
        (cold / "tiny-0123456789ab").mkdir()
        assert inspect_json("verify", cold)["problems"] == []


@pytest.mark.parametrize("command", ["verify", "tree", "stats", "list", "report"])
def test_a_reader_that_has_gone_is_141_and_never_mistaken_for_a_finding(
    cold: Path, tmp_path: Path, command: str
) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    options = ["--out", str(tmp_path / "page.html")] if command == "report" else []
    process = subprocess.Popen(
        [*PROGRAM, command, str(cold), *options], stdout=write_end, stderr=subprocess.PIPE, env=environment()
    )
    os.close(write_end)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (141, b"")
