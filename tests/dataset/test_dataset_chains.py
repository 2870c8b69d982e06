"""Chunks become sequences: every maximal one once, whoever stored it, and rows of a dataset where they lie."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_hs_backend.chunk import token_bytes
from lmcache_hs_backend.dataset import chains
from lmcache_hs_backend.dataset.chains import Report, RequestRecord, Sample
from lmcache_hs_backend.dataset.errors import DatasetError
from lmcache_hs_backend.dataset.forest import UsableForest
from lmcache_hs_backend.dataset.index import ChunkIndex
from tests.support.dataset_capture import AUX, CHUNK, LAST, MODEL, VLLM, Writer, ids_of

SLOTS = (*AUX, LAST)


def forest_of(*cold_paths: Path, slots: Sequence[int] = SLOTS, model: str | None = None) -> UsableForest:
    return UsableForest(ChunkIndex([str(path) for path in cold_paths], model), slots)


def tokens_of(forest: UsableForest, sample: Sample) -> list[int]:
    """The token ids of a sample, as they lie in the chunk files."""
    ids = b"".join(forest.index.ids(position) or b"" for position in forest.index.chain(sample.last))
    return list(memoryview(ids).cast("q"))[: sample.tokens]


def leaves_of(forest: UsableForest) -> list[list[int]]:
    return [tokens_of(forest, sample) for sample in chains.leaves(forest, Report("leaves"))]


def test_every_maximal_sequence_is_found_once(cold_path: Path) -> None:
    long, other = ids_of(50), ids_of(32) + ids_of(40, seed=1)
    with Writer(cold_path) as writer:
        for ids in (long[:16], long[:32], long, other, ids_of(5, seed=2)):
            writer.put(ids)
    assert sorted(leaves_of(forest_of(cold_path))) == sorted([long, other, ids_of(5, seed=2)])


def test_a_tail_that_a_longer_sequence_extends_is_none_of_its_own(cold_path: Path) -> None:
    ids = ids_of(70)
    with Writer(cold_path) as writer:
        for length in (3, 20, 25, 40, 41, 70):
            writer.put(ids[:length])
    assert leaves_of(forest_of(cold_path)) == [ids]


def test_a_tail_that_only_resembles_a_longer_one_is_kept(cold_path: Path) -> None:
    ids = ids_of(40)
    almost = [*ids[:24], ids[24] + 1]
    with Writer(cold_path) as writer:
        writer.put(ids)
        writer.put(almost)
    assert sorted(leaves_of(forest_of(cold_path))) == sorted([ids, almost])


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=8))
def test_leaves_are_exactly_the_prompts_that_begin_no_other(tmp_path: Path, prompts: list[list[int]]) -> None:
    cold_path = Path(tempfile.mkdtemp(dir=tmp_path))
    with Writer(cold_path, chunk=3) as writer:
        for prompt in prompts:
            writer.put(prompt, slots=(LAST,))
    expected = {tuple(p) for p in prompts if not any(q != p and q[: len(p)] == p for q in prompts)}
    assert sorted(leaves_of(forest_of(cold_path, slots=(LAST,)))) == sorted(map(list, expected))
    shutil.rmtree(cold_path)


def test_neighbours_share_chunks_and_the_order_depends_on_contents_only(tmp_path: Path) -> None:
    families = [[ids_of(32, seed=f) + ids_of(20, seed=10 * f + m) for m in range(3)] for f in range(1, 4)]
    prompts = [prompt for family in families for prompt in family]
    for number, order in enumerate((prompts, prompts[::-1])):
        with Writer(tmp_path / str(number)) as writer:
            for prompt in order:
                writer.put(prompt)
    one, two = leaves_of(forest_of(tmp_path / "0")), leaves_of(forest_of(tmp_path / "1"))
    assert one == two
    heads = [tuple(ids[:32]) for ids in one]
    assert len({*heads}) == 3
    assert sum(a != b for a, b in itertools.pairwise(heads)) == 2


def test_the_same_chunk_on_two_nodes_and_two_ranks_counts_once(tmp_path: Path) -> None:
    ids = ids_of(50)
    for number, (rank, salt) in enumerate(((0, ""), (1, ""), (0, "another hash seed"))):
        with Writer(tmp_path / str(number), rank=rank, salt=salt) as writer:
            writer.put(ids)
    forest = forest_of(*(tmp_path / str(number) for number in range(3)))
    assert (forest.index.num_files, len(forest.index)) == (12, 4)
    assert leaves_of(forest) == [ids]


def test_halves_of_a_sequence_on_two_nodes_join_when_their_hashes_chain(tmp_path: Path) -> None:
    ids = ids_of(64)
    with Writer(tmp_path / "a") as writer:
        writer.put(ids)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for name, keep in (("a", 0), ("b", 32)):
        index = ChunkIndex([str(tmp_path / name)])
        for chunk in index.chunks:
            if (chunk.start < 32) != (keep == 0):
                os.unlink(chunk.files[0].path)
    assert leaves_of(forest_of(tmp_path / "b")) == []
    assert leaves_of(forest_of(tmp_path / "a", tmp_path / "b")) == [ids]


def test_layers_of_one_chunk_may_come_from_two_nodes(tmp_path: Path) -> None:
    ids = ids_of(40)
    for number, slots in enumerate((AUX, (LAST,))):
        with Writer(tmp_path / str(number)) as writer:
            writer.put(ids, slots)
    assert leaves_of(forest_of(tmp_path / "0")) == []
    assert leaves_of(forest_of(tmp_path / "0", tmp_path / "1")) == [ids]


def test_a_sequence_ends_where_a_layer_does(cold_path: Path) -> None:
    ids = ids_of(64)
    with Writer(cold_path) as writer:
        writer.put(ids, AUX)
        writer.put(ids[:32], (LAST,))
    forest = forest_of(cold_path)
    assert leaves_of(forest) == [ids[:32]]
    assert sum(forest.unusable.values()) == 2


def test_chunks_without_their_beginning_are_left_out_and_counted(cold_path: Path) -> None:
    ids = ids_of(64)
    with Writer(cold_path) as writer:
        writer.put(ids)
    first = next(chunk for chunk in ChunkIndex([str(cold_path)]).chunks if chunk.start == 0)
    os.unlink(first.files[0].path)
    forest = forest_of(cold_path)
    assert leaves_of(forest) == []
    assert forest.unusable == {"a chunk before it is missing or unusable": 3}


def test_a_damaged_file_is_counted_and_the_rest_goes_on(cold_path: Path) -> None:
    with Writer(cold_path) as writer:
        writer.put(ids_of(16))
        writer.put(ids_of(16, seed=1))
    victim = ChunkIndex([str(cold_path)]).chunks[0].files[0].path
    Path(victim).write_bytes(b"not a chunk")
    forest = forest_of(cold_path)
    assert sum(forest.index.problems.values()) == 1
    assert len(leaves_of(forest)) == 1


def test_rows_of_two_models_are_not_mixed_but_chosen_between(cold_path: Path) -> None:
    for revision in ("v1", "v2"):
        with Writer(cold_path, revision=revision) as writer:
            writer.put(ids_of(20, seed=len(revision)))
    with pytest.raises(DatasetError, match=r"several models .*v1.*v2.*--model"):
        forest_of(cold_path)
    assert forest_of(cold_path, model=f"{MODEL}@v2").index.model == f"{MODEL}@v2/bfloat16"
    with pytest.raises(DatasetError, match="'gpt'; there are: org/tiny@v1"):
        forest_of(cold_path, model="gpt")


@pytest.mark.parametrize("what", ["missing", "empty"])
def test_what_is_no_cold_path_is_named(tmp_path: Path, what: str) -> None:
    if what == "empty":
        (tmp_path / what).mkdir()
    with pytest.raises(DatasetError, match=what):
        ChunkIndex([str(tmp_path / what)])


# -- a prepared dataset ----------------------------------------------------------------------------------


def match(forest: UsableForest, rows: Sequence[Sequence[int]]) -> tuple[dict[int, int], Report]:
    """Row → covered tokens; every covered part has the row's own token ids."""
    report = Report("dataset")
    samples = chains.matched(forest, rows, report)
    for sample in samples:
        assert tokens_of(forest, sample) == list(rows[sample.row])[: sample.tokens]
    return {sample.row: sample.tokens for sample in samples}, report


def test_rows_of_a_dataset_are_found_by_their_tokens(cold_path: Path) -> None:
    long, other = ids_of(50), ids_of(32) + ids_of(30, seed=1)
    with Writer(cold_path) as writer:
        for ids in (long[:40], long, other):
            writer.put(ids)
    rows = [
        long,  # to the end of the tail
        long[:45],  # inside the tail of a longer one
        long[:40],  # a tail of its own
        long[:7],  # inside the first chunk
        other[:33],
        long[:20] + ids_of(30, seed=9),  # the first chunk only
        ids_of(40, seed=8),  # not at all
        [],
        [*long, 1, 2, 3],  # beyond what was stored
    ]
    covered, report = match(forest_of(cold_path), rows)
    assert covered == {0: 50, 1: 45, 2: 40, 3: 7, 4: 33, 5: 16, 8: 50}
    assert report.covered() == (6, 2, 1)
    assert [entry for entry in report.coverage if entry[0] in (5, 6)] == [(5, 50, 16), (6, 40, 0)]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=5),
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=8),
)
def test_whatever_begins_a_stored_prompt_is_covered_whole(
    tmp_path: Path, prompts: list[list[int]], rows: list[list[int]]
) -> None:
    cold_path = Path(tempfile.mkdtemp(dir=tmp_path))
    with Writer(cold_path, chunk=3) as writer:
        for prompt in prompts:
            writer.put(prompt, slots=(LAST,))
    rows = [*rows, prompts[0]]
    covered, _ = match(forest_of(cold_path, slots=(LAST,)), rows)
    for number, row in enumerate(rows):
        whole = any(prompt[: len(row)] == row for prompt in prompts)
        assert (covered.get(number) == len(row)) == whole
    shutil.rmtree(cold_path)


def test_a_dataset_of_another_tokenizer_is_an_error_that_says_so(cold_path: Path) -> None:
    with Writer(cold_path) as writer:
        writer.put(ids_of(40))
    with pytest.raises(DatasetError, match=r"none of the dataset's 2 rows .*tokenizer"):
        match(forest_of(cold_path), [ids_of(40, seed=5), ids_of(3, seed=6)])


# -- requests --------------------------------------------------------------------------------------------


def record(ids: Sequence[int], prompt: int, request_id: str, parent: int) -> str:
    def digest(length: int) -> str:
        return xxhash.xxh3_128_hexdigest(token_bytes(list(ids[:length]))) if length else ""

    return json.dumps(
        {
            "version": 1, "request_id": request_id, "prompt_tokens": prompt, "num_tokens": len(ids),
            "prefix": digest(len(ids)), "parent_prefix": digest(parent), "finish_reason": "stop", "capture": VLLM,
        }
    )  # fmt: skip


def test_request_records_give_lengths_and_survive_a_longer_chunk(cold_path: Path) -> None:
    first, grown = ids_of(20), ids_of(50)
    with Writer(cold_path) as writer:
        writer.put(ids_of(30, seed=3))
        writer.put(grown)  # begins with the first request, whose own tail is gone
    lines = [
        record(first, 12, "turn-1", CHUNK),
        record(grown, 40, "turn-2", 48),
        record(ids_of(30, seed=3), 0, "other", CHUNK),
        record(ids_of(30, seed=4), 5, "evicted", CHUNK),
        record(grown, 40, "turn-2", 48),
        '{"request_id": "cut sho',
    ]
    folder = Path(writer.directory) / "sequences"
    folder.mkdir(exist_ok=True)
    (folder / "0001.jsonl").write_text("\n".join(lines) + "\n")
    forest, report = forest_of(cold_path), Report("requests")
    samples = chains.requests(forest, report)
    assert [(s.id, s.tokens, s.prompt_tokens) for s in samples] == [
        ("turn-1", 20, 12),
        ("turn-2", 50, 40),
        ("other", 30, 0),
    ]
    assert [tokens_of(forest, s) for s in samples] == [first, grown, ids_of(30, seed=3)]
    assert report.left_out == {"a chunk of the request is no longer there": 1, "unreadable request record": 1}


def test_without_request_records_the_error_says_what_to_use(cold_path: Path) -> None:
    with Writer(cold_path) as writer:
        writer.put(ids_of(20))
    with pytest.raises(DatasetError, match=r"no request records.*leaves"):
        chains.requests(forest_of(cold_path), Report("requests"))


# -- limits ----------------------------------------------------------------------------------------------


def test_bounds_cut_and_leave_out_and_do_not_repeat(cold_path: Path) -> None:
    shared = ids_of(32)
    with Writer(cold_path) as writer:
        for seed in (1, 2):
            writer.put(shared + ids_of(20, seed=seed))
        writer.put(ids_of(9, seed=3))
    forest, report = forest_of(cold_path), Report("leaves")
    samples = chains.bounded(forest.index, chains.leaves(forest, report), 10, 30, report)
    assert [tokens_of(forest, sample) for sample in samples] == [shared[:30]]
    assert sum(report.left_out.values()) == 2


@pytest.mark.parametrize("of", [1, 3, 7])
def test_shares_are_disjoint_and_together_everything(of: int) -> None:
    samples = [Sample(str(number), 0, 1) for number in range(20)]
    shares = [chains.share(samples, number, of) for number in range(1, of + 1)]
    assert [sample for share in shares for sample in share] == samples
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        "null",
        '{"version": 1, "request_id": "a"}',
        '{"version": 1, "request_id": "a", "prompt_tokens": 1, "num_tokens": 1e999, "prefix": "", "parent_prefix": ""}',
        '{"version": 1, "request_id": "a", "prompt_tokens": 1, "num_tokens": 2, "prefix": "zz", "parent_prefix": ""}',
        '{"version": 1, "request_id": "a", "prompt_tokens": -1, "num_tokens": 2, "prefix": "'
        + "00" * 16
        + '", "parent_prefix": ""}',
        "[" * 100_000,
    ],
    ids=lambda line: line[:30] or "empty",
)
def test_a_line_that_is_no_request_record_is_one_kind_of_error(line: str) -> None:
    with pytest.raises(ValueError):
        RequestRecord.parse(line)
