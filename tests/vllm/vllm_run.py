"""Runs vLLM once, in this process, as a JSON file says, and writes down what came out.

    python -m tests.vllm.vllm_run run.json

``run``: ``llm`` (arguments of LLM), ``connector`` (its extra config, or null for vLLM's example connector on
CPU), ``storage`` (the example's path), ``beside`` (another connector's module and class, and its extra config
if it has one, before ours; ``beside_last``: after it), ``before`` (a module and a function of it, called before
vLLM starts), ``drafter_limit`` (see limit_drafter), ``batches`` (each: ``prompts``, ``sampling``, ``kv``,
``reset``: first forget vLLM's prefix cache, ``probe``: a module and a function of it, called in this process with
the batch's requests), ``in_turn`` (with the example beside ours, see in_turn.py), ``out``. A prompt is text, token
ids or some of an earlier request's tokens.
Tests and scripts call ``run`` below, which starts this file as a child.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.waiting import wait_until

LAYERS = (2, 15, 27, 30)
ROOT = Path(__file__).resolve().parents[2]
_MEMORY = {"peak": "VmHWM", "anonymous": "RssAnon", "threads": "Threads"}
CONNECTOR = "lmcache_hs_backend.integrations.vllm.connector"


def run(
    directory: Path,
    spec: dict[str, Any],
    *,
    own_process: bool = True,
    timeout: float = 600,
    environ: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Run vLLM; ``own_process`` lets it have its engine process. Fails with the end of its log."""
    paths = {name: directory / f"{name}-{time.monotonic_ns()}" for name in ("spec", "out", "log")}
    paths["spec"].write_text(json.dumps({**spec, "out": str(paths["out"])}))
    with open(paths["log"], "w") as log:
        done = subprocess.run(
            [sys.executable, "-m", "tests.vllm.vllm_run", str(paths["spec"])],
            stdout=log, stderr=subprocess.STDOUT, timeout=timeout, check=False,
            env={**environment(own_process), **(environ or {})},
        )  # fmt: skip
    text = paths["log"].read_text(errors="replace")
    assert done.returncode == 0, f"vLLM ended with {done.returncode}:\n{text[-6000:]}"
    return {**json.loads(paths["out"].read_text()), "log": text}


def environment(own_process: bool) -> dict[str, str]:
    """The environment of a vLLM process on a CPU."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        **os.environ,
        "PYTHONPATH": path,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(own_process)),
    }


def llm_arguments(spec: dict[str, Any]) -> dict[str, Any]:
    """Arguments of LLM for a run."""
    connector = {
        "kv_connector": "HSTieredConnector",
        "kv_connector_module_path": CONNECTOR,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": spec["connector"],
    }
    example = {**connector, "kv_connector": "ExampleOnCpu", "kv_connector_module_path": "tests.vllm.example_on_cpu"}
    example["kv_connector_extra_config"] = {"shared_storage_path": spec.get("storage")}
    if spec["connector"] is None:
        connector = example
    elif spec.get("in_turn"):
        both = {"kv_connector_extra_config": {"connectors": [connector, example]}}
        connector = {**example, **both, "kv_connector": "InTurn", "kv_connector_module_path": "tests.vllm.in_turn"}
    if "beside" in spec:
        module, name, *extra = spec["beside"]
        other = {"kv_connector": name, "kv_role": "kv_both"}
        if module is not None:  # else it is one of vLLM's own
            other["kv_connector_module_path"] = module
        if extra:
            other["kv_connector_extra_config"] = extra[0]
        connector = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "connectors": [connector, other] if spec.get("beside_last") else [other, connector]
            },
        }
    return {
        "enforce_eager": True,
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS)}},
        },
        "kv_transfer_config": connector,
        "disable_log_stats": False,  # or nobody counts preemptions
        **spec["llm"],
    }


def main() -> None:
    from vllm import LLM, SamplingParams

    spec = json.loads(Path(sys.argv[1]).read_text())
    if "before" in spec:
        module, function = spec["before"]
        getattr(importlib.import_module(module), function)()
    llm = LLM(**llm_arguments(spec))
    if "drafter_limit" in spec:
        llm.collective_rpc(limit_drafter, args=(spec["drafter_limit"],))
    batches: list[dict[str, Any]] = []
    for batch in spec["batches"]:
        extra = {"kv_transfer_params": batch["kv"]} if batch.get("kv") else None
        sampling = SamplingParams(temperature=0, extra_args=extra, **batch["sampling"])
        prompts = [prompt_of(given, batches) for given in batch["prompts"]]
        if batch.get("reset"):
            assert llm.reset_prefix_cache()
        if spec.get("in_turn"):
            await_quiet()
        started, cpu = time.monotonic(), cpu_seconds()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds, cpu = time.monotonic() - started, cpu_seconds() - cpu
        requests = [
            {
                "prompt_ids": list(output.prompt_token_ids or ()),
                "ids": list(output.prompt_token_ids or ()) + list(output.outputs[0].token_ids),
                "finish": output.outputs[0].finish_reason,
                "cached": output.num_cached_tokens,  # of the prompt: not computed, from vLLM's own or another cache
                "kv": output.kv_transfer_params,
            }
            for output in outputs
        ]
        preemptions = sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
        batches.append(
            {
                "seconds": seconds,
                "cpu_seconds": cpu,
                "requests": requests,
                "figures": figures(),
                "preemptions": preemptions,
                "probe": probe(*batch["probe"], requests) if "probe" in batch else None,  # type: ignore[call-arg]
            }
        )
    processes = memory()
    llm.llm_engine.engine_core.shutdown()
    Path(spec["out"]).write_text(json.dumps({"batches": batches, "processes": processes}))
    if "beside" in spec:  # its threads may never end
        sys.stdout.flush()
        os._exit(0)


def await_quiet() -> None:
    """Return when the family has nothing left to do: a batch's files shall not be written in the next one's time."""
    busy = cpu_seconds()
    while True:
        time.sleep(0.2)
        if (now := cpu_seconds()) - busy < 0.03:
            return
        busy = now


def probe(module: str, function: str, requests: list[dict[str, Any]]) -> Any:
    """What a function of a test sees inside the process of vLLM."""
    return getattr(importlib.import_module(module), function)(requests)


def limit_drafter(worker: Any, tokens: int) -> None:
    """Make vLLM leave out the hidden states of batches with a request of more tokens."""
    worker.model_runner.effective_drafter_max_model_len = tokens


def family() -> list[int]:
    """This process and all processes below it."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found, size = {os.getpid()}, 0
    while len(found) > size:
        size = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return sorted(found)


def cpu_seconds() -> float:
    """CPU time of the family, as far as it is running."""
    ticks = 0
    for pid in family():
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def memory() -> list[dict[str, Any]]:
    """The processes of the family: name, peak resident memory, and what of today's is anonymous, in kB."""
    found = []
    for pid in family():
        lines = [line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
        status = {name: value.strip() for name, value in lines}
        figures = {name: int(status.get(field, "0").split()[0]) for name, field in _MEMORY.items()}
        found.append({"name": status["Name"], **figures})
    return found


def prompt_of(given: Any, batches: list[dict[str, Any]]) -> Any:
    """A prompt as LLM ready it."""
    if isinstance(given, str):
        return given
    if isinstance(given, list):
        return {"prompt_token_ids": given}
    return {"prompt_token_ids": batches[given["batch"]]["requests"][given["request"]]["ids"][: given["tokens"]]}


def figures() -> dict[str, int]:
    """What the connector has counted so far, where the engine runs in this process."""
    module = sys.modules.get("lmcache_hs_backend.integrations.vllm.protocol")
    workers = [] if module is None else list(module.workers_here.values())
    if not workers or workers[0].sink is None:
        return {}
    sink = workers[0].sink
    wait_until(lambda: sink.idle)
    return dict(sink.figures)


if __name__ == "__main__":
    main()
