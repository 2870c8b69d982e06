"""Steps of acceptance.sh: rows of a Hugging Face forward, acceptance in vLLM's speculative decoding, and the report.

    python acceptance.py rows MODEL SET NAME=LAYERS…     sets beside SET with the rows of a Hugging Face forward
    python acceptance.py accept MODEL DRAFTER PROMPTS OUT.json [--answer N] [--draft-tokens K]
    python acceptance.py report DIR NAME…                table, acceptance.json, acceptance.png

Layers are numbered as vLLM does: k is the residual stream after k decoder layers, the model's number of layers the one
before the final norm.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

CONTEXT = 1024
KV_BYTES = 200 << 20  # one sequence at a time
FLOAT32_SAMPLES = 20  # a float32 forward is slow
LABELS = {
    "chunks": "captured rows",
    "chunks-2": "captured rows,\nanother seed",
    "hf": "Hugging Face\nforward",
    "wrong-last": "last layer\none too early",
    "wrong-aux": "auxiliary layers\none too early",
}


# -- rows of a Hugging Face forward ---------------------------------------------------------------------


def rows(options: argparse.Namespace) -> None:
    """Write one set for each ``NAME=LAYERS`` with SET's samples, and say how far SET's own rows are from float32."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    source = Path(options.set)
    chosen = {name: [int(k) for k in ids.split(",")] for name, ids in (item.split("=") for item in options.sets)}
    folders = {name: source.parent / f"set-{name}" for name in chosen}
    for folder in folders.values():
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("hidden_states", ".*", "manifest*"))
        (folder / "hidden_states").mkdir()
    stored = json.loads((source / "manifest.json").read_text())["layers"]["slots"]
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
    exact = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    files = sorted((source / "hidden_states").glob("hs_*.safetensors"), key=lambda path: int(path.stem[3:]))
    errors: dict[str, list[torch.Tensor]] = {"chunks": [], "hf": []}
    for number, path in enumerate(files):
        sample = load_file(path)
        ids = sample["token_ids"]
        streams = forward(model, ids)
        for name, layers in chosen.items():
            tensors = {"hidden_states": torch.stack([streams[k] for k in layers], dim=1), "token_ids": ids}
            save_file(tensors, folders[name] / "hidden_states" / path.name)
        if number < FLOAT32_SAMPLES:
            true = forward(exact, ids)
            wanted = torch.stack([true[k] for k in stored], dim=1)
            own = torch.stack([streams[k] for k in stored], dim=1)
            for name, given in (("chunks", sample["hidden_states"]), ("hf", own)):
                difference = (given.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
                errors[name].append(difference[1:])  # token 0's rows are a hundred times as long as the others
        if number % 100 == 0:
            print(f"{number} of {len(files)} samples", flush=True)
    print(f"{len(files)} samples → {', '.join(map(str, folders.values()))}")
    print(f"relative error of a row against a float32 forward, ‖row - exact‖ / ‖exact‖, token 0 left out, "
          f"{min(len(files), FLOAT32_SAMPLES)} samples, layers {stored}:")  # fmt: skip
    figures = {}
    for name, parts in errors.items():
        every = torch.cat(parts)
        figures[name] = {"median": every.median(dim=0).values.tolist(), "largest": every.amax(dim=0).tolist()}
        for measure, values in figures[name].items():
            print(f"  {name:6} {measure:7} " + "  ".join(f"{100 * value:.2f} %" for value in values))
    (source.parent / "row-errors.json").write_text(json.dumps({"layers": stored, **figures}))


def forward(model: Any, ids: Any) -> list[Any]:
    """The residual stream before each decoder layer, and before the final norm: tensors ``[S, H]``."""
    import torch

    streams: list[torch.Tensor] = []
    modules = [*model.model.layers, model.model.norm]
    hooks = [
        module.register_forward_pre_hook(lambda _, arguments: streams.append(arguments[0][0].clone()))
        for module in modules
    ]
    try:
        with torch.inference_mode():
            model.model(ids[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    assert len(streams) == len(modules)
    return streams


# -- acceptance ------------------------------------------------------------------------------------------


def accept(options: argparse.Namespace) -> None:
    """Answer each prompt, one at a time, with the drafter; count what the model accepted."""
    from vllm import LLM, SamplingParams

    arguments: dict[str, Any] = {}
    if options.drafter != "none":
        arguments["speculative_config"] = {
            "method": "eagle3", "model": last_checkpoint(Path(options.drafter)),
            "num_speculative_tokens": options.draft_tokens,
        }  # fmt: skip
    llm = LLM(
        model=options.model, dtype="bfloat16", enforce_eager=True, max_model_len=CONTEXT, max_num_seqs=1,
        enable_prefix_caching=False, disable_log_stats=False, kv_cache_memory_bytes=KV_BYTES, **arguments,
    )  # fmt: skip
    sampling = SamplingParams(temperature=0, max_tokens=options.answer)
    answers = []
    before = counters(llm)
    for line in Path(options.prompts).read_text(encoding="utf-8").splitlines():
        begin = time.perf_counter()
        output = llm.chat(json.loads(line)["messages"], sampling, use_tqdm=False)[0].outputs[0]
        seconds = time.perf_counter() - begin
        after = counters(llm)
        steps, accepted = after[0] - before[0], [b - a for a, b in zip(before[1], after[1], strict=True)]
        before = after
        answers.append({"tokens": list(output.token_ids), "steps": steps, "accepted": accepted, "seconds": seconds})
    Path(options.out).write_text(json.dumps({"answers": answers, "draft_tokens": options.draft_tokens}))
    print(f"{len(answers)} answers → {options.out}")


def last_checkpoint(folder: Path) -> str:
    epochs = [path for path in folder.iterdir() if path.name.isdigit() and path.is_dir()]
    return str(max(epochs, key=lambda path: int(path.name)).resolve())


def counters(llm: Any) -> tuple[int, list[int]]:
    """Steps in which something was proposed, and how often the token at each place was accepted, since the start."""
    steps, accepted = 0, list[int]()
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            steps = metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            accepted = metric.values
    return steps, accepted


# -- report ----------------------------------------------------------------------------------------------


def report(options: argparse.Namespace) -> int:
    """The table and the plot. 1 when captured rows and a forward's are not alike, or a wrong layer is not worse."""
    folder = Path(options.dir)
    plain = [answer["tokens"] for answer in json.loads((folder / "accept-none.json").read_text())["answers"]]
    results: dict[str, Any] = {}
    counts = {}
    for name in options.names:
        answers = json.loads((folder / f"accept-{name}.json").read_text())["answers"]
        counts[name] = [(answer["steps"], sum(answer["accepted"])) for answer in answers]
        steps = sum(answer["steps"] for answer in answers)
        places = [sum(column) for column in zip(*(answer["accepted"] for answer in answers), strict=True)]
        results[name] = {
            "accepted_per_step": sum(places) / steps,
            "interval": interval([counts[name]], lambda rates: rates[0]),
            "rate_by_place": [place / steps for place in places],
            "steps": steps,
            "same_answers_as_without_drafter": sum(
                answer["tokens"] == tokens for answer, tokens in zip(answers, plain, strict=True)
            ),
        }
    print(f"{len(plain)} held-out prompts; intervals are 95 % over prompts")
    print("| trained on | accepted draft tokens a step | interval | by place | chunks minus this | same answers |")
    print("|---|---|---|---|---|---|")
    failed = False
    for name, result in results.items():
        low, high = interval([counts["chunks"], counts[name]], lambda rates: rates[0] - rates[1])
        result["chunks_minus_this"] = [low, high]
        failed |= name == "hf" and not low <= 0 <= high
        failed |= name == "wrong-last" and low <= 0
        cells = (
            LABELS.get(name, name).replace("\n", " "),
            f"{result['accepted_per_step']:.3f}",
            "{:.3f} to {:.3f}".format(*result["interval"]),
            ", ".join(f"{rate:.3f}" for rate in result["rate_by_place"]),
            "" if name == "chunks" else f"{low:+.3f} to {high:+.3f}",
            f"{result['same_answers_as_without_drafter']} of {len(plain)}",
        )
        print(f"| {' | '.join(cells)} |")
    (folder / "acceptance.json").write_text(json.dumps(results, indent=1))
    plot(results, folder / "acceptance.png")
    print("NOT as it should be" if failed else "as it should be")
    return int(failed)


def interval(sets: list[list[tuple[int, int]]], measure: Any) -> tuple[float, float]:
    """Where the measure of the sets' rates lies in 95 of 100 draws of as many prompts (the same ones in each set)."""
    draw = random.Random(0)
    prompts = range(len(sets[0]))
    values = []
    for _ in range(2000):
        drawn = draw.choices(prompts, k=len(prompts))
        values.append(measure([sum(a[i][1] for i in drawn) / sum(a[i][0] for i in drawn) for a in sets]))
    values.sort()
    return values[49], values[1949]


def plot(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.8))
    names = list(results)
    heights = [results[name]["accepted_per_step"] for name in names]
    whiskers = [
        [height - results[name]["interval"][0] for name, height in zip(names, heights, strict=True)],
        [results[name]["interval"][1] - height for name, height in zip(names, heights, strict=True)],
    ]
    colours = ["#c44e52" if name.startswith("wrong") else "#4c72b0" for name in names]
    axes.bar([LABELS.get(name, name) for name in names], heights, yerr=whiskers, capsize=4, color=colours)
    axes.set(ylabel="accepted draft tokens a step", title="EAGLE-3 drafters of SmolLM2-135M in vLLM, held-out prompts")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("rows")
    command.add_argument("model")
    command.add_argument("set")
    command.add_argument("sets", nargs="+", metavar="NAME=LAYERS")
    command.set_defaults(run=rows)
    command = commands.add_parser("accept")
    for name in ("model", "drafter", "prompts", "out"):
        command.add_argument(name)
    command.add_argument("--answer", type=int, default=64)
    command.add_argument("--draft-tokens", type=int, default=3)
    command.set_defaults(run=accept)
    command = commands.add_parser("report")
    command.add_argument("dir")
    command.add_argument("names", nargs="+")
    command.set_defaults(run=report)
    options = parser.parse_args()
    return options.run(options) or 0


if __name__ == "__main__":
    sys.exit(main())
