"""Generation with HSTieredConnector beside vLLM's example connector: throughput and peak memory, in turn.

    python scripts/vllm_speed.py MODEL [--rounds N]

Both run the same prompts in the same configuration, each in processes of its own, alternating, and ours with
the default hot tier. The example connector is changed only so far that it runs on a CPU
(tests/vllm/example_on_cpu.py). Ends with status 1 when the medians are not what they must be. Needs an
environment with vLLM; scripts/test_vllm.sh makes one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS / "vllm"), str(TESTS)]

from english import different  # noqa: E402 - found by the line above
from vllm_run import run  # noqa: E402

#: At least this part of the example's throughput, by the clock or (on a machine that others use too) by CPU time.
LEAST_SPEED = 0.9
#: No more memory than the example, give or take what two runs of the same connector differ by.
MOST_MEMORY = 1.005


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    figures: dict[str, list[dict[str, Any]]] = {"HSTieredConnector": [], "example connector": []}
    for _ in range(options.rounds):
        for name in figures:
            with tempfile.TemporaryDirectory() as directory:
                figures[name].append(measure(Path(directory), options.model, ours=name == "HSTieredConnector"))
                print(f"{name}: {figures[name][-1]}", flush=True)
    medians = {
        name: {key: statistics.median(found[key] for found in runs) for key in runs[0]}
        for name, runs in figures.items()
    }
    print("\nmedians of", options.rounds)
    for name, found in medians.items():
        print(
            f"  {name:20} {found['tokens_per_sec']:8.1f} tokens/s  {found['tokens_per_cpu_sec']:8.1f} tokens/CPU s  "
            f"peak {found['peak_mb']:.0f} MB"
        )
    ours, theirs = medians["HSTieredConnector"], medians["example connector"]
    clock, cpu, memory = (ours[key] / theirs[key] for key in ("tokens_per_sec", "tokens_per_cpu_sec", "peak_mb"))
    print(f"  ratio: {clock:.3f} by the clock, {cpu:.3f} by CPU time, memory {memory:.4f}")
    return int(max(clock, cpu) < LEAST_SPEED or memory > MOST_MEMORY)


def measure(directory: Path, model: str, *, ours: bool) -> dict[str, float]:
    """One engine: a batch to warm up, then another, measured."""
    prompts = different(40)
    connector = {"cold_path": str(directory / "cold"), "max_cold_size": 2}
    result = run(
        directory,
        {
            "llm": {"model": model, "max_model_len": 1024, "max_num_batched_tokens": 512},
            "connector": connector if ours else None,
            "storage": str(directory / "files"),
            "batches": [
                {"prompts": prompts[:4], "sampling": {"max_tokens": 8}},
                {
                    "prompts": prompts[4:], "sampling": {"max_tokens": 32, "ignore_eos": True},
                    "kv": {"include_output_tokens": True},
                },
            ],
        },
    )  # fmt: skip
    batch = result["batches"][1]
    tokens = sum(len(request["ids"]) for request in batch["requests"])
    return {
        "tokens_per_sec": tokens / batch["seconds"],
        "tokens_per_cpu_sec": tokens / batch["cpu_seconds"],
        "peak_mb": sum(process["peak"] for process in result["processes"]) / 1024,
    }


if __name__ == "__main__":
    sys.exit(main())
