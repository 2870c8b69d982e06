"""Request records come to the bucket beside the rows: each once, whatever happens to processes, answers and files."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_hs_backend.chunk import chunk_refs, token_bytes
from lmcache_hs_backend.cli.extract import main
from lmcache_hs_backend.format.objects import Answer
from lmcache_hs_backend.format.request_log import RecordWriter
from lmcache_hs_backend.tiers.flows import share
from lmcache_hs_backend.tiers.shared import records
from lmcache_hs_backend.tiers.shared.records import RecordUploads
from tests.support.dataset_capture import Writer, ids_of, keyed
from tests.support.sharing import objects_of
from tests.support.waiting import wait_until

pytest.importorskip("obstore")

PROMPTS = [ids_of(70 + seed, seed=seed) for seed in range(4)]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "QUIET_SEC", 0.0)
    monkeypatch.setattr(share, "_RECORDS_SEC", 0.05)


def record_of(ids: Sequence[int]) -> dict[str, Any]:
    *front, last = chunk_refs(keyed(ids), token_bytes(list(ids)))
    return {
        "request_id": f"request-{len(ids)}", "created_at": f"2026-01-02T03:04:{len(ids) % 60:02}Z",
        "finish_reason": "stop", "prompt_tokens": 30, "generated_tokens": len(ids) - 30, "expected_tokens": len(ids),
        "num_tokens": len(ids), "prefix": last.prefix.hex(), "parent_prefix": front[-1].prefix.hex(),
        "last_chunk": last.chunk_hash, "loss_spans": [[31, 40], [50, len(ids)]],
    }  # fmt: skip


def record_objects(shared: dict[str, Any]) -> dict[str, bytes]:
    objects = objects_of(shared)
    paths = [found.path for found in objects.list() if found.path.endswith(".jsonl")]
    return {path: bytes(objects.get(path, 1 << 20).body) for path in paths}


def lines_in(shared: dict[str, Any]) -> Counter[bytes]:
    return Counter(line for body in record_objects(shared).values() for line in body.splitlines(keepends=True))


def run(cold: Path, shared: dict[str, Any], prompts: Sequence[Sequence[int]]) -> None:
    """A node's process: it stores prompts, writes their records, and ends when both are in the bucket."""
    with Writer(cold, revision="abc", **shared) as node:
        log = RecordWriter(str(node.directory), 0o700)
        for ids in prompts:
            node.put(ids)
            log.append(record_of(ids))
        log.close()
        wanted = {path.read_bytes() for path in Path(node.directory, "sequences").glob("*.jsonl")}
        lines = {line for body in wanted for line in body.splitlines(keepends=True)}
        wait_until(lambda: lines <= lines_in(shared).keys(), 60)


def extracted(where: str, shared: dict[str, Any], out: Path) -> dict[str, bytes]:
    options = ["--shared-options", json.dumps(shared.get("shared_options", {}))] if where.startswith("s3") else []
    arguments = [where, *options, "--sequences", "requests", "--format", "speculators", "-q", "--out", str(out)]
    assert main([*arguments, "--cache-size", "0"]) == 0
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in out.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }


def test_a_training_set_of_requests_is_the_same_from_the_bucket_as_from_the_disk(
    tmp_path: Path, shared: dict[str, Any]
) -> None:
    run(tmp_path / "cold", shared, PROMPTS)
    from_disk = extracted(str(tmp_path / "cold"), shared, tmp_path / "disk")
    assert extracted(shared["shared_url"], shared, tmp_path / "url") == from_disk
    assert len(from_disk) >= len(PROMPTS)


def test_a_restart_goes_on_where_the_last_process_has_stopped(tmp_path: Path, shared: dict[str, Any]) -> None:
    for number in range(3):
        run(tmp_path / "cold", shared, PROMPTS[number : number + 1])
    assert list(lines_in(shared).values()) == [1, 1, 1]
    in_order = [json.loads(body)["request_id"] for _, body in sorted(record_objects(shared).items())]
    assert in_order == [f"request-{len(ids)}" for ids in PROMPTS[:3]], "an object for each process, by time"


def test_a_node_that_has_forgotten_what_it_uploaded_gives_no_request_twice(tmp_path: Path) -> None:
    shared = {"shared_url": f"file://{tmp_path}/bucket"}
    with Writer(tmp_path / "cold", revision="abc", **shared) as node:
        log = RecordWriter(str(node.directory), 0o700)
        for count, ids in enumerate(PROMPTS[:2], 1):
            node.put(ids)
            log.append(record_of(ids))
            wait_until(lambda: sum(lines_in(shared).values()) == count, 60)  # noqa: B023
        log.close()
        state = Path(node.directory, "sequences", "uploaded.json")
        wait_until(state.exists)
    before = extracted(shared["shared_url"], shared, tmp_path / "before")
    state.write_text("{")
    run(tmp_path / "cold", shared, PROMPTS[2:3])
    wait_until(lambda: max(lines_in(shared).values()) == 2, 60)
    after = extracted(shared["shared_url"], shared, tmp_path / "after")
    assert len(after) == len(before) + 1, "one for each request"


def test_where_not_every_row_is_uploaded_no_record_is(tmp_path: Path) -> None:
    shared = {"shared_url": f"file://{tmp_path}/bucket", "shared_write": "reused"}
    with Writer(tmp_path / "cold", revision="abc", **shared):
        assert not [thread.name for thread in threading.enumerate() if thread.name == "hs-shared-records"]


class OneBucket:
    """Takes objects, unless it is told not to."""

    def __init__(self, url: str = "s3://bucket/hs") -> None:
        self.objects = SimpleNamespace(url=url)
        self.answer = Answer.OK
        self.bodies: list[bytes] = []

    def put_records(self, name: str, body: bytes) -> Answer:
        if self.answer is Answer.OK:
            self.bodies.append(body)
        return self.answer


def uploads(bucket: Any, directory: Path) -> RecordUploads:
    return RecordUploads(bucket, str(directory))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A file of records."""
    (tmp_path / "sequences").mkdir()
    return tmp_path / "sequences" / "requests-000001.jsonl"


def test_a_line_goes_up_when_it_is_whole(tmp_path: Path, log: Path) -> None:
    bucket = OneBucket()
    sender = uploads(bucket, tmp_path)
    log.write_bytes(b'{"one": 1}\n{"tw')
    assert sender.send(idle=True) == 11
    assert sender.send(idle=True) == 0
    with log.open("ab") as file:
        file.write(b'o": 2}\n')
    assert uploads(bucket, tmp_path).send(idle=True) == 11, "another process goes on in the middle of a file"
    assert bucket.bodies == [b'{"one": 1}\n', b'{"two": 2}\n']


def test_what_the_bucket_does_not_take_goes_up_later_and_what_it_has_counts_as_taken(tmp_path: Path, log: Path) -> None:
    bucket = OneBucket()
    sender = uploads(bucket, tmp_path)
    log.write_bytes(b'{"one": 1}\n')
    bucket.answer = Answer.FAILED
    assert sender.send(idle=True) == 0
    bucket.answer = Answer.EXISTS
    assert sender.send(idle=True) == 11
    bucket.answer = Answer.OK
    assert uploads(bucket, tmp_path).send(idle=True) == 0
    assert uploads(OneBucket("s3://another/one"), tmp_path).send(idle=True) == 11, "which has none of them"


def test_a_busy_node_puts_few_objects(tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "PIECE_BYTES", 100)
    monkeypatch.setattr(records, "QUIET_SEC", 3600.0)
    bucket = OneBucket()
    sender = uploads(bucket, tmp_path)
    log.write_bytes(b'{"one": 1}\n')
    assert sender.send(idle=True) == 0, "more may come at once"
    os.utime(log, (0, 0))
    assert sender.send(idle=False) == 0, "its rows are on their way"
    with log.open("ab") as file:
        file.write(b'{"one": 1}\n' * 20)
    assert sender.send(idle=False) == 198
    assert [len(body) for body in bucket.bodies] == [99, 99], "whole lines, of whole pieces"
    os.utime(log)
    assert sender.send(idle=True) == 0
    monkeypatch.setattr(records, "LATEST_SEC", 0.0)
    assert sender.send(idle=False) == 33, "at last in any case"


def test_a_link_among_the_records_is_not_followed(tmp_path: Path, log: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret\n")
    log.symlink_to(tmp_path / "secret")
    bucket = OneBucket()
    assert uploads(bucket, tmp_path).send(idle=True) == 0
    assert bucket.bodies == []
