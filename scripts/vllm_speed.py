"""Generation with HSTieredConnector beside vLLM's example connector: throughput and peak memory.

    python -m scripts.vllm_speed MODEL [--rounds N] [--engines N]

Throughput is measured in one engine that has both connectors, which take turns batch by batch (tests/vllm/in_turn.py),
and a ratio is taken within a round: engines in processes of their own differ by a quarter, and a machine that others
use by a factor of two within minutes. Memory is that of engines of their own, ours with the default hot tier. The
example connector is changed only so far that it runs on a CPU (tests/vllm/example_on_cpu.py). Ends with status 1
when a figure is not what it must be. Needs an environment with vLLM; scripts/vllm_env.sh makes one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.vllm.english import different
from tests.vllm.vllm_run import run

NAMES = ("HSTieredConnector", "example connector")
#: At least this part of the example's throughput.
LEAST_SPEED = 0.9
#: No more memory than the example, give or take what two runs of the same connector differ by.
MOST_MEMORY = 1.005
PROMPTS = 32
WARM_UP = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=12, help="of one batch each, for the throughput")
    parser.add_argument("--engines", type=int, default=3, help="of each connector, for the memory")
    options = parser.parse_args()
    ratio = throughput(options.model, options.rounds)
    memory = peak_memory(options.model, options.engines)
    return int(ratio < LEAST_SPEED or memory > MOST_MEMORY)


def throughput(model: str, rounds: int) -> float:
    """Ours over the example's, the median of the rounds."""
    batches = []
    for number in range(2 * (rounds + WARM_UP)):
        connector = (number + number // 2) % 2  # whoever was first in one round is second in the next
        batches.append(batch(number, connector=connector))
    results = run_engine(model, batches, connector={}, in_turn=True)["batches"][2 * WARM_UP :]
    speeds: dict[int, list[tuple[float, float]]] = {0: [], 1: []}
    for given, result in zip(batches[2 * WARM_UP :], results, strict=True):
        tokens = sum(len(request["ids"]) for request in result["requests"])
        speeds[given["kv"]["connector"]].append((tokens / result["seconds"], tokens / result["cpu_seconds"]))
    clock, cpu = ([a[kind] / b[kind] for a, b in zip(*speeds.values(), strict=True)] for kind in (0, 1))
    print("tokens/s round by round, and their ratio:")
    for ours, theirs in zip(*speeds.values(), strict=True):
        print(f"  {ours[0]:7.1f} {theirs[0]:7.1f}   {ours[0] / theirs[0]:.3f}")
    low, median, high = statistics.quantiles(clock, n=4)
    for number, name in enumerate(NAMES):
        print(f"{name}: {statistics.median(speed for speed, _ in speeds[number]):.1f} tokens/s")
    print(f"throughput: {median:.3f} ({low:.3f} to {high:.3f}), by CPU time {statistics.median(cpu):.3f}", flush=True)
    return median


def peak_memory(model: str, engines: int) -> float:
    """Ours over the example's: the sum over all processes, the median of some engines."""
    peaks: dict[str, list[float]] = {name: [] for name in NAMES}
    for _ in range(engines):
        for name in NAMES:
            result = run_engine(model, [batch(0), batch(1)], connector={} if name == NAMES[0] else None)
            peaks[name].append(sum(process["peak"] for process in result["processes"]) / 1024)
    for name, found in peaks.items():
        print(f"{name}: peak {', '.join(f'{peak:.0f}' for peak in found)} MB")
    ratio = statistics.median(peaks[NAMES[0]]) / statistics.median(peaks[NAMES[1]])
    print(f"memory: {ratio:.4f}")
    return ratio


def batch(number: int, **kv: Any) -> dict[str, Any]:
    """Prompts with other tokens for every number, or a prefix cache would save the work."""
    return {
        "prompts": [text.replace("user\n", f"user\n({number}) ", 1) for text in different(PROMPTS)],
        "sampling": {"max_tokens": 32, "ignore_eos": True},
        "kv": {"include_output_tokens": True, **kv},
    }


def run_engine(model: str, batches: list[dict[str, Any]], *, connector: dict[str, Any] | None, **more: Any) -> Any:
    """``connector`` None: vLLM's example."""
    with tempfile.TemporaryDirectory() as path:
        directory = Path(path)
        if connector is not None:
            connector = {"cold_path": str(directory / "cold"), "max_cold_size": 8, **connector}
        llm = {"model": model, "max_model_len": 1024, "max_num_batched_tokens": 512}
        spec = {"llm": llm, "connector": connector, "storage": str(directory / "files"), "batches": batches, **more}
        return run(directory, spec, timeout=1800)


if __name__ == "__main__":
    sys.exit(main())
