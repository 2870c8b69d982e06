"""``lmcache-hs-inspect verify`` finds whatever is wrong, and ``--fix`` sets aside without deleting."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lmcache_hs_backend.chunk import token_bytes
from lmcache_hs_backend.cli.inspect.care import repair
from lmcache_hs_backend.cli.inspect.care.verifier import Finding
from lmcache_hs_backend.config import TieredConfig
from lmcache_hs_backend.format import chunk_file
from lmcache_hs_backend.format.namespace import NamespaceId
from lmcache_hs_backend.format.reader import ColdTierReader
from lmcache_hs_backend.format.request_log import RecordWriter
from lmcache_hs_backend.tiered import TieredStore
from lmcache_hs_backend.tiers.disk.owned_namespace import NamespaceLock
from tests.support.cold_paths import CHUNK, HIDDEN, MODEL, Prompt, add_prompt, file_bytes, namespace, refs_of, tokens_of
from tests.support.inspecting import PROGRAM, blocking, environment, inspect, inspect_json
from tests.support.processes import takes_sigint
from tests.support.terminals import on_a_terminal, without_escapes
from tests.support.waiting import wait_until


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    return tmp_path / "cold"


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def kinds(cold: Path, *options: str) -> list[str]:
    result = inspect_json("verify", cold, *options, status=1)
    return [problem["kind"] for problem in result["problems"]]


class TestFinding:
    def test_nothing_is_wrong_with_what_was_just_written(self, cold: Path) -> None:
        directory = namespace(cold)
        add_prompt(directory, tokens_of(5 * CHUNK + 7), layers=(-1, 4))
        add_prompt(directory / "archive", tokens_of(2 * CHUNK, 1))
        result = inspect_json("verify", cold)
        assert (result["chunks"], result["left"], result["problems"]) == (8, 0, [])
        assert inspect("verify", cold).stdout.endswith("nothing is wrong\n")

    @pytest.mark.parametrize(
        ("offset", "kind"),
        [(-1, "checksum"), (-CHUNK * HIDDEN * 2, "checksum"), (4090, "checksum"), (0, "header"), (9, "header")],
    )
    def test_a_flipped_bit(self, cold: Path, offset: int, kind: str) -> None:
        files = add_prompt(namespace(cold), tokens_of(2 * CHUNK)).files
        flip(files[1], offset)
        assert kinds(cold) == [kind]

    def test_every_kind_of_damage_and_litter(self, cold: Path) -> None:
        directory = namespace(cold)
        files = add_prompt(directory, tokens_of(20 * CHUNK)).files
        files.reverse()  # damage from the end, so that nothing in front loses its parent
        files[0].write_bytes(files[0].read_bytes()[:-1])
        files[1].write_bytes(b"")
        files[2].write_bytes(files[9].read_bytes())
        files[3].unlink()
        files[3].mkdir()
        files[4].unlink()
        os.mkfifo(files[4])
        files[5].rename(directory / ("00" if files[5].parent.name != "00" else "01") / files[5].name)
        (files[6].parent / ".abc.1.2.tmp").write_text("x")
        (files[6].parent / "notes.txt").write_text("x")
        (directory / "notes.txt").write_text("x")
        assert sorted(kinds(cold)) == sorted(
            ["size", "header", "key", "type", "type", "misplaced", "temporary", "foreign", "foreign"]
        )

    @pytest.fixture(autouse=True)
    def folders(self, cold: Path) -> None:
        for name in ("00", "01"):
            (namespace(cold) / name).mkdir(exist_ok=True)

    def test_a_chunk_without_its_parent_is_found_once_for_its_branch(self, cold: Path) -> None:
        files = add_prompt(namespace(cold), tokens_of(6 * CHUNK)).files
        files[2].unlink()
        result = inspect_json("verify", cold)  # harmless: a note, and exit status 0
        [problem] = result["problems"]
        assert result["left"] == 0
        assert (problem["kind"], problem["path"]) == ("orphan", str(files[3]))
        done = inspect("verify", cold)
        assert "note: 1 branches in" in done.stdout
        assert done.stdout.endswith("nothing is wrong\n")
        assert "1 more chunk(s) continue it" in problem["detail"]

    def test_a_parent_with_the_same_hash_and_other_tokens_is_none(self, cold: Path) -> None:
        directory = namespace(cold)
        prompt = add_prompt(directory, tokens_of(2 * CHUNK))
        header = chunk_file.read_header(chunk_file.FileLayer(), str(prompt.files[0]))
        other = token_bytes(tokens_of(CHUNK, 99))
        import xxhash

        meta = header.meta._replace(prefix=xxhash.xxh3_128_digest(other))
        prompt.files[0].write_bytes(file_bytes(meta, other, prompt.rows[0]))
        [problem] = inspect_json("verify", cold)["problems"]
        assert (problem["kind"], problem["path"]) == ("orphan", str(prompt.files[1]))
        assert "is here with other token ids" in problem["detail"]

    def test_a_wrong_prefix_digest(self, cold: Path) -> None:
        prompt = add_prompt(namespace(cold), tokens_of(CHUNK))
        header = chunk_file.read_header(chunk_file.FileLayer(), str(prompt.files[0]))
        meta = header.meta._replace(prefix=bytes(16))
        prompt.files[0].write_bytes(file_bytes(meta, header.token_ids, prompt.rows[0]))
        assert kinds(cold) == ["prefix"]

    def test_a_chunk_of_another_model(self, cold: Path) -> None:
        add_prompt(namespace(cold), tokens_of(CHUNK), model="org/other")
        assert kinds(cold) == ["model"]

    def test_a_namespace_of_a_newer_version_beside_a_good_one(self, cold: Path) -> None:
        add_prompt(namespace(cold), tokens_of(CHUNK))
        newer = namespace(cold, "org/newer") / "namespace.json"
        newer.write_text(json.dumps({**json.loads(newer.read_text()), "version": 9}))
        assert kinds(cold) == ["namespace"]

    def test_kinds_can_be_ignored(self, cold: Path) -> None:
        directory = namespace(cold)
        add_prompt(directory, tokens_of(3 * CHUNK)).files[1].unlink()
        (directory / "foreign").write_text("")
        assert sorted(kinds(cold)) == ["foreign", "orphan"]
        assert inspect("verify", cold, "--ignore", "orphan", "--ignore", "foreign").returncode == 0

    def test_it_says_so_in_words(self, cold: Path) -> None:
        files = add_prompt(namespace(cold), tokens_of(2 * CHUNK)).files
        flip(files[1], -1)
        done = inspect("verify", cold)
        assert done.returncode == 1
        first, last = done.stdout.splitlines()
        assert first.startswith("checksum")
        assert str(files[1]) in first
        assert last.endswith("1 wrong (checksum 1)")

    def test_checking_needs_neither_lmcache_nor_torch(self, cold: Path, tmp_path: Path) -> None:
        add_prompt(namespace(cold), tokens_of(2 * CHUNK))
        env = blocking(tmp_path / "blocker", "lmcache", "vllm", "torch", "safetensors")
        assert inspect_json("verify", cold, env=env)["chunks"] == 2

    def test_ctrl_c_ends_it_with_130(self, cold: Path, tmp_path: Path) -> None:
        add_prompt(namespace(cold), tokens_of(3000 * CHUNK))
        process = subprocess.Popen(
            [*PROGRAM, "verify", str(cold), "--output", str(tmp_path / "out")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), preexec_fn=takes_sigint,
        )  # fmt: skip
        wait_until(lambda: bool(list(tmp_path.glob("out.*.tmp"))))
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert (process.returncode, errors) == (130, "")
        assert list(tmp_path.glob("out*")) == []


def write_records(directory: Path, prompt: Prompt, *lengths: int) -> Path:
    """Request records for the first so many tokens of a prompt, by the connector's own writer. The file."""
    writer = RecordWriter(str(directory), 0o700)
    for number, length in enumerate(lengths):
        *front, last = refs_of(prompt.tokens[:length])
        writer.append(
            {
                "request_id": f"request-{number}", "created_at": "2026-01-02T03:04:05Z", "finish_reason": "stop",
                "prompt_tokens": length // 2, "generated_tokens": length - length // 2, "expected_tokens": length,
                "num_tokens": length, "prefix": last.prefix.hex(),
                "parent_prefix": front[-1].prefix.hex() if front else "", "last_chunk": last.chunk_hash,
            }
        )  # fmt: skip
    writer.close()
    return max((directory / "sequences").iterdir())


class TestRequestRecords:
    def test_records_whose_rows_are_here_are_right(self, cold: Path) -> None:
        directory = namespace(cold)
        prompt = add_prompt(directory, tokens_of(4 * CHUNK + 9))
        # to the end, to the end of a chunk, in the middle of one (a longer one has replaced it), in the first
        write_records(directory, prompt, 4 * CHUNK + 9, 2 * CHUNK, 3 * CHUNK + 5, 7)
        result = inspect_json("verify", cold)
        assert (result["records"], result["records_gone"], result["problems"]) == (4, 0, [])
        assert inspect("verify", cold).stdout.endswith("nothing is wrong\n")

    def test_rows_that_were_evicted_are_a_note_and_no_error(self, cold: Path) -> None:
        directory = namespace(cold)
        prompt = add_prompt(directory, tokens_of(4 * CHUNK))
        write_records(directory, prompt, 4 * CHUNK, 4 * CHUNK, 3 * CHUNK + 1, 2 * CHUNK)
        prompt.files[3].unlink()
        result = inspect_json("verify", cold)
        assert (result["records"], result["records_gone"], result["left"]) == (4, 3, 0)
        done = inspect("verify", cold)
        assert done.returncode == 0
        assert "note: of 3 of 4 request records, rows have been evicted" in done.stdout

    def test_rows_behind_a_gap_and_rows_of_other_tokens_are_not_taken_for_them(self, cold: Path) -> None:
        directory = namespace(cold)
        prompt = add_prompt(directory, tokens_of(3 * CHUNK))
        other = add_prompt(namespace(cold, "org/elsewhere"), tokens_of(2 * CHUNK, 1), model="org/elsewhere")
        write_records(directory, prompt, 3 * CHUNK)
        write_records(directory, other, 2 * CHUNK)
        assert inspect_json("verify", cold)["records_gone"] == 1
        prompt.files[1].unlink()
        assert inspect_json("verify", cold, "--ignore", "orphan")["records_gone"] == 2

    def test_lines_that_are_no_records_are_found_and_left_as_they_are(self, cold: Path) -> None:
        directory = namespace(cold)
        prompt = add_prompt(directory, tokens_of(2 * CHUNK))
        path = write_records(directory, prompt, 2 * CHUNK, CHUNK)
        good = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(good[0] + b"\x00\xff\x80\n{}\n" + good[1])
        before = path.read_bytes()
        for options in ((), ("--fix",)):
            result = inspect_json("verify", cold, *options, status=1)
            [problem] = result["problems"]
            assert (problem["kind"], problem["path"], problem["fixed"]) == ("record", str(path), False)
            assert problem["detail"].startswith("line 2 is no request record: ")
            assert problem["detail"].endswith("; 1 more")
            assert (result["records"], result["records_gone"]) == (2, 0)
        assert path.read_bytes() == before
        assert inspect("verify", cold, "--ignore", "record").returncode == 0

    def test_a_newer_record_is_told(self, cold: Path) -> None:
        directory = namespace(cold)
        path = write_records(directory, add_prompt(directory, tokens_of(CHUNK)), CHUNK)
        path.write_text(path.read_text().replace('"version":1', '"version":2'))
        [problem] = inspect_json("verify", cold, status=1)["problems"]
        assert problem["detail"] == "line 1 is no request record: version 2, this program knows 1"

    def test_a_last_line_that_was_never_finished_is_a_note(self, cold: Path) -> None:
        directory = namespace(cold)
        path = write_records(directory, add_prompt(directory, tokens_of(CHUNK)), CHUNK, CHUNK)
        path.write_bytes(path.read_bytes()[:-40])
        result = inspect_json("verify", cold)
        assert (result["records"], result["records_cut_short"], result["left"]) == (1, 1, 0)
        assert f"note: the last line of {path} was never finished" in inspect("verify", cold).stdout

    def test_what_is_no_regular_file_is_not_read(self, cold: Path) -> None:
        directory = namespace(cold)
        add_prompt(directory, tokens_of(CHUNK))
        (directory / "sequences").mkdir()
        os.mkfifo(directory / "sequences" / "requests-000001.jsonl")
        (directory / "sequences" / "requests-000002.jsonl").symlink_to("/etc/passwd")
        assert kinds(cold) == ["record", "record"]


class TestFixing:
    def test_bad_files_are_set_aside_whole_and_then_nothing_is_wrong(self, cold: Path) -> None:
        directory = namespace(cold)
        files = add_prompt(directory, tokens_of(4 * CHUNK)).files
        flip(files[3], -1)
        bad = files[3].read_bytes()
        left_over = files[0].parent / ".abc.1.2.tmp"
        left_over.write_text("half a chunk")
        result = inspect_json("verify", cold, "--fix")
        assert result["counts"] == {"checksum": 1, "temporary": 1}
        assert all(problem["fixed"] for problem in result["problems"])
        assert not files[3].exists()
        assert not left_over.exists()
        [kept] = (directory / "quarantine").glob(f"{files[3].stem}.*.checksum.safetensors")
        assert kept.read_bytes() == bad
        assert len(list((directory / "quarantine").iterdir())) == 2
        assert inspect("verify", cold).returncode == 0

    def test_what_is_not_ours_or_not_bad_is_left_alone(self, cold: Path) -> None:
        directory = namespace(cold)
        files = add_prompt(directory, tokens_of(3 * CHUNK)).files
        files[0].unlink()
        (directory / "foreign").write_text("mine")
        result = inspect_json("verify", cold, "--fix", status=1)
        assert [problem["fixed"] for problem in result["problems"]] == [False, False]
        assert (directory / "foreign").read_text() == "mine"
        assert files[1].exists()

    def test_unfinished_files_of_a_running_engine_are_left_alone(self, cold: Path) -> None:
        directory = namespace(cold)
        files = add_prompt(directory, tokens_of(CHUNK)).files
        temporary = files[0].parent / ".abc.1.2.tmp"
        temporary.write_text("half a chunk")
        lock = NamespaceLock.take(str(directory))
        assert lock is not None
        try:
            assert inspect("verify", cold, "--fix").returncode == 0  # a moment old, in use: in flight
            os.utime(temporary, (1, 1))
            [problem] = inspect_json("verify", cold, "--fix", status=1)["problems"]
            assert "running engine" in problem["action"]
            assert temporary.exists()
        finally:
            lock.close()

    def test_a_file_that_was_replaced_after_the_look_goes_back(self, cold: Path) -> None:
        directory = namespace(cold)
        path = add_prompt(directory, tokens_of(CHUNK)).files[0]
        good = path.read_bytes()
        flip(path, -1)
        judged = os.lstat(path)
        fresh = path.with_name("fresh")
        fresh.write_bytes(good)
        fresh.rename(path)  # an engine publishes a good one
        [found] = ColdTierReader(str(cold)).namespaces
        assert repair._quarantine(str(path), judged, found, "checksum") == "replaced meanwhile"
        assert path.read_bytes() == good
        assert list((directory / "quarantine").iterdir()) == []

    def test_a_file_that_is_good_by_now_stays(self, cold: Path) -> None:
        path = add_prompt(namespace(cold), tokens_of(CHUNK)).files[0]
        [found] = ColdTierReader(str(cold)).namespaces
        [(_, dealt_with, action)] = repair.repair([Finding("checksum", str(path), "", found)])
        assert (dealt_with, action) == (True, "good by now")
        assert path.exists()


class TestBesideARunningStore:
    @pytest.fixture
    def store(self, cold: Path) -> Iterator[TieredStore]:
        config = TieredConfig(cold_path=str(cold), min_free_disk=0, max_cold_size=1, write_back_sec=0)
        ident = NamespaceId(model=MODEL, kv_dtype="bfloat16", chunk_size=CHUNK)
        store = TieredStore(config, 1 << 20, ident)
        yield store
        store.close()

    @staticmethod
    def put(store: TieredStore, seed: int, chunks: int = 8) -> tuple[list, torch.Tensor]:
        tokens = tokens_of(chunks * CHUNK, seed)
        rows = torch.randn(len(tokens), HIDDEN, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
        refs = refs_of(tokens)
        store.store(refs, token_bytes(tokens), {0: rows})
        return refs, rows

    def test_it_finds_nothing_wrong_and_stops_nobody(self, cold: Path, store: TieredStore) -> None:
        process = None
        seed = 0
        prompts = []
        while process is None or process.poll() is None:
            prompts.append(self.put(store, seed))
            seed += 1
            if seed == 20:
                process = subprocess.Popen(
                    [*PROGRAM, "verify", str(cold), "--fix"],
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
                )  # fmt: skip
        out, errors = process.communicate()
        assert (process.returncode, errors) == (0, ""), out
        assert store.flush(20) == 0
        for refs, rows in prompts[-20:]:
            assert torch.equal(store.retrieve(refs, [0], None)[0], rows)

    def test_a_damaged_file_is_set_aside_under_it_and_is_then_a_miss(self, cold: Path, store: TieredStore) -> None:
        prompts = [self.put(store, seed) for seed in range(60)]  # 2 MB of rows; the hot tier has 1 MB
        assert store.flush(20) == 0
        refs, rows = prompts[0]
        [path] = cold.rglob(f"{refs[5].name.hex()}.safetensors")
        flip(path, -1)
        [problem] = inspect_json("verify", cold, "--fix")["problems"]
        assert problem["fixed"]
        assert "quarantine" in problem["action"]
        got = store.retrieve(refs, [0], None)[0]
        assert torch.equal(got, rows[: 5 * CHUNK])
        assert store.stats()["drops_bad_file"] == 1
        assert torch.equal(store.retrieve(prompts[1][0], [0], None)[0], prompts[1][1])


def test_on_a_terminal_a_bar_shows_how_far_it_is(cold: Path) -> None:
    add_prompt(namespace(cold), tokens_of(5 * CHUNK))
    status, shown = on_a_terminal([*PROGRAM, "verify", str(cold)], environment(), output=False)
    assert status == 0
    text = without_escapes(shown)
    assert "reading files" in text
    assert "41.0/41.0 kB" in text
    assert re.search(r"following chains .* 5/5", text)
