"""The parts of the vLLM connector that need no vLLM: names of chunks, tails, files, records, settings, capture."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lmcache_hs_backend.chunk import chunk_name, prefix_digests
from lmcache_hs_backend.config import ConfigError
from lmcache_hs_backend.format.request_log import RecordWriter
from lmcache_hs_backend.integrations.vllm.paths import confined, default_path
from lmcache_hs_backend.integrations.vllm.protocol import Finish, RequestFile, Step
from lmcache_hs_backend.integrations.vllm.scheduler_side.sequence import ChunkedSequence, Image
from lmcache_hs_backend.integrations.vllm.settings import ConnectorSettings, doubtful_layers
from lmcache_hs_backend.integrations.vllm.worker_side import sink
from lmcache_hs_backend.integrations.vllm.worker_side.device import HiddenStatesCache, HostRows
from lmcache_hs_backend.integrations.vllm.worker_side.request_files import RequestFiles
from lmcache_hs_backend.integrations.vllm.worker_side.tails import Tails, shorter
from lmcache_hs_backend.integrations.vllm.worker_side.worker import Worker
from tests.support.waiting import wait_until
from tests.vllm.reference import ColdPath
from tests.vllm.worker_rig import CHUNK, HIDDEN, KEY_FORMAT, LAYERS, Copying, Rig


def named(ids: list[int], images: tuple[Image, ...] = ()) -> list[str]:
    sequence = ChunkedSequence(KEY_FORMAT, CHUNK, images)
    sequence.close(ids, len(ids))
    return [ref.chunk_hash for ref in sequence.refs]


# -- names -----------------------------------------------------------------------------------------------


def test_chunks_have_the_same_names_however_a_sequence_grows() -> None:
    ids = list(range(100, 150))
    whole, steps = ChunkedSequence(KEY_FORMAT, CHUNK), ChunkedSequence(KEY_FORMAT, CHUNK)
    whole.close(ids, 50)
    for end in (5, 16, 17, 47):
        steps.advance(ids[:end], end)
    steps.close(ids, 50)
    assert whole.refs == steps.refs
    assert [(ref.start, ref.end) for ref in whole.refs] == [(0, 16), (16, 32), (32, 48), (48, 50)]
    digests = prefix_digests(array("q", ids).tobytes(), [16, 32, 48, 50])
    assert [ref.prefix for ref in whole.refs] == list(digests)
    assert [ref.parent for ref in whole.refs] == ["", *(ref.chunk_hash for ref in whole.refs[:-1])]


def test_an_early_token_changes_the_names_of_all_chunks_after_it() -> None:
    ids = list(range(64))
    other = [*ids[:20], 999, *ids[21:]]
    assert [a == b for a, b in zip(named(ids), named(other), strict=True)] == [True, False, False, False]


def test_the_image_under_placeholders_is_part_of_a_name_from_its_chunk_on() -> None:
    ids = [7] * 64
    one, two = (named(ids, (Image(name, 20, 30),)) for name in ("cat", "dog"))
    assert [a == b for a, b in zip(one, two, strict=True)] == [True, False, False, False]
    assert one[0] == named(ids)[0]


def test_a_tail_is_superfluous_when_a_longer_chunk_begins_with_it() -> None:
    tails = Tails(KEY_FORMAT, CHUNK)
    ((ref, ids),) = ChunkedSequence(KEY_FORMAT, CHUNK).close(list(range(10)), 10)
    ((long_ref, long_ids),) = ChunkedSequence(KEY_FORMAT, CHUNK).close(list(range(16)), 16)
    ((other, other_ids),) = ChunkedSequence(KEY_FORMAT, CHUNK).close([7] * 12, 12)
    for chunk, its_ids in ((ref, ids), (other, other_ids)):
        tails.add(chunk.chunk_hash, chunk.parent, its_ids)
    outgrown = shorter(long_ref.chunk_hash, long_ref.parent, long_ids, tails.lengths(""))
    assert outgrown[ids] == ref.chunk_hash
    assert other.chunk_hash not in outgrown.values()
    assert tails.longer(ref.chunk_hash, ref.parent, ids) is None
    tails.add(long_ref.chunk_hash, long_ref.parent, long_ids)
    assert tails.longer(ref.chunk_hash, ref.parent, ids) == long_ref.chunk_hash
    assert tails.longer(other.chunk_hash, other.parent, other_ids) is None
    tails.forget(long_ref.parent, long_ids)
    tails.forget(long_ref.parent, long_ids)
    assert tails.longer(ref.chunk_hash, ref.parent, ids) is None


def test_a_tail_over_an_image_is_not_taken_for_one_over_text() -> None:
    tails = Tails(KEY_FORMAT, CHUNK)
    cat = Image("cat", 2, 5)
    ((ref, ids),) = ChunkedSequence(KEY_FORMAT, CHUNK, [cat]).close(list(range(10)), 10)
    tails.add(ref.chunk_hash, ref.parent, ids)
    assert tails.lengths("") == ()
    ((text, text_ids),) = ChunkedSequence(KEY_FORMAT, CHUNK).close(list(range(8)), 8)
    tails.add(text.chunk_hash, text.parent, text_ids)
    assert shorter(ref.chunk_hash, ref.parent, ids, tails.lengths("")) == {}


def test_tails_are_remembered_much_longer_than_token_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache_hs_backend.integrations.vllm.worker_side.tails.MOST_RECENT", 4)
    monkeypatch.setattr("lmcache_hs_backend.integrations.vllm.worker_side.tails.MOST_PARENTS", 50)
    tails = Tails(KEY_FORMAT, CHUNK)
    for first in range(60):
        for ref, ids in ChunkedSequence(KEY_FORMAT, CHUNK).close([first] * 20, 20):
            tails.add(ref.chunk_hash, ref.parent, ids)
    parents = [named([first] * 16)[0] for first in range(60)]
    assert [tails.lengths(parent) for parent in parents] == [()] * 10 + [(4,)] * 50


# -- settings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"chunksize": 64}, r"kv_connector_extra_config\['chunksize'\] is not a setting.*chunk_size"),
        ({"emit": "all"}, r"kv_connector_extra_config\['emit'\] is 'all', but must be 'tiers' or 'files' or 'both'"),
        ({"hot_size": 0}, "hot_size.*above 0"),
        ({"custom_save_roots": 3}, "custom_save_roots.*directories"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_allowed(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ConnectorSettings.from_connector(wrong)


def test_rows_are_written_back_at_once_unless_told_otherwise() -> None:
    assert ConnectorSettings.from_connector({}).write_back_sec == 0
    assert ConnectorSettings.from_connector({"write_back_sec": 9}).write_back_sec == 9


def test_an_untested_vllm_is_refused_at_import_in_words(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    (tmp_path / "vllm" / "version.py").write_text("__version__ = '0.44.1+cpu'\n")
    done = subprocess.run(
        [sys.executable, "-c", "import lmcache_hs_backend.integrations.vllm.connector"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert "tested with vLLM 0.32.x, 0.33.x, but vLLM 0.44.1+cpu is installed" in last


# -- files -----------------------------------------------------------------------------------------------


def test_only_plain_names_inside_the_roots_are_paths(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "link").symlink_to(outside)
    (root / "file").symlink_to(outside / "x")
    roots = [os.path.realpath(root)]
    assert confined(str(root / "a.safetensors"), roots)
    assert confined(str(root / "new" / "a.safetensors"), roots)
    for path in (
        "a.safetensors", str(outside / "a"), str(root / ".." / "outside" / "a"), str(root / "link" / "a"),
        str(root / "file"), str(root), str(root / "a.lock"), str(root / ".hidden"), f"{root}-more/a", "\0", 7, None,
    ):  # fmt: skip
        assert not confined(path, roots), path


def test_a_request_id_that_is_no_file_name_does_not_become_one() -> None:
    assert default_path("/d", "cmpl-12-ab") == "/d/cmpl-12-ab.safetensors"
    for bad in ("../x", "a/b", ".hidden", "", "x" * 300, "a\0b", "\ud800"):
        path = default_path("/d", bad)
        assert os.path.dirname(path) == "/d"
        assert os.path.basename(path).startswith("request-")


@contextlib.contextmanager
def request_files(root: Path, lock: bool = True) -> Iterator[RequestFiles]:
    files = RequestFiles([os.path.realpath(root)], 2, lock=lock)
    try:
        yield files
    finally:
        assert files.close(10)


def is_locked(path: Path) -> bool:
    with open(path) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_a_file_is_locked_until_it_is_there_whole(tmp_path: Path) -> None:
    path, rows = tmp_path / "d" / "a.safetensors", torch.ones(3, 2, 4, dtype=torch.bfloat16)
    with request_files(tmp_path) as files:
        files.open_lock("r", str(path))
        files.wait_for_locks(["r"], time.monotonic() + 10)
        assert is_locked(Path(f"{path}.lock"))
        assert not path.exists()
        files.write("r", str(path), lambda: rows, array("q", [1, 2, 3]).tobytes())
        wait_until(lambda: not is_locked(Path(f"{path}.lock")))
        data = load_file(path)
    assert torch.equal(data["hidden_states"], rows)
    assert data["token_ids"].tolist() == [1, 2, 3]
    assert sorted(p.name for p in path.parent.iterdir()) == ["a.safetensors", "a.safetensors.lock"]


def test_an_error_leaves_a_marker_before_the_lock_is_released(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"

    def fail() -> torch.Tensor:
        raise OSError("the disk is full")

    with request_files(tmp_path) as files:
        files.open_lock("r", str(path))
        files.wait_for_locks(["r"], time.monotonic() + 10)
        files.write("r", str(path), fail, b"")
        wait_until(lambda: not is_locked(Path(f"{path}.lock")))
        assert json.loads(Path(f"{path}.error").read_text()) == {"error": "the disk is full"}
        assert not path.exists()


def test_a_request_that_nobody_waits_for_leaves_nothing(tmp_path: Path) -> None:
    with request_files(tmp_path) as files:
        files.open_lock("r", str(tmp_path / "a.safetensors"))
        files.fail("r", str(tmp_path / "a.safetensors"), "")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_became_a_link_out_of_the_roots_is_not_written_through(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    outside.mkdir()
    (root / "d").mkdir(parents=True)
    with request_files(root, lock=False) as files:
        (root / "d").rmdir()
        (root / "d").symlink_to(outside)
        files.write("r", str(root / "d" / "a.safetensors"), lambda: torch.ones(1, 1, 1), b"\0" * 8)
    assert list(outside.iterdir()) == []


# -- records ---------------------------------------------------------------------------------------------


def test_records_rotate_and_a_new_process_begins_a_new_file(tmp_path: Path) -> None:
    first = RecordWriter(str(tmp_path), 0o700, rotate_bytes=100)
    for number in range(4):
        first.append({"request_id": str(number), "padding": "x" * 30})
    first.close()
    second = RecordWriter(str(tmp_path), 0o700)
    second.append({"request_id": "4"})
    second.close()
    paths = sorted((tmp_path / "sequences").iterdir())
    assert len(paths) > 2
    assert [json.loads(line)["request_id"] for p in paths for line in p.read_text().splitlines()] == list("01234")


# -- from a cache to the tiers ---------------------------------------------------------------------------


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path / "cold")
    yield made
    made.worker.close()


def test_rows_of_scattered_blocks_end_up_in_order_on_disk(rig: Rig) -> None:
    ids, blocks = list(range(40)), [9, 3, 30, 1, 17]
    rig.serve(ids, blocks)
    cold = ColdPath(str(rig.directory))
    for layer in LAYERS:
        assert torch.equal(cold.rows(ids, layer), rig.right(ids, blocks, layer))
    (record,) = cold.records()
    assert (record["num_tokens"], record["last_chunk"]) == (40, named(ids)[-1])
    assert record["capture"] == {"source": "test"}
    assert record["prefix"] == list(prefix_digests(array("q", ids).tobytes(), [32, 40]))[1].hex()


def test_equal_prefixes_are_copied_once_also_after_a_restart(rig: Rig) -> None:
    rig.serve(list(range(40)), [9, 3, 30, 1, 17])
    rig.serve([*range(32), 99, 98], [10, 11, 12, 13, 14])
    assert rig.sink.figures["taken"] == 4
    rig.worker.close()
    again = Rig(rig.directory)
    again.serve(list(range(40)), [1, 2, 3, 4, 5])
    assert again.sink.figures["taken"] == 0
    again.worker.close()


def test_a_tail_goes_when_a_longer_chunk_is_on_disk_and_its_record_still_leads_to_the_rows(rig: Rig) -> None:
    rig.serve(list(range(20)), [9, 3, 30])
    rig.serve(list(range(30)), [9, 3, 30, 8])
    rig.worker.close()
    cold = ColdPath(str(rig.directory))
    assert sorted(len(chunk.token_ids) for chunk in cold.chunks) == [14, 16]
    assert rig.sink.figures["tails_dropped"] == 1
    short = cold.records()[0]
    assert short["num_tokens"] == 20
    assert len(cold.rows(list(range(20)), LAYERS[0])) == 20


def test_a_shorter_request_after_a_longer_one_stores_no_tail_and_names_the_longer_chunk(rig: Rig) -> None:
    rig.serve(list(range(30)), [9, 3, 30, 8])
    rig.serve(list(range(20)), [9, 3, 30])
    cold = ColdPath(str(rig.directory))
    assert len(cold.chunks) == 2
    assert [record["last_chunk"] for record in cold.records()] == [named(list(range(30)))[-1]] * 2


@pytest.mark.parametrize("late", [False, True])
def test_tails_of_an_earlier_run_are_known_again(rig: Rig, monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    rig.serve(list(range(20)), [9, 3, 30])
    rig.worker.close()
    may_look = threading.Event()
    plain = sink.read_header
    monkeypatch.setattr(sink, "read_header", lambda *given: may_look.wait(30) and plain(*given))
    again = Rig(rig.directory)
    if not late:
        may_look.set()
        wait_until(lambda: again.sink.idle)
    ready, _ = again.ready(list(range(30)), [9, 3, 30, 8])
    again.worker.wrote_hidden_states()
    again.worker.after_step(Step(tokens=30, ready=ready, written=[(b, True) for b in (9, 3, 30, 8)]))
    wait_until(lambda: again.sink.store.stats()["written_chunks"] == 1)
    may_look.set()  # late: the longer chunk came before the tail was known
    wait_until(lambda: again.sink.idle)
    again.worker.close()
    assert sorted(len(chunk.token_ids) for chunk in ColdPath(str(rig.directory)).chunks) == [14, 16]


def test_a_tail_is_stored_when_the_longer_chunk_has_been_deleted(rig: Rig) -> None:
    rig.serve(list(range(30)), [9, 3, 30, 8])
    longer = named(list(range(30)))[-1]
    assert rig.sink.store.drop([chunk_name(KEY_FORMAT.key(longer))]) == 1
    rig.serve(list(range(20)), [9, 3, 30])
    rig.worker.close()
    cold = ColdPath(str(rig.directory))
    assert sorted(len(chunk.token_ids) for chunk in cold.chunks) == [4, 16]
    assert cold.records()[-1]["num_tokens"] == 20


def test_blocks_that_no_forward_has_written_are_not_read_until_they_are_written_anew(rig: Rig) -> None:
    ids = list(range(32))
    rig.serve(ids, [1, 2, 3, 4], foreign=(1, 2), wrote=False)
    assert rig.sink.figures["not_computed"] == 3  # the second chunk is asked for once more at the end
    assert ColdPath(str(rig.directory)).chunks == []
    rig.serve([5, *ids], [6, 1, 3, 4, 7])  # a forward writes 1, 3 and 4; 2 is not touched
    assert rig.sink.figures["not_computed"] == 3
    step = Step(tokens=0, ready=rig.ready(list(range(50, 66)), [2, 8])[0])
    rig.worker.after_step(step)
    assert rig.sink.figures["not_computed"] == 4


def test_a_file_of_rows_that_were_not_computed_comes_from_the_tiers_or_not_at_all(rig: Rig, tmp_path: Path) -> None:
    ids, blocks = list(range(40)), [9, 3, 30, 1, 17]
    rig.serve(ids, blocks)
    right = torch.stack([rig.right(ids, blocks, layer) for layer in LAYERS], dim=1)
    files = RequestFiles([os.path.realpath(tmp_path)], 1, lock=False)
    worker = Worker(HiddenStatesCache(torch.zeros_like(rig.cache)), rig.sink, files)
    worker.after_step(Step(tokens=1, foreign=[20, 21, 22, 23, 24], written=[(25, True)]))
    for name, sequence in (("known", ids), ("unknown", [77, *ids])):
        ready, chunks = rig.ready(sequence, [20, 21, 22, 23, 24, 25])
        file = RequestFile(str(tmp_path / name), array("q", sequence).tobytes(), [20, 21, 22, 23, 24])
        worker.finish(Finish("r", ready[-1:], chunks.refs, None, file))
    assert files.close(10)
    assert torch.equal(load_file(tmp_path / "known")["hidden_states"], right)
    assert not (tmp_path / "unknown").exists()
    assert "not covered" in json.loads((tmp_path / "unknown.error").read_text())["error"]


def test_what_is_on_disk_leaves_ram_and_the_next_chunk_uses_the_same_memory(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "cold", hot_size=0.0625)
    farthest = 0
    for start in range(0, 16 * 64, 64):
        rig.serve(list(range(start, start + 64)), list(range(8)))
        farthest = max(farthest, rig.sink.store.debug.memory().reach)
        wait_until(lambda: rig.sink.store.stats()["hot_bytes"] == 0)
    assert rig.sink.figures["taken"] == 64
    assert farthest <= 64 * len(LAYERS) * 4096 // 8  # a cache would have touched every chunk's slots
    rig.worker.close()


def test_rows_that_come_in_vllms_inference_mode_leave_the_store_usable_for_others(rig: Rig) -> None:
    ids, blocks = list(range(40)), [9, 3, 30, 1, 17]
    with torch.inference_mode():
        rig.serve(ids, blocks)
    rig.serve([7, *ids], [*blocks, 4])
    assert rig.sink.figures["taken"] == 6
    assert "lost" not in rig.sink.figures


def test_blocks_are_held_until_their_copies_have_arrived_and_only_then_are_rows_stored(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    event, plain = Copying(), HiddenStatesCache._copy
    monkeypatch.setattr(HiddenStatesCache, "_copy", lambda *given: plain(*given)._replace(arrived=event))
    ids, blocks = list(range(40)), [9, 3, 30, 1, 17]
    ready, sequence = rig.ready(ids, blocks)
    rig.worker.wrote_hidden_states()
    rig.worker.after_step(Step(tokens=40, ready=ready, written=[(b, True) for b in blocks]))
    assert rig.worker.finish(Finish("r", [], sequence.refs, {"request_id": "r"}, None))
    assert rig.worker.pop_finished() == set()
    assert rig.sink.store.covered([sequence.refs[0].name], LAYERS) == 0
    assert not rig.sink.needs_copy(ready[0])  # it is on its way: another request with the same prefix copies nothing
    event.done.set()
    assert rig.worker.pop_finished() == {"r"}
    assert rig.worker.pop_finished() == set()
    wait_until(lambda: rig.sink.idle)
    assert torch.equal(ColdPath(str(rig.directory)).rows(ids, LAYERS[1]), rig.right(ids, blocks, LAYERS[1]))


def test_a_store_that_fails_is_not_the_engines_trouble(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr(rig.sink.store, "store", fail)
    rig.serve(list(range(40)), [9, 3, 30, 1, 17])
    assert rig.sink.figures["lost"] == 4  # the tail is asked for once more at the end
    assert rig.sink.figures["records_empty"] == 1


def test_the_open_chunk_of_a_preempted_request_is_stored_and_goes_when_it_is_outgrown(rig: Rig) -> None:
    ids, blocks = list(range(40)), [9, 3, 30, 1, 17]
    ready, sequence = rig.ready(ids[:21], blocks)
    rig.worker.wrote_hidden_states()
    rig.worker.after_step(Step(tokens=21, ready=ready[:1], written=[(b, True) for b in blocks[:3]]))
    rig.worker.before_step(Step(open_chunks=ready[1:], preempted=True))
    record = {"request_id": "r", "expected_tokens": 21, "finish_reason": "abort"}
    rig.worker.finish(Finish("r", [ready[1]._replace(blocks=[])], sequence.refs, record, None))
    wait_until(lambda: rig.sink.idle)
    cold = ColdPath(str(rig.directory))
    assert torch.equal(cold.rows(ids[:21], LAYERS[0]), rig.right(ids[:21], blocks, LAYERS[0]))
    assert [record["num_tokens"] for record in cold.records()] == [21]
    rig.serve(ids, blocks)
    rig.worker.close()
    assert sorted(len(chunk.token_ids) for chunk in ColdPath(str(rig.directory)).chunks) == [8, 16, 16]


def test_close_brings_everything_to_disk_and_may_come_twice(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "cold", write_back_sec=3600)
    ids, blocks = list(range(40)), [9, 3, 30, 1, 17]
    ready, sequence = rig.ready(ids, blocks)
    rig.worker.wrote_hidden_states()
    rig.worker.after_step(Step(tokens=40, ready=ready, written=[(b, True) for b in blocks]))
    rig.worker.finish(Finish("r", [], sequence.refs, {"request_id": "r"}, None))
    rig.worker.close()
    rig.worker.close()
    cold = ColdPath(str(rig.directory))
    assert len(cold.rows(ids, LAYERS[0])) == 40
    assert [record["num_tokens"] for record in cold.records()] == [40]


class _Copy:
    """A copy off the device that arrives when it is told to, or never."""

    def __init__(self, gate: threading.Event, *, fails: bool = False) -> None:
        self._gate, self._fails = gate, fails

    def synchronize(self) -> None:
        self._gate.wait(20)
        if self._fails:
            raise RuntimeError("CUDA error: an illegal memory access")

    def query(self) -> bool:
        return self._gate.is_set()


def test_a_step_waits_for_room_once_however_many_chunks_it_has(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "cold", hot_size=0.0001, store_wait_ms=200)
    gate, layers = threading.Event(), rig.worker._cache.layers
    rig.worker._cache.layers = lambda *args: layers(*args)._replace(arrived=_Copy(gate))  # type: ignore[method-assign]
    ready, _ = rig.ready(list(range(256)), [n % 30 + 1 for n in range(32)])
    more, _ = rig.ready(list(range(5000, 5256)), [n % 30 + 1 for n in range(32)])
    rig.worker.wrote_hidden_states()
    begun = time.monotonic()
    rig.worker.after_step(Step(tokens=512, ready=[*ready, *more]))
    assert time.monotonic() - begun < 1.0
    assert rig.sink.figures["lost"] > 10
    gate.set()
    rig.worker.close()


def test_a_copy_that_fails_is_a_chunk_that_is_lost(rig: Rig) -> None:
    (chunk, *_), _ = rig.ready(list(range(16)), [1, 2])
    gate = threading.Event()
    gate.set()
    rows = HostRows([torch.zeros(16, HIDDEN, dtype=torch.bfloat16)] * 2, _Copy(gate, fails=True))
    rig.sink.put(chunk, rows, time.monotonic() + 1)
    wait_until(lambda: rig.sink.idle)
    assert (rig.sink.figures["taken"], rig.sink.figures["lost"]) == (1, 1)


def test_a_request_that_ends_while_the_disk_is_away_has_its_record_when_it_is_back(rig: Rig) -> None:
    ids, blocks = list(range(64)), list(range(1, 9))
    ready, sequence = rig.ready(ids, blocks)
    rig.worker.wrote_hidden_states()
    rig.worker.after_step(Step(tokens=64, ready=ready, written=[(block, True) for block in blocks]))
    store = rig.sink.store
    wait_until(lambda: all(store.has(ref.name, LAYERS[0]) == (False, True) for ref in sequence.refs))
    store.debug.go_offline("cannot read: Input/output error")
    record = {"request_id": "r", "prompt_tokens": 64, "expected_tokens": 64}
    rig.worker.finish(Finish("r", [], sequence.refs, record, None))
    wait_until(lambda: store.stats()["cold_state"] == "online", 20)
    wait_until(lambda: rig.sink.figures["records"] == 1)
    (line,) = [line for path in rig.directory.glob("*/sequences/*.jsonl") for line in path.read_text().splitlines()]
    assert json.loads(line)["num_tokens"] == 64


# -- reuse, sleep, and the order of vLLM's calls ---------------------------------------------------------


def test_a_reused_prefix_outlives_what_was_used_before_it_and_a_requests_end_leaves_before_its_beginning(
    tmp_path: Path,
) -> None:
    chunk_bytes = 8192  # a file of this rig: header, token ids, two layers
    rig = Rig(tmp_path / "cold", max_cold_size=12 * chunk_bytes / 2**30)
    shared = list(range(CHUNK))

    def on_disk(ids: list[int]) -> list[bool]:
        return [rig.sink.store.has(ref.name, LAYERS[0])[1] for ref in rig.ready(ids, list(range(8)))[1].refs]

    first = [*shared, *range(100, 148)]
    rig.serve(first, list(range(1, 9)))
    for number in range(1, 16):
        rig.serve([number * 1000 + n for n in range(CHUNK)], [1, 2])
        rig.serve(shared, [1, 2])
        wait_until(lambda: rig.sink.store.stats()["cold_bytes"] <= 12 * chunk_bytes)
        held = on_disk(first)
        assert held == sorted(held, reverse=True)  # what is left of a conversation is its beginning
    assert rig.sink.figures["reused"] >= 15
    assert on_disk(first) == [True, False, False, False]
    rig.worker.close()


def test_a_prefix_stays_while_requests_that_reuse_it_are_still_running(tmp_path: Path) -> None:
    chunk_bytes = 8192
    rig = Rig(tmp_path / "cold", max_cold_size=6 * chunk_bytes / 2**30)
    shared = list(range(CHUNK))
    rig.serve(shared, [1, 2])
    (chunk,), _ = rig.ready(shared, [3, 4])
    for number in range(1, 12):
        assert not rig.sink.needs_copy(chunk)  # a request begins with it, and none ends
        rig.serve([number * 1000 + n for n in range(CHUNK)], [1, 2])
        wait_until(lambda: rig.sink.store.stats()["cold_bytes"] <= 6 * chunk_bytes)
    assert rig.sink.store.has(chunk.ref.name, LAYERS[0])[1]
    rig.worker.close()


def test_before_sleep_copies_are_waited_for_and_after_it_nothing_is_read_that_no_forward_has_written(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    event, plain = Copying(), HiddenStatesCache._copy
    ids, blocks = list(range(32)), [1, 2, 3, 4]

    def from_device(cache: HiddenStatesCache, *given: Any) -> HostRows:
        cache._last = event  # type: ignore[assignment]
        return plain(cache, *given)._replace(arrived=event)

    monkeypatch.setattr(HiddenStatesCache, "_copy", from_device)
    ready, sequence = rig.ready(ids, blocks)
    rig.worker.wrote_hidden_states()
    rig.worker.after_step(Step(tokens=32, ready=ready[:1], written=[(block, True) for block in blocks]))
    asleep = threading.Event()
    sleeping = threading.Thread(target=lambda: (rig.worker.release_cache(), asleep.set()))
    sleeping.start()
    assert not asleep.wait(0.2)
    event.done.set()
    assert asleep.wait(10)
    sleeping.join()

    right = rig.right(ids, blocks, LAYERS[0]).clone()
    rig.cache.zero_()  # the memory that comes back holds anything
    files = RequestFiles([os.path.realpath(tmp_path)], 1, lock=False)
    rig.worker._files = files
    file = RequestFile(str(tmp_path / "f"), array("q", ids).tobytes(), blocks)
    rig.worker.finish(Finish("r", ready[1:], sequence.refs, {"request_id": "r"}, file))
    wait_until(lambda: rig.sink.idle)
    assert files.close(10)
    assert rig.sink.figures["not_computed"] == 1
    assert "not covered" in json.loads((tmp_path / "f.error").read_text())["error"]
    cold = ColdPath(str(rig.directory))
    assert torch.equal(cold.rows(ids[:CHUNK], LAYERS[0]), right[:CHUNK])
    assert [record["num_tokens"] for record in cold.records()] == [CHUNK]

    rig.cache.normal_()
    rig.serve([7, *ids[1:]], blocks)  # a forward has written the same blocks anew
    assert torch.equal(
        ColdPath(str(rig.directory)).rows([7, *ids[1:]], LAYERS[0]), rig.right([7, *ids[1:]], blocks, LAYERS[0])
    )


def test_ends_may_be_asked_for_before_the_drafter_writes_and_the_step_be_closed_after_it(rig: Rig) -> None:
    """The order of vLLM's second model runner with a drafter: get_finished, the drafter, wait_for_save."""
    one, one_blocks, two, two_blocks = list(range(24)), [1, 2, 3], list(range(100, 124)), [4, 5, 6]
    ready, sequence = rig.ready(one, one_blocks)
    more, other = rig.ready(two, two_blocks)
    kept = torch.cat([rig.cache[block] for block in one_blocks])

    step = Step(tokens=24, ready=ready[:1], written=[(block, True) for block in one_blocks])
    rig.worker.before_step(step)
    rig.worker.wrote_hidden_states()
    rig.worker.after_step(step)

    finish = Finish("one", ready[1:], sequence.refs, {"request_id": "one"}, None)
    step = Step(tokens=24, ready=more[:1], finished=[finish], written=[(block, True) for block in two_blocks])
    rig.worker.before_step(step)
    rig.worker.finish(finish)  # before this step's rows are there
    rig.worker.defer_free("one")
    assert rig.worker.pop_finished() == {"one"}
    for block in two_blocks:
        rig.cache[block].normal_()
    rig.worker.wrote_hidden_states()
    rig.worker.after_step(step)

    finish = Finish("two", more[1:], other.refs, {"request_id": "two"}, None)
    step = Step(tokens=0, finished=[finish])
    rig.worker.before_step(step)
    rig.worker.finish(finish)
    rig.worker.after_step(step)
    wait_until(lambda: rig.sink.idle)
    assert torch.equal(torch.cat([rig.cache[block] for block in one_blocks]), kept)
    cold = ColdPath(str(rig.directory))
    for ids, blocks in ((one, one_blocks), (two, two_blocks)):
        for layer in LAYERS:
            assert torch.equal(cold.rows(ids, layer), rig.right(ids, blocks, layer))
    assert "not_computed" not in rig.sink.figures


# -- layers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ((2, 15, 27, 30), []),
        ((2, 15, 27, 29), ["the last layer, 30, is not captured"]),
        ((2, 15, 30, 31), ["layer 31 does not exist"]),
        ((-1, 30), ["layer -1 does not exist"]),
        ((40, 41), ["layers 40, 41 do not exist", "the last layer, 30, is not captured"]),
    ],
)
def test_layers_that_do_not_exist_and_a_missing_last_one_are_named_at_start(
    layers: tuple[int, ...], said: list[str]
) -> None:
    found = doubtful_layers(layers, 30)
    assert len(found) == len(said)
    for text, part in zip(found, said, strict=True):
        assert part in text
