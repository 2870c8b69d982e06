"""One training set by many machines: a plan, parts under any scheduler or on Ray, an end; the bytes of one run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_hs_backend.cli.extract import main
from lmcache_hs_backend.dataset.journal import STATE
from tests.support.dataset_capture import Writer, ids_of, rows_of, save_norm, store_prompts
from tests.support.extracting import contents, environment
from tests.support.ray_cluster import ray_cluster
from tests.support.waiting import wait_until

SYSTEM = ids_of(32, seed=999)
CONVERSATIONS = [SYSTEM + ids_of(20 + seed % 9, seed=seed) for seed in range(30)]
ROOT = Path(__file__).resolve().parents[2]


def rows_with_faults(ids: list[int], slot: int) -> torch.Tensor:
    """Rows as ever, except that two conversations are spoilt."""
    rows = rows_of(ids, slot)
    if ids in (CONVERSATIONS[3], CONVERSATIONS[20]):
        rows[-1] = float("nan")
    return rows


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store_prompts(tmp_path_factory.mktemp("stored") / "cold", CONVERSATIONS, make=rows_with_faults)


#: Runs the command, and stops for good when it has said of so many samples what became of them.
STOPPING = """
import signal, sys
from lmcache_hs_backend.cli.extract import main
from lmcache_hs_backend.dataset.export import Progress
add = Progress.add
def stopping(self, *result):
    add(self, *result)
    if self.published + self.rejected >= int(sys.argv[1]):
        signal.pause()
Progress.add = stopping
main(sys.argv[2:])
"""


def killed_after(samples: int, arguments: list[str], reached: Any) -> None:
    """Run the command until so many samples are filed, and kill it there."""
    command = [sys.executable, "-c", STOPPING, str(samples), *arguments]
    process = subprocess.Popen(command, env=environment())
    try:
        wait_until(lambda: process.poll() is not None or reached(), 120)
        assert process.poll() is None, "it ended by itself"
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("format_", ["speculators", "deepspec", "specforge"])
def test_parts_end_with_the_bytes_of_one_run_whoever_is_killed(stored: Path, tmp_path: Path, format_: str) -> None:
    norm = str(save_norm(tmp_path / "model"))
    options = [str(stored), "--format", format_, "--final-norm", norm, "--val-fraction", "0.2", "-q"]
    assert main([*options, "--out", str(tmp_path / "one")]) == 0
    out = tmp_path / "many"
    arguments = [*options, "--out", str(out)]
    assert main([*arguments, "--plan"]) == 0
    logs = out / STATE / "parts"

    def filed() -> int:
        return sum(path.read_bytes().count(b"\n") for path in logs.glob("2-of-4.*.jsonl"))

    killed_after(3, [*arguments, "--part", "2/4"], lambda: filed() >= 3)
    (torn,) = logs.glob("2-of-4.*.jsonl")
    with open(torn, "ab") as file:
        file.write(b'[7,"ok",12')
    for number in (4, 2, 1, 3):
        assert main([*arguments, "--part", f"{number}/4"]) == 0
    rewritten = [path for path in logs.glob("2-of-4.*.jsonl") if path != torn]
    done = {json.loads(line)[0] for line in torn.read_bytes().splitlines()[:-1]}
    assert done.isdisjoint(json.loads(line)[0] for path in rewritten for line in path.read_bytes().splitlines())
    journal = out / STATE / "journal.jsonl"
    killed_after(11, [*arguments, "--finish"], lambda: journal.exists() and journal.read_bytes().count(b"\n") >= 11)
    assert main([*arguments, "--finish"]) == 0
    assert contents(out) == contents(tmp_path / "one")
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["rejected"] == {"non_finite": 2}
    assert main([*arguments, "--finish"]) == 0, "it is complete"


def test_samples_of_one_prefix_are_in_one_part(tmp_path: Path) -> None:
    """Requests come in any order; a part has those that share chunks, and the set is in the order of the requests."""
    prompts = [ids_of(64, seed=seed) for seed in range(3)]
    mixed = [prompts[number % 3] + ids_of(20, seed=100 + number) for number in range(18)]
    with Writer(tmp_path / "cold") as writer:
        for ids in mixed:
            writer.put(ids)
    dataset = tmp_path / "rows.jsonl"
    dataset.write_text("".join(json.dumps({"input_ids": ids, "loss_mask": [1] * len(ids)}) + "\n" for ids in mixed))
    options = [str(tmp_path / "cold"), "--format", "modelopt", "--sequences", f"dataset:{dataset}", "-q"]
    assert main([*options, "--out", str(tmp_path / "one")]) == 0
    out = tmp_path / "many"
    assert main([*options, "--out", str(out), "--plan"]) == 0
    shares = []
    for number in (1, 2, 3):
        assert main([*options, "--out", str(out), "--part", f"{number}/3"]) == 0
        (log,) = (out / STATE / "parts").glob(f"{number}-of-3.*.jsonl")
        shares.append({json.loads(line)[0] % 3 for line in log.read_bytes().splitlines()})
    assert sorted(map(list, shares)) == [[0], [1], [2]]
    assert main([*options, "--out", str(out), "--finish"]) == 0
    assert contents(out) == contents(tmp_path / "one")


def test_what_is_missing_or_different_is_one_line(stored: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    arguments = [str(stored), "--format", "modelopt", "--out", str(out), "-q"]

    def refused(*options: str) -> str:
        assert main([*arguments, *options]) == 1
        return capsys.readouterr().err

    assert "has no plan" in refused("--part", "1/2")
    assert "has no plan" in refused("--finish")
    assert main([*arguments, "--plan"]) == 0
    assert "30 of 30 samples are not written yet" in refused("--finish")
    assert main([*arguments, "--part", "1/2"]) == 0
    assert "15 of 30 samples are not written yet" in refused("--finish")
    assert "another --min-tokens" in refused("--min-tokens", "3", "--part", "2/2")
    assert "leave out --resume" in refused("--part", "2/2", "--resume")
    assert main([*arguments, "--plan"]) == 0, "it goes on"
    assert main([*arguments, "--part", "1/2"]) == 0, "nothing is left to do"
    assert main([*arguments, "--part", "2/3"]) == 0, "parts may be cut anew"
    assert main([*arguments, "--part", "3/3"]) == 0
    assert main([*arguments, "--finish"]) == 0
    assert not (out / STATE).exists()


def test_a_planned_folder_can_be_written_by_one_machine_all_the_same(stored: Path, tmp_path: Path) -> None:
    options = [str(stored), "--format", "modelopt", "-q"]
    assert main([*options, "--out", str(tmp_path / "one")]) == 0
    out = str(tmp_path / "out")
    assert main([*options, "--out", out, "--plan"]) == 0
    assert main([*options, "--out", out, "--part", "1/3"]) == 0
    assert main([*options, "--out", out, "--resume"]) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "one")


def test_without_ray_the_error_names_the_extra(
    stored: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main([str(stored), "--format", "modelopt", "--out", str(tmp_path / "out"), "-q", "--ray"]) == 1
    assert "lmcache-hs-backend[ray]" in capsys.readouterr().err


@pytest.mark.slow
def test_a_ray_cluster_that_loses_a_node_ends_with_the_bytes_of_one_run(stored: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the extra [ray] is not installed")
    options = [str(stored), "--format", "modelopt", "-q"]
    assert main([*options, "--out", str(tmp_path / "one")]) == 0
    with ray_cluster(3) as (address, nodes, remove):
        out = tmp_path / "many"

        def written() -> int:
            return sum(path.read_bytes().count(b"\n") for path in (out / STATE / "parts").glob("*.jsonl"))

        command = [sys.executable, "-m", "lmcache_hs_backend.cli.extract", *options, "--out", str(out)]
        process = subprocess.Popen([*command, "--ray", address, "--ray-parts", "16"], env=environment())
        wait_until(lambda: written() >= 4 or process.poll() is not None, 240)
        assert process.poll() is None, "it ended before a node could be lost"
        remove(nodes[1])
        assert process.wait(400) == 0
    assert contents(out) == contents(tmp_path / "one")
