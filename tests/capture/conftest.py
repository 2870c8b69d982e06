"""Tests of what turns rows into tokens: transformers and a tokenizer, no vLLM.

The tokenizer is SmolLM2's: its folder is ``HS_VLLM_MODEL``, or ``.venv-vllm/smollm2``, which scripts/vllm_env.sh makes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lmcache_hs_backend.capture.encode import BadRow, EncodedRow, RowEncoder
from lmcache_hs_backend.capture.sources import read_rows

ROOT = Path(__file__).resolve().parents[2]
CASES = Path(__file__).parent / "cases"
LARGEST_ID = 49151

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def smollm2() -> str:
    """SmolLM2's folder."""
    given = Path(os.environ.get("HS_VLLM_MODEL", ROOT / ".venv-vllm" / "smollm2"))
    if not (given / "tokenizer.json").exists():
        pytest.skip("SmolLM2's tokenizer is not here: scripts/vllm_env.sh makes it, HS_VLLM_MODEL names it")
    return str(given)


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
