"""``lmcache-hs-inspect`` on several cold paths and URLs at once: every row says where it is from, sums count once."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lmcache_hs_backend.cli import exit_status
from lmcache_hs_backend.dataset.index import ChunkIndex
from lmcache_hs_backend.format.url_files import url_options
from tests.inspect.test_inspect_program import on_a_terminal
from tests.inspect.test_inspect_report import Page
from tests.inspect.test_inspect_verify import flip
from tests.support.cold_paths import CHUNK, add_prompt, namespace, tokens_of
from tests.support.dataset_capture import Writer, ids_of
from tests.support.inspecting import fails, inspect, inspect_json

#: So short that a run reads one file and stops.
AT_ONCE = "0.000001"
SYSTEM = ids_of(32, seed=999)
PROMPTS = [SYSTEM + ids_of(38, seed=seed) for seed in range(6)]  # each 2 chunks that all share, and 3 of its own


class Nodes(NamedTuple):
    """Two nodes of different hash seeds that have one prompt in common, and what both have uploaded."""

    one: Path
    two: Path
    bucket: str
    options: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[Any, ...]:
        return self.one, self.two, self.bucket, *self.options


def fill(folder: Path, bucket: str, options: dict[str, Any]) -> Nodes:
    shared = {"shared_url": bucket, **({"shared_options": options} if options else {})}
    with Writer(folder / "node1", revision="abc", salt="one", **shared) as writer:
        for ids in PROMPTS[:4]:
            writer.put(ids)
    with Writer(folder / "node2", revision="abc", salt="two", **shared) as writer:
        for ids in PROMPTS[3:]:
            writer.put(ids)
    return Nodes(
        folder / "node1", folder / "node2", bucket, ("--shared-options", json.dumps(options)) if options else ()
    )


@pytest.fixture(scope="module", params=["file", "s3"])
def nodes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    folder = tmp_path_factory.mktemp("nodes")
    if request.param == "file":
        pytest.importorskip("obstore")
        yield fill(folder, f"file://{folder}/bucket", {})
        return
    pytest.importorskip("obstore")
    from tests.support.seaweed import BUCKET, SeaweedServer

    server = SeaweedServer(folder / "weed")
    try:
        yield fill(folder, f"s3://{BUCKET}/several", server.options())
    finally:
        server.stop()


def address(where: object) -> str:
    text = str(where)
    return f"{text.removeprefix('file://')}/v1" if text.startswith("file://") else text


def addresses(nodes: Nodes) -> list[str]:
    return [address(where) for where in (nodes.one, nodes.two, nodes.bucket)]


def plain(line: str) -> str:
    """Without what makes it bold."""
    return re.sub(r"\x1b\[[0-9;]*m", "", line)


def different(nodes: Nodes) -> int:
    """Chunks as an extraction counts them."""
    urls = url_options(json.loads(nodes.options[1])) if nodes.options else None
    index = ChunkIndex([str(nodes.one), str(nodes.two), nodes.bucket], urls=urls)
    index.close()
    return len(index)


CHUNKS = 2 + 6 * 3  # what all six prompts have, each chunk once
FILES = (2 + 4 * 3) + (2 + 3 * 3) + CHUNKS


class TestWhatIsThere:
    def test_list_says_of_every_row_where_it_is_from(self, nodes: Nodes) -> None:
        result = inspect_json("list", *nodes.all)
        assert result["cold_paths"] == addresses(nodes)
        assert result["not_read"] == []
        rows = Counter(chunk["source"] for chunk in result["chunks"])
        assert [rows[source] for source in addresses(nodes)] == [14, 11, CHUNKS]
        assert all(chunk["path"].startswith(f"{chunk['source']}/") for chunk in result["chunks"])
        summary = result["summary"]
        assert (summary["chunks"], summary["different_chunks"]) == (FILES, CHUNKS)
        for of, where in zip(summary["sources"], (nodes.one, nodes.two, nodes.bucket), strict=True):
            alone = inspect_json("list", where, *nodes.options)
            assert of == {"source": alone["cold_path"]} | {
                name: alone["summary"][name] for name in ("chunks", "tokens", "bytes", "skipped")
            }
            assert [{**chunk, "source": of["source"]} for chunk in alone["chunks"]] == [
                chunk for chunk in result["chunks"] if chunk["source"] == of["source"]
            ]

    def test_order_limit_and_filters_are_over_all(self, nodes: Nodes) -> None:
        result = inspect_json("list", *nodes.all, "--sort", "start", "--reverse", "--limit", "10")
        assert len(result["chunks"]) == 10
        assert [chunk["start"] for chunk in result["chunks"]] == [64] * 10
        prompt = ",".join(map(str, PROMPTS[3]))
        result = inspect_json("list", *nodes.all, "--prefix-of", prompt)
        assert len(result["chunks"]) == 3 * 5
        assert result["summary"]["different_chunks"] == 5

    def test_list_in_words(self, nodes: Nodes) -> None:
        lines = inspect("list", *nodes.all).stdout.splitlines()
        assert lines[0].split()[:2] == ["CHUNK", "SOURCE"]
        assert Counter(line.split()[1] for line in lines[1:-1]) == dict(
            zip(addresses(nodes), (14, 11, CHUNKS), strict=True)
        )
        assert f"{FILES} chunk files, " in lines[-1]
        assert f"{CHUNKS} different chunks" in lines[-1]
        assert "SOURCE" not in inspect("list", nodes.one).stdout

    @pytest.mark.parametrize("columns", [60, 120])
    def test_on_a_terminal_sources_have_numbers(self, nodes: Nodes, columns: int) -> None:
        shown = [plain(line) for line in on_a_terminal("list", *nodes.all, columns=columns).splitlines()]
        head = next(number for number, line in enumerate(shown) if line.startswith("CHUNK"))
        legend = " ".join(shown[:head])
        for number, source in enumerate(addresses(nodes), 1):
            assert f"source {number}:" in legend
            assert source in legend.replace(" ", "")
        assert shown[head].split()[:2] == ["CHUNK", "SOURCE"]
        assert "NAMESPACE" in shown[head]
        rows = shown[head + 1 : head + 1 + FILES]
        assert Counter(line.split()[1] for line in rows) == {"1": 14, "2": 11, "3": CHUNKS}
        assert max(map(len, shown)) <= columns

    def test_tree_puts_the_chunks_of_a_model_together(self, nodes: Nodes) -> None:
        result = inspect_json("tree", *nodes.all)
        [tree] = result["trees"]
        assert (tree["chunks"], tree["files"]) == (CHUNKS, FILES)
        assert tree["chunks"] == different(nodes)
        [root] = tree["branches"]
        assert (root["chunks"], root["sequences"]) == (2, 6)
        assert root["sources"] == dict.fromkeys(addresses(nodes), 2)
        one, two, bucket = addresses(nodes)
        held = Counter(frozenset(branch["sources"]) for branch in root["branches"])
        assert held == {frozenset({one, bucket}): 3, frozenset({two, bucket}): 2, frozenset({one, two, bucket}): 1}
        assert all({*branch["sources"].values()} == {3} for branch in root["branches"])
        assert all(root["text"] and branch["text"] for branch in root["branches"])
        title, first, *_ = inspect("tree", *nodes.all).stdout.splitlines()
        assert title.startswith(f"org/tiny@abc/bfloat16 ({CHUNKS} chunks in {FILES} files): ")
        assert f"  in {', '.join(addresses(nodes))}  tokens 0 to 32 (2 chunks" in first
        assert "  in 1, 2, 3  tokens 0 to 32" in on_a_terminal("tree", *nodes.all, columns=60)

    def test_stats_have_a_line_for_each_and_a_sum_that_counts_once(self, nodes: Nodes) -> None:
        figures = inspect_json("stats", *nodes.all)
        total = figures["total"]
        assert (total["chunks"], total["files"], total["sequences"]) == (CHUNKS, FILES, 6)
        assert total["tokens"] == 32 + 6 * 38
        assert total["sequence_tokens"] == 6 * 70
        assert total["dedup_factor"] == round(6 * 70 / (32 + 6 * 38), 3)
        assert [model["chunks"] for model in figures["models"]] == [CHUNKS]
        assert total["bytes"] == sum(of["bytes"] for of in figures["sources"])
        for of, where in zip(figures["sources"], (nodes.one, nodes.two, nodes.bucket), strict=True):
            alone = inspect_json("stats", where, *nodes.options)
            assert of["source"] == alone["cold_path"]
            for name, value in alone["total"].items():
                assert of[name] == value, name
            assert of["disk_bytes"] == alone["disk_bytes"]
            [ours] = [each for each in figures["namespaces"] if each["source"] == of["source"]]
            assert ours == {**alone["namespaces"][0], "source": of["source"]}
        words = inspect("stats", *nodes.all).stdout
        assert "all, each chunk once" in words
        assert f"{CHUNKS} chunks in {FILES} files, {total['tokens']} tokens" in words.splitlines()[-1]
        lines = [plain(line) for line in on_a_terminal("stats", *nodes.all, columns=60).splitlines()]
        assert f"3: {figures['namespaces'][2]['namespace']}" in lines
        assert max(map(len, lines)) <= 60

    def test_one_report_of_all(self, nodes: Nodes, tmp_path: Path) -> None:
        pytest.importorskip("jinja2")
        pytest.importorskip("matplotlib")
        out = tmp_path / "page.html"
        result = inspect_json("report", *nodes.all, "--out", out)
        assert result["sampled"] == FILES
        assert result["cold_paths"] == addresses(nodes)
        page = Page(out.read_text())
        assert page.open == []
        assert page.tags.count("table") == 3
        for word in (*addresses(nodes), "all, each chunk once", f"{CHUNKS}chunks", f"{FILES}files"):
            assert word in page.words
        inspect_json("report", nodes.one, "--out", out)
        alone = Page(out.read_text())
        assert alone.tags.count("table") == 2
        assert "Sources" not in alone.words


def test_a_chunk_whose_parent_is_elsewhere_is_put_behind_it(tmp_path: Path) -> None:
    """As an extraction does: by the hashes of a place, or by a chunk that both places have."""
    prompts = {name: add_prompt(namespace(tmp_path / name), tokens_of(4 * CHUNK)) for name in ("a", "b")}
    for name, gone in (("a", (2, 3)), ("b", (0, 1))):
        for number in gone:
            prompts[name].files[number].unlink()
    result = inspect_json("tree", tmp_path / "a", tmp_path / "b")
    [root] = result["trees"][0]["branches"]
    assert (root["chunks"], root["sources"]) == (4, {str(tmp_path / "a"): 2, str(tmp_path / "b"): 2})
    assert "  in 1 (2 of 4), 2 (2 of 4)  " in on_a_terminal("tree", tmp_path / "a", tmp_path / "b")
    assert inspect_json("stats", tmp_path / "a", tmp_path / "b")["total"]["sequences"] == 1


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    """Three cold paths of 10, 20 and 30 chunks."""
    paths = []
    for number in (1, 2, 3):
        paths.append(tmp_path / f"cold{number}")
        add_prompt(namespace(paths[-1]), tokens_of(10 * number * CHUNK, number))
    return paths


READING = ("list", "tree", "stats", "report", "verify", "gc")


class TestSourcesThatCannotBeRead:
    @pytest.mark.parametrize("command", READING)
    def test_it_is_named_and_the_others_are_shown(self, command: str, three: list[Path], tmp_path: Path) -> None:
        more = {"report": ("--out", tmp_path / "page.html"), "gc": ("--dry-run",)}.get(command, ())
        gone = tmp_path / "gone"
        done = inspect(command, three[0], gone, three[1], *more)
        assert done.returncode == exit_status.ERROR
        assert done.stderr == f"error: {gone} is not a cold path: No such file or directory\n"
        assert "1 of 3 sources could not be read" in done.stdout
        result = inspect_json(command, three[0], gone, three[1], *more, status=exit_status.ERROR)
        assert result["cold_paths"] == [str(path) for path in three[:2]]
        assert result["not_read"] == [
            {"source": str(gone), "why": f"{gone} is not a cold path: No such file or directory"}
        ]
        assert inspect(command, *three, *more).returncode == exit_status.DONE

    def test_with_all_but_one_missing_rows_still_say_where_they_are_from(self, three: list[Path]) -> None:
        result = inspect_json("list", three[0], "/gone", status=exit_status.ERROR)
        assert {chunk["source"] for chunk in result["chunks"]} == {str(three[0])}

    def test_none_at_all_is_one_line(self, tmp_path: Path) -> None:
        line = fails("list", tmp_path / "a", tmp_path / "b")
        assert f"{tmp_path}/a is not a cold path" in line
        assert f"{tmp_path}/b is not a cold path" in line
        assert "COLD_PATH is empty" in fails("list", tmp_path / "a", "")

    def test_a_page_with_a_source_missing_is_not_green(self, three: list[Path], tmp_path: Path) -> None:
        inspect("report", three[0], "/gone", "--out", tmp_path / "page.html")
        assert "could not be read: /gone is not a cold path" in Page((tmp_path / "page.html").read_text()).words


class TestNaming:
    def test_one_that_is_named_twice_counts_once(self, three: list[Path], tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(three[0])
        done = inspect("list", three[0], tmp_path / "link", f"{three[0]}/", "--format", "json")
        result = json.loads(done.stdout)
        assert done.stderr.splitlines() == [
            f"note: {where} was named before, as {three[0]}" for where in (tmp_path / "link", f"{three[0]}/")
        ]
        assert len(result["chunks"]) == 10
        assert result["cold_path"] == str(three[0]), "there is one after all"

    def test_a_configuration_is_instead_of_paths(self, three: list[Path], tmp_path: Path) -> None:
        assert inspect("list", *three, "--config", tmp_path / "x.yaml").returncode == exit_status.USAGE
        config = tmp_path / "lmcache.yaml"
        prefix = "storage_plugin.hs_tiered."
        config.write_text(
            json.dumps({"storage_plugins": ["hs_tiered"], "extra_config": {
                f"{prefix}module_path": "lmcache_hs_backend", f"{prefix}class_name": "HSTieredBackend",
                f"{prefix}cold_path": str(three[1]), f"{prefix}max_cold_size": 1,
            }})
        )  # fmt: skip
        assert inspect_json("list", "--config", config)["summary"]["limit_bytes"] == 1 << 30
        assert len(inspect_json("list", env={"LMCACHE_CONFIG_FILE": str(config)})["chunks"]) == 20

    def test_a_namespace_may_be_in_one_of_them_only(self, three: list[Path]) -> None:
        add_prompt(namespace(three[2], "org/other"), tokens_of(CHUNK), model="org/other")
        result = inspect_json("list", *three, "--namespace", "other")
        assert [chunk["source"] for chunk in result["chunks"]] == [str(three[2])]
        assert "there is none that begins so" in fails("list", *three, "--namespace", "nothing")
        assert len(inspect_json("tree", *three)["trees"]) == 2


class TestVerify:
    def test_what_is_wrong_is_below_the_name_of_its_source(self, three: list[Path]) -> None:
        bad = [sorted(three[number].rglob("*.safetensors"))[0] for number in (0, 2)]
        for path in bad:
            flip(path, -1)
        result = inspect_json("verify", *three, status=exit_status.FINDING)
        assert [(each["source"], each["path"]) for each in result["problems"] if each["kind"] == "checksum"] == [
            (str(three[0]), str(bad[0])), (str(three[2]), str(bad[1])),
        ]  # fmt: skip
        assert (result["chunks"], result["left"], result["chains_followed"]) == (60, 2, True)
        assert [(of["chunks"], of["left"]) for of in result["sources"]] == [(10, 1), (20, 0), (30, 1)]
        lines = inspect("verify", *three).stdout.splitlines()
        heads = [lines.index(str(path)) for path in three]
        assert [line.split()[0] for line in (lines[heads[0] + 1], lines[heads[2] + 1])] == ["checksum", "checksum"]
        assert lines[heads[1] + 1] == "20 chunk files, 160 KB: nothing is wrong"
        assert lines[-1] == "in all 60 chunk files, 480 KB: 2 wrong (checksum 2)"
        fixed = inspect_json("verify", *three, "--fix")
        assert [each["action"].startswith("moved to") for each in fixed["problems"] if each["fixed"]] == [True, True]

    @pytest.mark.parametrize(("amount", "chunks"), [("7", 7), ("50%", 30), ("1000", 60)])
    def test_a_sample_is_drawn_from_all(self, three: list[Path], amount: str, chunks: int) -> None:
        result = inspect_json("verify", *three, "--sample", amount)
        assert (result["chunks"], result["only_headers"]["chunks"]) == (chunks, 60 - chunks)
        assert sum(of["chunks"] for of in result["sources"]) == chunks
        assert result["chains_followed"]

    def test_the_time_is_for_all(self, three: list[Path]) -> None:
        result = inspect_json("verify", *three, "--max-time", AT_ONCE, status=exit_status.UNFINISHED)
        assert [of["chunks"] for of in result["sources"]] == [1, 0, 0]
        assert [of["not_reached"]["chunks"] for of in result["sources"]] == [9, 20, 30]
        assert (result["chunks"], result["not_reached"]["chunks"], result["time_over"]) == (1, 59, True)
        assert result["problems"] == []
        assert "because --max-time was over" in inspect("verify", *three, "--max-time", AT_ONCE).stdout

    def test_runs_with_a_cursor_read_every_file_of_all_once(self, three: list[Path], tmp_path: Path) -> None:
        files = sorted(str(path) for cold in three for path in cold.rglob("*.safetensors"))
        for path in files:
            flip(Path(path), -1)
        cursor, found, status = tmp_path / "cursor", [], exit_status.FINDING
        for number in range(12):  # into the second one
            result = inspect_json("verify", *three, "--cursor", cursor, "--max-time", AT_ONCE, status=status)
            assert (result["chunks"], result["read_before"]["chunks"]) == (1, number)
            found += [each["path"] for each in result["problems"] if each["kind"] == "checksum"]
        assert [of["read_before"]["chunks"] for of in result["sources"]] == [10, 1, 0]
        result = inspect_json("verify", *three, "--cursor", cursor, status=status)
        found += [each["path"] for each in result["problems"] if each["kind"] == "checksum"]
        assert (result["chunks"], result["read_before"]["chunks"]) == (48, 12)
        # What was read before has its header read again, by which chains are followed.
        assert result["chains_followed"]
        assert sorted(found) == files
        assert not cursor.exists()

    def test_a_source_that_is_away_keeps_its_place(self, three: list[Path], tmp_path: Path) -> None:
        cursor = tmp_path / "cursor"
        for _ in range(2):
            inspect_json("verify", *three, "--cursor", cursor, "--max-time", AT_ONCE, status=exit_status.UNFINISHED)
        os.rename(three[0], tmp_path / "away")
        result = inspect_json("verify", *three, "--cursor", cursor, status=exit_status.ERROR)
        assert [of["chunks"] for of in result["sources"]] == [20, 30]
        assert cursor.exists()
        os.rename(tmp_path / "away", three[0])
        result = inspect_json("verify", *three, "--cursor", cursor)
        assert [of["chunks"] for of in result["sources"]] == [8, 0, 0]
        assert not cursor.exists()

    def test_a_cursor_of_others_is_one_line(self, three: list[Path], tmp_path: Path) -> None:
        cursor = tmp_path / "cursor"
        inspect_json("verify", *three, "--cursor", cursor, "--max-time", AT_ONCE, status=exit_status.UNFINISHED)
        assert f"is of {three[0]}, {three[1]}, {three[2]}, not of {three[0]}" in fails(
            "verify", three[0], "--cursor", cursor
        )
        assert "lies in the cold path" in fails("verify", *three, "--cursor", three[2] / "cursor")


class TestGc:
    def test_each_is_gone_through_by_itself(self, three: list[Path]) -> None:
        would = inspect_json("gc", *three, "--max-size", "80KB", "--dry-run")
        by_source = Counter(Path(file["path"]).parents[2].name for file in would["would_delete"])
        assert by_source == {"cold2": 10, "cold3": 20}
        done = inspect_json("gc", *three, "--max-size", "80KB", "--yes")
        assert done["deleted_files"] == 30
        assert [len([*path.rglob("*.safetensors")]) for path in three] == [10, 10, 10]

    def test_a_prefix_that_one_of_them_has_not_deletes_nothing(self, three: list[Path]) -> None:
        add_prompt(namespace(three[0], "org/other"), tokens_of(CHUNK), model="org/other")
        assert "--keep org--other: there is none" in fails("gc", *three, "--keep", "org--other", "--yes")
        assert sum(len([*path.rglob("*.safetensors")]) for path in three) == 61
