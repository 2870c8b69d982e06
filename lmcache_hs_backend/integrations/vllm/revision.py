"""What tells two versions of a local model directory apart."""

from __future__ import annotations

import hashlib
import os

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def model_revision(model: str) -> str:
    """A digest of a model directory's config.json and of its weight files' names, sizes and times.

    Empty for a name that is no directory. Raises OSError when the directory cannot be read.
    """
    if not os.path.isdir(model):
        return ""
    digest = hashlib.sha256()
    try:
        with open(os.path.join(model, "config.json"), "rb") as file:
            digest.update(file.read())
    except FileNotFoundError:
        digest.update(b"no config.json")
    for entry in sorted(os.scandir(model), key=lambda entry: entry.name):
        if entry.name.endswith(_WEIGHTS):
            info = entry.stat()
            digest.update(f"{entry.name}\0{info.st_size}\0{info.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:16]
