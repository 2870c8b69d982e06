"""``lmcache-hs-inspect list`` shows what is in a cold path, whatever else is in there."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import signal
import subprocess
import termios
import time
from array import array
from pathlib import Path

import pytest
import torch

from lmcache_hs_backend.chunk import chunk_name
from lmcache_hs_backend.cli.inspect.stream import ChunkStream, look_at
from lmcache_hs_backend.cli.inspect.workers import in_processes
from lmcache_hs_backend.format import chunk_file, layout
from lmcache_hs_backend.format.reader import ColdTierReader
from tests.support.cold_paths import CHUNK, MODEL, add_prompt, file_bytes, namespace, tokens_of
from tests.support.inspecting import PROGRAM, blocking, environment, fails, inspect, inspect_json
from tests.support.waiting import wait_until

FIELDS = {
    "key", "chunk_hash", "parent", "namespace", "model", "worker_id", "start", "num_tokens", "layers", "dtype",
    "hidden_dim", "bytes", "path", "created_at", "accessed_at", "state",
}  # fmt: skip


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    return tmp_path / "cold"


def listed(*args: object) -> list[dict]:
    return inspect_json("list", *args)["chunks"]


class TestListing:
    def test_every_field_of_every_chunk_is_shown(self, cold: Path) -> None:
        directory = namespace(cold, worker_id=3, world_size=4)
        prompt = add_prompt(directory, tokens_of(2 * CHUNK + 10), layers=(-1, 7), hidden=16, used_at=1_000_000_000)
        chunks = sorted(listed(cold), key=lambda chunk: chunk["start"])
        assert all(set(chunk) == FIELDS for chunk in chunks)
        assert [chunk["path"] for chunk in chunks] == [str(path) for path in prompt.files]
        assert [chunk["num_tokens"] for chunk in chunks] == [CHUNK, CHUNK, 10]
        assert [chunk["parent"] for chunk in chunks] == ["", *prompt.hashes[:-1]]
        tail = chunks[-1]
        assert tail["layers"] == [-1, 7]
        assert tail["dtype"] == "bfloat16"
        assert tail["hidden_dim"] == 16
        assert tail["bytes"] == prompt.files[-1].stat().st_size
        assert tail["accessed_at"] == "2001-09-09T01:46:40Z"
        assert tail["created_at"] == "2026-01-02T03:04:05Z"
        assert (tail["worker_id"], tail["model"], tail["state"]) == (3, MODEL, "cold")
        assert tail["namespace"] == directory.name
        assert chunk_name(tail["key"]).hex() == prompt.files[-1].stem

    def test_layers_that_differ_are_told_one_by_one(self, cold: Path) -> None:
        directory = namespace(cold)
        prompt = add_prompt(directory, tokens_of(CHUNK), layers=(0,))
        header = chunk_file.read_header(chunk_file.FileLayer(), str(prompt.files[0]))
        rows = {1: torch.zeros(CHUNK, 8), 0: prompt.rows[0][0]}
        prompt.files[0].write_bytes(file_bytes(header.meta, header.token_ids, rows))
        [chunk] = listed(cold)
        assert chunk["layers"] == [1, 0]
        assert chunk["dtype"] == ["float32", "bfloat16"]
        assert chunk["hidden_dim"] == [8, 32]

    def test_the_archive_and_a_second_process_are_included(self, cold: Path) -> None:
        directory = namespace(cold)
        add_prompt(directory, tokens_of(CHUNK, 1))
        add_prompt(directory / "archive", tokens_of(CHUNK, 2))
        second = directory / "p1"
        second.mkdir()
        (second / "namespace.json").write_bytes((directory / "namespace.json").read_bytes())
        add_prompt(second, tokens_of(CHUNK, 3))
        states = {(chunk["state"], chunk["namespace"]) for chunk in listed(cold)}
        assert states == {("cold", directory.name), ("archived", directory.name), ("cold", f"{directory.name}/p1")}

    def test_lines_in_plain_text_carry_the_same_and_a_summary(self, cold: Path) -> None:
        prompt = add_prompt(namespace(cold), tokens_of(3 * CHUNK))
        lines = inspect("list", cold).stdout.splitlines()
        assert lines[0].split()[:4] == ["CHUNK", "START", "TOKENS", "LAYERS"]
        assert {line.split()[0] for line in lines[1:-1]} == set(prompt.hashes)
        assert lines[-1].startswith(f"3 chunks, {3 * CHUNK} tokens, ")
        assert "\x1b" not in "".join(lines)

    def test_the_configuration_names_the_path_and_the_limit(self, cold: Path, tmp_path: Path) -> None:
        add_prompt(namespace(cold), tokens_of(CHUNK))
        config = tmp_path / "lmcache.yaml"
        config.write_text(
            "storage_plugins: [hs]\nextra_config:\n"
            "  storage_plugin.hs.module_path: lmcache_hs_backend\n  storage_plugin.hs.class_name: HSTieredBackend\n"
            f"  storage_plugin.hs.cold_path: {cold}\n  storage_plugin.hs.max_cold_size: 0.5\n"
        )
        assert inspect_json("list", "--config", config)["summary"]["limit_bytes"] == 1 << 29
        assert "% of the limit of 512 MB" in inspect("list", "--config", config).stdout
        from_environment = inspect_json("list", env={"LMCACHE_CONFIG_FILE": str(config)})
        assert len(from_environment["chunks"]) == 1

    def test_output_goes_to_a_file_and_quiet_prints_nothing(self, cold: Path, tmp_path: Path) -> None:
        add_prompt(namespace(cold), tokens_of(CHUNK))
        done = inspect("list", cold, "--format", "json", "-q", "--output", tmp_path / "out.json")
        assert (done.returncode, done.stdout) == (0, "")
        assert len(json.loads((tmp_path / "out.json").read_text())["chunks"]) == 1
        assert [path.name for path in tmp_path.glob("out*")] == ["out.json"]

    def test_control_characters_of_a_file_never_reach_the_terminal(self, cold: Path) -> None:
        model = "evil\x1b[2J\nmodel"
        add_prompt(namespace(cold, model), tokens_of(CHUNK), model=model)
        done = inspect("list", cold)
        assert "\x1b" not in done.stdout
        assert len(done.stdout.splitlines()) == 3
        assert listed(cold)[0]["model"] == model


class TestChoosing:
    @pytest.fixture
    def mixed(self, cold: Path) -> Path:
        small, large = namespace(cold, "org/small"), namespace(cold, "org/large-7b")
        now = time.time()
        add_prompt(small, tokens_of(4 * CHUNK, 1), model="org/small", layers=(0, 5), used_at=now - 7200)
        add_prompt(large, tokens_of(2 * CHUNK + 3, 2), model="org/large-7b", hidden=64, used_at=now - 10)
        add_prompt(small / "archive", tokens_of(CHUNK, 3), model="org/small")
        return cold

    @pytest.mark.parametrize(
        ("options", "count"),
        [
            ((), 8),
            (("--model", "org/small"), 5),
            (("--model", "large*"), 3),
            (("--model", "nothing"), 0),
            (("--layer", "5"), 4),
            (("--layer", "0", "--layer", "5"), 4),
            (("--state", "archived"), 1),
            (("--state", "cold", "--namespace", "small"), 4),
            (("--since", "1h"), 4),
            (("--before", "1h"), 4),
            (("--since", "2020-01-01"), 8),
            (("--min-tokens", str(CHUNK)), 7),
            (("--limit", "2"), 2),
        ],
    )
    def test_filters(self, mixed: Path, options: tuple[str, ...], count: int) -> None:
        assert len(listed(mixed, *options)) == count

    def test_sorting_and_limit(self, mixed: Path) -> None:
        by_bytes = [chunk["bytes"] for chunk in listed(mixed, "--sort", "bytes")]
        assert by_bytes == sorted(by_bytes)
        largest = [chunk["bytes"] for chunk in listed(mixed, "--sort", "bytes", "--reverse", "--limit", "3")]
        assert largest == sorted(by_bytes, reverse=True)[:3]

    def test_prefix_of_token_ids_finds_exactly_the_chunks_of_that_prompt(self, cold: Path, tmp_path: Path) -> None:
        directory = namespace(cold)
        shared = tokens_of(2 * CHUNK, 1)
        one = add_prompt(directory, shared + tokens_of(2 * CHUNK, 2))
        add_prompt(directory, shared + tokens_of(2 * CHUNK, 3))
        ids = tmp_path / "ids"
        ids.write_text(json.dumps(one.tokens[: 3 * CHUNK + 5]))
        found = listed(cold, "--prefix-of", f"@{ids}")
        assert {chunk["path"] for chunk in found} == {str(path) for path in one.files[:3]}

    def test_prefix_of_a_text(self, cold: Path, tmp_path: Path) -> None:
        tokenizers = pytest.importorskip("tokenizers")
        words = [f"w{number}" for number in range(500)]
        model = tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, "w0")
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        prompt = add_prompt(namespace(cold), list(range(2 * CHUNK)))
        text = " ".join(words[: 2 * CHUNK - 1])
        found = listed(cold, "--prefix-of", text, "--tokenizer", tmp_path)
        assert [chunk["path"] for chunk in found] == [str(prompt.files[0])]


def crowd(directory: Path, count: int, folders: int = 2) -> list[Path]:
    """Chunks by the thousand in a few of the 256 folders: more than are ever opened or read ahead."""
    [whole] = add_prompt(directory, tokens_of(CHUNK)).files
    header = chunk_file.read_header(chunk_file.FileLayer(), str(whole))
    whole.unlink()
    files: list[Path] = []
    for number in itertools.count():
        key = f"{MODEL}@1@0@{number:016x}@bfloat16"
        name = chunk_name(key)
        if name[0] >= folders:
            continue
        path = Path(layout.chunk_path(str(directory), name))
        path.parent.mkdir(exist_ok=True)
        meta = header.meta._replace(key=key, chunk_hash=f"{number:016x}")
        path.write_bytes(file_bytes(meta, header.token_ids, {0: torch.zeros(CHUNK, 1)}))
        files.append(path)
        if len(files) == count:
            break
    return files


def read_unless_three(number: int) -> list[int]:
    """For in_processes, which takes functions of a module."""
    if number == 3:
        raise PermissionError(13, "not to be read", "/some/folder")
    return [number] * number


class TestTrouble:
    def test_what_is_not_a_chunk_is_skipped_and_counted(self, cold: Path) -> None:
        files = add_prompt(namespace(cold), tokens_of(8 * CHUNK)).files
        files[0].write_bytes(files[0].read_bytes()[:-100])  # half-written
        files[1].write_bytes(b"not a chunk at all")
        os.unlink(files[2])
        os.mkfifo(files[2])
        os.unlink(files[3])
        files[3].symlink_to(files[4])
        files[5].write_bytes(files[6].read_bytes())  # another chunk's
        (files[7].parent / ".tmpAb12Cd").write_text("left over")
        (files[7].parent / "README").write_text("foreign")
        result = inspect_json("list", cold)
        assert len(result["chunks"]) == 3
        assert result["summary"]["skipped"] == {"size": 1, "header": 1, "type": 2, "key": 1}
        assert "5 skipped (header 1, key 1, size 1, type 2)" in inspect("list", cold).stdout

    def test_files_that_vanish_meanwhile_are_skipped_and_counted(self, cold: Path) -> None:
        prompt = add_prompt(namespace(cold), tokens_of(40 * CHUNK))
        reader = ColdTierReader(str(cold))
        places = list(ChunkStream(reader, reader.namespaces).places())
        for path in prompt.files[:15]:
            path.unlink()
        looks = [look_at(reader.files, place) for place in places]
        assert looks.count("vanished") == 15
        assert sum(not isinstance(look, str) for look in looks) == 25

    def test_it_streams_so_files_that_vanish_behind_the_first_lines_are_counted(self, cold: Path) -> None:
        files = crowd(namespace(cold), 8000, folders=1)  # whose names are all read at once
        process = subprocess.Popen(
            [*PROGRAM, "list", str(cold), "--format", "json"], stdout=subprocess.PIPE, env=environment()
        )
        assert process.stdout is not None
        waiting = array("i", [0])

        def pipe_fills() -> bool:
            fcntl.ioctl(process.stdout, termios.FIONREAD, waiting)
            return waiting[0] > 30_000

        wait_until(pipe_fills)
        for path in files:
            path.unlink()
        result = json.loads(process.stdout.read())
        assert process.wait(30) == 0
        skipped = result["summary"]["skipped"]
        assert set(skipped) == {"vanished"}  # those whose names had been read already
        assert len(result["chunks"]) == 8000 - skipped["vanished"] > 100

    @pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="on one CPU there is one process")
    def test_a_reading_process_that_is_killed_is_one_line_and_not_a_shorter_list(self, cold: Path) -> None:
        crowd(namespace(cold), 8000)
        process = subprocess.Popen(
            [*PROGRAM, "list", str(cold)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
        )
        assert process.stdout is not None
        assert process.stderr is not None
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_until(lambda: len(children.read_text().split()) == 2)
        os.kill(int(children.read_text().split()[0]), signal.SIGKILL)
        assert b" chunks, " not in process.stdout.read()
        assert process.wait(30) == 1
        assert process.stderr.read().startswith(b"lmcache-hs-inspect: error: a process that was reading files has died")

    def test_what_goes_wrong_in_a_reading_process_is_raised_where_it_is_read(self) -> None:
        results = in_processes(read_unless_three, [1, 2, 3, 4])
        assert [next(results) for _ in range(3)] == [1, 2, 2]
        with pytest.raises(PermissionError, match="/some/folder"):
            next(results)

    def test_no_cold_path_is_one_line(self, tmp_path: Path) -> None:
        assert "is not a cold path" in fails("list", tmp_path)
        assert "No such file" in fails("list", tmp_path / "nowhere")
        (tmp_path / "file").write_text("")
        assert "Not a directory" in fails("list", tmp_path / "file")

    def test_a_namespace_instead_of_its_cold_path_is_told(self, cold: Path) -> None:
        assert "name the directory above it" in fails("list", namespace(cold))

    def test_a_newer_format_is_one_line(self, cold: Path) -> None:
        directory = namespace(cold)
        record = json.loads((directory / "namespace.json").read_text())
        (directory / "namespace.json").write_text(json.dumps({**record, "version": 2}))
        assert "format version 2; this program knows version 1" in fails("list", cold)

    def test_wrong_options_are_one_line(self, cold: Path) -> None:
        add_prompt(namespace(cold), tokens_of(CHUNK))
        assert "--since yesterday" in fails("list", cold, "--since", "yesterday")
        assert "--limit is 0" in fails("list", cold, "--limit", "0")
        assert "there is none that begins so" in fails("list", cold, "--namespace", "other")
        assert "token ids such as 1,2,3" in fails("list", cold, "--prefix-of", "some text")
        assert "cannot be written" in fails("list", cold, "--output", "/nowhere/out")

    def test_a_reader_that_has_seen_enough_ends_it_quietly(self, cold: Path) -> None:
        add_prompt(namespace(cold), tokens_of(2000 * CHUNK))
        process = subprocess.Popen(
            [*PROGRAM, "list", str(cold)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
        )
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(30) == 141
        assert process.stderr.read() == b""

    def test_it_needs_neither_lmcache_nor_torch(self, cold: Path, tmp_path: Path) -> None:
        add_prompt(namespace(cold), tokens_of(2 * CHUNK))
        env = blocking(tmp_path / "blocker", "lmcache", "vllm", "torch", "safetensors", "transformers")
        assert len(inspect_json("list", cold, env=env)["chunks"]) == 2
