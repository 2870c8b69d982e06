"""``verify --sample``, ``--max-time``, ``--cursor``: what a run leaves out is said and counted, and nothing is lost."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from lmcache_hs_backend.cli import exit_status
from lmcache_hs_backend.cli.inspect import main
from lmcache_hs_backend.cli.inspect.care.verifier import Extent, Verifier, draw
from lmcache_hs_backend.format.reader import ColdTierReader
from tests.inspect.test_inspect_verify import flip, write_records
from tests.support.cold_paths import CHUNK, add_prompt, namespace, tokens_of
from tests.support.inspecting import fails, inspect, inspect_json

CHUNKS = 60
#: So short that a run reads one file and stops.
AT_ONCE = "0.000001"


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    return tmp_path / "cold"


@pytest.fixture
def files(cold: Path) -> list[Path]:
    """The files of two namespaces and an archive, 60 chunks in all, in the order of their prompts."""
    first = namespace(cold)
    prompt = add_prompt(first, tokens_of(30 * CHUNK))
    archived = add_prompt(first / "archive", tokens_of(10 * CHUNK, 1))
    other = add_prompt(namespace(cold, "org/other"), tokens_of(20 * CHUNK, 2), model="org/other")
    write_records(first, prompt, 3 * CHUNK, 2 * CHUNK)
    return [*prompt.files, *archived.files, *other.files]


class TestSample:
    @pytest.mark.parametrize(("amount", "chunks"), [("7", 7), ("50%", 30), ("100%", 60), ("1000", 60), ("0.001%", 1)])
    def test_so_many_are_read_whole_and_of_the_others_the_header(
        self, cold: Path, files: list[Path], amount: str, chunks: int
    ) -> None:
        result = inspect_json("verify", cold, "--sample", amount)
        assert (result["chunks"], result["only_headers"]["chunks"]) == (chunks, CHUNKS - chunks)
        assert result["found"]["chunks"] == CHUNKS
        assert result["bytes"] + result["only_headers"]["bytes"] == result["found"]["bytes"]
        assert (result["chains_followed"], result["records"], result["records_gone"]) == (True, 2, 0)

    def test_what_was_not_read_is_said(self, cold: Path, files: list[Path]) -> None:
        done = inspect("verify", cold, "--sample", "15")
        *_, note, last = done.stdout.splitlines()
        assert note == "not checked: the rows of 45 chunk files that are not in the sample, 360 KB"
        assert last == "read 15 of 60 chunk files, 120 KB of 480 KB: nothing is wrong in what was checked"

    def test_headers_and_chains_are_checked_of_all(self, cold: Path, files: list[Path]) -> None:
        files[3].write_bytes(files[3].read_bytes()[:-1])
        for _ in range(3):
            result = inspect_json("verify", cold, "--sample", "1", status=1)
            assert result["counts"] == {"size": 1, "orphan": 1}

    def test_every_draw_is_another_and_each_file_is_drawn_alike(self) -> None:
        every = [(str(number), 1) for number in range(50)]
        for amount in (5, 0.1):
            drawn = Counter(path for _ in range(1000) for path in draw(iter(every), amount))
            assert sum(drawn.values()) == 5000
            assert set(drawn) == {path for path, _ in every}
            assert max(drawn.values()) < 3 * min(drawn.values())

    def test_damage_in_the_sample_is_found_and_beyond_it_is_not(self, cold: Path, files: list[Path]) -> None:
        for path in files:
            flip(path, -1)
        result = inspect_json("verify", cold, "--sample", "12", status=1)
        assert result["counts"]["checksum"] == 12

    @pytest.mark.parametrize("amount", ["0", "-3", "0%", "101%", "some", "1.5", ""])
    def test_a_wrong_amount_is_one_line(self, capsys: pytest.CaptureFixture[str], amount: str) -> None:
        assert main(["verify", "/nowhere", f"--sample={amount}"]) == exit_status.ERROR
        assert f"--sample is {amount}, but must be a number of chunks" in capsys.readouterr().err


class TestTime:
    def test_when_it_is_over_the_status_is_one_of_its_own_and_the_rest_is_counted(
        self, cold: Path, files: list[Path]
    ) -> None:
        result = inspect_json("verify", cold, "--max-time", AT_ONCE, status=exit_status.UNFINISHED)
        assert result["time_over"]
        assert (result["chunks"], result["not_reached"]["chunks"]) == (1, CHUNKS - 1)
        assert (result["chains_followed"], result["records_gone"]) == (False, None)
        assert result["problems"] == [], "no orphan, though its parent was not reached"
        done = inspect("verify", cold, "--max-time", AT_ONCE)
        note = (
            "not checked: 59 chunk files, 472 KB, chains and the rows of request records, because --max-time was over"
        )
        assert note in done.stdout.splitlines()
        assert done.stdout.endswith(" of 480 KB: nothing is wrong in what was checked\n")

    def test_a_finding_outweighs_it(self, cold: Path, files: list[Path]) -> None:
        (cold / "foreign").write_text("")
        inspect_json("verify", cold, "--max-time", AT_ONCE, status=exit_status.FINDING)

    def test_time_enough_is_as_none(self, cold: Path, files: list[Path]) -> None:
        result = inspect_json("verify", cold, "--max-time", "1h")
        assert (result["chunks"], result["time_over"], result["chains_followed"]) == (CHUNKS, False, True)

    def test_it_ends_in_the_middle_of_chains_too(self, cold: Path, files: list[Path]) -> None:
        files[0].unlink()
        verifier = Verifier(ColdTierReader(str(cold)))
        verifier.find()
        assert list(verifier.check_rows(lambda size: None)) == []
        verifier._extent = Extent(until=0.0)
        assert list(verifier.check_chains(lambda count: None)) == [], "who has no parent is not known yet"
        assert (verifier.time_over, verifier.chains_followed) == (True, False)

    @pytest.mark.parametrize("value", ["0", "-1", "soon", "5 parsecs", ""])
    def test_a_wrong_time_is_one_line(self, capsys: pytest.CaptureFixture[str], value: str) -> None:
        assert main(["verify", "/nowhere", f"--max-time={value}"]) == exit_status.ERROR
        assert f"--max-time is {value}, but must be above 0" in capsys.readouterr().err


class TestCursor:
    def test_runs_with_one_read_every_file_once_and_then_begin_anew(
        self, cold: Path, files: list[Path], tmp_path: Path
    ) -> None:
        cursor = tmp_path / "cursor"
        for number in range(3):
            result = inspect_json("verify", cold, "--cursor", cursor, "--max-time", AT_ONCE, status=3)
            assert (result["chunks"], result["read_before"]["chunks"]) == (1, number)
            assert cursor.exists()
        result = inspect_json("verify", cold, "--cursor", cursor)
        assert (result["chunks"], result["read_before"]["chunks"]) == (CHUNKS - 3, 3)
        assert (result["chains_followed"], result["records_gone"]) == (True, 0), "of all chunks, by their headers"
        assert not cursor.exists()
        assert inspect_json("verify", cold, "--cursor", cursor)["chunks"] == CHUNKS

    def test_each_damaged_file_is_found_by_exactly_one_run(self, cold: Path, files: list[Path], tmp_path: Path) -> None:
        for path in files:
            flip(path, -1)
        cursor = tmp_path / "cursor"
        found = []
        for options in (["--max-time", AT_ONCE], ["--max-time", AT_ONCE], []):
            result = inspect_json("verify", cold, "--cursor", cursor, *options, status=1)
            found += [each["path"] for each in result["problems"] if each["kind"] == "checksum"]
        assert sorted(found) == sorted(map(str, files))

    def test_it_says_how_to_go_on_and_what_earlier_runs_have_read(
        self, cold: Path, files: list[Path], tmp_path: Path
    ) -> None:
        cursor = tmp_path / "cursor"
        first = inspect("verify", cold, "--cursor", cursor, "--max-time", AT_ONCE)
        assert f"; the same command goes on from {cursor}" in first.stdout
        then = inspect("verify", cold, "--cursor", cursor)
        assert "not checked: the rows of 1 chunk files that earlier runs have read, 8.00 KB" in then.stdout
        assert then.returncode == 0

    def test_files_that_come_and_go_in_between_do_no_harm(self, cold: Path, files: list[Path], tmp_path: Path) -> None:
        cursor = tmp_path / "cursor"
        inspect_json("verify", cold, "--cursor", cursor, "--max-time", AT_ONCE, status=3)
        record = json.loads(cursor.read_text())
        [last] = cold.rglob(f"{record['name']}.safetensors")
        flip(last, -1)  # read already: the next round finds it
        add_prompt(namespace(cold), tokens_of(5 * CHUNK, 77))
        result = inspect_json("verify", cold, "--cursor", cursor)
        assert result["chunks"] + result["read_before"]["chunks"] == CHUNKS + 5
        assert inspect_json("verify", cold, "--cursor", cursor, status=1)["counts"]["checksum"] == 1

    def test_a_run_that_was_interrupted_leaves_it_where_it_was(
        self, cold: Path, files: list[Path], tmp_path: Path
    ) -> None:
        cursor = tmp_path / "cursor"
        inspect_json("verify", cold, "--cursor", cursor, "--max-time", AT_ONCE, status=3)
        before = cursor.read_bytes()
        assert "cannot be written" in fails("verify", cold, "--cursor", cursor, "--output", "/nowhere/x")
        assert cursor.read_bytes() == before

    def test_a_cursor_of_no_use_is_one_line(self, cold: Path, files: list[Path], tmp_path: Path) -> None:
        cursor = tmp_path / "cursor"
        assert "lies in the cold path" in fails("verify", cold, "--cursor", cold / "cursor")
        assert "there is no such directory" in fails("verify", cold, "--cursor", tmp_path / "none" / "cursor")
        cursor.write_text("not a cursor")
        assert "is no cursor of verify" in fails("verify", cold, "--cursor", cursor)
        inspect_json("verify", cold, "--cursor", tmp_path / "good", "--max-time", AT_ONCE, status=3)
        other = tmp_path / "elsewhere"
        add_prompt(namespace(other), tokens_of(CHUNK))
        assert f"is of {cold}, not of {other}" in fails("verify", other, "--cursor", tmp_path / "good")
        assert inspect("verify", cold, "--cursor", cursor, "--sample", "5").returncode == exit_status.USAGE

    def test_it_is_not_left_half_written(self, cold: Path, files: list[Path], tmp_path: Path) -> None:
        inspect_json("verify", cold, "--cursor", tmp_path / "cursor", "--max-time", AT_ONCE, status=3)
        assert sorted(os.listdir(tmp_path)) == ["cold", "cursor"]
