"""What the figures were taken on, in a few words."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path


def describe(directory: str | None) -> dict[str, str]:
    """Processor, memory, filesystem of the data, and the versions that matter."""
    versions = {}
    for package in ("torch", "lmcache", "safetensors"):
        versions[package] = importlib.metadata.version(package)
    return {
        "cpu": f"{os.cpu_count()} × {_field('/proc/cpuinfo', 'model name') or platform.machine()}",
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GB",
        "filesystem": _filesystem(directory or tempfile.gettempdir()),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **versions,
    }


@contextlib.contextmanager
def real_time(wanted: bool = True) -> Iterator[None]:
    """Schedule all threads of this process, and those that they start, before everything else. Needs root."""

    def schedule(policy: int, priority: int) -> None:
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setscheduler(int(task.name), policy, os.sched_param(priority))

    if not wanted:
        yield
        return
    schedule(os.SCHED_RR, 1)
    try:
        yield
    finally:
        schedule(os.SCHED_OTHER, 0)


def _field(path: str, name: str) -> str:
    with open(path) as file:
        for line in file:
            if line.startswith(name):
                return line.split(":", 1)[1].strip()
    return ""


def _filesystem(directory: str) -> str:
    directory = os.path.realpath(directory)
    best, kind = "", ""
    with open("/proc/mounts") as file:
        for line in file:
            _, mount, fstype, *_ = line.split()
            inside = directory == mount or directory.startswith(mount.rstrip("/") + "/")
            if inside and len(mount) > len(best):
                best, kind = mount, fstype
    return kind
