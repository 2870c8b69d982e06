"""speculators' own EAGLE-3 draft, trained twice on the same samples: from files, and straight from the cold path.

    python train.py MODEL_DIR OUT COLD STEPS PLOT.png

The full command line needs an accelerator, so this calls what it calls: the draft that `speculators train --dry-run`
makes, its data loaders, its model and loss. Both runs must see the same tensors and lose the same.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from hs_connectors import FileTransfer, HiddenStatesBackend
from speculators.losses.utils import resolve_loss_config
from speculators.model import SpeculatorModel
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import ArrowDataset
from speculators.train.dataloader import create_train_val_loaders

import lmcache_hs_backend.integrations.speculators as tiered  # before speculators' command line

TOKENS, VOCAB = 512, "4096"


def draft(model_dir: str, out: str, init: Path) -> Any:
    """A fresh draft, the same each time."""
    if not init.exists():
        command = [
            sys.executable, "-m", "lmcache_hs_backend.cli.train", "--dry-run", "--speculator-type", "eagle3",
            "--verifier-name-or-path", model_dir, "--data-path", out, "--save-path", str(init),
            "--target-layer-ids", "2", "15", "27", "--total-seq-len", str(TOKENS), "--draft-vocab-size", VOCAB,
            "--draft-attn-impl", "eager", "--loss-implementation", "eager", "--num-workers", "0",
            "--hidden-states-backend", "file",
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    config = Eagle3SpeculatorConfig.from_pretrained(str(init))
    config.transformer_layer_config._attn_implementation = "eager"
    return SpeculatorModel.from_pretrained(str(init), config=config).float()


def train(model: Any, transfer: Any, model_dir: str, out: str, steps: int) -> list[float]:
    torch.manual_seed(0)
    loader, _ = create_train_val_loaders(
        data_path=out, total_seq_len=TOKENS, hidden_states_dtype=torch.float32, transfer=transfer,
        vllm_endpoint="", on_missing="raise", verifier_name_or_path=model_dir, request_timeout=1, max_retries=0,
        generation_validation_retries=0, max_consecutive_generation_failures=1, hidden_size=576,
        num_target_layers=3, num_workers=0, prefetch_factor=2, preprocess=shift_batch, train_data_ratio=0.9,
    )  # fmt: skip
    loss_config = resolve_loss_config("kl_div", "eager")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model.train()
    losses: list[float] = []
    epoch = 0
    while len(losses) < steps:
        if hasattr(loader.batch_sampler, "set_epoch"):
            loader.batch_sampler.set_epoch(epoch)
        epoch += 1
        for batch in loader:
            batch.pop("error_records", None)
            batch.pop("__recovery__", None)
            result = model(**batch, loss_config=loss_config)
            loss = result[1] if isinstance(result, tuple) else result.loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if len(losses) % 10 == 0:
                print(f"  step {len(losses)}: loss {losses[-1]:.4f}", flush=True)
            if len(losses) == steps:
                break
    return losses


def plot(curves: dict[str, list[float]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for (label, losses), style in zip(curves.items(), ("-", "--"), strict=True):
        axes.plot(range(1, len(losses) + 1), losses, style, label=label, linewidth=1.4)
    axes.set(xlabel="step", ylabel="KL divergence", title="EAGLE-3 draft of SmolLM2-135M, speculators 0.9.0, CPU")
    axes.set_yscale("log")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(model_dir: str, out: str, cold: str, steps: str, picture: str) -> None:
    parser = __import__("argparse").ArgumentParser()
    backend = HiddenStatesBackend.registry[tiered.NAME]
    backend.add_train_args(parser)
    options = parser.parse_args(["--hs-cold-path", cold, "--hs-final-norm", model_dir])
    transfers = {
        "from files": FileTransfer(Path(out) / "hidden_states"),
        "from the cold path": backend.from_train_args(options, out),
    }
    one, two = (ArrowDataset(4096, out, transfer=transfer, on_missing="raise") for transfer in transfers.values())
    assert all(torch.equal(one[i][key], two[i][key]) for i in range(len(one)) for key in one[i])
    print(f"{len(one)} samples are the same tensors from files and from the cold path", flush=True)
    init = Path(out).parent / "draft"
    shutil.rmtree(init, ignore_errors=True)
    curves = {}
    for label, transfer in transfers.items():
        print(label, flush=True)
        curves[label] = train(draft(model_dir, out, init), transfer, model_dir, out, int(steps))
    plot(curves, picture)
    files, live = curves.values()
    first, last = (sum(files[span]) / 10 for span in (slice(0, 10), slice(-10, None)))
    print(f"loss, mean of ten steps: {first:.3f} → {last:.3f}; largest difference between the runs "
          f"{max(abs(a - b) for a, b in zip(files, live, strict=True)):.2e}")  # fmt: skip
    assert last < first / 2
    assert max(abs(a - b) for a, b in zip(files, live, strict=True)) < 1e-3 * first


if __name__ == "__main__":
    main(*sys.argv[1:])
