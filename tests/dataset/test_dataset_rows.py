"""No row leaves the reader unchecked: what no trainer notices is refused here, with its reason."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from lmcache_hs_backend.dataset.capture_info import Capture, Layers, choose_layers
from lmcache_hs_backend.dataset.errors import REASONS, DatasetError, RowRejected
from lmcache_hs_backend.dataset.index import ChunkIndex
from lmcache_hs_backend.dataset.plan import Choice, Plan, make_plan, plan_norm
from lmcache_hs_backend.dataset.rows import RowReader, Rows
from tests.support.dataset_capture import AUX, CHUNK, HIDDEN, LAST, Writer, ids_of, rows_of, stacked_of

IDS = ids_of(40)


def plan_of(cold_path: Path, **changes: object) -> Plan:
    return make_plan(Choice(cold_paths=(str(cold_path),), **changes))


def read(plan: Plan, *, stacked: bool = True, number: int = 0) -> Rows:
    return RowReader(plan.index, plan.layers).read(plan.samples[number], stacked=stacked)


def rejection(plan: Plan) -> RowRejected:
    with pytest.raises(RowRejected) as caught:
        read(plan)
    assert caught.value.reason in REASONS
    return caught.value


def files_by_start(cold_path: Path) -> dict[int, str]:
    return {chunk.start: chunk.files[0].path for chunk in ChunkIndex([str(cold_path)]).chunks}


def test_rows_are_those_that_were_stored(cold_path: Path) -> None:
    with Writer(cold_path) as writer:
        writer.put(IDS)
    rows = read(plan_of(cold_path))
    assert rows.stacked is not None
    assert torch.equal(rows.stacked, stacked_of(IDS))
    assert rows.ids.tolist() == IDS
    apart = read(plan_of(cold_path), stacked=False)
    assert apart.stacked is None
    assert torch.equal(apart.aux, rows.aux)
    assert torch.equal(apart.last, rows.last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_of_another_float_type_become_bf16(cold_path: Path, dtype: torch.dtype) -> None:
    with Writer(cold_path) as writer:
        writer.put(IDS, make=lambda ids, slot: rows_of(ids, slot, dtype=dtype))
    rows = read(plan_of(cold_path))
    assert rows.stacked is not None
    expected = torch.stack([rows_of(IDS, slot, dtype=dtype).bfloat16() for slot in (*AUX, LAST)], dim=1)
    assert torch.equal(rows.stacked, expected)


def test_only_the_layers_asked_for_are_read(cold_path: Path) -> None:
    with Writer(cold_path) as writer:
        writer.put(IDS)
    rows = read(plan_of(cold_path, layers=(4,), last_layer=LAST))
    assert rows.stacked is not None
    assert torch.equal(rows.stacked, stacked_of(IDS, (4, LAST)))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_refused_with_its_token(cold_path: Path, value: float) -> None:
    def broken(ids: Sequence[int], slot: int) -> torch.Tensor:
        rows = rows_of(ids, slot)
        if slot == 4:
            rows[21, 3] = value
        return rows

    with Writer(cold_path) as writer:
        writer.put(IDS, make=broken)
    error = rejection(plan_of(cold_path))
    assert error.reason == "non_finite"
    assert "layer 4" in str(error)
    assert "token 21" in str(error)


def test_a_float32_value_too_large_for_bf16_is_refused(cold_path: Path) -> None:
    with Writer(cold_path) as writer:
        writer.put(IDS, make=lambda ids, slot: torch.full((len(ids), HIDDEN), 3.4e38))
    assert rejection(plan_of(cold_path)).reason == "non_finite"


def test_a_flipped_bit_is_refused(cold_path: Path) -> None:
    with Writer(cold_path) as writer:
        writer.put(IDS)
    path = Path(files_by_start(cold_path)[16])
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert rejection(plan_of(cold_path)).reason == "bad_file"


def test_a_chunk_that_vanishes_meanwhile_is_refused(cold_path: Path) -> None:
    with Writer(cold_path) as writer:
        writer.put(IDS)
    plan = plan_of(cold_path)
    os.unlink(files_by_start(cold_path)[16])
    assert rejection(plan).reason == "gone"


def test_a_chunk_that_is_damaged_on_one_node_comes_from_the_other(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with Writer(tmp_path / name) as writer:
            writer.put(IDS)
    plan = make_plan(Choice(cold_paths=(str(tmp_path / "a"), str(tmp_path / "b"))))
    os.unlink(files_by_start(tmp_path / "a")[16])
    Path(files_by_start(tmp_path / "b")[0]).write_bytes(b"")
    rows = read(plan)
    assert rows.stacked is not None
    assert torch.equal(rows.stacked, stacked_of(IDS))


def test_a_layer_that_an_engine_adds_meanwhile_does_no_harm(cold_path: Path) -> None:
    with Writer(cold_path) as writer:
        writer.put(IDS)
        assert writer.store.flush(10) == 0
        plan = plan_of(cold_path, layers=AUX, last_layer=LAST)
        writer.put(IDS, (99,))
        assert writer.store.flush(10) == 0
    assert len(ChunkIndex([str(cold_path)]).chunks[0].files[0].layout.layers) == 5
    rows = read(plan)
    assert rows.stacked is not None
    assert torch.equal(rows.stacked, stacked_of(IDS))


def test_a_hidden_size_that_changes_is_refused(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    with Writer(one) as writer:
        writer.put(IDS[:CHUNK])
    with Writer(two) as writer:
        writer.put(IDS, make=lambda ids, slot: rows_of(ids, slot, hidden=64))
    plan = make_plan(Choice(cold_paths=(str(one), str(two))))
    assert rejection(plan).reason == "shape"


def test_a_dtype_that_changes_within_a_layer_is_refused(cold_path: Path) -> None:
    with Writer(cold_path) as writer:
        writer.put(IDS[:CHUNK])
        writer.put(IDS, make=lambda ids, slot: rows_of(ids, slot, dtype=torch.float16))
    assert rejection(plan_of(cold_path)).reason == "dtype"


def test_a_chunk_under_another_prompts_hash_is_refused(cold_path: Path) -> None:
    """A 64-bit hash collided: the file's parent link is right, but its rows belong to other tokens."""
    with Writer(cold_path) as writer:
        writer.put(IDS)
    plan = plan_of(cold_path)
    position = plan.samples[0].last
    chunk = plan.index.chunks[position]
    other = next(p for p, c in enumerate(plan.index.chunks) if c.start == 0)
    plan.index.chunks[position] = chunk._replace(parent=other, start=CHUNK, num_tokens=chunk.num_tokens)
    plan.samples[0] = plan.samples[0]._replace(tokens=CHUNK + chunk.num_tokens)
    assert rejection(plan).reason == "ids"


# -- which layers ----------------------------------------------------------------------------------------


def test_the_capture_decides_the_layers_when_nobody_does() -> None:
    capture = Capture("vllm", "vllm", "pre-norm", 30)
    layers, warnings = choose_layers(capture, [30, 2, 27, 15], None, None)
    assert (layers.aux, layers.last, warnings) == ((2, 15, 27), 30, [])
    assert (layers.vllm_ids(), layers.output_ids()) == ([2, 15, 27], [1, 14, 26])


def test_slots_that_are_layer_outputs_are_numbered_one_lower() -> None:
    layers, _ = choose_layers(Capture("hf", "output", "pre-norm", 30), [1, 14, 26, 29], None, None)
    assert (layers.last, layers.vllm_ids(), layers.output_ids()) == (29, [2, 15, 27], [1, 14, 26])


def test_an_unknown_numbering_is_taken_as_given_with_a_warning() -> None:
    layers, warnings = choose_layers(Capture(), [-1, 24, 0], [24, 0], -1)
    assert (layers.aux, layers.last, layers.vllm_ids()) == ((24, 0), -1, None)
    assert "taken as given" in warnings[0]


@pytest.mark.parametrize(
    ("aux", "last", "text"),
    [
        ([2, 9], 8, r"layer 9 was not captured \(stored 2, 4, 8\)"),
        ([2, 2], 8, "only once"),
        ([2, 8], 8, "only once"),
    ],
)
def test_impossible_layers_are_errors(aux: list[int], last: int, text: str) -> None:
    with pytest.raises(DatasetError, match=text):
        choose_layers(Capture("vllm", "vllm", "pre-norm", 8), [2, 4, 8], aux, last)


def test_without_a_capture_the_last_layer_must_be_named() -> None:
    with pytest.raises(DatasetError, match=r"--last-layer \(stored: 0, 1\)"):
        choose_layers(Capture(), [0, 1], [0], None)


def test_captures_that_disagree_are_not_mixed() -> None:
    with pytest.raises(DatasetError, match="captured in different ways"):
        Capture.of(['{"source": "vllm", "layer_ids": "vllm", "num_layers": 8}', '{"source": "lmcache"}'])


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"layer_ids": 3, "num_layers": true, "last_layer": []}'])
def test_a_malformed_capture_is_an_unknown_one(text: str) -> None:
    assert Capture.parse(text).layer_ids == ""
    assert Layers((), 0, Capture.parse(text)).convention == "storage slots"


def test_a_norm_of_another_hidden_size_is_an_error_before_any_row(cold_path: Path, norm_dir: Path) -> None:
    with Writer(cold_path) as writer:
        writer.put(IDS, make=lambda ids, slot: rows_of(ids, slot, hidden=64))
    with pytest.raises(DatasetError, match=r"hidden size 32; the rows have 64"):
        plan_norm(plan_of(cold_path), True, str(norm_dir))


@pytest.fixture
def norm_dir(tmp_path: Path) -> Path:
    from tests.support.dataset_capture import save_norm

    return save_norm(tmp_path / "model")
