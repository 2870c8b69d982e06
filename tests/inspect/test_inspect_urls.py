"""``lmcache-hs-inspect`` on a bucket: the same figures as on the disk that its objects came from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lmcache_hs_backend.cli import exit_status
from lmcache_hs_backend.cli.inspect import main
from lmcache_hs_backend.format.objects import Found, Objects, Reply
from lmcache_hs_backend.format.reader import ColdTierReader
from tests.support.dataset_capture import Writer, ids_of
from tests.support.inspecting import environment, fails, inspect, inspect_json
from tests.support.seaweed import BUCKET, SeaweedServer, reader_threads
from tests.support.waiting import wait_until

pytest.importorskip("obstore")

PROMPTS = [ids_of(70, seed=seed) for seed in range(6)]


class Filled(NamedTuple):
    """A bucket with what is in a cold path as well."""

    url: str
    options: dict[str, Any]
    cold: Path

    @property
    def arguments(self) -> tuple[str, ...]:
        return self.url, "--shared-options", json.dumps(self.options)

    @property
    def objects(self) -> Objects:
        return Objects(self.url, self.options)

    def chunks(self) -> list[str]:
        return [found.path for found in self.objects.list() if found.path.endswith(".safetensors")]


def fill(server: SeaweedServer, folder: Path, name: str) -> Filled:
    filled = Filled(f"s3://{BUCKET}/{name}", server.options(), folder / "cold")
    shared = {"shared_url": filled.url, "shared_options": filled.options}
    with Writer(filled.cold, revision="abc", **shared) as writer:
        for ids in PROMPTS:
            writer.put(ids)
    return filled


@pytest.fixture(scope="module")
def filled(weed: SeaweedServer, tmp_path_factory: pytest.TempPathFactory) -> Filled:
    return fill(weed, tmp_path_factory.mktemp("filled"), "figures")


def test_a_bucket_lists_the_chunks_of_the_disk_that_it_came_from(filled: Filled) -> None:
    there = inspect_json("list", *filled.arguments)
    here = inspect_json("list", filled.cold)
    assert there["cold_path"] == filled.url
    assert there["summary"]["chunks"] == here["summary"]["chunks"] == len(filled.chunks()) == 30

    def content(result: dict[str, Any]) -> list[tuple[Any, ...]]:
        return sorted((c["start"], c["num_tokens"], c["layers"], c["created_at"]) for c in result["chunks"])

    assert content(there) == content(here)
    assert {chunk["path"] for chunk in there["chunks"]} == {f"{filled.url}/{path}" for path in filled.chunks()}
    assert len(inspect_json("list", *filled.arguments, "--min-tokens", "16")["chunks"]) == 24


def test_tree_stats_and_report_give_the_same_figures(filled: Filled, tmp_path: Path) -> None:
    there, here = (inspect_json("stats", *arguments) for arguments in (filled.arguments, (filled.cold,)))
    for name in ("chunks", "tokens", "sequences", "dedup_factor"):
        assert there["total"][name] == here["total"][name]
    assert there["free_bytes"] is None
    assert "disk:" not in inspect("stats", *filled.arguments).stdout
    trees = [inspect_json("tree", *arguments)["trees"] for arguments in (filled.arguments, (filled.cold,))]
    texts = [sorted(branch["text"] for branch in tree[0]["branches"]) for tree in trees]
    assert texts[0] == texts[1]
    assert all(texts[0])
    page = tmp_path / "report.html"
    assert inspect_json("report", *filled.arguments, "--out", page)["sampled"] == 30
    assert filled.url in page.read_text()
    name = os.path.basename(filled.chunks()[0])[:12]
    shown = inspect_json("show", name, *filled.arguments)
    assert all(layer["checksum_ok"] for layer in shown["layer_figures"])


def test_the_usual_variables_do_instead_of_options_and_a_file_too(filled: Filled, tmp_path: Path) -> None:
    options = filled.options
    usual = {
        "AWS_ENDPOINT_URL": options["endpoint"],
        "AWS_ACCESS_KEY_ID": options["access_key_id"],
        "AWS_SECRET_ACCESS_KEY": options["secret_access_key"],
    }
    assert inspect_json("list", filled.url, env=usual)["summary"]["chunks"] == 30
    config = tmp_path / "lmcache.yaml"
    config.write_text(json.dumps({"extra_config": {"storage_plugin.hs_tiered.shared_options": options}}))
    assert inspect_json("list", filled.url, "--shared-options", config)["summary"]["chunks"] == 30
    assert "must be a table" in fails("list", filled.url, "--shared-options", "{3}")


def test_who_has_read_a_bucket_leaves_no_threads(filled: Filled, capsys: pytest.CaptureFixture[str]) -> None:
    with ColdTierReader(filled.url, shared_options=filled.options) as reader:
        assert len(list(reader.chunks())) == 30
        assert reader_threads()
    wait_until(lambda: not reader_threads())
    assert len(list(reader.chunks())) == 30, "a closed reader reads on, by new threads"
    assert reader_threads()
    reader.close()
    wait_until(lambda: not reader_threads())
    gone = pytest.raises(OSError, match="must go on")
    with gone, ColdTierReader(filled.url, shared_options=filled.options) as reader:
        next(reader.chunks())
        raise OSError("must go on")
    wait_until(lambda: not reader_threads())
    for command in ("list", "tree", "verify"):
        assert main([command, *filled.arguments]) == 0
        wait_until(lambda: not reader_threads())
    capsys.readouterr()


def test_a_read_only_key_reads_and_a_wrong_one_is_one_line(filled: Filled, weed: SeaweedServer) -> None:
    reading = json.dumps(weed.options("rokey", "rosecret"))
    assert inspect_json("verify", filled.url, "--shared-options", reading)["left"] == 0
    assert "403" in fails("list", filled.url, "--shared-options", json.dumps(weed.options(secret="wrong")))
    assert f"no {'namespace.json'}" in fails("list", f"s3://{BUCKET}/nothing", *filled.arguments[1:])
    assert "s3://, gs://, az:// or file:///" in fails("list", "http://localhost/x")


def test_verify_names_what_is_damaged_and_leaves_it(weed: SeaweedServer, tmp_path: Path) -> None:
    filled = fill(weed, tmp_path, "damaged")
    assert inspect_json("verify", *filled.arguments)["problems"] == []
    first, second, third, *_ = filled.chunks()
    objects = filled.objects
    body = bytearray(objects.get(first, 1 << 20).body)
    body[-1] ^= 1
    objects.replace(first, bytes(body), None)
    objects.replace(second, b"", None)
    objects.replace(third, bytes(objects.get(filled.chunks()[4], 1 << 20).body), None)
    objects.create(f"{os.path.dirname(first)}/notes.txt", b"mine")
    for options in ((), ("--fix",)):
        found = inspect_json("verify", *filled.arguments, "--ignore", "orphan", *options, status=1)
        kinds = {problem["path"].removeprefix(f"{filled.url}/"): problem["kind"] for problem in found["problems"]}
        assert kinds[first] == "checksum"
        assert kinds[second] in ("header", "size", "short")
        assert kinds[third] == "key"
        assert kinds[f"{os.path.dirname(first)}/notes.txt"] == "foreign"
        assert found["left"] == 4
    assert len(filled.chunks()) == 30


#: So short that a run looks at one object and stops.
AT_ONCE = "0.000001"


def damage(filled: Filled) -> list[str]:
    """The last byte of every object is another one; their URLs."""
    objects = filled.objects
    for path in filled.chunks():
        body = bytearray(objects.get(path, 1 << 20).body)
        body[-1] ^= 1
        objects.replace(path, bytes(body), None)
    return sorted(f"{filled.url}/{path}" for path in filled.chunks())


def test_verify_in_part_counts_what_it_leaves_out(weed: SeaweedServer, tmp_path: Path) -> None:
    filled = fill(weed, tmp_path, "part")
    for amount, chunks in (("7", 7), ("50%", 15), ("1000", 30)):
        result = inspect_json("verify", *filled.arguments, "--sample", amount)
        assert (result["chunks"], result["only_headers"]["chunks"], result["found"]["chunks"]) == (
            chunks, 30 - chunks, 30,
        )  # fmt: skip
        assert result["bytes"] + result["only_headers"]["bytes"] == result["found"]["bytes"]
        assert result["chains_followed"]
    cut = inspect_json("verify", *filled.arguments, "--max-time", AT_ONCE, status=exit_status.UNFINISHED)
    assert (cut["chunks"], cut["not_reached"]["chunks"], cut["time_over"]) == (1, 29, True)
    assert (cut["chains_followed"], cut["problems"]) == (False, []), "no orphan, though its parent was not reached"
    whole = inspect_json("verify", *filled.arguments, "--max-time", "1h")
    assert (whole["chunks"], whole["time_over"], whole["broken_off"], whole["chains_followed"]) == (
        30, False, False, True,
    )  # fmt: skip


def test_each_damaged_object_is_found_by_exactly_one_of_the_runs_with_a_cursor(
    weed: SeaweedServer, tmp_path: Path
) -> None:
    filled = fill(weed, tmp_path, "cursor")
    urls, cursor, found = damage(filled), tmp_path / "cursor", []
    assert inspect_json("verify", *filled.arguments, "--sample", "12", status=1)["counts"]["checksum"] == 12
    for number, options in enumerate((["--max-time", AT_ONCE], ["--max-time", AT_ONCE], [])):
        result = inspect_json("verify", *filled.arguments, "--cursor", cursor, *options, status=1)
        assert result["read_before"]["chunks"] == number
        found += [each["path"] for each in result["problems"] if each["kind"] == "checksum"]
    assert sorted(found) == urls
    assert not cursor.exists()


def test_verify_asks_for_each_object_once(
    filled: Filled, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: Counter[str] = Counter()
    get_range = Objects.get_range

    def counted(self: Objects, path: str, begin: int, end: int) -> Reply:
        asked[path] += 1
        return get_range(self, path, begin, end)

    monkeypatch.setattr(Objects, "get_range", counted)
    assert main(["verify", *filled.arguments]) == exit_status.DONE
    assert "30 chunk files" in capsys.readouterr().out
    assert asked == dict.fromkeys(filled.chunks(), 1)


def test_a_bucket_that_breaks_off_its_listing_is_no_bucket_without_faults(
    filled: Filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listing, listings = Objects.list, 0

    def breaks_off(self: Objects, folder: str = "") -> Iterator[Found]:
        """The listing by which chunks are read: after those by which they, and what else there is, were found."""
        nonlocal listings
        listings += folder.count("/") == 1
        for number, each in enumerate(listing(self, folder)):
            if listings == broken and number == 12:
                raise OSError(5, "cannot be listed: a timeout", self.url)
            yield each

    monkeypatch.setattr(Objects, "list", breaks_off)
    cursor = tmp_path / "cursor"
    command = ["verify", *filled.arguments, "--format", "json", "--cursor", str(cursor)]
    broken = 3
    assert main(command) == exit_status.FINDING
    result = json.loads(capsys.readouterr().out)
    assert (result["broken_off"], result["chains_followed"], result["counts"]) == (True, False, {"unreadable": 1})
    assert (result["chunks"], result["not_reached"]["chunks"]) == (12, 18)
    assert cursor.exists(), "the next run goes on from there"
    listings = 0
    assert main([*command[:-2], "--ignore", "unreadable"]) == exit_status.UNFINISHED
    capsys.readouterr()
    broken = -1
    assert main(command) == exit_status.DONE
    result = json.loads(capsys.readouterr().out)
    assert (result["chunks"], result["read_before"]["chunks"], result["chains_followed"]) == (18, 12, True)
    assert not cursor.exists()


def test_gc_deletes_objects_only_when_it_is_asked_to(weed: SeaweedServer, tmp_path: Path) -> None:
    filled = fill(weed, tmp_path, "collected")
    would = inspect_json("gc", *filled.arguments, "--max-size", "40KB", "--dry-run")
    assert 0 < would["files"] < 30
    assert len(filled.chunks()) == 30
    assert "no terminal to ask on" in fails("gc", *filled.arguments, "--max-size", "40KB")
    assert inspect_json("gc", *filled.arguments, "--expired", "1d", "--dry-run")["files"] == 0
    assert len(filled.chunks()) == 30
    done = inspect_json("gc", *filled.arguments, "--max-size", "40KB", "--yes")
    assert done["deleted_files"] == would["files"]
    left = filled.chunks()
    assert len(left) == 30 - would["files"]
    assert {f"{filled.url}/{path}" for path in left}.isdisjoint(file["path"] for file in would["would_delete"])
    assert inspect_json("gc", filled.url, "--max-size", "0b", "--yes", "--shared-options",
                        json.dumps(weed.options("rokey", "rosecret")), status=1)["left"]  # fmt: skip
    assert filled.chunks() == left


def test_a_cold_path_that_was_copied_to_a_bucket_is_read_as_well(weed: SeaweedServer, tmp_path: Path) -> None:
    with Writer(tmp_path / "cold") as writer:
        for ids in PROMPTS:
            writer.put(ids)
    url = f"s3://{BUCKET}/copied"
    objects = Objects(url, weed.options())
    for path in (tmp_path / "cold").rglob("*"):
        if path.is_file() and path.name != ".lock":
            objects.create(str(path.relative_to(tmp_path / "cold")), path.read_bytes())
    options = json.dumps(weed.options())
    assert inspect_json("verify", url, "--shared-options", options)["chunks"] == 30


def test_obstore_is_imported_for_urls_only(tmp_path: Path) -> None:
    with Writer(tmp_path / "cold") as writer:
        writer.put(PROMPTS[0])
    code = (
        "from lmcache_hs_backend.cli.inspect import main\nimport sys\n"
        f"assert main(['list', {str(tmp_path / 'cold')!r}]) == 0\nassert 'obstore' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
