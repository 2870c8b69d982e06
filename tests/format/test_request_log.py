"""Request records: what a reader takes for one, and what it says of the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_hs_backend.format.request_log import BadLine, RecordWriter, RequestRecord, read_records, record_files

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
