"""Request records: what a reader takes for one, and what it says of the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_hs_backend.format.request_log import (
    BadLine,
    RecordWriter,
    RequestRecord,
    client_fields,
    read_records,
    record_files,
)

RECORD = {
    "request_id": "r", "prompt_tokens": 3, "num_tokens": 5, "prefix": "ab" * 16, "parent_prefix": "", "last_chunk": "c",
}  # fmt: skip


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A file of two good records, as the writer makes it."""
    writer = RecordWriter(str(tmp_path), 0o700)
    writer.append(RECORD)
    writer.append({**RECORD, "request_id": "s", "parent_prefix": "cd" * 16})
    writer.close()
    [path] = record_files(str(tmp_path))
    return Path(path)


def test_what_is_written_is_read(log: Path) -> None:
    assert list(read_records(str(log))) == [
        RequestRecord("r", 3, 5, b"\xab" * 16, b""),
        RequestRecord("s", 3, 5, b"\xab" * 16, b"\xcd" * 16),
    ]


@pytest.mark.parametrize("version", ["", '"version":2,', '"version":"1",', '"version":null,'])
def test_only_records_of_version_1_are_records(log: Path, version: str) -> None:
    """A record without a version is none: every writer has always written one, as header and namespace.json have."""
    log.write_text(log.read_text().replace('"version":1,', version, 1))
    bad, good = read_records(str(log))
    assert isinstance(bad, BadLine)
    assert (bad.number, bad.cut_short) == (1, False)
    assert "version" in bad.problem
    assert isinstance(good, RequestRecord)


def test_a_line_that_its_process_did_not_live_to_finish_is_told_apart(log: Path) -> None:
    log.write_bytes(log.read_bytes()[:-20])
    good, bad = read_records(str(log))
    assert isinstance(good, RequestRecord)
    assert isinstance(bad, BadLine)
    assert (bad.number, bad.cut_short) == (2, True)


def test_what_is_no_regular_file_is_not_opened(log: Path) -> None:
    log.unlink()
    log.symlink_to("/etc/passwd")
    [bad] = read_records(str(log))
    assert isinstance(bad, BadLine)
    assert (bad.number, bad.cut_short) == (0, False)
    assert "not a regular file" in bad.problem


@given(st.data())
def test_any_value_gives_a_possible_record_or_a_value_error(data: st.DataObject) -> None:
    odd = st.sampled_from([None, -1, 0, 1.5, "7", "x", "ab" * 16, "ab" * 15, [], {}, True, 1e400])
    record: dict[str, object] = {"version": 1, **RECORD}
    for field in data.draw(st.sets(st.sampled_from(sorted({*RECORD} - {"last_chunk"})), max_size=2)):
        record[field] = data.draw(odd)
    line = json.dumps(record)
    try:
        parsed = RequestRecord.parse(line)
    except ValueError:
        with pytest.raises(ValueError):
            RequestRecord.parse(line.encode())
        return
    assert parsed == RequestRecord.parse(line.encode())
    assert parsed.num_tokens >= 1
    assert parsed.prompt_tokens >= 0
    assert len(parsed.prefix) == 16
    assert len(parsed.parent_prefix) in (0, 16)


def test_loss_spans_are_read_back_and_absent_ones_are_not_known(tmp_path: Path) -> None:
    writer = RecordWriter(str(tmp_path), 0o700)
    writer.append({**RECORD, **client_fields({"loss_spans": [[0, 2], [3, 5]], "cut_from": 9})})
    writer.append({**RECORD, **client_fields({"loss_spans": []})})
    writer.append({**RECORD, **client_fields(None)})
    writer.close()
    [path] = record_files(str(tmp_path))
    records = [record for record in read_records(path) if isinstance(record, RequestRecord)]
    assert [record.loss_spans for record in records] == [((0, 2), (3, 5)), (), None]
    assert json.loads(Path(path).read_text().splitlines()[0])["cut_from"] == 9


BAD_SPANS = [5, "0-2", [[0]], [[0, 1, 2]], [[2, 2]], [[3, 1]], [[-1, 2]], [[0, 2], [1, 4]], [[0, 2], [2, 4]]]


@pytest.mark.parametrize("spans", [*BAD_SPANS, [[0, 1.5]], [[False, True]], [[0, 1]] * 20_000])
def test_spans_that_are_none_are_refused_by_writer_and_reader(spans: object) -> None:
    with pytest.raises(ValueError, match="loss_spans"):
        client_fields({"loss_spans": spans})
    with pytest.raises(ValueError, match="loss_spans"):
        RequestRecord.parse(json.dumps({"version": 1, **RECORD, "loss_spans": spans}))


@pytest.mark.parametrize("said", [7, [], {"cut_from": 0}, {"cut_from": "9"}, {"num_tokens": 3}])
def test_a_client_cannot_say_anything_else_of_its_record(said: object) -> None:
    with pytest.raises(ValueError):
        client_fields(said)
