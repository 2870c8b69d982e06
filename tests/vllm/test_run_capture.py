"""scripts/capture.sh with vLLM in its own process: a dataset in, tiers filled; killed, and gone on with."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import yaml
from transformers import AutoTokenizer

from tests.support.waiting import wait_until
from tests.vllm.english import different
from tests.vllm.reference import ColdPath, HuggingFace, relative_error
from tests.vllm.vllm_run import LAYERS, environment

ROOT = Path(__file__).resolve().parents[2]
ROWS = 12


def test_a_capture_that_is_killed_goes_on_where_it_was(model_dir: str, truth: HuggingFace, tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / "configs" / "vllm_capture.yaml").read_text())
    config["layers"] = list(LAYERS)
    # Two at a time, so that some rows are done while others wait.
    config["engine"] = {"max_num_seqs": 2, "max_model_len": 1024, "enforce_eager": True, "dtype": "bfloat16"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    prompts = different(ROWS)
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    cold = tmp_path / "cold"
    command = [str(ROOT / "scripts" / "capture.sh"), model_dir, str(tmp_path / "data.jsonl")]
    command += ["--config", str(tmp_path / "config.yaml"), "--cold-path", str(cold), "--max-tokens", "48"]
    environ = {**environment(True), "PYTHON": sys.executable}

    def recorded() -> int:
        return sum(len(path.read_text().splitlines()) for path in cold.glob("*/sequences/*.jsonl"))

    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_until(lambda: recorded() >= 3 or process.poll() is not None, 240)
        assert process.poll() is None, (tmp_path / "log").read_text()[-5000:]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def again() -> tuple[int, str]:
        """How many rows were done before, and what the command says at the end."""
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=True)
        found = re.search(rf"{ROWS} different rows, (\d+) done already", done.stderr)
        assert found is not None
        return int(found[1]), " ".join(done.stderr.split())[-200:]

    before, last = again()
    print(f"killed with {before} of {ROWS} rows done")
    assert 3 <= before < ROWS
    assert f"{ROWS} of {ROWS} rows are in" in last
    assert again()[0] == ROWS
    stored = ColdPath(str(cold))
    assert len({record["request_id"] for record in stored.records()}) == ROWS
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    for prompt in prompts[::4]:
        ids = tokenizer(prompt)["input_ids"]
        want = truth.rows(ids)
        for layer in LAYERS[:3]:
            got = stored.rows(ids, layer)
            assert len(got) == len(ids)
            assert relative_error(got, want[layer]) < 0.01
