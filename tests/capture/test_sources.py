"""Data files in the shapes that people have them: every row with its place, and what cannot be read in its place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from lmcache_hs_backend.capture.sources import SourceError, SourceRow, read_rows

ROWS = [{"prompt": "tide"}, {"prompt": "ébb 🌊"}, {"messages": [{"role": "user", "content": "x"}]}]


def rows(*paths: Path) -> list[SourceRow]:
    return list(read_rows([str(path) for path in paths]))


def lines(values: list[dict[str, object]]) -> bytes:
    return b"".join(json.dumps(value, ensure_ascii=False).encode() + b"\n" for value in values)


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["lines", "blank lines", "array", "pretty array"])
def test_json_in_every_shape(tmp_path: Path, kind: str, packed: bool, bom: bytes) -> None:
    content = {
        "lines": lines(ROWS),
        "blank lines": b"\n" + lines(ROWS).replace(b"\n", b"\r\n\r\n"),
        "array": json.dumps(ROWS).encode(),
        "pretty array": b"\n" + json.dumps(ROWS, indent=2, ensure_ascii=False).encode() + b"\n",
    }[kind]
    path = tmp_path / "data"
    path.write_bytes(gzip.compress(bom + content) if packed else bom + content)
    found = rows(path)
    assert [row.value for row in found] == ROWS
    assert [row.number for row in found] == ([2, 4, 6] if kind == "blank lines" else [1, 2, 3])
    assert {row.file for row in found} == {str(path)}


def test_parquet_and_datasets_have_no_nulls_of_other_rows(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(
        [{"messages": [{"role": "user", "content": "x"}], "prompt": None}, {"messages": None, "prompt": "tide"}]
    )
    data.to_parquet(tmp_path / "a.parquet")
    data.save_to_disk(tmp_path / "saved")
    want = [{"messages": [{"role": "user", "content": "x"}]}, {"prompt": "tide"}]
    for path in (tmp_path / "a.parquet", tmp_path / "saved"):
        assert [(row.number, row.value) for row in rows(path)] == list(enumerate(want, 1))


def test_a_folder_is_its_files_and_several_splits_are_named(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "b.jsonl").write_bytes(lines(ROWS[1:]))
    (folder / "a.json.gz").write_bytes(gzip.compress(json.dumps(ROWS[:1]).encode()))
    (folder / "README.md").write_text("not data")
    assert [row.value for row in rows(folder)] == ROWS
    one = datasets.Dataset.from_list(ROWS[:1])
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "splits")
    with pytest.raises(SourceError, match=r"several splits; name one: .*splits/test, .*splits/train"):
        rows(tmp_path / "splits")
    assert [row.value for row in rows(tmp_path / "splits" / "train")] == ROWS[:1]


def test_a_line_that_is_no_row_is_reported_and_the_next_ones_are_read(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(
        lines(ROWS[:1])
        + b'{"prompt": "broken\n'
        + b'{"prompt": "caf\xe9"}\n'
        + b"[" * 100_000
        + b"\n"
        + lines(ROWS[1:])
    )
    found = rows(path)
    assert [row.number for row in found] == [1, 2, 3, 4, 5, 6]
    assert [bool(row.problem) for row in found] == [False, True, True, True, False, False]
    assert "not JSON" in found[1].problem
    assert "byte 0xe9" in found[2].problem


@pytest.mark.parametrize(
    ("content", "good", "problem"),
    [
        (b'[{"prompt": "a"}, {"prompt": ', 1, "breaks off"),
        (b'[{"prompt": "a"}', 1, "the array has no end"),
        (b'[{"prompt": "a"} {"prompt": "b"}]', 1, "where ',' should be"),
        (b'[{"prompt": "a"}, nonsense]', 1, "no JSON here"),
        (b'[{"prompt": "a"}, {"prompt": "\xe9"}]', 0, "not UTF-8"),
        (b"[]", 0, ""),
        (b"[1, 22]", 2, ""),
    ],
)
def test_an_array_that_breaks_off_says_where(tmp_path: Path, content: bytes, good: int, problem: str) -> None:
    path = tmp_path / "data.json"
    path.write_bytes(content)
    found = rows(path)
    assert len([row for row in found if not row.problem]) == good
    assert [problem in row.problem for row in found if row.problem] == ([True] if problem else [])


@pytest.mark.parametrize(
    ("content", "good", "problem"),
    [
        (b'[{"prompt": "a"}] [{"prompt": "b"}]', 1, 'the array has ended, and \'[{"prompt": "b"}]\' follows'),
        (b'[{"prompt": "a"}]' + b" " * 3_000_000 + b"x", 1, "the array has ended, and 'x' follows"),
        (b"[]\n[1]", 0, "the array has ended, and '[1]' follows"),
        (b'[{"prompt": "a"}]\n\n', 1, ""),
        (b'[{"prompt": "a", "prompt": "b"}, {"prompt": "c"}]', 1, "the key 'prompt' stands twice"),
        (b'{"prompt": "a", "prompt": "b"}\n{"prompt": "c"}\n', 1, "the key 'prompt' stands twice"),
        (b'{"messages": [{"role": "user", "role": "x"}]}\n{"prompt": "c"}\n', 1, "the key 'role' stands twice"),
    ],
)
def test_nothing_in_a_file_is_passed_over_without_a_word(
    tmp_path: Path, content: bytes, good: int, problem: str
) -> None:
    path = tmp_path / "data.json"
    path.write_bytes(content)
    found = rows(path)
    assert len([row for row in found if not row.problem]) == good
    assert [problem in row.problem for row in found if row.problem] == ([True] if problem else [])


def test_files_that_are_not_read_are_said(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name, content in {"a.JSONL": lines(ROWS), "b.jsonl": b"\n", "notes.txt": b"x", ".hidden": b"x"}.items():
        (tmp_path / name).write_bytes(content)
    said: list[str] = []
    assert [row.value for row in read_rows([str(tmp_path)], said.append)] == ROWS
    assert said == [f"{tmp_path}: not read, as no data files: notes.txt, sub", f"{tmp_path}/b.jsonl has no row"]
    (tmp_path / "sub" / "data").mkdir()
    with pytest.raises(SourceError, match=r"no data file .*; name one of its folders: data"):
        rows(tmp_path / "sub")


def test_a_folder_of_one_split_needs_no_name(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS[:2])}).save_to_disk(tmp_path / "splits")
    assert [row.value for row in rows(tmp_path / "splits")] == ROWS[:2]


def test_elements_longer_than_what_is_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    long = [{"prompt": str(n) * 3_000_000} for n in range(3)]
    path.write_text(json.dumps(long))
    assert [row.value for row in rows(path)] == long


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.zst").write_bytes(b"\x28\xb5\x2f\xfd0000")
    (tmp_path / "a.bz2").write_bytes(b"BZh91AY")
    (tmp_path / "a.xz").write_bytes(b"\xfd7zXZ\x00")
    (tmp_path / "a.zip").write_bytes(b"PK\x03\x04")
    (tmp_path / "a.arrow").write_bytes(b"ARROW1")
    (tmp_path / "a.gz").write_bytes(gzip.compress(lines(ROWS * 1000))[:-200])
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing else")
    (tmp_path / "a.utf16").write_bytes("[]".encode("utf-16"))
    (tmp_path / "empty").mkdir()
    for name, reason in {
        "a.bz2": "bunzip2", "a.xz": "unxz", "a.zip": "unzip", "a.arrow": "Parquet",
        "a.zst": "zstd", "a.gz": "damaged", "a.parquet": "no readable Parquet", "a.utf16": "UTF-16",
        "empty": "no data file", "none": "No such file",
    }.items():  # fmt: skip
        with pytest.raises(SourceError, match=reason) as error:
            rows(tmp_path / name)
        assert str(tmp_path / name) in str(error.value)
